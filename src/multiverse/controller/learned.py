"""What the controller learns from the moves that were committed. A restart begins it anew.

- `ForecastRecorder`: how many VMs jobs ask for, and how long VMs take.
- `Exclusions`: users who take offered nodes in vain get none for a while. Slurm does not tell its submit script whether
  a request is a test (`sbatch --test-only`), may refuse a job after it, or may not start one for a limit of the user's.
- `MissingHints`: whether jobs are submitted without hints, for example after a failover to another slurmctld. Every job
  starts a poll interval later then, and an operator would not learn why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from multiverse.core.model.basics import CloneKind
from multiverse.core.model.job import Attempt, Lease, LeaseState
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import Offer, Vm, VmState
from multiverse.core.model.world import Forecast
from multiverse.core.policy import ARRIVALS_FADE, Parent, Policy, image_of, paid
from multiverse.core.transition import Event, Move
from multiverse.ports import Clock

log = structlog.get_logger()

SMOOTHING = 0.2  # the share of the newest in the moving mean of how long VMs take
SOON = 60.0  # seconds: a spare or leased host that is of no use so soon counts as one that failed
LEASE_REST = 5.0  # a partition rests so much longer after a useless lease than an image after a failed VM


class ForecastRecorder:
    """Remembers, from the moves that were committed, what a `Forecast` is made of. A restart begins it anew."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._arrivals: dict[str, tuple[float, float]] = {}  # by image: how many, faded, and when that was
        self._claimed: dict[int, float] = {}  # VMs being made: since when
        self._seconds: dict[tuple[str, CloneKind], float] = {}
        self._paced: dict[Parent, float] = {}
        self._failed: dict[str, tuple[int, float]] = {}  # by image: failures of spares in a row, and rest until
        self._ready: dict[int, float] = {}  # spares that are ready, and since when
        self._granted: dict[int, float] = {}  # leases whose hosts are in sight, and since when
        self._useless: dict[str, tuple[int, float]] = {}  # by partition: leases of no use in a row, and rest until

    def note(self, moves: Iterable[Move], now: float) -> None:
        for move in moves:
            for change in move.changes:
                if isinstance(change.row, Attempt) and change.event in (Event.ADMITTED, Event.TOOK):
                    # Not when it came: it may be held, or wait for others of its array.
                    image, nodes = image_of(change.row, self.policy), change.row.request.nodes
                    self._arrivals[image] = (self._faded(image, now) + nodes, now)
                elif isinstance(change.row, Vm):
                    self._note_vm(change.row, change.event, now)
                elif isinstance(change.row, Lease):
                    self._note_lease(change.row, change.event, now)

    def _note_lease(self, lease: Lease, event: Event, now: float) -> None:
        """Count leases that failed, got no VM though in sight, or ended by themselves soon."""
        partition = lease.spec.partition
        if event is Event.FOUND:
            self._granted[lease.id] = now
        elif event is Event.TAKEN and lease.id not in self._granted:
            self._useless.pop(partition, None)
        ended = lease.state in (LeaseState.ENDING, LeaseState.LOST, LeaseState.RELEASING, LeaseState.GONE)
        since = self._granted.pop(lease.id, None) if ended else None
        soon = since is not None and now - since < SOON and event is not Event.RELEASED
        if since is not None and now - since >= SOON:
            self._useless.pop(partition, None)
        unused = event is Event.RELEASED and lease.ends is not None and not lease.used
        if soon or (lease.state is LeaseState.RELEASING and (event is Event.FAILED or unused)):
            tries = self._useless.get(partition, (0, 0.0))[0] + 1
            self._useless[partition] = (tries, now + LEASE_REST * self.policy.backoff(tries))

    def _note_vm(self, vm: Vm, event: Event, now: float) -> None:
        if event is Event.PLANNED:
            self._claimed[vm.id] = now
            key = (vm.host, vm.image, vm.kind)
            if self.policy.interval(vm.kind):
                self._paced[key] = paid(key, self._paced, now, self.policy)
        elif event is Event.TAKEN or vm.leaving or vm.state in (VmState.LOST, VmState.RETIRING, VmState.DEAD):
            self._claimed.pop(vm.id, None)  # how long it took tells nothing of the others
        elif event is Event.REGISTERED and (began := self._claimed.pop(vm.id, None)) is not None:
            old = self._seconds.get((vm.image, vm.kind), now - began)
            self._seconds[vm.image, vm.kind] = old + SMOOTHING * (now - began - old)
        if vm.pool is not None and vm.attempt is None:
            self._note_spare(vm, event, now)
        elif event is Event.TAKEN and self._ready.pop(vm.id, None) is not None:
            self._failed.pop(vm.image, None)  # it was of use

    def _note_spare(self, vm: Vm, event: Event, now: float) -> None:
        """Count failures of spares: it did not come up, or died or proved unfit soon after it was ready."""
        if vm.pool is not None and vm.state.value == vm.pool.value:
            self._ready.setdefault(vm.id, now)
            if vm.image in self._failed:  # others may be made; whether it is of use is yet to be seen
                self._failed[vm.image] = (self._failed[vm.image][0], now)
            return
        if vm.state is VmState.STARTING or vm.state is VmState.PARKED:
            return
        since = self._ready.pop(vm.id, None)
        lived = since is not None and now - since >= SOON
        unfit = event in (Event.RELEASED, Event.RETIRED) and bool(vm.fault) and since is not None and not lived
        if event in (Event.FAILED, Event.DIED) or unfit:
            tries = 1 if lived else self._failed.get(vm.image, (0, 0.0))[0] + 1
            self._failed[vm.image] = (tries, now + self.policy.backoff(tries))

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
            rest={image: until for image, (_, until) in self._failed.items() if until > now},
            lease_rest={partition: until for partition, (_, until) in self._useless.items()},
        )

    def next_due(self, now: float) -> float:
        """When the pace next lets something be made that may be waited for; infinity if nothing is paced."""
        waits = [until - max(0.0, 1.0 - self.policy.interval(key[2])) for key, until in self._paced.items()]
        waits += [until for _, until in (*self._failed.values(), *self._useless.values())]
        return min((at for at in waits if at > now), default=math.inf)


EXCLUSION, EXCLUSION_LIMIT = 60.0, 3600.0  # seconds that a user is excluded; doubled up to the limit
FORGOTTEN = 3600.0  # seconds after the end of an exclusion until it counts no more


@dataclass(slots=True)
class _Taker:
    times: int
    until: float


class Exclusions:
    """Remembers, from the moves that were committed, which users took nodes in vain. A restart forgets it."""

    def __init__(self) -> None:
        self._takers: dict[int, _Taker] = {}

    def note(self, moves: Iterable[Move], now: float) -> None:
        for move in moves:
            for change in move.changes:
                row, event = change.row, change.event
                if isinstance(row, Offer) and event is Event.MISSED and row.uid is not None:
                    self._missed(row.uid, now, "no job came for a taken spare")
                elif isinstance(row, Attempt) and event is Event.PIN_EXPIRED and row.pin:
                    self._missed(row.uid, now, text_of(change.reason))

    def _missed(self, uid: int, now: float, reason: str) -> None:
        taker = self._takers.setdefault(uid, _Taker(0, now))
        seconds = min(EXCLUSION_LIMIT, EXCLUSION * 2.0 ** min(taker.times, 16))
        if taker.until <= now:
            log.info("user is excluded from offers", uid=uid, seconds=seconds, reason=reason)
        taker.times, taker.until = taker.times + 1, now + seconds

    def excluded(self, now: float) -> frozenset[int]:
        """The users who get no offered node at `now`. What is long past is forgotten."""
        for uid in [uid for uid, taker in self._takers.items() if taker.until + FORGOTTEN <= now]:
            del self._takers[uid]
        return frozenset(uid for uid, taker in self._takers.items() if taker.until > now)


UNTIL_MISSING = 3  # submissions in a row without a hint, in different seconds; a few may be lost at a restart
SKEW = 5.0  # seconds by which a hint may come earlier than the job was submitted by the scheduler's clock


class MissingHints:
    """Compares the submissions that observations show with the hints that came. Times are Unix times."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._listening = clock.wall()
        self._last_hint = 0.0
        self._counted: set[int] = set()  # the seconds of the submissions that had no hint
        self.since: float | None = None
        """When the first of the submissions without a hint was noticed (monotonic); None while hints come."""

    def hint_came(self) -> None:
        self._last_hint = self._clock.wall()
        self._counted.clear()
        if self.since is not None:
            self.since = None
            log.info("hints arrive again")

    def note(self, moves: Iterable[Move]) -> None:
        """Learn from committed moves which jobs were submitted. A job that is queued again comes without a hint."""
        for change in (change for move in moves for change in move.changes):
            row = change.row
            if change.event is Event.SUBMITTED and isinstance(row, Attempt) and not row.job.restarts:
                self._submitted(row.job.submitted)

    def _submitted(self, moment: int) -> None:
        if moment < self._listening + SKEW or self._last_hint >= moment - SKEW:
            return
        self._counted.add(moment)
        if len(self._counted) >= UNTIL_MISSING and self.since is None:
            self.since = self._clock.now()
            log.warning("hints missing", reason=f"the last {UNTIL_MISSING} submissions came without one")
