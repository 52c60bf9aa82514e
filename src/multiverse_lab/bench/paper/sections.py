"""The parts of the report beside the paper's own figures: the choice of the kind by the rate of arrivals, the paper's
cluster simulated, the start of VMs inside jobs (Slurm-V), and moves of VMs (IaaS-HPC)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from multiverse.core.model.basics import CloneKind
from multiverse_lab.bench.clusters import (
    ClusterSpec,
    MeanOver,
    PolicyChoice,
    RunFigures,
    figure_over,
    run_cluster,
)
from multiverse_lab.bench.injob import PAPER as SLURM_V
from multiverse_lab.bench.launches import WAYS
from multiverse_lab.bench.paper.figures import Cell
from multiverse_lab.bench.paper.page import ReportSection, shown
from multiverse_lab.bench.paper_cluster import jobs_of
from multiverse_lab.bench.stats import Summary, summary
from multiverse_lab.bench.svg import BarChart, BarPanel, ChartLine, LineChart, StackedBar

RATES = (2.0, 6.0, 20.0, 60.0, 200.0)
"""Jobs a minute: of one each 10 s there are 6, and bursts have more than 60."""
CHOICES = (CloneKind.FULL, CloneKind.INSTANT, CloneKind.AUTO)
PLATFORM = ClusterSpec(hosts=5, cores=44, memory=262144, threads=2.0)
"""The paper's hosts with the unloaded times of our own platform, which `simulate cluster` assumes if not told others.
A full clone begins on a host each four seconds at most in all, as on the paper's platform."""


def choices(seeds: Sequence[int], ended: Callable[[], None]) -> list[dict[str, Any]]:
    """Full clones only, instant ones only, and the controller's own choice, on the same jobs at each rate."""
    found = []
    spec = replace(PLATFORM, full=replace(PLATFORM.full, rate=0.25))
    for kind in CHOICES:
        for rate in RATES:
            runs = []
            for seed in seeds:
                runs.append(run_cluster(spec, PolicyChoice(kind), jobs_of("workload-2", seed, rate / 60), seed))
                ended()
            found.append({
                "kind": str(kind), "rate": rate,
                **{name: asdict(figure_over(runs, value)) for name, value in _OF_CHOICE.items()},
            })  # fmt: skip
    return found


_OF_CHOICE: Mapping[str, Callable[[RunFigures], float]] = {
    "wait": lambda one: one.wait,
    "provisioning": lambda one: one.provisioning,
    "makespan": lambda one: one.makespan,
}


def of_choices(found: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> ReportSection:
    lines = tuple(
        ChartLine(
            str(kind), tuple((one["rate"], one["provisioning"]["value"]) for one in found if one["kind"] == str(kind))
        )
        for kind in CHOICES
    )
    chart = LineChart("Provisioning, means", "jobs a minute", "s", lines, logarithmic=True)
    rows = [(one["kind"], one["rate"], *(shown(MeanOver(**one[name]), "s") for name in _OF_CHOICE)) for one in found]
    return ReportSection(
        "choice", "The kind of clone by the rate of arrivals",
        "The paper's future work, simulated: the same 100 jobs for each policy at each rate, on the paper's hosts with "
        "the times of our platform. Full clones begin at the paper's 15 a minute. auto takes the kind whose node is "
        "ready first; it never copies a disk, so where it does not fork it boots a linked clone. From 20 jobs a minute "
        "on, the hosts are full, and the time from submission to start is mostly the wait for room.",
        f"multiverse bench paper --simulate {len(seeds)} --seed {seeds[0]}", (chart,),
        (("kind", "jobs a minute", "submission to start", "provisioning", "all done"), tuple(rows)),
    )  # fmt: skip


def of_simulation(found: Mapping[str, Any], seeds: Sequence[int]) -> ReportSection:
    """The paper's own cluster, simulated: published and simulated figures."""
    rows: list[tuple[Cell, ...]] = []
    whys = dict.fromkeys(one["why"] for one in found["reproduced"] if one["why"])
    for one in found["reproduced"]:
        how = "fitted" if one["fitted"] else "within 10 %" if one["within"] else "differs"
        rows.append((one["figure"], one["published"], shown(MeanOver(**one["simulated"]), one.get("unit", "")), how))
    notes = [found["summary"]]
    notes += [f"{', '.join(one['figure'] for one in found['reproduced'] if one['why'] == why)}: {why}." for why in whys]
    return ReportSection(
        "simulated", "The paper's cluster, simulated",
        "The controller in virtual time on 5 hosts of 44 cores. Unloaded service times are inputs, fitted on "
        "workload-1 alone; means, makespan and utilization follow from what waits for what.",
        f"multiverse simulate cluster --cluster paper --seeds {len(seeds)} --seed {seeds[0]}", (),
        (("figure", "published", "simulated", ""), tuple(rows)), tuple(notes),
    )  # fmt: skip


def of_benchmark(given: Mapping[str, Any]) -> ReportSection:
    """The part of a benchmark's own JSON."""
    return (_injob if given["benchmark"] == "injob" else _move)(given["result"], given["at"])


def _injob(found: Mapping[str, Any], at: str) -> ReportSection:
    ways = {way: found["start"]["ways"][way] for way in WAYS}
    parts = tuple(dict.fromkeys(part for one in ways.values() for part in one["parts"]))
    bars = tuple(
        StackedBar(way, tuple((one["parts"].get(part) or {"p50": 0.0})["p50"] for part in parts))
        for way, one in ways.items()
    )
    rows: list[tuple[Cell, ...]] = []
    for way, one in ways.items():
        of_way = {**one["parts"], "in all": one["total"]}
        rows += [(way, part, *_median(Summary(**values))) for part, values in of_way.items() if values]
    rows.append(("published: by the plugin", "in all", SLURM_V["spank"], "", ""))
    rows.append(("published: overlapped", "in all", SLURM_V["overlapped"], "", ""))
    notes = [
        f"Published: a snapshot in place of the copy made the start {SLURM_V['copy_over_snapshot']} times shorter; "
        f"here {_estimate(ways['snapshot']['copy_over'])} times."
    ]
    if many := found.get("many"):
        notes.append(
            f"{many['vms']} VMs on {many['nodes']} nodes: {many['one_by_one']:.1f} s one by one, "
            f"{many['at_once']:.1f} s at once; published {SLURM_V['one_by_one']} and {SLURM_V['at_once']} s for 32 "
            "on 4."
        )
    return ReportSection(
        "injob", "Slurm-V: the start of a VM inside a job",
        f"Medians of {found['repeat']} rounds (seed {found['seed']}, {at}); guests by {found['accelerator']}. Ways: a "
        "copy of the image, a snapshot, a snapshot made while the machine is described, an instant clone.",
        f"multiverse bench injob --repeat {found['repeat']} --seed {found['seed']}",
        (BarChart("The start of a VM inside a job, in parts", "s", parts, (BarPanel("", bars),)),),
        (("way", "part", "median_s", "low_s", "high_s"), tuple(rows)), tuple(notes),
    )  # fmt: skip


def _median(one: Summary) -> tuple[float, float, float]:
    return round(one.p50, 3), round(one.low, 3), round(one.high, 3)


def _estimate(one: Mapping[str, float] | None) -> str:
    return f"{one['value']:.2f} ({one['low']:.2f} to {one['high']:.2f})" if one else "not measured"


def _move(found: Mapping[str, Any], at: str) -> ReportSection:
    bars, rows = [], list[tuple[Cell, ...]]()
    for name, one in found["cases"].items():
        moved, pause = (summary([sample[key] for sample in one["samples"]]) for key in ("total", "outside"))
        assert moved is not None and pause is not None, "each case was measured"
        bars.append(StackedBar(name, (moved.p50,), moved.low, moved.high))
        rows.append(
            (name, *_median(moved), *_median(pause), round(one["sent"] / (1 << 20)), f"{one['slowdown'] * 100:.0f} %")
        )
    rows.append(("published: 500 MB (IaaS-HPC)", "10 to 13", *("",) * 7))
    heads = ("job", "moved_s", "low_s", "high_s", "pause_s", "low_s", "high_s", "sent_mib", "slower by")
    return ReportSection(
        "move", "IaaS-HPC: moves of VMs",
        f"Medians of {found['moves']} moves of each job, {found['how']} ({at}); guests by {found['accelerator']}. The "
        "pause is the longest time between two reports of the job, seen from outside.",
        f"multiverse bench move --moves {found['moves']} --how {found['how']}",
        (BarChart("Moves, medians", "s", ("moved",), (BarPanel("", tuple(bars)),)),), (heads, tuple(rows)),
    )  # fmt: skip
