"""QEMU reports the end of a migration a moment before it lets the guest go on."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from multiverse.core.errors import Unknown
from multiverse.host.qemu import migration
from multiverse.host.qemu.channels import Monitor, QmpError
from multiverse.host.qemu.disks import OUT_OF_ROOM
from multiverse.host.qemu.migration import Limits, Sender


class EndingMonitor:
    """A QEMU that looks at the guest's state `looks` times before it has ended its migration."""

    def __init__(self, looks: float, then: str = "postmigrate") -> None:
        self.looks, self.state = looks, then
        self.said: list[str] = []

    def execute(self, command: str, **_: Any) -> Any:
        self.said.append(command)
        if command == "query-status":
            self.looks -= 1
            return {"status": "finish-migrate" if self.looks >= 0 else self.state}
        if command == "query-migrate":
            return {"status": "completed"}
        if command == "cont":
            if self.looks >= 0:
                raise QmpError("QEMU refused cont: Migration is not finalized yet")
            self.state = "running"
        return []

    def next_event(self, timeout: float) -> dict[str, Any]:
        return {"event": "MIGRATION", "data": {"status": "completed"}}


def test_a_vm_that_stays_goes_on_once_its_migration_has_ended() -> None:
    qemu = EndingMonitor(3)
    migration.stay(cast("Monitor", qemu))
    assert qemu.state == "running"


def test_a_vm_without_room_on_its_disk_stays_paused() -> None:
    qemu = EndingMonitor(1, OUT_OF_ROOM)
    migration.stay(cast("Monitor", qemu))
    assert (qemu.state, "cont" in qemu.said) == (OUT_OF_ROOM, False)


def test_a_checkpointed_vm_can_go_on_when_its_memory_was_sent() -> None:
    qemu = EndingMonitor(3)
    monitor = cast("Monitor", qemu)
    Sender(monitor, Limits(0, 0.1, time.monotonic() + 60), lambda: None).end_memory()
    monitor.execute("cont")
    assert qemu.state == "running"


def test_a_migration_that_never_ends_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "_ENDS", 0.05)
    with pytest.raises(Unknown, match="QEMU does not end"):
        migration.stay(cast("Monitor", EndingMonitor(float("inf"))))
