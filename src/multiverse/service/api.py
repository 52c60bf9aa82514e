"""The API: HTTP on a Unix socket, described by OpenAPI. Its types are in `multiverse.api`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from multiverse import __version__
from multiverse.service.backend import Backend
from multiverse.service.publisher import Publisher
from multiverse.service.routers import explain, grid, jobs, machines, status, templates, utilization


class Problem(BaseModel):
    """Why a request was not carried out."""

    detail: str


PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The request cannot be read, or names what cannot be"},
    404: {"model": Problem, "description": "What was asked for does not exist"},
    409: {"model": Problem, "description": "The request makes no sense in the present state"},
    503: {"model": Problem, "description": "Not now; ask again"},
}
"""What each request may be answered with besides its result."""


def make_api(backend: Backend, publisher: Publisher | None = None) -> FastAPI:
    """The API. Viewers are served by `publisher`, which they share with the web page's."""
    api = FastAPI(title="Multiverse", version=__version__, docs_url=None, redoc_url=None, responses=PROBLEMS)
    for subject in (status, jobs, explain, machines, templates, utilization):
        api.include_router(subject.router(backend))
    api.include_router(grid.router(publisher or Publisher(backend)))
    return api
