"""A job of the demonstration that is saved: everything is restarted, and it goes on where it stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from multiverse.api import JobView, decode
from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse_lab.cli.demo_jobs import eventually, show_command, text_of
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.hosts.services import host_services
from multiverse_lab.lab.plan import LabOptions, load
from multiverse_lab.lab.service import Lab, Service
from multiverse_lab.lab.services import CONTROLLER, services
from multiverse_lab.lab.session import LabSession

LINES = 6
"""The lines that the job writes. It is saved as soon as it has written the first one."""

SCRIPT = f"""#!/bin/bash
for line in $(seq {LINES}); do
  echo "line $line on $(hostname)"
  sleep 0.5
done
"""


async def saved_job(lab: LabSession, client: Client, options: LabOptions) -> list[str]:
    """Run the job, and show what its user and the operators see. Returns what is not as expected."""
    output = lab.user.home / "saved.out"
    output.unlink(missing_ok=True)  # of an earlier demonstration
    with progress.step("a job that is saved, and goes on after all was restarted") as say:
        job = lab.submit(SCRIPT, "--job-name=saved", f"--output={output}")
        say("it runs")
        await eventually(lambda: bool(_lines(output)) and _runs(client, job), "the job to be saved did not run")
        say("it is being saved")
        began = time.monotonic()
        client.save(job, hold=True)
        await eventually(lambda: [one["state"] for one in client.saved()] == ["stored"], "the job was not saved")
        took = time.monotonic() - began
    console.print(f"  saved in {render.duration(took)}; its VM is gone, and takes no memory of a host", style="dim")
    show_command(lab, "saved")
    restarted = await _restart(lab, options)
    with progress.step(f"multiverse resume {job}") as say:
        say("it is being restored")
        began, before = time.monotonic(), len(_lines(output))
        client.resume(job)
        await eventually(lambda: len(_lines(output)) > before, "the saved job did not go on")
        took = time.monotonic() - began
        say("it goes on")
        await eventually(lambda: len(_lines(output)) >= LINES, "the saved job did not end")
    console.print(f"  restarted: {', '.join(restarted)}; the next line came after {render.duration(took)}", style="dim")
    lines = _lines(output)
    for line in lines:
        console.print(f"  {line}", style="dim", markup=False)
    right = [line.split()[:2] for line in lines] == [["line", str(number)] for number in range(1, LINES + 1)]
    return [] if right else ["the saved job wrote other lines than one that runs through"]


async def _restart(lab: LabSession, options: LabOptions) -> list[str]:
    """End the controller, slurmctld and the hosts with all that runs there, and start them again. Returns the names."""
    plan = load(lab.where)
    assert plan is not None, "the lab runs"
    slurmctld = [one for one in services(plan) if one.name == "slurmctld"]
    parts = [[CONTROLLER], slurmctld, *(list(host_services(host)) for host in plan.own_hosts)]
    with progress.step("restarting the controller, slurmctld, and the hosts with their agents"):
        await asyncio.gather(*(_stop(lab, part) for part in parts))
        await asyncio.gather(*(_start(Lab(lab.where, plan), part) for part in parts))
        await lifecycle.up(lab.where, options)  # waits until jobs can wait at the gate again
    return ["controller", "slurmctld", *(host.name for host in plan.own_hosts)]


async def _stop(lab: LabSession, part: Sequence[Service]) -> None:
    for service in reversed(part):
        await service.stop(lab.where)


async def _start(lab: Lab, part: Sequence[Service]) -> None:
    for service in part:
        await service.ensure(lab)


def _runs(client: Client, job: str) -> bool:
    """Whether the controller knows that the job runs: Slurm tells it a moment later."""
    return [one.state for one in decode(list[JobView], client.jobs(job))] == ["allocated"]


def _lines(output: Path) -> list[str]:
    return text_of(output).splitlines()
