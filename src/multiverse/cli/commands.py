"""The commands by name, and their exit status. Their modules are imported only when they are needed: all of them
together take longer to import than most commands take."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

from multiverse import __version__

DONE, NOT_DONE, USAGE, NO_ANSWER, SUPERSEDED, INTERRUPTED, CLOSED = 0, 1, 2, 3, 4, 130, 141

EXIT_CODES = {
    DONE: "It was done, and nothing is wrong.",
    NOT_DONE: (
        "It was refused or has failed, or what was asked for does not exist; for status, site check, config check,"
        " doctor, selftest and audit: something is wrong that can be remedied."
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
    "images": "jobs",
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
    "selftest": "site",
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


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"multiverse {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _empty() -> typer.Typer:
    app = typer.Typer(
        name="multiverse",
        help="A virtual machine of its own for every Slurm job.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)  # without a callback, a single command would have no name
    return app


def build(names: Iterable[str] | None = None) -> typer.Typer:
    """The command line with these commands, or all."""
    app = _empty()
    for name in modules() if names is None else names:
        # Other distributions are looked for only where this one does not have the command: that reads many files.
        module = import_module(f"multiverse.cli.{COMMANDS[name]}" if name in COMMANDS else modules()[name])
        group = getattr(module, f"{name}_app", None) or getattr(module, "app", None)
        if group is not None:
            app.add_typer(group, name=name)
        else:
            app.command(name)(getattr(module, name))
    return app


def for_arguments(arguments: list[str]) -> typer.Typer:
    """The command line that these arguments need: with the one command that they name, or an outline of all, for help,
    for errors and for the completion of a command's name."""
    first = arguments[0] if arguments else ""
    return build([first]) if first in COMMANDS or first in modules() else outline()


def outline() -> typer.Typer:
    """All commands with their help alone. It is read from their sources, because importing these takes seconds."""
    app, sources = _empty(), dict[str, ast.Module]()
    for name, module in modules().items():
        if module not in sources:
            spec = find_spec(module)
            sources[module] = ast.parse(Path(spec.origin).read_text() if spec and spec.origin else "")
        app.command(name, help=_help(sources[module], name))(lambda: None)
    return app


def _help(source: ast.Module, name: str) -> str:
    """The help of a command in its module: of the function of its name, or else of its `typer.Typer(help=...)`."""
    groups = {f"{name}_app", "app"}
    for one in source.body:
        if isinstance(one, ast.FunctionDef) and one.name == name and not one.decorator_list:
            return ast.get_docstring(one) or ""
        if (
            isinstance(one, ast.Assign)
            and isinstance(one.value, ast.Call)
            and groups & {target.id for target in one.targets if isinstance(target, ast.Name)}
        ):
            found = (word.value for word in one.value.keywords if word.arg == "help")
            return next((str(value.value) for value in found if isinstance(value, ast.Constant)), "")
    return ""


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
