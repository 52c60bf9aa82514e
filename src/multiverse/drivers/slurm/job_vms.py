"""Slurm's side of VMs inside jobs: the feature of nodes that take such jobs, and what slurmctld says of a run.

A node has the feature as long as our plugin passes a test there. Such jobs have the feature as a constraint
(multiverse_jobs.lua). It is in no slurm.conf: slurmctld takes features from there when it starts or reads its
configuration again, and must not believe then what was not tested. A waiting job whose feature no node has gets the
reason BadConstraints and the priority 0; slurmctld takes both back when features of a node are updated
(job_time_limit in slurmctld/job_mgr.c, from 22.05 to 24.11).
"""

from __future__ import annotations

import re
import time

from ClusterShell.RangeSet import RangeSet

from multiverse.agent.job_tasks import JobRun
from multiverse.core.errors import Broken, Gone, MultiverseError, Refused, Unknown
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.reading import parse

TEST = "MULTIVERSE_PLUGIN_TEST"  # the variable that makes the plugin test itself as srun loads it (spank/multiverse.c)
_LINE = re.compile(r"^multiverse-plugin (.*)$", re.MULTILINE)
_INSTALL_PLUGIN = "build and install the plugin for this release of Slurm, and include its file in plugstack.conf"
_FEATURES = re.compile(r"\b(Available|Active)Features=(\S*)")


async def check_plugin(commands: SlurmCommands, expected: dict[str, str]) -> None:
    """Let Slurm load the plugin on this node, as for a step: by plugstack.conf, and only if it was built for this
    release. The plugin tries what it needs. `expected` are facts that it has to tell of itself, such as `protocol`.
    Raises `Refused` if jobs cannot have VMs here, `Broken` and `Unknown` if that cannot be found out."""
    said = _LINE.findall(await commands.run("srun", "--help", env={TEST: "1"}))
    if len(said) != 2:
        raise Refused("Slurm does not load the plugin on this node", hint=_INSTALL_PLUGIN)
    found = dict(word.partition("=")[::2] for word in said[0].split())
    for key, value in expected.items():
        if found.get(key) != value:
            raise Refused(
                f"the plugin on this node has {key} {found.get(key, 'unknown')}, and this agent {value}",
                hint="install the plugin of this release, and the plugstack file that multiverse site render writes",
            )
    if said[1] != "works":
        raise Refused(f"the plugin does not work on this node: {said[1]}", hint="see the agent's log and job_vms")


async def set_feature(commands: SlurmCommands, node: str, feature: str, wanted: bool) -> bool:
    """Give a node a feature, or take it away. Returns whether the node was changed. Raises `Broken` if Slurm has no
    such node, and the errors of a command."""
    try:
        shown = await commands.run("scontrol", "show", "node", "--oneliner", node)
    except Refused as error:
        raise Broken(f"Slurm knows no node {node}", hint="set job_vms.node to the NodeName of this host") from error
    lists = dict(_FEATURES.findall(shown))
    if lists.keys() != {"Available", "Active"}:
        raise Unknown(f"scontrol shows no features of {node}")
    changed = {key: _changed(text, feature, wanted) for key, text in lists.items()}
    if changed == {key: _words(text) for key, text in lists.items()}:
        return False
    # Both in one update: slurmctld refuses active features that are not available.
    updates = [f"{key}Features={','.join(words)}" for key, words in changed.items()]
    await commands.run("scontrol", "update", f"NodeName={node}", *updates)
    return True


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word and word != "(null)"]


def _changed(text: str, feature: str, wanted: bool) -> list[str]:
    words = _words(text)
    if wanted:
        return words if feature in words else [*words, feature]
    return [word for word in words if word != feature]


async def why_not(commands: SlurmCommands, expected: dict[str, str]) -> MultiverseError | None:
    """Why jobs cannot have VMs on this node; None: they can. `Unknown` if that cannot be found out."""
    try:
        await check_plugin(commands, expected)
    except MultiverseError as error:
        return error
    return None


# Nothing in these columns is a text that a user chooses.
_COLUMNS = "%A|%U|%T|%S|%N"
_ENDED = parse.ENDED_WORDS | parse.PENDING_WORDS | {"COMPLETING", "LAUNCH_FAILED"}
_SHARE = re.compile(r"^ +Nodes=(\S+) CPU_IDs=(\S*) Mem=(\d+)", re.MULTILINE)
_HINT = "check slurmctld with scontrol ping"


class SlurmJobRuns:
    """`agent.job_tasks.JobRuns`. Each call asks slurmctld for one job."""

    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands

    async def run_of(self, job: int) -> JobRun | None:
        try:
            shown = await self._commands.run("squeue", "-h", "-a", "-t", "all", "-j", str(job), "-o", _COLUMNS)
        except Gone:  # slurmctld has forgotten it
            return None
        return parse_run(shown, job)

    async def comment(self, job: int) -> str:
        """A user may write a line that looks like another job's: the first line with this job's id counts."""
        shown = await self._commands.run("squeue", "-h", "-a", "-t", "all", "-j", str(job), "-o", "%A|%k")
        found = next((line for line in shown.splitlines() if line.startswith(f"{job}|")), "|")
        comment = found.partition("|")[2]
        return "" if comment == "(null)" else comment

    async def share(self, job: int, node: str) -> tuple[int, int]:
        """A job's name may contain such a line. The job's control groups limit the VM all the same."""
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
        return JobRun(job, int(uid), int(started), parse.hosts(nodes))
    return None


def parse_share(shown: str, job: int, node: str) -> tuple[int, int]:
    """CPUs and memory of the job on that node, in the output of scontrol with details. Raises `Unknown`."""
    for record in re.split(r"^(?=JobId=)", shown, flags=re.MULTILINE):
        if re.match(rf"JobId={job}\b", record):
            for nodes, cpus, memory in _SHARE.findall(record):
                if node in parse.hosts(nodes):
                    return len(RangeSet(cpus)) if cpus else 0, int(memory)
    raise Unknown(f"scontrol does not show what job {job} has on {node}", hint=_HINT)


_AGE = 60.0  # seconds until Slurm is asked again


class TaskProlog:
    """TaskProlog of slurm.conf, as slurmctld says; asked for at most once a minute."""

    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands
        self._known: str | None = None
        self._asked = -_AGE

    async def path(self) -> str:
        """Its path on this host; empty: there is none. Raises the error of a command only if no path was known before:
        a task must not run without the site's prolog."""
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
