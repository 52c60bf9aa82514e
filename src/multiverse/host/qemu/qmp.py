"""A synchronous QMP client (qemu-qmp-spec): connect, execute, wait for an event.

Commands that do not depend on each other's replies are sent in one write, because QMP is on the path from a job's
submission to its start.
"""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from multiverse.core.errors import Broken, Unknown

Command = tuple[str, dict[str, Any]]
_MAX_LINE = 4 << 20


class QmpError(Broken):
    """QEMU refused a command; the message quotes QEMU."""


class Monitor:
    """One connection to a QEMU's monitor. Any method raises `Unknown` if QEMU does not answer."""

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
        """Send commands together; QEMU runs them one after the other. Returns their values.

        All of them are run even if QEMU refuses one; then the first refusal is raised, a `QmpError`. The descriptor
        `fd` is passed to QEMU, for a `getfd` among the commands.
        """
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
        """The data of the next event `name` that has all of `wanted`, waiting up to `timeout` seconds. Events that
        arrived before the call count."""
        deadline = time.monotonic() + timeout
        while True:
            message = self._events.popleft() if self._events else self._read(deadline)
            data: dict[str, Any] = message.get("data", {})
            if message.get("event") == name and all(data.get(k) == v for k, v in wanted.items()):
                return data
            if message.get("event") == "MIGRATION" and data.get("status") == "failed":
                raise Broken(
                    "QEMU could not save or restore the state of its devices",
                    hint="its log is beside the VM's manifest",
                )

    def shut_down(self) -> None:
        """End the connection. Another thread that waits for an answer on it gets `Unknown`."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
