"""The commands by name. Each has a module of its own, which is imported only if it is needed: all of them together
take longer to import than most commands take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points

import typer

COMMANDS = {
    "jobs": "jobs",
    "vms": "vms",
    "hosts": "hosts",
    "top": "top",
    "utilization": "utilization",
    "leases": "leases",
    "status": "status",
    "repair": "repair",
    "prune": "prune",
    "explain": "explain",
    "capacity": "capacity",
    "timeline": "timeline",
    "audit": "audit",
    "template": "template",
    "image": "image",
    "daemon": "daemon",
    "agent": "agent",
    "site": "site",
    "doctor": "doctor",
    "completion": "completion",
}
"""By name, in the order of the help, the module of a command: it has an `app` with commands of its own, or a function
of the same name."""

GROUP = "multiverse.commands"
"""The entry points by which other distributions add commands: the name of a command, and its module, as above."""


COMPLETE = "_MULTIVERSE_COMPLETE"
"""The variable that a shell's script sets as it asks how a command line may go on."""


def modules() -> Mapping[str, str]:
    """The module of each command, by name: those of this distribution, and then those that others add."""
    added = {one.name: one.value for one in entry_points(group=GROUP)}
    return {name: _own(name) for name in COMMANDS} | {name: added[name] for name in sorted(added.keys() - COMMANDS)}


def _own(name: str) -> str:
    """The module of a command of this distribution."""
    return f"multiverse.cli.{COMMANDS[name]}"


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
    app.callback()(_together)
    for name in modules() if names is None else names:
        # Other distributions are looked for only where this one does not have the command: that reads many files.
        module = import_module(_own(name) if name in COMMANDS else modules()[name])
        if (group := getattr(module, "app", None)) is not None:
            app.add_typer(group, name=name)
        else:
            app.command(name)(getattr(module, name))
    return app


def _together() -> None:
    """A virtual machine of its own for every Slurm job."""  # without a callback, a single command would have no name


def needed(arguments: list[str]) -> Iterable[str] | None:
    """The commands that these arguments may name: one, or None, for all of them, for help and for errors."""
    first = arguments[0] if arguments else ""
    return [first] if first in COMMANDS or first in modules() else None
