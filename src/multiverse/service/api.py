"""The API: HTTP on a Unix socket, described by OpenAPI. Its types are in `multiverse.api`."""

from __future__ import annotations

from fastapi import FastAPI

from multiverse import __version__
from multiverse.service.backend import Backend
from multiverse.service.routers import explain, jobs, machines, status, templates, utilization


def make_api(backend: Backend) -> FastAPI:
    api = FastAPI(title="Multiverse", version=__version__, docs_url=None, redoc_url=None)
    for subject in (status, jobs, explain, machines, templates, utilization):
        api.include_router(subject.router(backend))
    return api
