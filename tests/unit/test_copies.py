"""Copies of rows with some other values, without `dataclasses.replace`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.copies import replaced
from multiverse.core.model.job import AttemptState
from multiverse.core.model.saved import SavedState
from multiverse.core.model.vm import VmState
from tests.unit.rows import attempt, saved, vm


@pytest.mark.parametrize("row", [attempt(AttemptState.QUEUED, tries=2), vm(VmState.SERVING), saved(SavedState.STORED)])
def test_a_copy_has_the_other_values_and_all_that_is_left(row: object) -> None:
    before = replace(row)  # type: ignore[type-var]
    copy = replaced(row, since=7.0, version=9)
    assert copy == replace(row, since=7.0, version=9) and type(copy) is type(row)  # type: ignore[type-var]
    assert row == before and copy is not row and replaced(row) == row


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(KeyError):
        replaced(vm(VmState.SERVING), colour="blue")
