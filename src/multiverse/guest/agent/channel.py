"""The channel to the host: a virtio port that carries one JSON object per line."""

# ruff: noqa: PTH110, PTH112, PTH123, PTH208

from __future__ import annotations

import fcntl
import json
import os
import select
import time
from typing import Any

from multiverse.guest.agent.contract import DAEMON_TIMEOUT, MAX_LINE, PORT, GuestAgentError

IDENTITY = b'{"type":"identity"'  # how an identity message begins
FORKED = b'{"type":"forked"}\n'


def find_port() -> str:
    """The device of the virtio port that QEMU calls PORT. Waits for the driver to add it. Raises GuestAgentError."""
    base = "/sys/class/virtio-ports"
    deadline = time.monotonic() + DAEMON_TIMEOUT
    while True:
        for entry in os.listdir(base) if os.path.isdir(base) else ():
            with open(f"{base}/{entry}/name") as file:
                if file.read().strip() == PORT and os.path.exists(f"/dev/{entry}"):
                    return f"/dev/{entry}"
        if time.monotonic() > deadline:
            raise GuestAgentError(f"the VM has no virtio port {PORT}")
        time.sleep(0.01)


class HostChannel:
    """JSON lines over the virtio port, each at most `MAX_LINE` bytes, in both directions."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._buffer = bytearray()

    def wait(self) -> list[dict[str, Any]]:
        """Block until messages come; return none if the host closed its end. Clones continue in this read."""
        while True:
            data = os.read(self.fd, 65536)
            if data.startswith(IDENTITY):
                os.write(self.fd, FORKED)  # before anything else, because the host measures the fork by it
            if not data:
                self._buffer.clear()
                return []
            messages = self._feed(data)
            if messages:
                return messages

    def watch(self) -> None:
        """Never block from now on. SIGIO tells when the host opens its end; poll(2) cannot, it returns at once."""
        fcntl.fcntl(self.fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)

    def send(self, type_: str, **fields: Any) -> None:
        """Send a message. It is lost if no host reads it; the host asks again for what it must know."""
        data = json.dumps({"type": type_, **fields}, separators=(",", ":")).encode() + b"\n"
        while data:
            try:
                data = data[os.write(self.fd, data) :]
            except BlockingIOError:
                poller = select.poll()
                poller.register(self.fd, select.POLLOUT)
                if any(event & select.POLLHUP for _, event in poller.poll(5000)):
                    return
            except OSError:
                return

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Messages that have arrived, and whether the host's end is open. Never blocks."""
        messages: list[dict[str, Any]] = []
        while True:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                return messages, True
            except OSError:
                return messages, False
            if not data:
                self._buffer.clear()  # an incomplete line will never be completed
                return messages, False
            messages += self._feed(data)

    def _feed(self, data: bytes) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        self._buffer += data
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                messages.append(message)
        if len(self._buffer) > MAX_LINE:
            self._buffer.clear()
        return messages
