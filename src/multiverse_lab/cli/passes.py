"""`multiverse bench planner`: what a pass of the controller costs as the queue and the number of VMs grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.system import interrupts
from multiverse_lab.bench.planner import VMS_PER_HOST, PassTimes, measure
from multiverse_lab.bench.stats import Summary
from multiverse_lab.cli.bench import Json

Counts = list[int]
VMS, JOBS = (100, 2_000, 10_000), (100, 1_000, 10_000, 50_000)


def planner(
    jobs: Annotated[Counts | None, typer.Option(min=1, help="Queued jobs; may be given several times.")] = None,
    vms: Annotated[Counts | None, typer.Option(min=1, help="VMs that run jobs; may be given several times.")] = None,
    per_host: Annotated[int, typer.Option(min=8, help="VMs on a host; each host is a source.")] = VMS_PER_HOST,
    candidates: Annotated[
        int, typer.Option(min=0, help="Running jobs that may be evicted for the first one that waits; 0: no evictions.")
    ] = 0,
    repetitions: Annotated[int, typer.Option("--repeat", min=3, help="Passes of each sort.")] = 9,
    json: Json = False,
) -> None:
    """Measure passes with 100 to 50,000 queued jobs and 100 to 10,000 VMs, beside passes that look at every row."""
    found: list[PassTimes] = []
    counts = [(count, queued) for count in vms or VMS for queued in jobs or JOBS]
    for number, (count, queued) in enumerate(counts):
        progress.present().say(f"{queued:,} queued jobs, {count:,} VMs")
        progress.present().advance(number, len(counts))
        found.append(interrupts.run(measure(queued, count, min(repetitions, count), per_host, candidates)))
        if not json:
            console.print(f"  {queued:,} queued jobs, {count:,} VMs", highlight=False)
    if json:
        render.as_json([asdict(one) for one in found])
    else:
        _print(found)


def _print(found: Sequence[PassTimes]) -> None:
    console.print(
        "\nMilliseconds of one pass, commit included: median, and in brackets the 95th percentile. The queue is "
        "blocked. One host: after a new observation of a single host. Same: of all, of the same objects. Copies: of "
        "other, equal objects. Growth: of a pass in which one job ended, against the row above, whose queue is that "
        "much shorter. All rows: the baseline, a pass that looks at every row. Evicting: after a new observation of a "
        "single host, with a plan of evictions among the candidates; its baseline is one host.\n",
        markup=False,
    )
    right = ("VMS", "HOSTS", "JOBS", "ONE HOST", "SAME", "ONE ENDED", "GROWTH", "COPIES", "ALL ROWS",
             "CANDIDATES", "EVICTING")  # fmt: skip
    table = render.table(*right, right=right)
    above: PassTimes | None = None
    for one in found:
        growth = ""
        if above is not None and above.vms == one.vms:
            growth = f"{one.one_ended.p50 / above.one_ended.p50:.1f} for {one.jobs / above.jobs:g}"
        table.add_row(
            f"{one.vms:,}", f"{one.hosts:,}", f"{one.jobs:,}", _ms(one.one_host), _ms(one.unchanged),
            _ms(one.one_ended), growth, _ms(one.equal), _ms(one.all_rows),
            f"{one.candidates:,}", _ms(one.evicting) if one.evicting else "",
        )  # fmt: skip
        above = one
    render.show(table, "Nothing was measured.")


def _ms(one: Summary) -> str:
    return f"{one.p50:.1f} ({one.p95:.1f})"
