"""What is free on each host, what rows claim and use of it, and on which hosts an attempt's VMs are placed."""

from __future__ import annotations

import heapq
import math
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from multiverse.core.capacity.placement_policies import (
    BUILT_IN,
    CandidateHost,
    Chooser,
    PlacementRequest,
    draws,
    why_impossible,
)
from multiverse.core.capacity.sizes import claimable, claimable_cpus, claimable_disk, short_of_disk
from multiverse.core.capacity_index import CapacityIndex, Free, HostGroup, HostMap, Order, Part, changed, fits, how_many
from multiverse.core.context import Context
from multiverse.core.model.basics import ClaimKey, CloneKind, Key, Placement, Size
from multiverse.core.model.host import MOST_NODES, Claim, Host
from multiverse.core.model.job import Attempt, Request
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.vm import Place, Template, TemplateState, Vm, VmState
from multiverse.core.model.world import World
from multiverse.core.policy import Policy
from multiverse.core.state import State

Accept = Callable[[str], bool]
Limit = Callable[[str], int]


def any_host(_name: str) -> bool:
    return True


def any_number(_name: str) -> int:
    return MOST_NODES


class HostLimits(NamedTuple):
    """Which hosts may be used, and for how many VMs each."""

    accept: Accept = any_host
    limit: Limit = any_number


NO_LIMITS = HostLimits()  # all hosts may be used, for any number of VMs


def others_on(state: State, attempt: Attempt, taken: Iterable[Vm] = ()) -> Limit:
    """How many more of an attempt's VMs may be on a host, beside the VMs there and spares that it takes."""
    per_host = attempt.request.per_host
    if not per_host:
        return any_number
    vms = (*(one for one in state.vms_of(attempt) if not one.failed), *taken)
    there = Counter(place.host for vm in vms for place in vm.places)
    return lambda name: per_host - there[name]


T = TypeVar("T")

_ANY_BANDWIDTH = -(1 << 40)  # Mbit/s: fits wherever the rest of a claim does


class Blockage(StrEnum):
    """Why admission is blocked, so that nothing may be made for jobs that have not come yet."""

    NONE = ""
    TURN = "turn"  # as many VMs as may be made at once are being made, or room is being freed for a job
    ROOM = "room"  # jobs wait for room or for an address


class Room:
    """What is free in each domain, while one pass takes and gives back. `tight` hosts lack memory on their machine,
    `full` ones disk. The room of a pass works on the index; a copy has its own figures of hosts that change."""

    def __init__(self, hosts: Mapping[str, Host], used: Mapping[str, Size] = MappingProxyType({})) -> None:
        self._index = CapacityIndex()
        self._index.follow(hosts)
        for name, host in hosts.items():
            self._index.set_free(name, _less(host.capacity, used.get(name, Size(0, 0))))
        self.own: dict[str, Free] | None = None  # of a copy: its own figures
        self.tight, self.full = self._index.tight, self._index.full

    @classmethod
    def of(cls, index: CapacityIndex) -> Room:
        room = cls({})
        room._index, room.tight, room.full = index, index.tight, index.full
        return room

    def copy(self) -> Room:
        """A copy, which changes by itself. It costs what changes later."""
        room = Room.of(self._index)
        room.own = dict(self.own or {})
        room.tight, room.full = set(self.tight), set(self.full)
        self._index.copies.add(room)
        return room

    def keep(self, name: str, free: Free) -> None:
        if self.own is not None:
            self.own.setdefault(name, free)

    @property
    def free(self) -> Mapping[str, Free]:
        if self.own is None:
            return self._index.free
        below: MutableMapping[str, Free] = self._index.free
        return ChainMap(self.own, below)

    def set(self, name: str, free: Free, *, tight: bool, full: bool) -> None:
        (self.tight.add if tight else self.tight.discard)(name)
        (self.full.add if full else self.full.discard)(name)
        self._put(name, free)

    def _put(self, name: str, free: Free) -> None:
        if self.own is None:
            self._index.set_free(name, free)
        else:
            self.own[name] = free

    def give(self, domain: str, size: Size, sign: int = 1) -> None:
        free = self.free.get(domain)
        if free is not None:
            if self.own is None:
                self._index.tentative.add(domain)
            self._put(domain, changed(free, size, sign))

    def take(self, domain: str, size: Size) -> None:
        self.give(domain, size, -1)

    def fits(self, domain: str, size: Size) -> bool:
        if domain in self.full or size.cpus > self._index.hosts[domain].capacity.cpus:
            return False
        return fits(size, self.free[domain])

    def why_full(self, claims: Mapping[str, Size], otherwise: Reason) -> Reason:
        hosts = self._index.hosts
        if full := {name: hosts[name].overcommit.disk_floor for name in sorted(self.full) if name in claims}:
            return Why.DISK(*must_keep(full, Why.MUST_HAVE))
        if tight := self.lack_memory(claims):
            return Why.MEMORY(*must_keep({name: hosts[name].overcommit.floor for name in tight}))
        if (lacking := self.lack_bandwidth(claims)) and (most := max(self.free[name][3] for name in lacking)) >= 0:
            return Why.BANDWIDTH(most=most)
        return Why.CAPACITY(otherwise)

    def all_full(self, claims: Mapping[str, Size]) -> bool:
        return all(name in self.full for name in claims)

    def lack_memory(self, claims: Mapping[str, Size]) -> list[str]:
        """Hosts that would fit what is to be claimed there, but for the memory that their machine has available."""
        return [
            name
            for name in sorted(self.tight)
            if name in claims
            and claims[name].memory > self.free[name][1]
            and self.fits(name, replace(claims[name], memory=self.free[name][1]))
        ]

    def lack_bandwidth(self, claims: Mapping[str, Size]) -> list[str]:
        """Hosts, 100 of a part at most, that would fit the claims but for the bandwidth of their network."""
        search = Search(self, any_host)
        parts = [(part, replace(part.value, net=_ANY_BANDWIDTH)) for part in self._parts(claims) if part.value.net]
        return [name for part, claim in parts for name in islice(search.all(part, "emptiest", claim), 100)]

    def most_free(self) -> tuple[int, int]:
        """The most CPUs, and the most memory, that any host has free which takes new VMs."""
        own = self.own or {}
        mine = [free for name, free in own.items() if name not in self.full and name not in self._index.closed]
        found = [kind.hosts.most({*self.full, *own}) for kind in self._index.classes.values() if not kind.closed]
        found += [(free[0], free[1]) for free in mine]
        return max((cpus for cpus, _ in found), default=0), max((memory for _, memory in found), default=0)

    # --- placement -----------------------------------------------------------------------------------

    def place(
        self,
        count: int,
        claims: Mapping[str, Size],
        *,
        hosts: HostLimits = NO_LIMITS,
        choose: Chooser = BUILT_IN["worst-fit"],
        seed: str = "",
        siblings: Iterable[str] = (),
    ) -> list[str] | None:
        """Domains for `count` VMs with these claims, all or none; takes the room. Within the limits of `hosts`;
        `siblings` are the hosts of the job's other VMs. By default the emptiest domain first (CPUs, memory, name)."""
        chosen: list[str] = []

        def left_on(name: str) -> int:
            return hosts.limit(name) - (chosen.count(name) if hosts.limit is not any_number else 0)

        search = Search(self, lambda name: hosts.accept(name) and left_on(name) > 0, siblings)
        parts = [part for part in self._parts(claims) if part.value.cpus <= part.kind.host.capacity.cpus]
        random = draws(seed)
        while len(chosen) < count:
            found = choose(search, parts, count - len(chosen), random)
            if found is None:
                for name in chosen:
                    self.give(name, claims[name])
                return None
            name, number = found[0], min(found[1], left_on(found[0]))
            for _ in range(number):
                self.take(name, claims[name])
            search.note(name, number)
            chosen += [name] * number
        return chosen

    def holding(self, claims: Mapping[str, Size], accept: Accept = any_host) -> list[str]:
        search = Search(self, accept)
        parts = [part for part in self._parts(claims) if part.value.cpus <= part.kind.host.capacity.cpus]
        return sorted(name for part in parts for name in search.all(part, "by_name", part.value))

    def use(self, name: str) -> float:
        before, unmeasured = self._index.computed.get(name, (self.free[name], Size(0, 0)))
        return use(self._index.hosts[name], self.free[name], before, unmeasured)

    def held(self, name: str, claim: Size) -> int:
        return how_many(claim, self.free[name]) if self.fits(name, claim) else 0

    def _parts(self, claims: Mapping[str, Size]) -> Sequence[Part[Size]]:
        if isinstance(claims, HostMap):
            return claims.parts
        index = self._index
        return [
            Part(kind, _Lone(self, name), claim)
            for name, claim in claims.items()
            if (kind := index.class_of.get(name)) is not None
        ]


class _Lone(HostGroup):
    """A group of one host, for claims that are not kept by parts."""

    def __init__(self, room: Room, name: str) -> None:
        super().__init__()
        self._room, self._name = room, name
        self.put(name, room.free[name])

    def _fitting(self, claim: Size) -> Iterator[str]:
        return iter([self._name] if fits(claim, self._room.free[self._name]) else [])

    emptiest = tightest = by_name = _fitting

    def count(self, claim: Size) -> int:
        return len(list(self._fitting(claim)))

    def nth(self, claim: Size, number: int) -> str | None:
        return next(self._fitting(claim), None)


class Search:
    """What a placement policy asks of a room. `accept` says on which hosts VMs may be made."""

    def __init__(self, room: Room, accept: Accept, siblings: Iterable[str] = ()) -> None:
        self._room, self._accept = room, accept
        self._siblings = Counter(siblings)

    def note(self, name: str, count: int) -> None:
        self._siblings[name] += count

    def siblings(self, name: str) -> int:
        return self._siblings[name]

    def use(self, name: str) -> float:
        return self._room.use(name)

    def usable(self, part: Part[Size], name: str) -> bool:
        """Whether a VM may be made there, as far as that does not depend on what is free."""
        return name in part and name not in self._room.full and self._accept(name)

    def left(self, name: str, claim: Size) -> tuple[int, int]:
        free = self._room.free[name]
        return free[0] - claim.cpus, free[1] - claim.memory

    def best(self, part: Part[Size], order: Order, claim: Size) -> str | None:
        return next(self.all(part, order, claim), None)

    def all(self, part: Part[Size], order: Order, claim: Size) -> Iterator[str]:
        found: Iterator[str] = getattr(part.hosts, order)(claim)
        if own := self._room.own:  # of a copy, whose figures differ from those of the index
            mine = [name for name in own if name in part.hosts and fits(claim, own[name])]
            others = (name for name in found if name not in own)
            found = heapq.merge(others, sorted(mine, key=self._key(order)), key=self._key(order))
        return (name for name in found if self.usable(part, name))

    def _key(self, order: Order) -> Callable[[str], tuple[int, int, str]]:
        sign = {"emptiest": -1, "tightest": 1, "by_name": 0}[order]
        free = self._room.free
        return lambda name: (sign * free[name][0], sign * free[name][1], name)


# --- the room of a pass ----------------------------------------------------------------------------


def index_of(context: Context) -> CapacityIndex:
    state, index = context.state, context.state.free
    index.follow(context.in_sight)
    for host in index.arrived:
        index.stale_templates.update(row.which for row in state.templates_on(host))
    index.arrived.clear()
    for which in sorted(index.stale_templates):
        row = state.template_for(which)
        index.set_ready(which, ready=row is not None and row.state is TemplateState.READY)
    index.stale_templates.clear()
    room = Room.of(index)
    for name in index.take_stale(state.now):
        _refresh(context, room, name)
        index.when(name, _settles_at(context, index.hosts[name]))
    return index


def every_host(context: Context, value: T, keep: Callable[[Host], bool] = lambda _: True) -> HostMap[T]:
    """The hosts that take new VMs and pass `keep`, all with that value. `keep` is asked once for each class."""
    classes = [kind for kind in index_of(context).classes.values() if context.drained or not kind.closed]
    every = HostMap(Part(kind, kind.hosts, value) for kind in classes if keep(kind.host))
    return every.without(context.closed if context.drained else context.without)


def room_of(context: Context, *, without: Collection[Key] = ()) -> Room:
    """What is free on the hosts in sight; as if the rows in `without` had given back what they claim and hold."""
    if not without:
        context.state.free.forget_tentative()
        return Room.of(index_of(context))
    room = Room.of(index_of(context)).copy()
    state = context.state
    touched = {key.domain for owner in without for key in state.claims.of(owner)}
    vms = (row for owner in without if isinstance(row := state.get(owner), Vm))
    touched |= {place.host for vm in vms for place in vm.places}
    for name in sorted(touched & context.in_sight.keys()):
        _refresh(context, room, name, without)
    return room


def memory_beyond(
    context: Context, claims: Mapping[str, Size], frozen: Mapping[str, Size], request: Request, *, margin: bool
) -> dict[str, int] | None:
    """MiB that hosts must keep available if they could not hold all VMs of the request with nothing of ours on them but
    what is `frozen`; None if they could. With `margin`, only if there is some more than enough."""
    room, held, floors = Room.of(index_of(context)).copy(), 0, {}
    for name, claim in claims.items():
        host = context.hosts[name]
        _refresh(context, room, name, {one.owner for one in context.state.claims.on(name)})
        if name in room.tight:
            floors[name] = host.overcommit.floor
        spare = host.overcommit.floor // 8 if margin else 0
        room.take(name, Size(0, spare + (frozen[name].memory if frozen else 0), 0))
        held += request.most_on_a_host(room.held(name, claim))
        if held >= request.nodes:
            return None
    return floors


def _refresh(context: Context, room: Room, name: str, without: Collection[Key] = ()) -> None:
    state, host, policy = context.state, context.in_sight[name], context.policy
    claims = state.claims.on(name)
    vms = state.vms_on(name)
    mapped = left_behind((vm.place_on(name) for vm in vms if vm.key not in without), state.templates)
    whole = Size(claimable_cpus(host), host.capacity.memory, claimable_disk(host), host.capacity.net)
    free = _less(whole, *(
        claim.size for claim in (*(one for one in claims if one.owner not in without), *mapped)
    ))  # fmt: skip
    tight = False
    if host.overcommit.memory > 1 and host.available > 0:
        coming = 0
        for claim in claims:
            held, settled = held_by(state, claim.key, context.world, policy)
            gone = claim.owner in without
            coming += -int(held) if gone else yet_to_come(claim.size, held, settled=settled)
        for claim in left_behind((vm.place_on(name) for vm in vms), state.templates):
            coming -= claim.size.memory if claim not in mapped else 0
        free, tight = overcommitted(host, free, coming)
    room.set(name, free, tight=tight, full=short_of_disk(host))
    if not without:
        state.free.computed[name] = free, unmeasured(state.now, vms, claims)


def overcommitted(host: Host, free: Free, coming: int) -> tuple[Free, bool]:
    """What is free where memory is over-committed: no more than the machine has above what it must keep, once the
    memory `coming` (MiB) is used too. Whether that limits it."""
    times = host.overcommit
    if times.memory <= 1 or host.available <= 0:
        return free, False
    cpus, memory, disk, net = free
    memory += int(host.capacity.memory * (times.memory - 1))
    left = host.available - times.floor - coming
    return [cpus, min(memory, left), disk, net], left < memory


def _settles_at(context: Context, host: Host) -> float | None:
    if host.overcommit.memory <= 1:
        return None
    state, settle = context.state, context.policy.settle
    serving = [vm.since + settle for vm in state.vms_on(host.name) if vm.state is VmState.SERVING]
    return min((at for at in serving if at > state.now), default=None)


def must_keep(floors: Mapping[str, int], kind: Why = Why.MUST_KEEP) -> list[Reason]:
    by_floor: dict[int, list[str]] = {}
    for name, floor in floors.items():
        by_floor.setdefault(floor, []).append(name)
    return [kind(hosts=names, floor=floor) for floor, names in by_floor.items()]


def _less(size: Size, *taken: Size) -> Free:
    return [have - sum(of_each) for have, *of_each in zip(size.amounts, *(one.amounts for one in taken), strict=True)]


def held_by(state: State, claim: ClaimKey, world: World, policy: Policy) -> tuple[float, bool]:
    """MiB of its host that the owner of a claim holds, and whether that has settled. A VM that ends may still grow."""
    match row := state.get(claim.owner):
        case Vm() if (vm := world.at(row, row.place_on(claim.domain))) is not None:
            settled = vm.private > 0 and row.state is VmState.SERVING and state.now - row.since >= policy.settle
            return vm.private, settled
        case Template() if (latest := world.latest(row.source)) and (seen := latest.value.templates.get(row.which)):
            return seen.held, False
        case _:
            return 0.0, False


def left_behind(places: Iterable[Place], templates: Mapping[int, Template]) -> list[Claim]:
    """What templates hold whose rows have ended: the VMs at these places map their memory, once, to the end."""
    gone = {
        id_: Claim(Key("template", id_), place.host, Size(0, place.template.size.memory, 0))
        for place in places
        if (id_ := place.template_id) is not None and place.template and id_ not in templates
    }
    return [claim for _, claim in sorted(gone.items())]


def yet_to_come(claim: Size, held: float, *, settled: bool) -> int:
    """MiB that may yet be used beside `held`: the rest of the claim; after it has settled, a quarter more at most."""
    rest = max(0, math.ceil(claim.memory - held))
    return min(rest, math.ceil(held / 4)) if settled else rest


MEASURED_FOR = 60.0  # seconds: the load of a host is their mean


def use(host: Host, free: Free, before: Free, unmeasured: Size) -> float:
    """The share of a host's CPUs or memory, whichever is more, in use: as measured, with what is claimed but not
    measured yet, and what was taken since `before`. If nothing is measured, what is claimed."""
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
    """What young VMs claim: the load of their host, which is a mean, does not show them yet."""
    young = {vm.key for vm in vms if now - vm.since < MEASURED_FOR and not vm.leaving}
    sizes = [claim.size for claim in claims if claim.owner in young]
    return Size(sum(size.cpus for size in sizes), sum(size.memory for size in sizes))


# --- the placement of an attempt's VMs --------------------------------------------------------------


FALLBACK = Placement.WORST_FIT  # places VMs where the policy that was named cannot


def placement_of(context: Context, attempt: Attempt) -> str:
    return attempt.request.placement or context.policy.placement


def placement_request(context: Context, attempt: Attempt, kind: CloneKind, count: int) -> PlacementRequest:
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
        holds = min(room.held(name, claim), limit(name))
        found.append(CandidateHost(name, Size(*room.free[name]), claimable(host), claim, holds))
    return found


def _ask(
    policy: Callable[..., Sequence[str]], request: PlacementRequest, hosts: Sequence[CandidateHost], seed: str
) -> tuple[list[str], str]:
    try:
        chosen = policy(request, tuple(hosts), seed)
        fault = why_impossible(chosen, request.vms, hosts)
    except Exception as error:  # a fault of the site's code concerns this choice only
        return [], f"it raised {error!r:.200}"
    return list(chosen) if not fault else [], fault
