"""How fast and how often: the policy that the planner follows, the back-off after failures, and what the controller
remembers of the pace of things."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from multiverse.core.lifecycle import Event
from multiverse.core.model import Attempt, CloneKind, Depth, Forecast, Size, Vm, VmState
from multiverse.core.rows import Move

ARRIVALS_FADE = 60.0
"""Seconds after which an arrival counts for 1/e of what it did: what an arrival rate is taken over."""

SMOOTHING = 0.2
"""The share of the newest in the moving mean of how long VMs take."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A warm pool: so many VMs of an image, made as far as `depth` before any job asks. At least `least` are kept,
    at most `most`, in between as many as the arrival rate asks for. `size` is what the nodes of joined ones are told
    to have; `max_age`, in seconds, is when a spare is replaced by a fresh one. Joined ones that it is to `offer` are
    taken by jobs themselves, as these are submitted."""

    image: str
    depth: Depth
    least: int
    most: int
    size: Size
    max_age: float = 3600.0
    offer: bool = True

    def wanted(self, rate: float, seconds: float) -> int:
        """How many spares, with `rate` VMs asked for a second, each of which takes `seconds` to make: what is used
        up meanwhile, and twice the square root of it for chance (arrivals are Poisson's, nearly)."""
        used = rate * seconds
        return min(self.most, max(self.least, math.ceil(used + 2 * math.sqrt(used)))) if used > 0.05 else self.least


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that decisions depend on. Times in seconds, memory in MiB."""

    subnet: ipaddress.IPv4Network
    gateway: str
    first_address: int = 256
    image: str = "slim"
    kind: CloneKind = CloneKind.INSTANT
    base: Size = Size(1, 256)
    guest_reserve: int = 80
    vm_overhead: int = 32  # QEMU's own memory beside the guest's
    overcommit: float = 1.0  # times its declared memory that a host may claim
    floor: int = 1024  # above 1, what its machine must keep available all the same
    settle: float = 30.0  # then, how long a VM serves its job before it counts as what it takes
    provisioning: int = 4
    spawn_timeout: float = 60.0
    pin_timeout: float = 60.0
    held_timeout: float = 10.0  # a pinned job that the scheduler holds back; its reason may be an old one till then
    complete_timeout: float = 120.0
    retry_base: float = 2.0
    retry_limit: float = 300.0
    replacements: int = 2
    attempts: int = 12
    patience: float = 2.0  # how long a job waits before its user is told why
    pools: tuple[Pool, ...] = ()
    rates: Mapping[CloneKind, float] = field(default_factory=lambda: MappingProxyType({}))
    """Clones a second from one template, or of one image on one host; kinds that are not in it go unpaced."""
    seconds: Mapping[CloneKind, float] = field(
        default_factory=lambda: MappingProxyType({CloneKind.INSTANT: 1.5, CloneKind.LINKED: 8.0, CloneKind.FULL: 15.0})
    )
    """From claim to node, until it has been seen how long that takes here."""
    template_seconds: float = 10.0  # for a template to be made

    def backoff(self, tries: int) -> float:
        """Seconds to wait after `tries` failures in a row: doubled each time, up to the limit."""
        if tries <= 0:
            return 0.0
        return float(min(self.retry_limit, self.retry_base * 2 ** min(tries - 1, 30)))

    def interval(self, kind: CloneKind) -> float:
        """Seconds between clones of one template, on the average."""
        rate = self.rates.get(kind, 0.0)
        return 1.0 / rate if rate > 0 else 0.0

    def takes(self, image: str, kind: CloneKind, forecast: Forecast) -> float:
        """Seconds that a VM takes from claim to node: as lately seen or, of a kind not seen yet, as one would think,
        but slower by as much as the image's other kinds were seen to be: on a busy machine all kinds are."""
        if (image, kind) in forecast.seconds:
            return forecast.seconds[image, kind]
        seen = [forecast.seconds[image, other] / usual for other, usual in sorted(self.seconds.items())
                if (image, other) in forecast.seconds]  # fmt: skip
        return self.seconds.get(kind, 0.0) * (sum(seen) / len(seen) if seen else 1.0)


def image_of(attempt: Attempt, policy: Policy) -> str:
    """The image of the attempt's VMs."""
    return attempt.request.image or policy.image


Parent = tuple[str, str, CloneKind]
"""What a pace is kept of: (host, image, kind), which is the template for instant clones."""


def wait_for(parent: Parent, paced: Mapping[Parent, float], now: float, policy: Policy) -> float:
    """Seconds until the pace lets another clone be made: as many at once as are made in a second, one at least (the
    generic cell rate algorithm of ITU-T I.371, whose whole state is the time until which clones are paid for)."""
    interval = policy.interval(parent[2])
    return max(0.0, paced.get(parent, 0.0) - now - max(0.0, 1.0 - interval)) if interval else 0.0


def paid(parent: Parent, paced: Mapping[Parent, float], now: float, policy: Policy) -> float:
    """Until when the pace is paid for, once another clone has been made."""
    return max(paced.get(parent, 0.0), now) + policy.interval(parent[2])


class Meter:
    """Remembers, from the moves that were committed, what a `Forecast` is made of. A restart begins it anew."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._arrivals: dict[str, tuple[float, float]] = {}  # by image: how many, faded, and when that was
        self._claimed: dict[int, float] = {}  # VMs being made: since when
        self._seconds: dict[tuple[str, CloneKind], float] = {}
        self._paced: dict[Parent, float] = {}
        self._failed: dict[str, tuple[int, float]] = {}  # by image: failures of spares in a row, and rest until

    def note(self, moves: Iterable[Move], now: float) -> None:
        """Learn from moves that were committed at `now`."""
        for move in moves:
            for change in move.changes:
                if isinstance(change.row, Attempt):
                    self._note_attempt(change.row, change.event, now)
                elif isinstance(change.row, Vm):
                    self._note_vm(change.row, change.event, now)

    def _note_attempt(self, attempt: Attempt, event: Event, now: float) -> None:
        if event in (Event.ADMITTED, Event.TOOK):  # not when it came: it may be held, or wait for others of its array
            image = image_of(attempt, self._policy)
            self._arrivals[image] = (self._faded(image, now) + attempt.request.nodes, now)

    def _note_vm(self, vm: Vm, event: Event, now: float) -> None:
        if event is Event.PLANNED:
            self._claimed[vm.id] = now
            key = (vm.host, vm.image, vm.kind)
            if self._policy.interval(vm.kind):
                self._paced[key] = paid(key, self._paced, now, self._policy)
        elif event is Event.TAKEN or vm.state in (VmState.RELEASING, VmState.LOST):
            self._claimed.pop(vm.id, None)  # how long it took tells nothing of the others
        elif event is Event.REGISTERED and (began := self._claimed.pop(vm.id, None)) is not None:
            old = self._seconds.get((vm.image, vm.kind), now - began)
            self._seconds[vm.image, vm.kind] = old + SMOOTHING * (now - began - old)
        if vm.pool is not None and vm.attempt is None:
            if event in (Event.FAILED, Event.DIED):
                tries = self._failed.get(vm.image, (0, 0.0))[0] + 1
                self._failed[vm.image] = (tries, now + self._policy.backoff(tries))
            elif vm.state in (VmState.PARKED, VmState.JOINED) and vm.state == vm.pool.value:
                self._failed.pop(vm.image, None)

    def _faded(self, image: str, now: float) -> float:
        count, at = self._arrivals.get(image, (0.0, now))
        return count * math.exp((at - now) / ARRIVALS_FADE)

    def forecast(self, now: float) -> Forecast:
        """What is known at `now`. Its cost does not grow with time: what is past and faded is forgotten."""
        for image in [image for image in self._arrivals if self._faded(image, now) < 0.01]:
            del self._arrivals[image]
        for key in [key for key, until in self._paced.items() if until < now]:
            del self._paced[key]
        return Forecast(
            arrivals={image: self._faded(image, now) / ARRIVALS_FADE for image in sorted(self._arrivals)},
            seconds=dict(self._seconds),
            paced=dict(self._paced),
            rest={image: until for image, (_, until) in self._failed.items()},
        )

    def next_due(self, now: float) -> float:
        """When the pace next lets something be made that may be waited for; infinity if nothing is paced."""
        waits = [until - max(0.0, 1.0 - self._policy.interval(key[2])) for key, until in self._paced.items()]
        waits += [until for _, until in self._failed.values()]
        return min((at for at in waits if at > now), default=math.inf)
