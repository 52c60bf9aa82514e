"""The committed rows, and the working copy that one pass plans on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from multiverse.core.errors import Broken
from multiverse.core.model.host import Claim
from multiverse.core.model.job import Attempt
from multiverse.core.model.keys import Key
from multiverse.core.model.sizes import CloneKind
from multiverse.core.model.template import Template, TemplateKey
from multiverse.core.model.vm import Vm, VmState
from multiverse.core.model.world import Row
from multiverse.core.transition import TERMINAL, Change, Event, Move, Tables


@dataclass(frozen=True, slots=True)
class Rows:
    """All live rows at the start of a pass, the claims, and the numbers that come next."""

    site: str
    next_serial: int = 1
    next_attempt: int = 1
    next_template: int = 1
    attempts: Mapping[int, Attempt] = field(default_factory=dict)
    vms: Mapping[int, Vm] = field(default_factory=dict)
    templates: Mapping[int, Template] = field(default_factory=dict)
    claims: Sequence[Claim] = ()
    hosts: frozenset[str] = frozenset()
    """All that were ever in sight, but for those of which an operator said since that they are off."""

    def get(self, key: Key) -> Row | None:
        """The live row of that key."""
        return _find(key, self.attempts, self.vms, self.templates)

    def attempt_of(self, vm: Vm) -> Attempt | None:
        """The live attempt that the VM serves, if any."""
        return _served(vm, self.attempts)


def _served(vm: Vm, attempts: Mapping[int, Attempt]) -> Attempt | None:
    return attempts.get(vm.attempt) if vm.attempt is not None else None


def _find(
    key: Key, attempts: Mapping[int, Attempt], vms: Mapping[int, Vm], templates: Mapping[int, Template]
) -> Row | None:
    match key.kind:
        case "attempt":
            return attempts.get(key.id)
        case "vm":
            return vms.get(key.id)
        case "template":
            return templates.get(key.id)


R = TypeVar("R", Attempt, Vm, Template)


class PlanState:
    """The rows as the moves planned so far leave them. Nothing here outlives the pass."""

    def __init__(
        self,
        rows: Rows,
        now: float,
        tables: Tables,
        paced: Mapping[tuple[str, str, CloneKind], float] | None = None,
    ) -> None:
        self._tables = tables
        self.now = now
        self.paced = dict(paced or {})  # see `Forecast`, with what this pass makes
        self.waiting = Counter[tuple[str, str, CloneKind]]()  # clones that wait for that, as admission goes along
        self.wanted: Counter[str] | None = None  # VMs that jobs want now, by image; when somebody first asks
        self.site = rows.site
        self.attempts = dict(rows.attempts)
        self.vms = dict(rows.vms)
        self.templates = dict(rows.templates)
        self.claims = {claim.owner: claim for claim in rows.claims}
        self.hosts = rows.hosts
        self.moves: list[Move] = []
        self._serial, self._attempt, self._template = rows.next_serial, rows.next_attempt, rows.next_template

    # --- numbers -----------------------------------------------------------------------------------

    def serial(self) -> int:
        self._serial += 1
        return self._serial - 1

    def attempt_id(self) -> int:
        self._attempt += 1
        return self._attempt - 1

    def template_id(self) -> int:
        self._template += 1
        return self._template - 1

    # --- moves -------------------------------------------------------------------------------------

    def move(self, *changes: Change, make: Iterable[Claim] = (), free: Iterable[Key] = ()) -> None:
        """Plan one move and go on from what it leaves. Rows entering a new state get `since` = now.
        Raises `Broken`, with nothing planned, if the tables lack an arrow that it needs."""
        stamped = []
        for change in changes:
            row = change.row
            old = self.get(row.key)
            source = old.state if old else None
            if not self._tables.allowed(row.key.kind, source, change.event, row.state):
                raise Broken(f"{row.key}: no arrow {source} --{change.event}--> {row.state} in its table")
            if source != row.state:
                row = replace(row, since=self.now)
            stamped.append(replace(change, row=row))
        for change in stamped:
            self._put(replace(change.row, version=change.row.version + 1))
        made, freed = tuple(make), tuple(free)
        for key in freed:
            self.claims.pop(key, None)
        for claim in made:
            self.claims[claim.owner] = claim
        self.moves.append(Move(tuple(stamped), made, freed))

    def get(self, key: Key) -> Row | None:
        return _find(key, self.attempts, self.vms, self.templates)

    def _put(self, row: Row) -> None:
        match row:
            case Attempt():
                self._store(self.attempts, row)
            case Vm():
                self._store(self.vms, row)
            case Template():
                self._store(self.templates, row)

    @staticmethod
    def _store(table: dict[int, R], row: R) -> None:
        if row.state in TERMINAL:
            table.pop(row.id, None)
        else:
            table[row.id] = row

    # --- questions ---------------------------------------------------------------------------------

    def vms_of(self, attempt: Attempt) -> list[Vm]:
        """The attempt's live VMs, those being released too, by serial."""
        return [vm for _, vm in sorted(self.vms.items()) if vm.attempt == attempt.id]

    def serving_vms_of(self, attempt: Attempt) -> list[Vm]:
        """Those of its VMs that are not on their way out."""
        return [vm for vm in self.vms_of(attempt) if vm.state not in (VmState.RELEASING, VmState.LOST)]

    def attempt_of(self, vm: Vm) -> Attempt | None:
        """The live attempt that the VM serves, if any."""
        return _served(vm, self.attempts)

    def addresses(self) -> set[str]:
        return {vm.address for vm in self.vms.values()}

    def template_for(self, which: TemplateKey) -> Template | None:
        return next((template for _, template in sorted(self.templates.items()) if template.which == which), None)


@contextmanager
def quarantine_on_error(state: PlanState, key: Key) -> Iterator[None]:
    """A fault of ours in deciding about one record costs that record, never the others: it is quarantined."""
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
