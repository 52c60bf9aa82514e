"""How words are written, of reasons and of alerts, with figures and names in them.

`{name}` is a figure, in the form that follows it after a colon, if one does. What is in [ ] is left out if something
named there is missing, zero or empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from math import ceil
from string import Formatter
from typing import Any

_OPTIONAL = re.compile(r"\[([^\]]*)\]")


def some(names: Sequence[str], most: int = 8) -> str:
    """Names for a sentence, the first of them if they are many."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def when(at: float) -> str:
    """A time for people, rounded up to the minute."""
    return f"by {_minute(ceil(at / 60) * 60)} UTC"


def moment(at: float) -> str:
    """A Unix time for people."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def for_long(seconds: float) -> str:
    """A length of time for a sentence: 4 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = max(0, round(seconds))
    for unit, below, word, smaller in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit} {word}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def _span(seconds: float) -> str:
    """Whole seconds, minutes or hours: a figure that is as old as the last observation."""
    if seconds < 120:
        return f"{max(0, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 7200 else f"{round(seconds / 3600)} h"


def _minute(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}"


_FORMS: dict[str, Any] = {
    "when": when,
    "moment": moment,
    "minute": _minute,
    "long": for_long,
    "if": lambda _: "",
    "span": _span,
    "or now": lambda left: f"in {_span(left)} at the earliest" if left > 0 else "now",
    "or at once": lambda left: f"in {_span(left)} at the earliest" if left > 0 else "at once",
    "times": lambda number: "once" if number == 1 else f"{number} times in a row",
    "jobs": lambda number: "1 job is" if number == 1 else f"{number} jobs are",
    "vms": lambda number: "a VM of " if number == 1 else f"{number} VMs of ",
    "vms are": lambda number: "VM is" if number == 1 else f"{number} VMs are",
    "list": lambda texts: ", ".join(texts),
    "four": lambda texts: some(texts, 4),
    "": lambda value: "; ".join(value) if isinstance(value, list) else str(value),
}
"""How a figure is written; others are as in Python."""


class _Words(Formatter):
    """A reason that lacks what its words name is still worded: who asks why a job waits must not be refused."""

    def get_value(self, key: Any, args: Any, kwargs: Any) -> Any:
        return kwargs.get(key, "")

    def format_field(self, value: Any, format_spec: str) -> str:
        form = _FORMS.get(format_spec)
        return "" if value == "" else str(form(value) if form else format(value, format_spec))


_WORDS = _Words()


@cache
def parts_of(words: str) -> tuple[tuple[str, bool, frozenset[str]], ...]:
    """The parts of a kind's words, each with whether it may be left out, and what it names."""

    def found() -> Iterator[tuple[str, bool, frozenset[str]]]:
        for number, part in enumerate(_OPTIONAL.split(words)):
            yield part, bool(number % 2), frozenset(name for _, name, _, _ in _WORDS.parse(part) if name)

    return tuple(found())


def worded(words: str, values: Mapping[str, Any]) -> str:
    """The words with these values."""
    parts = parts_of(words)
    shown = [part for part, optional, names in parts if not optional or all(values.get(name) for name in names)]
    return _WORDS.vformat("".join(shown), (), values)
