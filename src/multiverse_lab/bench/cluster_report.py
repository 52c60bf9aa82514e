"""The report of workloads on simulated clusters, as a page like that of the paper's evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from multiverse_lab.bench.clusters import SHORT, RunFigures, figure_over
from multiverse_lab.bench.paper.figures import Cell, DataTable, shares_over_time
from multiverse_lab.bench.paper.page import PaperReport, ReportSection
from multiverse_lab.bench.svg import BarChart, BarPanel, StackedBar

Runs = Mapping[str, Sequence[RunFigures]]
"""The runs of each policy or experiment, one for each seed."""

_WARNINGS = (
    "The controller runs in virtual time over simulated hosts and a simulated Slurm: nothing here was measured on "
    "hardware. The times of clones, networks, daemons and commands are inputs; what jobs wait for follows from them.",
    "Intervals are 95 %, of the mean by Student's t over seeds; of one seed none is known. A slowdown is bounded: jobs "
    f"shorter than {SHORT:g} s count as {SHORT:g} s. Fairness is Jain's index of the users' mean bounded slowdowns: 1 "
    "if they are alike.",
)

_CHARTS: Mapping[str, tuple[str, Callable[[RunFigures], float]]] = {
    "Utilization, means": ("%", lambda one: one.utilization * 100),
    "Wait, means": ("s", lambda one: one.wait),
    "Bounded slowdown, means": ("×", lambda one: one.slowdown),
    "Fairness": ("", lambda one: one.fairness),
}


def cluster_report(title: str, facts: Mapping[str, str], sections: Sequence[ReportSection]) -> PaperReport:
    lead = "The controller, unchanged, in virtual time."
    return PaperReport(title, lead, facts, _WARNINGS, (), sections)


def of_policies(runs: Runs, command: str, table: DataTable, values: DataTable) -> ReportSection:
    """The figures of each policy: `table` is shown, and `values` are its numbers."""
    charts = []
    for title, (unit, figure) in _CHARTS.items():
        means = {name: figure_over(found, figure) for name, found in runs.items()}
        bars = tuple(StackedBar(name, (one.value,), one.low, one.high) for name, one in means.items())
        charts.append(BarChart(title, unit, (title.partition(",")[0].lower(),), (BarPanel("", bars),)))
    return ReportSection(
        "policies", "Policies side by side", "Each policy runs the same jobs.", command, tuple(charts), values,
        table=table,
    )  # fmt: skip


def of_utilization(runs: Runs, command: str) -> ReportSection:
    """Utilization over time, of the first seed."""
    first = {name: found[0] for name, found in runs.items()}
    rows: list[tuple[Cell, ...]] = [
        (name, at + 1, at * one.step, round(share, 4))
        for name, one in first.items()
        for at, share in enumerate(one.steps)
    ]
    chart = shares_over_time("CPUs of running jobs", ((name, one.steps, one.step) for name, one in first.items()))
    return ReportSection(
        "utilization", "CPU utilization over time",
        "CPUs of running jobs by the CPUs that may be claimed, with the first seed.", command,
        (chart,), (("run", "step", "begins_s", "of_claimable"), tuple(rows)), table=((), ()),
    )  # fmt: skip
