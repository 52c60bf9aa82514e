"""`multiverse` of a neighbouring release: `python -m tests.integration.releases RELEASE WORD...`.

RELEASE is the name of one of `simulation.network.NEIGHBOURS`, or that of `NEWER_SCHEMA`; the words are those of
`multiverse`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import multiverse
from multiverse.agent import connection
from multiverse.agent.server import AgentIdentity, AgentServer
from multiverse.cli.main import main
from multiverse.service import agent
from multiverse_lab.lab.process import DaemonCommand
from multiverse_lab.lab.service import Lab, Service
from multiverse_lab.simulation.network import NEIGHBOURS, THIS, ProtocolRelease
from tests.newer_schema import make_newer

NEWER_SCHEMA = ProtocolRelease("1.0.1")
"""A release that speaks as this one does, and has a newer schema."""


def of_release(service: Service, release: ProtocolRelease) -> Service:
    """The controller or agent of a lab, of another release."""
    if release is THIS:
        return service

    def command(lab: Lab) -> DaemonCommand:
        usual = service.command(lab)
        argv = [sys.executable, "-m", __name__, release.name, *usual.argv[-3:]]
        return replace(usual, argv=argv, env={"PYTHONPATH": str(Path(__file__).parents[2])})

    return replace(service, command=command)


class Speaking:
    """A writer of lines, as a release sends them."""

    def __init__(self, writer: asyncio.StreamWriter, release: ProtocolRelease) -> None:
        self._writer, self._release = writer, release

    def write(self, line: bytes) -> None:
        self._writer.write(self._release.speaks(line))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


def become(release: ProtocolRelease) -> None:
    """Let this process be of that release."""
    serve: Callable[..., Awaitable[None]] = AgentServer.serve
    opened: Callable[..., Awaitable[Any]] = connection.UnixTransport.open

    async def serve_as(self: AgentServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(self, reader, Speaking(writer, release))

    async def open_as(self: connection.UnixTransport) -> Any:
        stream = await opened(self)
        stream.writer = Speaking(stream.writer, release)
        return stream

    vars(multiverse)["__version__"] = release.name
    vars(agent)["AgentIdentity"] = partial(AgentIdentity, protocol=release.protocol, oldest=release.oldest)
    vars(connection).update(PROTOCOL=release.protocol, OLDEST=release.oldest)
    AgentServer.serve = serve_as  # type: ignore[method-assign]
    connection.UnixTransport.open = open_as  # type: ignore[method-assign]


if __name__ == "__main__":
    name, *sys.argv[1:] = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        if name == NEWER_SCHEMA.name:
            make_newer(Path(directory) / "versions")
        become(next(one for one in (*NEIGHBOURS, NEWER_SCHEMA) if one.name == name))
        main()
