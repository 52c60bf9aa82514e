"""Listing directories that others remove meanwhile, as the kernel does with control groups and devices."""

from __future__ import annotations

from collections.abc import Iterator
from glob import iglob
from pathlib import Path


def matching(top: Path | str, pattern: str) -> Iterator[Path]:
    """The paths below `top` that match, one after the other; `**` stands for any directories. A directory that vanishes
    between its listing and its reading is passed over, where Path.glob raises FileNotFoundError."""
    return map(Path, iglob(f"{top}/{pattern}", recursive=True))  # noqa: PTH207
