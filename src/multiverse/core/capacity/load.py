"""How much of a host is in use, as it was measured and as it is claimed."""

from __future__ import annotations

from collections.abc import Iterable

from multiverse.core.capacity.sizes import claimable_cpus
from multiverse.core.capacity_index import Free
from multiverse.core.model import Claim, Host, Size, Vm

MEASURED_FOR = 60.0
"""Seconds of which the load of a host is the mean."""


def use(host: Host, free: Free, before: Free, unmeasured: Size) -> float:
    """The share of a host's CPUs or memory, whichever is more, that is in use: as measured in the last minute, with
    what is claimed and not measured yet, and with what was taken since `before` was free. What is claimed, if nothing
    is known of its use."""
    cpus, memory = free[:2]
    if host.load is None:
        whole = Size(claimable_cpus(host), host.capacity.memory)
        return _share(whole.cpus - cpus, whole.memory - memory, whole)
    return _share(
        host.load.cpus + unmeasured.cpus + before[0] - cpus,
        host.load.memory + unmeasured.memory + before[1] - memory,
        host.machine or host.capacity,
    )


def _share(cpus: float, memory: float, size: Size) -> float:
    return max(cpus / max(1, size.cpus), memory / max(1, size.memory))


def unmeasured(now: float, vms: Iterable[Vm], claims: Iterable[Claim]) -> Size:
    """What VMs claim that have been in their state for so short a time that the load of their host, which is a mean,
    does not show them yet."""
    young = {vm.key for vm in vms if now - vm.since < MEASURED_FOR and not vm.leaving}
    sizes = [claim.size for claim in claims if claim.owner in young]
    return Size(sum(size.cpus for size in sizes), sum(size.memory for size in sizes))
