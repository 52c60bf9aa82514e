"""Why jobs wait, and what would start at once."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException

from multiverse.api import CapacityView, ExplanationsView, TrialRequest, TrialView
from multiverse.core.errors import Refused
from multiverse.service.backend import Backend
from multiverse.service.viewer import OPERATOR


def router(backend: Backend) -> APIRouter:
    routes = APIRouter()

    @routes.get("/explain/{job}")
    async def explain(job: str) -> ExplanationsView:
        """Why a job waits, in which stage it is, or how it ended; for an array, of its first tasks."""
        found = backend.explanations.of_job(job, OPERATOR)
        if not found.jobs:
            raise HTTPException(404, f"no job {job} is known")
        return found

    @routes.get("/capacity")
    async def capacity() -> CapacityView:
        """Which sizes would start at once, how many of each, and what is free beside what is used."""
        try:
            return backend.explanations.capacity(OPERATOR)
        except Refused as error:
            raise HTTPException(503, str(error)) from error

    @routes.post("/capacity")
    async def trial(request: TrialRequest) -> TrialView:
        """What would become of one request, were it submitted now. Nothing is changed."""
        try:
            return backend.explanations.trial(request, OPERATOR)
        except Refused as error:
            raise HTTPException(503, str(error)) from error

    return routes
