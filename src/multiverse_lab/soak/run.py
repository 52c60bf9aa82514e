"""Runs a soak test in a lab: prepares the lab, lets jobs and incidents happen, waits for the end, and judges."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from multiverse.api import JobView, TimelineView, decode
from multiverse.client import Client
from multiverse.core.errors import MultiverseError
from multiverse_lab.lab.layout import Layout
from multiverse_lab.lab.session import LabSession
from multiverse_lab.lab.users import PrivateUser, private_users
from multiverse_lab.soak import facts, hog, leftovers
from multiverse_lab.soak.incidents import Incidents, mend
from multiverse_lab.soak.judge import HappenedIncident, Verdict, judge
from multiverse_lab.soak.kinds import NEWCOMER
from multiverse_lab.soak.plan import SoakPlan
from multiverse_lab.soak.workload import Workload

DRAIN_LIMIT = 900.0
"""Seconds for all jobs to end after the last submission."""

LEFT_LIMIT = 120.0
"""Seconds for everything to be gone after the last job."""

LEAST_FLOOR = 5120
"""MiB of memory that the controller keeps available at least, so that an incident never takes all of it."""

NEWCOMERS, FIRST_UID = 16, 30720
SHELL = ".rootsh"
"""A shell in the user's home that runs as root, and only for this user. Jobs kill their slurmd with it."""

SITE = """\
[host]
overcommit = 1.25
floor = {floor}

[pacing]
spawn_timeout = 300.0

[[mounts]]
source = "{source}"
target = "{target}"
type = "nfs4"
options = "{options}"
"""
POOLS = """
[[pool]]
depth = "parked"
min = 1

[[pool]]
depth = "joined"
min = 1
cpus = 1
memory = 150
"""

Progress = Callable[[str], None]


@dataclass
class SoakResult:
    """What a test found. `put_off` jobs of the plan were not submitted, because too many waited. `timelines` has the
    history of each job that is wrong. `died` names the services that ended by themselves."""

    verdicts: list[Verdict] = field(default_factory=list)
    incidents: list[HappenedIncident] = field(default_factory=list)
    timelines: dict[str, list[str]] = field(default_factory=dict)
    died: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    put_off: int = 0
    stopped: bool = False

    @property
    def good(self) -> bool:
        return not self.died and not self.leftovers and not any(one.violations for one in self.verdicts)


def share(where: Layout) -> Path:
    """The directory with the homes of the lab's users, which guests mount. It exists when this returns."""
    homes = where.root / "home"
    where.make()
    homes.mkdir(exist_ok=True)
    homes.chmod(0o755)
    return homes


async def run(lab: LabSession, plan: SoakPlan, stop: asyncio.Event, progress: Progress) -> SoakResult:
    """Run the test until its end, or until `stop` is set. All jobs are over, and judged, when this returns."""
    floor = max(LEAST_FLOOR, hog.available() // 2)
    newcomers = await _prepare(lab, floor)
    records = _records(lab)
    workload = Workload(lab, records, stop)
    incidents = Incidents(lab, workload, newcomers, floor, progress)
    with Client(lab.settings.socket) as client:
        background = [asyncio.create_task(one) for one in (workload.follow(), _tell(workload, progress))]
        happening = [
            asyncio.create_task(workload.submit_all(plan.submissions, plan.seconds)),
            asyncio.create_task(incidents.strike_all(plan.incidents, plan.seconds, stop)),
        ]
        try:
            await asyncio.gather(*happening)
            progress("no more jobs are submitted: waiting for all to end")
            drained = await _until(lambda: stop.is_set() or not _busy(lab, client, workload), DRAIN_LIMIT)
            stopped = await _cancel_all(lab) if stop.is_set() else None
            if stopped is not None:
                drained = await _until(lambda: not _busy(lab, client, workload), DRAIN_LIMIT)
            result = await _judge(lab, client, workload, records, incidents.happened, stopped)
        finally:
            for task in (*background, *happening):
                task.cancel()
            await asyncio.gather(*background, *happening, return_exceptions=True)
            for process in workload.processes():
                process.kill()
            (lab.user.home / SHELL).unlink(missing_ok=True)
        result.put_off = len(plan.submissions) - sum(job.kind is not NEWCOMER for job in workload.jobs)
        if not drained:
            await _cancel_all(lab)
            await _until(lambda: not _busy(lab, client, workload), LEFT_LIMIT)
        incidents.note_deaths()
        result.died = incidents.died
        progress("all jobs are judged: looking for what is left")
        await _end_pools(lab)
        await _until(lambda: not leftovers.of_jobs(lab, client), LEFT_LIMIT)
        result.leftovers = await asyncio.to_thread(leftovers.of_jobs, lab, client)
    return result


async def _prepare(lab: LabSession, floor: int) -> list[PrivateUser]:
    """Give the lab users whom nobody knows, pools, and a little more memory than there is."""
    where = lab.where
    shell = lab.user.home / SHELL
    shutil.copy("/bin/bash", shell)
    shutil.chown(shell, 0, lab.user.uid)
    shell.chmod(0o4750)
    (mount,) = lab.settings.mounts
    options = ",".join(word for word in mount.options.split(",") if word != "nosuid")
    site = SITE.format(floor=floor, source=mount.source, target=mount.target, options=options)
    (where.etc / "site.toml").write_text(site + POOLS)
    homes = where.root / "home"
    users = [(f"newcomer{n}", FIRST_UID + n, homes / f"newcomer{n}") for n in range(NEWCOMERS)]
    newcomers = private_users(users)
    await mend(lab)
    return newcomers


def _records(lab: LabSession) -> Path:
    """An empty directory in which all users of the lab can write."""
    directory = lab.where.root / "home" / "records"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    directory.chmod(0o1777)
    return directory


async def _end_pools(lab: LabSession) -> None:
    """Take the pools out of the settings, so that the controller releases the spares."""
    site = lab.where.etc / "site.toml"
    site.write_text(site.read_text().replace(POOLS, ""))
    await mend(lab)


async def _tell(workload: Workload, progress: Progress) -> None:
    """Say each minute how far the test is."""
    while True:
        await asyncio.sleep(60.0)
        progress(f"{len(workload.jobs)} jobs submitted, {workload.waiting} wait, {workload.running} run")


async def _cancel_all(lab: LabSession) -> float:
    """Cancel all jobs; the time at which this began."""
    began = time.time()
    with suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(lab.run, "scancel", f"--partition={lab.settings.slurm.partition}")
    return began


def _busy(lab: LabSession, client: Client, workload: Workload) -> bool:
    """Whether a job is not over, or whether that is not known."""
    try:
        queue = lab.run("squeue", "-h", "-a", "-o", "%i")
        return bool(workload.processes() or client.jobs() or queue.returncode or queue.stdout.strip())
    except (MultiverseError, subprocess.TimeoutExpired):
        return True


async def _until(reached: Callable[[], bool], limit: float) -> bool:
    """Wait until it is reached. False if it is not within `limit` seconds."""
    deadline = time.monotonic() + limit
    while not await asyncio.to_thread(reached):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(1.0)
    return True


async def _judge(
    lab: LabSession,
    client: Client,
    workload: Workload,
    records: Path,
    happened: list[HappenedIncident],
    stopped: float | None,
) -> SoakResult:
    result = SoakResult(incidents=happened, stopped=stopped is not None)
    known = await facts.accounts(lab)
    ids = {one.job_id.partition("_")[0] for one in known.values()}
    attempts = await asyncio.to_thread(_attempts, client, ids)
    for one in facts.collect(workload.jobs, known, attempts, records, stopped):
        verdict = judge(one, happened)
        result.verdicts.append(verdict)
        if verdict.violations and one.job_id:
            result.timelines[one.name] = _history(client, one.job_id)
    return result


def _attempts(client: Client, ids: Iterable[str]) -> list[JobView]:
    """All attempts of these jobs and arrays. The controller lists the attempts of all jobs only up to a limit."""
    return [view for job in sorted(ids) for view in decode(list[JobView], client.jobs(job))]


def _history(client: Client, job: str) -> list[str]:
    """The journal of the job's attempts, with the time of day."""
    try:
        timelines = decode(list[TimelineView], client.timeline(job))
    except MultiverseError as error:
        return [error.message]
    return [
        f"{_clock(one.wall + entry.at)} {entry.subject} {entry.event} {entry.state} {entry.reason}".rstrip()
        for one in timelines
        for entry in one.entries
    ]


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
