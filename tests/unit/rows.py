"""Rows for tests that need no store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from multiverse.core.machines.tables import TABLES, effect_of
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Claim, HostState, HypervisorView, KnownHost
from multiverse.core.model.job import (
    Attempt,
    AttemptState,
    JobRef,
    Lease,
    LeaseSpec,
    LeaseState,
    Request,
    SchedulerView,
)
from multiverse.core.model.reason import said
from multiverse.core.model.saved import Saved, SavedState
from multiverse.core.model.vm import (
    Offer,
    OfferState,
    Place,
    Template,
    TemplateCondition,
    TemplateKey,
    TemplateSeen,
    TemplateState,
    Vm,
    VmState,
)
from multiverse.core.model.world import Observation, Row, Seen, World
from multiverse.core.rows import LiveRows, Rows
from multiverse.core.state import State
from multiverse.core.transition import Change, Effect, Move

SOURCE = "hosts"
"""The one source of these tests: it answers for all hosts."""

IMAGES = {
    name: frozenset({"fork", "plug_cpus", "plug_memory"})
    for name in ("slim", "stock", "other", "next", "older", "newer", "one", "two", "held", "broken")
}
"""Images that a host has, unless a test says otherwise: they can do all."""


def _with_reasons(values: Mapping[str, object]) -> dict[str, object]:
    """Fields of a row, in which reasons may be text."""
    names = {"reason", "note", "quarantined", "choice"} & values.keys()
    return {**values, **{name: said(text) for name in names if isinstance(text := values[name], str)}}


def attempt(state: AttemptState, *, id: int = 1, job: str = "7", restarts: int = 0, **more: object) -> Attempt:
    ref = JobRef(job, 500, restarts)
    values: dict[str, object] = {"since": 0.0, "request": Request(1, Size(1, 100)), **_with_reasons(more)}
    return Attempt(id=id, version=1, state=state, job=ref, job_name="hello", uid=1000, **values)  # type: ignore[arg-type]


def place(
    host: str,
    source: str = SOURCE,
    size: Size | None = None,
    template_id: int | None = None,
    image: str = "slim",
    account: str = "",
) -> Place:
    """A place of a VM that maps a template of this size there; None: that boots."""
    return Place(host, source, TemplateKey(host, image, size, account) if size else None, template_id)


def vm(state: VmState, *, id: int = 1, **more: object) -> Vm:
    values: dict[str, object] = {
        "since": 0.0,
        "image": "slim",
        "kind": CloneKind.INSTANT,
        "account": "",
        **_with_reasons(more),
    }
    values.setdefault("node_size", Size(1, 100))
    size = values.pop("template_size", Size(1, 256) if values["kind"] is CloneKind.INSTANT else None)
    where = (values.pop("host", "h1"), values.pop("source", SOURCE), size, values.pop("template_id", None))
    values.setdefault("places", (place(*where, str(values["image"]), str(values["account"])),))  # type: ignore[arg-type]
    return Vm(
        id=id,
        version=1,
        state=state,
        name=f"mvtest0-{id}",
        size=Size(1, 256),
        mac="",
        address=f"10.9.1.{id}/16",
        **values,  # type: ignore[arg-type]
    )


def on_host(row: Vm, host: str) -> Vm:
    """The VM on another host of the same source."""
    which = row.place.template
    there = replace(row.place, host=host, template=which._replace(host=host) if which else None)
    return replace(row, places=(there,))


def mapping(row: Vm, **template: object) -> Vm:
    """The VM, but forked from another template, whose image and account are its own."""
    assert row.place.template is not None
    which = row.place.template._replace(**template)  # type: ignore[arg-type]
    return replace(row, image=which.image, account=which.account, places=(replace(row.place, template=which),))


def template(state: TemplateState, *, id: int = 1, **more: object) -> Template:
    values: dict[str, object] = {
        "since": 0.0,
        "host": "h1",
        "image": "slim",
        "size": Size(1, 256),
        "source": SOURCE,
        **_with_reasons(more),
    }
    return Template(id=id, version=1, state=state, **values)  # type: ignore[arg-type]


def known_host(state: HostState, **more: object) -> KnownHost:
    return KnownHost("h1", SOURCE, state, id=1, version=1, **more)  # type: ignore[arg-type]


def lease(state: LeaseState, *, id: int = 1, **more: object) -> Lease:
    spec = LeaseSpec(f"lease-test0-{id}", "token", "physical")
    values: dict[str, object] = {"since": 0.0, "spec": spec, "pilot": "50", "node": "p1", **_with_reasons(more)}
    return Lease(id=id, version=1, state=state, **values)  # type: ignore[arg-type]


def saved(state: SavedState, *, id: int = 1, **more: object) -> Saved:
    values: dict[str, object] = {
        "since": 0.0, "job": JobRef("7", 500), "uid": 1000, "vm": 1, "vm_name": "mvtest0-1", "token": "token",
        "mac": "02:00:00:00:00:09", "address": "10.9.1.9/16", "image": "slim", "kind": CloneKind.INSTANT,
        "size": Size(1, 256), "node_size": Size(1, 100), "account": "", "source": SOURCE, "storage": "shared",
        "machine": "qemu", "asked": said("an operator asked for it"), **_with_reasons(more),
    }  # fmt: skip
    return Saved(id=id, version=1, state=state, **values)  # type: ignore[arg-type]


def rows(*some: Row, claims: Iterable[Claim] = (), known: Iterable[str] = ("h1",)) -> Rows:
    """All rows of a site; `known`: the hosts that were observed once."""
    return Rows(
        "test0",
        100,
        100,
        100,
        {row.id: row for row in some if isinstance(row, Attempt)},
        {row.id: row for row in some if isinstance(row, Vm)},
        {row.id: row for row in some if isinstance(row, Template)},
        {row.id: row for row in some if isinstance(row, Offer)},
        tuple(claims),
        {name: KnownHost(name, SOURCE) for name in known}
        | {row.name: row for row in some if isinstance(row, KnownHost)},
        {row.id: row for row in some if isinstance(row, Lease)},
        {row.id: row for row in some if isinstance(row, Saved)},
    )


def state(*some: Row, now: float = 0.0, **more: Any) -> State:
    """The same in memory, with a pass begun at `now`."""
    made = State(rows(*some, **more), TABLES, now)
    made.begin(now, {}, "test")
    return made


def offer(state: OfferState, *, id: int = 1, since: float = 0.0) -> Offer:
    """The offer of the VM with that serial."""
    return Offer(id, since, state=state, version=1)


def world_of(scheduler: SchedulerView | None, hypervisor: HypervisorView | None, began: float, **more: Any) -> World:
    """A world whose two sides were observed at `began`; None: unknown."""
    latest = Seen(hypervisor, began) if hypervisor is not None else None
    shown = Seen(scheduler, began) if scheduler is not None else None
    return World(scheduler=shown, sources={SOURCE: Observation(latest, 0.0)}, **more)


def as_ready(some: Iterable[Row]) -> dict[TemplateKey, TemplateSeen]:
    """The rows that are ready templates, as an observation shows them."""
    return {
        t.which: TemplateSeen("t", t.host, t.image, TemplateCondition.READY, t.size, account=t.account)
        for t in some
        if isinstance(t, Template) and t.state is TemplateState.READY
    }


def changes_of(moves: Iterable[Move]) -> list[Change]:
    return [change for move in moves for change in move.changes]


class Decided(list[Change]):
    """The changes of one pass, and the reasons of the attempts that wait."""

    def __init__(self, changes: Iterable[Change], here: State) -> None:
        super().__init__(changes)
        self.reasons = {number: str(why) for number, why in here.reasons.items()}


def effects_of(rows: LiveRows) -> Iterator[tuple[Row, Effect]]:
    """The effects that the live rows permit, by looking at every row: what `permitted_effects` is compared with."""
    hosts = sorted(rows.hosts.values(), key=lambda host: host.id)
    for row in (
        *rows.attempts.values(),
        *rows.vms.values(),
        *rows.saved.values(),
        *hosts,
        *rows.leases.values(),
        *rows.templates.values(),
    ):
        offer = rows.offers.get(row.id) if isinstance(row, Vm) else None
        if effect := effect_of(row) or (effect_of(offer) if offer else None):
            yield row, effect


def indexes_of(state: State) -> dict[str, dict[object, frozenset[int]]]:
    """All indexes of a state."""
    indexes = vars(state._indexes).items()
    return {name: {key: frozenset(index.ids(key)) for key in index} for name, index in indexes}
