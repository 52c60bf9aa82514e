"""Rows made by hand, for rules that need no store."""

from __future__ import annotations

from collections.abc import Iterable

from multiverse.core.model import (
    Attempt,
    AttemptState,
    Claim,
    CloneKind,
    JobRef,
    Request,
    Row,
    Size,
    Template,
    TemplateCondition,
    TemplateKey,
    TemplateSeen,
    TemplateState,
    Vm,
    VmState,
)
from multiverse.core.state import Rows
from multiverse.core.transition import Change, Move

IMAGES = {
    name: frozenset({"fork", "plug_cpus", "plug_memory"})
    for name in ("slim", "stock", "other", "next", "older", "newer", "one", "two", "held", "broken")
}
"""Images that a host has, unless a test says otherwise: they can do all."""


def attempt(state: AttemptState, *, id: int = 1, job: str = "7", restarts: int = 0, **more: object) -> Attempt:
    ref = JobRef(job, 500, restarts)
    values: dict[str, object] = {"since": 0.0, "request": Request(1, Size(1, 100)), **more}
    return Attempt(id=id, version=1, state=state, job=ref, job_name="hello", uid=1000, **values)  # type: ignore[arg-type]


def vm(state: VmState, *, id: int = 1, **more: object) -> Vm:
    values: dict[str, object] = {"since": 0.0, "host": "h1", "image": "slim", "kind": CloneKind.INSTANT, **more}
    values.setdefault("parent", Size(1, 256) if values["kind"] is CloneKind.INSTANT else None)
    return Vm(
        id=id,
        version=1,
        state=state,
        name=f"mvtest0-{id}",
        size=Size(1, 256),
        told=Size(1, 100),
        mac="",
        address=f"10.9.1.{id}/16",
        **values,  # type: ignore[arg-type]
    )


def template(state: TemplateState, *, id: int = 1, **more: object) -> Template:
    values: dict[str, object] = {"since": 0.0, "host": "h1", "image": "slim", "size": Size(1, 256), **more}
    return Template(id=id, version=1, state=state, **values)  # type: ignore[arg-type]


def rows(*some: Row, claims: Iterable[Claim] = (), known: Iterable[str] = ()) -> Rows:
    """All that there is of a site; `known`: the hosts that it has seen once."""
    return Rows(
        "test0",
        100,
        100,
        100,
        {row.id: row for row in some if isinstance(row, Attempt)},
        {row.id: row for row in some if isinstance(row, Vm)},
        {row.id: row for row in some if isinstance(row, Template)},
        tuple(claims),
        frozenset(known),
    )


def as_ready(some: Iterable[Row]) -> dict[TemplateKey, TemplateSeen]:
    """What a look shows of those that are templates and ready."""
    return {
        t.which: TemplateSeen("t", t.host, t.image, TemplateCondition.READY, t.size, account=t.account)
        for t in some
        if isinstance(t, Template) and t.state is TemplateState.READY
    }


def changes_of(moves: Iterable[Move]) -> list[Change]:
    return [change for move in moves for change in move.changes]
