"""The live rows, the claims and the known hosts, with indexes that outlive a pass.

The controller keeps one `State` and is its only writer. The moves of a pass change it at once; a rollback restores it.
A pass costs its moves, not all rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from itertools import chain
from typing import Any

from multiverse.core.capacity_index import CapacityIndex, SlotTable, Touched
from multiverse.core.copies import replaced
from multiverse.core.errors import Broken, Refused
from multiverse.core.model.basics import ClaimKey, CloneKind, Key, RowKind
from multiverse.core.model.eviction import Step
from multiverse.core.model.host import Claim, Drain, HostState, KnownHost
from multiverse.core.model.job import WAITING_STATES, Attempt, AttemptState, JobRef, Lease, Request
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.saved import WAITS_FOR_RUN, Saved, SavedSeen, SavedState
from multiverse.core.model.vm import Offer, Template, TemplateKey, TemplateState, Vm, VmState
from multiverse.core.model.world import Row, World
from multiverse.core.queue import Queue
from multiverse.core.rows import Claims, Compared, DirtyRows, Faults, LiveRows, Numbers, RowIndexes, Rows, VmsMissing
from multiverse.core.transition import TERMINAL, Change, Command, Event, Move, Tables


class State(LiveRows):
    """The live rows, their indexes, and what the current pass has changed. Lists of rows are in ascending order of
    ids."""

    def __init__(self, rows: Rows, tables: Tables, now: float = 0.0) -> None:
        self.site, self.now = rows.site, now
        self.attempts: dict[int, Attempt] = {}
        self.vms: dict[int, Vm] = {}
        self.templates: dict[int, Template] = {}
        self.offers: dict[int, Offer] = {}
        self.leases: dict[int, Lease] = {}
        self.saved: dict[int, Saved] = {}
        self.claims = Claims()
        self.numbers = Numbers(rows)
        self.hosts: dict[str, KnownHost] = {}  # also removed ones
        self._host_names: dict[int, str] = {}
        self.drains: dict[str, Drain] = {}  # by host
        self.faults = Faults()
        self.host_changes = 0  # rises when a host's row changes
        self.closed: frozenset[str] = frozenset()  # hosts that take no new VM: off, removed or drained
        self.closing: frozenset[str] = frozenset()  # hosts that are to be drained later
        self._unknown_at, self._unknown = (-1, -1), set[str]()  # see `unknown_in_sight`
        # Indexes, which every change of a row keeps.
        self._indexes = RowIndexes()
        self._idle_templates: set[int] = set()  # see `idle_templates`; keys in `_perhaps_idle` are not decided
        self._perhaps_idle: set[TemplateKey] = set()
        self.vm_named: dict[str, int] = {}
        self.queue = Queue()
        self.touched = Touched()
        self.slots: dict[object, SlotTable] = {}  # when hosts will have room, for the requests asked for last
        self.free = CapacityIndex()  # what is free on the hosts in sight
        # What is to be looked at.
        self.dirty = DirtyRows()
        self.unconfirmed: set[Key] = set()  # VMs and templates that an earlier run of the daemon planned, not seen yet
        self.unserved: set[str] = set()  # ids of jobs that may need an attempt
        self.compared = Compared()
        self.addresses: Counter[str] = Counter()  # that VMs have
        # What belongs to the current pass.
        self.moves: list[Move] = []
        self.missing: list[VmsMissing] = []
        self.learned: dict[str, KnownHost] = {}  # hosts that were observed otherwise, without a move
        self.refusals: list[tuple[Command, Refused]] = []  # commands that were not followed, and why
        self.paced: dict[tuple[str, str, CloneKind], float] = {}  # see `Forecast`, with the clones of this pass
        self.waiting = Counter[tuple[str, str, CloneKind]]()  # clones that wait for their pace in this round
        self.wanted: Counter[str] | None = None  # VMs that jobs want now, by image; computed when first asked for
        self.users_asked: dict[int, float] = {}  # the users that jobs wait for, and since when they are asked for
        self.reasons: dict[int, Reason] = {}  # why attempts wait: the first of the queue, in its order
        self.promised: dict[int, float] = {}  # by when the first that waits for room starts, as told
        self.blocking: int | None = None  # the attempt that waits for capacity and blocks those behind it
        self.looked: tuple[int, int, float] = (
            -1,
            -1,
            0.0,
        )  # nothing could go ahead: count of changes, first attempt, until
        # The attempt for which evictions were planned last, until when it is not looked at again, and how many running
        # jobs are passed over then.
        self.looked_for_room: tuple[int | None, float, int] = (None, 0.0, 0)
        self.held_back: dict[str, list[Step]] = {}  # evictions that a limit holds back, by method
        self.placement_faults: dict[str, str] = {}  # by the name of a placement policy, why it was passed over last
        self.lacking: set[tuple[Request, CloneKind]] = set()  # what others on the machines leave too little memory for
        self.entropy = ""
        self.tables = tables
        self._undo: list[Callable[[], None]] = []
        self._read(rows)

    def _read(self, rows: Rows) -> None:
        for claim in rows.claims:
            self._put_claim(claim.key, claim)
        for host in rows.hosts.values():
            self.know_host(host)
        self.learned = {}
        for table in (rows.attempts, rows.vms, rows.templates, rows.offers, rows.leases, rows.saved):
            for row in table.values():
                self._put(row)

    # --- passes ------------------------------------------------------------------------------------

    def begin(self, now: float, paced: Mapping[tuple[str, str, CloneKind], float], entropy: str = "") -> None:
        """Begin a pass at `now`. What the pass before changed is kept, unless it was rolled back."""
        self.now, self.paced, self.entropy = now, dict(paced), entropy
        self.moves, self.missing, self.learned, self.refusals, self.wanted = [], [], {}, [], None
        self.waiting.clear()
        self._undo = [self.numbers.as_now()]

    def rollback(self) -> None:
        while self._undo:
            self._undo.pop()()
        self.moves, self.missing, self.learned, self.refusals = [], [], {}, []

    def rows(self) -> Rows:
        """A snapshot, as the store keeps it."""
        tables = ("attempts", "vms", "templates", "offers", "hosts", "leases", "saved")
        rows: dict[str, Any] = {name: dict(sorted(getattr(self, name).items())) for name in tables}
        claims = tuple(claim for _, claim in sorted(self.claims.items()))
        return Rows(self.site, claims=claims, **vars(self.numbers), **rows)

    # --- changes -----------------------------------------------------------------------------------

    def move(self, *changes: Change, make: Iterable[Claim] = (), free: Iterable[ClaimKey] = ()) -> None:
        """Make one move. Rows in a new state get `since` = now. Raises `Broken` if a table lacks a transition."""
        stamped = []
        for change in changes:
            row = change.row
            old = self.get(row.key)
            source = old.state if old else None
            if not self.tables.allowed(row.key.kind, source, change.event, row.state):
                raise Broken(f"{row.key}: its table has no transition {source} --{change.event}--> {row.state}")
            if source != row.state:
                row = replaced(row, since=self.now)
            stamped.append(Change(row, change.event, change.reason))
        for change in stamped:
            self._change(replaced(change.row, version=change.row.version + 1))
        made, freed = tuple(make), tuple(key for key in free if key in self.claims)
        for key in freed:
            self._set_claim(key, None)
        for claim in made:
            self._set_claim(claim.key, claim)
        self.moves.append(Move(tuple(stamped), made, freed))

    def know_host(self, host: KnownHost) -> None:
        """Keep what is known of a host, before any move of it in this pass. It is no move, and not in the journal."""
        old = self.hosts.get(host.name)
        number = old.id if old else host.id or max([0, *self._host_names]) + 1  # leased hosts have negative numbers
        host = replace(host, id=number)
        if old != host:
            self._undo.append(lambda: self._forget_host(host, old))
            self._put(host)
            self.learned[host.name] = host

    def _forget_host(self, host: KnownHost, old: KnownHost | None) -> None:
        self._put(old) if old is not None else self._drop(host.key)
        self.compared.unlearned.add(host.name)  # so that it is learned again

    def close_hosts(self, closed: frozenset[str], closing: frozenset[str]) -> None:
        """Which hosts take no new VM, and which will take none later. What waiting jobs could have depends on that."""
        if (closed, closing) != (self.closed, self.closing):
            for name in sorted(self.closed ^ closed):
                self.touched.note(name)
            self.closed, self.closing = closed, closing
            self.free.close(closed)
            self.queue.check_all()

    def _change(self, row: Row) -> None:
        old = self.get(row.key)
        self._undo.append(lambda: self._put(old) if old is not None else self._drop(row.key))
        if row.state in TERMINAL:
            self._drop(row.key)
            sources = self._may_still_show(row) if isinstance(row, Vm) else [getattr(row, "source", "")]
            self.compared.unadopted.update(sources)
            if isinstance(row, Vm):
                self.compared.unexplained.update((row.name, source) for source in ("", *sources))
        else:
            self._put(row)

    def _may_still_show(self, vm: Vm) -> list[str]:
        """The sources that may show a VM of that name: those of its places, and those of another VM that has it."""
        shown = (source for source, vms in self.compared.vms.items() if vm.name in vms)
        return [*dict.fromkeys((*(place.source for place in vm.places), *shown))]

    def _set_claim(self, key: ClaimKey, claim: Claim | None) -> None:
        old = self.claims.get(key)
        self._undo.append(lambda: self._put_claim(key, old))
        self._put_claim(key, claim)

    def _put_claim(self, key: ClaimKey, claim: Claim | None) -> None:
        self.touched.note(key.domain)
        self.free.stale.add(key.domain)
        self.claims.put(key, claim)

    def _put(self, row: Row) -> None:
        self._drop(row.key)
        if isinstance(row, KnownHost):
            self.host_changes += 1
            self.hosts[row.name], self._host_names[row.id] = row, row.name
            if row.drain is not None:
                self.drains[row.name] = row.drain
            self.faults.add(row)
        else:
            getattr(self, self.table_of[row.key.kind])[row.id] = row
        if isinstance(row, Attempt):
            self.queue.put(row)
        elif isinstance(row, Vm):
            self.vm_named[row.name] = row.id
            self._count_address(row.address, 1)
        elif isinstance(row, Saved):  # a restored VM has its address again
            self._count_address(row.address, 1)
        self._indexes.add(row)
        self._mark(row)

    def _drop(self, key: Key) -> None:
        old = self.get(key)
        if old is None:
            return
        self._mark(old)
        self._indexes.remove(old)
        if isinstance(old, KnownHost):
            self.host_changes += 1
            del self.hosts[old.name], self._host_names[old.id]
            self.drains.pop(old.name, None)
            self.faults.drop(old)
        else:
            del getattr(self, self.table_of[key.kind])[old.id]
        if isinstance(old, Attempt):
            self.queue.drop(old.id)
            self.unserved.add(old.job.job_id)
        elif isinstance(old, Template):
            self._idle_templates.discard(old.id)
        elif isinstance(old, Vm):
            if self.vm_named.get(old.name) == old.id:
                del self.vm_named[old.name]
            self._count_address(old.address, -1)
        elif isinstance(old, Saved):
            self._count_address(old.address, -1)

    def _count_address(self, address: str, change: int) -> None:
        if address:
            self.addresses[address] += change
            if not self.addresses[address]:
                del self.addresses[address]

    # --- what is to be looked at -------------------------------------------------------------------

    def _mark(self, row: Row) -> None:
        """A row has changed: look at it, at those whose steps depend on it, and at what is free on its host."""
        match row:
            case Template():
                self.dirty.templates.add(row.id)
                self._perhaps_idle.add(row.which)
                self.touched.note(row.host)
                self.free.stale.add(row.host)
                self.free.stale_templates.add(row.which)
            case Attempt():
                self.dirty.attempts.add(row.id)
                self.touched.note()
                for id_ in self._indexes.vms_by_attempt[row.id]:
                    self._mark_vm(self.vms[id_])
            case Vm():
                for place in row.places:
                    self.free.stale.add(place.host)
                    if place.template is not None:
                        self._perhaps_idle.add(place.template)
                self._mark_vm(row)
            case Offer(id=id_) if id_ in self.vms:
                self._mark_vm(self.vms[id_])
            case Lease():
                self.touched.note(row.name)
            case Saved():  # its VM, and the attempt of the next run, wait for it
                self._mark_saved(row)
            case KnownHost():
                self.queue.check_all()
                self.touched.note(row.name)
                self.dirty.saved.update(self._indexes.kept_by.ids(row.name))
                for id_ in self._indexes.vms_by_host[row.name]:
                    self._mark_vm(self.vms[id_])

    def _mark_saved(self, saved: Saved) -> None:
        self.dirty.saved.add(saved.id)
        self.mark_job(saved.job.job_id)
        for part in saved.parts:
            self.mark_vm(part.vm_name)

    def _mark_vm(self, vm: Vm) -> None:
        self.dirty.vms.add(vm.id)
        self.dirty.saved.update(self._indexes.saved_by.ids(vm.id))
        self.dirty.saved.update(self._indexes.saved_by.ids(vm.saved) if vm.saved else ())
        for place in vm.places:
            self.touched.note(place.host)
        if vm.attempt is not None:
            self.dirty.attempts.add(vm.attempt)

    def mark_job(self, job_id: str) -> None:
        self.unserved.add(job_id)
        self.dirty.saved.update(self._indexes.saved_by.ids(job_id))
        for attempt in self.attempts_of_job(job_id):
            self.queue.put(attempt)
            self._mark(attempt)

    def look_again(self) -> None:
        """Look at all rows in the next pass, because other settings may decide otherwise than was concluded."""
        self.looked, self.looked_for_room = (-1, -1, 0.0), (None, 0.0, 0)
        self.queue.check_all()
        self.dirty.attempts.update(self.attempts)
        self.dirty.vms.update(self.vms)
        self.dirty.templates.update(self.templates)
        self.dirty.saved.update(self.saved)

    def mark_vm(self, name: str) -> None:
        id_ = self.vm_named.get(name)
        if id_ is not None:
            self._mark_vm(self.vms[id_])

    def mark_source(self, source: str) -> None:
        for id_ in self._indexes.vms_by_source[source]:
            self._mark_vm(self.vms[id_])

    def mark_observed(self, source: str) -> None:
        self.dirty.templates.update(self._indexes.templates_by_key.ids(("source", source)))
        self.dirty.saved.update(self._indexes.kept_by.ids(("source", source)))
        self.compared.unadopted.add(source)

    def take_unadopted(self) -> list[str]:
        """The sources that may show what has no row. They count as looked at, unless the pass is rolled back."""
        found = sorted(self.compared.unadopted)
        self.compared.unadopted.clear()
        self._undo.append(lambda: self.compared.unadopted.update(found))
        return found

    # --- questions ---------------------------------------------------------------------------------

    def _in(self, kind: RowKind, states: Iterable[object]) -> list[int]:
        ids = self._indexes.by_state.ids
        found = [some for state in states if (some := ids((kind, state)))]
        return sorted(found[0]) if len(found) == 1 else sorted(chain.from_iterable(found))

    def attempts_in(self, *states: AttemptState) -> list[Attempt]:
        return [self.attempts[id_] for id_ in self._in("attempt", states)]

    def attempts_of_job(self, job: JobRef | str) -> list[Attempt]:
        """The attempts of one run of a job, or of all runs of a job id, by number."""
        return [self.attempts[id_] for id_ in self._indexes.by_job[job]]

    def serves_job(self, job: JobRef) -> bool:
        return job in self._indexes.by_job

    def vms_in(self, *states: VmState) -> list[Vm]:
        return [self.vms[id_] for id_ in self._in("vm", states)]

    def vms_of(self, attempt: Attempt) -> list[Vm]:
        """The attempt's live VMs, also while they are released, but not once only a node is left."""
        return [self.vms[id_] for id_ in self._indexes.vms_by_attempt[attempt.id]]

    def vms_seen_with(self, job_id: str) -> list[Vm]:
        """Orphans on which a job of that id was seen."""
        return [self.vms[id_] for id_ in self._indexes.vms_by_job[job_id]]

    def saved_in(self, *states: SavedState) -> list[Saved]:
        return [self.saved[id_] for id_ in self._in("saved", states)]

    def saved_of(self, vm: Vm) -> list[Saved]:
        """What is being saved of a VM, or was saved of it and is not discarded yet."""
        return [self.saved[id_] for id_ in self._indexes.saved_by[vm.id]]

    def saved_of_job(self, job_id: str) -> list[Saved]:
        return [self.saved[id_] for id_ in self._indexes.saved_by[job_id]]

    def saved_named(self, name: str) -> list[Saved]:
        return [self.saved[id_] for id_ in self._indexes.saved_by[name]]

    def kept_in_memory(self) -> list[Saved]:
        """The saved jobs whose states are in the memory of any host."""
        return [self.saved[id_] for id_ in self._indexes.kept_by[True]]

    def saved_in_memory_of(self, host: str) -> list[Saved]:
        return [self.saved[id_] for id_ in self._indexes.kept_by[host]]

    def saved_for(self, job: JobRef) -> Saved | None:
        """The state that this run of a job is to go on with, complete or not."""
        found = (one for one in self.saved_of_job(job.job_id) if one.is_for(job) and one.state in WAITS_FOR_RUN)
        return min(found, key=lambda one: (one.checkpoint, -one.id), default=None)

    def asking_to_be_saved(self) -> list[Attempt]:
        """The attempts whose jobs run, and are to be saved ahead of their time limits or to have checkpoints."""
        return [self.attempts[id_] for id_ in self._indexes.asking_to_be_saved[()]]

    def evicted(self) -> list[Attempt]:
        """The attempts of whose jobs evictions are known."""
        return [self.attempts[id_] for id_ in self._indexes.evicted[()]]

    def restored_from(self, saved: Saved) -> list[Vm]:
        """The VMs that go on as a saved job, the one with its script first. Of a VM of several that was lost, there is
        none any more."""
        return [self.vms[id_] for name in saved.names for id_ in self._indexes.vms_by_saved[name]]

    def waits_to_join(self, vm: Vm) -> bool:
        """Whether a restored VM is to join after another one of its job: the script of a job starts on the node that
        the scheduler has known for longest."""
        first = next((self.vms.get(self.vm_named.get(one.vm_name, 0)) for one in self.saved_named(vm.saved)), vm)
        return first is None or (first is not vm and first.state not in (VmState.JOINED, VmState.SERVING))

    def source_copying(self, saved: Saved) -> str:
        """A source with a host in sight that reaches the state and another storage for copies: that which wrote it, or
        else any; empty if there is none."""
        there = [
            self.source_of(name)
            for name, host in sorted(self.free.hosts.items())
            if host.storage and host.copies and host.storage.name == saved.storage != host.copies.name
        ]
        return saved.source if saved.source in there else next(iter(there), "")

    def sources_discarding(self, saved: Saved) -> list[str]:
        """For each storage that shows files of that name a source that reaches it, and that which wrote them, if it is
        in sight: it may be writing."""
        hosts = [self.source_of(name) for name, host in sorted(self.free.hosts.items()) if host.reaches(saved.storages)]
        found = dict.fromkeys(part.source for part in saved.parts if saved.kept or part.source in hosts)
        covered = set[str]()
        for source in (*(part.source for part in saved.parts), *sorted(self.compared.sources)):
            for name in saved.names:
                seen = self._files_shown(source, name)
                if seen is not None and not covered.issuperset(filter(None, (seen.storage, seen.copy))):
                    covered |= {seen.storage, seen.copy}
                    found[source] = None
        return list(found or dict.fromkeys(hosts[:1] or [saved.source]))

    def _files_shown(self, source: str, name: str) -> SavedSeen | None:
        observation = self.compared.sources.get(source)
        latest = observation.latest if observation is not None else None
        return latest.value.saved.get(name) if latest is not None else None

    def vms_on(self, host: str) -> list[Vm]:
        return [self.vms[id_] for id_ in self._indexes.vms_by_host[host]]

    def vms_of_template(self, template: int) -> list[Vm]:
        return [self.vms[id_] for id_ in self._indexes.vms_by_template[template]]

    def serving_vms_of(self, attempt: Attempt) -> list[Vm]:
        """The attempt's VMs that are neither lost nor being destroyed."""
        return [vm for vm in self.vms_of(attempt) if not vm.leaving and vm.state is not VmState.LOST]

    def count_vms(self, *states: VmState) -> int:
        return sum(len(self._indexes.by_state.ids(("vm", state))) for state in states)

    def idle_templates(self) -> list[Template]:
        """The templates that are ready or broken and that nothing but spares uses, by number."""
        for which in self._perhaps_idle:
            idle = not self.serves_from(which)
            for id_ in self._indexes.templates_by_key.ids(which):
                there = self.templates[id_].state in (TemplateState.READY, TemplateState.BROKEN)
                (self._idle_templates.add if idle and there else self._idle_templates.discard)(id_)
        self._perhaps_idle.clear()
        return [self.templates[id_] for id_ in sorted(self._idle_templates)]

    def templates_on(self, host: str) -> list[Template]:
        return [self.templates[id_] for id_ in self._indexes.templates_by_key[host]]

    def templates_in(self, *states: TemplateState) -> list[Template]:
        return [self.templates[id_] for id_ in self._in("template", states)]

    def serves_from(self, which: TemplateKey) -> bool:
        """Whether a VM was, or is about to be, forked from the template, other than spares, which go with it."""
        return any(not self.vms[id_].is_spare for id_ in self._indexes.vms_by_template.ids(which))

    def sources(self) -> set[str]:
        return {str(source) for source in self._indexes.vms_by_source}

    def has_vms_at(self, source: str) -> bool:
        return source in self._indexes.vms_by_source

    def template_for(self, which: TemplateKey) -> Template | None:
        ids = self._indexes.templates_by_key[which]
        return self.templates[ids[0]] if ids else None

    def host_numbered(self, number: int) -> KnownHost | None:
        return self.hosts.get(self._host_names.get(number, ""))

    def hosts_in(self, *states: HostState) -> list[KnownHost]:
        return [self.hosts[self._host_names[id_]] for id_ in self._in("host", states)]

    def unknown_in_sight(self) -> Set[str]:
        """Hosts in sight without a row. Found anew only when hosts came or went."""
        if (at := (self.host_changes, self.free.came_and_went)) != self._unknown_at:
            self._unknown_at, self._unknown = at, self.free.hosts.keys() - self.hosts.keys()
        return self._unknown


class quarantine_on_error:  # no generator: it is entered for each row of each pass
    """A fault of ours in deciding about one record quarantines that record, and no other record is affected."""

    __slots__ = ("_key", "_state")

    def __init__(self, state: State, key: Key) -> None:
        self._state, self._key = state, key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, Exception) or (row := self._state.get(self._key)) is None:
            return False
        if not row.quarantined:
            self._state.move(quarantine(row, Why.FAULT(Why.SAID(text=repr(error)))))
        return True


def quarantine(row: Row, why: Reason) -> Change:
    """Nothing moves the row, and it permits nothing, until an operator retries it."""
    return Change(replace(row, quarantined=why), Event.QUARANTINED, why)


def retry(row: Row, why: Reason) -> Change:
    return Change(replace(row, quarantined=None), Event.RETRIED, why)


# --- earlier runs: no job may run twice -------------------------------------------------------------


def may_hold_earlier_run(state: State, vm: Vm, attempt: Attempt) -> bool:
    """Whether an earlier run of the attempt's job may go on in the VM. An orphan has no attempt."""
    other = state.attempt_of(vm)
    if other is None:
        return vm.job_id == attempt.job.job_id
    return other.job.job_id == attempt.job.job_id and other.job.restarts < attempt.job.restarts


def is_waited_for(state: State, vm: Vm) -> bool:
    """Whether a job waits because its earlier run may go on in the VM."""
    attempt = state.attempt_of(vm)
    job_id = attempt.job.job_id if attempt is not None else vm.job_id
    waiting = (one for one in state.attempts_of_job(job_id) if one.state in WAITING_STATES)
    return any(may_hold_earlier_run(state, vm, one) for one in waiting)


def node_without_record(state: State, world: World, attempt: Attempt) -> str:
    """A node or VM without a record in which an earlier run may go on; empty if there is none. After a database was
    lost, only the scheduler shows VMs on hosts out of reach, and not their jobs. Once found, such a VM is kept as an
    orphan."""
    if not attempt.job.restarts or world.scheduler is None:
        return ""
    if found := next((vm.name for vm in state.vms_in(VmState.ORPHAN) if not vm.job_id), ""):
        return found
    nodes = world.scheduler.value.nodes
    shown = (name for name, source in state.compared.unexplained if not source and name in nodes)
    node = min((name for name in shown if name not in state.vm_named), default="")
    if not node or all(host.is_off or name in world.hosts for name, host in state.hosts.items()):
        return ""
    return node


def why_earlier_run(state: State, world: World, attempt: Attempt) -> Reason | None:
    """Why an earlier run of the attempt's job may go on; None if it surely does not."""
    job_id = attempt.job.job_id
    mine = [vm for other in state.attempts_of_job(job_id) for vm in state.vms_of(other)]
    for vm in (*mine, *state.vms_seen_with(job_id)):
        if may_hold_earlier_run(state, vm, attempt):
            if vm.job_id:
                return Why.EARLIER_RUN_FOUND(vm=vm.name)
            away = vm.state is VmState.LOST
            return Why.EARLIER_RUN_AWAY(vm=vm.name, host=vm.host) if away else Why.EARLIER_RUN_ENDS(vm=vm.name)
    unknown = node_without_record(state, world, attempt)
    return Why.EARLIER_RUN_UNKNOWN(vm=unknown) if unknown else None
