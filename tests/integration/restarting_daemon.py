"""A daemon and an agent that are killed at crash points and started again, and jobs that count their own runs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiverse.client import Client
from multiverse.core.errors import MultiverseError
from tests.integration.watch import latest

if TYPE_CHECKING:
    from tests.integration.conftest import LabUnderTest


class RestartingDaemon:
    """A daemon and an agent with crash points. Each is started again whenever it was killed, as a service manager would
    do."""

    def __init__(self, lab: LabUnderTest, crash_points: Sequence[str]) -> None:
        self._lab = lab
        self._file = lab.where.root / "crash_points"
        self.client = Client(lab.settings.socket, timeout=10.0)
        self.crashes = 0
        self.set_crash_points(crash_points)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def set_crash_points(self, crash_points: Sequence[str]) -> None:
        """Replace all crash points."""
        self._file.write_text("".join(f"{point}\n" for point in crash_points))

    def crash_points_left(self) -> list[str]:
        """The crash points that have not been reached yet."""
        return self._file.read_text().splitlines()

    def ensure_up(self) -> bool:
        """Start what does not run. Returns whether the daemon answers."""
        for role in ("agent", "controller"):
            self._ensure(role)
        try:
            return bool(self.client.status())
        except MultiverseError:
            return False

    def _ensure(self, role: str) -> None:
        process = self._processes.get(role)
        if process is not None and process.poll() is not None:
            assert process.returncode == -signal.SIGKILL, f"the {role} ended by itself: see restarting_{role}.log"
            del self._processes[role]
            self.crashes += 1
        if role not in self._processes:
            where = self._lab.where
            argv = [sys.executable, "-m", "tests.integration.crash_points", role, where.settings, where.run, self._file]
            with (where.log / f"restarting_{role}.log").open("ab") as log:
                root = Path(__file__).parents[2]
                self._processes[role] = subprocess.Popen(argv, stdout=log, stderr=log, cwd=root)

    def call(self, ask: Callable[[Client], Any]) -> Any:
        """The daemon's answer, or None if it does not answer."""
        try:
            return ask(self.client) if self.ensure_up() else None
        except MultiverseError:
            return None

    def close(self) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
            process.wait(30)


StartDaemon = Callable[[Sequence[str]], RestartingDaemon]


def counting_job(lab: LabUnderTest, name: str, then: str = "true") -> tuple[Path, str]:
    """A file in the user's home, and a script that adds its restart count to the file each time it runs."""
    path = lab.user.home / f"{name}.count"
    path.unlink(missing_ok=True)
    return path, f"echo run ${{SLURM_RESTART_COUNT:-0}} >> {path}; {then}"


def attempt_is(daemon: RestartingDaemon, job: str, state: str = "done") -> bool:
    return bool(daemon.call(lambda client: latest(client, job).get("state") == state))
