"""Files that a program rendered and an administrator may change: who wrote the present content.

The last line of a rendered file is a comment with a digest of all lines above it. So the file itself tells whether it
was changed, wherever it was copied to.
"""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

_LAST = re.compile(
    r"(?P<text>.*\n)?(?:#|--) Rendered by multiverse; sha256 of the above: (?P<digest>[0-9a-f]{16})\n", re.S
)


class Origin(StrEnum):
    RENDERED = "rendered"  # and unchanged since
    CHANGED = "changed"  # rendered, and then changed by somebody
    FOREIGN = "foreign"  # written by somebody else


class SiteFile(NamedTuple):
    """A file at its place on the site's machine. One that is `begun` is changed by the daemon: what is there stays."""

    path: Path
    content: str
    mode: int
    begun: bool = False


def signed(text: str, comment: str = "#") -> str:
    """The text with its last line. `comment` begins a comment in the file's language: `#` or `--`."""
    return f"{text}{comment} Rendered by multiverse; sha256 of the above: {_digest(text)}\n"


def origin(text: str) -> Origin:
    """Who wrote this text. A text in which a rendered file's last line is missing counts as foreign."""
    match = _LAST.fullmatch(text)
    if match is None:
        return Origin.CHANGED if "Rendered by multiverse; sha256" in text else Origin.FOREIGN
    return Origin.RENDERED if _digest(match["text"] or "") == match["digest"] else Origin.CHANGED


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
