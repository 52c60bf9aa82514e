"""A full partition beside one that nodes are leased from, with Slurm's multifactor priorities: on a real slurmctld."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse import config
from multiverse.client import Client
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.images import catalog
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.services import AGENT, CONTROLLER
from tests.integration.conftest import LabUnderTest, new_lab
from tests.integration.images import slim
from tests.integration.watch import ended, until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

FULL, LENT = "full", "lent"
_SLURM = f"""
PriorityType=priority/multifactor
PriorityCalcPeriod=1
PriorityMaxAge=1-0
PriorityWeightAge=86400
PriorityWeightFairShare=1000
PriorityWeightJobSize=1000
PriorityWeightPartition=1000
PriorityWeightTRES=CPU=1000,Mem=1000
PartitionName={FULL} Nodes=mvp1 PriorityJobFactor=5 MaxTime=INFINITE State=UP
PartitionName={LENT} Nodes=mvp2 PriorityJobFactor=1 MaxTime=INFINITE State=UP
"""
_SITE = f"""
[[overflow]]
partition = "{FULL}"
min_wait = 1
[[lease]]
partition = "{LENT}"
min_wait = 1
idle = 30
time_limit = 1200
user = "{{user}}"
become = ["{{become}}", "--reuid=0", "--regid=0", "--clear-groups", "--"]
"""


@pytest.fixture(scope="module")
def overflowing(accelerator: Path) -> Iterator[LabUnderTest]:
    """A lab with two bare-metal nodes, one of each partition. The first one is taken. Neither has images."""
    slim()
    options = LabOptions(cores=2, memory=6144, physical=2, settings={"image": {"source": ""}})
    with new_lab(accelerator, options, controller=False) as made:
        become = made.where.root.parent / "become"  # as sudo would be, on a machine without it
        shutil.copy(str(shutil.which("setpriv")), become)
        become.chmod(0o4755)
        (made.where.etc / "site.conf").write_text(_SLURM)
        (made.where.etc / "site.toml").write_text(_SITE.format(user=made.user.name, become=become))
        asyncio.run(lifecycle.up(made.where, LabOptions(), controller=False))
        taken = made.sbatch("sleep 3600", "-p", FULL, "--cpus-per-task=2", "--time=120", "--mem=100")
        until("the node is taken", lambda: shown(made, taken, "%T") == "RUNNING")
        yield replace(made, settings=config.load(made.where.settings))


def shown(lab: LabUnderTest, job: str, what: str) -> str:
    """What squeue shows of a job."""
    return lab.run("squeue", "-h", "-a", "-t", "all", "-j", job, "-o", what, check=False).stdout.strip()


def times(lab: LabUnderTest, job: str) -> list[str]:
    """When a job was submitted, could have started, and began to age."""
    columns = ("SubmitTime", "EligibleTime", "AccrueTime", "Dependency")
    wanted = ",".join(f"{one}:40" for one in columns)
    return lab.run("squeue", "-h", "-a", "-t", "all", "-j", job, "-O", wanted).stdout.split()


def priority(lab: LabUnderTest, job: str) -> int:
    return int(shown(lab, job, "%Q"))


async def test_a_job_that_is_moved_and_put_back_has_the_priority_of_one_that_was_not(overflowing: LabUnderTest) -> None:
    """At the gate, and in the partition of VMs, it may have another one meanwhile: Slurm takes a job's TRES as shares
    of its partition. There it does not wait for its turn."""
    lab, scheduler = overflowing, SlurmScheduler(overflowing.settings, "xp")
    options = ("-p", FULL, "--mem=100", "--time=5")
    moved, twin = (lab.sbatch("true", *options) for _ in range(2))
    until("both age", lambda: all("N/A" not in times(lab, job) for job in (moved, twin)))
    until("both have a priority", lambda: min(priority(lab, job) for job in (moved, twin)) > 1)
    features = f"{lab.settings.job_vms.feature},mv_77,mv_from_{FULL}"
    lab.run("scontrol", "update", "NodeName=mvp1", f"AvailableFeatures={features}", f"ActiveFeatures={features}")
    try:
        before = times(lab, moved), priority(lab, moved)
        ref = (await scheduler.observe()).jobs[moved].ref
        await scheduler.pin(ref, "mv_77", ("mvp1",), "instant on h")
        found = [times(lab, moved)]
        await scheduler.unpin(ref)
        found.append(times(lab, moved))
        await scheduler.restore(ref)
        found.append(times(lab, moved))
        assert found == [before[0]] * 3 and priority(lab, moved) >= before[1]
        computed = priority(lab, twin)
        until("priorities are computed again", lambda: priority(lab, twin) > computed, 200)
        until("for both", lambda: abs(priority(lab, moved) - priority(lab, twin)) <= 3, 90)
        assert times(lab, moved) == before[0]
    finally:
        lab.run("scancel", moved, twin)


def test_a_job_of_a_full_partition_runs_on_a_lease_of_another_one(overflowing: LabUnderTest) -> None:
    """The lab's own host is drained, so only a lease can have the job's VM. The image is brought to it by sbcast."""
    lab, output = overflowing, overflowing.user.home / "moved"
    asyncio.run(lifecycle.up(lab.where, LabOptions()))
    try:
        with Client(lab.settings.socket) as client:
            own = lab.settings.host.name
            until("the lab's host is observed", lambda: any(one["reachable"] for one in client.hosts()))
            client.change_hosts("drain", own)
            job = lab.sbatch("hostname; sleep 3", "-p", FULL, "--time=5", "--mem=300", f"--output={output}")
            until("it ages", lambda: "N/A" not in times(lab, job))
            before = times(lab, job)
            until("it is moved", lambda: shown(lab, job, "%P") == lab.settings.slurm.partition, 240)
            assert times(lab, job) == before
            (lease,) = client.leases()
            (vm,) = [one for one in client.vms() if one["job_id"] == job]
            assert vm["host"] == lease["name"] and (lease["partition"], lease["node"]) == (LENT, "mvp2")
            images = lab.where.host("mvp2").images
            assert catalog.recorded_digest(images / "slim") == catalog.recorded_digest(slim().path)
            assert [path.name for path in images.iterdir() if "@" in path.name] == []
            row = ended(client, job, "done")
            assert row["origin"] == FULL
            assert until("its output is there", lambda: output.exists() and output.read_text()).startswith("mv")
            assert f"moved from partition {FULL}" in lab.run("scontrol", "show", "job", job).stdout
            until("the lease is given back", lambda: not client.leases() and not shown_in(lab, LENT))
    finally:
        asyncio.run(CONTROLLER.stop(lab.where))
        asyncio.run(AGENT.stop(lab.where))


def shown_in(lab: LabUnderTest, partition: str) -> str:
    return lab.run("squeue", "-h", "-p", partition).stdout.strip()
