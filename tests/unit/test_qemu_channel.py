"""The channel to an agent, with a test at its other end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse.core.errors import Broken, Unknown
from multiverse.guest.protocol import AUDIT
from multiverse.host.qemu.channel import Channel

WORDS = {
    "nothing but reports": b'{"type":"becoming"}\n',
    "a line without an end": b"x" * 1000,
    "rubbish": b"{[}\n\xff",
}


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Channel, socket.socket]]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent"))
        listener.listen(1)
        channel = Channel(tmp_path / "agent")
        guest, _ = listener.accept()
        with guest:
            yield channel, guest
        channel.close()


def flood(guest: socket.socket, words: bytes) -> int:
    """Say it until nobody listens; how many bytes were taken."""
    taken = 0
    try:
        while True:
            taken += guest.send(words * (65536 // len(words)))
    except OSError:
        return taken


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("waiting", [True, False], ids=["awaited", "unasked"])
def test_who_floods_is_cut_off(ends: tuple[Channel, socket.socket], words: bytes, waiting: bool) -> None:
    channel, guest = ends
    taken: list[int] = []
    flooding = threading.Thread(target=lambda: taken.append(flood(guest, words)))
    flooding.start()
    if waiting:
        with pytest.raises(Broken, match="flooded"):
            channel.expect(frozenset({"started"}), 60)
    else:
        while not any(report.type == "flooded" for report in channel.news()):
            assert flooding.is_alive()
    flooding.join(10)
    assert taken and taken[0] < 16 << 20
    assert channel.news() == [], "and it is said once"
    with pytest.raises(Unknown):
        channel.ask(AUDIT, "audited", 5)


def test_news_that_come_before_an_answer_are_kept(ends: tuple[Channel, socket.socket]) -> None:
    channel, guest = ends
    guest.sendall(
        b'{"type":"daemon_ended","name":"munged","reason":"exit code 1"}\n{"type":"audited","audit":{"a":1}}\n'
    )
    assert channel.ask(AUDIT, "audited", 10).audit == {"a": 1}
    assert guest.recv(100) == AUDIT
    assert [report.reason for report in channel.news()] == ["munged: exit code 1"]
