"""The stream of a VM's state into its file, when the file cannot be written."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from multiverse.core.errors import Broken, Exhausted
from multiverse.host.qemu.channels import Command, Monitor
from multiverse.host.qemu.context import VmStageTimer
from multiverse.host.qemu.saves import write_state

ENOUGH = 8 << 20  # bytes: more than zstd and a pipe hold back


class WritingMonitor:
    """A QEMU that writes random bytes into the descriptor it gets, and fails if nobody reads them."""

    failed = False

    def execute(self, name: str) -> dict[str, Any]:
        return {"status": "paused"}

    def execute_all(self, commands: Sequence[Command], fd: int) -> None:
        os.set_blocking(fd, False)
        left = ENOUGH
        while left > 0:
            assert select.select([], [fd], [], 30.0)[1], "the pipe is full and stays full"
            try:
                left -= os.write(fd, os.urandom(1 << 16))
            except BrokenPipeError:
                self.failed = True
                return

    def wait_event(self, name: str, timeout: float, **wanted: Any) -> dict[str, Any]:
        if self.failed:
            raise Broken("QEMU could not save the state")
        return {}


def write(path: Path) -> int:
    monitor = cast("Monitor", WritingMonitor())
    return write_state(monitor, path, cast("VmStageTimer", lambda stage: None)).size


def test_a_full_disk_ends_the_stream_at_once_and_says_so() -> None:
    with pytest.raises(Exhausted, match=r"cannot write /dev/full: zstd ended with [1-9]"):
        write(Path("/dev/full"))


def test_all_that_was_written_is_in_the_file(tmp_path: Path) -> None:
    assert ENOUGH <= write(tmp_path / "state") == (tmp_path / "state").stat().st_size
