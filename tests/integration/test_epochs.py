"""Whom an agent obeys, on a file system that is full."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from multiverse.agent.server import Epoch, EpochFile
from tests.integration.small_disk import fill, small_disk

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_controller_with_a_higher_epoch_is_obeyed_though_the_disk_is_full(tmp_path: Path, kind: str) -> None:
    with small_disk(tmp_path / "state", kind, 8) as state:
        epochs = EpochFile(state / "epochs")
        fill(state)
        with pytest.raises(OSError, match="No space") as full:
            (state / "other").write_text("x")
        assert full.value.errno == errno.ENOSPC
        for number in range(1, 10):
            epochs.take("site", Epoch(number, f"run {number}"))
        assert EpochFile(state / "epochs").highest("site") == Epoch(9, "run 9")
