"""The host's end of the channel to a guest's agent: a Unix socket that QEMU serves."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from pathlib import Path

from multiverse.core.errors import Broken, Unknown
from multiverse.guest.protocol import MAX_LINE, Report
from multiverse.guest.protocol import ReportParser as Lines

# What reading and parsing may cost us: an agent says some hundred bytes in a job's life, and at most one long line.
_BURST = 4 * MAX_LINE  # bytes
_RATE = 64 << 10  # bytes a second


class Channel:
    """One connection to an agent. Nothing that a guest sends is held, or read, without bound."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lines = Lines()
        self._reports: deque[Report] = deque(maxlen=256)
        self._news: deque[Report] = deque(maxlen=16)  # what came unasked while an answer was awaited
        self._talk = threading.Lock()
        self._credit, self._heard = float(_BURST), time.monotonic()
        try:
            self._sock.connect(str(path))
        except OSError as error:
            self._sock.close()
            raise Unknown(f"nobody listens for the agent at {path}: {error.strerror or error}") from error

    def queue(self, line: bytes) -> bytes:
        """Send what fits without waiting, so that a paused guest finds it; returns the rest, for `send`."""
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
        """Send all of a line."""
        if not line:
            return
        self._sock.settimeout(timeout)
        try:
            self._sock.sendall(line)
        except OSError as error:
            raise Unknown(f"the agent takes no message: {error.strerror or error}") from error

    def expect(self, types: frozenset[str], timeout: float) -> Report:
        """The next report of one of `types`. `Broken` if the agent reports a failure, `Unknown` for no word in time."""
        deadline = time.monotonic() + timeout
        while True:
            while self._reports:
                report = self._reports.popleft()
                if report.type in types:
                    return report
                if report.type == "daemon_ended":
                    self._news.append(report)
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
            self._reports.extend(self._lines.feed(data))

    def ask(self, line: bytes, answer: str, timeout: float) -> Report:
        """Say something and hear its answer; others who would talk or listen meanwhile wait for their turn."""
        deadline = time.monotonic() + timeout
        if not self._talk.acquire(timeout=timeout):
            raise Unknown(f"the agent is asked something else for {timeout:.0f} s already")
        try:
            self.send(line, timeout)
            return self.expect(frozenset({answer}), max(0.0, deadline - time.monotonic()))
        finally:
            self._talk.release()

    def news(self) -> list[Report]:
        """Reports that came unasked since the last call. Never waits."""
        if not self._talk.acquire(blocking=False):
            return []
        try:
            self._sock.setblocking(False)
            while data := self._receive():
                self._reports.extend(self._lines.feed(data))
        except OSError:
            pass
        except Broken as error:
            self._news.append(Report("flooded", error.message))
        finally:
            self._talk.release()
        found = [*self._news, *self._reports]
        self._news.clear()
        self._reports.clear()
        return found

    def _receive(self) -> bytes:
        """What has arrived. `Broken` if that is more than an agent has to say: then this is the connection's end."""
        if self._credit < 0:
            return b""
        data = self._sock.recv(65536)
        now = time.monotonic()
        self._credit = min(_BURST, self._credit + (now - self._heard) * _RATE) - len(data)
        self._heard = now
        if self._credit < 0:
            self.hang_up()
            raise Broken("the guest flooded its channel, which was closed", hint="see what its job does as root")
        return data

    def hang_up(self) -> None:
        """End the connection, also under somebody who waits on it in another thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self._sock.close()
