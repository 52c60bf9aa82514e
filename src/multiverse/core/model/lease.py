"""Leases: hosts borrowed from the scheduler, each by a pilot job."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from multiverse.core.model.keys import Key
from multiverse.core.model.reason import Reason
from multiverse.core.model.sizes import Size


class PilotState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    ENDING = "ending"  # it was told to end (preempted, cancelled, out of time), or is completing
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class PilotSeen:
    """A pilot job as the scheduler shows it: `name` and `token` are those of its lease's specification.

    `node` is the physical node that it runs on, or ran on last; empty if it never ran. `ends` is the Unix time by which
    it has ended at the latest, infinity while that is not known. `restarts` is how often the scheduler has queued it
    again. `clean` says that nothing of it, nor of an earlier run of it, can be left on a node: it never ran, or each
    node that it ran on answered until the pilot had left COMPLETING, or has rebooted since. A node that was set DOWN
    ends its jobs in the scheduler alone. While a pilot runs `clean` means nothing. `reason` is the scheduler's word on
    why it waits, or why it ends.
    """

    name: str
    token: str
    state: PilotState
    node: str = ""
    ends: float = inf
    reason: str = ""
    restarts: int = 0
    clean: bool = False


@dataclass(frozen=True, slots=True)
class LeaseSpec:
    """What a pilot is asked for. `size` is what is taken of a node, in CPUs and MiB; zero CPUs: the whole node, zero
    memory: as the partition gives it. `account` and `user` are empty where the scheduler's defaults are meant.
    `time_limit` is in seconds."""

    name: str
    token: str
    partition: str
    size: Size = Size(0, 0)
    time_limit: float = 3600.0
    account: str = ""
    user: str = ""


@dataclass(frozen=True, slots=True)
class LeasedHost:
    """How a leased host is reached: by its pilot, named by the scheduler's id, on a physical node of the scheduler."""

    lease: LeaseSpec
    pilot: str
    node: str
    ends: float = inf


class LeaseState(StrEnum):
    PLANNED = "planned"  # its pilot is to be submitted
    WAITING = "waiting"  # its pilot waits in the scheduler
    STARTING = "starting"  # its pilot runs; its host has not been in sight yet
    IDLE = "idle"  # its host is in sight, and no VM is claimed on it
    HELD = "held"  # VMs are claimed on its host
    ENDING = "ending"  # its pilot is ending: its host takes no VM, and its agent ends those that are there
    LOST = "lost"  # its pilot is over, but its node did not answer: what was on its host may go on
    RELEASING = "releasing"  # its pilot is to be cancelled; nothing of its VMs goes on
    GONE = "gone"  # no pilot of it is left, and nothing is claimed on its host


OPEN_LEASES = (LeaseState.IDLE, LeaseState.HELD)
"""The host of a lease in one of these states takes VMs."""

GIVEN_UP_LEASES = (LeaseState.ENDING, LeaseState.LOST, LeaseState.RELEASING)
"""The host of a lease in one of these states takes no VM any more."""

COMING_LEASES = (LeaseState.PLANNED, LeaseState.WAITING, LeaseState.STARTING)
"""The host of a lease in one of these states is expected to take VMs."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A host borrowed from the scheduler, or about to be. Its host has its name, which never recurs.

    `since` is when it entered its state (monotonic). `pilot` is the scheduler's id of its pilot, `node` the physical
    node, `ends` the Unix time by which the pilot has ended, as last observed, None if nobody can tell. `used` is how
    often VMs were claimed on its host after there had been none.
    """

    id: int
    version: int = field(default=0, kw_only=True)
    state: LeaseState = field(default=LeaseState.PLANNED, kw_only=True)
    since: float
    spec: LeaseSpec
    pilot: str = ""
    node: str = ""
    ends: float | None = None
    reason: Reason | None = None
    quarantined: Reason | None = None
    used: int = 0

    @property
    def key(self) -> Key:
        return Key("lease", self.id)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def host(self) -> LeasedHost:
        """How its host is reached."""
        return LeasedHost(self.spec, self.pilot, self.node, inf if self.ends is None else self.ends)
