"""The hosts in sight by what is free on them, and when hosts will have room. Both outlive passes.

Hosts that differ only by name and by what they have available are one class. Within a class, and among its hosts with a
certain template ready, hosts are found by free CPUs and memory or by name, without a look at those that are too full.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from math import inf
from operator import attrgetter
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

from sortedcontainers import SortedList

from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.vm import TemplateKey

T = TypeVar("T")
U = TypeVar("U")

Order = Literal["emptiest", "tightest", "by_name"]  # names of the orders of a `HostGroup`

Free = list[int]  # CPUs, MiB of memory and disk, Mbit/s; may be negative; replaced, never changed


def fits(claim: Size, free: Sequence[int]) -> bool:
    """Whether that much is free. What claims no bandwidth fits even if more is claimed than the network has by now."""
    return claim.cpus <= free[0] and claim.memory <= free[1] and claim.disk <= free[2] and claim.net <= max(0, free[3])


def changed(free: Sequence[int], size: Size, sign: int) -> Free:
    """What is free once that much is given back (1) or taken (-1)."""
    return [have + sign * amount for have, amount in zip(free, size.amounts, strict=True)]


def how_many(claim: Size, free: Sequence[int]) -> int:
    if not fits(claim, free):
        return 0
    return min(have // need for have, need in zip(free, claim.amounts, strict=True) if need)


class HostGroup:
    """Hosts by what is free on them."""

    def __init__(self) -> None:
        self._free: dict[str, Free] = {}
        self._names: list[str] = []  # in order
        self._cpus: list[int] = []  # the numbers of free CPUs that hosts have, in order
        self._buckets: dict[int, list[tuple[int, str]]] = {}  # by free CPUs: free memory, negative, and name; in order
        self._tree: _FirstFit | None = None  # made when it is first asked for

    def __contains__(self, name: object) -> bool:
        return name in self._free

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def put(self, name: str, free: Free) -> None:
        old = self._free.get(name)
        if old == free:
            return
        if old is None:
            insort(self._names, name)
            self._tree = None
        else:
            self._take_out(name, old)
        self._free[name] = free
        bucket = self._buckets.get(free[0])
        if bucket is None:
            bucket = self._buckets[free[0]] = []
            insort(self._cpus, free[0])
        insort(bucket, (-free[1], name))
        if self._tree is not None:
            self._tree.put(bisect_left(self._names, name), free)

    def drop(self, name: str) -> None:
        old = self._free.pop(name, None)
        if old is not None:
            self._take_out(name, old)
            del self._names[bisect_left(self._names, name)]
            self._tree = None

    def _take_out(self, name: str, free: Free) -> None:
        bucket = self._buckets[free[0]]
        del bucket[bisect_left(bucket, (-free[1], name))]
        if not bucket:
            del self._buckets[free[0]]
            del self._cpus[bisect_left(self._cpus, free[0])]

    def emptiest(self, claim: Size) -> Iterator[str]:
        """The most free CPUs first, then the most free memory, then by name."""
        for cpus in reversed(self._cpus):
            if cpus < claim.cpus:
                return
            for memory, name in self._buckets[cpus]:
                if -memory < claim.memory:
                    break
                if fits(claim, self._free[name]):
                    yield name

    def tightest(self, claim: Size) -> Iterator[str]:
        """The fewest free CPUs first, then the least free memory, then by name."""
        for cpus in islice(self._cpus, bisect_left(self._cpus, claim.cpus), None):
            bucket = self._buckets[cpus]
            end = self._enough_memory(bucket, claim)
            while end:
                begin = bisect_left(bucket, (bucket[end - 1][0], ""))  # hosts with as much memory as the last one
                for _, name in bucket[begin:end]:
                    if fits(claim, self._free[name]):
                        yield name
                end = begin

    def by_name(self, claim: Size) -> Iterator[str]:
        if self._tree is None:
            self._tree = _FirstFit([self._free[name] for name in self._names])
        return (self._names[at] for at in self._tree.fitting(claim))

    def count(self, claim: Size) -> int:
        """How many have as much CPUs and memory free as the claim; the rest is left to `nth`."""
        first = bisect_left(self._cpus, claim.cpus)
        return sum(self._enough_memory(self._buckets[cpus], claim) for cpus in islice(self._cpus, first, None))

    def nth(self, claim: Size, number: int) -> str | None:
        """The host of that number, from 0, that `count` counts; None if the claim does not fit there."""
        for cpus in islice(self._cpus, bisect_left(self._cpus, claim.cpus), None):
            bucket = self._buckets[cpus]
            enough = self._enough_memory(bucket, claim)
            if number < enough:
                name = bucket[number][1]
                return name if fits(claim, self._free[name]) else None
            number -= enough
        return None

    def most(self, but: Collection[str] = ()) -> tuple[int, int]:
        """The most CPUs, and the most memory, free on any of the hosts, `but` some; at least 0 each."""
        cpus = memory = 0
        for have in reversed(self._cpus):
            free = next((-less for less, name in self._buckets[have] if name not in but), None)
            if free is not None:
                cpus, memory = max(cpus, have), max(memory, free)
        return cpus, memory

    @staticmethod
    def _enough_memory(bucket: list[tuple[int, str]], claim: Size) -> int:
        return bisect_right(bucket, (-claim.memory, "\U0010ffff"))


class _FirstFit:
    """A tree over hosts in an order. A node holds the most of each amount that is free below it: hosts without room are
    passed over many at a time."""

    def __init__(self, free: list[Free]) -> None:
        self._leaves = 1 << max(0, len(free) - 1).bit_length()
        nothing = [-1, -1, -1, -1]
        self._most: list[Free] = [nothing] * self._leaves + free + [nothing] * (self._leaves - len(free))
        for at in range(self._leaves - 1, 0, -1):
            self._most[at] = self._below(at)

    def _below(self, at: int) -> Free:
        one, other = self._most[2 * at], self._most[2 * at + 1]
        return [max(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2]), max(one[3], other[3])]

    def put(self, place: int, free: Free) -> None:
        at = self._leaves + place
        self._most[at] = free
        while at := at // 2:
            most = self._below(at)
            if most == self._most[at]:
                return
            self._most[at] = most

    def fitting(self, claim: Size) -> Iterator[int]:
        stack = [1]
        while stack:
            at = stack.pop()
            if not fits(claim, self._most[at]):
                continue
            if at >= self._leaves:
                yield at - self._leaves
            else:
                stack += (2 * at + 1, 2 * at)


@dataclass(eq=False)
class HostKind:
    """Hosts that are equal but for their names and what they have available."""

    host: Host  # stands for each
    closed: bool = False  # they take no new VM
    names: set[str] = field(default_factory=set)
    hosts: HostGroup = field(default_factory=HostGroup)  # those whose free capacity is known
    ready: dict[tuple[str, str], dict[Size, HostGroup]] = field(default_factory=dict)  # with a template

    def ready_with(self, image: str, account: str, size: Size) -> HostGroup:
        return self.ready.get((image, account), {}).get(size) or _NONE


_NONE = HostGroup()


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """Hosts of one class with the same value: those of a group that are in no other groups and not in `names`."""

    kind: HostKind
    hosts: HostGroup
    value: T
    but: tuple[HostGroup, ...] = ()
    names: Collection[str] = ()

    def __contains__(self, name: object) -> bool:
        return name in self.hosts and name not in self.names and not any(name in other for other in self.but)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.hosts if name in self) if self.but or self.names else iter(self.hosts)

    def __len__(self) -> int:
        if self.but:
            return sum(1 for _ in self)
        return len(self.hosts) - sum(name in self.hosts for name in self.names)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None


class HostMap(Mapping[str, T]):
    """A value for each of some hosts, by name. Each host is in one part, and each part has one value."""

    def __init__(self, parts: Iterable[Part[T]]) -> None:
        self.parts = tuple(parts)

    def __getitem__(self, name: str) -> T:
        for part in self.parts:
            if name in part:
                return part.value
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return heapq.merge(*self.parts) if len(self.parts) > 1 else (n for part in self.parts for n in part)

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __bool__(self) -> bool:
        return any(self.parts)

    def map(self, change: Callable[[Host, T], U]) -> HostMap[U]:
        """Other values for the same hosts; `change` gets a host that stands for each of its part."""
        return HostMap(
            Part(part.kind, part.hosts, change(part.kind.host, part.value), part.but, part.names) for part in self.parts
        )

    def plus(self: HostMap[Size], other: Mapping[str, Size]) -> HostMap[Size]:
        """The sums with the sizes of another mapping of the same parts."""
        assert isinstance(other, HostMap) and len(other.parts) == len(self.parts)
        return HostMap(
            Part(one.kind, one.hosts, Size(*changed(one.value.amounts, more.value, 1)), one.but, one.names)
            for one, more in zip(self.parts, other.parts, strict=True)
        )

    def where(self, keep: Callable[[Host], bool]) -> HostMap[T]:
        """The hosts for which this is true; it is asked once for each class."""
        return HostMap(part for part in self.parts if keep(part.kind.host))

    def without(self, names: Collection[str]) -> HostMap[T]:
        if not names:
            return self
        return HostMap(replace(p, names={*p.names, *names} if p.names else names) for p in self.parts)


class Keeper(Protocol):
    """A copy of what is free at one time."""

    def keep(self, name: str, free: Free) -> None:
        """What is free on the host changes: so much was free until now."""


class CapacityIndex:
    """What is free on the hosts in sight. Whatever changes makes a host `stale`: `room_of` computes it again."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}  # in sight
        self.came_and_went = 0  # how often a host did
        self.free: dict[str, Free] = {}
        self.stale: set[str] = set()
        self.tentative: set[str] = set()  # hosts from which a room has taken what is not claimed yet
        self.copies: WeakSet[Keeper] = WeakSet()  # what keeps what was free before it changes
        self.stale_templates: set[TemplateKey] = set()  # they may have become ready, or not ready
        self.arrived: set[str] = set()  # hosts whose ready templates are to be looked up
        self.tight: set[str] = set()  # hosts whose machine has less memory available than could be claimed
        self.full: set[str] = set()  # hosts whose disk has too little room for a VM
        # What was free when a host was last observed or changed, and what VMs claim whose use is not measured yet.
        self.computed: dict[str, tuple[Free, Size]] = {}
        self.closed: frozenset[str] = frozenset()  # hosts that take no new VM, which are classes of their own
        self.classes: dict[Hashable, HostKind] = {}
        self.class_of: dict[str, HostKind] = {}
        self._groups_of: dict[str, set[HostGroup]] = {}
        self._due: list[tuple[float, str]] = []  # a heap: when time alone changes what is free on a host
        self._due_of: dict[str, float] = {}

    def follow(self, hosts: Mapping[str, Host]) -> None:
        if hosts is self.hosts:
            return
        for name in [name for name in self.hosts if name not in hosts]:
            self.hide(name)
        for host in hosts.values():
            self.show(host)

    def show(self, host: Host) -> None:
        old = self.hosts.get(host.name)
        if old is not host:
            self.hosts[host.name] = host
            self.came_and_went += old is None
            if old is None or SHAPE(host) != SHAPE(old):
                self._classify(host)
            self.stale.add(host.name)
        elif host.overcommit.memory > 1:  # what its VMs hold may have changed
            self.stale.add(host.name)

    def hide(self, name: str) -> None:
        if self.hosts.pop(name, None) is not None:
            self.came_and_went += 1
            self._leave_class(name)
            for names in (self.stale, self.tight, self.full):
                names.discard(name)
            self.free.pop(name, None)
            self.computed.pop(name, None)
            self._due_of.pop(name, None)

    def close(self, closed: frozenset[str]) -> None:
        """These hosts take no new VM, and all others do: a search for room does not meet them."""
        changed, self.closed = self.closed ^ closed, closed
        for name in sorted(changed & self.hosts.keys()):
            self._classify(self.hosts[name])

    def _classify(self, host: Host) -> None:
        self._leave_class(host.name)
        shape = (closed := host.name in self.closed, shape_of(host))
        kind = self.classes.get(shape)
        if kind is None:
            kind = self.classes[shape] = HostKind(host, closed)
        self.class_of[host.name] = kind
        self.arrived.add(host.name)
        kind.names.add(host.name)
        self._groups_of[host.name] = {kind.hosts}
        if (free := self.free.get(host.name)) is not None:
            kind.hosts.put(host.name, free)

    def _leave_class(self, name: str) -> None:
        for group in self._groups_of.pop(name, ()):
            group.drop(name)
        kind = self.class_of.pop(name, None)
        if kind is not None:
            kind.names.discard(name)
            if not kind.names:
                self.classes = {shape: other for shape, other in self.classes.items() if other is not kind}

    def set_ready(self, which: TemplateKey, *, ready: bool) -> None:
        kind = self.class_of.get(which.host)
        if kind is None:
            return
        by_size = kind.ready.setdefault((which.image, which.account), {})
        if ready:
            group = by_size.setdefault(which.size, HostGroup())
            self._groups_of[which.host].add(group)
            if (free := self.free.get(which.host)) is not None:
                group.put(which.host, free)
        elif (known := by_size.get(which.size)) is not None:
            known.drop(which.host)
            self._groups_of[which.host].discard(known)
            # What is free on a host may not be known yet: it is in no group, and may have its template ready.
            if not len(known) and not any(known in self._groups_of[name] for name in kind.names):
                del by_size[which.size]

    def set_free(self, name: str, free: Free) -> None:
        if (old := self.free.get(name)) is not None:
            for copy in self.copies:
                copy.keep(name, old)
        self.free[name] = free
        for group in self._groups_of[name]:
            group.put(name, free)

    def forget_tentative(self) -> None:
        self.stale |= self.tentative
        self.tentative.clear()

    def when(self, name: str, due: float | None) -> None:
        """Time alone changes at `due` what is free on the host; None: it does not."""
        if due is None:
            self._due_of.pop(name, None)
        elif self._due_of.get(name) != due:
            self._due_of[name] = due
            heapq.heappush(self._due, (due, name))

    def take_stale(self, now: float) -> list[str]:
        """The hosts whose free capacity is to be computed again, by name. They count as computed from here on."""
        while self._due and self._due[0][0] <= now:
            due, name = heapq.heappop(self._due)
            if self._due_of.get(name) == due:
                del self._due_of[name]
                self.stale.add(name)
        found = sorted(name for name in self.stale if name in self.hosts and name not in self.tentative)
        self.stale.clear()  # those left out are in `tentative`
        return found


SHAPE = attrgetter(
    "capacity", "abilities", "machine", "template_copies", "memory_block", "vm_overhead", "overcommit", "images",
    "disks", "storage", "copies", "moves",
)  # fmt: skip
"""What equal hosts have in common. Equal shapes mean equal sizes, claims and abilities."""


def shape_of(host: Host) -> Hashable:
    return tuple(frozenset(one.items()) if isinstance(one, Mapping) else one for one in SHAPE(host))


# --- when hosts will have room ----------------------------------------------------------------------


class Touched:
    """Hosts whose rows, claims or figures have changed, and how often anything has."""

    def __init__(self) -> None:
        self.count = 0
        self._at: dict[str, int] = {}  # the latest last

    def note(self, host: str = "") -> None:
        """Something has changed, on this host if there is one."""
        self.count += 1
        if host:
            self._at.pop(host, None)
            self._at[host] = self.count

    def since(self, count: int) -> list[str]:
        """The hosts on which something has changed since the count was that."""
        return list(takewhile(lambda host: self._at[host] > count, reversed(self._at)))


class Slot(NamedTuple):
    """Room for one VM on a host from a time on."""

    at: float
    host: str
    template: Size = Size(0, 0)  # the claim of a template that is built there first
    emptied: bool = False  # only templates of others are in its way, which are retired if no VM is there


@dataclass(frozen=True, slots=True)
class HostSlots:
    """The slots of one host, the earliest first; right until a time, if nothing changes there."""

    slots: Sequence[Slot] = ()
    until: float = inf


@dataclass(slots=True)
class SlotTable:
    """The slots of all hosts for VMs that claim the same."""

    _hosts: dict[str, HostSlots] = field(default_factory=dict)
    _changing: frozenset[str] = frozenset()
    _order: SortedList[Slot] = field(default_factory=SortedList)
    _until: SortedList[tuple[float, str]] = field(default_factory=SortedList)
    _count: int | None = None

    def refresh(
        self, hosts: Collection[str], touched: Touched, now: float, compute: Callable[[str], HostSlots],
        changing: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Compute touched, `changing` and outdated hosts again; the first time all. `hosts` are all that there are."""
        if self._count is None:
            stale = set(hosts)
        else:
            past = self._until.irange(maximum=(now, ""), inclusive=(True, False))
            stale = {*touched.since(self._count), *changing, *self._changing, *(host for _, host in past)}
        for host in sorted(stale):
            self._drop(host)
            if host in hosts:
                self._put(host, compute(host))
        self._count, self._changing = touched.count, frozenset(changing)

    def _drop(self, host: str) -> None:
        if old := self._hosts.pop(host, None):
            for slot in old.slots:
                self._order.remove(slot)
            self._until.remove((old.until, host))

    def _put(self, host: str, fresh: HostSlots) -> None:
        self._hosts[host] = fresh
        self._order.update(fresh.slots)
        self._until.add((fresh.until, host))

    def first(self, count: int, without: Collection[str]) -> list[Slot]:
        return list(islice((slot for slot in self._order if slot.host not in without), count))
