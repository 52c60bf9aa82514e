"""What the paper has published, and the same figure of our runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from multiverse_lab.bench.clusters import MeanOver, mean_over
from multiverse_lab.bench.paper.records import BARE_METAL, FULL, INSTANT, PaperJobTimes, PaperRunTimes
from multiverse_lab.bench.paper.workload import STEADY, W1, W2
from multiverse_lab.bench.paper_cluster import STEP_OF_BUSY
from multiverse_lab.bench.stats import Estimate, mean, ratio

PaperRuns = Mapping[tuple[str, str], Sequence[PaperRunTimes]]
"""The runs of each workload and kind, one for each seed."""

Ours = Callable[[PaperRuns], MeanOver | None]
"""A figure of our runs; None if one is missing that it needs."""


def by_experiment(runs: Sequence[PaperRunTimes]) -> dict[tuple[str, str], list[PaperRunTimes]]:
    found: dict[tuple[str, str], list[PaperRunTimes]] = {}
    for one in runs:
        found.setdefault((one.workload, one.kind), []).append(one)
    return found


def jobs_in(runs: PaperRuns, workload: str, kind: str) -> list[PaperJobTimes]:
    return [job for one in runs.get((workload, kind), ()) for job in one.jobs]


Value = Callable[[PaperJobTimes], float]


def mean_of(workload: str, kind: str, value: Value) -> Ours:
    return lambda runs: _known(mean([value(job) for job in jobs_in(runs, workload, kind)]))


def most_of(workload: str, kind: str, value: Value) -> Ours:
    """The largest value of any job. It has no interval."""
    return lambda runs: MeanOver(max(map(value, jobs))) if (jobs := jobs_in(runs, workload, kind)) else None


def ratio_of(workload: str, over: str, under: str, value: Value) -> Ours:
    """The ratio of two means."""

    def ours(runs: PaperRuns) -> MeanOver | None:
        sides = [[value(job) for job in jobs_in(runs, workload, kind)] for kind in (over, under)]
        return _known(ratio(sides[0], sides[1], fmean)) if sides[1] and fmean(sides[1]) else None

    return ours


def over_runs(workload: str, kind: str, value: Callable[[PaperRunTimes], float]) -> Ours:
    """A figure of whole runs: of one run the interval is not known."""
    return lambda runs: mean_over([value(one) for one in found]) if (found := runs.get((workload, kind))) else None


def ratio_of_runs(workload: str, over: str, under: str, value: Callable[[PaperRunTimes], float]) -> Ours:
    def ours(runs: PaperRuns) -> MeanOver | None:
        sides = [runs.get((workload, kind), ()) for kind in (over, under)]
        pairs = list(zip(*sides, strict=True)) if len(sides[0]) == len(sides[1]) else []
        return mean_over([value(one) / value(other) for one, other in pairs]) if pairs else None

    return ours


def _known(found: Estimate | None) -> MeanOver | None:
    return MeanOver(found.value, found.low, found.high) if found else None


def clone(job: PaperJobTimes) -> float:
    return job.clone


def provisioning(job: PaperJobTimes) -> float:
    return job.provisioning


def running(job: PaperJobTimes) -> float:
    return job.running


def overhead(name: str) -> Value:
    return lambda job: job.overheads[name]


def makespan(one: PaperRunTimes) -> float:
    return one.makespan


def throughput(one: PaperRunTimes) -> float:
    """Jobs a minute."""
    return len(one.jobs) * 60 / one.makespan


def peak(one: PaperRunTimes) -> float:
    return max(one.utilization) * 100


def at_busy_step(one: PaperRunTimes) -> float:
    """Utilization in the step from which the paper's CPUs are busy with instant clones; 0 if all was done by then."""
    steps = one.utilization
    return steps[STEP_OF_BUSY - 1] * 100 if len(steps) >= STEP_OF_BUSY else 0.0


@dataclass(frozen=True, slots=True)
class PublishedValue:
    """A figure of the paper: a value, or from `low` to `high`, or only words (`said`). Seconds are of the paper."""

    figure: str  # the key of the report's figure that has it
    name: str
    unit: str
    ours: Ours
    low: float | None = None
    high: float | None = None
    said: str = ""

    @property
    def told(self) -> str:
        if self.said or self.low is None or self.high is None:
            return self.said
        span = f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        return f"within {self.high:g} {self.unit}" if not self.low and self.high else f"{span} {self.unit}"


def _value(figure: str, name: str, unit: str, value: float, ours: Ours) -> PublishedValue:
    return PublishedValue(figure, name, unit, ours, value, value)


def _span(figure: str, name: str, unit: str, span: tuple[float, float], ours: Ours) -> PublishedValue:
    return PublishedValue(figure, name, unit, ours, *span)


_RESTART, _NETWORK = overhead("slurm_restart"), overhead("network_configuration")

PUBLISHED_VALUES: Sequence[PublishedValue] = (
    _value("completion-1", "clone, full, mean", "s", 150, mean_of(W1, FULL, clone)),
    _value("completion-1", "clone, full, longest", "s", 450, most_of(W1, FULL, clone)),
    _value("completion-1", "clone, instant, mean", "s", 10, mean_of(W1, INSTANT, clone)),
    _value("completion-1", "provisioning, full, mean", "s", 260, mean_of(W1, FULL, provisioning)),
    _value("completion-1", "provisioning, instant, mean", "s", 36, mean_of(W1, INSTANT, provisioning)),
    _value("completion-1", "provisioning, full / instant", "×", 7.2, ratio_of(W1, FULL, INSTANT, provisioning)),
    _span("overheads-1", "network_configuration, instant, mean", "s", (10, 20), mean_of(W1, INSTANT, _NETWORK)),
    _value("overheads-1", "slurm_restart, full, mean", "s", 20, mean_of(W1, FULL, _RESTART)),
    _value("overheads-1", "slurm_restart, instant, mean", "s", 20, mean_of(W1, INSTANT, _RESTART)),
    _span("completion-2", "clone, instant, longest", "s", (0, 15), most_of(W2, INSTANT, clone)),
    PublishedValue("completion-2", "clone, full, longest", "s", most_of(W2, FULL, clone), said="“very large”"),
    _value("overheads-2", "slurm_restart, full, mean", "s", 20, mean_of(W2, FULL, _RESTART)),
    _value("overheads-2", "slurm_restart, instant, mean", "s", 20, mean_of(W2, INSTANT, _RESTART)),
    _span("completion-steady", "clone, full, longest", "s", (0, 75), most_of(STEADY, FULL, clone)),
    _value("completion-steady", "provisioning, full, mean", "s", 87, mean_of(STEADY, FULL, provisioning)),
    _span("completion-steady", "provisioning, full, longest", "s", (0, 140), most_of(STEADY, FULL, provisioning)),
    _value("completion-steady", "provisioning, instant, mean", "s", 36, mean_of(STEADY, INSTANT, provisioning)),
    _value("completion-steady", "provisioning, full / instant", "×", 2.5,
           ratio_of(STEADY, FULL, INSTANT, provisioning)),
    _span("running", "workload-1, instant, mean", "s", (140, 350), mean_of(W1, INSTANT, running)),
    PublishedValue("running", "workload-1, full / instant", "×", ratio_of(W1, FULL, INSTANT, running), said="alike"),
    PublishedValue("running", "workload-1, instant / bare metal", "×", ratio_of(W1, INSTANT, BARE_METAL, running),
                   said="alike"),
    PublishedValue("running", "workload-2, instant / bare metal", "×", ratio_of(W2, INSTANT, BARE_METAL, running),
                   said="some jobs longer"),
    _span("utilization", "full, most", "%", (0, 50), over_runs(W2, FULL, peak)),
    _span("utilization", f"instant, step {STEP_OF_BUSY}", "%", (80, 100), over_runs(W2, INSTANT, at_busy_step)),
    PublishedValue("utilization", "instant, most", "%", over_runs(W2, INSTANT, peak), 80, 100),
    _value("makespan", "workload-2, full", "s", 868, over_runs(W2, FULL, makespan)),
    _value("makespan", "workload-2, instant", "s", 581, over_runs(W2, INSTANT, makespan)),
    _value("makespan", "workload-2, full / instant", "×", 1.5, ratio_of_runs(W2, FULL, INSTANT, makespan)),
    _value("throughput", "workload-2, instant / full", "×", 1.5, ratio_of_runs(W2, INSTANT, FULL, throughput)),
)  # fmt: skip
