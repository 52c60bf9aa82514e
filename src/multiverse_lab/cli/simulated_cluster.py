"""`multiverse simulate cluster`: workloads on clusters that are larger than this machine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.core.errors import Refused
from multiverse.core.model.basics import number_of
from multiverse_lab.cli.report import commit_here, day
from multiverse_lab.cli.report_files import check_destinations, command_here, say_where, write_report

if TYPE_CHECKING:  # the simulator is an extra, and its imports must not delay other commands
    from multiverse_lab.bench.clusters import ClusterSpec, Jobs, MeanOver, RunFigures
    from multiverse_lab.bench.paper.page import PaperReport
    from multiverse_lab.bench.paper_cluster import Reproduced, Runs
    from multiverse_lab.simulation.workload import WorkloadTotals

GENERATED = "poisson, bursts, days, heavy or lublin"
LONGEST = 10 * 365 * 24 * 60.0
"""Minutes of jobs that are drawn. The controller looks around every few seconds, also in virtual time."""


Described = Annotated[str, typer.Option(help="A TOML file that describes it, or paper: that of the Multiverse paper.")]
Policy = Annotated[
    str,
    typer.Option(help="Words with + between them: full, instant, auto, a placement, no-backfill, parked, joined."),
]


def cluster(
    cluster: Described,
    trace: Annotated[Path | None, typer.Option(help="A trace in the Standard Workload Format.")] = None,
    generate: Annotated[str, typer.Option(help=f"Draw the jobs: {GENERATED}.")] = "",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="How many jobs, at most.")] = 1000,
    rate: Annotated[float, typer.Option(min=0, help="Jobs a minute; 0: for 70 % of the CPUs.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the jobs and of the simulation.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="So many seeds from that one; figures are their means.")] = 1,
    policy: Policy = "instant",
    compare: Annotated[str, typer.Option(help="Further policies, with commas, on the same jobs.")] = "",
    html: Annotated[Path | None, typer.Option("--html", help="Also write a report, with figures, here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a workload through the controller in virtual time, on a cluster of any size.

    Without a workload, --cluster paper repeats the paper's own ones, and prints the published figures beside."""
    from multiverse_lab.bench import clusters, paper_cluster

    check_destinations(html)
    if cluster == "paper" and trace is None and not generate:
        _paper(range(seed, seed + seeds), html, json=json)
        return
    spec = paper_cluster.CLUSTER if cluster == "paper" else clusters.read_cluster(Path(cluster))
    names = [policy, *filter(None, map(str.strip, compare.split(",")))]
    policies = {name: clusters.policy_named(name) for name in names}
    drawn, jobs = _jobs(spec, trace, generate, jobs, rate)
    runs: dict[str, list[RunFigures]] = {}
    every = range(seed, seed + seeds)
    total = len(policies) * seeds * jobs
    with progress.working(f"{number_of(jobs, 'job')} on {number_of(spec.hosts, 'host')}") as work:
        for number, (name, chosen) in enumerate(policies.items()):
            work.say(name)
            ended = itertools.count(number * seeds * jobs)
            runs[name] = clusters.run_seeds(spec, chosen, drawn, every, partial(_advance, work, ended, total))
    if html is not None:
        write_report(_report(spec, runs, every), html)
    if json:
        render.as_json(_document(spec, runs, every))
    else:
        _print(spec, runs, every)
        say_where(html)


def _advance(work: progress.Work, ended: Iterator[int], total: int, _: WorkloadTotals) -> None:
    work.advance(next(ended), total)


def _jobs(spec: ClusterSpec, trace: Path | None, generate: str, count: int, rate: float) -> tuple[Jobs, int]:
    """The jobs of each seed, and how many they are."""
    from multiverse_lab.bench import swf, workloads

    if (trace is None) == (not generate):
        said = "there are no jobs" if trace is None else "--trace and --generate are two workloads"
        raise Refused(said, hint=f"give either --trace FILE or --generate with {GENERATED}")
    if trace is not None:
        found = swf.read(trace)[:count]
        return lambda _: workloads.arrivals(found, spec.cores, spec.memory_per_cpu), len(found)
    if generate not in workloads.GENERATORS:
        raise Refused(f"nothing generates {generate!r}", hint=f"choose {GENERATED}")
    if rate and count / rate > LONGEST:
        raise Refused(f"{number_of(count, 'job')} at {rate:g} a minute take more than ten years", hint="raise --rate")
    make = workloads.GENERATORS[generate]

    def draw(seed: int) -> workloads.DrawnJobs:
        one = workloads.DrawnJobs(count, rate or 1.0, min(spec.cores * spec.hosts, spec.cores * 16), seed)
        if rate:
            return one
        work = workloads.mean_work(make(workloads.DrawnJobs(min(count, 2000), 1.0, one.widest, seed)))
        return workloads.DrawnJobs(count, 0.7 * spec.cpus * 60 / work, one.widest, seed)

    return lambda seed: workloads.arrivals(make(draw(seed)), spec.cores, spec.memory_per_cpu), count


Figure = tuple[Callable[["RunFigures"], float], Callable[[float], str]]

FIGURES: Mapping[str, Figure] = {
    "makespan": (lambda one: one.makespan, render.duration),
    "utilization, mean": (lambda one: one.utilization, lambda value: f"{value:.1%}"),
    "utilization, peak": (lambda one: one.peak, lambda value: f"{value:.1%}"),
    "wait, mean": (lambda one: one.wait, render.duration),
    "wait, 95 %": (lambda one: one.wait95, render.duration),
    "bounded slowdown, mean": (lambda one: one.slowdown, lambda value: f"{value:.2f}"),
    "bounded slowdown, 95 %": (lambda one: one.slowdown95, lambda value: f"{value:.2f}"),
    "fairness": (lambda one: one.fairness, lambda value: f"{value:.3f}"),
    "running, mean": (lambda one: one.running, render.duration),
    "clone, mean": (lambda one: one.clone, render.duration),
    "provisioning, mean": (lambda one: one.provisioning, render.duration),
}


def _of_overhead(name: str) -> Figure:
    return lambda one: one.overheads[name], render.duration


def figures() -> dict[str, Figure]:
    """The rows of the table: the figures, and the overheads under the paper's names."""
    from multiverse_lab.bench.clusters import OVERHEADS

    return {**FIGURES, **{name: _of_overhead(name) for name in OVERHEADS}}


def _print(spec: ClusterSpec, runs: Mapping[str, Sequence[RunFigures]], seeds: range) -> None:
    cluster = f"{number_of(spec.hosts, 'host')} of {spec.cores} cores"
    jobs, *ends = _jobs_said(next(iter(runs.values()))[0])
    render.say(" ".join([f"{jobs} on {cluster}, simulated, {_seeds(seeds)}.", *ends]), indent=0)
    table = render.table("", *runs, right=tuple(runs), fold=tuple(runs))
    for row in _rows(runs):
        table.add_row(*row)
    render.show(table, "Nothing was simulated.")
    for name, found in runs.items():
        console.print(f"{name}: utilization in {len(found[0].steps)} steps of {render.duration(found[0].step)}",
                      markup=False, highlight=False)  # fmt: skip
        console.print(_sparks(found[0].steps, console.width), markup=False, highlight=False)


def _jobs_said(run: RunFigures) -> list[str]:
    """How many jobs there were, and sentences about those that did not complete."""
    said = [number_of(run.jobs, "job")]
    if run.refused:
        said.append(f"Refused, as they fit on no host: {number_of(run.refused, 'job')}.")
    if run.failed:
        said.append(f"Not completed: {number_of(run.failed, 'job')}.")
    return said


def _rows(runs: Mapping[str, Sequence[RunFigures]]) -> list[tuple[str, ...]]:
    return [
        (name, *(shown(_mean(found, figure), show) for found in runs.values()))
        for name, (figure, show) in figures().items()
    ]


def _facts(spec: ClusterSpec, seeds: range) -> dict[str, str]:
    over = f", {spec.cpus:,} CPUs that may be claimed" if spec.cpu_overcommit > 1 else ""
    return {
        "command": command_here(),
        "date": f"{day(time.time())}, commit {commit_here()[:12] or 'unknown'}",
        "seeds": ", ".join(map(str, seeds)),
        "cluster": f"{number_of(spec.hosts, 'host')} of {spec.cores} cores and {spec.memory / 1024:.0f} GiB{over}",
    }


def _report(spec: ClusterSpec, runs: Mapping[str, Sequence[RunFigures]], seeds: range) -> PaperReport:
    from multiverse_lab.bench.cluster_report import cluster_report, of_policies, of_utilization

    numbers: list[tuple[str | float | int, ...]] = []
    for policy, found in runs.items():
        for name, (figure, _) in figures().items():
            one = _mean(found, figure)
            numbers.append((policy, name, one.value, *("" if at is None else at for at in (one.low, one.high))))
    values = (("policy", "figure", "value", "low", "high"), tuple(numbers))
    sections = [
        of_policies(runs, command_here(), (("", *runs), tuple(_rows(runs))), values),
        of_utilization(runs, command_here()),
    ]
    facts = {**_facts(spec, seeds), "jobs": ". ".join(_jobs_said(next(iter(runs.values()))[0]))}
    return cluster_report("A workload on a simulated cluster", facts, sections)


def _seeds(seeds: range) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"means over seeds {seeds[0]} to {seeds[-1]}, with 95 % intervals"


def shown(value: MeanOver, show: Callable[[float], str]) -> str:
    """A mean, and half the width of its interval."""
    if value.high is None:
        return show(value.value)
    return f"{show(value.value)} ±{show(value.high - value.value)}"


def _sparks(steps: Sequence[float], width: int) -> str:
    """Utilization as a line of blocks, each the mean of some steps."""
    blocks = " ▁▂▃▄▅▆▇█"
    each = max(1, -(-len(steps) // max(1, width)))
    means = [sum(part) / len(part) for at in range(0, len(steps), each) if (part := steps[at : at + each])]
    return "".join(blocks[min(8, round(mean * 8))] for mean in means)


def _document(spec: ClusterSpec, runs: Mapping[str, Sequence[RunFigures]], seeds: range) -> dict[str, object]:
    from multiverse_lab.bench.clusters import figure_over

    return {
        "command": command_here(),
        "date": day(time.time()),
        "commit": commit_here(),
        "cluster": asdict(spec),
        "seeds": list(seeds),
        "policies": {
            name: {
                "figures": {key: asdict(figure_over(found, figure)) for key, (figure, _) in figures().items()},
                "runs": [asdict(one) for one in found],
            }
            for name, found in runs.items()
        },
    }


# --- the paper's own workloads ------------------------------------------------------------------------


def _paper(seeds: range, html: Path | None, *, json: bool) -> None:
    from multiverse_lab.bench import paper_cluster

    readings = len(paper_cluster.LAMBDA_READINGS)
    count = len(seeds) * (len(paper_cluster.EXPERIMENTS) + len(paper_cluster.changes()) + 3 * readings)
    with progress.working("the workloads of the paper") as work:
        done = itertools.count(1)
        runs = paper_cluster.run_paper(seeds, lambda: work.advance(next(done), count))
        work.say("other readings")
        other = {
            paper_cluster.ASSUMED: runs,
            **paper_cluster.run_readings(seeds, lambda: work.advance(next(done), count)),
        }
        work.say("one change at a time")
        changed = paper_cluster.run_changes(seeds, lambda: work.advance(next(done), count))
    document = _paper_document(seeds, runs, other, changed)
    if html is not None:
        write_report(_paper_report(seeds, runs, other, changed, document), html)
    if json:
        render.as_json(document)
    else:
        _print_paper(seeds, runs, other, changed)
        say_where(html)


def _paper_report(
    seeds: range,
    runs: Runs,
    other: Mapping[str, Runs],
    changed: Mapping[str, list[RunFigures]],
    document: Mapping[str, Any],
) -> PaperReport:
    from multiverse_lab.bench import paper_cluster
    from multiverse_lab.bench.cluster_report import cluster_report, of_utilization
    from multiverse_lab.bench.paper.page import ReportSection
    from multiverse_lab.bench.paper.sections import of_simulation

    heads = ("", *(name.lower() for name in CHANGE_FIGURES))
    readings = ReportSection(
        "readings", "What λ = 10 may mean",
        f"The paper does not say it. Assumed: {paper_cluster.ASSUMED}, with which workload-1 agrees best. Clones of "
        "workload-1, and when all jobs of workload-2 are done. Half of an interval is after ±.", command_here(), (),
        (("reading", "clone, full, s", "all done, full, s", "all done, instant, s", "full / instant"),
         tuple(_reading_rows(other))),
    )  # fmt: skip
    changes = ReportSection(
        "changes", "One change at a time",
        "Workload-2 with instant clones, with one thing at a time as it is here. Half of an interval is after ±.",
        command_here(), (),
        (heads, tuple(_change_rows(changed))),
    )  # fmt: skip
    named = {f"{one.workload}, {one.kind}": found for one, found in runs.items()}
    sections = [of_simulation(document, list(seeds)), readings, changes, of_utilization(named, command_here())]
    facts = _facts(paper_cluster.CLUSTER, seeds)
    return cluster_report("The Multiverse paper on its own cluster, simulated", facts, sections)


def _reading_rows(other: Mapping[str, Runs]) -> list[tuple[str, ...]]:
    return [(name, *(shown(one, _plain) for one in _reading(runs))) for name, runs in other.items()]


def _change_rows(changed: Mapping[str, list[RunFigures]]) -> list[tuple[str, ...]]:
    return [
        (name, *(shown(_mean(found, figure), show) for figure, show in CHANGE_FIGURES.values()))
        for name, found in changed.items()
    ]


def _print_paper(seeds: range, runs: Runs, other: Mapping[str, Runs], changed: Mapping[str, list[RunFigures]]) -> None:
    from multiverse_lab.bench import paper_cluster

    found = paper_cluster.reproduced(runs)
    render.say(f"The Multiverse paper on its own cluster, simulated, {_seeds(seeds)}.", indent=0)
    table = render.table("FIGURE", "PUBLISHED", "SIMULATED", "", right=("PUBLISHED", "SIMULATED"), fold=("FIGURE",))
    for one in found:
        how = "fitted" if one.fitted else "within 10 %" if one.within else "differs"
        table.add_row(one.figure, one.published, shown(one.simulated, _plain), how)
    render.show(table, "Nothing was simulated.")
    render.say(summary_of(found), indent=0)
    for why in dict.fromkeys(one.why for one in found if one.why):
        render.say(f"{', '.join(one.figure for one in found if one.why == why)}: {why}.")
    assumed = (
        f"Assumed: {paper_cluster.ASSUMED}, with which workload-1 agrees best. Assumed, knowing workload-2: two "
        "threads for each core, so that CPUs claimed twice compute at full speed, and utilization of the CPUs that may "
        "be claimed"
    )
    render.say(f"The paper says λ = 10, and not of what. {assumed}. How much hangs on that:", indent=0)
    table = render.table("READING", "CLONE, FULL", "ALL DONE, FULL", "ALL DONE, INSTANT", "RATIO")
    for row in _reading_rows(other):
        table.add_row(*row)
    render.show(table, "Nothing was simulated.")
    render.say("Workload-2 with instant clones, with one thing at a time as it is here:", indent=0)
    table = render.table("", *CHANGE_FIGURES, fold=tuple(CHANGE_FIGURES))
    for row in _change_rows(changed):
        table.add_row(*row)
    render.show(table, "Nothing was simulated.")


def summary_of(found: Sequence[Reproduced]) -> str:
    free = [one for one in found if not one.fitted]
    return f"{sum(one.within for one in free)} of {len(free)} figures that were not fitted are within 10 %."


def _plain(value: float) -> str:
    return f"{value:.0f}" if value >= 20 else f"{value:.2f}"


CHANGE_FIGURES: Mapping[str, Figure] = {
    "PROVISIONING": (lambda one: one.provisioning, render.duration),
    "WAIT": (lambda one: one.wait, render.duration),
    "ALL DONE": (lambda one: one.makespan, render.duration),
    "UTILIZATION": (lambda one: one.utilization, lambda value: f"{value:.1%}"),
}


def _reading(runs: Runs) -> list[MeanOver]:
    """The clone of workload-1, and when all jobs of workload-2 are done."""
    from multiverse_lab.bench.clusters import mean_over
    from multiverse_lab.bench.paper_cluster import FULL_1, FULL_2, INSTANT_2

    full, instant = ([one.makespan for one in runs[which]] for which in (FULL_2, INSTANT_2))
    ratios = [one / other for one, other in zip(full, instant, strict=True)]
    return [mean_over(values) for values in ([one.clone for one in runs[FULL_1]], full, instant, ratios)]


def _mean(runs: Sequence[RunFigures], figure: Callable[[RunFigures], float]) -> MeanOver:
    from multiverse_lab.bench.clusters import figure_over

    return figure_over(runs, figure)


def _paper_document(
    seeds: range, runs: Runs, other: Mapping[str, Runs], changed: Mapping[str, list[RunFigures]]
) -> dict[str, Any]:
    from multiverse_lab.bench import paper_cluster

    names = ("clone_full", "all_done_full", "all_done_instant", "ratio")
    found = paper_cluster.reproduced(runs)
    return {
        "seeds": list(seeds),
        "cluster": asdict(paper_cluster.CLUSTER),
        "assumed": {"lambda": paper_cluster.ASSUMED},
        "reproduced": [asdict(one) for one in found],
        "summary": summary_of(found),
        "readings": {
            name: dict(zip(names, map(asdict, _reading(of_reading)), strict=True)) for name, of_reading in other.items()
        },
        "changes": {
            name: {key.lower(): asdict(_mean(found, figure)) for key, (figure, _) in CHANGE_FIGURES.items()}
            for name, found in changed.items()
        },
        "runs": {f"{one.workload}, {one.kind}": [asdict(each) for each in found] for one, found in runs.items()},
    }
