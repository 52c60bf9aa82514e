"""Keeps a fault of ours to the record in whose decision it happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from multiverse.core.model import Key
from multiverse.core.state import State
from multiverse.core.transition import Change, Event


@contextmanager
def quarantine_on_error(state: State, key: Key) -> Iterator[None]:
    """A fault of ours in deciding about one record quarantines that record, and no other record is affected."""
    try:
        yield
    except Exception as error:
        row = state.get(key)
        if row is None:
            raise
        if row.quarantined:
            return
        why = f"a fault of Multiverse, please report it: {error!r}"
        state.move(Change(replace(row, quarantined=why), Event.QUARANTINED, why))
