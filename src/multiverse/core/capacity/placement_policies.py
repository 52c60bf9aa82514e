"""Placement: which hosts a job's VMs are made on, and which addresses they get.

A *placement policy* is known by its name. Built-in policies choose host after host by an index, so that they do not
look at hosts that are too full:

- `worst-fit`: the host with the most free CPUs, then the most free memory. The default.
- `best-fit`: the host with the fewest free CPUs, then the least free memory, that is enough.
- `first-fit`: the first host by name. With `random-fit` one of the two policies of the Multiverse paper.
- `random-fit`: any of the hosts that fit, each as likely as the others.
- `pack`: all VMs of a job on as few hosts as possible, each the tightest that holds as many.
- `spread`: the VMs of a job on different hosts, the emptiest ones, as far as there are enough.
- `least-loaded`: the host with the least measured use of CPUs or memory, whichever is more, and claims since then; a
  host whose use is unknown counts with its claims.

A site may add pure functions (`PlacementPolicy`). One that fails, or chooses what does not fit, is passed over for that
job: the default places its VMs, and the fault is reported.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import count as numbers
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from multiverse.core.capacity_index import Part
from multiverse.core.model.basics import CloneKind, Placement, Size, number_of
from multiverse.core.policy import Policy

if TYPE_CHECKING:
    from multiverse.core.capacity.room import Search

COMPARED = 64  # least-loaded compares the use of so many hosts, drawn if more fit
DRAWS = 64  # how often random-fit draws a host that turns out not to be usable before it lists all that are


Chooser = Callable[["Search", Sequence[Part[Size]], int, Iterator[int]], tuple[str, int] | None]
"""Chooses a host for the next VMs, of so many that are left: its name, and how many of them. `Iterator[int]` are random
numbers. The parts hold what each VM would claim there. None: no host fits."""


def _worst_fit(room: Search, parts: Sequence[Part[Size]], _left: int, _random: Iterator[int]) -> tuple[str, int] | None:
    def emptiness(name: str) -> tuple[int, int, str]:
        cpus, memory = room.left(name, Size(0, 0))
        return -cpus, -memory, name

    found = [name for part in parts if (name := room.best(part, "emptiest", part.value))]
    return (min(found, key=emptiness), 1) if found else None


def _best_fit(room: Search, parts: Sequence[Part[Size]], _left: int, _random: Iterator[int]) -> tuple[str, int] | None:
    found = [(room.left(name, p.value), name) for p in parts if (name := room.best(p, "tightest", p.value))]
    return (min(found)[1], 1) if found else None


def _first_fit(room: Search, parts: Sequence[Part[Size]], _left: int, _random: Iterator[int]) -> tuple[str, int] | None:
    found = [name for part in parts if (name := room.best(part, "by_name", part.value))]
    return (min(found), 1) if found else None


def _random_fit(room: Search, parts: Sequence[Part[Size]], _left: int, random: Iterator[int]) -> tuple[str, int] | None:
    counts = [part.hosts.count(part.value) for part in parts]
    total = sum(counts)
    for drawn in islice(random, DRAWS if total else 0):
        if found := _numbered(room, parts, counts, drawn % total):
            return found.pop(), 1
    # Hardly any is usable, or none.
    usable = sorted(name for p in parts for name in p.hosts.by_name(p.value) if room.usable(p, name))
    return (usable[next(random) % len(usable)], 1) if usable else None


def _pack(room: Search, parts: Sequence[Part[Size]], left: int, _random: Iterator[int]) -> tuple[str, int] | None:
    found = []
    for part in parts:
        # A host that holds some VMs holds fewer, too, so the most that any host holds is found by halving.
        most, name, above = 0, "", left + 1
        while above - most > 1:
            middle = left if above > left else (most + above) // 2
            if other := room.best(part, "tightest", times(part.value, middle)):
                most, name = middle, other
            else:
                above = middle
        if most:
            found.append((-most, room.left(name, times(part.value, most)), name))
    return (min(found)[2], -min(found)[0]) if found else None


def _spread(room: Search, parts: Sequence[Part[Size]], _left: int, _random: Iterator[int]) -> tuple[str, int] | None:
    def preferred(name: str) -> tuple[int, int, int, str]:
        cpus, memory = room.left(name, Size(0, 0))
        return room.siblings(name), -cpus, -memory, name

    found = []
    for part in parts:
        fewest: tuple[int, int, int, str] | None = None
        for name in room.all(part, "emptiest", part.value):
            fewest = min(filter(None, (fewest, preferred(name))))
            if not fewest[0]:  # the emptiest host without a VM of the job
                break
        found += [fewest] if fewest else []
    return (min(found)[-1], 1) if found else None


def _least_loaded(
    room: Search, parts: Sequence[Part[Size]], _left: int, random: Iterator[int]
) -> tuple[str, int] | None:
    counts = [part.hosts.count(part.value) for part in parts]
    found: set[str] = set()
    if sum(counts) > COMPARED:
        for number in islice(random, COMPARED):
            found |= _numbered(room, parts, counts, number % sum(counts))
    if not found:  # few fit, or hardly any is usable
        found = {name for part in parts for name in room.all(part, "by_name", part.value)}

    def load(name: str) -> tuple[float, int, int, str]:
        cpus, memory = room.left(name, Size(0, 0))
        return room.use(name), -cpus, -memory, name

    return (min(map(load, found))[-1], 1) if found else None


def _numbered(room: Search, parts: Sequence[Part[Size]], counts: Sequence[int], number: int) -> set[str]:
    """The host of that number among hosts that fit, in the order of the parts; nothing if it is not usable."""
    for part, count in zip(parts, counts, strict=True):
        if number < count:
            name = part.hosts.nth(part.value, number)
            return {name} if name is not None and room.usable(part, name) else set()
        number -= count
    return set()


BUILT_IN: dict[str, Chooser] = {
    Placement.WORST_FIT: _worst_fit,
    Placement.BEST_FIT: _best_fit,
    Placement.FIRST_FIT: _first_fit,
    Placement.RANDOM_FIT: _random_fit,
    Placement.PACK: _pack,
    Placement.SPREAD: _spread,
    Placement.LEAST_LOADED: _least_loaded,
}


def times(size: Size, count: int) -> Size:
    return Size(*(amount * count for amount in size.amounts))


def draws(seed: str) -> Iterator[int]:
    """Random numbers below 2**64, the same for the same seed."""
    for number in numbers():
        yield int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:8])


# --- policies of a site ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A job whose VMs are to be placed."""

    vms: int  # how many are to be made
    node: Size  # what each node declares
    image: str
    kind: CloneKind
    account: str = ""  # whose templates they are forked from; empty: shared ones


@dataclass(frozen=True, slots=True)
class CandidateHost:
    """A host on which at least one of the job's VMs fits. In MiB."""

    name: str
    free: Size  # may still be claimed
    capacity: Size  # may be claimed in all, over-commitment included
    claim: Size  # of each VM
    holds: int  # how many VMs fit


class PlacementPolicy(Protocol):
    """A placement policy of a site: a pure function that chooses a host for each of a job's VMs.

    It is given the hosts that fit, by name, and `seed`, a text that is random for each job; the same arguments must
    give the same answer. It returns one host name for each VM (`request.vms`), a name as often as VMs are to be made
    there, `CandidateHost.holds` times at most. It is called within a pass of the controller: it does no I/O, and
    returns within microseconds per host, because everything else waits for it.

    Whatever it raises, and an answer that is not possible, lets the default policy place these VMs, and is reported.
    """

    def __call__(self, request: PlacementRequest, hosts: Sequence[CandidateHost], seed: str) -> Sequence[str]: ...


def why_impossible(chosen: object, vms: int, hosts: Sequence[CandidateHost]) -> str:
    """Why a policy's answer is not possible; empty if it is."""
    if isinstance(chosen, str) or not isinstance(chosen, Sequence) or not all(isinstance(one, str) for one in chosen):
        return f"it must return a list of host names, and returned {chosen!r:.200}"
    if len(chosen) != vms:
        return f"it chose {number_of(len(chosen), 'host')} for {number_of(vms, 'VM')}"
    holds = {one.name: one.holds for one in hosts}
    for name in chosen:
        if name not in holds:
            return f"it chose {name!r:.100}, which is none of the hosts that fit"
        if chosen.count(name) > holds[name]:
            return f"it chose {name} for {number_of(chosen.count(name), 'VM')}, and {holds[name]} fit there"
    return ""


# --- addresses -------------------------------------------------------------------------------------


def address_of(serial: int, used: Container[str], policy: Policy) -> str | None:
    """An address with prefix length for the VM `serial`; None if all are in use. An address is used again only after
    all others: stale ARP entries for it have expired by then."""
    net, gateway = policy.subnet, ipaddress.IPv4Address(policy.gateway)
    span = net.num_addresses - 1 - policy.first_address
    for step in range(span):
        candidate = net.network_address + policy.first_address + (serial + step) % span
        text = f"{candidate}/{net.prefixlen}"
        if text not in used and candidate != gateway:
            return text
    return None
