"""`multiverse bench placement`: what an admission costs on a site of many hosts, with each placement policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from multiverse.cli import render
from multiverse.cli.render import console
from multiverse_lab.bench.placement import AT_ONCE, PlacementTimes, Times, measure
from multiverse_lab.cli.bench import Json


def placement(
    hosts: Annotated[int, typer.Option(min=1, help="Hosts, each a source of its own.")] = 10_000,
    vms: Annotated[int, typer.Option(min=1, help="VMs that run jobs; they fill 90 % of the hosts.")] = 100_000,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs that wait.")] = 1_000,
    repetitions: Annotated[int, typer.Option("--repeat", min=1, help="Passes with each policy.")] = 20,
    json: Json = False,
) -> None:
    """Measure admissions and passes on hosts that are 90 % full, beside a search that looks at every host."""
    found = measure(hosts, vms, jobs, repetitions, lambda one: None if json else console.print(f"  {one.policy}"))
    if json:
        render.as_json([asdict(one) for one in found])
    else:
        _print(found)


def _print(found: Sequence[PlacementTimes]) -> None:
    console.print(
        "\nMilliseconds of CPU time: median, and in brackets the 99th percentile. Admission: of one job, until its VM "
        f"is planned and claimed. Pass: a whole one that admits {AT_ONCE} jobs, planned and not committed. Blocked: a "
        "pass that admits none, because the first job has no room; one ended: the same as a job has ended. Scan: the "
        "baseline, the search for one host that looks at all of them, alone.\n",
        markup=False,
    )
    right = ("ADMISSION", "PASS", "BLOCKED", "ONE ENDED", "SCAN")
    table = render.table("POLICY", *right, right=right)
    for one in found:
        table.add_row(one.policy, _ms(one.admission), *map(_ms, (one.whole_pass, one.blocked, one.one_ended, one.scan)))
    render.show(table, "Nothing was measured.")


def _ms(one: Times) -> str:
    return f"{one.p50:.2f} ({one.p99:.2f})"
