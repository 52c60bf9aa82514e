"""What was found to be wrong, as plain values: `service.convert` makes them from rows, `service.alerts` words them.

`name` is what `multiverse repair` takes, `label` how a sentence calls the record, `version` the record's version, and
`jobs` are the ids of affected jobs. Times are in seconds, memory in MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from multiverse.api import Alert


@dataclass(frozen=True, slots=True)
class StoreFailure:
    """No pass could be committed for `seconds`."""

    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class SourceFailure:
    """Every observation of a source has failed for `seconds`."""

    source: str
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class HintsMissing:
    """Jobs were submitted without hints for `seconds`. Until hints come, a job is noticed up to `poll` seconds later.
    `inbox` is the directory where hints are expected."""

    seconds: float
    poll: float
    inbox: str


@dataclass(frozen=True, slots=True)
class HostAway:
    """A known host is out of reach; `vms` are the VMs that were on it."""

    host: str
    vms: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    version: int = 0


@dataclass(frozen=True, slots=True)
class HostAvoided:
    """VMs of these images failed up to so many times in a row on a host, the last one for that reason. It gets none for
    another `retry_in` seconds (0 or less: one job at a time is tried there)."""

    name: str
    host: str
    image: str
    failures: int
    reason: str
    retry_in: float
    version: int


@dataclass(frozen=True, slots=True)
class FencedVms:
    """VMs that are not gone yet, of hosts that an operator has declared to be switched off."""

    vms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostShortOfMemory:
    host: str
    available: int
    floor: int


@dataclass(frozen=True, slots=True)
class HostShortOfDisk:
    """`paused` are the VMs that wait for room, `jobs` those that run in them. `available` None: it is unknown."""

    host: str
    available: int | None
    floor: int
    paused: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MissingImage:
    """No host in reach has an image that jobs or a pool want. `hosts_away`: other hosts, which are out of reach, may
    have it."""

    image: str
    jobs: tuple[str, ...]
    for_pool: bool
    hosts_away: bool


@dataclass(frozen=True, slots=True)
class QuarantinedRecord:
    name: str
    label: str
    state: str
    reason: str
    jobs: tuple[str, ...]
    version: int


@dataclass(frozen=True, slots=True)
class BrokenTemplate:
    """A template that failed `failures` times in a row. `retry_in` is 0 or less when it may be built at once."""

    name: str
    label: str
    failures: int
    reason: str
    retry_in: float
    version: int


@dataclass(frozen=True, slots=True)
class JobBackingOff:
    """A job whose next attempt waits: it failed so many times, or so many of its runs in a row ended within seconds."""

    name: str
    job_id: str
    failures: int
    retry_in: float
    version: int
    short_runs: int = 0


@dataclass(frozen=True, slots=True)
class FailingEffect:
    """An effect that failed `failures` times in a row. `subject` is the record that it is for, such as `vm 3`."""

    kind: str
    subject: str
    failures: int
    reason: str
    retry_in: float


@dataclass(frozen=True, slots=True)
class OrphanVm:
    """A VM that no record explained when it was found, with the job that is on it (empty: none was seen)."""

    name: str
    vm: str
    host: str
    job_id: str
    version: int


@dataclass(frozen=True, slots=True)
class UnknownUser:
    """Looking up a user has failed for `seconds`; `jobs` wait for that."""

    uid: int
    seconds: float
    reason: str
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacementFault:
    """A placement policy of the site was not followed when it was last asked."""

    policy: str
    reason: str


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that alerts are made of. `orphans` are the names of objects that have our site's name and that no
    record explains; `permanent` are alerts that last as long as the daemon."""

    store: StoreFailure | None = None
    sources: Sequence[SourceFailure] = ()
    hints: HintsMissing | None = None
    hosts_away: Sequence[HostAway] = ()
    avoided: Sequence[HostAvoided] = ()
    fenced: FencedVms = FencedVms()
    short_of_memory: Sequence[HostShortOfMemory] = ()
    short_of_disk: Sequence[HostShortOfDisk] = ()
    missing_images: Sequence[MissingImage] = ()
    quarantined: Sequence[QuarantinedRecord] = ()
    broken_templates: Sequence[BrokenTemplate] = ()
    backing_off: Sequence[JobBackingOff] = ()
    unknown_users: Sequence[UnknownUser] = ()
    placement_faults: Sequence[PlacementFault] = ()
    failing_effects: Sequence[FailingEffect] = ()
    orphans: Sequence[str] = ()
    orphan_vms: Sequence[OrphanVm] = ()
    permanent: Sequence[Alert] = ()
