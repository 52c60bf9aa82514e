"""Keeps a fault of ours, or a state and an observation that cannot be, to the record that it concerns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from multiverse.core.model import Key, Reason, Row, Why
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
        why = Why.FAULT(Why.SAID(text=repr(error)))
        state.move(quarantine(row, why))


def quarantine(row: Row, why: Reason) -> Change:
    """Nothing moves the row, and it permits nothing, until an operator retries it."""
    return Change(replace(row, quarantined=why), Event.QUARANTINED, why)


def retry(row: Row, why: Reason) -> Change:
    """The row goes on, by an operator's word."""
    return Change(replace(row, quarantined=None), Event.RETRIED, why)
