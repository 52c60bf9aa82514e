"""The connections between hosts by which VMs move."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multiverse.core.errors import Broken, Refused, Unknown
from multiverse.host import links
from multiverse.host.links import HostLink, MoveHello, MoveListener, MovePeer, dial, relay

HELLO = MoveHello("mvaaaaa-1", "token", 1, "secret", "control")


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Callable[..., tuple[MoveListener, MovePeer, list[MoveHello]]]]:
    """Makes a listener that answers each line with itself."""
    made: list[MoveListener] = []

    def make(*, encrypted: bool) -> tuple[MoveListener, MovePeer, list[MoveHello]]:
        heard: list[MoveHello] = []

        def serve(sock: socket.socket, hello: MoveHello) -> None:
            heard.append(hello)
            link = HostLink(sock)
            while True:
                try:
                    link.send(**link.receive(5.0))
                except Unknown:
                    return

        pair = links.certificate(tmp_path) if encrypted else None
        listener = MoveListener(links.listen("127.0.0.1", 0), pair, serve)
        made.append(listener)
        return listener, MovePeer("127.0.0.1", listener.port, pair[0].read_text() if pair else ""), heard

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_caller_says_who_it_is_and_talks(listening: Callable[..., tuple[MoveListener, MovePeer, list[MoveHello]]],
                                             encrypted: bool) -> None:  # fmt: skip
    _, peer, heard = listening(encrypted=encrypted)
    link = HostLink(dial(peer, HELLO))
    link.send(type="facts", text="x" * 300_000)
    assert link.receive(5.0) == {"type": "facts", "text": "x" * 300_000}
    assert heard == [HELLO]
    link.close()


def test_only_the_very_certificate_is_accepted(
    listening: Callable[..., tuple[MoveListener, MovePeer, list[MoveHello]]], tmp_path: Path
) -> None:
    _, peer, heard = listening(encrypted=True)
    other = tmp_path / "other"
    other.mkdir()
    wrong = MovePeer(peer.address, peer.port, links.certificate(other)[0].read_text())
    with pytest.raises(Broken, match="another certificate"):
        dial(wrong, HELLO)
    assert heard == []


def test_a_certificate_is_made_once_and_its_key_is_roots(tmp_path: Path) -> None:
    first, key = links.certificate(tmp_path)
    text = first.read_text()
    assert links.certificate(tmp_path) == (first, key) and first.read_text() == text
    assert key.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("line", [b"x" * 5000 + b"\n", b"{}\n", b'{"name":"a"}\n', b"\xff\n", b""])
def test_a_first_line_that_is_none_ends_the_connection(
    listening: Callable[..., tuple[MoveListener, MovePeer, list[MoveHello]]], line: bytes
) -> None:
    _, peer, heard = listening(encrypted=False)
    with socket.create_connection((peer.address, peer.port)) as sock:
        sock.sendall(line)
        sock.shutdown(socket.SHUT_WR)
        try:
            assert sock.recv(1) == b""
        except ConnectionResetError:
            pass
    assert heard == []


def test_silent_callers_do_not_keep_others_out(
    listening: Callable[..., tuple[MoveListener, MovePeer, list[MoveHello]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_CONNECTIONS", 2)
    monkeypatch.setattr(links, "_HELLO_TIMEOUT", 0.1)
    _, peer, _ = listening(encrypted=False)
    silent = [socket.create_connection((peer.address, peer.port)) for _ in range(4)]
    link = HostLink(dial(peer, HELLO))
    link.send(type="ping")
    assert link.receive(5.0) == {"type": "ping"}
    link.close()
    for sock in silent:
        sock.close()


def test_a_host_that_nobody_answers_for_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(Unknown, match="cannot connect"):
        dial(MovePeer("127.0.0.1", port), HELLO)


def test_the_end_of_a_listener_ends_its_connections(
    listening: Callable[..., tuple[MoveListener, MovePeer, list[MoveHello]]],
) -> None:
    listener, peer, heard = listening(encrypted=True)
    link = HostLink(dial(peer, HELLO))
    link.send(type="ping")
    link.receive(5.0)
    listener.close()
    with pytest.raises(Unknown):
        link.receive(5.0)
    with pytest.raises(Unknown):
        dial(peer, HELLO)
    assert len(heard) == 1


def test_a_relay_copies_both_ways_and_all_that_comes_before_the_end() -> None:
    (near, one), (other, far) = socket.socketpair(), socket.socketpair()
    thread = threading.Thread(target=lambda: (relay(one, other), links.shut_down(other)))
    thread.start()
    data = os.urandom(3 << 20)
    got = bytearray()

    def read() -> None:
        far.sendall(b"answer")
        while piece := far.recv(1 << 16):
            got.extend(piece)

    reading = threading.Thread(target=read)
    reading.start()
    near.sendall(data)
    assert near.recv(100) == b"answer"
    near.shutdown(socket.SHUT_WR)
    for each in (thread, reading):
        each.join(10)
    assert bytes(got) == data
    for sock in (near, one, other, far):
        sock.close()


def test_a_line_of_no_message_is_refused() -> None:
    one, other = socket.socketpair()
    link = HostLink(one)
    for line in (b"[1]\n", b"no json\n"):
        other.sendall(line)
        with pytest.raises(Unknown):
            link.receive(1.0)
    with pytest.raises(Refused):
        other.sendall(b"\n")
        links.read_hello(one, 1.0)
    for sock in (one, other):
        sock.close()
