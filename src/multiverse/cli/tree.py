"""The commands as data: for completion and manual pages, which are derived from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from typer.main import get_command

from multiverse.cli.commands import build


@dataclass(frozen=True, slots=True)
class Parameter:
    """An option with its names, or an argument (no names). `value` is what stands for its value (empty: a flag)."""

    names: tuple[str, ...]
    value: str
    help: str
    required: bool
    several: bool


@dataclass(frozen=True, slots=True)
class CommandNode:
    """A command: the words that name it, after `multiverse`; what it does; its parameters and its own commands."""

    words: tuple[str, ...]
    help: str
    parameters: tuple[Parameter, ...]
    commands: tuple[CommandNode, ...] = ()

    def all(self) -> list[CommandNode]:
        """Itself and all commands below."""
        return [self, *(one for command in self.commands for one in command.all())]

    @property
    def options(self) -> list[str]:
        """The names of all options."""
        return [name for one in self.parameters for name in one.names]


def tree(names: Iterable[str] | None = None) -> CommandNode:
    """These commands, or all that are installed."""
    return _node(get_command(build(names)), ())


def _node(command: Any, words: tuple[str, ...]) -> CommandNode:
    below = getattr(command, "commands", {})
    found = tuple(_node(one, (*words, name)) for name, one in below.items() if not getattr(one, "hidden", False))
    parameters = tuple(_parameter(one) for one in command.params if not getattr(one, "hidden", False))
    shown = Parameter(("-h", "--help"), "", "Show the help and exit.", required=False, several=False)
    return CommandNode(words, " ".join((command.help or "").split()), (*parameters, shown), found)


def _parameter(one: Any) -> Parameter:
    option = one.param_type_name == "option"
    flag = option and bool(getattr(one, "is_flag", False))
    value = "" if flag else (one.metavar or one.name or "").upper()
    names = (*one.opts, *one.secondary_opts) if option else ()
    several = one.nargs == -1 or bool(getattr(one, "multiple", False))
    return Parameter(tuple(names), value, " ".join((one.help or "").split()), bool(one.required), several)
