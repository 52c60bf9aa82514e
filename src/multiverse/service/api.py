"""The API: HTTP on a Unix socket, described by OpenAPI. Its types are in `multiverse.api`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Header, HTTPException, Query, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from multiverse import __version__, api
from multiverse.config import names_of_hosts
from multiverse.core.errors import Exhausted, Gone, MultiverseError, Refused
from multiverse.core.model.basics import CloneKind, Size
from multiverse.service.backend import Backend, JobChange
from multiverse.service.explanations import OPERATOR, TASK_IDS
from multiverse.service.publisher import Publisher


class Problem(BaseModel):
    """Why a request was not carried out."""

    detail: str


_PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The request cannot be read, or names what cannot be"},
    404: {"model": Problem, "description": "What was asked for does not exist"},
    409: {"model": Problem, "description": "The request makes no sense in the present state"},
    503: {"model": Problem, "description": "Not now; ask again"},
}


def make_api(backend: Backend, publisher: Publisher | None = None) -> FastAPI:
    """The API. Viewers are served by `publisher`, which they share with the web page's."""
    app = FastAPI(title="Multiverse", version=__version__, docs_url=None, redoc_url=None, responses=_PROBLEMS)
    for add_routes in (_add_daemon, _add_jobs, _add_hosts, _add_templates, _add_utilization):
        add_routes(app, backend)
    app.include_router(snapshot_routes(publisher or Publisher(backend)))
    return app


@contextmanager
def _status(status: int, kind: type[MultiverseError] = Refused) -> Iterator[None]:
    """Answer with this status if the block raises an error of this kind."""
    try:
        yield
    except kind as error:
        raise HTTPException(status, str(error)) from error


@contextmanager
def _committed() -> Iterator[None]:
    """Answer with 503 if the command in this block is not committed in time; it may still be committed later."""
    try:
        yield
    except TimeoutError as error:
        raise HTTPException(
            503, "the command is not committed yet, but may be committed later; see: multiverse status"
        ) from error


@contextmanager
def _unless_refused() -> Iterator[None]:
    """Answer with 409, the message and the hint if what the block asks for is refused."""
    try:
        yield
    except Refused as error:
        raise HTTPException(409, {"message": error.message, "hint": error.hint}) from error


def _add_daemon(app: FastAPI, backend: Backend) -> None:
    @app.get("/status")
    async def status() -> api.StatusView:
        return backend.status()

    @app.get("/metrics", response_class=Response, responses={200: {"content": {CONTENT_TYPE_LATEST: {}}}})
    async def counts() -> Response:
        return Response(await backend.metrics(), media_type=CONTENT_TYPE_LATEST)

    @app.post("/repair", status_code=202)
    async def repair(request: api.RepairRequest) -> api.RepairRequest:
        """Repair an alert. A host is fenced only on the operator's assurance that it is switched off."""
        alert = next((one for one in backend.alerts() if one.name == request.name and one.repair), None)
        if alert is None:
            raise HTTPException(404, f"there is no alert named {request.name} that has a repair")
        if alert.needs_fenced and not request.fenced:
            raise HTTPException(
                409, f"host {request.name} may still run its jobs: confirm with fenced that it is switched off"
            )
        with _committed():
            await backend.repair(alert)
        return request

    @app.post("/prune")
    async def prune(request: api.PruneRequest) -> api.PruneView:
        """Delete, or count, the records of what ended long ago. Answers after some seconds at most; `next` says where
        the next request has to go on."""
        with _status(409), _status(503, Exhausted):
            return await backend.prune(request.older_than, dry_run=request.dry_run, after=request.after)


def _add_jobs(app: FastAPI, backend: Backend) -> None:
    @app.get("/jobs")
    async def jobs(job: str | None = None, ended: bool = False, limit: int = 200) -> list[api.JobView]:
        """Live attempts, oldest first; with `ended` or a `job`, attempts that have ended too."""
        return backend.jobs(job, ended=ended, limit=limit)

    @app.get("/timeline/{job}")
    async def timelines(job: str) -> list[api.TimelineView]:
        """One timeline for each attempt of the job, in order; for an array, of all its tasks."""
        if found := backend.timelines(job):
            return found
        raise HTTPException(404, f"no attempt of job {job} is known; {TASK_IDS}")

    @app.get("/explain/{job}")
    async def explain(job: str) -> api.ExplanationsView:
        """Why a job waits, in which stage it is, or how it ended; for an array, of its first tasks."""
        found = backend.explanations.of_job(job, OPERATOR)
        if not found.jobs:
            raise HTTPException(404, f"no job {job} is known; {TASK_IDS}")
        return found

    @app.get("/capacity")
    async def capacity() -> api.CapacityView:
        """Which sizes would start at once, how many of each, and what is free beside what is used."""
        with _status(503):
            return backend.explanations.capacity(OPERATOR)

    @app.get("/images")
    async def images() -> list[api.ImageView]:
        """The images that a job may request."""
        return backend.images()

    @app.post("/capacity")
    async def trial(request: api.TrialRequest) -> api.TrialView:
        """What would become of one request, were it submitted now. Nothing is changed."""
        with _status(503):
            return backend.explanations.trial(request, OPERATOR)


def _add_hosts(app: FastAPI, backend: Backend) -> None:
    @app.get("/vms")
    async def vms(exact: bool = False) -> list[api.VmView]:
        """Live VMs, with figures a few seconds old. `exact` reads every page of every VM now, which takes milliseconds
        for each."""
        return await backend.vms(exact=exact)

    @app.get("/hosts")
    async def hosts() -> list[api.HostView]:
        return backend.hosts()

    @app.get("/leases")
    async def leases() -> list[api.LeaseView]:
        return backend.leases()

    @app.get("/evictions")
    async def evictions() -> list[api.EvictionView]:
        """Running jobs that would leave their hosts now: by a move, or by a save. Nothing is begun by this request."""
        return backend.evictions()

    @app.get("/saved")
    async def saved() -> list[api.SavedView]:
        """Jobs that are being saved, or are saved."""
        return backend.saved()

    @app.post("/jobs/{job_id}/{verb}")
    async def change_job(
        job_id: str,
        verb: Literal["save", "resume", "checkpoint"],
        hold: bool = False,
        anew: bool = False,
        shared_files: bool = False,
    ) -> api.SavedChanged:
        """Save a running job, or make a checkpoint of it, or let a saved one that is held go on, or begin anew without
        its state. The change is committed when this answers."""
        change = JobChange(verb, job_id, hold, anew, shared_files)
        with _unless_refused(), _committed():
            await backend.change_job(change)
        return api.SavedChanged(job_id)

    @app.post("/hosts/{verb}")
    async def change_hosts(
        verb: Literal["add", "drain", "resume", "remove"], request: api.HostRequest
    ) -> api.HostsChanged:
        """Change hosts. The change is committed when this answers."""
        with _status(400):
            names = names_of_hosts(request.hosts)
        with _committed():
            return await backend.change_hosts(verb, names, request)

    @app.post("/moves")
    async def move(request: api.MoveRequest) -> api.MoveBegun:
        """Move a VM to another host while its job runs. That it begins is committed when this answers."""
        with _unless_refused(), _committed():
            return await backend.move(request.what, request.host)

    @app.get("/audit/identity")
    async def audit_identity() -> api.IdentityAudit:
        return await backend.identity_audit()


def _add_templates(app: FastAPI, backend: Backend) -> None:
    @app.get("/templates")
    async def templates() -> list[api.TemplateView]:
        return backend.templates()

    @app.post("/templates/{verb}", status_code=202)
    async def change(verb: Literal["build", "drop"], request: api.TemplateRequest) -> api.TemplateRequest:
        """Build or drop templates. Returns the request as it was committed, with the defaults filled in."""
        host, size = _host_of(request, backend), None
        if request.cpus or request.memory or verb == "build":
            base = backend.base_size
            size = (request.cpus or base.cpus, request.memory or base.memory)
        account = request.account or "" if verb == "build" else request.account
        with _committed():
            await backend.template(verb, request.image, host, size, account)
        known = {"cpus": size[0], "memory": size[1]} if size else {}
        return request.model_copy(update={"host": host, "account": account, **known})


def _host_of(request: api.TemplateRequest, backend: Backend) -> str:
    hosts = backend.host_names()
    host = request.host or (hosts[0] if len(hosts) == 1 else "")
    if host not in hosts:
        problem = f"there is no host {host} in reach" if host else "name a host"
        raise HTTPException(404, f"{problem}; hosts in reach: {', '.join(hosts) or 'none'}")
    return host


def _add_utilization(app: FastAPI, backend: Backend) -> None:
    reader = backend.utilization

    @app.get("/utilization")
    async def utilization(name: str = "") -> list[api.UtilizationView]:
        """What hosts and live VMs use. `name` selects some of them: names, separated by commas."""
        return await reader.views(frozenset(filter(None, name.split(",")))) if reader else []

    @app.get("/utilization/compatible")
    async def compatible(
        cpus: Annotated[int, Query(ge=1)],
        memory: Annotated[int, Query(ge=1)],
        disk: Annotated[int, Query(ge=0)] = 0,
        image: str = "",
        kind: CloneKind | None = None,
        policy: str = "",
    ) -> list[api.CompatibleHostView]:
        """The hosts that have room for a VM of a node of that size now (memory and disk in MiB): first the one that the
        policy would take, then by their use. Nothing is claimed."""
        with _status(400):
            return reader.compatible(Size(cpus, memory, disk), image, kind, policy) if reader else []

    @app.get("/utilization/{name}/history")
    async def history(name: str, hours: float = 24.0) -> list[api.UsagePoint]:
        """What a host or VM has used in the last hours, also a VM that has ended."""
        with _status(404, Gone):
            return reader.history(name, hours) if reader else []


# --- viewers, here and on the web page ------------------------------------------------------------------


def snapshot_routes(publisher: Publisher) -> APIRouter:
    routes = APIRouter()

    @routes.get("/snapshot", response_model=api.Snapshot)
    async def snapshot() -> Response:
        """Hosts, VMs, jobs, alerts and rates. All who ask are answered from the same snapshot, made at most once a
        second."""
        return Response(await publisher.snapshot(), media_type="application/json")

    @routes.get("/events", response_class=StreamingResponse, responses=_STREAM)
    async def events(last_event_id: Annotated[str, Header(max_length=100)] = "") -> StreamingResponse:
        """Server-sent events without an end: `snapshot`, with a Snapshot, then `delta`, each with a Delta. A viewer
        that comes back with the id of its last event gets the deltas since, if they are still known."""
        stream = publisher.events(last_event_id)
        try:
            first = await anext(stream)
        except Exhausted as error:
            raise HTTPException(503, str(error), {"Retry-After": "30"}) from error
        except StopAsyncIteration as error:
            raise HTTPException(503, "the daemon is stopping", {"Retry-After": "5"}) from error
        return StreamingResponse(_from(first, stream), media_type="text/event-stream")

    return routes


_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}},
    503: {"description": "Too many viewers"},
}


async def _from(
    first: bytes | memoryview, rest: AsyncGenerator[bytes | memoryview]
) -> AsyncIterator[bytes | memoryview]:
    """The stream whose first part was taken already."""
    async with aclosing(rest):
        yield first
        async for part in rest:
            yield part
