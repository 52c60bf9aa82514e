"""VMs: from before they exist until they are seen gone."""

from __future__ import annotations

from dataclasses import replace

from multiverse.core.model.job import AttemptState, JobState, NodeState, SchedulerView
from multiverse.core.model.sizes import Depth
from multiverse.core.model.vm import Offer, Vm, VmCondition, VmSeen, VmState, is_spare
from multiverse.core.model.world import World
from multiverse.core.policy import Policy
from multiverse.core.state import PlanState
from multiverse.core.transition import _OF_ANY, Change, Event, Transition, _arrows

_VM_LIVE = (VmState.PLANNED, VmState.PARKED, VmState.STARTING, VmState.JOINED, VmState.SERVING)


VM: tuple[Transition, ...] = (
    *_arrows([None], Event.PLANNED, VmState.PLANNED),
    *_arrows([VmState.PLANNED], Event.EXISTS, VmState.PARKED),
    *_arrows([VmState.PARKED], Event.START, VmState.STARTING),
    *_arrows([VmState.STARTING], Event.REGISTERED, VmState.JOINED),
    *_arrows([VmState.JOINED], Event.RUNS, VmState.SERVING),
    *_arrows([VmState.PLANNED, VmState.STARTING], Event.FAILED, VmState.RELEASING),
    *_arrows([VmState.PARKED, VmState.STARTING, VmState.JOINED, VmState.SERVING], Event.DIED, VmState.RELEASING),
    *_arrows(_VM_LIVE, Event.RELEASED, VmState.RELEASING),
    *_arrows([*_VM_LIVE, VmState.RELEASING], Event.LOST, VmState.LOST),
    *_arrows([VmState.LOST], Event.FOUND, VmState.SERVING, VmState.RELEASING),
    *_arrows([VmState.LOST], Event.FENCED, VmState.RELEASING),
    *_arrows([VmState.RELEASING], Event.ABSENT, VmState.GONE),
    *(Transition(s, Event.TAKEN, s) for s in (VmState.PARKED, VmState.JOINED)),
    *(Transition(s, Event.NOTED, s) for s in (VmState.JOINED, VmState.SERVING, VmState.RELEASING)),
    *(Transition(s, event, s) for s in (*_VM_LIVE, VmState.LOST, VmState.RELEASING) for event in _OF_ANY),
)


COMING, UNSERVED = 30.0, 5.0
"""Seconds after which a spare that was taken is given up, if no look since has shown the job that took it: slurmctld
lets others go first between job_submit.lua and the job's making. And if one has, but a job that cannot be served."""


def releasing(vm: Vm, reason: str, *, failed: bool = True, forget: bool = False) -> Vm:
    return replace(vm, state=VmState.RELEASING, reason=reason or vm.reason, failed=failed, forget=forget)


def step_vm(state: PlanState, vm_id: int, world: World, policy: Policy) -> None:
    vm = state.vms.get(vm_id)
    if vm is None or vm.quarantined or world.hypervisor is None:
        return
    hypervisor, began = world.hypervisor.value, world.hypervisor.began
    if vm.host not in hypervisor.hosts and not vm.fenced:
        if vm.state is not VmState.LOST:
            state.move(
                Change(replace(vm, state=VmState.LOST, failed=True), Event.LOST, f"host {vm.host} is out of reach")
            )
        return
    if vm.state is VmState.LOST:
        _find_again(state, vm, hypervisor.vms.get(vm.name))
        return
    if vm.state is VmState.RELEASING:
        _step_releasing(state, vm, world)
        return
    seen = hypervisor.vms.get(vm.name)
    absent = seen is None and began > world.effect_ended_at.get(vm.key, vm.since) and began > vm.since
    dead = seen is not None and seen.condition is VmCondition.DEAD
    if vm.state is VmState.PLANNED:
        if seen is not None and seen.condition not in (VmCondition.MAKING, VmCondition.DEAD):
            state.move(Change(replace(vm, state=VmState.PARKED), Event.EXISTS))
        elif seen is not None and dead and began > world.effect_ended_at.get(vm.key, vm.since):
            _fail(state, vm, Event.FAILED, seen.reason or "the VM died while it was made")
        elif began - vm.since > policy.spawn_timeout and began > world.effect_ended_at.get(vm.key, 0.0):
            # Not while it is under way: to copy a large disk may take longer, and that has a time limit of its own.
            _fail(state, vm, Event.FAILED, f"it was not made within {policy.spawn_timeout:g} s")
        return
    if dead or absent:
        why = (seen.reason if seen else "") or "the VM died"
        if vm.state in (VmState.JOINED, VmState.SERVING) and _job_is_pinned(state, vm, world):
            # Unpin first: the row stays until the attempt has put its job back at the gate.
            if not vm.failed:
                state.move(Change(replace(vm, failed=True, reason=why), Event.NOTED, why))
            return
        _fail(state, vm, Event.DIED, why)
        return
    attempt = state.attempt_of(vm)
    to_join = vm.pool is Depth.JOINED and is_spare(vm)
    if vm.state is VmState.PARKED and (to_join or (attempt is not None and attempt.state is AttemptState.SPAWNING)):
        state.move(Change(replace(vm, state=VmState.STARTING), Event.START))
    elif vm.state is VmState.STARTING:
        _step_starting(state, vm, seen, world, policy)
    elif vm.state is VmState.JOINED and is_spare(vm) and vm.offer:
        _step_offered(state, vm, world)


def _step_offered(state: PlanState, vm: Vm, world: World) -> None:
    """Whether it was taken, or is withdrawn, a look must show that began after our last word in the matter."""
    if world.scheduler is None or world.scheduler.began <= max(world.effect_ended_at.get(vm.key, 0.0), vm.offered):
        return
    taken = world.scheduler.value.offers.get(vm.name)
    if vm.offer is Offer.TAKEN:
        busy = vm.name in occupied_nodes(world.scheduler.value)  # by a job that cannot be served: its node goes DOWN
        if world.scheduler.began - vm.offered > (UNSERVED if busy else COMING):
            why = "the job that took it did not come"
            gone = replace(vm, state=VmState.RELEASING, reason=why, failed=busy, forget=not busy)
            state.move(Change(gone, Event.RELEASED, why))
    elif taken:
        state.move(Change(replace(vm, offer=Offer.TAKEN, offered=state.now), Event.NOTED, "taken by a submission"))
    elif vm.offer is Offer.CLOSING and taken is None and vm.key in world.effect_ended_at:
        state.move(Change(replace(vm, offer=Offer.CLOSED, offered=state.now), Event.NOTED))


def _find_again(state: PlanState, vm: Vm, seen: VmSeen | None) -> None:
    """Its host is back. A VM whose job runs on goes on with it; any other has missed too much."""
    attempt = state.attempt_of(vm)
    running = seen is not None and seen.condition is VmCondition.RUNNING
    let_in = seen is not None and attempt is not None and attempt.uid in seen.introduced and vm.offer is Offer.TAKEN
    if (
        attempt
        and running
        and (attempt.state is AttemptState.ALLOCATED or (attempt.state is AttemptState.SPAWNED and let_in))
    ):
        state.move(Change(replace(vm, state=VmState.SERVING, failed=False, reason=""), Event.FOUND, "its job runs on"))
    else:
        state.move(Change(releasing(vm, f"host {vm.host} was out of reach"), Event.FOUND))


def _job_is_pinned(state: PlanState, vm: Vm, world: World) -> bool:
    """Whether its attempt's job waits, tied to it, or may: a pin may be on its way, unseen as yet."""
    attempt = state.attempt_of(vm)
    if attempt is None:
        return False
    if world.scheduler is None or attempt.state is AttemptState.SPAWNED:
        return True
    if attempt.state is AttemptState.RECLAIMING and attempt.outcome == "requeued" and not attempt.gated:
        return True
    job = world.scheduler.value.jobs.get(attempt.job.job_id)
    return job is not None and job.state is JobState.PENDING and job.pinned == attempt.feature


def _fail(state: PlanState, vm: Vm, event: Event, why: str) -> None:
    state.move(Change(releasing(vm, why), event, why))


def _step_starting(state: PlanState, vm: Vm, seen: VmSeen | None, world: World, policy: Policy) -> None:
    """Joined when both sides say so: the node is registered, and the guest is all itself."""
    if world.scheduler is None:
        return
    node = world.scheduler.value.nodes.get(vm.name)
    registered = node is not None and node.state in (NodeState.IDLE, NodeState.BUSY)
    if registered and seen is not None and seen.condition is VmCondition.RUNNING:
        state.move(Change(replace(vm, state=VmState.JOINED), Event.REGISTERED))
    elif node is not None and node.state is NodeState.DOWN:
        _fail(state, vm, Event.FAILED, f"its node came up down: {node.reason or 'no reason given'}")
    elif world.scheduler.began - vm.since > policy.spawn_timeout:
        _fail(state, vm, Event.FAILED, f"its node did not register within {policy.spawn_timeout:g} s")


def _step_releasing(state: PlanState, vm: Vm, world: World) -> None:
    """Gone only when a destruction has ended and, in looks begun since, neither side shows it."""
    ended = world.effect_ended_at.get(vm.key)
    if ended is None or world.scheduler is None or world.hypervisor is None:
        return
    if min(world.scheduler.began, world.hypervisor.began) <= max(ended, vm.since):
        return
    if vm.name not in world.hypervisor.value.vms and vm.name not in world.scheduler.value.nodes:
        state.move(Change(replace(vm, state=VmState.GONE), Event.ABSENT), free=[vm.key])
    elif not vm.forget and vm.name not in occupied_nodes(world.scheduler.value):
        state.move(Change(replace(vm, forget=True), Event.NOTED, "no job is on its node"))


def occupied_nodes(view: SchedulerView) -> set[str]:
    """Nodes that a job runs on, or is not done with. slurmctld 22.05 lets such a node be deleted once it is
    DOWN, and dies of it when it comes to the job's last step (a null pointer in step_mgr.c)."""
    return {
        node for job in view.jobs.values() if job.state not in (JobState.PENDING, JobState.ENDED) for node in job.nodes
    }
