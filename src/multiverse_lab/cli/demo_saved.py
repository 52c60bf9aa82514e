"""A job of the demonstration that is saved: everything is restarted, and it goes on where it stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.cli.demo_jobs import LIMIT, LOG_HINT, show_command, text_of
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions, load
from multiverse_lab.lab.services import services
from multiverse_lab.lab.session import LabSession

LINES, BEFORE = 8, 3
"""The lines that the job writes, and how many of them it has written when it is saved."""

SCRIPT = f"""#!/bin/bash
for line in $(seq {LINES}); do
  echo "line $line on $(hostname)"
  sleep 0.5
done
"""


async def saved_job(lab: LabSession, client: Client, options: LabOptions) -> list[str]:
    """Run the job, and show what its user and the operators see. Returns what is not as expected."""
    output = lab.user.home / "saved.out"
    with progress.step("a job that is saved: everything is restarted, and it goes on where it stopped") as say:
        job = lab.submit(SCRIPT, "--job-name=saved", f"--output={output}")
        await _until(lambda: len(_lines(output)) >= BEFORE, say, "it runs")
        began = time.monotonic()
        client.save(job, hold=True)
        await _until(lambda: [one["state"] for one in client.saved()] == ["stored"], say, "it is being saved")
        took = time.monotonic() - began
    console.print(f"  saved in {render.duration(took)}; its VM is gone, and takes no memory of a host", style="dim")
    show_command(lab, "saved")
    restarted = await _restart(lab, options)
    with progress.step(f"multiverse resume {job}") as say:
        began = time.monotonic()
        before = len(_lines(output))
        client.resume(job)
        await _until(lambda: len(_lines(output)) > before, say, "it is being restored")
        took = time.monotonic() - began
        await _until(lambda: not client.jobs() and not client.saved(), say, "it goes on")
    console.print(f"  {', '.join(restarted)} were restarted; the next line came {render.duration(took)} after that")
    lines = _lines(output)
    for line in lines:
        console.print(f"  {line}", style="dim", markup=False)
    right = [line.split()[:2] for line in lines] == [["line", str(number)] for number in range(1, LINES + 1)]
    return [] if right else ["the saved job wrote other lines than one that runs through"]


async def _restart(lab: LabSession, options: LabOptions) -> list[str]:
    """End the controller, slurmctld and the hosts with all that runs there, and start them again. Returns the names."""
    plan = load(lab.where)
    hosts = {one.name for one in plan.own_hosts} if plan else set()
    ours = [one for one in services(plan) if one.name.partition("-")[0] in {"controller", "slurmctld", *hosts}]
    with progress.step("restarting the controller, slurmctld, and the hosts with their agents"):
        for service in reversed(ours):
            await service.stop(lab.where)
        await lifecycle.up(lab.where, options)
    return ["controller", "slurmctld", *sorted(hosts)]


def _lines(output: Path) -> list[str]:
    return text_of(output).splitlines()


async def _until(met: Callable[[], bool], say: Callable[[str], None], what: str) -> None:
    say(what)
    deadline = time.monotonic() + LIMIT
    while not met():
        if time.monotonic() > deadline:
            raise Broken(f"the saved job: not over after {LIMIT:g} s: {what}", hint=LOG_HINT)
        await asyncio.sleep(0.05)
