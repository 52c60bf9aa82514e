"""The controller's link to the agent of a lease, by which it reaches it when no step of the pilot begins any more."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from multiverse.agent.protocol import AgentLink, Answer, decode, encode
from multiverse.bundles.qemu.platform import LinkTransport, PilotTransport
from multiverse.config import AgentSettings, MoveSettings, Settings
from multiverse.core.errors import Broken, Unknown
from multiverse.core.model.job import LeasedHost, LeaseSpec
from multiverse.host import links
from multiverse.host.links import NodeNetwork
from multiverse.service.agent import _Hypervisors, _receiving

NAME = "lease-ab12c-1"
HOST = LeasedHost(LeaseSpec(NAME, "token", "physical", time_limit=600.0), "17", "n1")


class Steps:
    """Counts the steps that are asked for. Each is a program that answers nothing."""

    def __init__(self) -> None:
        self.begun = 0

    def dial(self, _: LeasedHost) -> list[str]:
        self.begun += 1
        return ["true"]

    receive = bring = None


@asynccontextmanager
async def agent(tmp_path: Path, *, leased: bool = True, private: bool = False) -> AsyncIterator[AgentLink]:
    """The link of an agent that answers each line with itself."""
    settings = Settings(
        state_dir=tmp_path,
        agent=AgentSettings(state_dir=tmp_path, socket=tmp_path / "agent.sock"),
        move=MoveSettings(private=private),
    )

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    server = await asyncio.start_unix_server(answer, settings.agent.socket, limit=4 << 20)
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    listening = links.listen("127.0.0.1", 0)
    node = NodeNetwork(namespace, listening=listening)
    try:
        with _receiving(settings, _Hypervisors(settings, node), node) as link:
            assert link is not None
            yield link
    finally:
        os.close(namespace)
        server.close()


async def echo(transport: Any, text: bytes = b"hello\n") -> bytes:
    stream = await transport.open()
    try:
        stream.writer.write(text)
        return bytes(await asyncio.wait_for(stream.reader.readline(), 10))
    except ConnectionResetError:
        return b""
    finally:
        await stream.close()


@pytest.mark.parametrize("private", [False, True])
async def test_who_knows_the_secret_reaches_the_agent(tmp_path: Path, private: bool) -> None:
    async with agent(tmp_path, private=private) as link:
        assert bool(link.certificate) is not private
        assert await echo(LinkTransport(NAME, link)) == b"hello\n"
        long = b"x" * 3_000_000 + b"\n"
        assert await echo(LinkTransport(NAME, link), long) == long


async def test_nobody_else_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with agent(tmp_path) as link:
        for wrong in ("", link.secret[:-1], "0" * len(link.secret)):
            assert await echo(LinkTransport(NAME, link.model_copy(update={"secret": wrong}))) == b""
        other = tmp_path / "other"
        other.mkdir()
        certificate = links.certificate(other)[0].read_text()
        with pytest.raises(Broken):
            await echo(LinkTransport(NAME, link.model_copy(update={"certificate": certificate})))
        assert link.secret not in repr(link) + "".join(capfd.readouterr())


async def test_the_link_is_taken_if_it_is_known_and_a_step_if_it_fails(tmp_path: Path) -> None:
    steps = Steps()
    transport = PilotTransport(steps, HOST)  # type: ignore[arg-type]
    assert await echo(transport) == b"" and steps.begun == 1
    async with agent(tmp_path) as link:
        transport.learned(link)
        assert await echo(transport) == b"hello\n" and steps.begun == 1
        transport.learned(link)  # at the handshake
        assert await echo(transport) == b"hello\n" and steps.begun == 1
        transport.learned(link.model_copy(update={"secret": "that of an earlier agent"}))
        assert await echo(transport) == b"" and steps.begun == 1
        assert await echo(transport) == b"" and steps.begun == 2, "nobody was greeted by the link"
        assert await echo(transport) == b"" and steps.begun == 2, "but it is tried again"
        transport.learned(link)
    assert await echo(transport) == b"" and steps.begun == 3, "nobody listens there"
    with pytest.raises(Unknown):
        await LinkTransport(NAME, link).open()


async def test_a_later_run_of_the_controller_knows_the_link(tmp_path: Path) -> None:
    kept, steps = tmp_path / NAME, Steps()
    async with agent(tmp_path) as link:
        PilotTransport(steps, HOST, kept).learned(link)  # type: ignore[arg-type]
        assert kept.stat().st_mode & 0o777 == 0o600
        assert await echo(PilotTransport(steps, HOST, kept)) == b"hello\n" and not steps.begun  # type: ignore[arg-type]
    kept.write_text("{")
    assert await echo(PilotTransport(steps, HOST, kept)) == b"" and steps.begun == 1  # type: ignore[arg-type]


def test_a_controller_learns_the_link_as_it_is_obeyed() -> None:
    link = AgentLink(address="10.0.0.1", port=14791, certificate="PEM", secret="s3cret")
    assert decode(Answer, encode(Answer(taken=7, link=link))).link == link
    assert decode(Answer, b'{"taken": 7}\n').link is None, "an agent of a static host, or of an earlier release"
    assert "s3cret" not in repr(Answer(taken=7, link=link))


async def test_the_next_agent_of_a_lease_listens_where_the_first_one_did(tmp_path: Path) -> None:
    listening, heard = links.listen("127.0.0.1", 0), SimpleQueue[links.MoveHello]()
    hello = links.MoveHello(NAME, "", 0, "secret", links.COMMAND)
    for _ in range(2):
        listener = links.MoveListener(listening.dup(), None, lambda _, hello: heard.put(hello))
        sock = await asyncio.to_thread(links.dial, links.MovePeer(listener.address, listener.port), hello)
        assert await asyncio.to_thread(heard.get, timeout=10) == hello
        sock.close()
        listener.close()
    listening.close()
