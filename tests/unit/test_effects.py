"""How many effects run at the same time, in which order, and when they are repeated; in virtual time."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from multiverse.controller.effects import JOBS_AT_ONCE, Effects, Surroundings
from multiverse.controller.publication import AGAIN, AGAIN_LIMIT, pause
from multiverse.core.errors import Broken, Refused, Unknown
from multiverse.core.machines.attempt import reclaim_attempt
from multiverse.core.model.host import HostState, KnownHost
from multiverse.core.model.job import Attempt, AttemptState, JobRef, Node, NodeState, SchedulerView
from multiverse.core.model.saved import Saved, SavedState
from multiverse.core.model.vm import Place, Vm, VmRef, VmState
from multiverse.core.model.world import Seen
from multiverse.core.transition import Done, EffectKind, Event
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.loop import run
from tests.unit.rows import attempt, saved, vm
from tests.unit.rows import state as state_of


class Ports:
    """A scheduler and a hypervisor. Each call takes a second. The calls for the jobs `refused` fail."""

    def __init__(self) -> None:
        self.begun: list[tuple[float, str]] = []
        self.running: list[str] = []
        self.most = 0
        self.refused: set[str] = set()
        self.destroyed: list[str] = []
        self.deleted: list[str] = []  # nodes
        self.silent: set[str] = set()
        self.submission = self.addresses = self.offers = self.templates = None
        self.saves = self.saving = self
        self.calls: list[str] = []  # of saves

    async def revoke(self, job: JobRef, reason: str) -> None:
        await self._call(job.job_id)
        if job.job_id in self.refused:
            raise Refused(f"job {job.job_id} is refused")

    async def unpin(self, job: JobRef) -> None:
        await self._call(job.job_id)

    async def set_down(self, node: str, reason: str) -> None:
        await self._call(node)

    async def _call(self, subject: str) -> None:
        self.begun.append((asyncio.get_running_loop().time(), subject))
        self.running.append(subject)
        self.most = max(self.most, len(self.running))
        await asyncio.sleep(1.0)
        self.running.remove(subject)

    async def destroy(self, ref: VmRef, grace: float) -> None:
        self.destroyed.append(ref.source)
        if ref.source in self.silent:
            raise Unknown(f"{ref.source} does not answer")

    async def delete_node(self, node: str) -> None:
        self.deleted.append(node)

    async def thaw(self, vm: VmRef) -> None:
        self.calls.append("thaw")
        raise Broken("its guest has flooded its channel")

    async def undo(self, job: JobRef, node: str, *, requeues: bool = True) -> None:
        self.calls.append("undo")


class Harness:
    """Effects of these rows. A job whose effect succeeded leaves the state that permits it."""

    def __init__(self, *rows: Attempt | Vm | Saved, seed: int = 1) -> None:
        self.ports: Any = Ports()
        self.state = state_of(*rows)
        self.show(*(Node(row.name, NodeState.BUSY) for row in rows if isinstance(row, Vm)))
        self.done: list[Done] = []
        users: Any = None
        around = Surroundings("10.0.0.1", (), (), 5.0, self.state, users)
        self.clock = VirtualClock()
        self.effects = Effects(self.ports, self.ports, self.clock, around, self._ended, Random(seed))
        self.ended = asyncio.Event()

    def show(self, *nodes: Node) -> None:
        """The scheduler was read, and shows these nodes."""
        compared = self.state.compared
        compared.nodes = {node.name: node for node in nodes}
        compared.scheduler = Seen(SchedulerView({}, compared.nodes), 0.0)

    def _ended(self, done: Done) -> None:
        self.done.append(done)
        if done.error is None and done.key.kind == "attempt":
            event = Event.CANCELLED if done.kind is EffectKind.REVOKE else Event.RESTARTED
            attempt = self.state.attempts[done.key.id]
            self.state.move(reclaim_attempt(attempt, "cancelled", event, "its effect succeeded"))
        self.ended.set()

    async def run(self, seconds: float) -> None:
        """What the controller's loop does: ensure after each end, and when a repetition is due."""
        until = self.clock.now() + seconds
        while self.clock.now() < until:
            self.ended.clear()
            self.effects.ensure()
            wait = min(until, self.effects.next_due()) - self.clock.now()
            try:
                async with asyncio.timeout(max(0.001, wait)):
                    await self.ended.wait()
            except TimeoutError:
                pass
        await self.effects.close()


def revoking(count: int) -> list[Attempt]:
    return [attempt(AttemptState.REVOKING, id=number, job=str(number)) for number in range(1, count + 1)]


def test_only_some_of_many_effects_on_jobs_run_at_a_time_and_each_runs_once() -> None:
    async def script() -> None:
        harness = Harness(*revoking(100))
        await harness.run(100 / JOBS_AT_ONCE + 5)
        assert harness.ports.most == JOBS_AT_ONCE
        assert sorted(int(job) for _, job in harness.ports.begun) == [*range(1, 101)]
        assert not any(done.error for done in harness.done), "none has timed out while it waited"

    run(script(), 1)


def test_a_job_that_goes_to_the_gate_does_not_wait_for_jobs_that_are_cancelled() -> None:
    async def script() -> None:
        harness = Harness(*revoking(100), *(attempt(AttemptState.UNGATED, id=n, job=str(n)) for n in range(101, 121)))
        await harness.run(5.0)
        begun = [int(job) for _, job in harness.ports.begun]
        assert {*range(101, 121)} <= {*begun} and harness.ports.most == 2 * JOBS_AT_ONCE
        assert len([job for job in begun if job <= 100]) == 5 * JOBS_AT_ONCE, "nor the other way round"

    run(script(), 1)


def test_the_effects_on_vms_wait_for_none_on_jobs() -> None:
    async def script() -> None:
        harness = Harness(*revoking(100), *(vm(VmState.ENDING, id=number) for number in range(1, 31)))
        await harness.run(2.0)
        begun = [subject for at, subject in harness.ports.begun if at == harness.ports.begun[0][0]]
        assert len([subject for subject in begun if not subject.isdigit()]) == 30
        assert len([subject for subject in begun if subject.isdigit()]) == JOBS_AT_ONCE

    run(script(), 1)


def test_jobs_whose_effect_fails_again_and_again_let_the_others_go_first() -> None:
    async def script() -> None:
        harness = Harness(*revoking(5 * JOBS_AT_ONCE))
        harness.ports.refused = {str(number) for number in range(1, JOBS_AT_ONCE + 1)}
        await harness.run(8.0)
        order = [int(job) for _, job in harness.ports.begun]
        for first in range(0, 5 * JOBS_AT_ONCE, JOBS_AT_ONCE):
            assert sorted(order[first : first + JOBS_AT_ONCE]) == [*range(first + 1, first + JOBS_AT_ONCE + 1)]
        assert set(order[5 * JOBS_AT_ONCE :]) <= {*range(1, JOBS_AT_ONCE + 1)}

    run(script(), 1)


def test_effects_that_failed_at_the_same_time_are_repeated_at_different_times() -> None:
    async def script(seed: int) -> list[tuple[float, str]]:
        harness = Harness(*revoking(JOBS_AT_ONCE), seed=seed)
        harness.ports.refused = {str(number) for number in range(1, JOBS_AT_ONCE + 1)}
        await harness.run(5.0)
        begun: list[tuple[float, str]] = harness.ports.begun
        assert len({at for at, _ in begun[:JOBS_AT_ONCE]}) == 1
        assert len({at for at, _ in begun[JOBS_AT_ONCE:]}) == len(begun) - JOBS_AT_ONCE > 1
        return begun

    first = run(script(1), 1)
    assert run(script(1), 1) == first, "the same seed gives the same times"
    assert run(script(2), 1) != first


def test_what_failed_for_want_of_a_user_is_repeated_at_once_when_the_user_is_known() -> None:
    async def script() -> None:
        harness = Harness(vm(VmState.STARTING, id=7), *revoking(1))  # nobody knows the users here
        harness.ports.refused = {"1"}
        harness.effects.ensure()
        await asyncio.sleep(1.5)
        due = {failure.effect.kind: failure.again_at for failure in harness.effects.failing(1)}
        assert set(due) == {EffectKind.START, EffectKind.REVOKE} and min(due.values()) > harness.clock.now()
        harness.effects.try_again_for_users()
        then = {failure.effect.kind: failure.again_at for failure in harness.effects.failing(1)}
        assert then[EffectKind.START] <= harness.clock.now() and then[EffectKind.REVOKE] == due[EffectKind.REVOKE]
        await harness.effects.close()

    run(script(), 1)


def test_a_pause_is_doubled_up_to_its_limit_and_up_to_half_longer_by_chance() -> None:
    for runs, shortest in ((1, AGAIN), (2, 2 * AGAIN), (3, 4 * AGAIN), (10, AGAIN_LIMIT), (10_000, AGAIN_LIMIT)):
        pauses = [pause(runs, Random(seed)) for seed in range(200)]
        assert shortest <= min(pauses) < 1.1 * shortest and 1.4 * shortest < max(pauses) < 1.5 * shortest


@pytest.mark.parametrize(
    ("silent", "off", "fails"), [("", "", False), ("a1", "", True), ("a2", "", True), ("a1", "h1", False)]
)
def test_a_vm_is_destroyed_at_both_of_its_places_though_one_is_out_of_reach(silent: str, off: str, fails: bool) -> None:
    async def script() -> None:
        harness = Harness(vm(VmState.ENDING, places=(Place("h1", "a1"), Place("h2", "a2"))))
        harness.ports.silent = {silent}
        if off:
            harness.state.know_host(KnownHost(off, "a1", HostState.FENCED))
        await harness.run(1.2)
        assert harness.ports.destroyed == ["a1", "a2"]
        assert [isinstance(done.error, Unknown) for done in harness.done] == [fails]

    run(script(), 1)


@pytest.mark.parametrize("froze", [False, True])
def test_what_was_never_to_be_frozen_is_not_thawed(froze: bool) -> None:
    async def script() -> None:
        harness = Harness(saved(SavedState.UNDOING, froze=froze), vm(VmState.SERVING, id=1))
        await harness.run(0.5)
        assert harness.ports.calls == (["thaw"] if froze else ["undo"])

    run(script(), 1)


@pytest.mark.parametrize(
    ("features", "down", "deleted"),
    [
        pytest.param(("slim", "mv_7"), True, True, id="its own, by the tag of its attempt"),
        pytest.param(("slim", "mv_v1"), True, True, id="its own, by the tag of a spare"),
        pytest.param(("slim",), True, True, id="it has no tag any more"),
        pytest.param(("slim", "mv_8"), False, False, id="that of a VM which was restored later"),
        pytest.param(None, False, True, id="none is shown: a command that comes late would find a later one"),
    ],
)
def test_only_its_own_node_is_taken_from_the_scheduler(
    features: tuple[str, ...] | None, down: bool, deleted: bool
) -> None:
    async def script() -> None:
        row = vm(VmState.REMOVING, attempt=7)
        harness = Harness(row)
        harness.show(*([Node(row.name, NodeState.BUSY, features)] if features is not None else []))
        await harness.run(1.5)
        assert [subject for _, subject in harness.ports.begun] == [row.name] * down
        assert harness.ports.deleted[:1] == [row.name] * deleted and harness.ports.destroyed[:1] == [row.place.source]

    run(script(), 1)


def test_no_vm_is_ended_before_the_scheduler_has_told_whose_its_node_is() -> None:
    async def script() -> None:
        harness = Harness(vm(VmState.ENDING))
        harness.state.compared.scheduler = None
        await harness.run(1.5)
        assert not harness.ports.begun and not harness.ports.destroyed
        assert harness.done and all(isinstance(one.error, Unknown) for one in harness.done)

    run(script(), 1)
