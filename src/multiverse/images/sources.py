"""Files of apt sources (sources.list(5)): which suites they name, and what of them is of one release of Debian."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LINE = re.compile(r"\s*deb\s+(?:\[[^\]]*\]\s+)?\S+\s+(?P<suite>\S+)")
_SUITES = re.compile(r"^Suites:(?P<suites>.*(?:\n[ \t].*)*)", re.MULTILINE | re.IGNORECASE)


def suites(name: str, text: str) -> list[str]:
    """The suites of the sources in a file, in order."""
    return [suite for _, found in _entries(name, text) for suite in found]


def of_suite(name: str, text: str, suite: str) -> str:
    """What a file has of a release: of the suite, its updates and security updates. Empty if it has nothing of it."""
    kept = []
    for entry, found in _entries(name, text):
        own = [one for one in found if one == suite or one.startswith((f"{suite}-", f"{suite}/"))]
        if own and name.endswith(".sources"):
            kept.append(_SUITES.sub(f"Suites: {' '.join(own)}", entry))
        elif own:
            kept.append(entry)
    return "".join(f"{entry}\n\n" if name.endswith(".sources") else f"{entry}\n" for entry in kept)


def _entries(name: str, text: str) -> Iterator[tuple[str, list[str]]]:
    """The sources in a file, each with its suites."""
    if name.endswith(".sources"):
        plain = re.sub(r"(?m)^#.*\n?", "", text)
        for stanza in re.split(r"\n\s*\n", plain.strip("\n")):
            if found := _SUITES.search(stanza):
                yield stanza, found["suites"].split()
    else:
        for line in text.splitlines():
            if match := _LINE.match(line):
                yield line, [match["suite"]]
