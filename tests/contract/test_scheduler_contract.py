"""The contract of `ports.Scheduler`: one suite for the simulated schedulers and for Slurm.

A check that needs an ability which a scheduler has not is skipped.
"""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from random import Random

import pytest

from multiverse.core.clones.spares import node_spec
from multiverse.core.errors import Gone, NotYet, Refused, Stale, Unknown
from multiverse.core.model.basics import CloneKind, Depth, Size
from multiverse.core.model.identity import Identity
from multiverse.core.model.job import Attempt, Job, JobRef, JobState, NodeState, Request, SchedulerPart, SchedulerView
from multiverse.core.model.vm import Place, TemplateKey, Vm, VmRef, VmSpec, VmState
from multiverse.ports import Offers, Parts, Preempting, Saving, Scheduler
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.hypervisor import SimulatedHosts
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.world import Pair, SimulatedWorld, WorldSettings


class Harness(ABC):
    """What the suite needs beside the port. `uid` is a user that the site knows. Each check runs on a cluster of its
    own or cleans up after itself. `base` is the first serial of its nodes."""

    scheduler: Scheduler
    uid: int
    base = 0
    site = "test0"
    patience = 30.0  # seconds that a condition may take
    used = 0

    @functools.cached_property
    def tagged(self) -> dict[str, list[str]]:
        """The nodes that have joined, by their tag."""
        return {}

    @abstractmethod
    async def submit(
        self,
        seconds: float = 3600.0,
        *,
        held: bool = False,
        priority: int | None = None,
        nodes: int = 1,
        name: str = "job",
        lingers: float = 0.0,
    ) -> str:
        """Queue a job of one CPU and 64 MiB on each node at the gate and return its id. The job takes about `lingers`
        seconds to be stopped."""

    @abstractmethod
    async def submit_array(self, tasks: int) -> list[str]:
        """Queue an array of such jobs and return the ids of its tasks."""

    @abstractmethod
    async def cancel(self, job_id: str) -> None:
        """As its user."""

    @abstractmethod
    async def hold(self, job_id: str) -> None:
        """As its user."""

    @abstractmethod
    async def release(self, job_id: str) -> None:
        """As its user."""

    @abstractmethod
    async def requeue_late(self, job: JobRef, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """`Scheduler.requeue`, with `meanwhile` between its look at the job and its command."""

    @abstractmethod
    async def suspend(self, job_id: str) -> None:
        """As an operator."""

    @abstractmethod
    async def resume(self, job_id: str) -> None:
        """As an operator."""

    @abstractmethod
    async def comment(self, job_id: str) -> str:
        """What the job's user reads: the text of others, and the scheduler's explanations."""

    @abstractmethod
    async def write(self, job_id: str, text: str) -> None:
        """Leave a text of others for the user of a pending job, as an operator. Those of a task are for its array."""

    @abstractmethod
    def away(self, *, gone: bool = False) -> AbstractAsyncContextManager[None]:
        """Within this context the scheduler does not answer, or does not run if `gone`; calls fail within seconds."""

    @abstractmethod
    async def reserve(self) -> None:
        """Reserve all nodes for maintenance, from now on, for ten minutes, as `maintenance`."""

    async def include_in_reservations(self, node: str) -> None:  # noqa: B027 - the simulated one includes it at once
        """Let a reservation of all nodes include this one, which has joined later: slurmctld looks at its reservations
        again when some node is changed or goes down, and not when one joins."""

    @abstractmethod
    async def open_again(self) -> None:
        """End that reservation, as an operator."""

    @abstractmethod
    async def reconfigure(self) -> None:
        """Let the scheduler read its configuration again."""

    @abstractmethod
    def forgetting(self) -> AbstractAsyncContextManager[None]:
        """After this context the scheduler has forgotten the jobs that were queued within it, and uses their ids
        again."""

    @abstractmethod
    async def join(self, vm: Vm, attempt: Attempt | None) -> None:
        """Start a node of this VM, with the bootstrap that the port returns."""

    @abstractmethod
    async def add_user(self, node: str) -> None:
        """Add the user of the jobs to the guest of a node."""

    def cut_off(self, node: str) -> None:  # noqa: B027 - a real slurmctld does not know of that
        """Freeze the processes of the job on a node, and cut them off."""

    def address(self, number: int) -> str:
        """The address for the node of this serial, with its prefix length."""
        return f"10.213.201.{number & 255}/16"

    # --- what the suite builds on them

    async def view(self, met: Callable[[SchedulerView], bool] = lambda _: True) -> SchedulerView:
        """The first observation that meets a condition."""
        for _ in range(int(self.patience / 0.2)):
            view = await self.scheduler.observe()
            if met(view):
                return view
            await asyncio.sleep(0.2)
        raise AssertionError(f"the condition was never met; last seen: {view}")

    async def job(self, job_id: str, met: Callable[[Job], bool] = lambda _: True) -> Job:
        view = await self.view(lambda view: job_id in view.jobs and met(view.jobs[job_id]))
        return view.jobs[job_id]

    async def node(self, job: Job, feature: str = "") -> tuple[str, str]:
        """Register a node for this job and return its name and its tag. `feature` is the tag of an earlier node of the
        same attempt."""
        vm = self._vm()
        attempt = Attempt(
            int(feature.removeprefix("mv_") or vm.id),
            0.0,
            job.ref,
            job.name,
            job.uid,
            job.request or Request(1, vm.node_size),
        )
        await self._joined(replace(vm, attempt=vm.id), attempt)
        return vm.name, attempt.feature

    async def spare(self) -> Vm:
        """Register a node that serves no job yet."""
        vm = replace(self._vm(), state=VmState.JOINED, pool=Depth.JOINED)
        await self._joined(vm, None)
        return vm

    async def _joined(self, vm: Vm, attempt: Attempt | None) -> None:
        await self.join(vm, attempt)
        await self.view(lambda view: vm.name in view.nodes and view.nodes[vm.name].state is NodeState.IDLE)
        self.tagged.setdefault(attempt.feature if attempt else vm.feature, []).append(vm.name)

    @property
    def offers(self) -> Offers:
        """Skips the check if the scheduler has no offers."""
        if self.scheduler.offers is None:
            pytest.skip("this scheduler has no offers")
        return self.scheduler.offers

    @property
    def parts(self) -> Parts:
        """Skips the check if the scheduler reads no parts."""
        if self.scheduler.parts is None:
            pytest.skip("this scheduler reads no parts")
        return self.scheduler.parts

    @property
    def saving(self) -> Saving:
        """Skips the check if the scheduler cannot queue saved jobs again."""
        if self.scheduler.saving is None:
            pytest.skip("this scheduler saves no jobs")
        return self.scheduler.saving

    @property
    def preempting(self) -> Preempting:
        """Skips the check if the scheduler preempts no jobs."""
        if self.scheduler.preempting is None:
            pytest.skip("this scheduler preempts no jobs")
        return self.scheduler.preempting

    async def read(
        self, jobs: Mapping[str, int | None], users: Collection[int], nodes: Collection[str]
    ) -> SchedulerPart:
        """A part in which all of this was read: a scheduler may read less at a time."""
        for _ in range(100):
            part = await self.parts.read(jobs, users, nodes)
            if part.job_ids >= jobs.keys() and part.users >= set(users):
                return part
        raise AssertionError(f"never read: {jobs}, {users}")

    async def delete(self, node: str) -> None:
        """Delete a node, as soon as the scheduler lets it."""
        for _ in range(int(self.patience / 0.2)):
            try:
                await self.scheduler.delete_node(node)
                return
            except NotYet:
                await asyncio.sleep(0.2)
        raise AssertionError(f"node {node} was never deleted")

    async def pin(self, ref: JobRef, tag: str, text: str = "", *, at_once: bool = False) -> None:
        """Pin a job to all nodes that joined with this tag."""
        await self.scheduler.pin(ref, tag, self.tagged.get(tag, ()), text, at_once=at_once)

    def _vm(self) -> Vm:
        self.used += 1
        number = self.base + self.used
        return Vm(
            id=number,
            since=0.0,
            name=f"mv{self.site}-{number}",
            places=(Place("h1"),),
            image="slim",
            kind=CloneKind.INSTANT,
            size=Size(1, 256),
            node_size=Size(1, 64),
            mac=f"02:00:5e:01:00:{number & 255:02x}",
            address=self.address(number),
        )

    async def running(self, *, lingers: float = 0.0) -> tuple[Job, str]:
        """A job that runs, and the name of its node."""
        return await self.start(await self.submit(lingers=lingers))

    async def start(self, job_id: str) -> tuple[Job, str]:
        """The job, which runs now, and the name of its node."""
        job = await self.job(job_id)
        name, feature = await self.node(job)
        try:
            await self.pin(job.ref, feature)
        except Unknown:  # Slurm 24.11 sometimes drops a connection; the call is repeated, as the controller would do
            await self.pin(job.ref, feature)
        return await self.job(job.ref.job_id, lambda job: job.state is JobState.RUNNING), name


def later(ref: JobRef) -> JobRef:
    return replace(ref, restarts=ref.restarts + 1)


def next_run(ref: JobRef, before: JobRef) -> bool:
    """Whether this is the run after that one. Slurm gives a requeued job a new submit time, others keep it."""
    return (ref.job_id, ref.restarts) == (before.job_id, before.restarts + 1) and ref.submitted >= before.submitted


async def an_observation_is_complete_and_in_order(h: Harness) -> None:
    ids = [await h.submit(priority=priority) for priority in (1000, 3000, 2000)]
    view = await h.scheduler.observe()
    jobs = [view.jobs[job_id] for job_id in ids]
    assert all(job.state is JobState.PENDING and job.gated and job.pinned is None for job in jobs)
    assert all(job.eligible and not job.held and job.ref.restarts == 0 for job in jobs)
    assert all(job.request == Request(1, Size(1, 64)) and job.uid == h.uid for job in jobs)
    assert jobs[1].rank < jobs[2].rank < jobs[0].rank


async def a_held_job_is_shown_held_and_not_pinned(h: Harness) -> None:
    job = await h.job(await h.submit(held=True))
    assert job.held and not job.eligible
    _, feature = await h.node(job)
    with pytest.raises(Stale):
        await h.pin(job.ref, feature)
    await h.scheduler.unpin(job.ref)
    assert (await h.job(job.ref.job_id)).held, "a user's hold is the user's"


async def a_pinned_job_runs_on_its_node_and_ends(h: Harness) -> None:
    job = await h.job(await h.submit(seconds=1.0))
    name, feature = await h.node(job)
    node = (await h.scheduler.observe()).nodes[name]
    assert not node.features or feature in node.features, "only some schedulers have features"
    await h.pin(job.ref, feature)
    await h.pin(job.ref, feature)
    job = await h.job(job.ref.job_id, lambda job: job.state is not JobState.PENDING)
    assert job.nodes == (name,) and job.pinned == feature and not job.gated
    view = await h.view(lambda view: _over(view, job.ref) and view.nodes[name].state is NodeState.IDLE)
    assert view.jobs.get(job.ref.job_id) is None or view.jobs[job.ref.job_id].result == "COMPLETED"


def _over(view: SchedulerView, ref: JobRef) -> bool:
    job = view.jobs.get(ref.job_id)
    return job is None or job.ref.submitted != ref.submitted or job.state is JobState.ENDED


async def a_call_for_an_outdated_run_is_stale(h: Harness) -> None:
    job = await h.job(await h.submit())
    _, feature = await h.node(job)
    for ref in (later(job.ref), replace(job.ref, submitted=job.ref.submitted - 100)):
        with pytest.raises(Stale):
            await h.pin(ref, feature)
        with pytest.raises(Stale):
            await h.scheduler.unpin(ref)
        with pytest.raises(Stale):
            await h.scheduler.revoke(ref, "test")
    same = await h.job(job.ref.job_id)
    assert same.state is JobState.PENDING and same.gated


async def a_missing_job_is_gone(h: Harness) -> None:
    ref = JobRef("59999", 1_600_000_000)
    with pytest.raises(Gone):
        await h.pin(ref, "mv_1")
    with pytest.raises(Gone):
        await h.scheduler.unpin(ref)


async def a_pin_needs_a_node(h: Harness) -> None:
    job = await h.job(await h.submit())
    with pytest.raises(Refused):
        await h.pin(job.ref, "mv_987654")
    assert (await h.job(job.ref.job_id)).gated


async def unpin_restores_the_gate(h: Harness) -> None:
    job = await h.job(await h.submit())
    await h.scheduler.unpin(job.ref)
    name, feature = await h.node(job)
    await h.scheduler.set_down(name, "so that the pinned job stays pending")
    await h.pin(job.ref, feature)
    assert (await h.job(job.ref.job_id)).pinned == feature
    for _ in range(2):
        await h.scheduler.unpin(job.ref)
        back = await h.job(job.ref.job_id)
        assert back.gated and back.pinned is None and back.eligible and not back.held


async def unpinning_a_running_job_is_stale(h: Harness) -> None:
    job, _ = await h.running()
    with pytest.raises(Stale):
        await h.scheduler.unpin(job.ref)
    with pytest.raises(Stale):
        await h.scheduler.revoke(job.ref, "test")


async def requeuing_a_pending_job_leaves_it_at_the_gate(h: Harness) -> None:
    job = await h.job(await h.submit())
    await h.scheduler.requeue(job.ref)
    same = await h.job(job.ref.job_id)
    assert same.ref == job.ref and same.gated and same.eligible


async def requeuing_a_running_job_puts_it_at_the_gate(h: Harness) -> None:
    job, name = await h.running()
    with pytest.raises(Stale):
        await h.scheduler.requeue(later(job.ref))
    await h.scheduler.requeue(job.ref)
    back = await h.job(job.ref.job_id, lambda job: job.state is JobState.PENDING and job.gated)
    assert next_run(back.ref, job.ref) and back.pinned is None
    with pytest.raises(Stale):
        await h.scheduler.requeue(job.ref)
    await h.view(lambda view: view.nodes[name].state is NodeState.IDLE)
    with pytest.raises(Stale):
        await h.pin(job.ref, "mv_1")


async def a_job_that_is_held_tells_its_user_why_and_is_released_by_its_user(h: Harness) -> None:
    job = await h.job(await h.submit())
    for _ in range(2):
        await h.scheduler.hold(job.ref, "its last 10 runs ended at once")
    held = await h.job(job.ref.job_id, lambda job: job.held)
    assert held.gated and not held.eligible and held.ref == job.ref
    assert "its last 10 runs ended at once" in await h.comment(job.ref.job_id)
    await h.release(job.ref.job_id)
    assert (await h.job(job.ref.job_id, lambda job: not job.held)).eligible
    running, _ = await h.running()
    with pytest.raises(Stale):
        await h.scheduler.hold(running.ref, "too late")


async def revoke_ends_a_pending_job(h: Harness) -> None:
    job = await h.job(await h.submit())
    await h.scheduler.revoke(job.ref, "no host could ever hold it")
    await h.view(lambda view: _over(view, job.ref))


async def a_node_with_a_job_is_not_deleted(h: Harness) -> None:
    job, name = await h.running()
    with pytest.raises(Refused):
        await h.scheduler.delete_node(name)
    assert (await h.job(job.ref.job_id)).state is JobState.RUNNING


async def deleting_a_missing_node_succeeds(h: Harness) -> None:
    job = await h.job(await h.submit())
    name, _ = await h.node(job)
    await h.scheduler.set_down(name, "test")
    await h.scheduler.set_down(name, "test")
    assert (await h.scheduler.observe()).nodes[name].is_unusable
    for _ in range(2):
        await h.delete(name)
        assert name not in (await h.scheduler.observe()).nodes
    await h.scheduler.set_down(name, "test")


async def a_node_that_is_set_down_loses_its_job(h: Harness) -> None:
    job, name = await h.running()
    await h.scheduler.set_down(name, "its VM was lost")
    back = await h.job(job.ref.job_id, lambda job: job.state is JobState.PENDING)
    assert next_run(back.ref, job.ref)
    await h.scheduler.unpin(back.ref)
    back = await h.job(job.ref.job_id)
    assert back.gated and back.eligible
    await h.delete(name)


async def a_line_is_left_for_the_user(h: Harness) -> None:
    job, other = await h.job(await h.submit()), await h.job(await h.submit())
    for _ in range(2):
        await h.scheduler.explain([job.ref, other.ref], "the hosts are full")
        assert "the hosts are full" in await h.comment(job.ref.job_id)
    await h.scheduler.explain([other.ref], "it is its turn")
    assert "the hosts are full" not in await h.comment(other.ref.job_id)
    assert "it is its turn" not in await h.comment(job.ref.job_id)
    assert (await h.job(job.ref.job_id)).eligible


async def text_of_others_is_kept_beside_ours(h: Harness) -> None:
    job = await h.job(await h.submit())
    await h.write(job.ref.job_id, 'ticket "7" [urgent]')
    _, feature = await h.node(job)
    for line in ("the hosts are full", "it is its turn"):
        await h.scheduler.explain([job.ref], line)
        read = await h.comment(job.ref.job_id)
        assert 'ticket "7" [urgent]' in read and line in read
    await h.pin(job.ref, feature, "instant on h1")
    await h.job(job.ref.job_id, lambda job: job.state is JobState.RUNNING)
    read = await h.comment(job.ref.job_id)
    assert 'ticket "7" [urgent]' in read and "instant on h1" in read and "turn" not in read
    back = await h.job(await h.submit())
    await h.write(back.ref.job_id, "seen by an operator")
    await h.scheduler.revoke(back.ref, "no host could hold it")
    read = await h.comment(back.ref.job_id)
    assert "seen by an operator" in read and "no host could hold it" in read


async def only_jobs_that_wait_at_the_gate_are_told(h: Harness) -> None:
    running, _ = await h.running()
    held = await h.job(await h.submit(held=True))
    waiting = await h.job(await h.submit())
    missing = JobRef("59999", waiting.ref.submitted)
    others = [running.ref, held.ref, later(waiting.ref), missing]
    await h.scheduler.explain(others, "the hosts are full")
    for one in (running, held, waiting):
        assert "full" not in await h.comment(one.ref.job_id)
    await h.scheduler.explain([*others, waiting.ref], "the hosts are full")
    assert "the hosts are full" in await h.comment(waiting.ref.job_id)


async def an_array_is_told_at_once_and_its_running_tasks_are_not(h: Harness) -> None:
    tasks = await h.submit_array(4)
    await h.write(tasks[0], "reviewed")
    second = await h.job(tasks[1])
    assert second.array and {(await h.job(task)).array for task in tasks} == {second.array}
    _, feature = await h.node(second)
    await h.pin(second.ref, feature, "instant on h1")
    await h.job(tasks[1], lambda job: job.state is JobState.RUNNING)
    await h.scheduler.explain([(await h.job(tasks[3])).ref], "the hosts are full")
    for task in (tasks[0], tasks[2], tasks[3]):
        read = await h.comment(task)
        assert "reviewed" in read and "the hosts are full" in read
    read = await h.comment(tasks[1])
    assert "reviewed" in read and "instant on h1" in read and "full" not in read


async def users_are_known_or_gone(h: Harness) -> None:
    user = await h.scheduler.user(h.uid)
    assert user.uid == h.uid and user.name and user.home.startswith("/")
    with pytest.raises(Gone):
        await h.scheduler.user(3_999_999)


async def an_offer_is_taken_by_one_job_as_it_is_submitted(h: Harness) -> None:
    offers, vm = h.offers, await h.spare()
    await h.scheduler.observe()
    for _ in range(2):
        await offers.offer(node_spec(vm, None))
    assert (await h.scheduler.observe()).offers[vm.name] is False
    job = await h.job(await h.submit(seconds=1.0), lambda job: job.state is JobState.RUNNING)
    assert (job.nodes, job.pinned, job.gated) == ((vm.name,), vm.feature, False)
    assert (await h.scheduler.observe()).offers[vm.name] is True
    await offers.offer(node_spec(vm, None))
    await offers.withdraw(vm.name)
    assert (await h.scheduler.observe()).offers[vm.name] is True, "an offer that was taken stays taken"
    other = await h.job(await h.submit())
    assert other.state is JobState.PENDING and other.gated
    await asyncio.sleep(3.0)
    assert (await h.job(job.ref.job_id)).state is JobState.RUNNING, "the user has not been added yet"
    await h.add_user(vm.name)
    await h.pin(job.ref, vm.feature, "it took a spare")
    view = await h.view(lambda view: _over(view, job.ref) and view.nodes[vm.name].state is NodeState.IDLE)
    assert view.jobs.get(job.ref.job_id) is None or view.jobs[job.ref.job_id].result == "COMPLETED"
    await h.delete(vm.name)
    assert vm.name not in (await h.scheduler.observe()).offers


async def a_withdrawn_offer_is_not_taken_and_never_repeated(h: Harness) -> None:
    offers, vm, other = h.offers, await h.spare(), await h.spare()
    await h.scheduler.observe()
    await offers.offer(node_spec(vm, None))
    await offers.withdraw(vm.name)
    await offers.offer(node_spec(vm, None))
    await offers.withdraw(other.name)
    await offers.offer(node_spec(other, None))
    assert not {vm.name, other.name} & (await h.scheduler.observe()).offers.keys()
    assert (await h.job(await h.submit())).gated


async def a_job_that_would_not_start_on_it_takes_no_offer(h: Harness) -> None:
    offers, vm = h.offers, await h.spare()
    await h.scheduler.observe()
    await offers.offer(node_spec(vm, None))
    for job_id in (await h.submit(held=True), await h.submit(nodes=2), *await h.submit_array(2)):
        job = await h.job(job_id)
        assert job.gated and job.pinned is None
    assert (await h.scheduler.observe()).offers[vm.name] is False
    await h.scheduler.set_down(vm.name, "it has failed")
    assert vm.name not in (await h.scheduler.observe()).offers, "a node that is down must not be taken"


async def an_excluded_user_takes_no_offer_and_a_taken_one_names_its_user(h: Harness) -> None:
    offers, vm = h.offers, await h.spare()
    await h.scheduler.observe()
    await offers.offer(node_spec(vm, None))
    for _ in range(2):
        await offers.exclude([h.uid, 4242])
    assert (await h.job(await h.submit())).gated
    view = await h.scheduler.observe()
    assert view.offers[vm.name] is False and view.takers == {}
    await offers.exclude([4242])
    assert (await h.job(await h.submit())).pinned == vm.feature
    view = await h.scheduler.observe()
    assert view.offers[vm.name] is True and view.takers == {vm.name: h.uid}
    assert (await h.parts.read({}, (), ())).takers == view.takers


async def offers_expire_without_observations(h: Harness) -> None:
    offers, vm = h.offers, await h.spare()
    await h.scheduler.observe()
    await offers.offer(node_spec(vm, None))
    await asyncio.sleep(12.5)
    job_id = await h.submit()
    assert (await h.job(job_id)).gated
    again = await h.job(await h.submit())
    assert again.pinned == vm.feature, "the controller observes again"


Check = Callable[[Harness], Awaitable[None]]


def shows_the_same(one: Job, other: Job) -> bool:
    """Whether two observations of a waiting job are equal. Meanwhile its scheduler may say otherwise why it waits."""
    return one._replace(reason="") == other._replace(reason="")


async def a_part_shows_the_jobs_and_users_that_were_asked_for(h: Harness) -> None:
    one, two = [await h.submit() for _ in range(2)]
    whole = (await h.view(lambda view: {one, two} <= view.jobs.keys())).jobs
    for uid in (None, h.uid):
        part = await h.read({one: uid}, (), ())
        assert one in part.job_ids and shows_the_same(part.jobs[one], whole[one])
    part = await h.read({}, [h.uid], ())
    assert h.uid in part.users and all(shows_the_same(part.jobs[job], whole[job]) for job in (one, two))
    assert not part.nodes and not part.node_names and not part.all_nodes, "no node was asked for"
    await h.cancel(two)
    part = await h.read({two: None}, (), ())
    assert part.jobs.get(two) is None or part.jobs[two].state is JobState.ENDED


async def a_part_shows_a_job_from_its_start_to_its_end(h: Harness) -> None:
    job, name = await h.running()
    part = await h.read({job.ref.job_id: None}, (), [name])
    shown = part.jobs[job.ref.job_id]
    assert (shown.state, shown.nodes, shown.pinned) == (JobState.RUNNING, (name,), job.pinned)
    assert name in part.node_names and part.nodes[name].state is NodeState.BUSY
    await h.scheduler.set_down(name, "its VM was lost")
    await h.job(job.ref.job_id, lambda job: job.state is JobState.PENDING)
    await h.delete(name)
    for uid in (None, h.uid):
        part = await h.read({job.ref.job_id: uid}, (), [name])
        assert name in part.node_names and name not in part.nodes
        assert next_run(part.jobs[job.ref.job_id].ref, job.ref)


async def a_part_names_what_it_did_not_find(h: Harness) -> None:
    await h.scheduler.observe()
    part = await h.read({"59999": None, "59998": h.uid, "59997_3": None}, (), [f"mv{h.site}-99999"])
    assert {"59999", "59998", "59997_3"} <= part.job_ids and not part.jobs.keys() & part.job_ids
    assert f"mv{h.site}-99999" in part.node_names and f"mv{h.site}-99999" not in part.nodes


async def a_part_shows_the_tasks_of_an_array(h: Harness) -> None:
    one, two, _ = await h.submit_array(3)
    whole = (await h.view(lambda view: {one, two} <= view.jobs.keys())).jobs
    part = await h.read({two: None}, (), ())
    assert shows_the_same(part.jobs[two], whole[two]) and one not in part.job_ids


async def a_part_of_nothing_shows_the_offers(h: Harness) -> None:
    offers, vm = h.offers, await h.spare()
    await offers.offer(node_spec(vm, None))
    part = await h.read({}, (), ())
    assert part.offers is not None and part.offers[vm.name] is False
    assert not (part.jobs or part.nodes or part.job_ids or part.users or part.node_names)


async def a_node_whose_job_is_to_be_saved_takes_no_other_and_may_serve_again(h: Harness) -> None:
    job, name = await h.running()
    with pytest.raises(Stale):
        await h.saving.prepare(later(job.ref), [name])
    for _ in range(2):
        await h.saving.prepare(job.ref, [name])
    await h.view(lambda view: view.nodes[name].state is NodeState.DRAINED)
    for _ in range(2):
        await h.saving.undo(job.ref, [name])
    view = await h.view(lambda view: view.nodes[name].state is NodeState.BUSY)
    assert view.jobs[job.ref.job_id].ref == job.ref and view.jobs[job.ref.job_id].state is JobState.RUNNING


async def a_saved_job_waits_at_the_gate_for_its_next_run(h: Harness) -> None:
    job, name = await h.running()
    await h.saving.prepare(job.ref, [name])
    h.cut_off(name)
    with pytest.raises(Stale):
        await h.saving.requeue(later(job.ref))
    await h.saving.requeue(job.ref, text="it is being saved")
    back = await h.job(job.ref.job_id, lambda job: job.state is JobState.PENDING and job.gated)
    assert next_run(back.ref, job.ref) and back.pinned is None and not back.held
    assert "it is being saved" in await h.comment(job.ref.job_id)
    with pytest.raises(Stale):
        await h.saving.requeue(job.ref)
    with pytest.raises(Stale):
        await h.saving.requeue(back.ref)
    assert (await h.job(job.ref.job_id)).ref == back.ref, "only a job that runs is queued again"


async def a_saved_job_that_is_held_waits_until_it_is_released(h: Harness) -> None:
    job, name = await h.running()
    await h.saving.prepare(job.ref, [name])
    with pytest.raises(Stale):
        await h.saving.release(job.ref)
    h.cut_off(name)
    await h.saving.requeue(job.ref, hold=True)
    held = await h.job(job.ref.job_id, lambda job: job.held and job.gated)
    assert next_run(held.ref, job.ref) and not held.eligible
    for _ in range(2):
        await h.saving.release(held.ref)
    assert not (await h.job(job.ref.job_id, lambda job: not job.held)).at_origin


async def a_job_that_was_cancelled_is_not_queued_again_as_a_saved_one(h: Harness) -> None:
    job, name = await h.running()
    await h.saving.prepare(job.ref, [name])
    h.cut_off(name)
    await h.cancel(job.ref.job_id)
    await h.view(lambda view: _over(view, job.ref))
    with pytest.raises((Stale, Gone)):
        await h.saving.requeue(job.ref)
    assert _over(await h.view(), job.ref)


async def a_job_is_queued_again_only_until_that_is_forbidden(h: Harness) -> None:
    job, name = await h.running()
    await h.saving.forbid_requeue(job.ref)
    await h.job(job.ref.job_id, lambda job: not job.requeues)
    await h.saving.prepare(job.ref, [name], requeues=False)
    assert (await h.job(job.ref.job_id, lambda job: job.requeues)).state is JobState.RUNNING
    await h.saving.undo(job.ref, [name], requeues=False)
    await h.job(job.ref.job_id, lambda job: not job.requeues)


async def a_preempted_job_is_told_that_it_ends_and_goes_on_until_then(h: Harness) -> None:
    preempting, (job, _) = h.preempting, await h.running()
    with pytest.raises(Stale):
        await preempting.warn(later(job.ref), "job 12 takes its place")
    for _ in range(2):
        await preempting.warn(job.ref, "job 12 takes its place")
    assert "job 12 takes its place" in await h.comment(job.ref.job_id)
    seen = (await h.view()).jobs[job.ref.job_id]
    assert (seen.ref, seen.state) == (job.ref, JobState.RUNNING)


async def a_preempted_job_is_queued_again_once(h: Harness) -> None:
    preempting, (job, _) = h.preempting, await h.running(lingers=2.0)
    with pytest.raises(Stale):
        await preempting.preempt(later(job.ref), requeue=True, text="job 12 takes its place")
    for _ in range(2):  # the second time the job is completing
        await preempting.preempt(job.ref, requeue=True, text="job 12 takes its place")
    back = await h.job(job.ref.job_id, lambda job: job.state is JobState.PENDING and job.gated)
    assert next_run(back.ref, job.ref) and back.pinned is None and not back.held
    assert "job 12 takes its place" in await h.comment(job.ref.job_id)
    for ref in (job.ref, back.ref):
        with pytest.raises(Stale):
            await preempting.preempt(ref, requeue=True, text="job 12 takes its place")
    assert (await h.job(job.ref.job_id)).ref == back.ref, "a late call does nothing to the next run"


async def a_preempted_job_that_is_not_queued_again_is_cancelled(h: Harness) -> None:
    preempting = h.preempting
    for requeue in (False, True):
        job, _ = await h.running()
        await h.saving.forbid_requeue(job.ref)
        await preempting.preempt(job.ref, requeue=requeue, text="job 12 takes its place")
        await h.view(lambda view, ref=job.ref: _over(view, ref))
        with pytest.raises((Stale, Gone)):
            await preempting.preempt(job.ref, requeue=requeue, text="job 12 takes its place")


async def the_script_of_a_job_runs_on_the_node_that_is_known_for_longest(h: Harness) -> None:
    saving, job = h.saving, await h.job(await h.submit(nodes=2))
    first, feature = await h.node(job)
    second, _ = await h.node(job, feature)
    await saving.check_script([first, second])
    with pytest.raises(Refused):
        await saving.check_script([second, first])
    await h.pin(job.ref, feature)
    running = await h.job(job.ref.job_id, lambda job: job.state is JobState.RUNNING and bool(job.script_node))
    assert running.script_node == first and set(running.nodes) == {first, second}


SUITE: tuple[Check, ...] = (
    the_script_of_a_job_runs_on_the_node_that_is_known_for_longest,
    a_node_whose_job_is_to_be_saved_takes_no_other_and_may_serve_again,
    a_saved_job_waits_at_the_gate_for_its_next_run,
    a_saved_job_that_is_held_waits_until_it_is_released,
    a_job_that_was_cancelled_is_not_queued_again_as_a_saved_one,
    a_job_is_queued_again_only_until_that_is_forbidden,
    a_preempted_job_is_told_that_it_ends_and_goes_on_until_then,
    a_preempted_job_is_queued_again_once,
    a_preempted_job_that_is_not_queued_again_is_cancelled,
    an_observation_is_complete_and_in_order,
    a_held_job_is_shown_held_and_not_pinned,
    a_pinned_job_runs_on_its_node_and_ends,
    a_call_for_an_outdated_run_is_stale,
    a_missing_job_is_gone,
    a_pin_needs_a_node,
    unpin_restores_the_gate,
    unpinning_a_running_job_is_stale,
    requeuing_a_pending_job_leaves_it_at_the_gate,
    requeuing_a_running_job_puts_it_at_the_gate,
    revoke_ends_a_pending_job,
    a_node_with_a_job_is_not_deleted,
    a_job_that_is_held_tells_its_user_why_and_is_released_by_its_user,
    deleting_a_missing_node_succeeds,
    a_node_that_is_set_down_loses_its_job,
    a_line_is_left_for_the_user,
    text_of_others_is_kept_beside_ours,
    only_jobs_that_wait_at_the_gate_are_told,
    an_array_is_told_at_once_and_its_running_tasks_are_not,
    users_are_known_or_gone,
    an_offer_is_taken_by_one_job_as_it_is_submitted,
    a_withdrawn_offer_is_not_taken_and_never_repeated,
    a_job_that_would_not_start_on_it_takes_no_offer,
    an_excluded_user_takes_no_offer_and_a_taken_one_names_its_user,
    offers_expire_without_observations,
    a_part_shows_the_jobs_and_users_that_were_asked_for,
    a_part_shows_a_job_from_its_start_to_its_end,
    a_part_names_what_it_did_not_find,
    a_part_shows_the_tasks_of_an_array,
    a_part_of_nothing_shows_the_offers,
)


class Simulated(Harness):
    uid = 1000

    def __init__(self, seed: int, pair: Pair) -> None:
        cluster = ClusterSettings(last_id=1, bf_cycle=(0.0, 0.0))  # all ids are used again
        self.world = SimulatedWorld(seed, WorldSettings(cluster=cluster, pair=pair))
        self.scheduler = self.world.scheduler(Random(seed))
        self.hypervisor = SimulatedHosts(self.world.machines, Random(seed))

    async def submit(
        self,
        seconds: float = 3600.0,
        *,
        held: bool = False,
        priority: int | None = None,
        nodes: int = 1,
        name: str = "job",
        lingers: float = 0.0,
    ) -> str:
        batch = Batch(
            name, seconds=seconds, nodes=nodes, size=Size(1, 64), held=held, priority=priority or 1000, lingers=lingers
        )
        return self.world.cluster.submit(batch)

    async def submit_array(self, tasks: int) -> list[str]:
        return self.world.cluster.submit_array(Batch(seconds=3600.0, size=Size(1, 64)), tasks)

    async def cancel(self, job_id: str) -> None:
        self.world.cluster.cancel(job_id)

    async def comment(self, job_id: str) -> str:
        record = self.world.cluster.jobs[job_id]
        return f"{record.remark} {record.comment}"

    async def write(self, job_id: str, text: str) -> None:
        for record in self.world.cluster.tasks_beside(self.world.cluster.jobs[job_id]):
            record.remark = text

    async def hold(self, job_id: str) -> None:
        self.world.cluster.hold(job_id)

    async def release(self, job_id: str) -> None:
        self.world.cluster.release(job_id)

    async def requeue_late(self, job: JobRef, meanwhile: Callable[[], Awaitable[None]]) -> None:
        """The simulated schedulers look and act at once."""
        await meanwhile()
        await self.scheduler.requeue(job)

    async def suspend(self, job_id: str) -> None:
        self.world.cluster.suspend(job_id)

    async def resume(self, job_id: str) -> None:
        self.world.cluster.resume(job_id)

    @asynccontextmanager
    async def away(self, *, gone: bool = False) -> AsyncIterator[None]:
        self.world.cluster.go_away()
        yield
        self.world.cluster.come_back()

    async def reserve(self) -> None:
        self.world.cluster.reserve("maintenance", 0.0, 600.0)

    async def open_again(self) -> None:
        self.world.cluster.reservation = None

    async def reconfigure(self) -> None:
        self.world.cluster.reconfigure()

    @asynccontextmanager
    async def forgetting(self) -> AsyncIterator[None]:
        jobs = self.world.cluster.jobs
        before = set(jobs)
        yield
        await asyncio.sleep(self.world.settings.cluster.min_job_age[1] + 1.0)
        assert set(jobs) == before

    def cut_off(self, node: str) -> None:
        guest = self.world.cluster.nodes[node].guest
        guest.freeze()
        guest.cut()

    async def add_user(self, node: str) -> None:
        user = self.world.user(self.uid)
        assert user is not None
        await self.hypervisor.users.add_user(VmRef(node, "h1"), user)

    async def join(self, vm: Vm, attempt: Attempt | None) -> None:
        template = TemplateKey(vm.host, vm.image, vm.size)
        await self.hypervisor.templates.build_template(template)
        await self.hypervisor.create(VmSpec(vm.name, vm.host, vm.image, vm.kind, vm.size, vm.mac, template))
        bootstrap = await self.scheduler.bootstrap(node_spec(vm, attempt))
        known = self.world.settings.users if attempt is not None else ()
        users = tuple(user for uid in known if (user := self.world.user(uid)))
        identity = Identity(vm.name, vm.mac, vm.address, "", f"{vm.id:032x}", users, bootstrap=bootstrap)
        await self.hypervisor.start(VmRef(vm.name, vm.host), vm.size, identity)


PAIRS = (Pair.SLURM_HOSTS, Pair.GRID_HOSTS)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
def test_simulated(check: Check, pair: Pair, seed: int) -> None:
    async def main() -> None:
        harness = Simulated(seed, pair)
        await check(harness)
        assert not harness.world.machines.violations

    run(main(), seed)
