"""Where the scripts of many jobs report their first instruction, whoever comes first; each is let go, or held."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable

from multiverse.client import Client
from multiverse.core.errors import Broken

# It ends when its connection does.
SCRIPT = """#!/bin/bash
exec 3<>/dev/tcp/{host}/{port}
echo "${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}" >&3
read -r _ <&3
exit 0
"""


class Arrivals:
    """Hears scripts in a thread of its own: what they say is stamped when it comes, whatever else is under way. Times
    are monotonic. With `hold` their jobs run until this is closed."""

    def __init__(self, host: str, *, hold: bool = False) -> None:
        self._socket = socket.create_server((host, 0), backlog=512)
        address = self._socket.getsockname()
        self.script = SCRIPT.format(host=host, port=address[1])
        self.at: dict[str, float] = {}
        self._hold, self._held = hold, list[socket.socket]()
        self._came = threading.Condition()
        self._thread = threading.Thread(target=self._hear, name="arrivals", daemon=True)
        self._thread.start()

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let all jobs go that are held."""
        self._socket.shutdown(socket.SHUT_RDWR)  # or the thread would wait on for ever
        self._thread.join()
        self._socket.close()
        for connection in self._held:
            connection.close()
        self._held.clear()

    def wait(self, jobs: Iterable[str], patience: float, alive: Callable[[], bool]) -> list[str]:
        """Until each of these jobs has come, or none has for `patience` seconds: then those that have not. `Broken` if
        nothing is `alive` any more that could start them."""
        missing = [job for job in jobs if job not in self.at]
        last = time.monotonic()
        with self._came:
            while missing and time.monotonic() - last < patience:
                self._came.wait(1.0)
                if not alive():
                    raise Broken(f"the lab went down while {len(missing)} jobs were awaited")
                still = [job for job in missing if job not in self.at]
                if len(still) < len(missing):
                    missing, last = still, time.monotonic()
        return missing

    def _hear(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            arrived = time.monotonic()
            connection.settimeout(5.0)
            try:
                job = connection.recv(64).decode(errors="replace").strip()
            except OSError:
                job = ""
            with self._came:
                self.at.setdefault(job, arrived)
                self._came.notify_all()
            if self._hold and job:
                self._held.append(connection)
            else:
                connection.close()


def until_nothing_is_left(client: Client, limit: float) -> None:
    """No job and no VM is known any more. `Broken` if that takes more than `limit` seconds."""
    deadline = time.monotonic() + limit
    while client.jobs() or client.vms():
        if time.monotonic() > deadline:
            raise Broken(f"jobs were not reclaimed within {limit:g} s", hint="see the lab's log/controller.log")
        time.sleep(0.1)
