"""The API: HTTP on a Unix socket, described by OpenAPI. It reads what was committed and seen, and hands
wishes to the controller; it decides nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from multiverse import __version__
from multiverse.config import Settings
from multiverse.controller.loop import Controller
from multiverse.core.admission import references
from multiverse.core.model import Size
from multiverse.core.rows import Command, Draft
from multiverse.ports import Clock
from multiverse.service.views import (
    HostView,
    JobView,
    SourceView,
    StatusView,
    TemplateView,
    TimelineView,
    VmView,
    job_view,
    timeline,
    vm_views,
)
from multiverse.store import Store

Measure = Callable[[], Awaitable[Mapping[str, tuple[float, float, float]]]]


class TemplateWish(BaseModel):
    """Which template: of which image, on which host; empty for the only one there is."""

    image: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    host: str = Field(default="", max_length=255)


def make_api(controller: Controller, store: Store, clock: Clock, settings: Settings, measure: Measure) -> FastAPI:
    """The application. `measure` gives each VM's CPU seconds, unique memory and PSS in MiB, as of now."""
    api = FastAPI(title="Multiverse", version=__version__, docs_url=None, redoc_url=None)

    @api.get("/status")
    async def status() -> StatusView:
        rows = store.rows()
        return StatusView(
            pid=os.getpid(),
            version=__version__,
            site=store.site,
            sources=tuple(
                SourceView(source.name, source.latest is not None, source.looks, source.failure)
                for source in (controller.scheduler, controller.hypervisor)
            ),
            attempts=Counter(str(a.state) for a in rows.attempts.values()),
            vms=Counter(str(v.state) for v in rows.vms.values()),
            quarantined=tuple(
                f"{row.key}: {row.quarantined}"
                for table in (rows.attempts, rows.vms, rows.templates)
                for row in table.values()
                if row.quarantined
            ),
        )

    @api.get("/jobs")
    async def jobs(job: str | None = None, ended: bool = False, limit: int = 200) -> list[JobView]:
        """Live attempts, oldest first; with `ended` or a `job`, those that are over too."""
        now = clock.now()
        if ended or job is not None:
            attempts = list(reversed(store.attempts(job_id=job, limit=max(1, min(limit, 10000)))))
        else:
            attempts = list(store.rows().attempts.values())
        names: dict[int, list[str]] = {}
        for vm in store.vms_of([a.id for a in attempts]):
            if vm.attempt is not None:
                names.setdefault(vm.attempt, []).append(vm.name)
        return [
            job_view(a, names.get(a.id, ()), now, settings.image.default, str(settings.image.kind)) for a in attempts
        ]

    @api.get("/vms")
    async def vms() -> list[VmView]:
        return vm_views(store.rows(), await measure(), clock.now())

    @api.get("/hosts")
    async def hosts() -> list[HostView]:
        rows, seen = store.rows(), controller.hypervisor.latest
        views = []
        for name, host in sorted(seen.value.hosts.items()) if seen else ():
            held = [claim.size for claim in rows.claims if claim.host == name]
            views.append(
                HostView(
                    name=name,
                    reachable=True,
                    declared=host.capacity,
                    claimed=Size(sum(s.cpus for s in held), sum(s.memory for s in held), sum(s.disk for s in held)),
                    machine=host.machine,
                    accelerator=host.accelerator,
                    abilities=tuple(sorted(host.abilities)),
                    vms=sum(vm.host == name for vm in rows.vms.values()),
                )
            )
        return views

    @api.get("/templates")
    async def templates() -> list[TemplateView]:
        rows, now = store.rows(), clock.now()
        draft = Draft(rows, now)
        return [
            TemplateView(
                row.host,
                row.image,
                str(row.state),
                row.size.memory,
                now - row.since,
                references(draft, row),
                row.reason,
            )
            for row in rows.templates.values()
        ]

    @api.post("/templates/build", status_code=202)
    async def build(wish: TemplateWish) -> TemplateWish:
        return _command("build", wish)

    @api.post("/templates/drop", status_code=202)
    async def drop(wish: TemplateWish) -> TemplateWish:
        return _command("drop", wish)

    def _command(verb: str, wish: TemplateWish) -> TemplateWish:
        seen = controller.hypervisor.latest
        hosts = sorted(seen.value.hosts) if seen else []
        host = wish.host or (hosts[0] if len(hosts) == 1 else "")
        if host not in hosts:
            raise HTTPException(404, f"no such host: {wish.host or '(none named)'}; there are: {', '.join(hosts)}")
        controller.command(Command(verb, host, wish.image))
        return TemplateWish(image=wish.image, host=host)

    @api.get("/timeline/{job}")
    async def timelines(job: str) -> list[TimelineView]:
        """One for each attempt of the job, in order; of an array, for each task."""
        attempts = list(reversed(store.attempts(job_id=job)))
        if not attempts:
            raise HTTPException(404, f"no attempt for job {job} is known")
        now = clock.now()
        return [timeline(a, store.journal(attempts=[a.id]), now) for a in attempts]

    return api
