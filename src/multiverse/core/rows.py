"""Live rows as they are asked for and kept, ids of rows by a key, and what passes remember beside the rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from multiverse.core.model.basics import ClaimKey, Key, RowKind, Size
from multiverse.core.model.host import Claim, Host, HostFault, KnownHost
from multiverse.core.model.identity import UserSeen
from multiverse.core.model.job import Attempt, AttemptState, Lease, LeasedHost, LeaseState, Node, SchedulerView
from multiverse.core.model.reason import Reason
from multiverse.core.model.saved import Saved
from multiverse.core.model.vm import Offer, OfferState, Template, Vm, VmSeen, VmState
from multiverse.core.model.world import Observation, Row, Seen


class LiveRows:
    """What is asked of live rows, whether they are a snapshot or the state in memory."""

    table_of: ClassVar[dict[RowKind, str]] = {
        "attempt": "attempts",
        "vm": "vms",
        "template": "templates",
        "offer": "offers",
        "lease": "leases",
        "saved": "saved",
    }

    attempts: Mapping[int, Attempt]
    vms: Mapping[int, Vm]
    templates: Mapping[int, Template]
    offers: Mapping[int, Offer]
    hosts: Mapping[str, KnownHost]
    leases: Mapping[int, Lease]
    saved: Mapping[int, Saved]

    def get(self, key: Key) -> Row | None:
        if key.kind == "host":
            return self.host_numbered(key.id)
        rows: Mapping[int, Row] = getattr(self, self.table_of[key.kind])
        return rows.get(key.id)

    def host_numbered(self, number: int) -> KnownHost | None:
        return next((host for host in self.hosts.values() if host.id == number), None)

    def attempt_of(self, vm: Vm) -> Attempt | None:
        return self.attempts.get(vm.attempt) if vm.attempt is not None else None

    def offer_of(self, vm: Vm) -> OfferState | None:
        """How it stands with the VM's offer; None if it was never offered."""
        offer = self.offers.get(vm.id)
        return offer.state if offer else None

    def source_of(self, host: str) -> str:
        """The source that answers for a host; empty if the host is not known."""
        known = self.hosts.get(host)
        return known.source if known else ""

    def is_fenced(self, host: str) -> bool:
        """Whether nothing of what was on the host goes on: it is surely off, or was removed from the site."""
        known = self.hosts.get(host)
        return known is not None and known.is_off

    def lease_of(self, host: str) -> Lease | None:
        return next((lease for lease in self.leases.values() if lease.name == host), None)

    def leases_in(self, *states: LeaseState) -> list[Lease]:
        return [lease for _, lease in sorted(self.leases.items()) if lease.state in states]

    @property
    def leased(self) -> frozenset[str]:
        return frozenset(lease.name for lease in self.leases.values())

    def leased_hosts(self) -> dict[str, LeasedHost]:
        return {one.name: one.host for _, one in sorted(self.leases.items()) if one.name in self.hosts}


@dataclass(frozen=True, slots=True)
class Rows(LiveRows):
    """All live rows as committed, the claims, the known hosts, and the numbers that come next."""

    site: str
    next_serial: int = 1
    next_attempt: int = 1
    next_template: int = 1
    attempts: Mapping[int, Attempt] = field(default_factory=dict)
    vms: Mapping[int, Vm] = field(default_factory=dict)
    templates: Mapping[int, Template] = field(default_factory=dict)
    offers: Mapping[int, Offer] = field(default_factory=dict)
    claims: Sequence[Claim] = ()
    hosts: Mapping[str, KnownHost] = field(default_factory=dict)
    leases: Mapping[int, Lease] = field(default_factory=dict)
    saved: Mapping[int, Saved] = field(default_factory=dict)
    next_lease: int = 1
    next_saved: int = 1
    skipped_saved: tuple[tuple[int, int], ...] = ()  # numbers below `next_saved` that were left out: from, and before


class Numbers:
    """The numbers that rows get next."""

    def __init__(self, rows: Rows) -> None:
        self.next_serial, self.next_attempt, self.next_template = (
            rows.next_serial,
            rows.next_attempt,
            rows.next_template,
        )
        self.next_lease, self.next_saved = rows.next_lease, rows.next_saved
        self.skipped_saved = rows.skipped_saved

    def as_now(self) -> Callable[[], None]:
        counters = dict(vars(self))
        return lambda: vars(self).update(counters)

    def new_serial(self) -> int:
        self.next_serial += 1
        return self.next_serial - 1

    def skip_serials(self, until: int) -> None:
        """Give no serial below `until` any more."""
        self.next_serial = max(self.next_serial, until)

    def new_attempt_id(self) -> int:
        self.next_attempt += 1
        return self.next_attempt - 1

    def new_lease_id(self) -> int:
        self.next_lease += 1
        return self.next_lease - 1

    def new_saved_id(self) -> int:
        self.next_saved += 1
        return self.next_saved - 1

    def has_given_saved(self, number: int) -> bool:
        """Whether a saved job had this number. One that was left out may be of a row that was lost with a database."""
        return number < self.next_saved and not any(first <= number < end for first, end in self.skipped_saved)

    def new_template_id(self) -> int:
        self.next_template += 1
        return self.next_template - 1


class Faults(dict[str, dict[str, HostFault]]):
    """The faults of the known hosts, by image and host."""

    def add(self, host: KnownHost) -> None:
        for fault in host.faults:
            self.setdefault(fault.image, {})[host.name] = fault

    def drop(self, host: KnownHost) -> None:
        for fault in host.faults:
            del self[fault.image][host.name]
            if not self[fault.image]:
                del self[fault.image]


class Claims(dict[ClaimKey, Claim]):
    """The claims that rows hold, by key, by owner and by domain."""

    def __init__(self) -> None:
        super().__init__()
        self.used: defaultdict[str, Size] = defaultdict(lambda: Size(0, 0, 0))  # what claims hold, by domain
        self._on: defaultdict[str, dict[Key, Claim]] = defaultdict(dict)  # by domain and owner
        self._domains: defaultdict[Key, set[str]] = defaultdict(set)  # of an owner's claims

    def put(self, key: ClaimKey, claim: Claim | None) -> None:
        """This is the claim of that key; None: there is none."""
        old = self.pop(key, None)
        if old is not None:
            del self._on[key.domain][key.owner]
            self.used[key.domain] -= old.size
            self._domains[key.owner].discard(key.domain)
            if not self._domains[key.owner]:
                del self._domains[key.owner]
        if claim is not None:
            self[key] = claim
            self._on[key.domain][key.owner] = claim
            self.used[key.domain] += claim.size
            self._domains[key.owner].add(key.domain)

    def of(self, owner: Key) -> list[ClaimKey]:
        return [ClaimKey(owner, domain) for domain in sorted(self._domains.get(owner, ()))]

    def on(self, domain: str) -> list[Claim]:
        """The claims in a domain, in no order."""
        return list(self._on[domain].values()) if domain in self._on else []


@dataclass(slots=True)
class Compared:
    """The observations that passes have compared with the rows so far: see `changes`."""

    scheduler: Seen[SchedulerView] | None = None
    sources: dict[str, Observation] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)  # sources that have been unknown for long
    vms: dict[str, Mapping[str, VmSeen]] = field(default_factory=dict)  # by source, as shown last
    nodes: Mapping[str, Node] = field(default_factory=dict)  # as shown last
    unexplained: set[tuple[str, str]] = field(default_factory=set)  # names without a row, with the source: candidates
    hosts_of: dict[str, frozenset[str]] = field(default_factory=dict)  # by source, the hosts that it shows
    showing: dict[str, dict[str, Host]] = field(default_factory=dict)  # by host, the sources that show it
    unadopted: set[str] = field(default_factory=set)  # sources that may show what has no row
    unlearned: set[str] = field(default_factory=set)  # hosts in sight that may have changed
    stray: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by source, saved VMs that it shows without a row
    frozen: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by source, VMs whose jobs it shows as stopped
    suspended: dict[str, float] = field(default_factory=dict)  # jobs, and since when they have been shown as that
    saved_at: float = -inf  # when all saved jobs were looked at last
    users: dict[int, tuple[bool, float]] | None = None  # whether they exist, and since when that is known
    seen_users: Mapping[int, UserSeen] | None = None  # the observation of these


@dataclass(frozen=True, slots=True)
class VmsMissing:
    """An attempt lacks VMs: as many more are planned for it, or it is given up."""

    attempt: int
    count: int
    reason: Reason
    counts: bool = True  # as failures of the attempt, and not of hosts


_NONE: frozenset[int] = frozenset()


class Index:
    """Ids of rows by a key."""

    def __init__(self) -> None:
        self._ids: defaultdict[object, set[int]] = defaultdict(set)

    def __getitem__(self, key: object) -> list[int]:
        return sorted(self._ids[key]) if key in self._ids else []

    def __contains__(self, key: object) -> bool:
        return key in self._ids

    def ids(self, key: object) -> Set[int]:
        """The ids under a key, in no order."""
        return self._ids.get(key, _NONE)

    def add(self, key: object, id_: int) -> None:
        self._ids[key].add(id_)

    def remove(self, key: object, id_: int) -> None:
        ids = self._ids[key]
        ids.discard(id_)
        if not ids:
            del self._ids[key]

    def __iter__(self) -> Iterator[object]:
        return iter(self._ids)


class RowIndexes:
    """Ids of rows by what they are asked for by."""

    def __init__(self) -> None:
        self.by_job = Index()  # attempts, by job id and by JobRef
        self.by_state = Index()  # all rows, by kind of row and state
        self.vms_by_attempt = Index()
        self.vms_by_job = Index()  # orphans, by the job that was seen on them
        self.vms_by_host = Index()
        self.vms_by_source = Index()
        self.vms_by_template = Index()  # by the number of the template's row, and by its key
        self.templates_by_key = Index()  # by key, by host and by source
        self.saved_by = Index()  # saved jobs, by the number of the VM, by the id of the job, and by their name
        self.kept_by = (
            Index()
        )  # saved jobs that are in the memory of a host, by the host and its source; and all of them
        self.vms_by_saved = Index()  # restored VMs, by the name of what they were restored from
        self.asking_to_be_saved = Index()  # attempts whose jobs run, under one key
        self.evicted = Index()  # attempts of whose jobs evictions are known, under one key

    def add(self, row: Row) -> None:
        for index, key in self._keys(row):
            index.add(key, row.key.id)

    def remove(self, row: Row) -> None:
        for index, key in self._keys(row):
            index.remove(key, row.key.id)

    def _keys_of_attempt(self, row: Attempt) -> Iterator[tuple[Index, object]]:
        yield self.by_job, row.job
        yield self.by_job, row.job.job_id
        if (row.request.save or row.request.checkpoint) and row.state is AttemptState.ALLOCATED:
            yield self.asking_to_be_saved, ()
        if row.evictions:
            yield self.evicted, ()

    def _keys(self, row: Row) -> Iterator[tuple[Index, object]]:
        yield self.by_state, (row.key.kind, row.state)
        match row:
            case Attempt():
                yield from self._keys_of_attempt(row)
            case Vm() if row.state is not VmState.DELETING:  # it has only a node
                if row.attempt is not None:
                    yield self.vms_by_attempt, row.attempt
                if row.job_id:
                    yield self.vms_by_job, row.job_id
                for place in row.places:
                    yield self.vms_by_host, place.host
                    yield self.vms_by_source, place.source
                    if place.template_id is not None:
                        yield self.vms_by_template, place.template_id
                    if place.template is not None:
                        yield self.vms_by_template, place.template
                if row.saved:
                    yield self.vms_by_saved, row.saved
            case Saved():
                keys = (row.job.job_id, *row.names, *(part.vm for part in row.parts))
                yield from ((self.saved_by, key) for key in keys)
                of_memory = (row.kept, ("source", row.source), True) if row.kept else ()
                yield from ((self.kept_by, key) for key in of_memory)
            case Template():
                yield self.templates_by_key, row.which
                yield self.templates_by_key, row.host
                yield self.templates_by_key, ("source", row.source)


@dataclass(slots=True)
class DirtyRows:
    """What the next step looks at: rows that changed, that depend on something that did, or that time may move."""

    attempts: set[int] = field(default_factory=set)
    vms: set[int] = field(default_factory=set)
    templates: set[int] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)
    unread: set[int] = field(default_factory=set)  # attempts newer than the latest reading of their jobs
