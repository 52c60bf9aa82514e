"""The API: HTTP on a Unix socket, described by OpenAPI. It reads what was committed and seen, and hands
wishes to the controller; it decides nothing."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from fastapi import FastAPI, HTTPException, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from multiverse import __version__
from multiverse.config import Settings
from multiverse.controller.loop import Controller
from multiverse.core.model import Size
from multiverse.core.provisioning.admission import references
from multiverse.core.transition import Command
from multiverse.ports import Clock
from multiverse.service import identity
from multiverse.service.identity import Facts, IdentityAudit
from multiverse.service.metrics import Executed, Metrics
from multiverse.service.troubles import (
    OFTEN,
    Failing,
    Situation,
    Trouble,
    Unanswered,
    command_for,
    troubles,
)
from multiverse.service.views import (
    HostView,
    JobView,
    SourceView,
    StatusView,
    TemplateView,
    TimelineView,
    VmView,
    host_view,
    job_counts,
    job_view,
    pool_view,
    timeline,
    vm_views,
)
from multiverse.store import Store

COMMITTED_WITHIN = 10.0  # seconds that whoever asks for something waits at most

Measure = Callable[[], Awaitable[Mapping[str, tuple[float, float, float]]]]
Examine = Callable[[], Awaitable[Mapping[str, Facts]]]


class TemplateWish(BaseModel):
    """Which templates: of which image, on which host (empty for the only one there is), of which size (memory in MiB),
    for which account (empty: for all). What is not told is the base's, and for all, of one that is built; of those
    that are dropped it is any, but that one of `cpus` and `memory` alone means the base's other."""

    image: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    host: str = Field(default="", max_length=255)
    cpus: int | None = Field(default=None, ge=1, le=4096)
    memory: int | None = Field(default=None, ge=1, le=1 << 30)
    account: str | None = Field(default=None, max_length=255)


class RepairWish(BaseModel):
    """Which trouble; `fenced` is the operator's word that the host of that name is off."""

    name: str = Field(min_length=1, max_length=255)
    fenced: bool = False


def make_api(
    controller: Controller,
    store: Store,
    clock: Clock,
    settings: Settings,
    measure: Measure,
    examine: Examine,
    executed: Executed,
    standing: Sequence[Trouble] = (),
) -> FastAPI:
    """The application. `measure` gives each VM's CPU seconds, unique memory and PSS in MiB, exactly and as of now;
    `examine` what each guest says of itself. `standing` are troubles that last as long as this process."""
    api = FastAPI(title="Multiverse", version=__version__, docs_url=None, redoc_url=None)

    @api.get("/status")
    async def status() -> StatusView:
        rows, now = store.rows(), clock.now()
        return StatusView(
            pid=os.getpid(),
            version=__version__,
            site=store.site,
            up=now - controller.began,
            sources=tuple(
                SourceView(
                    name=source.name,
                    known=source.latest is not None,
                    looks=source.looks,
                    age=now - source.latest.began if source.latest else 0.0,
                    unknown_for=0.0 if source.latest else now - source.since,
                    failure=source.failure,
                )
                for source in (controller.scheduler, controller.hypervisor)
            ),
            jobs=job_counts(rows),
            attempts=Counter(str(a.state) for a in rows.attempts.values()),
            vms=Counter(str(v.state) for v in rows.vms.values()),
            templates=Counter(str(t.state) for t in rows.templates.values()),
            pools=tuple(map(pool_view, controller.pools())),
            troubles=tuple(_troubles()),
        )

    def _troubles() -> list[Trouble]:
        now, since, seen = clock.now(), controller.uncommitted, controller.hypervisor.latest
        situation = Situation(
            rows=store.rows(),
            now=now,
            unanswered=[
                Unanswered(source.name, now - source.since, source.failure)
                for source in (controller.scheduler, controller.hypervisor)
                if source.failure
            ],
            failing=[
                Failing(str(effect.kind), str(effect.key), times, why, due - now)
                for effect, times, why, due in controller.failing(OFTEN)
            ],
            strangers=controller.strangers(),
            uncommitted=(now - since[0], since[1]) if since else None,
            hosts=[host for _, host in sorted(seen.value.hosts.items())] if seen else None,
            standing=standing,
        )
        return troubles(situation, controller.policy)

    metrics = Metrics(controller, store, executed)

    @api.get("/metrics")
    async def counts() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @api.post("/repair", status_code=202)
    async def repair(wish: RepairWish) -> RepairWish:
        """Ask for the repair of a trouble that there is. A host is fenced on the operator's word alone."""
        found = next((one for one in _troubles() if one.name == wish.name and one.repair), None)
        if found is None:
            raise HTTPException(404, f"there is nothing named {wish.name} to repair")
        if found.needs_fenced and not wish.fenced:
            raise HTTPException(409, f"{wish.name} may still run its jobs: say that it is fenced")
        await _taken(command_for(found))
        return wish

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
    async def vms(exact: bool = False) -> list[VmView]:
        """With figures a few seconds old; `exact` goes through every page of every VM, milliseconds for each."""
        seen = controller.hypervisor.latest
        measured = await measure() if exact else {}
        return vm_views(store.rows(), seen.value.vms if seen else {}, measured, clock.now())

    @api.get("/hosts")
    async def hosts() -> list[HostView]:
        rows, seen = store.rows(), controller.hypervisor.latest
        policy = controller.policy
        return (
            [host_view(host, rows, seen.value, policy) for _, host in sorted(seen.value.hosts.items())] if seen else []
        )

    @api.get("/templates")
    async def templates() -> list[TemplateView]:
        rows, now = store.rows(), clock.now()
        return [
            TemplateView(
                row.host,
                row.image,
                str(row.state),
                row.size.cpus,
                row.size.memory,
                row.account,
                now - row.since,
                references(rows, row),
                row.reason,
            )
            for row in rows.templates.values()
        ]

    @api.post("/templates/build", status_code=202)
    async def build(wish: TemplateWish) -> TemplateWish:
        return await _command("build", wish)

    @api.post("/templates/drop", status_code=202)
    async def drop(wish: TemplateWish) -> TemplateWish:
        return await _command("drop", wish)

    async def _command(verb: str, wish: TemplateWish) -> TemplateWish:
        seen = controller.hypervisor.latest
        hosts = sorted(seen.value.hosts) if seen else []
        host = wish.host or (hosts[0] if len(hosts) == 1 else "")
        if host not in hosts:
            raise HTTPException(404, f"no such host: {wish.host or '(none named)'}; there are: {', '.join(hosts)}")
        size = None
        if wish.cpus or wish.memory or verb == "build":
            base = controller.policy.base
            size = Size(wish.cpus or base.cpus, wish.memory or base.memory)
        account = wish.account or "" if verb == "build" else wish.account
        await _taken(Command(verb, host, wish.image, size=size, account=account))
        told = {"cpus": size.cpus, "memory": size.memory} if size else {}
        return wish.model_copy(update={"host": host, "account": account, **told})

    async def _taken(command: Command) -> None:
        """What is answered is committed, and outlives the daemon."""
        try:
            await asyncio.wait_for(controller.command(command), COMMITTED_WITHIN)
        except TimeoutError as error:
            raise HTTPException(503, "it is not committed yet, and may be later: see multiverse status") from error

    @api.get("/audit/identity")
    async def audit_identity() -> IdentityAudit:
        return identity.audit(store.rows(), await examine())

    @api.get("/timeline/{job}")
    async def timelines(job: str) -> list[TimelineView]:
        """One for each attempt of the job, in order; of an array, for each task."""
        attempts = list(reversed(store.attempts(job_id=job)))
        if not attempts:
            raise HTTPException(404, f"no attempt for job {job} is known")
        now = clock.now()
        return [timeline(a, store.journal(attempts=[a.id]), now) for a in attempts]

    return api
