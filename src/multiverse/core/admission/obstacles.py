"""What keeps a job from being admitted whatever is free: that no host could ever hold it, or that other processes leave
too little of the memory of hosts' machines, where more may be claimed than is declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from multiverse.core.capacity.empty_hosts import largest_on
from multiverse.core.capacity.room import every_host, index_of, memory_beyond, must_keep
from multiverse.core.capacity.sizes import template_claim, vm_claims
from multiverse.core.capacity.usable_hosts import avoided_hosts, drained_hosts
from multiverse.core.capacity_index import HostMap
from multiverse.core.clones.kinds import Choice, Way, on_hosts_making, unable_to_make, ways_now, ways_to_make
from multiverse.core.clones.templates import could_hold, node_request
from multiverse.core.context import Context
from multiverse.core.leases.leasable import fits_on_leases
from multiverse.core.model import Attempt, CloneKind, Reason, Request, Size, Why


def why_unfit(context: Context, attempt: Attempt) -> tuple[Reason | None, bool]:
    """Why none of the hosts that take new VMs, have the image, and make such clones of it, could hold the job, were
    they empty (None: one could), and whether hosts may yet: those that are drained, those that cannot make such clones
    now, those that the image can still come to, those that can be leased, and those out of reach or fenced, of which
    nobody knows what they could hold."""
    if _fits_now(context, attempt):
        return None, True
    if context.avoided and _fits_now(context.with_avoided(), attempt):
        return Why.ALL_AVOIDED(*avoided_hosts(context, context.image_of(attempt))), True
    if context.policy.leases and fits_on_leases(context, attempt):
        return Why.TO_BE_LEASED(), True
    resumed = context.with_drained()
    if len(resumed.hosts) > len(context.hosts) and _fits_now(resumed, attempt):
        return Why.ALL_DRAINED(*drained_hosts(context)), True
    return _why_unfit(resumed, attempt)


def _fits_now(context: Context, attempt: Attempt) -> bool:
    ways = ways_to_make(context, attempt)
    return _fits_one_way(context, attempt, ways_now(context, attempt, ways) or ways)


def _why_unfit(context: Context, attempt: Attempt) -> tuple[Reason, bool]:
    image, hosts, state = context.image_of(attempt), context.hosts, context.state
    ways = ways_to_make(context, attempt)
    now = ways_now(context, attempt, ways) or ways
    kind, templates = ways[0]
    unable = unable_to_make(image, ways) if _fits_one_way(context, attempt, ways) else []
    without = every_host(context, context.policy.base, lambda host: image not in host.images)
    anywhere = HostMap((*templates.parts, *without.parts))
    hope = bool(unable) or could_hold(context, attempt, kind, anywhere)
    if not hosts:
        why = Why.NO_HOST()
    elif hope and not templates:
        why = Why.NO_IMAGE(image=image)
    else:
        lacking = Why.WITHOUT_IMAGE(image=image, hosts=without) if hope and without else None
        why = _largest(context, attempt, *now[0]).also(*unable, lacking)
    away = sorted(name for name, known in state.hosts.items() if name not in hosts and known.is_member)
    return why.also(Why.AWAY_NOW(hosts=away) if away else None), hope or bool(away) or not hosts


def _fits_one_way(context: Context, attempt: Attempt, ways: Sequence[Way]) -> bool:
    return any(could_hold(context, attempt, kind, sizes) for kind, sizes in ways)


def _largest(context: Context, attempt: Attempt, kind: CloneKind, templates: HostMap[Size]) -> Reason:
    node, nodes, image = attempt.request.size, attempt.request.nodes, context.image_of(attempt)
    parts = (templates or every_host(context, context.policy.base)).parts
    most = (largest_on(part.kind.host, image, context.policy, kind) for part in parts if part)
    fit = max(most, key=lambda size: (size.memory, size.cpus))
    return Why.TOO_LARGE(vms=nodes, node=str(node), per_host=attempt.request.per_host, fit=str(fit))


class ForeignMemory:
    """Says in one round of admission of which attempts others hold the memory; alike ones are looked at once."""

    def __init__(self) -> None:
        self._said: dict[tuple[Request, CloneKind, frozenset[str], bool], Reason | None] = {}

    def why(self, context: Context, attempt: Attempt, choice: Choice) -> Reason | None:
        """Why the attempt would have no room on empty hosts either, with nothing of ours on them: others on their
        machines have the memory, and no job behind it is to wait for that. None where no more is claimed than
        declared: there nobody looks at what others have. How much others hold is not known to the MiB: who was told
        this once is told so until there is some more than enough."""
        if all(kind.host.overcommit.memory <= 1 for kind in index_of(context).classes.values()):
            return None
        lacking = context.state.lacking
        known = (attempt.request, choice.kind) in lacking
        alike = (attempt.request, choice.kind, context.without, known)
        if alike not in self._said:
            self._said[alike] = _why(context, attempt, choice, margin=known)
            (lacking.add if self._said[alike] else lacking.discard)(alike[:2])
        return self._said[alike]


def _why(context: Context, attempt: Attempt, choice: Choice, *, margin: bool) -> Reason | None:
    wanted = node_request(context, attempt, choice.kind)
    sizes = on_hosts_making(wanted.image, choice.kind, choice.sizes)
    frozen: Mapping[str, Size] = {}
    if choice.forks:
        frozen = sizes.map(lambda host, size: template_claim(size, host, wanted.image))
    claims = vm_claims(wanted, sizes, context.hosts, context.policy)
    floors = memory_beyond(context, claims, frozen, attempt.request, margin=margin)
    return Why.MEMORY(*must_keep(floors), others=1) if floors is not None else None
