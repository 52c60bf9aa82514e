"""The figures of the report: charts, our values beside the published ones, and the data as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from multiverse_lab.bench.clusters import OVERHEADS, MeanOver, mean_over
from multiverse_lab.bench.paper.published import (
    PUBLISHED_VALUES,
    PaperRuns,
    jobs_in,
    makespan,
    throughput,
)
from multiverse_lab.bench.paper.records import KINDS, PaperJobTimes, PaperRunTimes
from multiverse_lab.bench.paper.workload import STEADY, W1, W2, PaperScale
from multiverse_lab.bench.stats import Estimate, mean
from multiverse_lab.bench.svg import BarChart, BarPanel, Chart, ChartLine, LineChart, StackedBar

Cell = str | float | int
DataTable = tuple[tuple[str, ...], tuple[tuple[Cell, ...], ...]]
"""The heads of the columns, and the rows."""


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """A published figure, and ours; None if the run is missing that it needs. `in_paper` is ours in seconds of the
    paper."""

    name: str
    published: str
    unit: str
    ours: MeanOver | None
    in_paper: float | None


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """`number` is that of the paper's figure. `why`: what makes values differ from the published ones."""

    key: str
    number: int
    title: str
    about: str
    charts: tuple[Chart, ...]
    values: tuple[ComparedValue, ...]
    data: DataTable
    why: str = ""


COMPLETION = ("clone", "other overheads", "running")
_TITLES = {W1: "workload-1: a burst, no over-commitment", W2: "workload-2: a burst, CPUs claimed twice",
           STEADY: "steady arrivals"}  # fmt: skip
_SHORT = {W1: "1", W2: "2", STEADY: "steady"}


_OF_JOBS = frozenset({"running", "makespan"})
"""Figures of times that become shorter with the jobs of a quick run."""


def figures(runs: PaperRuns, scale: PaperScale) -> list[PaperFigure]:
    made: list[PaperFigure] = []

    def add(key: str, title: str, about: str, charts: Sequence[Chart], data: DataTable) -> None:
        values = _values(key, runs, scale)
        made.append(PaperFigure(key, 6 + len(made), title, about, tuple(charts), values, data, _WHY.get(key, "")))

    for workload in (W1, W2):
        completion = f"completion-{_SHORT[workload]}"
        add(completion, f"Completion time, {_TITLES[workload]}", _COMPLETION, [_completion(runs, workload)],
            _completion_data(runs, workload))  # fmt: skip
        add(f"overheads-{_SHORT[workload]}", f"Overheads, {_TITLES[workload]}", _OVERHEADS,
            [_overheads(runs, workload)], _overheads_data(runs, workload))  # fmt: skip
    add("completion-steady", f"Completion time and overheads, {_TITLES[STEADY]}", _COMPLETION,
        [_completion(runs, STEADY), _overheads(runs, STEADY)], _completion_data(runs, STEADY))  # fmt: skip
    add("running", "Running times", _RUNNING, [_running(runs)], _running_data(runs))
    add("utilization", "CPU utilization over time, workload-2", _UTILIZATION,
        [_utilization(runs), _machine(runs)], _utilization_data(runs))  # fmt: skip
    add("makespan", "Time until all jobs have run", _MAKESPAN, [_of_runs(runs, "Makespan", "s", makespan)],
        _of_runs_data(runs, "makespan_s", makespan))  # fmt: skip
    add("throughput", "Jobs a minute", _THROUGHPUT, [_of_runs(runs, "Throughput", "jobs/min", throughput)],
        _of_runs_data(runs, "jobs_per_minute", throughput))  # fmt: skip
    return made


_COMPLETION = (
    "One bar for each job, in the order of submission. The clone is the copy and the start of the VM's process; the "
    "other overheads are the six of the next figure, the wait for room among them."
)
_OVERHEADS = (
    "Means over all jobs, under the paper's names, with the interval of their sum. From the start of a VM to its "
    "network is network_configuration, a boot included. slurm_restart is always 0: nodes are dynamic, and slurmctld is "
    "not restarted. On bare metal all is slurm_schedule, the wait for room included."
)
_RUNNING = (
    "Means over all jobs of a workload. Rounds of a program begin at even intervals, so a job takes longer only where "
    "CPUs are lacking. The means of each program, and what its rounds take, which differs with the emulation of CPUs, "
    "are in the data."
)
_UTILIZATION = (
    "Above, CPUs of running jobs by the CPUs that may be claimed, in steps of 10 s of the paper. Below, the use of "
    "this machine's CPUs, which also emulate guests, boot them and run Slurm."
)
_WHY = {
    "completion-1": (
        "Values differ from the published ones for these reasons. The paper's platform begins 15 full clones a minute, "
        "so they wait for each other, and both kinds wait for a restart of slurmctld. Here clones are not paced and "
        "boot side by side, and nothing is restarted."
    ),
    "completion-2": "The paper's platform paces clones. Here a sparse image is copied, at no pace.",
    "completion-steady": (
        "In the paper both kinds wait about 20 s for a restart of slurmctld, most of what an instant clone takes "
        "there. Here nothing is restarted, so the ratio is larger."
    ),
    "utilization": (
        "The pace of full clones holds CPUs back in the paper. Here they are not paced: all jobs that have room run at "
        "the same time, so the published 50 % are no limit."
    ),
}
"""Of figures whose published values are not to be expected here: what differs from what the paper ran."""

_MAKESPAN = "From the first submission to the end of the last job."
_THROUGHPUT = "All jobs of a workload by the time until all have run."


def _values(key: str, runs: PaperRuns, scale: PaperScale) -> tuple[ComparedValue, ...]:
    found, second = [], scale.second_of_jobs if key in _OF_JOBS else scale.second
    for one in PUBLISHED_VALUES:
        if one.figure == key:
            ours = one.ours(runs)
            in_paper = ours.value / second if ours and one.unit == "s" else None
            found.append(ComparedValue(one.name, one.told, one.unit, ours, in_paper))
    return tuple(found)


def _kinds(runs: PaperRuns, workload: str) -> list[str]:
    return [kind for kind in KINDS if runs.get((workload, kind))]


def _first(runs: PaperRuns, workload: str, kind: str) -> PaperRunTimes:
    """The run whose jobs are drawn one by one: that of the first seed."""
    return runs[workload, kind][0]


def _completion(runs: PaperRuns, workload: str) -> BarChart:
    panels = [
        BarPanel(
            kind,
            tuple(
                StackedBar(f"{job.number}", (job.clone, job.other, job.running))
                for job in _first(runs, workload, kind).jobs
            ),
        )
        for kind in _kinds(runs, workload)
    ]
    return BarChart(f"Completion time of each job, {workload}", "s", COMPLETION, tuple(panels))


def _completion_data(runs: PaperRuns, workload: str) -> DataTable:
    heads = ("kind", "seed", "job", "program", "cpus", "rounds", "submitted_s", "began_s", "ended_s", "clone_s")
    rows: list[tuple[Cell, ...]] = [
        (one.kind, one.seed, job.number, job.program, job.cpus, job.rounds,
         *_rounded(job.submitted, job.began, job.ended, job.clone, *(job.overheads[name] for name in OVERHEADS),
                   job.running, job.computed))
        for kind in _kinds(runs, workload) for one in runs[workload, kind] for job in one.jobs
    ]  # fmt: skip
    return (*heads, *(f"{name}_s" for name in OVERHEADS), "running_s", "computed_s"), tuple(rows)


def _rounded(*values: float) -> tuple[float, ...]:
    return tuple(round(value, 3) for value in values)


def _overheads(runs: PaperRuns, workload: str) -> BarChart:
    bars = []
    for kind in _kinds(runs, workload):
        jobs = jobs_in(runs, workload, kind)
        whole = mean([job.other for job in jobs])
        assert whole is not None, "a run has jobs"
        means = tuple(fmean(job.overheads[name] for job in jobs) for name in OVERHEADS)
        bars.append(StackedBar(kind, means, whole.low, whole.high))
    return BarChart(f"Overheads, means, {workload}", "s", OVERHEADS, (BarPanel("", tuple(bars)),))


def _overheads_data(runs: PaperRuns, workload: str) -> DataTable:
    rows: list[tuple[Cell, ...]] = []
    for kind in _kinds(runs, workload):
        for name in OVERHEADS:
            found = mean([job.overheads[name] for job in jobs_in(runs, workload, kind)])
            assert found is not None, "a run has jobs"
            rows.append((kind, name, *_rounded(found.value, found.low, found.high)))
    return ("kind", "overhead", "mean_s", "low_s", "high_s"), tuple(rows)


def _running(runs: PaperRuns) -> BarChart:
    panels = [
        BarPanel(workload, tuple(
            StackedBar(kind, (found.value,), found.low, found.high)
            for kind in _kinds(runs, workload)
            if (found := mean([job.running for job in jobs_in(runs, workload, kind)])) is not None
        ))
        for workload in _TITLES if _kinds(runs, workload)
    ]  # fmt: skip
    return BarChart("Running time, means", "s", ("running",), tuple(panels))


def _running_data(runs: PaperRuns) -> DataTable:
    """Of each program and size: how long jobs ran, and what a round took."""
    rows: list[tuple[Cell, ...]] = []
    for workload, kind in [(name, kind) for name in _TITLES for kind in _kinds(runs, name)]:
        jobs = jobs_in(runs, workload, kind)
        for program, cpus in sorted({(job.program, job.cpus) for job in jobs}):
            some = [job for job in jobs if (job.program, job.cpus) == (program, cpus)]
            found, round_took = mean([job.running for job in some]), _round_took(some)
            assert found is not None and round_took is not None, "some job has it"
            of_round = _rounded(round_took.value, round_took.low, round_took.high)
            asked = round(fmean(job.seconds for job in some), 3)
            rows.append((workload, kind, program, cpus, len(some), asked,
                         *_rounded(found.value, found.low, found.high), *of_round))  # fmt: skip
    heads = ("workload", "kind", "program", "cpus", "jobs", "planned_s", "running_s", "low_s", "high_s")
    return (*heads, "round_s", "round_low_s", "round_high_s"), tuple(rows)


def _round_took(jobs: Sequence[PaperJobTimes]) -> Estimate | None:
    return mean([job.computed / job.rounds for job in jobs])


def _utilization(runs: PaperRuns) -> LineChart:
    return _over_time(runs, "CPUs of running jobs", lambda one: one.utilization)


def _machine(runs: PaperRuns) -> LineChart:
    return _over_time(runs, "This machine's CPUs", lambda one: one.busy)


def _over_time(runs: PaperRuns, title: str, value: Callable[[PaperRunTimes], Sequence[float]]) -> LineChart:
    first = {kind: _first(runs, W2, kind) for kind in _kinds(runs, W2)}
    return shares_over_time(title, ((kind, value(one), one.step) for kind, one in first.items()))


def shares_over_time(title: str, lines: Iterable[tuple[str, Sequence[float], float]]) -> LineChart:
    """A line for each name, with its shares (0 to 1) in steps of so many seconds, and nothing afterwards."""
    drawn = []
    for name, shares, step in lines:
        points = tuple((number * step, share * 100) for number, share in enumerate([*shares, 0.0]))
        drawn.append(ChartLine(name, points, stepped=True))
    return LineChart(title, "seconds from the first submission", "%", tuple(drawn))


def _utilization_data(runs: PaperRuns) -> DataTable:
    rows: list[tuple[Cell, ...]] = [
        (one.kind, one.seed, number + 1, *_rounded(number * one.step, share, busy))
        for kind in _kinds(runs, W2)
        for one in runs[W2, kind]
        for number, (share, busy) in enumerate(zip(one.utilization, _filled(one), strict=True))
    ]
    return ("kind", "seed", "step", "begins_s", "of_claimable", "of_machine"), tuple(rows)


def _filled(one: PaperRunTimes) -> list[float]:
    """As many steps of the machine's use as of the jobs'."""
    count = len(one.utilization)
    return list(chain(one.busy, [0.0] * count))[:count]


def _of_runs(runs: PaperRuns, title: str, unit: str, value: Callable[[PaperRunTimes], float]) -> BarChart:
    panels = []
    for workload in _TITLES:
        bars = []
        for kind in _kinds(runs, workload):
            found = mean_over([value(one) for one in runs[workload, kind]])
            bars.append(StackedBar(kind, (found.value,), found.low, found.high))
        if bars:
            panels.append(BarPanel(workload, tuple(bars)))
    return BarChart(title, unit, (title.lower(),), tuple(panels))


def _of_runs_data(runs: PaperRuns, name: str, value: Callable[[PaperRunTimes], float]) -> DataTable:
    rows: list[tuple[Cell, ...]] = [
        (workload, kind, one.seed, len(one.jobs), one.again, round(value(one), 3))
        for workload in _TITLES
        for kind in _kinds(runs, workload)
        for one in runs[workload, kind]
    ]
    return ("workload", "kind", "seed", "jobs", "again", name), tuple(rows)


def summary(made: Sequence[PaperFigure]) -> Mapping[str, object]:
    """The published figures and ours, as `--json` prints them."""
    return {
        f"{one.key}, {value.name}": {
            "published": value.published,
            "ours": value.ours and {"value": value.ours.value, "low": value.ours.low, "high": value.ours.high},
            "unit": value.unit,
            "in_paper_seconds": value.in_paper,
        }
        for one in made
        for value in one.values
    }
