"""The live rows, the claims and the known hosts, with indexes that outlive a pass.

The controller keeps one `State` and is its only writer. A pass begins, plans moves, each of which changes the state at
once, and ends with `commit` or `rollback`: after a rollback the state is as it was when the pass began. The cost of a
pass is that of its moves, not that of all rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from multiverse.core.errors import Broken
from multiverse.core.model import (
    Attempt,
    AttemptState,
    Claim,
    ClaimKey,
    CloneKind,
    HostState,
    JobRef,
    Key,
    KnownHost,
    Offer,
    OfferState,
    Row,
    Template,
    TemplateKey,
    Vm,
    VmState,
)
from multiverse.core.transition import TERMINAL, Change, Event, Move, Tables


class LiveRows:
    """What is asked of live rows, whether they are a snapshot or the state in memory."""

    attempts: Mapping[int, Attempt]
    vms: Mapping[int, Vm]
    templates: Mapping[int, Template]
    offers: Mapping[int, Offer]

    def get(self, key: Key) -> Row | None:
        """The live row of that key."""
        match key.kind:
            case "attempt":
                return self.attempts.get(key.id)
            case "vm":
                return self.vms.get(key.id)
            case "template":
                return self.templates.get(key.id)
            case "offer":
                return self.offers.get(key.id)

    def attempt_of(self, vm: Vm) -> Attempt | None:
        """The live attempt that the VM serves, if any."""
        return self.attempts.get(vm.attempt) if vm.attempt is not None else None


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
    hosts: Mapping[str, KnownHost] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class VmsMissing:
    """An attempt lacks VMs: provisioning is to plan so many more for it, or to give up on it."""

    attempt: int
    count: int
    reason: str


class Index:
    """Ids of rows by a key."""

    def __init__(self) -> None:
        self._ids: defaultdict[object, set[int]] = defaultdict(set)

    def __getitem__(self, key: object) -> list[int]:
        """The ids under a key, in ascending order."""
        return sorted(self._ids[key]) if key in self._ids else []

    def __contains__(self, key: object) -> bool:
        return key in self._ids

    def add(self, key: object, id_: int) -> None:
        self._ids[key].add(id_)

    def remove(self, key: object, id_: int) -> None:
        ids = self._ids[key]
        ids.discard(id_)
        if not ids:
            del self._ids[key]

    def entries(self) -> dict[object, frozenset[int]]:
        """All that is in it: for comparing."""
        return {key: frozenset(ids) for key, ids in self._ids.items()}


class State(LiveRows):
    """The live rows, their indexes, and what the current pass has changed in them."""

    def __init__(self, rows: Rows, tables: Tables, now: float = 0.0) -> None:
        self.site = rows.site
        self.now = now
        self.attempts: dict[int, Attempt] = {}
        self.vms: dict[int, Vm] = {}
        self.templates: dict[int, Template] = {}
        self.offers: dict[int, Offer] = {}
        self.claims: dict[ClaimKey, Claim] = {claim.key: claim for claim in rows.claims}
        self.hosts: dict[str, KnownHost] = dict(rows.hosts)
        # Indexes, which every change of a row keeps.
        self._by_job = Index()  # attempts, by job id and by JobRef
        self._by_state = Index()  # all rows, by kind of row and state
        self._vms_by_attempt = Index()
        self._vms_by_host = Index()
        self._templates_by_key = Index()
        self._domains: defaultdict[Key, set[str]] = defaultdict(set)  # in which an owner holds claims
        for claim in rows.claims:
            self._domains[claim.owner].add(claim.domain)
        self._addresses: Counter[str] = Counter()
        # What belongs to the current pass.
        self.moves: list[Move] = []
        self.missing: list[VmsMissing] = []
        self.learned: dict[str, KnownHost] = {}  # hosts of which something new is known
        self.paced: dict[tuple[str, str, CloneKind], float] = {}  # see `Forecast`, with the clones of this pass
        self.waiting = Counter[tuple[str, str, CloneKind]]()  # clones that wait for their pace in this round
        self.unknown_users: set[int] = set()  # of jobs that wait until the name service says who they are
        self.wanted: Counter[str] | None = None  # VMs that jobs want now, by image; computed when first asked for
        self.entropy = ""
        self._tables = tables
        self._undo: list[Callable[[], None]] = []
        self._serial, self._attempt, self._template = rows.next_serial, rows.next_attempt, rows.next_template
        for table in (rows.attempts, rows.vms, rows.templates, rows.offers):
            for row in table.values():
                self._put(row)

    # --- passes ------------------------------------------------------------------------------------

    def begin(self, now: float, paced: Mapping[tuple[str, str, CloneKind], float], entropy: str = "") -> None:
        """Begin a pass at `now`. What the pass before changed is kept, unless it was rolled back."""
        self.now, self.paced, self.entropy = now, dict(paced), entropy
        self.moves, self.missing, self.learned, self.wanted = [], [], {}, None
        self.waiting.clear()
        counters = (self._serial, self._attempt, self._template)

        def reset() -> None:
            self._serial, self._attempt, self._template = counters

        self._undo = [reset]

    def rollback(self) -> None:
        """Undo all that was changed since the pass began."""
        while self._undo:
            self._undo.pop()()
        self.moves, self.missing, self.learned = [], [], {}

    def rows(self) -> Rows:
        """A snapshot, as the store keeps it."""
        return Rows(
            self.site,
            self._serial,
            self._attempt,
            self._template,
            dict(sorted(self.attempts.items())),
            dict(sorted(self.vms.items())),
            dict(sorted(self.templates.items())),
            dict(sorted(self.offers.items())),
            tuple(claim for _, claim in sorted(self.claims.items())),
            dict(sorted(self.hosts.items())),
        )

    def indexes(self) -> dict[str, dict[object, frozenset[int]]]:
        """All indexes: for comparing with those of a state made anew."""
        return {
            "by_job": self._by_job.entries(),
            "by_state": self._by_state.entries(),
            "vms_by_attempt": self._vms_by_attempt.entries(),
            "vms_by_host": self._vms_by_host.entries(),
            "templates_by_key": self._templates_by_key.entries(),
        }

    # --- numbers -----------------------------------------------------------------------------------

    @property
    def next_serial(self) -> int:
        """The serial of the next VM, which `new_serial` counts."""
        return self._serial

    def new_serial(self) -> int:
        self._serial += 1
        return self._serial - 1

    def new_attempt_id(self) -> int:
        self._attempt += 1
        return self._attempt - 1

    def new_template_id(self) -> int:
        self._template += 1
        return self._template - 1

    # --- changes -----------------------------------------------------------------------------------

    def move(self, *changes: Change, make: Iterable[Claim] = (), free: Iterable[Key] = ()) -> None:
        """Make one move. Rows that enter a new state get `since` = now; the rows in `free` lose all their claims.
        Raises `Broken`, with nothing changed, if the tables lack a transition that the move needs."""
        stamped = []
        for change in changes:
            row = change.row
            old = self.get(row.key)
            source = old.state if old else None
            if not self._tables.allowed(row.key.kind, source, change.event, row.state):
                raise Broken(f"{row.key}: its table has no transition {source} --{change.event}--> {row.state}")
            if source != row.state:
                row = replace(row, since=self.now)
            stamped.append(replace(change, row=row))
        for change in stamped:
            self._change(replace(change.row, version=change.row.version + 1))
        freed = tuple(key for owner in free for key in self.claims_of(owner))
        for key in freed:
            self._set_claim(key, None)
        made = tuple(make)
        for claim in made:
            self._set_claim(claim.key, claim)
        self.moves.append(Move(tuple(stamped), made, freed))

    def know_host(self, host: KnownHost) -> None:
        """Keep what is known of a host."""
        old = self.hosts.get(host.name)
        if old != host:
            self._undo.append(lambda: self._restore_host(host.name, old))
            self.hosts[host.name] = self.learned[host.name] = host

    def _restore_host(self, name: str, old: KnownHost | None) -> None:
        if old is None:
            del self.hosts[name]
        else:
            self.hosts[name] = old

    def _change(self, row: Row) -> None:
        old = self.get(row.key)
        self._undo.append(lambda: self._put(old) if old is not None else self._drop(row.key))
        if row.state in TERMINAL:
            self._drop(row.key)
        else:
            self._put(row)

    def _set_claim(self, key: ClaimKey, claim: Claim | None) -> None:
        old = self.claims.get(key)

        def put(one: Claim | None) -> None:
            if one is None:
                self.claims.pop(key, None)
                self._domains[key.owner].discard(key.domain)
            else:
                self.claims[key] = one
                self._domains[key.owner].add(key.domain)

        self._undo.append(lambda: put(old))
        put(claim)

    def _put(self, row: Row) -> None:
        self._drop(row.key)
        match row:
            case Attempt():
                self.attempts[row.id] = row
            case Vm():
                self.vms[row.id] = row
            case Template():
                self.templates[row.id] = row
            case Offer():
                self.offers[row.id] = row
        for index, key in self._index_keys(row):
            index.add(key, row.id)
        if isinstance(row, Vm) and row.address:
            self._addresses[row.address] += 1

    def _drop(self, key: Key) -> None:
        old = self.get(key)
        if old is None:
            return
        for index, entry in self._index_keys(old):
            index.remove(entry, old.id)
        if isinstance(old, Vm) and old.address:
            self._addresses[old.address] -= 1
            if not self._addresses[old.address]:
                del self._addresses[old.address]
        tables: dict[str, dict[int, Any]] = {
            "attempt": self.attempts, "vm": self.vms, "template": self.templates, "offer": self.offers
        }  # fmt: skip
        del tables[key.kind][key.id]

    def _index_keys(self, row: Row) -> Iterator[tuple[Index, object]]:
        yield self._by_state, (row.key.kind, row.state)
        match row:
            case Attempt():
                yield self._by_job, row.job
                yield self._by_job, row.job.job_id
            case Vm():
                yield self._vms_by_host, row.host
                if row.attempt is not None:
                    yield self._vms_by_attempt, row.attempt
            case Template():
                yield self._templates_by_key, row.which

    # --- questions ---------------------------------------------------------------------------------

    def attempts_in(self, *states: AttemptState) -> list[Attempt]:
        """The attempts in one of these states, by number."""
        return [self.attempts[id_] for id_ in sorted(i for s in states for i in self._by_state["attempt", s])]

    def attempts_of_job(self, job: JobRef | str) -> list[Attempt]:
        """The attempts of one run of a job, or of all runs of a job id, by number."""
        return [self.attempts[id_] for id_ in self._by_job[job]]

    def serves_job(self, job: JobRef) -> bool:
        """Whether this run of a job has a live attempt."""
        return job in self._by_job

    def vms_in(self, *states: VmState) -> list[Vm]:
        """The VMs in one of these states, by serial."""
        return [self.vms[id_] for id_ in sorted(i for s in states for i in self._by_state["vm", s])]

    def vms_of(self, attempt: Attempt) -> list[Vm]:
        """The attempt's live VMs, those being released too, by serial."""
        return [self.vms[id_] for id_ in self._vms_by_attempt[attempt.id]]

    def vms_on(self, host: str) -> list[Vm]:
        """The VMs whose capacity is claimed on a host, by serial."""
        return [self.vms[id_] for id_ in self._vms_by_host[host]]

    def serving_vms_of(self, attempt: Attempt) -> list[Vm]:
        """The attempt's VMs that are neither lost nor being destroyed."""
        return [vm for vm in self.vms_of(attempt) if not vm.leaving and vm.state is not VmState.LOST]

    def offer_of(self, vm: Vm) -> OfferState | None:
        """How it stands with the VM's offer; None if it was never offered."""
        offer = self.offers.get(vm.id)
        return offer.state if offer else None

    def claims_of(self, owner: Key) -> list[ClaimKey]:
        """The claims that a row holds."""
        return [ClaimKey(owner, domain) for domain in sorted(self._domains.get(owner, ()))]

    def addresses(self) -> Mapping[str, int]:
        """The addresses that VMs have."""
        return self._addresses

    def template_for(self, which: TemplateKey) -> Template | None:
        """The live template of that key."""
        ids = self._templates_by_key[which]
        return self.templates[ids[0]] if ids else None

    def source_of(self, host: str) -> str:
        """The source that answers for a host; empty if the host is not known."""
        known = self.hosts.get(host)
        return known.source if known else ""

    def is_fenced(self, host: str) -> bool:
        """Whether an operator vouched that the host is off."""
        known = self.hosts.get(host)
        return known is not None and known.state is HostState.FENCED


@contextmanager
def quarantine_on_error(state: State, key: Key) -> Iterator[None]:
    """A fault of ours in deciding about one record quarantines that record, and no other record is affected."""
    try:
        yield
    except Exception as error:
        row = state.get(key)
        if row is None:
            raise
        if row.quarantined:
            return
        why = f"a fault of Multiverse, please report it: {error!r}"
        state.move(Change(replace(row, quarantined=why), Event.QUARANTINED, why))
