"""The API: HTTP on a Unix socket, described by OpenAPI. Its types are in `multiverse.api`."""

from __future__ import annotations

from fastapi import FastAPI

from multiverse import __version__
from multiverse.service.backend import Backend
from multiverse.service.publisher import Publisher
from multiverse.service.routers import explain, grid, jobs, machines, status, templates, utilization


def make_api(backend: Backend, publisher: Publisher | None = None) -> FastAPI:
    """The API. Viewers are served by `publisher`, which they share with the web page's."""
    api = FastAPI(title="Multiverse", version=__version__, docs_url=None, redoc_url=None)
    for subject in (status, jobs, explain, machines, templates, utilization):
        api.include_router(subject.router(backend))
    api.include_router(grid.router(publisher or Publisher(backend)))
    return api
