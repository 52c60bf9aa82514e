"""Rows made by hand, for rules that need no store."""

from __future__ import annotations

from multiverse.core.model import (
    Attempt,
    AttemptState,
    CloneKind,
    JobRef,
    Request,
    Size,
    Template,
    TemplateState,
    Vm,
    VmState,
)


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
