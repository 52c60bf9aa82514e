"""When hosts will have room: kept between passes, and computed again for the hosts on which something has changed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from typing import NamedTuple

from multiverse.core.model import Size


class Touched:
    """On which hosts rows, claims or what is known of them have changed, and how often anything has."""

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
    """Room for one VM on a host from a time on. `template` is the claim of a template that is to be built there first;
    `emptied`: only templates of others are in its way then, which are retired if no VM is there."""

    at: float
    host: str
    template: Size = Size(0, 0)
    emptied: bool = False


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
    _order: list[Slot] = field(default_factory=list)
    _until: list[tuple[float, str]] = field(default_factory=list)
    _count: int | None = None

    def refresh(
        self, hosts: Collection[str], touched: Touched, now: float, compute: Callable[[str], HostSlots],
        changing: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Bring the table up to date: these are all hosts, and what is free on `changing` ones changes unnoticed. A
        host that comes or goes has been touched. Only the first time all hosts are gone through."""
        if self._count is None:
            stale = set(hosts)
        else:
            past = self._until[: bisect_left(self._until, (now, ""))]
            stale = {*touched.since(self._count), *changing, *self._changing, *(host for _, host in past)}
        for host in sorted(stale):
            self._drop(host)
            if host in hosts:
                self._put(host, compute(host))
        self._count, self._changing = touched.count, frozenset(changing)

    def _drop(self, host: str) -> None:
        if old := self._hosts.pop(host, None):
            for slot in old.slots:
                del self._order[bisect_left(self._order, slot)]
            del self._until[bisect_left(self._until, (old.until, host))]

    def _put(self, host: str, fresh: HostSlots) -> None:
        self._hosts[host] = fresh
        for slot in fresh.slots:
            insort(self._order, slot)
        insort(self._until, (fresh.until, host))

    def first(self, count: int, without: Collection[str]) -> list[Slot]:
        """The earliest slots, but those on some hosts."""
        found: list[Slot] = []
        for slot in self._order:
            if len(found) == count:
                break
            if slot.host not in without:
                found.append(slot)
        return found
