"""`multiverse bench submissions`: how many submissions a second the controller sustains."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse_lab.bench.submissions import Plan, SubmissionTimes, measure
from multiverse_lab.cli.bench import Json


def submissions(
    rates: Annotated[list[float] | None, typer.Option("--rate", min=1, help="Jobs a second; also several.")] = None,
    served: Annotated[list[float] | None, typer.Option(min=1, help="The same, of jobs that get VMs and end.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For how long jobs are submitted.")] = 20.0,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts of 64 CPUs, for jobs that get VMs.")] = 40,
    json: Json = False,
) -> None:
    """Submit 500 and 1,000 jobs a second to the controller, which wait, and 100 that run in VMs, with fakes of Slurm
    and of the hosts, and the store on disk."""
    plans = [Plan(rate, seconds, 2, ends=False) for rate in rates or ([] if served else [500.0, 1000.0])]
    plans += [Plan(rate, seconds, hosts, ends=True) for rate in served or ([] if rates else [100.0])]
    found = []
    for number, plan in enumerate(plans):
        progress.present().say(f"{plan.rate:g} jobs a second for {plan.seconds:g} s")
        progress.present().advance(number, len(plans))
        found.append(measure(plan))
    render.as_json([asdict(one) for one in found]) if json else _print(found)


def _print(found: list[SubmissionTimes]) -> None:
    console.print(
        "\nJobs a second. Rate: that were submitted. Done: that were taken in and wait, or were served in a VM of "
        "their own, from the first submission to the last of them. Lag: milliseconds until the attempt was committed, "
        "median and, in brackets, 95th percentile. Milliseconds for each job: CPU of passes, time of commits, and CPU "
        "of effects, observations and fakes. Alone: the baseline, submissions a second that the store records in as "
        "many commits with nothing else to do.\n",
        markup=False,
    )
    right = ("RATE", "JOBS", "DONE", "LAG", "COMMITS", "PASSES", "COMMIT", "BESIDE", "ALONE")
    table = render.table("JOBS THAT", *right, right=right)
    for one in found:
        each = (f"{1000 * seconds / one.jobs:.2f}" for seconds in (one.passes, one.committing, one.beside))
        table.add_row(
            "end" if one.served else "wait", f"{one.rate:,.0f}", f"{one.jobs:,}", f"{one.done:,.0f}",
            f"{1000 * one.lag.p50:.0f} ({1000 * one.lag.p95:.0f})", f"{one.commits:,}", *each, f"{one.alone:,.0f}",
        )  # fmt: skip
    render.show(table, "Nothing was measured.")
