"""The web page: files that never change, one snapshot with what changes in it, timelines and metrics. It only shows.

An application of its own, so that nothing of the API is behind the site's reverse proxy but what is named here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import sha256
from typing import TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multiverse.api import ExplanationsView, TimelineView
from multiverse.service import api
from multiverse.service.backend import Backend
from multiverse.service.explanations import OPERATOR
from multiverse.service.publisher import Publisher
from multiverse.web import TYPES, files

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "clipboard-write=(self)",
}
"""Of every answer. The page runs nothing but its own files, makes no markup of text, and no other page embeds it."""

T = TypeVar("T")

LONGEST_JOB_ID = 64
EXPLANATIONS_KEPT = 3.0  # seconds for which a job is not explained anew, at most
METRICS_KEPT = 4.0  # seconds for which metrics are not counted anew
ANSWERS_KEPT = 64  # answers about jobs that are kept: many viewers look at the same job


def make_web(backend: Backend, publisher: Publisher) -> ASGIApp:
    """The application. It answers GET and HEAD only."""
    web = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    web.include_router(api.snapshot_routes(publisher))
    _add_jobs(web, backend)
    _add_metrics(web, backend)
    _add_pages(web)
    return _with_headers(web)


def _add_jobs(web: FastAPI, backend: Backend) -> None:
    timelines: dict[str, tuple[int, list[TimelineView]]] = {}
    explanations: dict[str, tuple[int, ExplanationsView]] = {}

    @web.get("/timeline/{job}")
    async def timeline(job: str) -> list[TimelineView]:
        return _kept(timelines, job, backend.store.commits, lambda: backend.timelines(job))

    @web.get("/explain/{job}")
    async def explain(job: str) -> ExplanationsView:
        def find() -> ExplanationsView | None:
            found = backend.explanations.of_job(job, OPERATOR)
            return found if found.jobs else None

        return _kept(explanations, job, int(backend.clock.now() // EXPLANATIONS_KEPT), find)


def _kept(kept: dict[str, tuple[int, T]], job: str, version: int, find: Callable[[], T | None]) -> T:
    """The answer about a job, which is found again when the version has changed."""
    if job not in kept or kept[job][0] != version:
        found = find() if len(job) <= LONGEST_JOB_ID else None
        if not found:
            raise HTTPException(404, "this job is not known")
        if len(kept) >= ANSWERS_KEPT:
            kept.clear()
        kept[job] = (version, found)
    return kept[job][1]


def _add_metrics(web: FastAPI, backend: Backend) -> None:
    kept: list[tuple[float, bytes]] = []
    counting = asyncio.Lock()

    @web.get("/metrics")
    async def counts() -> Response:
        async with counting:  # frequent requests get the same answer: agents are asked for some of it
            if not kept or backend.clock.now() - kept[0][0] >= METRICS_KEPT:
                kept[:] = [(backend.clock.now(), await backend.metrics())]
        return Response(kept[0][1], media_type=CONTENT_TYPE_LATEST)


def _add_pages(web: FastAPI) -> None:
    pages = files()
    tags = {name: f'"{sha256(content).hexdigest()[:16]}"' for name, content in pages.items()}

    @web.api_route("/", methods=["GET", "HEAD"])
    @web.api_route("/{name}", methods=["GET", "HEAD"])
    async def page(request: Request, name: str = "index.html") -> Response:
        if name not in pages:
            raise HTTPException(404, "there is no such page")
        headers = {"etag": tags[name], "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(pages[name], media_type=TYPES[name.rpartition(".")[2]], headers=headers)


def _with_headers(app: FastAPI) -> ASGIApp:
    more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = [*message.get("headers", ()), *more]
                if not any(name == b"cache-control" for name, _ in sent):
                    sent.append((b"cache-control", b"no-store"))
                message = {**message, "headers": sent}
            await send(message)

        await app(scope, receive, send_with_headers)

    return answer
