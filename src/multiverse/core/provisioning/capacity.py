"""What is free on each host, what rows claim of it, and the largest job that a host could ever hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType

from multiverse.core.model import (
    Claim,
    CloneKind,
    Host,
    Key,
    KnownHost,
    Size,
    Template,
    Vm,
    VmState,
    World,
)
from multiverse.core.policy import Policy
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.sizes import (
    NodeRequest,
    claimable_disk,
    empty_host,
    short_of_disk,
    template_claim,
    template_size,
    vm_claim,
    vm_claims,
    vm_size,
)
from multiverse.core.state import State


class Blockage(StrEnum):
    """Why admission is blocked, so that nothing may be made for jobs that have not come yet."""

    NONE = ""
    TURN = "turn"  # as many VMs as may be made at once are being made, or room is being freed for a job
    ROOM = "room"  # jobs wait for room or for an address


class Room:
    """What is free in each capacity domain, while one pass takes from it and gives back. `tight` are the hosts whose
    machine has less memory available than could be claimed, `full` those whose disk has too little room for a VM."""

    def __init__(self, hosts: Mapping[str, Host], used: Mapping[str, Size] = MappingProxyType({})) -> None:
        self.free = {name: [h.capacity.cpus, h.capacity.memory, h.capacity.disk] for name, h in hosts.items()}
        self.tight: set[str] = set()
        self.full: set[str] = set()
        for domain, size in used.items():
            self.take(domain, size)

    def overcommit(self, host: Host, coming: int, policy: Policy) -> None:
        """Let more be claimed there than is declared, as long as the machine has it once all memory is used that is yet
        to be used (`coming`, MiB), above what it must keep. Not where nobody knows what the machine has."""
        if policy.overcommit > 1 and host.available > 0:
            free = self.free[host.name]
            free[1] += int(host.capacity.memory * (policy.overcommit - 1))
            left = host.available - policy.floor - coming
            if left < free[1]:
                free[1] = left
                self.tight.add(host.name)

    def limit_disk(self, host: Host, policy: Policy) -> None:
        """Let more disk be claimed there than is declared, and nothing at all while its disk is short."""
        self.free[host.name][2] += claimable_disk(host, policy) - host.capacity.disk
        if short_of_disk(host, policy):
            self.full.add(host.name)

    def why_full(self, claims: Mapping[str, Size], policy: Policy, otherwise: str) -> str:
        """Why there is no room for what is to be claimed there."""
        if full := [name for name in claims if name in self.full]:
            return f"waiting for disk: {', '.join(full)} must have {policy.disk_floor} MiB available"
        if tight := self.lack_memory(claims):
            return f"waiting for memory: {', '.join(tight)} must keep {policy.floor} MiB available"
        return f"waiting for capacity: {otherwise}"

    def lack_memory(self, claims: Mapping[str, Size]) -> list[str]:
        """Hosts that would fit what is to be claimed there, but for the memory that their machine has available."""
        return [
            name
            for name, claim in claims.items()
            if name in self.tight
            and claim.memory > self.free[name][1]
            and self.fits(name, replace(claim, memory=self.free[name][1]))
        ]

    def take(self, domain: str, size: Size) -> None:
        self._add(domain, size, -1)

    def give(self, domain: str, size: Size) -> None:
        self._add(domain, size, 1)

    def _add(self, domain: str, size: Size, sign: int) -> None:
        if domain in self.free:
            free = self.free[domain]
            free[0] += sign * size.cpus
            free[1] += sign * size.memory
            free[2] += sign * size.disk

    def fits(self, domain: str, size: Size) -> bool:
        cpus, memory, disk = self.free[domain]
        if domain in self.full:
            return False
        return size.cpus <= cpus and size.memory <= memory and size.disk <= disk

    def place(self, count: int, claims: Mapping[str, Size]) -> list[str] | None:
        """Domains for `count` VMs, each with what it would claim there, all or none; takes the room. The emptiest
        domain comes first, by free CPUs, then memory, then name, so that equals are decided alike in every run."""
        chosen: list[str] = []
        for _ in range(count):
            fitting = [name for name, claim in claims.items() if name in self.free and self.fits(name, claim)]
            if not fitting:
                for name in chosen:
                    self.give(name, claims[name])
                return None
            best = min(fitting, key=lambda name: (-self.free[name][0], -self.free[name][1], name))
            self.take(best, claims[best])
            chosen.append(best)
        return chosen


def room_of(context: Context, *, without: Collection[Key] = ()) -> Room:
    """What is free on the hosts in sight, as far as declared, or over-committed; `without` some rows, as if what they
    claim and hold had been given back."""
    state, hosts, policy = context.state, context.hosts, context.policy
    room = Room(hosts, state.used)
    for key in (key for owner in without for key in state.claims_of(owner)):
        room.give(key.domain, state.claims[key].size)
    mapped = _left_behind_in(state, without)
    for claim in mapped:
        room.take(claim.domain, claim.size)
    for _, host in sorted(hosts.items()):
        room.limit_disk(host, policy)
    if policy.overcommit > 1:
        coming: Counter[str] = Counter()
        for claim in state.claims.values():
            held, settled = held_by(state, claim.owner, context.world, policy)
            gone = claim.owner in without
            coming[claim.domain] += -int(held) if gone else yet_to_come(claim.size, held, settled=settled)
        for claim in _left_behind_in(state, ()):
            coming[claim.domain] -= claim.size.memory if claim not in mapped else 0
        for name, host in sorted(hosts.items()):
            room.overcommit(host, coming[name], policy)
    return room


def held_by(state: State, owner: Key, world: World, policy: Policy) -> tuple[float, bool]:
    """MiB that a row holds of its host's machine, and whether that has settled. A VM on its way out may yet take the
    rest of its claim, for its end may be long in coming."""
    match row := state.get(owner):
        case Vm() if (vm := world.vm(row)) is not None:
            settled = vm.private > 0 and row.state is VmState.SERVING and state.now - row.since >= policy.settle
            return vm.private, settled
        case Template() if (latest := world.latest(row.source)) and (seen := latest.value.templates.get(row.which)):
            return seen.held, False
        case _:
            return 0.0, False


def left_behind(vms: Iterable[Vm], templates: Mapping[int, Template]) -> list[Claim]:
    """What templates hold whose rows have ended, because they were dropped or their image was built anew: their VMs map
    their memory to the end. That memory exists once then, however often a template is held."""
    gone = {
        vm.template_id: Claim(Key("template", vm.template_id), vm.host, Size(0, vm.template_size.memory, 0))
        for vm in vms
        if vm.template_id is not None and vm.template_size and vm.template_id not in templates
    }
    return [claim for _, claim in sorted(gone.items())]


def _left_behind_in(state: State, without: Collection[Key]) -> list[Claim]:
    """The same, of the live VMs but `without` some, found through the index."""
    ended = [id_ for id_ in state.template_ids_of_vms() if id_ not in state.templates]
    return left_behind(
        (vm for id_ in ended for vm in state.vms_of_template(id_) if vm.key not in without), state.templates
    )


def yet_to_come(claim: Size, held: float, *, settled: bool) -> int:
    """MiB that the holder of a claim may yet use beside the `held` MiB that it uses: the rest of the claim; a holder
    that has settled is taken to stay as it is, within a quarter."""
    rest = max(0, math.ceil(claim.memory - held))
    return min(rest, math.ceil(held / 4)) if settled else rest


# --- what could ever run ---------------------------------------------------------------------------


def could_ever_fit(
    wanted: NodeRequest, count: int, templates: Mapping[str, Size], hosts: Mapping[str, Host], policy: Policy
) -> bool:
    """Whether empty hosts, with nothing on them but the template of that size, could hold `count` VMs for the node."""
    room = Room({name: empty_host(host, policy) for name, host in hosts.items()})
    for name, template in templates.items():
        room.take(name, template_claim(template, hosts[name], wanted.image))
    return room.place(count, vm_claims(wanted, templates, hosts, policy)) is not None


def largest_on(host: Host, image: str, policy: Policy, kind: CloneKind = CloneKind.INSTANT) -> Size:
    """The largest node that the host could ever hold, with nothing on it but the template that it is forked from or, if
    it boots, a template of the base size. What an image can do that is not there yet is taken to be everything. Zero
    memory if not even the smallest fits."""
    plugs = {image: frozenset({"plug_cpus", "plug_memory"})}
    able = host if image in host.images else replace(host, images=plugs, disks={})
    capacity = empty_host(host, policy).capacity
    disk = capacity.disk - template_claim(policy.base, able, image).disk

    def fits(memory: int) -> bool:
        node = Size(1, memory)
        template = template_size(node, able, image, policy) if kind is CloneKind.INSTANT else policy.base
        claim = vm_claim(vm_size(node, template, able, policy), able, image, kind)
        together = claim.memory + template_claim(template, able, image).memory
        return claim.cpus <= capacity.cpus and together <= capacity.memory and claim.disk <= disk

    # What is needed grows with the node's memory, so the largest that fits is found by halving.
    least, most = 0, capacity.memory + 1
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return Size(capacity.cpus, least, max(0, disk - able.disk_cost(image, kind).overhead))


def largest_nodes(hosts: Mapping[str, KnownHost], policy: Policy) -> dict[str, tuple[Size, ...]]:
    """By image, the largest nodes that could ever run on any known host, also one that is drained or out of reach: what
    a job must not exceed. A host that an operator fenced is off, and counts no more than it does in admission. A size
    that another one contains is left out. Nothing is said while the settings name a host that was never observed."""
    values = [known.value for _, known in sorted(hosts.items()) if not known.is_off]
    known_values = [value for value in values if value is not None]
    if not known_values or len(known_values) < len(values):
        return {}
    images = sorted({policy.image, *(image for value in known_values for image in value.images)})
    ways = [(host, kind) for host in known_values for kind in _kinds(host)]
    return {image: _maxima([largest_on(host, image, policy, kind) for host, kind in ways]) for image in images}


def _kinds(host: Host) -> list[CloneKind]:
    """The kinds of clones whose sizes count on the host. Those that boot may be larger than one that is forked, where
    an image cannot plug all."""
    return [
        CloneKind.INSTANT,
        *(kind for kind in (CloneKind.LINKED, CloneKind.FULL) if kind.value in host.abilities),
    ]


def _maxima(sizes: Sequence[Size]) -> tuple[Size, ...]:
    def contains(one: Size, other: Size) -> bool:
        return one.cpus >= other.cpus and one.memory >= other.memory and one.disk >= other.disk

    distinct = sorted(set(sizes))
    return tuple(s for s in distinct if not any(contains(other, s) for other in distinct if other != s))
