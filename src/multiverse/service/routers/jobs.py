"""Jobs and their timelines."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException

from multiverse.api import JobView, TimelineView
from multiverse.service.backend import Backend


def router(backend: Backend) -> APIRouter:
    routes = APIRouter()

    @routes.get("/jobs")
    async def jobs(job: str | None = None, ended: bool = False, limit: int = 200) -> list[JobView]:
        """Live attempts, oldest first; with `ended` or a `job`, attempts that have ended too."""
        return backend.jobs(job, ended=ended, limit=limit)

    @routes.get("/timeline/{job}")
    async def timelines(job: str) -> list[TimelineView]:
        """One timeline for each attempt of the job, in order; for an array, of all its tasks."""
        found = backend.timelines(job)
        if not found:
            raise HTTPException(404, f"no attempt of job {job} is known")
        return found

    return routes
