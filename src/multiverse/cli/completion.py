"""`multiverse completion bash|zsh|fish`: the script by which a shell asks this program how a command line may go on."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

from multiverse.cli.commands import COMPLETE


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print a shell's completion script. Packages install it; or, for one user:

    multiverse completion bash > ~/.local/share/bash-completion/completions/multiverse"""
    sys.stdout.write(script(shell))


def script(shell: Shell) -> str:
    """The script for a shell."""
    return f"{get_completion_script(prog_name='multiverse', complete_var=COMPLETE, shell=shell.value)}\n"


def words() -> list[str]:
    """The words after `multiverse` that a script wants to complete."""
    completion_init()
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return line.split()[1:]
