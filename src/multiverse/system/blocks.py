"""Lines of ours in a file of somebody else's: a block that tells its begin, its end, and whether it was changed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

_BEGIN = (
    "multiverse: the next lines were added by `multiverse site install`, and `multiverse site remove` takes them back"
)
_BLOCK = re.compile(
    rf"^(?P<text>(?P<comment>#|--) {re.escape(_BEGIN)}\n(?P<lines>(?:.*\n)*?))"
    r"(?P=comment) multiverse: end of these lines, sha256 (?P<digest>[0-9a-f]{16})\n",
    re.M,
)


def added(text: str, lines: Sequence[str], at: int, comment: str = "#") -> str:
    """The text with a block of these lines before its line number `at`. `comment` begins a comment in its language."""
    block = "".join(f"{line}\n" for line in (f"{comment} {_BEGIN}", *lines))
    before = text.splitlines(keepends=True)
    if before and not before[-1].endswith("\n"):
        before[-1] += "\n"
    end = f"{comment} multiverse: end of these lines, sha256 {_digest(block)}\n"
    return "".join([*before[:at], block, end, *before[at:]])


def lines_of(text: str) -> list[str]:
    """The lines of the block; none if there is no block."""
    match = _BLOCK.search(text)
    return match["lines"].splitlines() if match else []


def is_changed(text: str) -> bool:
    """Whether somebody has changed the block. One without its end counts as changed."""
    match = _BLOCK.search(text)
    return _BEGIN in text if match is None else _digest(match["text"]) != match["digest"]


def without(text: str) -> str:
    """The text without the block. A changed block stays."""
    match = _BLOCK.search(text)
    return text if match is None or is_changed(text) else text[: match.start()] + text[match.end() :]


def _digest(block: str) -> str:
    return hashlib.sha256(block.encode()).hexdigest()[:16]
