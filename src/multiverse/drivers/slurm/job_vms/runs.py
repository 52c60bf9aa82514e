"""What slurmctld says to hosts with VMs inside jobs: of a job that asks for VMs by a task of its own
(`agent.job_tasks.JobRuns`), and of the site's TaskProlog, which tasks in VMs run there."""

from __future__ import annotations

import re
import time

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

from multiverse.agent.job_tasks import JobRun
from multiverse.core.errors import Gone, MultiverseError, Unknown
from multiverse.drivers.slurm.command import SlurmCommands

# Nothing in these columns is a text that a user chooses.
_COLUMNS = "%A|%U|%T|%S|%N"
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PENDING", "PREEMPTED", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "REVOKED", "SPECIAL_EXIT"),
    "TIMEOUT",
)
_SHARE = re.compile(r"^ +Nodes=(\S+) CPU_IDs=(\S*) Mem=(\d+)", re.MULTILINE)
_HINT = "check slurmctld with scontrol ping"


class SlurmJobRuns:
    """See `agent.job_tasks.JobRuns`. Each call asks slurmctld for one job."""

    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands

    async def run_of(self, job: int) -> JobRun | None:
        """See `JobRuns`."""
        try:
            shown = await self._commands.run("squeue", "-h", "-a", "-t", "all", "-j", str(job), "-o", _COLUMNS)
        except Gone:  # slurmctld has forgotten it
            return None
        return parse_run(shown, job)

    async def comment(self, job: int) -> str:
        """See `JobRuns`. Its user may write what looks like the line of another job: the first line counts that has
        this job's id, and all others of the answer are of the same user."""
        shown = await self._commands.run("squeue", "-h", "-a", "-t", "all", "-j", str(job), "-o", "%A|%k")
        found = next((line for line in shown.splitlines() if line.startswith(f"{job}|")), "|")
        comment = found.partition("|")[2]
        return "" if comment == "(null)" else comment

    async def share(self, job: int, node: str) -> tuple[int, int]:
        """See `JobRuns`. A job's name may have such a line in it. Whoever writes one gets a VM that the job's control
        groups limit to what the job has."""
        shown = await self._commands.run("scontrol", "--details", "show", "job", str(job))
        return parse_share(shown, job, node)


def parse_run(shown: str, job: int) -> JobRun | None:
    """The run of this job in squeue's table, which has a line for each task of an array. None if the job does not run.
    Raises `Unknown` for a line that cannot be read."""
    for line in shown.splitlines():
        words = line.split("|")
        if words[0] != str(job):
            continue
        _, uid, state, started, nodes = (*words, "", "", "", "")[:5]
        if state in _ENDED:
            return None
        if not (uid.isdecimal() and started.isdecimal() and state):
            raise Unknown(f"squeue shows job {job} as {line!r}", hint=_HINT)
        return JobRun(job, int(uid), int(started), tuple(NodeSet(nodes, resolver=RESOLVER_NOGROUP)))
    return None


def parse_share(shown: str, job: int, node: str) -> tuple[int, int]:
    """CPUs and memory that the job has on that node, in what scontrol shows with details. Raises `Unknown`."""
    for record in re.split(r"^(?=JobId=)", shown, flags=re.MULTILINE):
        if re.match(rf"JobId={job}\b", record):
            for nodes, cpus, memory in _SHARE.findall(record):
                if node in NodeSet(nodes, resolver=RESOLVER_NOGROUP):
                    return len(NodeSet(f"[{cpus}]", resolver=RESOLVER_NOGROUP)) if cpus else 0, int(memory)
    raise Unknown(f"scontrol does not show what job {job} has on {node}", hint=_HINT)


_AGE = 60.0  # seconds until Slurm is asked again


class TaskProlog:
    """TaskProlog of slurm.conf, as slurmctld says; asked for at most once a minute."""

    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands
        self._known: str | None = None
        self._asked = -_AGE

    async def path(self) -> str:
        """Its path on this host; empty if there is none. What was known before if Slurm does not answer, and if nothing
        was, raises what the command raised: a task must not run without the site's prolog."""
        if time.monotonic() - self._asked >= _AGE:
            try:
                self._known = task_prolog(await self._commands.run("scontrol", "show", "config"))
                self._asked = time.monotonic()
            except MultiverseError:
                if self._known is None:
                    raise
        return self._known or ""


def task_prolog(shown: str) -> str:
    """TaskProlog in what `scontrol show config` prints; empty if there is none."""
    found = re.search(r"^TaskProlog\s*=\s(.*)$", shown, re.MULTILINE)
    return found[1].strip() if found and found[1].strip() != "(null)" else ""
