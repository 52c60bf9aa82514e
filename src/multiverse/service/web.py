"""The web page: files that never change, one snapshot with what changes in it, timelines and metrics. It only shows.

An application of its own, so that nothing of the API is behind the site's reverse proxy but what is named here.
"""

from __future__ import annotations

import asyncio
from hashlib import sha256

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multiverse.api import ExplanationsView, TimelineView
from multiverse.service import api, metrics
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

LONGEST_JOB_ID = 64

EXPLANATIONS_KEPT = 3.0
"""Seconds for which a job is not explained anew."""

METRICS_KEPT = 4.0
"""Seconds for which metrics are not counted anew."""

TIMELINES_KEPT = 64
"""Answers that are kept until something is committed: many viewers look at the same job."""


def make_web(backend: Backend, publisher: Publisher) -> ASGIApp:
    """The application. It answers GET and HEAD only."""
    web = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    web.include_router(api.snapshot_routes(publisher))
    web.include_router(_timelines(backend))
    web.include_router(_explanations(backend))
    web.include_router(_metrics(backend))
    web.include_router(_pages())
    return _with_headers(web)


def _timelines(backend: Backend) -> APIRouter:
    routes = APIRouter()
    kept: dict[str, tuple[int, list[TimelineView]]] = {}

    @routes.get("/timeline/{job}")
    async def timelines(job: str) -> list[TimelineView]:
        commits = backend.store.commits
        if job not in kept or kept[job][0] != commits:
            found = backend.timelines(job) if len(job) <= LONGEST_JOB_ID else []
            if not found:
                raise HTTPException(404, "no attempt of this job is known")
            if len(kept) >= TIMELINES_KEPT:
                kept.clear()
            kept[job] = (commits, found)
        return kept[job][1]

    return routes


def _explanations(backend: Backend) -> APIRouter:
    routes = APIRouter()
    kept: dict[str, tuple[float, ExplanationsView]] = {}

    @routes.get("/explain/{job}")
    async def explain(job: str) -> ExplanationsView:
        now = backend.clock.now()
        if job not in kept or now - kept[job][0] >= EXPLANATIONS_KEPT:
            found = backend.explanations.of_job(job, OPERATOR) if len(job) <= LONGEST_JOB_ID else ExplanationsView(())
            if not found.jobs:
                raise HTTPException(404, "this job is not known")
            if len(kept) >= TIMELINES_KEPT:
                kept.clear()
            kept[job] = (now, found)
        return kept[job][1]

    return routes


def _metrics(backend: Backend) -> APIRouter:
    routes = APIRouter()
    kept: list[tuple[float, bytes]] = []
    counting = asyncio.Lock()

    @routes.get("/metrics")
    async def counts() -> Response:
        async with counting:  # whoever asks often gets the same again: the agents are asked for some of it
            if not kept or backend.clock.now() - kept[0][0] >= METRICS_KEPT:
                kept[:] = [(backend.clock.now(), metrics.text(await backend.counts(), backend.used()))]
        return Response(kept[0][1], media_type=CONTENT_TYPE_LATEST)

    return routes


def _pages() -> APIRouter:
    routes, pages = APIRouter(), files()
    tags = {name: f'"{sha256(content).hexdigest()[:16]}"' for name, content in pages.items()}

    @routes.api_route("/", methods=["GET", "HEAD"])
    @routes.api_route("/{name}", methods=["GET", "HEAD"])
    async def page(request: Request, name: str = "index.html") -> Response:
        if name not in pages:
            raise HTTPException(404, "there is no such page")
        headers = {"etag": tags[name], "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(pages[name], media_type=TYPES[name.rpartition(".")[2]], headers=headers)

    return routes


def _with_headers(app: FastAPI) -> ASGIApp:
    """The application, whose answers all have `HEADERS`."""
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
