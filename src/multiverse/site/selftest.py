"""Five jobs that show whether an installation works: submits them, waits for them, and counts what they leave."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from multiverse.api import VmView, decode
from multiverse.client import Client
from multiverse.config import Settings, web_address
from multiverse.core.errors import Gone, MultiverseError
from multiverse.drivers.slurm.command import SlurmCommands

NAME = "multiverse-selftest"  # of the jobs
POLL = 1.0  # seconds
CLEARED_WITHIN = 180.0  # seconds from the end of the last job until its VMs and nodes have to be gone

# An exit status of 3: the job did not run in a VM.
_IN_VM = 'case "$(hostname)" in mv*) ;; *) exit 3 ;; esac; '


class SampleJob(NamedTuple):
    """A job, and how each of its tasks has to end."""

    name: str
    options: tuple[str, ...]
    script: str
    state: str = "COMPLETED"
    exit_code: str = "0:0"  # empty: any, because a job may be cancelled before or after its script has begun
    tasks: int = 1


JOBS = (
    SampleJob("batch", (), _IN_VM + "exit 0"),
    SampleJob(
        "array", ("--array=1-2",), _IN_VM + 'case "$SLURM_ARRAY_TASK_ID" in 1 | 2) exit 0 ;; esac; exit 4', tasks=2
    ),
    SampleJob("two nodes", ("--nodes=2", "--ntasks=2"), _IN_VM + 'test "$(srun hostname | sort -u | wc -l)" = 2'),
    SampleJob("failing", (), _IN_VM + "exit 7", "FAILED", "7:0"),
    SampleJob("cancelled", (), _IN_VM + "sleep 3600", "CANCELLED", ""),
)
_GOES_ON = {
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "RESIZING",
    "SIGNALING",
    "STOPPED",
}


class CheckedPart(NamedTuple):
    """One thing that was tested."""

    name: str
    fine: bool
    said: str


class Task(NamedTuple):
    """A job, or a task of an array, as Slurm shows it."""

    job_id: str
    state: str
    exit_code: str
    nodes: str
    reason: str

    @property
    def is_over(self) -> bool:
        return self.state not in _GOES_ON


def tasks(shown: str) -> Iterator[Task]:
    """The tasks in what `scontrol show job --oneliner` prints. One that is not split off its array has several ids."""
    for line in shown.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if "JobId" in fields:
            array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId")
            own = f"{array}_{task}" if array and task else fields["JobId"]
            nodes = fields.get("NodeList", "").replace("(null)", "")
            yield Task(own, fields.get("JobState", ""), fields.get("ExitCode", ""), nodes, fields.get("Reason", ""))


def judged(job: SampleJob, seen: dict[str, Task]) -> CheckedPart:
    """Whether a job has ended as it had to, by the last that was seen of its tasks."""
    ended = [one for one in seen.values() if one.is_over]
    wrong = [one for one in ended if one.state != job.state or job.exit_code not in ("", one.exit_code)]
    if wrong:
        why = "it did not run in a VM" if wrong[0].exit_code == "3:0" else f"not {_ending(job)}"
        said = f"job {wrong[0].job_id} is {wrong[0].state}, exit code {wrong[0].exit_code}: {why}"
        return CheckedPart(job.name, False, said)
    if len(ended) < job.tasks:
        left = next((one for one in seen.values() if not one.is_over), None)
        what = f"job {left.job_id} is {left.state} ({left.reason})" if left else "Slurm does not show all of its tasks"
        return CheckedPart(job.name, False, f"{what}; see multiverse explain {left.job_id if left else 'JOB'}")
    names = ", ".join(f"{one.job_id} on {one.nodes}" for one in ended)
    return CheckedPart(job.name, True, f"job {names}: {_ending(job)}")


def _ending(job: SampleJob) -> str:
    return f"{job.state}, exit code {job.exit_code}" if job.exit_code else job.state


class SelfTest:
    """One run. `tell` gets each outcome as soon as it is known."""

    def __init__(self, settings: Settings, user: str, tell: Callable[[CheckedPart], None]) -> None:
        self._settings, self._user, self._tell = settings, user, tell
        self._commands = SlurmCommands(settings.slurm)
        self._ids: dict[SampleJob, str] = {}
        self._seen: dict[SampleJob, dict[str, Task]] = {}
        self._vms: set[str] = set()

    async def run(self, limit: float) -> None:
        """Wait for all jobs for up to `limit` seconds, and then for what they leave. Jobs that go on are cancelled."""
        try:
            for job in JOBS:
                await self._submit(job)
            deadline = time.monotonic() + limit
            waiting = [*self._ids]
            while waiting and time.monotonic() < deadline:
                await asyncio.sleep(POLL)
                self._note_vms()
                waiting = [job for job in waiting if not await self._look(job)]
            for job in waiting:
                self._tell(judged(job, self._seen[job]))
        finally:
            for own in self._ids.values():
                with suppress(MultiverseError):  # it is over
                    await self._commands.run("scancel", own)
        await self._count()

    async def _submit(self, job: SampleJob) -> None:
        options = ("--parsable", f"--job-name={NAME}", f"--partition={self._settings.slurm.partition}", "--time=10")
        more = ("--output=/dev/null", "--chdir=/", "--no-requeue", f"--uid={self._user}", *job.options)
        try:
            said = await self._commands.run("sbatch", *options, *more, f"--wrap={job.script}")
        except MultiverseError as error:
            self._tell(CheckedPart(job.name, False, f"the submission was refused: {error.message}"))
            return
        self._ids[job], self._seen[job] = said.strip().partition(";")[0], {}

    async def _look(self, job: SampleJob) -> bool:
        """Whether a job has ended. Its outcome is told then."""
        own, seen = self._ids[job], self._seen[job]
        try:
            shown = await self._commands.run("scontrol", "show", "job", "--oneliner", own)
        except Gone:
            self._tell(judged(job, seen))
            return True
        except MultiverseError:  # slurmctld does not answer now
            return False
        seen.clear()
        seen.update((one.job_id, one) for one in tasks(shown))
        if job.state == "CANCELLED" and any(one.state == "RUNNING" for one in seen.values()):
            with suppress(MultiverseError):  # it is repeated
                await self._commands.run("scancel", own)
        if len(seen) < job.tasks or not all(one.is_over for one in seen.values()):
            return False
        self._tell(judged(job, seen))
        return True

    def _note_vms(self) -> list[str]:
        """The VMs of the jobs that there are now. Raises nothing: without the daemon there are none to see."""
        jobs = {*self._ids.values()}
        with suppress(MultiverseError), Client(self._settings.socket) as client:
            found = [one.name for one in decode(list[VmView], client.vms()) if one.job_id.partition("_")[0] in jobs]
            self._vms.update(found)
            return found
        return []

    async def _count(self) -> None:
        """Wait until nothing is left of the jobs, and tell what is."""
        for _ in range(1 + int(CLEARED_WITHIN / POLL)):
            if not any(left := await self._left()):
                break
            await asyncio.sleep(POLL)
        for name, found in zip(("jobs", "VMs", "nodes", "files"), left, strict=True):
            said = f"left: {', '.join(sorted(found))}" if found else f"none is left of {len(self._vms)} VMs"
            self._tell(CheckedPart(f"{name} that are left", not found, said))
        if self._ids and not self._vms:
            self._tell(CheckedPart("daemon", False, "it showed no VM of any of the jobs; see multiverse status"))

    async def _left(self) -> tuple[list[str], list[str], list[str], list[str]]:
        jobs = (await self._commands.run("squeue", "-h", "-a", f"--name={NAME}", "-o", "%i")).split()
        live = self._note_vms()
        nodes = {*(await self._commands.run("sinfo", "-h", "-a", "-N", "-o", "%N")).split()} & self._vms
        files = [str(path) for name in self._vms if (path := self._settings.qemu.vms / name).exists()]
        return jobs, live, sorted(nodes), files


def page(settings: Settings) -> str:
    """Where the web page is, in a sentence."""
    listen = settings.web.listen
    if not listen:
        return "The web page is off: set listen in [web] of the settings."
    where = f"http://{listen}/" if web_address(listen) else f"the Unix socket {listen}, for your reverse proxy"
    return f"The web page: {where}"
