"""Jobs leave leased hosts: saved or moved before their pilots are killed, or moved so that the lease can be given back.
The controller reaches the agents of leases to the end, and other hosts send them VMs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from multiverse.client import Client
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions, load
from multiverse_lab.lab.services import AGENT, CONTROLLER
from tests.integration.conftest import LabUnderTest, new_lab
from tests.integration.images import slim
from tests.integration.test_leases import NODE, with_settings
from tests.integration.watch import accounted, ended, until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

KILL_WAIT, GRACE_TIME = 75, 60  # seconds
_SLURM = f"""
KillWait={KILL_WAIT}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=lendable Nodes={NODE} PriorityTier=1 PreemptMode=CANCEL GraceTime={GRACE_TIME} State=UP
PartitionName=urgent Nodes={NODE} PriorityTier=9 PreemptMode=OFF State=UP
"""
_COUNTS = (
    'echo "$(hostname) ${{SLURM_RESTART_COUNT:-0}}" >> {0}; n=0; '
    "until [ -e {0}.ends ]; do n=$((n+1)); echo $n; sleep 0.2; done; echo end"
)
"""A job that writes a line into a file for each run of it, and counts in its output until the test ends it."""


@pytest.fixture(scope="module")
def lending(accelerator: Path) -> Iterator[LabUnderTest]:
    """A lab with a host of its own and a bare-metal node, without a controller. Both have the same storage."""
    slim()
    with new_lab(accelerator, LabOptions(cores=4, memory=6144, physical=1), controller=False) as made:
        yield made


@contextlib.asynccontextmanager
async def leasing(lab: LabUnderTest, more: str = "") -> AsyncIterator[Client]:
    """A controller that leases the node, whose jobs give way to those of another partition."""
    shared = lab.where.root.parent / "saved"
    shared.mkdir(mode=0o700, exist_ok=True)
    plan, name = load(lab.where), lab.settings.host.name
    assert plan is not None
    nodes = [[name, plan.gateway], *([node.name, node.address] for node in plan.physical_nodes)]
    addresses = ", ".join(f'["{one}", "{address}"]' for one, address in nodes)
    (lab.where.etc / "site.toml").write_text(
        '[[lease]]\npartition = "lendable"\nmin_wait = 1\nidle = 5\ntime_limit = 3600\nmax = 1\n'
        f'[save]\ndirectory = "{shared}"\n[move]\nenabled = true\naddresses = [{addresses}]\n{more}'
    )
    async with with_settings(lab, _SLURM):
        await lifecycle.up(lab.where, LabOptions())
        with Client(lab.settings.socket) as client:
            until("the lab's host is observed", lambda: any(one["reachable"] for one in client.hosts()))
            yield client
        lab.run("scancel", "--partition=vm", check=False)
        await CONTROLLER.stop(lab.where)
        await AGENT.stop(lab.where)


@dataclass
class Counting:
    """A job that counts."""

    lab: LabUnderTest
    client: Client
    id: str
    file: Path

    @classmethod
    def submitted(cls, lab: LabUnderTest, client: Client, name: str, *options: str, fill: int = 0) -> Counting:
        """`fill`: so many MiB of its memory are random."""
        file = lab.user.home / name
        fills = f"head -c {fill}M /dev/urandom > /dev/shm/{name}; " if fill else ""
        id_ = lab.sbatch(fills + _COUNTS.format(file), "--time=30", f"--output={file}.out", *options)
        return cls(lab, client, id_, file)

    def vm(self) -> dict[str, Any]:
        found = [one for one in self.client.vms() if one["job_id"] == self.id]
        return found[0] if len(found) == 1 else {}

    def serves_on(self, host: str) -> bool:
        vm = self.vm()
        return bool(vm) and (vm["host"], vm["state"]) == (host, "serving")

    def goes_on_elsewhere(self, lease: str) -> bool:
        vm = self.vm()
        return bool(vm) and vm["host"] != lease and vm["state"] == "serving" and self.counts()

    def counted(self) -> list[str]:
        out = Path(f"{self.file}.out")
        return out.read_text().splitlines() if out.exists() else []

    def counts(self) -> bool:
        before = len(self.counted())
        time.sleep(1)
        return len(self.counted()) > before

    def ends_right(self) -> None:
        """It ends, its script began once, and its output has every line once."""
        Path(f"{self.file}.ends").touch()
        ended(self.client, self.id, "done")
        lines = self.counted()
        assert lines == [*map(str, range(1, len(lines))), "end"]
        assert len(self.file.read_text().splitlines()) == 1, "its script began once"
        assert accounted(self.lab, self.id, 90) == ("COMPLETED", "0:0")

    def eviction(self) -> dict[str, Any]:
        """The only one; a later run of the job knows those of earlier ones."""
        (found,) = self.client.jobs(self.id)[-1]["evictions"]
        return dict(found)


def on_a_lease(lab: LabUnderTest, client: Client, *jobs: Counting) -> dict[str, Any]:
    """The lease on which all these jobs run, because the lab's own host is drained."""
    until("the jobs run on a lease", lambda: all(job.file.exists() and len(job.counted()) > 3 for job in jobs), 240)
    (lease,) = [one for one in client.leases() if one["state"] == "held"]
    assert {job.vm()["host"] for job in jobs} == {lease["name"]}
    return dict(lease)


def evictions(client: Client, way: str, cause: str) -> int:
    """How many have begun, by the daemon's metrics."""
    found = [line for line in client.metrics().splitlines() if line.startswith("multiverse_evictions_total{")]
    return sum(int(float(line.split()[-1])) for line in found if f'way="{way}"' in line and f'cause="{cause}"' in line)


def leaves_nothing(lab: LabUnderTest, client: Client, lease: dict[str, Any]) -> None:
    name, own = lease["name"], lab.where.host(NODE)
    until("the lease is over", lambda: name not in [one["name"] for one in client.leases()])
    until("nothing is left on the node", lambda: not (own.leases / name).exists())


async def test_jobs_are_saved_within_kill_wait_and_go_on_elsewhere(lending: LabUnderTest) -> None:
    async with leasing(lending) as client:
        own = lending.settings.host.name
        client.change_hosts("drain", own)
        jobs = [
            Counting.submitted(lending, client, "saved", "--mem=200"),
            Counting.submitted(lending, client, "filled", "--mem=1000", fill=400),
        ]
        lease = on_a_lease(lending, client, *jobs)
        began = time.monotonic()
        lending.run("scancel", lease["pilot"])
        until("both are saved", lambda: [one["state"] for one in client.saved()] == ["stored", "stored"], KILL_WAIT)
        took = time.monotonic() - began
        leaves_nothing(lending, client, lease)
        client.change_hosts("resume", own)
        for job in jobs:
            until("the job goes on elsewhere", partial(job.goes_on_elsewhere, lease["name"]), 150)
        for job in jobs:
            job.ends_right()
            found = job.eviction()
            assert (found["way"], found["host"]) == ("save", lease["name"])
            assert f"leased host {lease['name']}: its pilot {lease['pilot']} is ending" in found["reason"]
        assert evictions(client, "save", "lease") == 2
        saved = sum(job.eviction()["memory"] for job in jobs)
        print(f"\n{saved} MiB of two VMs were saved {took:.1f} s after the first signal; KillWait is {KILL_WAIT} s")


async def test_a_controller_that_restarts_as_a_lease_ends_has_its_job_saved(lending: LabUnderTest) -> None:
    """No step of the pilot begins any more: it reaches the agent by its link."""
    async with leasing(lending) as client:
        own = lending.settings.host.name
        client.change_hosts("drain", own)
        job = Counting.submitted(lending, client, "restart", "--mem=200")
        lease = on_a_lease(lending, client, job)
        await CONTROLLER.stop(lending.where)
        lending.run("scancel", lease["pilot"])
        shown = lending.run("srun", f"--jobid={lease['pilot']}", "--overlap", "true", check=False).stderr
        assert "expired" in shown, shown
        await lifecycle.up(lending.where, LabOptions())
        until("it is saved", lambda: [one["state"] for one in client.saved()] == ["stored"], KILL_WAIT)
        leaves_nothing(lending, client, lease)
        client.change_hosts("resume", own)
        until("the job goes on elsewhere", partial(job.goes_on_elsewhere, lease["name"]), 150)
        job.ends_right()
        assert job.eviction()["way"] == "save" and evictions(client, "save", "lease") == 1


async def test_a_job_moves_off_a_lease_that_is_preempted(lending: LabUnderTest) -> None:
    async with leasing(lending, "[rebalance]\nkeeps = 86400\n") as client:
        own = lending.settings.host.name
        client.change_hosts("drain", own)
        job = Counting.submitted(lending, client, "moves", "--mem=200")
        lease = on_a_lease(lending, client, job)
        client.change_hosts("resume", own)
        lending.sbatch("true", "-p", "urgent", "--exclusive")
        began = time.monotonic()
        until("the job has moved", lambda: job.serves_on(own), GRACE_TIME)
        print(
            f"\nA VM moved {time.monotonic() - began:.1f} s after its lease was preempted; GraceTime is {GRACE_TIME} s"
        )
        until("it goes on", job.counts)
        leaves_nothing(lending, client, lease)
        job.ends_right()
        assert job.eviction()["way"] == "move" and evictions(client, "move", "lease") == 1


async def test_a_lease_whose_job_has_room_elsewhere_is_emptied_and_given_back(lending: LabUnderTest) -> None:
    async with leasing(lending, "[rebalance]\nkeeps = 5\n") as client:
        own = lending.settings.host.name
        client.change_hosts("drain", own)
        job = Counting.submitted(lending, client, "packed", "--mem=200")
        lease = on_a_lease(lending, client, job)
        client.change_hosts("resume", own)
        until("the job has moved", lambda: job.serves_on(own))
        until("it goes on", job.counts)
        leaves_nothing(lending, client, lease)
        job.ends_right()
        assert job.eviction()["way"] == "move" and evictions(client, "move", "packing") == 1
