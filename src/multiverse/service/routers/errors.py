"""Errors that several subjects answer with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import HTTPException


@contextmanager
def committed() -> Iterator[None]:
    """Answer with 503 if the command in this block is not committed in time; it may still be committed later."""
    try:
        yield
    except TimeoutError as error:
        raise HTTPException(
            503, "the command is not committed yet, but may be committed later; see: multiverse status"
        ) from error
