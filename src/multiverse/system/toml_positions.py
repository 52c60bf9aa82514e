"""Finds the lines of keys in a TOML document, which `tomllib` does not tell.

The document must be one that `tomllib` has accepted: nothing is checked here. What a value is does not matter, only
where it ends.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left
from collections.abc import Mapping

KeyPath = tuple[str | int, ...]
"""Names of tables and keys, and indexes of arrays, from the outside to the inside."""

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_NAME = re.compile(r"""[ \t]*("(?:\\.|[^"\\])*"|'[^']*'|[A-Za-z0-9_-]+)[ \t]*""")
# One or two quotation marks may stand right before the three that end a string of several lines.
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?:"{0,2})' r"|'''.*?'''(?:'{0,2})" r'|"(?:\\.|[^"\\])*"' r"|'[^']*'", re.DOTALL
)
_OTHER = re.compile(r"[^,\]}#\n]*")  # a number, a date or a word


def positions(text: str) -> Mapping[KeyPath, int]:
    """The line, from 1, in which each key, table and element of an array appears first."""
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._ends = [match.start() for match in re.finditer("\n", text)]
        self._found: dict[KeyPath, int] = {}
        self._tables: dict[KeyPath, int] = {}  # how many tables each array of tables has so far

    def scan(self) -> Mapping[KeyPath, int]:
        table: KeyPath = ()
        while self._skip(_BLANK) < len(self._text):
            if self._take("[["):
                table = self._header(array=True)
                self._take("]]")
            elif self._take("["):
                table = self._header(array=False)
                self._take("]")
            else:
                self._pair(table)
        return self._found

    def _header(self, *, array: bool) -> KeyPath:
        path: KeyPath = ()
        *outer, last = self._names()
        for name in outer:
            path = self._last(self._note((*path, name)))
        path = self._note((*path, last))
        if array:
            self._tables[path] = self._tables.get(path, 0) + 1
            path = self._note(self._last(path))
        return path

    def _last(self, path: KeyPath) -> KeyPath:
        """The last table of an array of tables; the path of another table itself."""
        return (*path, self._tables[path] - 1) if path in self._tables else path

    def _pair(self, table: KeyPath) -> None:
        path = table
        for name in self._names():
            path = self._note((*path, name))
        self._take("=")
        self._skip(_BLANK)
        self._value(path)

    def _names(self) -> list[str]:
        names = []
        while True:
            match = _NAME.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            quoted = match[1][0] in "\"'"
            names.append(tomllib.loads(f"x = {match[1]}")["x"] if quoted else match[1])
            if not self._take("."):
                return names

    def _value(self, path: KeyPath) -> None:
        if self._take("["):
            number = 0
            while not self._closes("]"):
                self._value(self._note((*path, number)))
                number += 1
        elif self._take("{"):
            while not self._closes("}"):
                self._pair(path)
        else:
            self._skip(_STRING if self._text[self._at] in "\"'" else _OTHER)

    def _closes(self, bracket: str) -> bool:
        """Whether an array or an inline table ends here. Otherwise its next element is here."""
        self._skip(_BLANK)
        if self._take(","):
            self._skip(_BLANK)
        return self._take(bracket)

    def _note(self, path: KeyPath) -> KeyPath:
        self._found.setdefault(path, bisect_left(self._ends, self._at) + 1)
        return path

    def _take(self, text: str) -> bool:
        there = self._text.startswith(text, self._at)
        self._at += len(text) * there
        return there

    def _skip(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._at
