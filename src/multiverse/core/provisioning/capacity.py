"""What is free on each host, and what rows claim of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from enum import StrEnum

from multiverse.core.model.host import Claim, Host, HypervisorView
from multiverse.core.model.keys import Key
from multiverse.core.model.sizes import Size
from multiverse.core.model.template import Template
from multiverse.core.model.vm import Vm, VmState
from multiverse.core.policy import Policy
from multiverse.core.provisioning.sizes import BLOCK, _most_memory, empty_host, template_claim, vm_claims
from multiverse.core.state import PlanState


class Blockage(StrEnum):
    """What jobs wait for that might start otherwise: nothing for those that have not come yet may be in their way."""

    NONE = ""
    TURN = "turn"  # as many VMs as may be made at once are being made, or the room that it needs is being left
    ROOM = "room"  # or an address


class Room:
    """What is free on each host, while one pass takes from it and gives back. `tight` are the hosts whose machine has
    less left than could be claimed."""

    def __init__(self, hosts: Mapping[str, Host], claims: Iterable[Claim]) -> None:
        self.free = {name: [h.capacity.cpus, h.capacity.memory, h.capacity.disk] for name, h in hosts.items()}
        self.tight: set[str] = set()
        for claim in claims:
            self.take(claim.host, claim.size)

    def overcommit(self, host: Host, coming: int, policy: Policy) -> None:
        """Let more be claimed there than is declared, while its machine has it, when all has come that is yet to come
        and above what it must keep. Not where nobody knows what the machine has."""
        if policy.overcommit > 1 and host.available > 0:
            free = self.free[host.name]
            free[1] += int(host.capacity.memory * (policy.overcommit - 1))
            left = host.available - policy.floor - coming
            if left < free[1]:
                free[1] = left
                self.tight.add(host.name)

    def lack_memory(self, claims: Mapping[str, Size]) -> list[str]:
        """Hosts that would fit what is to be claimed there, but for the memory that their machine has left."""
        return [
            name
            for name, claim in claims.items()
            if name in self.tight
            and claim.memory > self.free[name][1]
            and self.fits(name, replace(claim, memory=self.free[name][1]))
        ]

    def take(self, host: str, size: Size) -> None:
        self._add(host, size, -1)

    def give(self, host: str, size: Size) -> None:
        self._add(host, size, 1)

    def _add(self, host: str, size: Size, sign: int) -> None:
        if host in self.free:
            free = self.free[host]
            free[0] += sign * size.cpus
            free[1] += sign * size.memory
            free[2] += sign * size.disk

    def fits(self, host: str, size: Size) -> bool:
        cpus, memory, disk = self.free[host]
        return size.cpus <= cpus and size.memory <= memory and size.disk <= disk

    def place(self, count: int, claims: Mapping[str, Size]) -> list[str] | None:
        """Hosts for `count` VMs, each with what it would claim there, all or none; takes the room. The emptiest
        host first, by free CPUs, then memory, then name, so that equals are decided alike in every run."""
        chosen: list[str] = []
        for _ in range(count):
            fitting = [h for h, claim in claims.items() if h in self.free and self.fits(h, claim)]
            if not fitting:
                for host in chosen:
                    self.give(host, claims[host])
                return None
            best = min(fitting, key=lambda h: (-self.free[h][0], -self.free[h][1], h))
            self.take(best, claims[best])
            chosen.append(best)
        return chosen


def left_behind(vms: Iterable[Vm], templates: Mapping[int, Template]) -> list[Claim]:
    """What templates hold whose rows are gone, for they were dropped or their image was built anew: their VMs map
    their memory to the end, which is there once then, however often a template is held."""
    gone = {
        vm.origin: Claim(Key("template", vm.origin), vm.host, Size(0, vm.parent.memory, 0))
        for vm in vms
        if vm.origin is not None and vm.parent and vm.origin not in templates
    }
    return [claim for _, claim in sorted(gone.items())]


def yet_to_come(claim: Size, held: float, policy: Policy, *, settled: bool) -> int:
    """MiB that whoever holds a claim may yet take, beside the `held` that he has: the rest of it; one that has settled
    is taken to stay as he is, within a quarter."""
    rest = max(0, math.ceil(claim.memory - held))
    return min(rest, math.ceil(held / 4)) if settled else rest


def could_ever_fit(
    told: Size, count: int, parents: Mapping[str, Size], hosts: Mapping[str, Host], policy: Policy
) -> bool:
    """Whether empty hosts, with nothing on them but the template of that size, could hold the request."""
    room = Room({name: empty_host(host, policy) for name, host in hosts.items()}, ())
    for name, parent in parents.items():
        room.take(name, template_claim(parent, hosts[name]))
    return room.place(count, vm_claims(told, parents, policy)) is not None


def largest(hosts: Mapping[str, Host], image: str, policy: Policy) -> Size:
    """The largest request that an empty host could serve: what to tell whoever asked for more. Zero
    without hosts. The host with the most memory is named, then the one with the most CPUs."""
    if not hosts:
        return Size(0, 0)
    empty = (empty_host(host, policy) for host in hosts.values())
    host = max(empty, key=lambda h: (h.capacity.memory, h.capacity.cpus))
    best = host.capacity
    # vm_size() backwards: blocks of memory that fit, less the reserve and the page structures.
    room = best.memory - policy.vm_overhead - template_claim(policy.base, host).memory
    whole = policy.base.memory + (room - policy.base.memory) // BLOCK * BLOCK
    if image in host.images and not host.image_can(image, "plug_memory"):
        whole = _most_memory(host, policy)
    told = max(0, (whole - policy.guest_reserve) * 50 // 51)
    return Size(best.cpus, told, best.disk)


def room_of(state: PlanState, view: HypervisorView, policy: Policy, *, without: Collection[Key] = ()) -> Room:
    """What is free on the hosts in sight, as far as declared, or over-committed; `without` some rows, as if what they
    claim and hold had been given back."""
    staying = [vm for vm in state.vms.values() if vm.key not in without]
    room = Room(view.hosts, (claim for claim in state.claims.values() if claim.owner not in without))
    mapped = left_behind(staying, state.templates)
    for claim in mapped:
        room.take(claim.host, claim.size)
    if policy.overcommit > 1:
        coming: Counter[str] = Counter()
        for claim in state.claims.values():
            held, settled = held_by(state, claim.owner, view, policy)
            gone = claim.owner in without
            coming[claim.host] += -int(held) if gone else yet_to_come(claim.size, held, policy, settled=settled)
        for claim in left_behind(state.vms.values(), state.templates):
            coming[claim.host] -= claim.size.memory if claim not in mapped else 0
        for name, host in sorted(view.hosts.items()):
            room.overcommit(host, coming[name], policy)
    return room


def held_by(state: PlanState, owner: Key, view: HypervisorView, policy: Policy) -> tuple[float, bool]:
    """MiB that a row holds of its host's machine, and whether it has settled. One on its way out may yet take the rest
    of its claim too, for its end may be long in coming."""
    match row := state.get(owner):
        case Vm() if (vm := view.vms.get(row.name)) is not None:
            settled = vm.private > 0 and row.state is VmState.SERVING and state.now - row.since >= policy.choose_clones
            return vm.private, settled
        case Template() if (template := view.templates.get(row.which)) is not None:
            return template.held, False
        case _:
            return 0.0, False
