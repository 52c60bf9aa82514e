"""Connections between two hosts, by which a VM moves from one to the other.

Each connection is made by the host that the VM leaves. It begins with one line of JSON (`MoveHello`), with the secret
that the controller gave both hosts. In a network that is not private it is a TLS connection: the caller knows the exact
certificate of the other host, from the controller. The controller reaches the agent of a leased host in the same way,
with the secret that the agent gave it.
"""

from __future__ import annotations

import hmac
import json
import select
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError

from multiverse.core.errors import Broken, Refused, Unknown
from multiverse.host.vxlan import VxlanConfig
from multiverse.system import files, kernel

log = structlog.get_logger(__name__)

_CONNECT_TIMEOUT = 10.0  # seconds
SILENCE = 20.0  # seconds without an acknowledgement after which the kernel takes a connection for lost
_HELLO = 4096  # bytes of a first line, at most: nothing more is read before its secret is checked
_LINE = 4 << 20  # bytes of a later line, at most
_PIECE = 256 << 10
_WAIT = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class MovePeer:
    """Where a host receives VMs. Without a certificate (PEM) the connection is plain."""

    address: str
    port: int
    certificate: str = ""


@dataclass(frozen=True, slots=True)
class MoveHello:
    """The first line of a connection, about one move of a VM."""

    name: str
    token: str
    move: int
    secret: str
    # `control`: the talk of both hosts; `disk`, `memory`: for the two QEMUs; `settle`: how has a move ended? `COMMAND`:
    # the protocol of agents; `name` is the host's.
    channel: str

    @property
    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    def knows(self, token: str, secret: str) -> bool:
        return hmac.compare_digest(f"{self.token} {self.secret}".encode(), f"{token} {secret}".encode())


_HELLOS = TypeAdapter(MoveHello)
COMMAND = "command"


@dataclass(frozen=True, slots=True)
class NodeNetwork:
    """What the agent of a lease has of its node's network. Its VMs are in a network namespace of their own."""

    namespace: int  # a descriptor
    vxlan: VxlanConfig | None = None  # the node's
    listening: socket.socket | None = None  # for other hosts and the controller; None: it is not reached there


class HostLink:
    """Lines of JSON over a connected socket. One thread at a time uses it, but for `shut_down`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def send(self, **message: Any) -> None:
        """Raises `Unknown` if the connection is lost."""
        try:
            self._sock.settimeout(SILENCE)
            self._sock.sendall(json.dumps(message).encode() + b"\n")
        except (OSError, ValueError) as error:
            raise Unknown(f"the other host does not take messages: {error}") from error

    def receive(self, timeout: float) -> dict[str, Any]:
        """The next line. Raises `Unknown` if none comes within `timeout` seconds, or if it is none of ours."""
        try:
            self._sock.settimeout(timeout)
            while (end := self._buffer.find(b"\n")) < 0:
                data = self._sock.recv(65536)
                if not data or len(self._buffer) > _LINE:
                    raise Unknown("the other host has ended the connection")
                self._buffer += data
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            message = json.loads(line)
        except (OSError, ValueError) as error:
            raise Unknown(f"the other host does not answer: {error}") from error
        if not isinstance(message, dict):
            raise Unknown("what the other host has said is no message")
        return message

    def shut_down(self) -> None:
        """End the connection. Another thread that waits for a message gets `Unknown`."""
        shut_down(self._sock)

    def close(self) -> None:
        shut_down(self._sock)
        self._sock.close()


def shut_down(sock: socket.socket) -> None:
    """End a connection, also while another thread uses it."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # that of an SSL socket would change it under the other thread


def dial(peer: MovePeer, hello: MoveHello, namespace: int | None = None) -> socket.socket:
    """Connect to a host, from a network namespace or this thread's, and say who calls. Raises `Unknown` if it cannot be
    reached, and `Broken` if another one answers there."""
    try:
        with kernel.in_network(namespace):
            sock = socket.create_connection((peer.address, peer.port), _CONNECT_TIMEOUT)
    except OSError as error:
        what = f"cannot connect to {peer.address} port {peer.port}: {error.strerror or error}"
        raise Unknown(what, hint="is move.enabled set there, and the port open between both hosts?") from error
    try:
        _tune(sock)
        if peer.certificate:
            sock = _encrypted(sock, peer)
        sock.sendall(hello.line)
    except OSError as error:
        sock.close()
        raise Unknown(f"the connection to {peer.address} was lost: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _encrypted(sock: socket.socket, peer: MovePeer) -> socket.socket:
    found = client_context().wrap_socket(sock)
    try:
        check_certificate(found.getpeercert(binary_form=True), peer)
    except Broken:
        found.close()
        raise
    return found


def client_context() -> ssl.SSLContext:
    """No authority signs certificates, and their time of validity says nothing: see `check_certificate`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def check_certificate(shown: bytes | None, peer: MovePeer) -> None:
    """Raise `Broken` unless this (DER) is the peer's very certificate."""
    if shown != ssl.PEM_cert_to_DER_cert(peer.certificate):
        what = f"{peer.address}:{peer.port} has another certificate than the host that is to be reached there"
        raise Broken(what, hint="see move.addresses in the settings")


def _tune(sock: socket.socket) -> None:
    """Send at once, and notice soon that the other host is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE * 1000))


def read_hello(sock: socket.socket, timeout: float) -> MoveHello:
    """The first line of a connection. Raises `Refused` if it is none."""
    line = bytearray()
    try:
        sock.settimeout(timeout)
        while not line.endswith(b"\n"):  # one byte at a time: what follows is for somebody else
            data = sock.recv(1)
            if not data or len(line) > _HELLO:
                raise Refused("the first line of a connection is missing or too long")
            line += data
        return _HELLOS.validate_json(bytes(line), strict=True)
    except (OSError, ValidationError) as error:
        raise Refused(f"the first line of a connection cannot be read: {type(error).__name__}") from error


def relay(one: socket.socket, other: socket.socket) -> None:
    """Copy both ways until either side ends. All that one has sent before its end reaches the other."""
    for sock in (one, other):
        sock.setblocking(False)
    flows = [_Flow(one, other), _Flow(other, one)]
    while True:
        try:
            moved = [flow.move() for flow in flows]
            if any(flow.ended for flow in flows):
                return
            if not any(moved):
                _wait(flows)
        except (OSError, ValueError):  # closed by another thread
            return


class _Flow:
    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target = source, target
        self.waiting = memoryview(b"")
        self.ended = False

    def move(self) -> bool:
        """Move what can be moved without waiting. Whether anything was."""
        try:
            if not self.waiting:
                self.waiting = memoryview(self.source.recv(_PIECE))
                self.ended = not self.waiting
            sent = self.target.send(self.waiting) if self.waiting else 0
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        self.waiting = self.waiting[sent:]
        return True


def _wait(flows: list[_Flow]) -> None:
    events: dict[int, int] = {}
    for flow in flows:
        sock, event = (flow.target, select.POLLOUT) if flow.waiting else (flow.source, select.POLLIN)
        events[sock.fileno()] = events.get(sock.fileno(), 0) | event
    poll = select.poll()
    for fd, event in events.items():
        poll.register(fd, event)
    poll.poll(_WAIT * 1000)


# --- the host that receives --------------------------------------------------------------------------


def certificate(directory: Path) -> tuple[Path, Path]:
    """The files of this host's certificate and its key, which are made when they are missing. Raises `Broken`."""
    found, key = directory / "move-certificate.pem", directory / "move-key.pem"
    if not found.exists():
        argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                "-days", "36500", "-subj", "/CN=multiverse", "-keyout", str(key)]  # fmt: skip
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
            if done.returncode:
                raise Broken(f"openssl cannot make a certificate: {done.stderr[-200:]}", hint="is it installed?")
            key.chmod(0o600)
            files.create_whole(found, done.stdout.encode())  # last: it says that both are there
        except (OSError, subprocess.TimeoutExpired) as error:
            what = f"cannot make a certificate for VMs that move here: {error}"
            raise Broken(what, hint="is openssl installed? see agent.state_dir") from error
    return found, key


_HELLO_TIMEOUT = 10.0  # seconds for TLS and the first line
_CONNECTIONS = 64  # at the same time; a move has three


def listen(address: str, port: int) -> socket.socket:
    """A socket at which a host is reached by others. Raises `Refused` if it cannot listen there."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=_CONNECTIONS)
    except OSError as error:
        what = f"cannot receive VMs at {address} port {port}: {error.strerror or error}"
        raise Refused(what, hint="see move.addresses and move.port in the settings") from error


class MoveListener:
    """Accepts the connections of other hosts, each in a thread. `serve` gets the socket and its first line, and closes
    the socket. More than `_CONNECTIONS` at a time wait."""

    def __init__(
        self,
        listening: socket.socket,
        pair: tuple[Path, Path] | None,
        serve: Callable[[socket.socket, MoveHello], None],
    ) -> None:
        """`pair`: the files of the certificate and its key; None: connections are plain. Raises `Refused` if these
        cannot be used."""
        self._serve, self._listening = serve, listening
        self._context: ssl.SSLContext | None = None
        try:
            if pair is not None:
                self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                self._context.minimum_version = ssl.TLSVersion.TLSv1_3
                self._context.load_cert_chain(*pair)
            listening.listen(_CONNECTIONS)  # an earlier agent of the lease has shut it down
        except OSError as error:
            what = f"cannot receive VMs with the certificate in {pair[0].parent}: {error}" if pair else str(error)
            raise Refused(what, hint="remove it: a new one is made") from error
        self.address, self.port = listening.getsockname()[:2]
        self._room = threading.Semaphore(_CONNECTIONS)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="moves", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._room.acquire()
            try:
                sock, _ = self._listening.accept()
            except OSError as error:
                self._room.release()
                if self._closed:
                    return
                log.warning("a connection of another host was not accepted", reason=str(error))
                threading.Event().wait(1.0)  # no descriptor is free
                continue
            threading.Thread(target=self._one, args=(sock,), name="move", daemon=True).start()

    def _one(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(_HELLO_TIMEOUT)
            _tune(sock)
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True)
            hello = read_hello(sock, _HELLO_TIMEOUT)
            with self._lock:
                if self._closed:
                    return
                self._open.add(sock)
            self._serve(sock, hello)
        except (Refused, OSError) as error:
            log.warning("a connection of another host was refused", reason=str(error))
        except Exception:
            log.exception("a connection of another host failed")
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()
            self._room.release()

    def close(self) -> None:
        """Accept no more, and end all connections."""
        with self._lock:
            self._closed = True
            for sock in self._open:
                shut_down(sock)
        shut_down(self._listening)
        self._thread.join(1.0)  # or it would take a connection of the next agent's
        self._listening.close()
