"""The daemon's status, its metrics, repairs, and old records."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Response
from prometheus_client import CONTENT_TYPE_LATEST

from multiverse.api import PruneRequest, PruneView, RepairRequest, StatusView
from multiverse.core.errors import Exhausted, Refused
from multiverse.service import metrics
from multiverse.service.backend import Backend
from multiverse.service.routers.errors import committed


def router(backend: Backend) -> APIRouter:
    routes = APIRouter()

    @routes.get("/status")
    async def status() -> StatusView:
        return backend.status()

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {CONTENT_TYPE_LATEST: {}}}})
    async def counts() -> Response:
        return Response(metrics.text(await backend.counts(), backend.used()), media_type=CONTENT_TYPE_LATEST)

    @routes.post("/repair", status_code=202)
    async def repair(request: RepairRequest) -> RepairRequest:
        """Repair an alert. A host is fenced only on the operator's assurance that it is switched off."""
        alert = next((one for one in backend.alerts() if one.name == request.name and one.repair), None)
        if alert is None:
            raise HTTPException(404, f"there is no alert named {request.name} that has a repair")
        if alert.needs_fenced and not request.fenced:
            raise HTTPException(
                409, f"host {request.name} may still run its jobs: confirm with fenced that it is switched off"
            )
        with committed():
            await backend.repair(alert)
        return request

    @routes.post("/prune")
    async def prune(request: PruneRequest) -> PruneView:
        """Delete, or count, the records of what ended long ago. Answers after some seconds at most; `next` says where
        the next request has to go on."""
        try:
            return await backend.prune(request.older_than, dry_run=request.dry_run, after=request.after)
        except Refused as error:
            raise HTTPException(409, str(error)) from error
        except Exhausted as error:
            raise HTTPException(503, str(error)) from error

    return routes
