"""Workloads on simulated clusters: what a cluster is, the policies that are tried on it, and the figures of a run."""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from multiverse.config import (
    BackfillSettings,
    Factor,
    ImageSettings,
    NetworkSettings,
    PacingSettings,
    PlacementSettings,
    PoolSettings,
    Positive,
    Rate,
    Seconds,
    Settings,
    examined_as,
)
from multiverse.core.errors import Broken, Refused
from multiverse.core.model.basics import CloneKind, Depth, Placement, Size
from multiverse.core.model.host import Host, Overcommitment
from multiverse_lab.bench.stats import percentile
from multiverse_lab.bench.workloads import FIRST_UID, USERS
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.fuzz import silent_logs
from multiverse_lab.simulation.guests import GuestBehaviour
from multiverse_lab.simulation.hypervisor import ClonePace, HostLatencies
from multiverse_lab.simulation.machines import ABILITIES, IMAGE_ABILITIES, SimulatedImage
from multiverse_lab.simulation.scenario import Arrival
from multiverse_lab.simulation.scheduler import CommandLatencies
from multiverse_lab.simulation.workload import JobTimes, WorkloadTotals, simulate_workload
from multiverse_lab.simulation.world import WorldSettings


def _in_order(span: tuple[float, float]) -> tuple[float, float]:
    if span[0] > span[1]:
        raise PydanticCustomError("order", "must have the least before the most")
    return span


_Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Span = Annotated[tuple[_Finite, _Finite], AfterValidator(_in_order)]
"""The least and the most seconds that something takes: all between are alike likely."""

STEP = 10.0  # seconds of a step of the utilization over time, which is doubled as there are too many
SHORT = 10.0  # seconds by which slowdown is bounded (D. G. Feitelson et al., 1997)

OVERHEADS = (
    "schedule_clone",
    "get_host",
    "network_configuration",
    "slurmd_customization",
    "slurm_restart",
    "slurm_schedule",
)
"""The overheads that the Multiverse paper names."""

_STEPS, _SAMPLES = 2000, 20_000  # of utilization, and of jobs, that are kept
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t for 1 to 9 degrees of freedom
_ROUND_ROOM = 2048  # MiB of a host for its templates


@dataclass(frozen=True)
class CloneTimes:
    """Of one kind of clone on an unloaded cluster. The platform begins `rate` clones in a second on all hosts, and
    makes `at_once` at the same time; 0: any number."""

    clone: Span
    network: Span = (0.0, 0.0)  # from the start of the VM to its network
    rate: Rate = 0.0
    at_once: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster, as a file describes it. Memory in MiB, times in seconds. CPUs that are claimed beyond `threads` for
    each core compute slower. `pass_takes` is a pass of the controller, and `command` a command of the scheduler."""

    hosts: Positive = 4
    cores: Positive = 16
    memory: Positive = 65536
    memory_per_cpu: Positive = 2048
    cpu_overcommit: Factor = 1.0
    threads: Factor = 1.0
    provisioning: Positive = 16
    instant: CloneTimes = field(default_factory=lambda: CloneTimes((0.08, 0.2)))
    linked: CloneTimes = field(default_factory=lambda: CloneTimes((0.05, 0.15), (1.5, 3.5)))
    full: CloneTimes = field(default_factory=lambda: CloneTimes((1.0, 3.0), (1.5, 3.5)))
    template: Span = (3.0, 5.0)
    plugs: bool = True  # CPUs and memory are plugged into instant clones; else each size has templates of its own
    slurmd: Span = (0.4, 1.2)  # from the network to a daemon that registers
    restart: Span = (0.0, 0.0)  # of slurmctld, to know new nodes; none: nodes are dynamic
    turn: Seconds = 1.0  # between two turns of the scheduler
    command: Span = (0.005, 0.05)
    poll: Seconds = 30.0
    pass_takes: Annotated[float, Field(ge=0)] = 0.02

    @property
    def cpus(self) -> int:
        """CPUs that may be claimed."""
        return self.hosts * int(self.cores * self.cpu_overcommit)


def read_cluster(path: Path) -> ClusterSpec:
    """Raises `Refused`, which names every wrong key."""
    hint = "docs/testing.md describes the file"
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"cannot read {path}: {error}", hint=hint) from error
    spec, wrong = examined_as(ClusterSpec, raw)
    if spec is None or wrong:
        raise Refused(f"{path}: {'; '.join(map(str, wrong))}", hint=hint)
    return spec


@dataclass(frozen=True)
class PolicyChoice:
    """What the controller is told to do. A job takes a joined spare only if it asks for the spare's CPUs."""

    kind: CloneKind = CloneKind.INSTANT
    placement: str = Placement.WORST_FIT.value
    backfill: bool = True
    spares: Depth | None = None
    spare: Size = Size(1, 1024)  # of joined ones


_WORDS: Mapping[str, tuple[str, Any]] = {
    **{kind.value: ("kind", kind) for kind in CloneKind},
    **{depth.value: ("spares", depth) for depth in Depth},
    "backfill": ("backfill", True),
    "no-backfill": ("backfill", False),
    **{placement.value: ("placement", placement.value) for placement in Placement},
}
"""What each word of a policy sets."""


def policy_named(words: str) -> PolicyChoice:
    """A policy from words with `+` between them: full+no-backfill. Raises `Refused` if a word means nothing, or if two
    contradict each other."""
    said: dict[str, str] = {}
    for word in words.split("+"):
        if word not in _WORDS:
            raise Refused(f"there is no policy {word!r}", hint=f"choose among {', '.join(_WORDS)}")
        before = said.setdefault(_WORDS[word][0], word)
        if before != word:
            raise Refused(f"the policy {words!r} says both {before} and {word}", hint="leave one of them out")
    return replace(PolicyChoice(), **{field: _WORDS[word][1] for field, word in said.items()})


def settings_of(spec: ClusterSpec, policy: PolicyChoice) -> Settings:
    """The settings of the daemon."""
    pools: tuple[PoolSettings, ...] = ()
    if policy.spares is not None:
        most = max(2, spec.provisioning)
        pools = (
            PoolSettings(depth=policy.spares, min=2, max=most, cpus=policy.spare.cpus, memory=policy.spare.memory),
        )
    return Settings(
        poll=spec.poll,
        image=ImageSettings(kind=policy.kind),
        pacing=PacingSettings(provisioning=spec.provisioning, spawn_timeout=1200.0, pin_timeout=600.0),
        placement=PlacementSettings(policy.placement),
        backfill=BackfillSettings(enabled=policy.backfill),
        network=NetworkSettings(subnet="10.0.0.0/8", gateway="10.0.0.1"),
        pool=pools,
    )


def world_of(spec: ClusterSpec) -> WorldSettings:
    plug = frozenset() if spec.plugs else frozenset({"plug_cpus", "plug_memory"})
    size = Size(spec.cores, spec.memory + _ROUND_ROOM, 1 << 24)
    over = Overcommitment(cpus=spec.cpu_overcommit)
    kinds = {CloneKind.INSTANT: spec.instant, CloneKind.LINKED: spec.linked, CloneKind.FULL: spec.full}
    return WorldSettings(
        tuple(
            Host(f"h{number}", size, ABILITIES - plug, size, "tcg", overcommit=over)
            for number in range(1, spec.hosts + 1)
        ),
        images=(SimulatedImage("slim", abilities=IMAGE_ABILITIES - plug),),
        users=tuple(range(FIRST_UID, FIRST_UID + USERS)),
        cluster=ClusterSettings(
            cycle=spec.turn,
            restart=spec.restart,
            min_job_age=(2.0, 30.0),
            flavor=Size(spec.cores, spec.memory),
            max_nodes=spec.hosts,
            last_id=1 << 40,
            limits_valid_for=1e9,
        ),
        guests_of={kind: GuestBehaviour(boot=one.network, customize=spec.slurmd) for kind, one in kinds.items()},
        latencies=HostLatencies(
            instant=spec.instant.clone, linked=spec.linked.clone, full=spec.full.clone, template=spec.template
        ),
        paces={kind: ClonePace(one.rate, one.at_once) for kind, one in kinds.items()},
        commands=CommandLatencies(request=spec.command),
        pass_takes=spec.pass_takes,
        threads=spec.threads if spec.cpu_overcommit > spec.threads else 0.0,
        remembers=False,
    )


# --- figures -----------------------------------------------------------------------------------------


class _Values:
    """The mean of all values, and a random sample of them (J. S. Vitter, 1985: algorithm R)."""

    def __init__(self, seed: int) -> None:
        self.count, self.sum, self.most = 0, 0.0, 0.0
        self._rng, self._kept = Random(seed), list[float]()

    def add(self, value: float) -> None:
        self.count, self.sum, self.most = self.count + 1, self.sum + value, max(self.most, value)
        if len(self._kept) < _SAMPLES:
            self._kept.append(value)
        elif (place := self._rng.randrange(self.count)) < _SAMPLES:
            self._kept[place] = value

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def share(self, share: float) -> float:
        return percentile(self._kept, share) if self._kept else 0.0


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Of one run. Times in seconds. Utilization is of the CPUs that may be claimed, in steps of `step` seconds from the
    first submission. `provisioning` is the clone and the overheads without the wait for room (`get_host`), and
    `fairness` is Jain's index of the users' mean bounded slowdowns: 1 if they are alike."""

    jobs: int
    refused: int
    failed: int
    makespan: float
    utilization: float
    peak: float
    step: float
    steps: tuple[float, ...]
    wait: float
    wait95: float
    slowdown: float
    slowdown95: float
    fairness: float
    running: float
    clone: float
    clone_most: float
    provisioning: float
    provisioning_most: float
    overheads: Mapping[str, float]


class Collected:
    """What is kept of jobs as they end: nothing grows with their number."""

    def __init__(self, cpus: int, seed: int) -> None:
        self._cpus, self._step, self._busy = cpus, STEP, [0.0]
        names = ("wait", "slowdown", "running", "clone", "provisioning", *OVERHEADS)
        self._values = {name: _Values(seed) for name in names}
        self._users: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._failed, self._first, self._last = 0, math.inf, 0.0

    def add(self, job: JobTimes) -> None:
        self._first, self._last = min(self._first, job.submitted), max(self._last, job.ended)
        if job.result != "COMPLETED":
            self._failed += 1
        if job.began < 0:
            return
        running = job.ended - job.began
        slowdown = max(1.0, (job.waited + running) / max(SHORT, job.seconds))
        clone, opened = max(0.0, job.created - job.admitted), max(0.0, job.opened - job.submitted)
        parts = {
            "schedule_clone": opened,
            "get_host": max(0.0, job.admitted - job.opened),
            "network_configuration": max(0.0, job.network - job.started),
            "slurmd_customization": max(0.0, job.daemon - job.network),
            "slurm_restart": max(0.0, job.node - job.daemon),
            "slurm_schedule": max(0.0, job.began - job.node),
            "wait": job.waited,
            "slowdown": slowdown,
            "running": running,
            "clone": clone,
            "provisioning": max(0.0, job.began - job.admitted) + opened,
        }
        for name, value in parts.items():
            self._values[name].add(value)
        of_user = self._users[job.uid]
        of_user[0], of_user[1] = of_user[0] + slowdown, of_user[1] + 1
        self._note_busy(job)

    def _note_busy(self, job: JobTimes) -> None:
        while job.ended >= self._step * _STEPS:
            pairs = zip(self._busy[::2], [*self._busy[1::2], 0.0], strict=False)
            self._busy, self._step = [one + other for one, other in pairs], self._step * 2
        last = int(job.ended // self._step)
        self._busy.extend([0.0] * (last + 1 - len(self._busy)))
        for number in range(int(job.began // self._step), last + 1):
            begins = number * self._step
            inside = min(job.ended, begins + self._step) - max(job.began, begins)
            self._busy[number] += job.cpus * inside

    def figures(self, totals: WorkloadTotals) -> RunFigures:
        value, makespan = self._values, self._last - self._first
        if not value["wait"].count:
            if totals.refused:
                raise Refused("no job fits on a host", hint="give hosts more cores or memory, or a job less of them")
            raise Broken("no job has run", hint="give jobs that end within their limits")
        whole = self._cpus * self._step
        slowdowns = [total / count for total, count in self._users.values()]
        return RunFigures(
            jobs=totals.jobs,
            refused=totals.refused,
            failed=self._failed,
            makespan=makespan,
            utilization=sum(self._busy) / (self._cpus * makespan),
            peak=max(self._busy) / whole,
            step=self._step,
            steps=tuple(busy / whole for busy in self._busy),
            wait=value["wait"].mean,
            wait95=value["wait"].share(0.95),
            slowdown=value["slowdown"].mean,
            slowdown95=value["slowdown"].share(0.95),
            fairness=sum(slowdowns) ** 2 / (len(slowdowns) * sum(one * one for one in slowdowns)),
            running=value["running"].mean,
            clone=value["clone"].mean,
            clone_most=value["clone"].most,
            provisioning=value["provisioning"].mean,
            provisioning_most=value["provisioning"].most,
            overheads={name: value[name].mean for name in OVERHEADS},
        )


@dataclass(frozen=True, slots=True)
class MeanOver:
    """The mean over several seeds, with its 95 % interval; of one seed the interval is not known."""

    value: float
    low: float | None = None
    high: float | None = None


def mean_over(values: Sequence[float]) -> MeanOver:
    """Student's t for up to ten seeds, and the normal distribution's 1.96 beyond."""
    mean, free = fmean(values), len(values) - 1
    if not free:
        return MeanOver(mean)
    half = (_T95[free - 1] if free <= len(_T95) else 1.96) * stdev(values) / math.sqrt(len(values))
    return MeanOver(mean, mean - half, mean + half)


Jobs = Callable[[int], Iterable[Arrival]]
"""The jobs of a seed."""


def run_cluster(
    spec: ClusterSpec,
    policy: PolicyChoice,
    arrivals: Iterable[Arrival],
    seed: int,
    advanced: Callable[[WorkloadTotals], None] = lambda totals: None,
) -> RunFigures:
    """Run the jobs through the controller. Raises `Broken` if none ends."""
    collected = Collected(spec.cpus, seed)
    with silent_logs():
        totals = simulate_workload(arrivals, world_of(spec), settings_of(spec, policy), seed, collected.add, advanced)
    return collected.figures(totals)


def run_seeds(
    spec: ClusterSpec,
    policy: PolicyChoice,
    jobs: Jobs,
    seeds: Sequence[int],
    advanced: Callable[[WorkloadTotals], None] = lambda totals: None,
) -> list[RunFigures]:
    return [run_cluster(spec, policy, jobs(seed), seed, advanced) for seed in seeds]


def figure_over(runs: Sequence[RunFigures], figure: Callable[[RunFigures], float]) -> MeanOver:
    return mean_over([figure(one) for one in runs])
