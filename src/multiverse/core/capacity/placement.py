"""Places the VMs of one attempt, by the policy that its job or the site names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from multiverse.core.capacity.host_limits import NO_LIMITS, HostLimits
from multiverse.core.capacity.placement_policies import BUILT_IN, CandidateHost, PlacementRequest, why_impossible
from multiverse.core.capacity.room import Room
from multiverse.core.capacity.sizes import claimable_cpus, claimable_disk
from multiverse.core.context import Context
from multiverse.core.model import Attempt, CloneKind, Placement, Size

FALLBACK = Placement.WORST_FIT
"""Places VMs where the policy that was named cannot."""


def placement_of(context: Context, attempt: Attempt) -> str:
    """The name of the policy that places the attempt's VMs."""
    return attempt.request.placement or context.policy.placement


def placement_request(context: Context, attempt: Attempt, kind: CloneKind, count: int) -> PlacementRequest:
    """The placement of so many of the attempt's VMs, as clones of that kind."""
    return PlacementRequest(count, attempt.request.size, context.image_of(attempt), kind, attempt.request.account)


def place_vms(
    context: Context,
    room: Room,
    wanted: PlacementRequest,
    claims: Mapping[str, Size],
    attempt: Attempt,
    hosts: HostLimits = NO_LIMITS,
) -> list[str] | None:
    """Hosts for VMs of the attempt, all or none, each with what it would claim there; takes the room."""
    name, state, count = placement_of(context, attempt), context.state, wanted.vms
    seed = f"{state.entropy}/{attempt.id}"
    own = context.policy.placements.get(name)
    if own is None:
        if name not in BUILT_IN:  # the site's settings named it when the job was submitted
            state.placement_faults[name] = "the settings name no such placement policy"
        choose, siblings = BUILT_IN.get(name, BUILT_IN[FALLBACK]), [vm.host for vm in state.vms_of(attempt)]
        return room.place(count, claims, hosts=hosts, choose=choose, seed=seed, siblings=siblings)
    candidates = _candidates(context, room, claims, hosts)
    if count and sum(host.holds for host in candidates) >= count:
        chosen, fault = _ask(own, wanted, candidates, seed)
        if not fault:
            state.placement_faults.pop(name, None)
            for host in chosen:
                room.take(host, claims[host])
            return chosen
        state.placement_faults[name] = fault
    return room.place(count, claims, hosts=hosts)


def _candidates(context: Context, room: Room, claims: Mapping[str, Size], hosts: HostLimits) -> list[CandidateHost]:
    found, (accept, limit) = list[CandidateHost](), hosts
    for name in room.holding(claims, lambda one: accept(one) and limit(one) > 0):
        host, claim = context.hosts[name], claims[name]
        memory = int(host.capacity.memory * host.overcommit.memory)
        capacity = Size(claimable_cpus(host), memory, claimable_disk(host), host.capacity.net)
        holds = min(room.held(name, claim), limit(name))
        found.append(CandidateHost(name, Size(*room.free[name]), capacity, claim, holds))
    return found


def _ask(
    policy: Callable[..., Sequence[str]], request: PlacementRequest, hosts: Sequence[CandidateHost], seed: str
) -> tuple[list[str], str]:
    """What a policy of the site chooses, or why that cannot be used."""
    try:
        chosen = policy(request, tuple(hosts), seed)
        fault = why_impossible(chosen, request.vms, hosts)
    except Exception as error:  # a fault of the site's code concerns this choice only
        return [], f"it raised {error!r:.200}"
    return list(chosen) if not fault else [], fault
