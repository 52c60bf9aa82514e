"""The channel to an agent, whose other end is in the test's hands."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse.core.errors import Broken
from multiverse.core.model.reason import text_of
from multiverse.guest.protocol import AUDIT
from multiverse.host.qemu.channels import AgentChannel

WORDS = {
    "nothing but reports": b'{"type":"becoming"}\n',
    "a line without an end": b"x" * 1000,
    "rubbish": b"{[}\n\xff",
}


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[AgentChannel, socket.socket]]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen(1)
        channel = AgentChannel(tmp_path / "agent")
        guest, _ = listener.accept()
        with guest:
            yield channel, guest
        channel.close()


def flood(guest: socket.socket, words: bytes) -> int:
    """Send until the other end closes; returns how many bytes it took."""
    taken = 0
    try:
        while True:
            taken += guest.send(words * (65536 // len(words)))
    except OSError:
        return taken


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("waiting", [True, False], ids=["awaited", "unsolicited"])
def test_a_guest_that_floods_is_disconnected(
    ends: tuple[AgentChannel, socket.socket], words: bytes, waiting: bool
) -> None:
    channel, guest = ends
    taken: list[int] = []
    flooding = threading.Thread(target=lambda: taken.append(flood(guest, words)))
    flooding.start()
    if waiting:
        with pytest.raises(Broken, match="flooded"):
            channel.expect(frozenset({"started"}), 60)
    else:
        while not any(report.type == "flooded" for report in channel.poll_reports()):
            assert flooding.is_alive()
    flooding.join(10)
    assert taken and taken[0] < 16 << 20
    assert channel.poll_reports() == [], "it is reported once"
    with pytest.raises(Broken, match="flooded"):
        channel.ask(AUDIT, "audited", 5)
    assert channel.flooded


def test_reports_that_arrive_before_an_answer_are_kept(ends: tuple[AgentChannel, socket.socket]) -> None:
    channel, guest = ends
    guest.sendall(
        b'{"type":"daemon_ended","name":"munged","reason":"exit code 1"}\n{"type":"audited","audit":{"a":1}}\n'
    )
    assert channel.ask(AUDIT, "audited", 10).audit == {"a": 1}
    assert guest.recv(100) == AUDIT
    assert [text_of(report.reason) for report in channel.poll_reports()] == ["munged: exit code 1"]
