"""How long a node that is leased takes until a VM on it runs a job, by phases, in a lab.

The lab's own host is drained, so that each job needs a lease. Each lease has ended before the next job is submitted:
nothing of it is left but the node's copy of the image, which the first lease makes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from multiverse.api import HostView, JobView, LeaseView, TemplateView, VmView, decode
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.bench.arrivals import until_nothing_is_left
from multiverse_lab.lab.session import LabSession

SITE = '[[lease]]\npartition = "physical"\nmin_wait = 0\nidle = 1\ntime_limit = 3600\nmax = 1\n'
"""The lab's settings."""

PHASES = {
    "agent": "pilot started to agent listening",
    "seen": "until the controller has connected and places the job's template",
    "template": "template: copy of the image if it is the first; boot and freeze, or copy of a template",
    "vm": "VM made, started and joined",
    "job": "until the job runs",
}
"""Each phase ends where the next one begins; the first begins when the pilot has made the lease's directory."""

_LIMIT = 600.0
_LOOK = 0.03


@dataclass(frozen=True, slots=True)
class LeaseStart:
    """The seconds of each phase of one lease, and from the job's submission to the pilot's start."""

    before: float
    phases: Mapping[str, float]

    @property
    def whole(self) -> float:
        """From the pilot's start until the job ran."""
        return sum(self.phases.values())


Progress = Callable[[str, int, int, float], None]
"""Called with a word, the number of leases that are done, the number of all, and the seconds it took."""


def run(lab: LabSession, client: Client, repeat: int, progress: Progress) -> list[LeaseStart]:
    """Measure so many leases, one after the other. Raises `Broken` if a job does not run on a lease."""
    own = lab.settings.host.name
    _until("the lab's host is in reach", lambda: any(one.reachable for one in decode(list[HostView], client.hosts())))
    client.change_hosts("drain", own)
    found = []
    for number in range(1, repeat + 1):
        one = _measure(lab, client)
        found.append(one)
        progress("lease", number, repeat, one.whole)
        until_nothing_is_left(client, _LIMIT)
        _until("the lease is given back", lambda: not client.leases())
    return found


def _measure(lab: LabSession, client: Client) -> LeaseStart:
    (node,) = lab.lab.plan.physical_nodes
    leases = lab.where.host(node.name).leases
    submitted = time.time()
    job = lab.submit("#!/bin/sh\ntrue\n", "--time=10", "--mem=300")
    at: dict[str, float] = {}
    deadline = time.monotonic() + _LIMIT
    while "runs" not in at:
        if time.monotonic() > deadline:
            raise Broken(f"job {job} did not run on a lease within {_LIMIT:g} s", hint="see the lab's log directory")
        for moment, when in _seen(client, job, leases).items():
            at.setdefault(moment, when)
        time.sleep(_LOOK)
    ends = (at["pilot"], at["listens"], at["building"], at["ready"], at["joined"], at["runs"])
    seconds = [after - before for before, after in pairwise(ends)]
    return LeaseStart(at["pilot"] - submitted, dict(zip(PHASES, seconds, strict=True)))


def _seen(client: Client, job: str, leases: Path) -> dict[str, float]:
    """Which moments have come, with when that was if a file tells, or else with now (Unix time)."""
    now, found = time.time(), {}
    for lease in decode(list[LeaseView], client.leases()):
        for moment, file in (("pilot", "lock"), ("listens", "agent.sock")):
            if (path := leases / lease.name / file).exists():
                found[moment] = path.lstat().st_mtime
        for template in decode(list[TemplateView], client.templates()):
            if template.host == lease.name:
                found |= {"building": now} | ({"ready": now} if template.state == "ready" else {})
        for vm in decode(list[VmView], client.vms()):
            if vm.host == lease.name and vm.state in ("joined", "serving"):
                found["joined"] = now
    rows = decode(list[JobView], client.jobs(job))
    if rows and rows[-1].state in ("allocated", "reclaiming", "done"):
        found |= {"joined": found.get("joined", now), "runs": now}
    return found


def _until(what: str, ask: Callable[[], object]) -> None:
    deadline = time.monotonic() + _LIMIT
    while not ask():
        if time.monotonic() > deadline:
            raise Broken(f"not within {_LIMIT:g} s: {what}", hint="see the lab's log/controller.log")
        time.sleep(0.2)
