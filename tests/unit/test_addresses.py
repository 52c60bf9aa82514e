"""Where users are told that nodes are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest

from multiverse.controller.publication import AddressBook
from multiverse.core.errors import Exhausted
from multiverse.core.model.vm import Vm, VmState
from multiverse.core.transition import Change, Event, Move
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.loop import run
from tests.unit.rows import vm


class Told:
    """`ports.Addresses`, which fails with `errors` first."""

    def __init__(self, *errors: Exception) -> None:
        self.nodes: list[Mapping[str, str]] = []
        self.errors = list(errors)

    async def tell(self, nodes: Mapping[str, str]) -> None:
        await asyncio.sleep(0.1)
        if self.errors:
            raise self.errors.pop(0)
        self.nodes.append(nodes)


def member(id_: int, state: VmState, *, placed: bool = True) -> Vm:
    return replace(vm(state, id=id_), name=f"mv-{id_}", address=f"10.0.0.{id_}/16" if placed else "")


def moved(*rows: Vm) -> list[Move]:
    return [Move((Change(row, Event.RELEASED),)) for row in rows]


@pytest.mark.parametrize("state", VmState)
def test_a_vm_is_told_of_while_a_job_may_run_in_it(state: VmState) -> None:
    async def script() -> None:
        told = Told()
        book = AddressBook([member(1, state), member(2, VmState.SERVING, placed=False)], VirtualClock(), Random(1))
        book.ensure(told)
        await asyncio.sleep(1.0)
        may = state not in (
            *(VmState.PLANNED, VmState.PARKED, VmState.DEAD),
            *(VmState.ENDING, VmState.REMOVING, VmState.RELEASING, VmState.DELETING, VmState.GONE),
        )
        assert told.nodes == [{"mv-1": "10.0.0.1"} if may else {}]

    run(script(), 1)


def test_what_changes_is_told_once_and_again_after_a_failure() -> None:
    async def script() -> None:
        told, clock = Told(), VirtualClock()
        one, two = member(1, VmState.SERVING), member(2, VmState.STARTING)
        book = AddressBook([one], clock, Random(1))
        for _ in range(3):
            book.ensure(told)
            await asyncio.sleep(1.0)
        assert told.nodes == [{"mv-1": "10.0.0.1"}], "a controller that begins tells all, also if nothing has changed"
        book.note(moved(two))
        book.ensure(told)
        book.note(moved(replace(two, state=VmState.JOINED), replace(one, state=VmState.RELEASING)))
        book.ensure(told)  # during the call
        await asyncio.sleep(1.0)
        book.ensure(told)
        await asyncio.sleep(1.0)
        assert told.nodes[-1] == {"mv-2": "10.0.0.2"} and len(told.nodes) <= 3
        calls = len(told.nodes)
        book.note(moved(replace(two, state=VmState.SERVING), replace(one, state=VmState.GONE)))
        book.ensure(told)
        await asyncio.sleep(1.0)
        assert len(told.nodes) == calls, "nothing has changed for users"
        told.errors = [Exhausted("the disk is full")]
        book.note(moved(replace(two, state=VmState.ENDING)))
        for _ in range(120):
            book.ensure(told)
            await asyncio.sleep(1.0)
        assert told.nodes[calls:] == [{}] and not told.errors

    run(script(), 1)


def test_a_scheduler_that_tells_users_itself_is_left_alone() -> None:
    async def script() -> None:
        book = AddressBook([member(1, VmState.SERVING)], VirtualClock(), Random(1))
        book.ensure(None)
        await book.close()

    run(script(), 1)
