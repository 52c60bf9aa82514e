"""Reads jobs, nodes and limits of slurmctld: all of the cluster, or only of some users, jobs and nodes.

slurmctld filters by one user (`squeue -u`), one job or array (`squeue -j`) and one node (`sinfo -n`); with two of them
named, Slurm's commands load everything and filter it themselves (opts.c of squeue and of sinfo). Each is a process, so
several jobs of a user who has few are read together.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, replace

from multiverse.config import Settings
from multiverse.core.errors import Gone, Refused
from multiverse.core.model.job import (
    Job,
    JobState,
    Maintenance,
    Node,
    NodeReservation,
    NodeState,
    Preemption,
    SchedulerPart,
    SchedulerView,
)
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.reading import parse
from multiverse.drivers.slurm.reading.accounting_limits import AccountingLimits, arrays_left
from multiverse.drivers.slurm.reading.jobs import DetailReader, JobColumns, JobRow, JobTable
from multiverse.drivers.slurm.reading.nodes import NODE_FORMAT, NodeTable, maintenance, reservations
from multiverse.drivers.slurm.reading.preemption import PreemptionReader, preempt_type
from multiverse.drivers.slurm.site import bootstrap as node_bootstrap
from multiverse.drivers.slurm.site import conf
from multiverse.drivers.slurm.site.conf import time_limits

_PROCESSES = 8  # of squeue for one part, at most; the jobs and users that were read longest ago come first
_FEW = 100  # jobs that cost no more than a process
_PER_PROCESS = 500  # jobs of a user that cost as much as one process more (decision 26)
_CHEAP = 0.05  # seconds: a table of all nodes that takes less, for each node that is wanted, is read instead
_ALWAYS_CHEAP = 0.2  # the same for any number: slurmctld logs an error for a single node that it does not know (yet)
_RECENT = 5  # tables of all nodes: the quickest tells what they cost, because others had to wait

_JOBLESS = "slurmctld counts a job on it that has left"


@dataclass(slots=True)
class _Loads:
    """The users, jobs and arrays that squeue is asked for."""

    users: set[int] = field(default_factory=set)
    bases: dict[str, set[str]] = field(default_factory=dict)  # the wanted ids of each job or array
    of_users: dict[int, set[str]] = field(default_factory=dict)  # the wanted ids of each user


class SlurmReader:
    def __init__(self, settings: Settings, site: str, commands: SlurmCommands) -> None:
        self._settings, self._slurm, self._site = settings, settings.slurm, site
        self._commands = commands
        self._jobs = JobTable(JobColumns(physical=bool(settings.overflow)))
        self._nodes = NodeTable()
        self._jobless: Mapping[str, Node] = {}  # nodes that are allocated without a job, as they are shown instead
        self._allocated: Set[str] = frozenset()  # on which the latest whole load showed no job
        self._details = DetailReader(commands)
        self._preemption, self._preempt_type = PreemptionReader(commands), conf.UntilChanged(self._slurm.conf, "")
        self._limits = ("", "")  # the latest texts of associations and of licences
        self._nodes_took: deque[float] = deque(maxlen=_RECENT)
        self._read_at: dict[int | str, float] = {}  # when each user and base was read alone last
        self._nameless: set[int] = set()  # users whom squeue cannot name, since the last whole load

    async def reservations(self) -> tuple[tuple[NodeReservation, ...], tuple[Maintenance, ...]]:
        """The reservations that keep all nodes of VMs from jobs, or will, and those of machines for maintenance."""
        text = await self._commands.run("scontrol", "show", "reservation", "--oneliner")
        return reservations(text, (self._slurm.partition,)), maintenance(text)

    async def preemption(self) -> Preemption | None:
        """Which jobs may preempt which; None if none preempts another."""
        kind = await asyncio.to_thread(self._preempt_type.get, lambda site: preempt_type(site.text))
        overflowing = (one.partition for one in self._settings.overflow)
        return await self._preemption.read(kind, (self._slurm.partition, *overflowing))

    @property
    def nodes(self) -> Mapping[str, Node]:
        return self._nodes.nodes

    async def whole(self) -> tuple[dict[str, Job], dict[str, Node], Mapping[str, int]]:
        """All jobs of our partitions, all nodes of our site, and how much more each limit lets run."""
        names, enforced = await asyncio.to_thread(self._names)
        (rows, limits), nodes = await asyncio.gather(self._whole_jobs(names, enforced), self._all_nodes())
        jobs = await asyncio.to_thread(self._convert_whole, rows, names, limits)
        await self._find_jobless(jobs, nodes)
        return jobs, {**nodes, **self._jobless} if self._jobless else nodes, limits.left

    async def part(
        self, jobs: Mapping[str, int | None], users: Collection[int], nodes: Collection[str]
    ) -> SchedulerPart:
        names, enforced = await asyncio.to_thread(self._names)
        loads = self._plan(jobs, users)
        (rows, read), (found, everything) = await asyncio.gather(self._load(loads, names), self._some_nodes(nodes))
        await self._complete(rows, named=jobs)
        job_ids = self._ids_read(read)
        before = {job_id: job for job_id, job in self._jobs.jobs.items() if job_id in job_ids or job.uid in read.users}
        limits, counted = await self._limits_of_part(rows, before, enforced)
        now = time.time()
        seen = await asyncio.to_thread(self._jobs.convert, rows.values(), names, limits, now)
        self._jobs.keep_part(rows, seen, before.keys() - seen.keys())
        return SchedulerPart(
            jobs=seen,
            nodes={name: self._jobless.get(name, node) for name, node in found.items()},
            job_ids=frozenset(job_ids),
            users=frozenset(read.users),
            node_names=frozenset(nodes),
            all_nodes=everything,
            limits=limits.left if counted else arrays_left(row.record for row in rows.values()),
        )

    # --- jobs --------------------------------------------------------------------------------------

    async def _whole_jobs(self, names: parse.SiteNames, enforced: bool) -> tuple[dict[str, JobRow], AccountingLimits]:
        """Jobs first, limits second: a job that starts in between is counted twice and never missed."""
        rows, _ = await asyncio.gather(self._squeue(names), self._details.read_again())
        await self._complete(rows)
        waits = any(row.waits for row in rows.values())
        licensed = any(row.needs_licences for row in rows.values())
        self._limits = await self._show_limits(associations=enforced and waits, licences=licensed)
        return rows, await asyncio.to_thread(self._accounting, [row.record for row in rows.values()])

    def _convert_whole(
        self, rows: dict[str, JobRow], names: parse.SiteNames, limits: AccountingLimits
    ) -> dict[str, Job]:
        jobs = self._jobs.convert(rows.values(), names, limits, time.time())
        self._jobs.keep_whole(rows, jobs)
        self._details.keep({row.base for row in rows.values() if row.needs_details})
        self._read_at = {key: at for key, at in self._read_at.items() if time.monotonic() - at < 60}
        self._nameless = set()
        return jobs

    async def _squeue(self, names: parse.SiteNames, *which: str) -> dict[str, JobRow]:
        """Rows of jobs of our partitions, also hidden (-a), also ended (-t all), one for each task of an array (-r)."""
        partitions = ",".join(names.partitions)
        output = await self._commands.run(
            *("squeue", "-a", "-r", "-t", "all", "--noconvert", "-p", partitions, *which),
            env=self._jobs.columns.env,
            refused=parse.INVALID_USER,
        )
        return await asyncio.to_thread(self._jobs.read, output, names)

    def _plan(self, jobs: Mapping[str, int | None], users: Collection[int]) -> _Loads:
        """The loads for these jobs and users, with few processes."""
        loads = _Loads(users=set(users) - self._nameless)
        by_user: dict[int | None, set[str]] = {}
        for job_id, uid in jobs.items():
            known = self._jobs.jobs.get(job_id)
            # An id that another user's job has now is read as that job, and not as absent.
            by_user.setdefault(uid if known is None or known.uid == uid else None, set()).add(job_id)
        for uid, ids in by_user.items():
            bases: dict[str, set[str]] = {}
            for job_id in ids:
                bases.setdefault(job_id.partition("_")[0], set()).add(job_id)
            cheap = uid is not None and self._jobs.of_users[uid] <= _FEW + _PER_PROCESS * (len(bases) - 1)
            if uid is not None and uid not in self._nameless and (uid in loads.users or cheap):
                loads.users.add(uid)
                loads.of_users[uid] = ids
            else:
                loads.bases |= bases
        return self._first(loads, hinted=users)

    def _first(self, loads: _Loads, hinted: Collection[int]) -> _Loads:
        """As many of the loads as one part may have: first those that a hint named, then those read longest ago."""
        keys: list[int | str] = [*sorted(loads.users), *sorted(loads.bases)]
        keys.sort(key=lambda key: (key not in hinted, self._read_at.get(key, 0.0)))
        chosen = set(keys[:_PROCESSES])
        self._read_at |= dict.fromkeys(chosen, time.monotonic())
        return _Loads(
            {uid for uid in loads.users if uid in chosen},
            {base: ids for base, ids in loads.bases.items() if base in chosen},
            loads.of_users,
        )

    async def _load(self, loads: _Loads, names: parse.SiteNames) -> tuple[dict[str, JobRow], _Loads]:
        """The rows, and the loads that succeeded."""
        keys = [*(("-u", str(uid)) for uid in loads.users), *(("-j", base) for base in loads.bases)]
        tables = await asyncio.gather(*(self._load_one(names, *key) for key in keys))
        rows = {text: row for table in tables for text, row in (table or {}).items()}
        self._nameless |= {int(value) for (_, value), table in zip(keys, tables, strict=True) if table is None}
        return rows, _Loads(loads.users - self._nameless, loads.bases, loads.of_users)

    async def _load_one(self, names: parse.SiteNames, option: str, value: str) -> dict[str, JobRow] | None:
        """The rows of one user or base; None for a user whom squeue cannot name."""
        try:
            return await self._squeue(names, option, value)
        except Gone:
            return {}
        except Refused:
            if option == "-u":
                return None
            raise

    @staticmethod
    def _ids_read(read: _Loads) -> set[str]:
        return {
            *(job_id for ids in read.bases.values() for job_id in ids),
            *(job_id for uid in read.users for job_id in read.of_users.get(uid, ())),
        }

    async def _complete(self, rows: Mapping[str, JobRow], named: Collection[str] = ()) -> None:
        """Add the details of jobs. `named` are ids of jobs and arrays that a hint may have named."""
        lacking = {row.base for row in rows.values() if row.needs_details}
        if lacking:
            await self._details.complete(lacking, named={key for key in lacking if key[0] in named})
            await asyncio.to_thread(self._add_details, rows, lacking)

    def _add_details(self, rows: Mapping[str, JobRow], lacking: Collection[tuple[str, int]]) -> None:
        for row in rows.values():
            if row.base in lacking:  # of an array that waits, also the running tasks
                row.complete(self._details.of(row.base))

    # --- limits ------------------------------------------------------------------------------------

    async def _show_limits(self, *, associations: bool, licences: bool) -> tuple[str, str]:
        async def show(needed: bool, *what: str) -> str:
            return await self._commands.run("scontrol", "show", *what) if needed else ""

        return await asyncio.gather(show(associations, "assoc_mgr", "flags=assoc,qos"), show(licences, "licenses"))

    async def _limits_of_part(
        self, rows: Mapping[str, JobRow], before: Mapping[str, Job], enforced: bool
    ) -> tuple[AccountingLimits, bool]:
        """The limits, and whether they were counted again: after a job has started or ended, or for the first time."""
        known = set(before)
        running = {job_id for job_id, job in before.items() if job.state in _COUNTED}
        running_now = {parse.job_id_of(row.record) for row in rows.values() if row.record["job_state"] in _RUNNING}
        moved = running != running_now & known or bool(running_now - known)
        associations, licences = self._limits
        wants = enforced and (bool(associations) or any(row.waits for row in rows.values()))
        wants_licences = bool(licences) or any(row.needs_licences for row in rows.values())
        again = (wants and (moved or not associations)) or (wants_licences and (moved or not licences))
        if again:
            self._limits = await self._show_limits(associations=wants, licences=wants_licences)
        records = [row.record for row in rows.values()]
        return await asyncio.to_thread(self._accounting, records), again

    def _accounting(self, records: list[parse.Record]) -> AccountingLimits:
        return AccountingLimits(records, *self._limits, self._slurm.licence)

    # --- nodes -------------------------------------------------------------------------------------

    async def _all_nodes(self) -> dict[str, Node]:
        began = time.monotonic()
        output = await self._commands.run("sinfo", "-a", "-O", NODE_FORMAT)
        self._nodes.nodes = await asyncio.to_thread(self._nodes.read, output, self._site)
        self._nodes_took.append(time.monotonic() - began)
        return self._nodes.nodes

    async def _some_nodes(self, names: Collection[str]) -> tuple[Mapping[str, Node], bool]:
        """The nodes of these names, or all nodes and True if that costs less."""
        if not names:
            return {}, False
        if min(self._nodes_took, default=0.0) < max(_CHEAP * len(names), _ALWAYS_CHEAP):
            return await self._all_nodes(), True
        outputs = await asyncio.gather(
            *(self._commands.run("sinfo", "-a", "-n", name, "-O", NODE_FORMAT) for name in sorted(names))
        )
        found = {name: node for output in outputs for name, node in self._nodes.read(output, self._site).items()}
        rest = {name: node for name, node in self._nodes.nodes.items() if name not in names}
        self._nodes.nodes = {**rest, **found}
        return found, False

    async def _find_jobless(self, jobs: Mapping[str, Job], nodes: Mapping[str, Node]) -> None:
        """Find nodes that stay allocated although no job of any partition is on them: after `scontrol reconfigure`
        slurmctld 22.05 counts the jobs on dynamic nodes twice. Such a node gets no job, so it is shown as drained."""
        occupied = SchedulerView(jobs=jobs).occupied
        before = self._allocated
        self._allocated = {name for name, node in nodes.items() if node.state is NodeState.BUSY} - occupied
        # A job that starts or ends between the two tables is in one of them only, but not twice.
        if not (suspects := before & self._allocated):
            self._jobless = {}
            return
        on_them = ("-w", ",".join(sorted(suspects)), "-t", "R,S,CG", "-o", "%N")
        try:
            shown = await self._commands.run("squeue", "-h", "-a", *on_them)
        except (Gone, Refused):
            return  # one of them is no more
        held = {name for line in shown.splitlines() for name in parse.hosts(line.strip())}
        found = {name: replace(nodes[name], state=NodeState.DRAINED, reason=_JOBLESS) for name in suspects - held}
        self._jobless = {
            name: known if (known := self._jobless.get(name)) == node else node for name, node in found.items()
        }

    # --- the site ----------------------------------------------------------------------------------

    def _names(self) -> tuple[parse.SiteNames, bool]:
        """The names of the site, and whether Slurm enforces limits of associations and QOS."""
        text = node_bootstrap.read(self._slurm.conf)
        default = conf.memory_per_cpu(text, conf.MEMORY_PER_CPU)
        return parse.SiteNames(
            site=self._site,
            partition=self._slurm.partition,
            gate_feature=self._slurm.gate_feature,
            licence=self._slurm.licence,
            memory_per_cpu=default,
            per_account=self._settings.image.per_account,
            time_limits=time_limits(text, self._slurm.partition),
            overflowing=self._settings.overflow,
            preempt_type=preempt_type(text),
        ), conf.limits_are_kept(text)


_RUNNING = ("RUNNING", "SUSPENDED")
_COUNTED = (JobState.RUNNING, JobState.SUSPENDED)
