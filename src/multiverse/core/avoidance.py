"""Hosts that are avoided for an image, because VMs of it fail to come up there.

If a VM cannot be created or started, or its node does not register, its host is at fault with its image: the host gets
no VM of that image for a time, doubled with each further failure in a row. Then one job at a time is tried there, until
a VM has joined.

The job may be at fault: its VM failed on a host before, VMs of others have joined there since, and its VM fails there
again. Such a failure counts as one of the job's attempts, and avoids no host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from multiverse.core.model.host import HostFault, KnownHost
from multiverse.core.model.job import Attempt, AttemptState
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.vm import UPCOMING_STATES, Fault, Vm, VmState
from multiverse.core.model.world import World
from multiverse.core.policy import Policy
from multiverse.core.state import State
from multiverse.core.transition import Change, Event

_MAKING = (AttemptState.CLAIMED, AttemptState.SPAWNING)


def blame(state: State, vm: Vm, why: Reason, world: World, policy: Policy) -> tuple[Fault, list[Change]]:
    """Who is at fault that a VM did not come up, and what follows: its host is avoided, unless it is its job."""
    host, attempt = state.hosts.get(vm.host), state.attempt_of(vm)
    known = host.fault_of(vm.image) if host is not None else None
    at_fault = attempt is not None and known is None and vm.host in attempt.failed_on
    changes: list[Change] = []
    if at_fault:
        return "job", changes
    if host is None or not host.is_member:
        return "host", changes
    now = state.now + world.epoch
    if known is None or known.until <= now:  # others that were being made there when it failed are the same failure
        failures = known.failures + 1 if known is not None else 1
        until = now + policy.avoids_for(failures, state.now - vm.since)
        faults = (*host.without_fault(vm.image).faults, HostFault(vm.image, failures, until, why))
        changes.append(Change(replace(host, faults=faults), Event.AVOIDED, why))
    if attempt is not None and attempt.state in _MAKING and vm.host not in attempt.failed_on:
        changes.append(Change(replace(attempt, failed_on=(*attempt.failed_on, vm.host)), Event.NOTED, why))
    return "host", changes


def joined(state: State, vm: Vm) -> list[Change]:
    """What follows from a VM that has joined: its host is good for its image."""
    host = state.hosts.get(vm.host)
    if host is None or not host.is_member or host.fault_of(vm.image) is None:
        return []
    return [Change(host.without_fault(vm.image), Event.CLEARED, Why.JOINED(vm=vm.name))]


def tried_at_once(host: KnownHost) -> KnownHost:
    """The host without its pauses: one job at a time may be tried there at once."""
    return replace(host, faults=tuple(replace(one, failures=0, until=0.0) for one in host.faults))


def avoided(state: State, image: str, now: float) -> frozenset[str]:
    """The hosts that get no VM of the image at a Unix time: still avoided, or with one VM on trial."""
    faults = state.faults.get(image)
    if not faults:
        return frozenset()
    return frozenset(name for name, fault in faults.items() if now < fault.until or is_tried(state, name, image))


def is_tried(state: State, host: str, image: str) -> bool:
    """Whether a VM of the image is on its way up on the host. A parked spare stays as it is."""
    coming = (vm for vm in state.vms_on(host) if vm.attempt is not None or vm.state is not VmState.PARKED)
    return any(vm.image == image and vm.state in UPCOMING_STATES for vm in coming)


def whose_fault(vms: Sequence[Vm]) -> str:
    """Whose fault failed VMs are: `job` if one is the job's, `host` if all are their hosts'; else empty."""
    if any(vm.fault == "job" for vm in vms):
        return "job"
    return "host" if vms and all(vm.fault == "host" for vm in vms) else ""


def forget_hosts(attempt: Attempt) -> Attempt:
    """The attempt, whose VMs have come up: what has failed before is over."""
    return replace(attempt, failed_on=(), tries=0)
