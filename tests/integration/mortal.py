"""A daemon that dies when it is told to, and jobs that count their own runs."""

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


class Mortal:
    """The daemon whose fates are set; started again whenever it has died, as a service manager would."""

    def __init__(self, lab: LabUnderTest, fates: Sequence[str]) -> None:
        self._lab = lab
        self._file = lab.where.root / "fates"
        self.client = Client(lab.settings.socket, timeout=10.0)
        self.deaths = 0
        self.doom(fates)
        self._process: subprocess.Popen[bytes] | None = None

    def doom(self, fates: Sequence[str]) -> None:
        """From now on these are its fates."""
        self._file.write_text("".join(f"{fate}\n" for fate in fates))

    def left(self) -> list[str]:
        """What has not come to pass yet."""
        return self._file.read_text().splitlines()

    def up(self) -> bool:
        """Start it if it does not run; whether it answers."""
        if self._process is not None and self._process.poll() is not None:
            assert self._process.returncode == -signal.SIGKILL, "it died by itself: see deadly.log"
            self._process, self.deaths = None, self.deaths + 1
        if self._process is None:
            where = self._lab.where
            argv = [sys.executable, "-m", "tests.integration.deadly", where.settings, where.run, self._file]
            with (where.log / "deadly.log").open("ab") as log:
                self._process = subprocess.Popen(argv, stdout=log, stderr=log, cwd=Path(__file__).parents[2])
        try:
            return bool(self.client.status())
        except MultiverseError:
            return False

    def tell(self, ask: Callable[[Client], Any]) -> Any:
        """The answer, if it lives long enough to give one."""
        try:
            return ask(self.client) if self.up() else None
        except MultiverseError:
            return None

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)


Deadly = Callable[[Sequence[str]], Mortal]


def counting(lab: LabUnderTest, name: str, then: str = "true") -> tuple[Path, str]:
    """A file in the user's home, and a script that adds a line to it each time it runs: its restart count."""
    path = lab.user.home / f"{name}.count"
    path.unlink(missing_ok=True)
    return path, f"echo run ${{SLURM_RESTART_COUNT:-0}} >> {path}; {then}"


def over(mortal: Mortal, job: str, state: str = "done") -> bool:
    return bool(mortal.tell(lambda client: latest(client, job).get("state") == state))
