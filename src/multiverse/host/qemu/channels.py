"""The two sockets of a running QEMU: its monitor, and the channel to the agent in its guest."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from multiverse.core.errors import Broken, Unknown
from multiverse.guest.protocol import MAX_LINE, Report, ReportParser

Command = tuple[str, dict[str, Any]]
_MAX_LINE = 4 << 20


class QmpError(Broken):
    """QEMU refused a command; the message quotes QEMU."""


class Monitor:
    """A synchronous QMP client (qemu-qmp-spec). Any method raises `Unknown` if QEMU does not answer."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._events: deque[dict[str, Any]] = deque(maxlen=256)
        self._timeout = timeout

    @classmethod
    def connect(cls, path: Path, timeout: float = 10.0) -> Monitor:
        """Connect and negotiate, within `timeout` seconds. The socket may listen before QEMU answers on it."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(path))
            monitor = cls(sock, timeout)
            if "QMP" not in monitor._read(time.monotonic() + timeout):
                raise Unknown(f"{path} does not speak QMP")
            monitor.execute("qmp_capabilities")
        except OSError as error:
            sock.close()
            raise Unknown(f"QEMU does not answer at {path}: {error.strerror or error}") from error
        except BaseException:
            sock.close()
            raise
        return monitor

    def execute(self, command: str, **arguments: Any) -> Any:
        """Run one command and return its value."""
        return self.execute_all([(command, arguments)])[0]

    def execute_all(self, commands: Sequence[Command], fd: int | None = None) -> list[Any]:
        """Send commands in one write; QEMU runs them one after the other. Returns their values. All are run even if
        QEMU refuses one; then the first refusal is raised, a `QmpError`. The descriptor `fd` is passed to QEMU, for a
        `getfd` among the commands."""
        lines = [json.dumps({"execute": name, "arguments": args}) for name, args in commands]
        try:
            data = "\n".join(lines).encode() + b"\n"
            sent = socket.send_fds(self._sock, [data], [fd]) if fd is not None else 0
            self._sock.sendall(data[sent:])
        except OSError as error:
            raise Unknown(f"QEMU closed its monitor: {error.strerror or error}") from error
        values: list[Any] = []
        problem: QmpError | None = None
        deadline = time.monotonic() + self._timeout
        while len(values) < len(commands):
            message = self._read(deadline)
            if "event" in message:
                self._events.append(message)
            elif "return" in message:
                values.append(message["return"])
            elif "error" in message:
                problem = problem or QmpError(
                    f"QEMU refused {commands[len(values)][0]}: {message['error'].get('desc')}"
                )
                values.append(None)
        if problem is not None:
            raise problem
        return values

    def wait_event(self, name: str, timeout: float, **wanted: Any) -> dict[str, Any]:
        """The data of the next event `name` with all of `wanted`, within `timeout` seconds; earlier events count."""
        deadline = time.monotonic() + timeout
        while True:
            message = self._events.popleft() if self._events else self._read(deadline)
            data: dict[str, Any] = message.get("data", {})
            if message.get("event") == name and all(data.get(k) == v for k, v in wanted.items()):
                return data
            if message.get("event") == "MIGRATION" and data.get("status") == "failed":
                what = "QEMU could not save or restore the state of its devices"
                raise Broken(what, hint="its log is beside the VM's manifest")

    def next_event(self, timeout: float) -> dict[str, Any] | None:
        """The next event; earlier ones that nobody has asked for come first. None if there is none within `timeout`
        seconds."""
        deadline = time.monotonic() + timeout
        while not self._events:
            if not self._buffer and not select.select([self._sock], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            message = self._read(time.monotonic() + self._timeout)
            if "event" in message:
                self._events.append(message)
        return self._events.popleft()

    def shut_down(self) -> None:
        """End the connection. Another thread that waits for an answer on it gets `Unknown`."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, deadline: float) -> dict[str, Any]:
        while (end := self._buffer.find(b"\n")) < 0:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Unknown("QEMU did not answer in time")
            self._sock.settimeout(left)
            try:
                data = self._sock.recv(65536)
            except TimeoutError:
                raise Unknown("QEMU did not answer in time") from None
            except OSError as error:
                raise Unknown(f"QEMU closed its monitor: {error.strerror or error}") from error
            if not data or len(self._buffer) > _MAX_LINE:
                raise Unknown("QEMU closed its monitor")
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        message = json.loads(line)
        return message if isinstance(message, dict) else {}


# The most that this process reads from one guest. An agent sends some hundred bytes per job, and at most one long line.
_BURST = 4 * MAX_LINE  # bytes
_RATE = 64 << 10  # bytes per second
_FLOODED, _FLOOD_HINT = "the guest flooded its channel, which was closed", "see what its job does as root"


class AgentChannel:
    """One connection to the agent in a guest. Its size and rate are bounded: the guest's user may be root there."""

    def __init__(self, path: Path) -> None:
        """Raises `Unknown` if nothing listens at `path`."""
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._parser = ReportParser()
        self._reports: deque[Report] = deque(maxlen=256)
        self._unsolicited: deque[Report] = deque(maxlen=16)  # reports that arrived while an answer was awaited
        self._in_use = threading.Lock()
        self._credit, self._received_at = float(_BURST), time.monotonic()
        try:
            self._sock.connect(str(path))
        except OSError as error:
            self._sock.close()
            raise Unknown(f"nothing listens for the agent at {path}: {error.strerror or error}") from error

    def queue(self, line: bytes) -> bytes:
        """Send what fits without waiting, so that a paused guest finds it when it runs. Returns the rest."""
        self._sock.setblocking(False)
        sent = 0
        try:
            while sent < len(line):
                sent += self._sock.send(line[sent:])
        except BlockingIOError:
            pass
        except OSError as error:
            raise Unknown(f"the agent's channel is closed: {error.strerror or error}") from error
        return line[sent:]

    def send(self, line: bytes, timeout: float) -> None:
        if not line:
            return
        self._sock.settimeout(timeout)
        try:
            self._sock.sendall(line)
        except OSError as error:
            raise Unknown(f"the agent does not accept messages: {error.strerror or error}") from error

    def expect(self, types: frozenset[str], timeout: float) -> Report:
        """The next report of one of `types`. Raises `Broken` if the agent reports a failure, `Unknown` if it is
        late."""
        deadline = time.monotonic() + timeout
        while True:
            while self._reports:
                report = self._reports.popleft()
                if report.type in types:
                    return report
                if report.type == "daemon_ended":
                    self._unsolicited.append(report)
                if report.type == "failed":
                    raise Broken(f"in the guest: {report.reason}", hint="its console log is beside the VM's manifest")
            left = deadline - time.monotonic()
            if left <= 0:
                raise Unknown(f"the agent did not say {' or '.join(sorted(types))} within {timeout:.0f} s")
            self._sock.settimeout(left)
            try:
                data = self._receive()
            except TimeoutError:
                continue
            except OSError as error:
                raise Unknown(f"the agent's channel broke: {error.strerror or error}") from error
            if not data:
                raise Unknown("the VM closed the agent's channel")
            self._reports.extend(self._parser.feed(data))

    def ask(self, line: bytes, answer: str, timeout: float, *, or_else: str = "") -> Report:
        """Send a line, and return the report of type `answer`, or of the other type. One thread at a time; others wait
        for their turn. Raises `Broken` if the guest has flooded the channel."""
        deadline = time.monotonic() + timeout
        with self._turn(timeout):
            self.send(line, timeout)
            return self.expect(frozenset({answer, or_else}), max(0.0, deadline - time.monotonic()))

    def tell(self, line: bytes, timeout: float) -> None:
        """Send a line that is not answered. Raises `Unknown` if that is not done within `timeout` seconds."""
        with self._turn(timeout):
            self.send(line, timeout)

    @property
    def flooded(self) -> bool:
        """Whether the connection was ended because the guest had sent too much. It stays so."""
        return self._credit < 0

    @contextmanager
    def _turn(self, timeout: float) -> Iterator[None]:
        if self.flooded:
            raise Broken(_FLOODED, hint=_FLOOD_HINT)
        if not self._in_use.acquire(timeout=timeout):
            raise Unknown(f"another request to the agent has been waiting for {timeout:.0f} s already")
        try:
            yield
        finally:
            self._in_use.release()

    def poll_reports(self) -> list[Report]:
        """Reports that arrived unsolicited since the last call. Never waits."""
        if not self._in_use.acquire(blocking=False):
            return []
        try:
            self._sock.setblocking(False)
            while data := self._receive():
                self._reports.extend(self._parser.feed(data))
        except OSError:
            pass
        except Broken as error:
            self._unsolicited.append(Report("flooded", error.message))
        finally:
            self._in_use.release()
        found = [*self._unsolicited, *self._reports]
        self._unsolicited.clear()
        self._reports.clear()
        return found

    def _receive(self) -> bytes:
        """The bytes that have arrived. Raises `Broken`, and ends the connection, if they exceed the rate."""
        if self._credit < 0:
            return b""
        data = self._sock.recv(65536)
        now = time.monotonic()
        self._credit = min(_BURST, self._credit + (now - self._received_at) * _RATE) - len(data)
        self._received_at = now
        if self._credit < 0:
            self.shut_down()
            raise Broken(_FLOODED, hint=_FLOOD_HINT)
        return data

    def shut_down(self) -> None:
        """End the connection. Another thread that waits for an answer on it gets `Unknown`."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
