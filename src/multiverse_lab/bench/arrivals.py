"""A listener to which the scripts of many jobs report their first instruction, in any order."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable

from multiverse.client import Client
from multiverse.core.errors import Broken

SCRIPT = """#!/bin/bash
exec 3<>/dev/tcp/{host}/{port}
echo "${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}" >&3
read -r _ <&3
exit 0
"""
"""A job script that reports its job id to the listener, and ends when the listener closes the connection."""


class Arrivals:
    """Receives the reports in a thread of its own, so that their times do not depend on what else this process does.
    `at` is the monotonic time of each job's report. With `hold` the jobs run until this is closed; otherwise each ends
    after its report."""

    def __init__(self, host: str, *, hold: bool = False) -> None:
        self._socket = socket.create_server((host, 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]
        self.script = SCRIPT.format(host=host, port=self.port)
        self.at: dict[str, float] = {}
        self._hold, self._held = hold, list[socket.socket]()
        self._came = threading.Condition()
        self._thread = threading.Thread(target=self._receive, name="arrivals", daemon=True)
        self._thread.start()

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and let all held jobs end."""
        self._socket.shutdown(socket.SHUT_RDWR)  # otherwise the thread would wait in accept() for ever
        self._thread.join()
        self._socket.close()
        for connection in self._held:
            connection.close()
        self._held.clear()

    def wait(self, jobs: Iterable[str], patience: float, alive: Callable[[], bool]) -> list[str]:
        """Wait until each of these jobs has reported, or until none has for `patience` seconds. Returns the jobs that
        have not reported. Raises `Broken` once `alive()` is false, because then nothing can start them any more."""
        missing = [job for job in jobs if job not in self.at]
        last = time.monotonic()
        with self._came:
            while missing and time.monotonic() - last < patience:
                self._came.wait(1.0)
                if not alive():
                    raise Broken(
                        f"the lab went down while {len(missing)} jobs had not started",
                        hint="see the lab's log/controller.log",
                    )
                still = [job for job in missing if job not in self.at]
                if len(still) < len(missing):
                    missing, last = still, time.monotonic()
        return missing

    def _receive(self) -> None:
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
    """Wait until the controller has no live job and no VM. Raises `Broken` after `limit` seconds."""
    deadline = time.monotonic() + limit
    while client.jobs() or client.vms():
        if time.monotonic() > deadline:
            raise Broken(f"jobs were not reclaimed within {limit:g} s", hint="see the lab's log/controller.log")
        time.sleep(0.1)
