"""The evaluation of the Multiverse paper on its own cluster, simulated: what its figures are, and what comes out here.

Inputs are unloaded service times, the pacing of clones, and the workload. Means, makespan and utilization follow from
the controller and from what waits for what. The service times that the paper does not give are fitted on workload-1
alone, and checked on workload-2 and on steady arrivals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from multiverse.config import ImageSettings
from multiverse.core.model.basics import CloneKind, Depth, Size
from multiverse_lab.bench.clusters import (
    CloneTimes,
    ClusterSpec,
    MeanOver,
    PolicyChoice,
    RunFigures,
    mean_over,
    run_cluster,
)
from multiverse_lab.bench.workloads import FIRST_UID, USERS
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.scenario import Arrival


def _job_in(vm: Size) -> Size:
    """What a job may ask for in a VM of this size, the guest's kernel and daemons beside it."""
    return Size(vm.cpus, int((vm.memory - ImageSettings().guest_reserve) / 1.02))


SHORT_JOB, LARGE_JOB = _job_in(Size(2, 4096)), _job_in(Size(8, 16384))
RUNNING = (140.0, 350.0)  # seconds
JOBS = 100
EVERY = 10.0  # seconds between steady arrivals
STEP_OF_BUSY = 21  # from which step of 10 s the paper's CPUs are busy with instant clones
WITHIN = 0.1  # a figure is reproduced if it differs by no more than this share

LAMBDA_READINGS: Mapping[str, float] = {
    "10 jobs in each step of 10 s": 1.0,
    "10 jobs a second": 10.0,
    "10 jobs a minute": 1 / 6,
    "10 s between two jobs": 0.1,
}
"""What λ = 10 may mean, with the jobs a second. The paper does not say it."""

ASSUMED = "10 jobs a second"

CLUSTER = ClusterSpec(
    hosts=5,
    cores=44,
    memory=262144,
    threads=2.0,
    provisioning=JOBS,
    instant=CloneTimes((5.0, 14.5), (6.0, 12.2), rate=200.0),
    full=CloneTimes((60.0, 74.5), (1.0, 3.0), rate=0.25),
    template=(0.0, 0.1),
    slurmd=(0.2, 0.5),
    restart=(12.0, 13.0),
    plugs=False,
    command=(0.1, 0.3),
    pass_takes=0.1,
    turn=1.0,
    poll=5.0,
)
"""The cluster of the paper. Given: hosts, rates, and that an unloaded full clone takes no more than 75 s. Fitted on
workload-1: the least that it takes, an instant clone, its network, and the restart. Assumed: two threads for each core,
and templates that exist before the first job comes."""


@dataclass(frozen=True, slots=True)
class PaperRun:
    """An experiment of the paper: its workload, and the kind of clones."""

    workload: str
    kind: CloneKind


def jobs_of(workload: str, seed: int, rate: float) -> Iterator[Arrival]:
    """The jobs of workload-1, workload-2 or steady. The first two are the same jobs."""
    rng, at = Random(f"{seed}/paper"), 0.0
    for number in range(JOBS // 2 if workload == "workload-1" else JOBS):
        gap = rng.expovariate(rate)
        at += EVERY if workload == "steady" else gap
        size, seconds = rng.choice((SHORT_JOB, LARGE_JOB)), rng.uniform(*RUNNING)
        uid = FIRST_UID + number % USERS
        yield Arrival(at, Batch(name=str(number), uid=uid, seconds=seconds, size=size, limit=7200.0))


def cluster_for(workload: str, spec: ClusterSpec = CLUSTER) -> ClusterSpec:
    return replace(spec, cpu_overcommit=2.0) if workload == "workload-2" else spec


Runs = Mapping[PaperRun, Sequence[RunFigures]]

FULL_1, INSTANT_1 = PaperRun("workload-1", CloneKind.FULL), PaperRun("workload-1", CloneKind.INSTANT)
FULL_2, INSTANT_2 = PaperRun("workload-2", CloneKind.FULL), PaperRun("workload-2", CloneKind.INSTANT)
FULL_S, INSTANT_S = PaperRun("steady", CloneKind.FULL), PaperRun("steady", CloneKind.INSTANT)
EXPERIMENTS = (FULL_1, INSTANT_1, FULL_2, INSTANT_2, FULL_S, INSTANT_S)


def run_paper(
    seeds: Sequence[int],
    ended: Callable[[], None],
    spec: ClusterSpec = CLUSTER,
    rate: float = LAMBDA_READINGS[ASSUMED],
    experiments: Sequence[PaperRun] = EXPERIMENTS,
) -> Runs:
    """Run experiments with each seed. `ended` is called after each run."""
    found: dict[PaperRun, list[RunFigures]] = {one: [] for one in experiments}
    for one in experiments:
        for seed in seeds:
            jobs = jobs_of(one.workload, seed, rate)
            found[one].append(run_cluster(cluster_for(one.workload, spec), PolicyChoice(one.kind), jobs, seed))
            ended()
    return found


@dataclass(frozen=True, slots=True)
class Published:
    """A figure of the paper: a value, or from `low` to `high`. `fitted`: parameters were chosen by it. `why`: the
    reason if it is not reproduced."""

    name: str
    low: float
    high: float
    unit: str
    simulated: Callable[[Runs, int], float]  # of a seed, by its place
    fitted: bool = False
    why: str = ""


def _of(run: PaperRun, figure: Callable[[RunFigures], float]) -> Callable[[Runs, int], float]:
    return lambda runs, seed: figure(runs[run][seed])


def _ratio(over: PaperRun, under: PaperRun, figure: Callable[[RunFigures], float]) -> Callable[[Runs, int], float]:
    return lambda runs, seed: figure(runs[over][seed]) / figure(runs[under][seed])


def _provisioning(one: RunFigures) -> float:
    return one.provisioning


def _makespan(one: RunFigures) -> float:
    return one.makespan


def _clone(one: RunFigures) -> float:
    return one.clone


def _clone_most(one: RunFigures) -> float:
    return one.clone_most


def _network(one: RunFigures) -> float:
    return one.overheads["network_configuration"]


def _restart(one: RunFigures) -> float:
    return one.overheads["slurm_restart"]


def _busy_then(one: RunFigures) -> float:
    """Utilization in the step from which the paper's CPUs are busy."""
    return one.steps[STEP_OF_BUSY - 1] if len(one.steps) >= STEP_OF_BUSY else 0.0


_PARTS = "the published parts (clone 10 s, network 10 to 20 s, restart 20 s) are more than the 36 s published for all"
_BESIDE = (
    "published are 110 s beside the clone in a burst, and 12 s with steady arrivals; what VMs wait for then is not "
    "told, and here nothing waits so"
)
_ORDER = "clones begin in the order of their requests here: at 15 a minute none of 50 waits longer than 200 s"
_PACE = (
    "at 15 clones a minute 61 jobs run at a time, 245 s with 5 CPUs on average: 306 of the 440 CPUs that may be "
    "claimed. No more than 220 of them contradicts the published pace or the running times"
)

PUBLISHED: Sequence[Published] = (
    Published("workload-1, clone, full, mean", 150, 150, "s", _of(FULL_1, _clone), fitted=True),
    Published("workload-1, clone, full, most", 450, 450, "s", _of(FULL_1, _clone_most), why=_ORDER),
    Published("workload-1, clone, instant, mean", 10, 10, "s", _of(INSTANT_1, _clone), fitted=True),
    Published("workload-1, provisioning, full, mean", 260, 260, "s", _of(FULL_1, _provisioning), why=_BESIDE),
    Published("workload-1, provisioning, instant, mean", 36, 36, "s", _of(INSTANT_1, _provisioning), fitted=True),
    Published("workload-1, provisioning, full / instant", 7.2, 7.2, "×", _ratio(FULL_1, INSTANT_1, _provisioning),
              why=_BESIDE),
    Published("workload-1, network, instant, mean", 10, 20, "s", _of(INSTANT_1, _network), fitted=True,
              why=_PARTS),
    Published("workload-1, restart, instant, mean", 20, 20, "s", _of(INSTANT_1, _restart), fitted=True),
    Published("steady, clone, full, most", 0, 75, "s", _of(FULL_S, _clone_most), fitted=True),
    Published("steady, provisioning, full, mean", 87, 87, "s", _of(FULL_S, _provisioning)),
    Published("steady, provisioning, full, most", 0, 140, "s", _of(FULL_S, lambda one: one.provisioning_most)),
    Published("steady, provisioning, instant, mean", 36, 36, "s", _of(INSTANT_S, _provisioning)),
    Published("steady, provisioning, full / instant", 2.5, 2.5, "×", _ratio(FULL_S, INSTANT_S, _provisioning)),
    Published("steady, restart, full, mean", 20, 20, "s", _of(FULL_S, _restart)),
    Published("workload-2, clone, instant, most", 0, 15, "s", _of(INSTANT_2, _clone_most)),
    Published("workload-2, restart, full, mean", 20, 20, "s", _of(FULL_2, _restart)),
    Published("workload-2, all done, full", 868, 868, "s", _of(FULL_2, _makespan)),
    Published("workload-2, all done, instant", 581, 581, "s", _of(INSTANT_2, _makespan)),
    Published("workload-2, all done, full / instant", 1.5, 1.5, "×", _ratio(FULL_2, INSTANT_2, _makespan)),
    Published("workload-2, CPUs in use, full, most", 0, 0.5, "", _of(FULL_2, lambda one: one.peak), why=_PACE),
    Published("workload-2, CPUs in use, instant, step 21", 0.8, 1.0, "", _of(INSTANT_2, _busy_then)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A published figure beside the simulated one."""

    figure: str
    published: str
    simulated: MeanOver
    fitted: bool
    within: bool
    why: str  # if it is not within 10 %
    unit: str


def reproduced(runs: Runs) -> list[Reproduced]:
    count = len(next(iter(runs.values())))
    found = []
    for one in PUBLISHED:
        values = [one.simulated(runs, seed) for seed in range(count)]
        mean = mean_over(values)
        within = one.low * (1 - WITHIN) <= mean.value <= one.high * (1 + WITHIN)
        found.append(Reproduced(one.name, told(one), mean, one.fitted, within, "" if within else one.why, one.unit))
    return found


def told(one: Published) -> str:
    if one.low == one.high:
        return f"{one.low:g} {one.unit}".strip()
    return (
        f"within {one.high:g} {one.unit}".strip() if not one.low else f"{one.low:g} to {one.high:g} {one.unit}".strip()
    )


# --- what each of our changes is worth ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChangeTried:
    """The paper's cluster with one thing as it is here."""

    spec: ClusterSpec
    policy: PolicyChoice


_PAPERS = PolicyChoice(CloneKind.INSTANT, backfill=False, placement="first-fit", spare=SHORT_JOB)


def changes() -> dict[str, ChangeTried]:
    """One change each, and all together. The paper places VMs on the first host with room, lets no job go ahead of one
    that waits, and has a template of each size."""
    none = (0.0, 0.0)
    network = replace(CLUSTER.instant, network=none)
    return {
        "as published": ChangeTried(CLUSTER, _PAPERS),
        "no restart": ChangeTried(replace(CLUSTER, restart=none), _PAPERS),
        "no DHCP": ChangeTried(replace(CLUSTER, instant=network), _PAPERS),
        "planner": ChangeTried(CLUSTER, replace(_PAPERS, placement="worst-fit")),
        "hot-plug": ChangeTried(replace(CLUSTER, plugs=True), _PAPERS),
        "parked": ChangeTried(CLUSTER, replace(_PAPERS, spares=Depth.PARKED)),
        "joined": ChangeTried(CLUSTER, replace(_PAPERS, spares=Depth.JOINED)),
        "backfill": ChangeTried(CLUSTER, replace(_PAPERS, backfill=True)),
        "all": ChangeTried(
            replace(CLUSTER, restart=none, instant=network, plugs=True),
            PolicyChoice(CloneKind.INSTANT, spares=Depth.PARKED),
        ),
    }


def run_changes(seeds: Sequence[int], ended: Callable[[], None]) -> dict[str, list[RunFigures]]:
    """Workload-2 with instant clones, with each change."""
    found: dict[str, list[RunFigures]] = {}
    for name, tried in changes().items():
        spec = cluster_for("workload-2", tried.spec)
        for seed in seeds:
            jobs = jobs_of("workload-2", seed, LAMBDA_READINGS[ASSUMED])
            found.setdefault(name, []).append(run_cluster(spec, tried.policy, jobs, seed))
            ended()
    return found


def run_readings(seeds: Sequence[int], ended: Callable[[], None]) -> dict[str, Runs]:
    """Workload-1 and workload-2 with other readings of λ, and with jobs that have no CPU threads of their own."""
    some = (FULL_1, FULL_2, INSTANT_2)
    others = {name: rate for name, rate in LAMBDA_READINGS.items() if name != ASSUMED}
    found = {name: run_paper(seeds, ended, rate=rate, experiments=some) for name, rate in others.items()}
    found["one thread for each core"] = run_paper(seeds, ended, replace(CLUSTER, threads=1.0), experiments=some)
    return found
