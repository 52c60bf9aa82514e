"""Slurm's physical nodes as hosts (see `ports.Leases`): each lease is a pilot job, named after it.

A pilot belongs to one user, by default this process's. Its commands, and the one that reaches its agent, run as that
user: Slurm lets nobody else, not even root, start a step in a job (slurmctld's step_mgr.c; "Access/permission denied").

slurmctld filters by one user, so the pilots of a user cost what that user's jobs cost. What a pilot's end says about
its node depends on whether that node was in reach all the time, and is remembered here from table to table.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import secrets
import shlex
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from multiverse.config import LEASE_RESERVE, LeaseSettings, Settings
from multiverse.core.errors import Broken, Gone, Refused, Stale, Unknown
from multiverse.core.model.basics import Size
from multiverse.core.model.identity import lease_name
from multiverse.core.model.job import LeasedHost, LeaseSpec, PilotSeen, PilotState
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.reading import parse

_CELL = "\x1f"
ENDING = "ending"
"""Follows the token in the comment of a pilot's job that was told to end: Slurm shows a job as running during its
GraceTime."""

_PILOT = ("JobID", "Name", "State", "Comment", "EndTime", "NodeList", "Reason", "RestartCnt", "Partition")
_NODE = ("NodeList", "Partition", "CPUs", "Memory", "StateComplete")
NODE_FORMAT = ",".join(f"{column}:0{_CELL}" for column in _NODE)

_ENDED = parse.ENDED_WORDS
_DOWN = frozenset(("DOWN", "POWERED_DOWN", "POWERING_DOWN", "FUTURE"))
_SILENT = frozenset(("*", "NOT_RESPONDING", "REBOOT_ISSUED", "UNKNOWN"))
"""States of a node that slurmctld does not reach at this moment, for example because slurmctld has just started."""


@dataclass(frozen=True, slots=True)
class PilotRow:
    """A pilot as squeue shows it."""

    id: str
    name: str
    token: str
    state: PilotState
    word: str
    node: str
    ends: float  # Unix time; of a pilot that has ended: when it did
    reason: str
    restarts: int
    partition: str


class PilotColumns:
    """The format and the reader of a table of pilots. Users choose names and comments, but cannot guess a cell's
    end."""

    def __init__(self, secret: str | None = None) -> None:
        self._end = f"{_CELL}{secret or secrets.token_hex(6)}{_CELL}"
        self.env = {"SQUEUE_FORMAT2": ",".join(f"{column}:0{self._end}" for column in _PILOT)}

    def pilots(self, output: str) -> list[PilotRow]:
        """All rows of jobs that are named as leases are. Raises `Unknown` for an output that is no complete table."""
        rows = output.split(self._end + "\n")
        if rows.pop() or not rows or rows[0].count(self._end) != len(_PILOT) - 1:
            raise Unknown("squeue's table of pilots is incomplete", hint="see whether squeue works on this machine")
        return [self._row(row) for row in rows[1:]]

    def _row(self, row: str) -> PilotRow:
        try:
            job, name, word, comment, end, node, reason, restarts, partition = row.split(self._end)
            token, _, told = comment.partition(" ")
            state = _state(word, told)
            ended = state is PilotState.ENDED
            ends = float(end) if end.isdigit() and (ended or state is not PilotState.PENDING) else inf
            node = "" if node in ("(null)", "") else node
            reason = "" if reason in ("None", "") else reason
            return PilotRow(job, name, token, state, word, node, ends, reason, int(restarts), partition)
        except ValueError as error:
            raise Unknown(f"cannot understand a row of squeue: {error}", hint="report scontrol --version") from error


def _state(word: str, told: str) -> PilotState:
    if word in _ENDED:
        return PilotState.ENDED
    if word in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"):
        return PilotState.PENDING
    if word in ("COMPLETING", "SIGNALING", "STAGE_OUT") or told == ENDING:
        return PilotState.ENDING
    return PilotState.RUNNING


@dataclass(frozen=True, slots=True)
class PhysicalNode:
    """A node that leases are taken from. Memory in MiB. slurmctld ends the jobs of a node that is `down` by itself."""

    name: str
    partition: str
    size: Size
    answers: bool
    down: bool


def read_nodes(output: str) -> list[PhysicalNode]:
    """The rows of a table of nodes; a node of several partitions has several. Raises `Unknown` as above."""
    rows = output.split(_CELL + "\n")
    if rows.pop() or not rows or rows[0].count(_CELL) != len(_NODE) - 1:
        raise Unknown("sinfo's table is incomplete", hint="see whether sinfo works on this machine")
    found = []
    for row in rows[1:]:
        names, partition, cpus, memory, state = row.split(_CELL)
        words = {word.upper() for word in re.findall(r"\w+|\*", state)}
        size = Size(int(cpus.rstrip("+")), int(memory.rstrip("+")))
        down = bool(words & _DOWN)
        answers = not down and not words & _SILENT
        found += [PhysicalNode(name, partition.rstrip("*"), size, answers, down) for name in parse.hosts(names)]
    return found


def leasable(nodes: Collection[PhysicalNode], reserve: int) -> dict[str, Size]:
    """The least size of a host made of a whole node, by partition; `reserve` MiB of a node are not for VMs."""
    found: dict[str, Size] = {}
    for node in nodes:
        least = found.get(node.partition, node.size)
        found[node.partition] = Size(min(least.cpus, node.size.cpus), min(least.memory, node.size.memory))
    return {name: Size(size.cpus, max(0, size.memory - reserve)) for name, size in found.items()}


class PilotHistory:
    """Remembers which pilots were completing while their node was down."""

    def __init__(self) -> None:
        self._clean: dict[str, bool] = {}  # of the latest tables, by id
        self._abandoned: set[str] = set()  # Slurm may have ended these without a word of their nodes
        self._first: dict[str, str] = {}  # the nodes of first runs: a job that is queued again shows none

    def view(self, rows: Collection[PilotRow], nodes: Collection[PhysicalNode]) -> dict[str, PilotSeen]:
        """The pilots by the scheduler's id. Of two rows with one id the one that has not ended counts."""
        by_name = {node.name: node for node in nodes}
        rows = sorted(rows, key=lambda row: row.state is not PilotState.ENDED)
        known = {row.id for row in rows}
        self._abandoned &= known
        self._first = {id_: node for id_, node in self._first.items() if id_ in known}
        self._clean = {row.id: self._judged(row, by_name) for row in rows}
        return {row.id: _seen(row, clean=self._clean[row.id]) for row in rows}

    def _judged(self, row: PilotRow, nodes: Mapping[str, PhysicalNode]) -> bool:
        """Whether nothing of the pilot can be left once it has ended. A job leaves COMPLETING when its node has said
        that all is over, or when the node is set DOWN; the latter shows in the node's state, or in the job's. A node
        that is set DOWN under a job that runs makes it NODE_FAIL. VMs are on the node of the first run alone."""
        if not row.restarts:
            self._first[row.id] = row.node
            if not row.node or row.word == "RUNNING":
                self._abandoned.discard(row.id)
                return True
        node = nodes.get(self._first.get(row.id, ""))
        if row.word == "NODE_FAIL" or (node is not None and node.down):
            self._abandoned.add(row.id)
        return row.id not in self._abandoned and node is not None and node.answers

    def unclean(self, rows: Collection[PilotRow]) -> Iterator[PilotRow]:
        """The pilots that have ended, and may have left something on their nodes."""
        return (row for row in rows if row.state is PilotState.ENDED and not row.restarts and not self._clean[row.id])


def _seen(row: PilotRow, *, clean: bool) -> PilotSeen:
    ended = row.state is PilotState.ENDED
    reason = row.word.lower() if ended else row.reason
    if row.state is PilotState.ENDING and not reason:
        reason = "completing" if row.word == "COMPLETING" else "it was told to end"
    return PilotSeen(row.name, row.token, row.state, row.node, row.ends, reason, row.restarts, clean)


def boot_time(shown: str) -> float:
    """The boot time of a node (Unix time) in the output of `scontrol show node`; 0 if it has none."""
    found = re.search(r"\bBootTime=(\d+)", shown)
    return float(found[1]) if found else 0.0


_TIMES = re.compile(r"\b(JobState|PreemptTime|EndTime)=(\S+)")


def preempted_at(shown: str) -> float:
    """The Unix time at which the GraceTime of a job ends that is being preempted, by `scontrol show job` with times as
    seconds; 0 of any other job. slurmctld kills it then, as one that is cancelled."""
    found = dict(_TIMES.findall(shown))
    in_grace = found.get("JobState") == "RUNNING" and found.get("PreemptTime", "").isdigit()
    end = found.get("EndTime", "")
    return float(end) if in_grace and end.isdigit() else 0.0


class PilotReader:
    """Reads the pilots of our site's leases, and what may be leased."""

    def __init__(
        self, settings: Settings, site: str, commands: SlurmCommands, leased: Collection[LeaseSpec] = ()
    ) -> None:
        """`leased` are the leases of an earlier run: the settings need not name their partitions and users any more."""
        self._commands = commands
        lent = [(one.partition, one.user) for one in settings.lease] + [(one.partition, one.user) for one in leased]
        self._users = {user for _, user in lent}
        self._partitions = ",".join(dict.fromkeys(partition for partition, _ in lent))
        self._prefix = lease_name(site, 1)[:-1]
        self._columns, self._history = PilotColumns(), PilotHistory()

    async def read(self) -> tuple[Mapping[str, PilotSeen], Mapping[str, Size]]:
        """The pilots by the scheduler's id, and the smallest node of each partition. Costs nothing where nothing is
        leased. Raises as `SlurmCommands.run`, and `Unknown` for output that cannot be understood."""
        if not self._partitions:
            return {}, {}
        users = set(map(user_of, self._users))
        tables = await asyncio.gather(*map(self._pilots, sorted(users)))
        rows = [row for table in tables for row in table]
        # Nodes second: a pilot that has ended is judged by what its node was at that time, or later.
        nodes = read_nodes(await self._commands.run("sinfo", "-N", "-p", self._partitions, "-O", NODE_FORMAT))
        pilots = self._history.view(rows, nodes)
        for pilot in await self._rebooted(rows):
            pilots[pilot] = replace(pilots[pilot], clean=True)
        return pilots, leasable(nodes, LEASE_RESERVE)

    async def _pilots(self, user: str) -> list[PilotRow]:
        command = ("squeue", "-a", "-t", "all", "-u", user)
        try:
            output = await self._commands.run(*command, env=self._columns.env, refused=parse.INVALID_USER)
        except Refused:
            return []
        return [row for row in self._columns.pilots(output) if row.name.startswith(self._prefix)]

    async def _rebooted(self, rows: Collection[PilotRow]) -> set[str]:
        """The pilots that may have left something, but whose nodes have booted since they ended."""
        found = set()
        for row in self._history.unclean(rows):
            with suppress(Gone, Refused):
                shown = await self._commands.run("scontrol", "show", "node", row.node, "-o")
                if boot_time(shown) > row.ends:
                    found.add(row.id)
        return found


_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_STEP = ("--ntasks=1", "--overlap", "--mem=0", "--export=ALL", "--chdir=/")
"""Options of a step that shares what its job has, and is not one of several."""


class SlurmLeases:
    """`ports.Leases`."""

    def __init__(self, settings: Settings, commands: SlurmCommands) -> None:
        self._settings, self._commands = settings, commands
        self._columns = PilotColumns()

    async def request(self, lease: LeaseSpec) -> None:
        which = ("-a", "-t", "all", "-u", user_of(lease.user), "-n", lease.name)
        shown = await self._commands.run("squeue", *which, env=self._columns.env)
        if all((pilot.name, pilot.token) != (lease.name, lease.token) for pilot in self._columns.pilots(shown)):
            await self._commands.run("sbatch", *submission(self._settings, lease), via=as_user(lease.user))

    async def release(self, name: str, pilots: Sequence[str]) -> None:
        """scancel(1) leaves jobs of another name alone, and has ended those that have ended."""
        with suppress(Gone, Stale):
            await self._commands.run("scancel", f"--name={name}", *pilots)


def user_of(name: str) -> str:
    """The user of pilots, if the settings name this one; for an empty name the user of this process."""
    return name or pwd.getpwuid(os.geteuid()).pw_name


def as_user(name: str) -> list[str]:
    """The words before a command that run it as that user, with its groups: Slurm compares a step's user and group to
    its job's. Empty for the user of this process. Raises `Refused` if there is no such user."""
    try:
        account = pwd.getpwnam(user_of(name))
    except KeyError as error:
        raise Refused(f"there is no user {name}, whose jobs the pilots are", hint="see user under [[lease]]") from error
    if account.pw_uid == os.geteuid():
        return []
    return ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups", "--"]


def settings_of(settings: Settings, partition: str) -> LeaseSettings:
    """The settings of leases from a partition: the defaults if the settings do not name it any more."""
    return next((one for one in settings.lease if one.partition == partition), LeaseSettings(partition))


def submission(settings: Settings, lease: LeaseSpec) -> list[str]:
    """The arguments of sbatch(1) for the pilot of a lease. The pilot is never queued again: its lease would have ended
    meanwhile, and the VMs' jobs are elsewhere. The time limit is rounded up to minutes."""
    minutes = max(1, -int(-lease.time_limit // 60))
    size = [f"--cpus-per-task={lease.size.cpus}"] if lease.size.cpus else ["--exclusive"]
    if not lease.size.cpus:
        size.append("--mem=0")  # all of the node's
    elif lease.size.memory:
        size.append(f"--mem={lease.size.memory}M")
    return [
        f"--job-name={lease.name}",
        f"--comment={lease.token}",
        f"--partition={lease.partition}",
        *([f"--account={lease.account}"] if lease.account else []),
        "--nodes=1",
        "--ntasks=1",
        *size,
        f"--time={minutes}",
        "--no-requeue",
        "--export=NIL",
        "--chdir=/",
        "--output=/dev/null",
        f"--wrap={pilot_script(settings, lease)}",
    ]


def pilot_script(settings: Settings, lease: LeaseSpec) -> str:
    """The commands of a pilot's batch script. The pilot is in a step of its own, because GraceTime's first signal
    reaches steps only (slurm.conf(5)), and because only a step can start while another one of the job runs."""
    become = settings_of(settings, lease.partition).become
    pilot = [*become, *settings.agent.program, "pilot", lease.name, f"--token={lease.token}"]
    step = [_slurms(settings, "srun"), *_STEP]
    connects = settings.vxlan.enabled or settings.move.enabled or settings.save.enabled
    node = ",$SLURMD_NODENAME" if connects else ""
    return (
        f"export PATH={_PATH} SLURM_CONF={shlex.quote(str(settings.slurm.conf))}; unset SLURM_EXPORT_ENV; "
        # A whole node's batch step has one task, but its job all CPUs.
        f'exec {shlex.join(step)} --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=0 {shlex.join(pilot)} '
        # A command such as sudo(8) removes the environment.
        f'"--job=$SLURM_JOB_ID,$SLURM_CPUS_ON_NODE,${{SLURM_MEM_PER_NODE:-0}}{node}"'
    )


def bring_command(settings: Settings, host: LeasedHost, file: str, image: str) -> list[str]:
    """The command that brings a file to the place where that host expects the archive of an image."""
    there = settings.agent.leases / host.lease.name / "incoming" / f"{image}.tar"
    bring = [_slurms(settings, "sbcast"), f"--jobid={host.pilot}", "--force", file, str(there)]
    return [*as_user(host.lease.user), "env", f"SLURM_CONF={settings.slurm.conf}", f"PATH={_PATH}", *bring]


def _slurms(settings: Settings, program: str) -> str:
    return str(settings.slurm.bin_dir / program) if settings.slurm.bin_dir else program


BROADCAST = 1800.0  # seconds that sbcast may take


class PilotSteps:
    """`bundles.contract.LeasedTransport`: steps in the jobs of pilots. sbcast(1) brings an archive: the input of a step
    is half as fast."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def dial(self, host: LeasedHost) -> Sequence[str]:
        socket = self._settings.agent.leases / host.lease.name / "agent.sock"
        return self._step(host, "dial-stdio", "--leased", f"--socket={socket}")

    def receive(self, host: LeasedHost) -> Sequence[str]:
        """The archive is the file that `bring` brings."""
        owner = pwd.getpwnam(user_of(host.lease.user)).pw_uid
        return self._step(host, "receive-image", f"--leased={host.lease.name}", f"--owner={owner}")

    def _step(self, host: LeasedHost, *words: str) -> list[str]:
        """A command that runs `multiverse agent` with these words in a step of the pilot."""
        settings = self._settings
        become = settings_of(settings, host.lease.partition).become
        environment = ["env", f"SLURM_CONF={settings.slurm.conf}", f"PATH={_PATH}"]
        step = [_slurms(settings, "srun"), f"--jobid={host.pilot}", *_STEP, "--unbuffered", "--quiet"]
        return [*as_user(host.lease.user), *environment, *step, *become, *settings.agent.program, *words]

    def bring(self, host: LeasedHost, image: str, archive: Path) -> None:
        os.chown(archive, pwd.getpwnam(user_of(host.lease.user)).pw_uid, -1)
        argv = bring_command(self._settings, host, str(archive), image)
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=BROADCAST, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Broken(f"sbcast of image {image} failed: {error}", hint="it is repeated") from error
        if done.returncode:
            raise Broken(f"sbcast of image {image} failed: {done.stderr.strip()[-300:]}", hint="it is repeated")
