"""What would start at once: how many nodes of which sizes, if jobs of one node asked for them, and which hosts could
take a VM of a size. Pure; nothing is claimed.

Counted as admission would admit them one after the other: on hosts that take new VMs and have the template ready (or
boot the image), as many as have room; and the joined spares of that size.
"""

from __future__ import annotations

from dataclasses import dataclass

from multiverse.core.capacity.placement_policies import BUILT_IN
from multiverse.core.capacity.room import room_of
from multiverse.core.capacity.sizes import claimable_cpus, claimable_disk, template_size, vm_claim, vm_claims, vm_size
from multiverse.core.clones.kinds import choose_clones, may_fork, on_hosts_making
from multiverse.core.clones.pacing import wait_for
from multiverse.core.clones.spares import joined_for
from multiverse.core.clones.templates import node_request, wish_of
from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.model import Attempt, CloneKind, Depth, JobRef, Request, Size
from multiverse.core.rows import plus

LADDER = 10
"""The most sizes that are shown beside those that jobs and pools ask for."""


@dataclass(frozen=True, slots=True)
class ImmediateCapacity:
    """So many nodes of a size would start at once, and so many more as soon as hosts have built the template."""

    size: Size
    now: int
    with_template: int


@dataclass(frozen=True, slots=True)
class CapacityUsage:
    """What VMs may claim on all hosts of the site in sight: what jobs' VMs, spares and templates claim, what is free on
    hosts that take new VMs, and what is on hosts that take none. Of a host where more may be claimed than is declared,
    as much as may be claimed. `hosts` and `closed_hosts` are their numbers."""

    hosts: int
    total: Size
    jobs: Size
    spares: Size
    templates: Size
    free: Size
    closed: Size
    closed_hosts: int


def immediate_capacity(context: Context, size: Size, image: str | None = None) -> ImmediateCapacity:
    """How many nodes of a size, and of an image (None: the site's), would start at once."""
    attempt = Attempt(0, context.state.now, JobRef("", 0), "", 0, Request(1, size, image))
    choice = choose_clones(context, attempt)
    name, kind = context.image_of(attempt), choice.kind
    able = on_hosts_making(name, kind, choice.sizes)
    ready = wish_of(context, attempt, able).ready() if choice.forks else able
    claims = vm_claims(node_request(context, attempt, kind), able, context.hosts, context.policy)
    room, state = room_of(context), context.state
    held = {host: room.held(host, claims[host]) for host in able}

    def is_due(host: str) -> bool:
        return wait_for((host, name, kind), state.paced, state.now, context.policy) <= 0

    now = sum(held[host] for host in ready if is_due(host)) + _joined(context, attempt)
    return ImmediateCapacity(size, now, sum(count for host, count in held.items() if host not in ready))


def _joined(context: Context, attempt: Attempt) -> int:
    """How many joined spares a job of one such node could take."""
    if not context.policy.pools or not may_fork(context, attempt):
        return 0
    found: set[int] = set()
    while vm := joined_for(context, attempt, found):
        found.add(vm.id)
    return len(found)


def sizes_to_show(context: Context) -> list[Size]:
    """Sizes worth a line: 1, 2, 4, … CPUs with as much memory for each as hosts have, and those that waiting jobs and
    pools ask for."""
    hosts = list(context.hosts.values())
    if not hosts:
        return []
    each = min(host.capacity.memory // host.capacity.cpus for host in hosts)
    each = max(128, 1 << (each * 3 // 4).bit_length() - 1)  # guests need some memory beside that, and templates do
    most = max(host.capacity.cpus for host in hosts)
    ladder = [Size(1 << step, each << step) for step in range(LADDER) if 1 << step <= most]
    asked = [one.request.size for one in context.state.queue.one_of_each_request()[:LADDER]]
    pools = [pool.size for pool in context.policy.pools if pool.depth is Depth.JOINED]
    return sorted({*ladder, *asked, *pools})


def usage(context: Context) -> CapacityUsage:
    """What is used and what is free."""
    state, room = context.state, room_of(context)
    sums = dict.fromkeys(("total", "job", "spare", "template", "free", "closed"), Size(0, 0))

    def add(what: str, size: Size) -> None:
        sums[what] = plus(sums[what], size)

    closed = 0
    for name, host in context.in_sight.items():
        most = int(host.capacity.memory * host.overcommit.memory)
        add("total", Size(claimable_cpus(host), most, claimable_disk(host), host.capacity.net))
        for claim in state.claims.on(name):
            row = state.get(claim.owner)
            what = "template" if claim.owner.kind == "template" else "job"
            what = "spare" if getattr(row, "is_spare", False) else what
            add(what, claim.size)
        free = Size(*(max(0, one) for one in room.free[name]))
        if name in context.closed:
            closed += 1
            add("closed", free)
        else:
            add("free", free)
    return CapacityUsage(
        len(context.in_sight), sums["total"], sums["job"], sums["spare"], sums["template"],
        sums["free"], sums["closed"], closed,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompatibleHost:
    """A host with room for such a VM. `free` may still be claimed there, of which the VM would claim `claim`; `holds`
    of them fit. `use` is the share of its CPUs or memory that is in use, see `load.use`."""

    name: str
    free: Size
    claim: Size
    holds: int
    use: float


def compatible_hosts(
    context: Context, node: Size, image: str = "", kind: CloneKind | None = None, policy: str = ""
) -> list[CompatibleHost]:
    """The hosts that take new VMs, have the image, make that kind of clone, and have room for a VM whose node declares
    `node`; the one that the policy would take first, then by their use. A template that has to be built first is not
    counted. Empty or None: as in the settings. Its cost is that of a look at each host. Raises `Refused` if there is no
    such policy."""
    name = policy or context.policy.placement
    if name not in BUILT_IN:
        raise Refused(f"{name} is no placement policy that is built in", hint=f"give one of {', '.join(BUILT_IN)}")
    image, kind, room = image or context.policy.image, kind or context.policy.kind, room_of(context).copy()
    claims = {}
    for host in context.hosts.values():
        makes = kind is CloneKind.AUTO or kind.value in host.abilities
        if image in host.images and makes and host.name in room.free:
            size = vm_size(node, template_size(node, host, image, context.policy), host, context.policy)
            claims[host.name] = vm_claim(size, host, image, kind)
    found = [
        CompatibleHost(one, Size(*room.free[one]), claims[one], room.held(one, claims[one]), room.use(one))
        for one in room.holding(claims)
    ]
    first = room.place(1, claims, choose=BUILT_IN[name], seed=context.state.entropy) or [""]
    return sorted(found, key=lambda one: (one.name != first[0], one.use, one.name))
