"""Everything at a glance: one snapshot, and what changes in it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Response
from fastapi.responses import StreamingResponse

from multiverse.api.grid import Snapshot
from multiverse.core.errors import Exhausted
from multiverse.service.publisher import Publisher


def router(publisher: Publisher) -> APIRouter:
    routes = APIRouter()

    @routes.get("/snapshot", response_model=Snapshot)
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
