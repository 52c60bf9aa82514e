"""The host's end of the channel to the agent in a guest: a Unix socket that QEMU serves."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from pathlib import Path

from multiverse.core.errors import Broken, Unknown
from multiverse.guest.protocol import MAX_LINE, Report, ReportParser

# The most that this process reads from one guest. An agent sends some hundred bytes per job, and at most one long line.
_BURST = 4 * MAX_LINE  # bytes
_RATE = 64 << 10  # bytes per second


class AgentChannel:
    """One connection to an agent. What a guest sends is bounded in size and rate: its user may be root there."""

    def __init__(self, path: Path) -> None:
        """Connect. Raises `Unknown` if nothing listens at `path`."""
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
        """Send a whole line, within `timeout` seconds."""
        if not line:
            return
        self._sock.settimeout(timeout)
        try:
            self._sock.sendall(line)
        except OSError as error:
            raise Unknown(f"the agent does not accept messages: {error.strerror or error}") from error

    def expect(self, types: frozenset[str], timeout: float) -> Report:
        """The next report of one of `types`. Raises `Broken` if the agent reports a failure, and `Unknown` if it sends
        no such report within `timeout` seconds."""
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

    def ask(self, line: bytes, answer: str, timeout: float) -> Report:
        """Send a line, and return the report of type `answer`. One thread at a time; others wait for their turn."""
        deadline = time.monotonic() + timeout
        if not self._in_use.acquire(timeout=timeout):
            raise Unknown(f"another request to the agent has been waiting for {timeout:.0f} s already")
        try:
            self.send(line, timeout)
            return self.expect(frozenset({answer}), max(0.0, deadline - time.monotonic()))
        finally:
            self._in_use.release()

    def tell(self, line: bytes, timeout: float) -> None:
        """Send a line that is not answered. Raises `Unknown` if that is not done within `timeout` seconds."""
        if not self._in_use.acquire(timeout=timeout):
            raise Unknown(f"another request to the agent has been waiting for {timeout:.0f} s already")
        try:
            self.send(line, timeout)
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
        """What has arrived. Raises `Broken`, and ends the connection, if it exceeds the rate."""
        if self._credit < 0:
            return b""
        data = self._sock.recv(65536)
        now = time.monotonic()
        self._credit = min(_BURST, self._credit + (now - self._received_at) * _RATE) - len(data)
        self._received_at = now
        if self._credit < 0:
            self.shut_down()
            raise Broken("the guest flooded its channel, which was closed", hint="see what its job does as root")
        return data

    def shut_down(self) -> None:
        """End the connection. Another thread that waits for an answer on it gets `Unknown`."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self._sock.close()
