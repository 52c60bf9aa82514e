"""The paper's jobs, scaled to this machine. They are those of the simulation (`paper_cluster`), fewer and shorter.

One CPU here stands for two of the paper's: a short job has 1 CPU and a large one 4, and a cluster of 220 cores is one
of 110 CPUs. `share` is how much of that cluster and of its jobs there is, and `second` what a second of the paper is
here. It follows from the measured time of a full clone, so that running times keep the paper's proportion to it.
In a quick run jobs are shorter, clones are not: steady arrivals come so that a clone and its job together load the
cluster as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from statistics import fmean

from multiverse_lab.bench.paper_cluster import JOBS, LARGE_JOB, RUNNING, jobs_of

SHORT_CPUS, LARGE_CPUS = 1, 4
SHORT_MEMORY, LARGE_MEMORY = 200, 800  # MiB that a job asks for
W1, W2, STEADY = "workload-1", "workload-2", "steady"
WORKLOADS = (W1, W2, STEADY)
PROGRAMS = ("cg", "hpl", "randomaccess")
FULL_PROVISIONING = 87.0
"""Seconds that the paper's full clone takes while few others are made: the mean of steady arrivals."""
LAMBDA = 10.0
"""Jobs a second in a burst, on the whole cluster: the reading of the paper's λ that the simulation takes, too."""
QUICK = 0.25
"""The share of running times in a quick run."""

_CLUSTER_CPUS = 110
_TWICE = 2.0  # CPUs of workload-2 may be claimed so many times


@dataclass(frozen=True, slots=True)
class PaperScale:
    """How the paper's evaluation is scaled. `cpus` are those of the cluster, without over-commitment. A second of the
    paper takes `second` of a clone, and `second` times `shortened` of a job. `computing` is the part of a real CPU that
    one of the cluster has."""

    share: float
    cpus: int
    second: float
    shortened: float
    computing: float

    @property
    def second_of_jobs(self) -> float:
        return self.second * self.shortened

    @property
    def second_of_gaps(self) -> float:
        """Of steady arrivals: a clone and its job together load the cluster as in the paper."""
        running = fmean(RUNNING)
        return self.second * (FULL_PROVISIONING + running * self.shortened) / (FULL_PROVISIONING + running)

    def claimable(self, workload: str) -> int:
        return int(self.cpus * (_TWICE if workload == W2 else 1.0))


def cluster_cpus(share: float) -> int:
    """A multiple of a large job's: a small cluster must not be one that large jobs never fill."""
    return LARGE_CPUS * max(2, round(_CLUSTER_CPUS * share / LARGE_CPUS))


def scaled(share: float, provisioning: float, real_cpus: int, *, quick: bool) -> PaperScale:
    """The scale at which a full clone takes so many seconds. If all CPUs are claimed twice, their programs take all of
    this machine's: the simulation, too, assumes that the paper's cores have two threads each."""
    cpus = cluster_cpus(share)
    computing = real_cpus / (_TWICE * cpus)
    return PaperScale(share, cpus, provisioning / FULL_PROVISIONING, QUICK if quick else 1.0, min(1.0, computing))


@dataclass(frozen=True, slots=True)
class PaperJob:
    """A job that is submitted `at` so many seconds, and runs its program for `seconds` if CPUs are free."""

    number: int
    at: float
    program: str
    cpus: int
    seconds: float

    @property
    def memory(self) -> int:
        return LARGE_MEMORY if self.cpus == LARGE_CPUS else SHORT_MEMORY


def jobs(workload: str, scale: PaperScale, seed: int) -> list[PaperJob]:
    """The first jobs of the paper's workload, so many as `share` says. Workload-1 is the first half of workload-2."""
    count = max(2, round(JOBS * scale.share))
    count = (count + 1) // 2 if workload == W1 else count
    rng = Random(f"{seed}/programs")
    stretch = scale.second_of_gaps / scale.share if workload == STEADY else scale.second_of_jobs
    found = []
    for number, arrival in zip(range(count), jobs_of(workload, seed, LAMBDA * scale.share), strict=False):
        cpus = LARGE_CPUS if arrival.batch.size == LARGE_JOB else SHORT_CPUS
        seconds = arrival.batch.seconds * scale.second_of_jobs
        found.append(PaperJob(number + 1, arrival.at * stretch, rng.choice(PROGRAMS), cpus, seconds))
    return found


RoundCosts = Mapping[str, float]
"""Seconds of a round of a program while the lab does nothing else, by the CPUs that it can use; by `cost_name`."""


def cost_name(program: str, cpus: int) -> str:
    return f"{program}, {cpus} CPU{'s' if cpus > 1 else ''}"


def rounds(job: PaperJob, scale: PaperScale, costs: RoundCosts) -> int:
    """How many rounds take the job's part of the real CPUs; at least one."""
    part = job.cpus * scale.computing * job.seconds
    return max(1, round(part / costs[cost_name(job.program, job.cpus)]))
