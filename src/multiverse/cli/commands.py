"""The commands by name, and their exit status. Their modules are imported only when they are needed: all of them
together take longer to import than most commands take."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

DONE, NOT_DONE, USAGE, NO_ANSWER, SUPERSEDED, INTERRUPTED, CLOSED = 0, 1, 2, 3, 4, 130, 141

EXIT_CODES = {
    DONE: "It was done, and nothing is wrong.",
    NOT_DONE: (
        "It was refused or has failed, or what was asked for does not exist; for status, site check, config"
        " check, doctor and audit: something is wrong that can be remedied."
    ),
    USAGE: "The command line is wrong.",
    NO_ANSWER: "The daemon could not be asked, or has not answered: it does not run, or may not be used.",
    SUPERSEDED: "Of multiverse daemon: another controller commands the site, so this one must not be started again.",
    INTERRUPTED: "It was interrupted (Ctrl-C, SIGTERM, SIGHUP). --watch ends so with 0.",
    CLOSED: "Its output was closed by the reader.",
}


COMMANDS = {
    "jobs": "jobs",
    "vms": "jobs",
    "hosts": "hosts",
    "move": "hosts",
    "top": "top",
    "utilization": "hosts",
    "leases": "hosts",
    "status": "status",
    "repair": "status",
    "prune": "status",
    "explain": "jobs",
    "capacity": "jobs",
    "timeline": "jobs",
    "save": "saved",
    "checkpoint": "saved",
    "resume": "saved",
    "saved": "saved",
    "rebalance": "rebalance",
    "audit": "status",
    "template": "images",
    "image": "images",
    "daemon": "daemon",
    "agent": "daemon",
    "config": "settings",
    "site": "site",
    "doctor": "site",
    "completion": "commands",
}
"""The module of each command, in the order of the help. It has NAME_app, or `app`, with commands of its own, or a
function of the command's name."""

GROUP = "multiverse.commands"
"""The entry points by which other distributions add commands: the name of a command, and its module, as above."""


COMPLETE = "_MULTIVERSE_COMPLETE"  # the variable that a shell's script sets as it asks how a command line may go on


def modules() -> Mapping[str, str]:
    """The module of each command, by name: this distribution's commands first, then those of others."""
    added = {one.name: one.value for one in entry_points(group=GROUP)}
    return {name: f"multiverse.cli.{module}" for name, module in COMMANDS.items()} | {
        name: added[name] for name in sorted(added.keys() - COMMANDS)
    }


def build(names: Iterable[str] | None = None) -> typer.Typer:
    """The command line with these commands, or all."""
    app = typer.Typer(
        name="multiverse",
        help="A virtual machine of its own for every Slurm job.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(lambda: None)  # without a callback, a single command would have no name
    for name in modules() if names is None else names:
        # Other distributions are looked for only where this one does not have the command: that reads many files.
        module = import_module(f"multiverse.cli.{COMMANDS[name]}" if name in COMMANDS else modules()[name])
        group = getattr(module, f"{name}_app", None) or getattr(module, "app", None)
        if group is not None:
            app.add_typer(group, name=name)
        else:
            app.command(name)(getattr(module, name))
    return app


def needed(arguments: list[str]) -> Iterable[str] | None:
    """The commands that these arguments may name: one, or None, for all of them, for help and for errors."""
    first = arguments[0] if arguments else ""
    return [first] if first in COMMANDS or first in modules() else None


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print a shell's completion script. Packages install it; or, for one user:

    multiverse completion bash > ~/.local/share/bash-completion/completions/multiverse"""
    sys.stdout.write(script(shell))


def script(shell: Shell) -> str:
    return f"{get_completion_script(prog_name='multiverse', complete_var=COMPLETE, shell=shell.value)}\n"


def completed_words() -> list[str]:
    """The words after `multiverse` that a script wants to complete."""
    completion_init()
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return line.split()[1:]
