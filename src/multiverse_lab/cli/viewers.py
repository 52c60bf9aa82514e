"""`multiverse bench viewers`: what the viewers of the web page cost the controller."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Annotated

import structlog
import typer

from multiverse.cli import render
from multiverse.cli.render import console
from multiverse.system import interrupts
from multiverse_lab.bench.viewers import ViewersCost, ViewersPlan, measure
from multiverse_lab.cli.bench import Json


def viewers(
    number: Annotated[int, typer.Option("--viewers", min=1, help="Viewers at the same time.")] = 200,
    jobs: Annotated[int, typer.Option(min=1, help="Queued jobs.")] = 5_000,
    vms: Annotated[int, typer.Option(min=1, help="VMs that run jobs.")] = 500,
    seconds: Annotated[float, typer.Option(min=5.0, help="Of each phase.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="Phases of each sort.")] = 3,
    json: Json = False,
) -> None:
    """Measure the controller's CPU time with viewers of the web page, beside its own without any."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # no effect ends here
    plan = ViewersPlan(number, jobs, vms, seconds, rounds)
    found = interrupts.run(measure(plan))
    if json:
        render.as_json(asdict(plan) | asdict(found))
    else:
        _print(plan, found)


def _print(plan: ViewersPlan, found: ViewersCost) -> None:
    console.print(
        f"\n{plan.jobs:,} queued jobs, {plan.vms:,} VMs, observed every 2 s; one job ends each second. Phases of "
        f"{plan.seconds:g} s in turn, {plan.rounds} of each sort; shares of one core.\n",
        markup=False,
    )
    table = render.table("VIEWERS", "MEDIAN", "LEAST", "MOST", right=("VIEWERS", "MEDIAN", "LEAST", "MOST"))
    for name, shares in (("none", found.idle), (f"{found.connected:,}", found.viewed)):
        table.add_row(name, _percent(_median(shares)), _percent(min(shares)), _percent(max(shares)))
    console.print(table)
    more = _median(found.viewed) - _median(found.idle)
    console.print(
        f"{found.connected:,} viewers cost {_percent(more)} of a core: each got {found.events} events and "
        f"{found.received / 1024:.1f} KiB in {plan.seconds:g} s; a whole snapshot has {found.whole / 1024:.0f} KiB",
        markup=False,
    )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"
