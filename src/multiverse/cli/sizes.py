"""Sizes of memory and disk on the command line."""

from __future__ import annotations

import re

from multiverse.core.errors import Refused

_KIB = {"K": 1, "": 1024, "M": 1024, "G": 1024**2, "T": 1024**3}


def mebibytes(text: str) -> int:
    """A size in MiB, rounded up: a number with K, M (the default), G or T, as sbatch takes it, and also as `16GiB`.
    Raises `Refused` for any other text."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(?:I?B)?", text.strip().upper(), re.ASCII)
    if match is None:
        raise Refused(f"{text!r} is no size", hint="give a number with a unit: 800M, 8G")
    return -(-int(match[1]) * _KIB[match[2]] // 1024)
