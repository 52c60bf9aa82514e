"""The daemons that make a clone a node."""

# ruff: noqa: PTH108, PTH110, PTH123

from __future__ import annotations

import os
import time
from typing import Any

from multiverse.guest.agent.contract import DAEMON_TIMEOUT, LOGS, GuestAgentError
from multiverse.guest.agent.processes import ending, spawn
from multiverse.guest.agent.stopped import take_stopped

LASTING = 10.0  # seconds; a daemon that ends sooner after it was started again would go on doing that


class DaemonProcess:
    """A child of the agent that is to live as long as the VM. `spec` is a daemon as the host describes it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name: str = spec["name"]
        self.argv: list[str] = list(spec["argv"])
        self.user: str = spec["user"]
        self.ready_path: str = spec["ready_path"]
        self.pid = 0
        self.status: int | None = None  # its wait status, once it has ended
        self.again = 0.0  # when it was started again

    def start(self) -> None:
        """Start it in a process group of its own, with its output in a log. Raises GuestAgentError."""
        if self.ready_path:
            try:
                os.unlink(self.ready_path)  # an old one would make a daemon look ready too early
            except FileNotFoundError:
                pass
        try:
            stopped = take_stopped(self.name, self.argv[0], self.user)
            self.pid = spawn(self.name, self.argv, self.user) if stopped is None else stopped.release(self.argv)
        except (OSError, KeyError) as error:
            raise GuestAgentError(f"cannot start {self.name} ({self.argv[0]}): {error}") from error

    def start_again(self) -> bool:
        """Start it once more after it has ended, unless it did not live for long after the last time. Returns whether
        it was started."""
        now = time.monotonic()
        if self.again and now - self.again < LASTING:
            return False
        self.again, self.status = now, None
        try:
            self.start()
        except GuestAgentError:
            return False
        return True

    def log_tail(self) -> str:
        """The last 600 bytes of its log on one line, for the operator."""
        try:
            with open(f"{LOGS}/{self.name}.log", "rb") as file:
                return file.read()[-600:].decode(errors="replace").strip().replace("\n", "; ")
        except OSError:
            return ""


class Children:
    """The daemons, and all other children of the agent that end. The first process of a guest inherits orphans."""

    def __init__(self) -> None:
        self._daemons: list[DaemonProcess] = []

    def start(self, daemon: DaemonProcess) -> None:
        """Start a daemon and wait until its ready path exists. Raises GuestAgentError if it ends or takes too long."""
        self._daemons.append(daemon)
        daemon.start()
        deadline = time.monotonic() + DAEMON_TIMEOUT
        while daemon.ready_path and not os.path.exists(daemon.ready_path):
            self.collect()
            if daemon.status is not None:
                raise GuestAgentError(f"{daemon.name} ended ({ending(daemon.status)}): {daemon.log_tail()}")
            if time.monotonic() > deadline:
                raise GuestAgentError(f"{daemon.name} did not make {daemon.ready_path}: {daemon.log_tail()}")
            time.sleep(0.005)

    def collect(self) -> list[DaemonProcess]:
        """Collect the wait status of each child that has ended. Returns the daemons among them."""
        ended: list[DaemonProcess] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            for daemon in self._daemons:
                if daemon.pid == pid:
                    daemon.status = status
                    ended.append(daemon)
