"""The part of the demonstration on bare-metal nodes: a lease that is taken and given back, and a VM inside a job."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable

from rich.text import Text

from multiverse.api import HostView, LeaseView, decode
from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.cli.demo_jobs import LIMIT, LOG_HINT, DemoJob, follow, show_command, text_of
from multiverse_lab.lab.services import CONTROLLER
from multiverse_lab.lab.session import LabSession

NODES = 2
"""Bare-metal nodes of the lab, in partition `physical`: one is leased, on the other one a job has its VM."""

IDLE = 3

LEASE = f"""
[[lease]]
partition = "physical"
min_wait = 1
idle = {IDLE}
time_limit = 1800
"""

# Ends once the demonstration has seen that all of them run at the same time.
WAITS = """#!/bin/sh
until [ -e enough ]; do sleep 0.2; done
"""

WHERE = 'echo "$(hostname), as $(id -un), Linux $(uname -r)"'


async def physical_nodes(lab: LabSession, client: Client) -> list[str]:
    """Show what a site can do with bare-metal nodes. Returns what is not as expected."""
    inside = _Inside(lab)
    console.rule("more jobs than the hosts hold: a bare-metal node is leased from Slurm", style="dim")
    try:
        await _lease(lab, client)
        return await inside.report()
    finally:
        inside.end()


# --- a lease -------------------------------------------------------------------------------------------


async def _lease(lab: LabSession, client: Client) -> None:
    """More jobs than the hosts hold, until a bare-metal node is leased for the last one, and given back."""
    with progress.step("leases are permitted in the settings, and the controller starts again"):
        settings = lab.where.etc / "site.toml"
        settings.write_text(settings.read_text() + LEASE)
        await CONTROLLER.ensure(lab.lab)
        hosts = await _hosts(client)
    render.say("Each of these jobs fills a host. For the last one a pilot job takes a bare-metal node.", style="dim")
    size, enough = hosts[0].declared.cpus, lab.user.home / "enough"
    enough.unlink(missing_ok=True)  # of an earlier demonstration
    rows = [
        DemoJob(
            f"fills a host ({number})" if number <= len(hosts) else "one more than fit",
            lab.submit(WAITS, f"--job-name=fill{number}", f"-c{size}", "--mem=600", "--time=10", "--output=/dev/null"),
            "COMPLETED",
        )
        for number in range(1, len(hosts) + 2)
    ]
    await follow(client, rows, until="allocated")
    show_command(lab, "leases")
    show_command(lab, "hosts")
    with progress.step(f"the jobs end, and the node is given back after {IDLE} s without a VM") as say:
        enough.touch()
        await _given_back(client, say)
    show_command(lab, "leases")


async def _given_back(client: Client, say: Callable[[str], None]) -> None:
    """Wait until there is no lease. Raises `Broken` if that takes too long."""
    deadline, shown = time.monotonic() + LIMIT, ""
    while leases := decode(list[LeaseView], client.leases()):
        if (now := f"{leases[0].name} is {leases[0].state}") != shown:
            say(shown := now)
        if time.monotonic() > deadline:
            raise Broken(f"{now} after {LIMIT:g} s", hint=LOG_HINT)
        await asyncio.sleep(0.2)


async def _hosts(client: Client) -> list[HostView]:
    """The hosts, once the controller that has just started has heard of each."""
    deadline = time.monotonic() + LIMIT
    while not (found := decode(list[HostView], client.hosts())) or not all(host.reachable for host in found):
        if time.monotonic() > deadline:
            raise Broken("the hosts are not reached", hint=LOG_HINT)
        await asyncio.sleep(0.05)
    return found


# --- a VM inside a job ---------------------------------------------------------------------------------


class _Inside:
    """A step in a VM inside its job, on a bare-metal node. It runs while the rest is shown."""

    def __init__(self, lab: LabSession) -> None:
        self._lab, self._out = lab, lab.user.home / "inside.out"
        self._image = f"--vm-image={lab.settings.image.default}"
        self._running: subprocess.Popen[bytes] | None = None
        if lab.lab.plan.job_vms:
            self._running = lab.start(self._out, *_srun(self._image, "--cpus-per-task=2", "--mem=1500"))

    async def report(self) -> list[str]:
        """Show what the step printed, beside one on the bare node. Returns what is not as expected."""
        console.rule("VMs inside jobs: Slurm allocates a node, and the tasks run in its VM", style="dim")
        if self._running is None:
            console.print("not shown: Slurm's plugin for it is not built (make spank)", style="dim")
            return []
        code = await asyncio.to_thread(self._running.wait, LIMIT)
        inside = text_of(self._out)
        bare = await asyncio.to_thread(self._lab.run, *_srun("--cpus-per-task=2"))
        for option, said in (("", bare.stdout.strip()), (self._image, inside)):
            console.print(Text.assemble((f"  srun -p physical {option:<18}", "bold"), render.plain(said)))
        console.print()
        return [] if code == 0 and inside.startswith("mvjob-") else [f"the VM inside a job: {inside or 'no output'}"]

    def end(self) -> None:
        """End the step if it still runs."""
        if self._running is not None and self._running.poll() is None:
            self._running.kill()
            self._running.wait()


def _srun(*options: str) -> list[str]:
    return ["srun", "--quiet", "--partition=physical", *options, "sh", "-c", WHERE]
