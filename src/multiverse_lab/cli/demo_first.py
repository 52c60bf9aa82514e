"""What the demonstration begins with: one job alone, as a user meets it, beside the same job on a plain node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from rich.text import Text

from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse_lab.bench import latency
from multiverse_lab.bench.latency import JobKind, LatencyPlan, LatencySamples
from multiverse_lab.bench.stats import percentile
from multiverse_lab.lab.baremetal import baremetal
from multiverse_lab.lab.session import LabSession

JOBS, SEED = 3, 1
"""How often the job runs on each, one at a time, in an order that the seed shuffles."""

VM, BARE = "in a VM of its own", "on a plain node"
KINDS = (JobKind(VM, ("--job-name=alone",)), JobKind(BARE, ("--job-name=alone", "--partition=bare"), vm=False))

Say = Callable[[str], None]


async def first_impression(lab: LabSession, client: Client) -> Mapping[str, LatencySamples]:
    """Run the job alone, and show how long it took from `sbatch` until its script ran. Returns what was measured."""
    with progress.step("one job alone, from sbatch to the first line of its script") as say:
        say("starting a plain node of Slurm")
        async with baremetal(lab.lab):
            plan = LatencyPlan(JOBS, SEED, KINDS)
            found = await asyncio.to_thread(latency.run, lab, client, plan, lambda job: None, _progress(say))
    for line in lines(found, console.width):
        console.print(line)
    return found


def _progress(say: Say) -> latency.Progress:
    return lambda kind, number, of, seconds: say(f"{number} of {of}, {kind}: {render.duration(seconds)}")


def lines(found: Mapping[str, LatencySamples], width: int) -> list[Text]:
    """Each kind's median with a bar in proportion, and where the time of the VM's went: four lines."""
    medians = {name: percentile(one.submit_to_start, 0.5) for name, one in found.items()}
    longest, room = max(medians.values()), max(10, min(50, width - 48))
    shown = []
    for name, style in ((VM, "green"), (BARE, "blue")):
        each = " ".join(f"{seconds:.2f}" for seconds in sorted(found[name].submit_to_start))
        cells = max(1, round(medians[name] / longest * room))
        figure = f"{medians[name]:.2f} s"
        shown.append(
            Text.assemble(f"  {name:<19}", (f"{figure:>8} ", "bold"), ("━" * cells, style), (f" {each}", "dim"))
        )
    parts = [
        (name, found[VM].stages[name]) for name in ("queued", "clone", "join", "launch") if name in found[VM].stages
    ]
    text = Text("  of that", style="dim")
    for name, seconds in parts:
        text.append(f"  {name} ", style=render.PHASE_STYLES[name])
        text.append(f"{percentile(seconds, 0.5):.2f}", style="dim")
    rest = Text("  the rest: sbatch itself, and the start of the script (seconds, medians)", style="dim")
    return [*shown, text, rest]
