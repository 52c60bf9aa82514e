"""A place where Prometheus reads metrics, and where nothing else can be done: GET /metrics, once a connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import structlog
from prometheus_client import CONTENT_TYPE_LATEST

from multiverse.config import listening_address
from multiverse.core.errors import Refused
from multiverse.service.startup import bind

TIMEOUT = 10.0
"""Seconds that a whole request may take."""

AT_ONCE = 8
"""Requests that are answered at the same time; those that come beside them are closed."""

LONGEST_HEAD = 8192
"""Bytes of a request."""

log = structlog.get_logger()


@contextlib.asynccontextmanager
async def scraped(where: str, setting: str, text: Callable[[], bytes]) -> AsyncIterator[None]:
    """Let `text` be read meanwhile at ADDRESS:PORT or at the path of a Unix socket; empty: nowhere. It is called in a
    thread. Raises `Refused` if that cannot be had; `setting` names what to change then."""
    if not where:
        yield
        return
    serving: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            if len(serving) <= AT_ONCE:
                async with asyncio.timeout(TIMEOUT):
                    await _answer(reader, writer, text)
        except (OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError) as error:
            log.debug("request for metrics not answered", reason=str(error))
        finally:
            serving.discard(task)
            writer.close()

    sock = _bound(where, setting)
    server = await asyncio.start_server(connected, sock=sock, limit=LONGEST_HEAD)
    log.info("metrics can be read", where=where)
    try:
        yield
    finally:
        server.close()
        for task in list(serving):
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        if where.startswith("/"):
            Path(where).unlink(missing_ok=True)


def _bound(where: str, setting: str) -> socket.socket:
    if where.startswith("/"):
        return bind(Path(where), setting)
    address = listening_address(where)
    if address is None:
        raise Refused(f"{where} is no ADDRESS:PORT", hint=f"correct {setting} in the settings")
    try:
        return socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    except OSError as error:
        raise Refused(f"cannot listen at {where}: {error.strerror}", hint=f"set {setting} in the settings") from error


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: Callable[[], bytes]) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    method, _, rest = head.partition(b" ")
    path = rest.split(b" ", 1)[0].partition(b"?")[0]
    if (method, path) == (b"GET", b"/metrics"):
        status, kind, body = "200 OK", CONTENT_TYPE_LATEST, await asyncio.to_thread(text)
    else:
        status, kind, body = "404 Not Found", "text/plain", b"only GET /metrics is here\n"
    head_of_answer = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head_of_answer.encode() + body)
    await writer.drain()
