"""All keys of the settings with what their models say of them: for the manual page, the reference and the examples.

Meanings are strings below the fields, which Python forgets: they are read from the source, so only where they are
needed.
"""

from __future__ import annotations

import ast
import inspect
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from multiverse.config import (
    Allowed,
    AtReload,
    Example,
    Settings,
    Unit,
    has_mark,
    marks_of,
    table_class,
    toml_value,
)


@dataclass(frozen=True, slots=True)
class SettingKey:
    """A key of a table. Values are as a file has them."""

    name: str
    meaning: str
    kind: str  # of its values, in words
    unit: str | None  # empty: a plain number; None: the types say nothing of it
    limits: str  # which values are right; empty: all of the kind
    default: str | None  # None: it is not set
    required: bool
    example: str  # empty: the default is one
    reloaded: bool


@dataclass(frozen=True, slots=True)
class SettingTable:
    """A table, or an array of tables. The keys outside of any table are in one without a name."""

    name: str
    meaning: str
    is_array: bool
    keys: tuple[SettingKey, ...]

    @property
    def heading(self) -> str:
        """The line that begins it; empty for the keys outside of any table."""
        return f"[[{self.name}]]" if self.is_array else f"[{self.name}]" if self.name else ""

    def path(self, key: SettingKey) -> str:
        return f"{self.name}.{key.name}" if self.name else key.name


def setting_tables() -> list[SettingTable]:
    """All tables of the settings: first the keys outside of any table, then the tables by name."""
    first, *others = tables_of(Settings)
    return [first, *sorted(others, key=lambda one: one.name)]


def tables_of(cls: Any) -> list[SettingTable]:
    """The tables of a document of that class: first the keys outside of any table, then the tables in their order."""
    hints = get_type_hints(cls, include_extras=True)
    classes = {name: table_class(_plain(hint)) for name, hint in hints.items()}
    plain = tuple(one for one in _keys(cls, False) if classes[one.name] is None)
    tables = [SettingTable("", "Keys that stand before the first table.", False, plain)]
    for name, table in classes.items():
        if table is not None:
            is_array = get_origin(_plain(hints[name])) is tuple
            examples = "\n".join(str(mark) for mark in marks_of(hints[name]) if isinstance(mark, Example))
            keys = tuple(_keys(table, has_mark(hints[name], AtReload), tomllib.loads(examples)))
            tables.append(SettingTable(name, _one_line(table.__doc__), is_array, keys))
    return tables


def _keys(cls: Any, reloaded: bool, examples: Mapping[str, object] = MappingProxyType({})) -> Iterator[SettingKey]:
    about, hints = _meanings(cls), get_type_hints(cls, include_extras=True)
    for one in fields(cls):
        hint = hints[one.name]
        plain, marks = _plain(hint), list(marks_of(hint))
        yield SettingKey(
            name=one.name,
            meaning=about.get(one.name, ""),
            kind=_kind(plain),
            unit=next((str(mark) for mark in reversed(marks) if isinstance(mark, Unit)), None),
            limits=next((str(mark) for mark in marks if isinstance(mark, Allowed)), "") or _limits(plain, marks),
            default=None if one.default in (None, MISSING) else toml_value(one.default),
            required=one.default is MISSING and one.default_factory is MISSING,
            example=toml_value(examples[one.name])
            if one.name in examples
            else next((str(mark) for mark in marks if isinstance(mark, Example)), ""),
            reloaded=reloaded or has_mark(hint, AtReload),
        )


def _meanings(cls: type) -> dict[str, str]:
    """The string below each field."""
    found = {}
    body = _classes(cls.__module__)[cls.__name__].body
    for this, below in pairwise(body):
        match this, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                found[name] = _one_line(text)
    return found


@cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    source = ast.parse(inspect.getsource(import_module(module)))
    return {one.name: one for one in source.body if isinstance(one, ast.ClassDef)}


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _plain(hint: Any) -> Any:
    """A type without annotations, and without None."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if NoneType in get_args(hint):
        return _plain(next(one for one in get_args(hint) if one is not NoneType))
    return hint


_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
_LISTS = {
    tuple[str, ...]: "array of texts",
    tuple[int, int]: "array of two whole numbers",
    tuple[tuple[str, str], ...]: "array of arrays of two texts",
}


def _kind(plain: Any) -> str:
    if choices := _choices(plain):
        return "one of the words" if isinstance(choices[0], str) else "one of the numbers"
    return _KINDS.get(plain) or _LISTS.get(plain, "")


def _choices(plain: Any) -> tuple[Any, ...]:
    if get_origin(plain) is Literal:
        return get_args(plain)
    if isinstance(plain, type) and issubclass(plain, StrEnum):
        return tuple(plain)
    return ()


def _limits(plain: Any, marks: list[Any]) -> str:
    if choices := _choices(plain):
        return ", ".join(map(str, choices))
    least = next((mark.ge for mark in marks if isinstance(mark, Ge)), None)
    above = next((mark.gt for mark in marks if isinstance(mark, Gt)), None)
    most = next((mark.le for mark in marks if isinstance(mark, Le)), None)
    if below := next((mark.lt for mark in marks if isinstance(mark, Lt)), None):
        most = below - 1  # type: ignore[operator]  # only whole numbers have it
    if least is not None:
        return f"{least} to {most}" if most is not None else f"at least {least}"
    if above is not None:
        return f"above {above}" + (f", at most {most}" if most is not None else "")
    return ""
