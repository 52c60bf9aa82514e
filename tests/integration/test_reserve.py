"""On a disk that is full to the last byte, releases are committed, and what adds is not."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import sqlalchemy as sa

from multiverse.core.errors import Exhausted
from multiverse.core.model.basics import ClaimKey, Size
from multiverse.core.model.host import Claim
from multiverse.core.model.job import AttemptState
from multiverse.core.model.reason import said
from multiverse.core.model.vm import VmState
from multiverse.core.transition import Change, Event, Move
from multiverse.store import Store
from multiverse.store.reserve import PAGES
from multiverse_lab.bench.planner import UncheckedTables
from tests.integration.small_disk import available, fill, small_disk
from tests.unit.planner_harness import ManualClock
from tests.unit.rows import attempt, vm

VMS = 100


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", request.param, 64) as place:
        yield place


def opened(directory: Path) -> Store:
    return Store(directory / "db", ManualClock(), site="test0", tables=cast(Any, UncheckedTables()))


def run(store: Store, *moves: Move, releasing: bool = False) -> None:
    with store.transaction(releasing=releasing) as tx:
        for move in moves:
            tx.apply(move)


def made(number: int) -> Move:
    """A VM that serves a job, with its attempt and its claim: without the steps before."""
    its_job = replace(attempt(AttemptState.ALLOCATED, id=number, job=str(number)), version=0)
    its_vm = replace(vm(VmState.SERVING, id=number, attempt=number), version=0)
    claim = Claim(its_vm.key, "h1", Size(1, 288))
    return Move((Change(its_job, Event.RUNS), Change(its_vm, Event.RUNS)), make=(claim,))


def release(store: Store) -> None:
    """Release all VMs in the passes that it takes, with the words that a long journal has."""
    why = "the job ended, and its VM is released " * 4
    for states in (
        (AttemptState.RECLAIMING, VmState.RELEASING),
        (AttemptState.DONE, VmState.GONE),
    ):
        rows = store.rows()
        moves = []
        for each in rows.vms.values():
            its_job = rows.attempts[cast(int, each.attempt)]
            changes: list[Change] = [
                Change(replace(each, state=states[1]), Event.RELEASED, why),
                Change(replace(its_job, state=states[0]), Event.ENDED, why),
            ]
            free = (ClaimKey(each.key, "h1"),) if states[1] is VmState.GONE else ()
            moves.append(Move(tuple(changes), free=free))
        run(store, *moves, releasing=True)


def whole(store: Store) -> bool:
    with store.maintenance() as execute:
        return bool(execute(sa.text("SELECT COUNT(*) FROM reserve"), {}).scalar())


def check(directory: Path) -> None:
    with closing(sqlite3.connect(directory / "db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_hundred_vms_are_released_on_a_full_disk_and_nothing_is_added(disk: Path) -> None:
    store = opened(disk)
    run(store, *(made(number) for number in range(1, VMS + 1)))
    filler = fill(disk)
    with pytest.raises(Exhausted, match="no room"):
        for number in range(VMS + 1, 100 * VMS):  # the last pages of the database may have some room
            run(store, made(number))
    before = store.rows()
    with pytest.raises(OSError) as refused:
        (disk / "another").write_bytes(bytes(4096))
    assert refused.value.errno == errno.ENOSPC, "the disk is full"
    release(store)
    rows = store.rows()
    assert len(before.vms) >= VMS and rows.vms == {} and rows.attempts == {} and rows.claims == ()
    with pytest.raises(Exhausted):
        run(store, made(before.next_serial))
    filler.unlink()
    run(store, made(before.next_serial))
    assert whole(store), "the reserve is filled again"
    store.close()
    check(disk)


def test_a_database_is_opened_again_on_a_full_disk(disk: Path) -> None:
    store = opened(disk)
    run(store, *(made(number) for number in range(1, VMS + 1)))
    fill(disk)
    store.close()
    assert not (disk / "db-wal").exists(), "all of it was copied to the database"
    fill(disk)  # a guest takes whatever the daemon gives back
    again = opened(disk)
    release(again)
    assert again.rows().vms == {}
    again.close()
    fill(disk)
    third = opened(disk)
    assert third.rows().vms == {} and len(third.journal()) >= 3 * VMS
    third.close()
    check(disk)


def test_a_database_that_was_killed_is_opened_again_on_a_full_disk(disk: Path) -> None:
    if (pid := os.fork()) == 0:
        try:
            store = opened(disk)
            run(store, *(made(number) for number in range(1, VMS + 1)))
        finally:
            os._exit(0)  # as SIGKILL: nothing is closed
    os.waitpid(pid, 0)
    fill(disk)
    store = opened(disk)
    release(store)
    assert store.rows().vms == {}
    store.close()
    check(disk)


def test_a_database_for_which_there_is_no_room_says_so(disk: Path) -> None:
    opened(disk).close()
    for path in disk.glob("db-*"):
        path.unlink()
    fill(disk)
    with pytest.raises(Exhausted, match="cannot open"):
        opened(disk)


def test_a_long_life_on_a_full_disk_ends_in_a_refusal_and_not_in_damage(disk: Path) -> None:
    """More is released than the reserve holds."""
    store = opened(disk)
    run(store, made(1))
    fill(disk)
    row = store.rows().vms[1]
    noted = 0
    with pytest.raises(Exhausted):
        while True:
            move = Move((Change(row, Event.NOTED, said("x" * 1000)),))
            run(store, *[move], releasing=True)
            row = replace(row, version=row.version + 1)
            noted += 1
    assert noted * 1000 > PAGES * 4096 / 2
    assert len(store.journal()) == noted + 2, "what was committed is there, and nothing else"
    store.close()
    check(disk)


def test_a_disk_that_is_full_from_the_start_is_used_when_it_has_room(disk: Path) -> None:
    filler = fill(disk, leave=2 << 20)  # enough for the database, too little for the reserve
    store = opened(disk)
    assert not whole(store)
    with pytest.raises(Exhausted, match="make room"):
        run(store, made(1))
    filler.unlink()
    run(store, made(1))
    assert whole(store) and available(disk) > 0
    store.close()
    check(disk)
