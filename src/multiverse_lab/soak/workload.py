"""Submits the jobs of a soak test, and does what their users do to them later."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from multiverse.api import JobView, decode
from multiverse.client import Client
from multiverse.core.errors import MultiverseError, Refused
from multiverse_lab.lab.session import LabSession
from multiverse_lab.lab.users import PrivateUser
from multiverse_lab.soak.kinds import WHEN, Action, SoakKind
from multiverse_lab.soak.plan import Submission
from multiverse_lab.soak.record import script

MOST_WAITING = 12
"""Submissions are put off while as many jobs wait. So the queue is rarely empty and does not grow."""

HOLD = 8.0
"""Seconds for which a held job is held."""

INTERVAL = 0.3


@dataclass
class SubmittedJob:
    """A job that was submitted at a Unix time. `refusal` is the message with which it was not accepted; Slurm may have
    accepted it all the same if its reply was lost. `process` is that of srun or salloc."""

    name: str
    kind: SoakKind
    at: float
    job_id: str = ""
    refusal: str = ""
    acted: float | None = None
    process: subprocess.Popen[bytes] | None = None


class Workload:
    """The jobs. `quiet` is held while nothing may be asked of slurmctld; `changed` is when something was last asked."""

    def __init__(self, lab: LabSession, records: Path, stop: asyncio.Event) -> None:
        self._lab, self._records, self._stop = lab, records, stop
        self._live: Mapping[str, str] = {}
        self._unseen: dict[str, float] = {}  # submitted, and not in an observation that is newer
        self.jobs: list[SubmittedJob] = []
        self.quiet = asyncio.Lock()
        self.changed = 0.0

    @property
    def waiting(self) -> int:
        """The jobs that wait at the gate, as far as is known."""
        return sum(state in ("queued", "ungated") for state in self._live.values()) + len(self._unseen)

    @property
    def running(self) -> int:
        return sum(state == "allocated" for state in self._live.values())

    async def submit_all(self, submissions: tuple[Submission, ...], seconds: float) -> None:
        """Submit the planned jobs in their order, each at its time or later. Ends after `seconds`, or when stopped."""
        began = time.monotonic()
        for one in submissions:
            while time.monotonic() - began < one.at or self.waiting >= MOST_WAITING:
                if self._stop.is_set() or time.monotonic() - began >= seconds:
                    return
                await asyncio.sleep(0.1)
            await self.submit(one)

    async def submit(self, one: Submission, user: PrivateUser | None = None) -> SubmittedJob:
        """Submit a job as the lab's user, or as another one."""
        lab = replace(self._lab, user=user) if user else self._lab
        async with self.quiet:
            job = SubmittedJob(one.name, one.kind, time.time())
            self.jobs.append(job)
            try:
                await asyncio.to_thread(self._submit, lab, one, job)
            except Refused as error:
                job.refusal = error.message
            except subprocess.TimeoutExpired as error:
                job.refusal = f"no answer within {error.timeout:g} s"
            self._unseen[job.job_id or job.name] = self.changed = time.time()
        return job

    def _submit(self, lab: LabSession, one: Submission, job: SubmittedJob) -> None:
        kind, name = one.kind, one.name
        again, code = kind.action is Action.REQUEUE, 3 if kind.state == "FAILED" else 0
        text = script(name, self._records, one.seconds, body=kind.body, once=again, code=code)
        options = (f"--job-name={name}", *kind.options)
        if kind.command == "sbatch":
            out = self._records / f"{name}{'_%a' if kind.tasks > 1 else ''}.out"
            job.job_id = lab.submit(text, f"--output={out}", "--open-mode=append", *options)
            return
        path = self._records / f"{name}.sh"
        path.write_text(text)
        step = ("srun", "--quiet") if kind.command == "salloc" else ()
        argv = (kind.command, "--quiet", *options, *step, "bash", str(path))
        job.process = lab.start(self._records / f"{name}.out", *argv)

    async def follow(self) -> None:
        """Observe the jobs and act for their users, until cancelled."""
        with Client(self._lab.settings.socket) as client:
            while True:
                await self.observe_and_act(client)
                await asyncio.sleep(INTERVAL)

    async def observe_and_act(self, client: Client) -> None:
        began = time.time()
        with contextlib.suppress(MultiverseError):
            views = decode(list[JobView], await asyncio.to_thread(client.jobs))
            self._live = {view.job_id: view.state for view in views}
            self._unseen = {job: at for job, at in self._unseen.items() if at > began - 2}
            self._find_ids(views)
        for job in self.jobs:
            if self._is_due(job):
                await self._act(job)

    def _find_ids(self, views: Iterable[JobView]) -> None:
        """Find the ids of jobs that Slurm accepted although its reply was lost: their users act on them, too."""
        ids = {view.name: view.job_id.partition("_")[0] for view in views}
        for job in self.jobs:
            job.job_id = job.job_id or ids.get(job.name, "")

    def _is_due(self, job: SubmittedJob) -> bool:
        action = job.kind.action
        if action is None or job.acted is not None or not job.job_id:
            return False
        if action is Action.RELEASE:
            return time.time() > job.at + HOLD
        return self._live.get(job.job_id) in WHEN[action]

    async def _act(self, job: SubmittedJob) -> None:
        """Do what the job's user does. It is tried again if Slurm does not answer."""
        verbs = {Action.RELEASE: ("scontrol", "release"), Action.REQUEUE: ("scontrol", "requeue")}
        verb = verbs.get(job.kind.action or Action.RELEASE, ("scancel",))
        async with self.quiet:
            with contextlib.suppress(subprocess.TimeoutExpired):
                at = time.time()
                done = await asyncio.to_thread(self._lab.run, *verb, job.job_id)
                job.acted = at if done.returncode == 0 else None
                self.changed = time.time()

    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The commands srun and salloc that have not ended."""
        return [job.process for job in self.jobs if job.process is not None and job.process.poll() is None]
