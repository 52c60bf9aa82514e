"""Jobs of a partition of physical nodes that is full, in VMs: on a real slurmctld with a bare-metal node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from multiverse import config
from multiverse.client import Client
from multiverse.core.errors import Refused
from multiverse.core.model.job import Job, JobState
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.services import CONTROLLER
from tests.integration.conftest import LabUnderTest, new_lab
from tests.integration.images import slim
from tests.integration.watch import ended, latest, output_of, until

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")]

PARTITION = "physical"
_UNTIL = "until [ -e {0} ]; do sleep 0.2; done"


@pytest.fixture(scope="module")
def overflowing(accelerator: Path) -> Iterator[LabUnderTest]:
    """A lab whose bare-metal node has one core, in a partition that overflows; without a controller at first."""
    slim()
    with new_lab(accelerator, LabOptions(cores=2, memory=6144, physical=1), controller=False) as made:
        text = f'[[overflow]]\npartition = "{PARTITION}"\nmin_wait = 1\n'
        (made.where.etc / "site.toml").write_text(text)
        asyncio.run(lifecycle.up(made.where, LabOptions(), controller=False))
        yield replace(made, settings=config.load(made.where.settings))


@dataclass
class Full:
    """The node is taken by a job, until `file` exists."""

    lab: LabUnderTest
    job: str
    file: Path


@pytest.fixture
def full(overflowing: LabUnderTest) -> Iterator[Full]:
    file = overflowing.user.home / f"enough{os.urandom(4).hex()}"
    job = overflowing.sbatch(_UNTIL.format(file), "-p", PARTITION, "--cpus-per-task=2", "--time=20", "--mem=100")
    until("the node is taken", lambda: shown(overflowing, job, "%T") == "RUNNING")
    yield Full(overflowing, job, file)
    file.touch()
    overflowing.run("scancel", f"--partition={PARTITION},vm", check=False)
    until("the node is free", lambda: not overflowing.run("squeue", "-h", "-a").stdout)


def shown(lab: LabUnderTest, job: str, what: str) -> str:
    """What squeue shows of a job."""
    return lab.run("squeue", "-h", "-a", "-t", "all", "-j", job, "-o", what, check=False).stdout.strip()


def place(lab: LabUnderTest, job: str) -> list[str]:
    """What a job's place in the queue depends on: its priority, and when it was submitted and could have started."""
    columns = ("PriorityLong", "SubmitTime", "EligibleTime", "AccrueTime", "Dependency")
    return lab.run("squeue", "-h", "-a", "-j", job, "-O", ",".join(f"{one}:40" for one in columns)).stdout.split()


def test_jobs_of_a_full_partition_run_in_vms_and_those_that_cannot_wait(full: Full) -> None:
    lab, output = full.lab, full.lab.user.home / "moved"
    asyncio.run(lifecycle.up(lab.where, LabOptions()))
    try:
        with Client(lab.settings.socket) as client:
            options = ("-p", PARTITION, "--time=5", "--mem=100")
            stays = lab.sbatch("hostname", *options, "--no-requeue", f"--output={lab.user.home}/stayed")
            moves = lab.sbatch("hostname; id -un", *options, f"--output={output}")
            row = ended(client, moves, "done")
            assert row["origin"] == PARTITION
            name, user = until("its output is there", lambda: output.exists() and output_of(output).split())
            assert name.startswith("mv") and name != "mvp1" and user == lab.user.name
            assert f"moved from partition {PARTITION}" in lab.run("scontrol", "show", "job", moves).stdout
            assert shown(lab, stays, "%T %P") == f"PENDING {PARTITION}" and not latest(client, stays)
            (why,) = client.explain(stays)["jobs"]
            assert "--no-requeue are not moved" in why["text"]
            full.file.touch()
            until("the other job has run", lambda: shown(lab, stays, "%T") == "COMPLETED")
            assert (lab.user.home / "stayed").read_text().strip() == "mvp1"
            assert not client.vms() or until("no VM is left", lambda: not client.vms())
    finally:
        asyncio.run(CONTROLLER.stop(lab.where))


async def test_a_job_keeps_its_place_when_it_is_moved_and_put_back(full: Full) -> None:
    """Each step is done twice, and the job's record alone tells where it belongs."""
    lab, scheduler = full.lab, SlurmScheduler(full.lab.settings, "xp")
    one, two = (lab.sbatch("true", "-p", PARTITION, "--mem=100", "--time=5") for _ in range(2))
    array = lab.sbatch("true", "-p", PARTITION, "--mem=100", "--time=5", "--array=0-2")

    async def job_of(job: str) -> Job:
        return (await scheduler.observe()).jobs[job]

    async def waits_for_nodes(job: str) -> Job:
        for _ in range(600):
            if (found := await job_of(job)).eligible:
                return found
            await asyncio.sleep(0.1)
        raise AssertionError(found)

    # Slurm accepts features that some node has.
    features = f"{lab.settings.job_vms.feature},mv_77,mv_from_{PARTITION}"  # the first is set by the node's agent
    lab.run("scontrol", "update", "NodeName=mvp1", f"AvailableFeatures={features}", f"ActiveFeatures={features}")
    try:
        for job in (one, f"{array}_1"):
            waiting = await waits_for_nodes(job)
            before = place(lab, job)
            assert (waiting.origin, waiting.at_origin, waiting.gated, waiting.problem) == (PARTITION, True, False, "")
            await scheduler.unpin(waiting.ref)  # it is where it belongs
            assert (await job_of(job)).at_origin
            for _ in range(2):
                await scheduler.pin(waiting.ref, "mv_77", ("mvp1",), "instant on h")
            moved = await job_of(job)
            assert (moved.origin, moved.at_origin, moved.pinned) == (PARTITION, False, "mv_77")
            assert moved.ref == waiting.ref and moved.request == waiting.request
            assert place(lab, job)[1:] == before[1:], "its priority is that of a job that is let through"
            told = f"[multiverse: moved from partition {PARTITION}, which was full: instant on h]"
            assert f"AdminComment={told}" in lab.run("scontrol", "show", "job", job).stdout
            for _ in range(2):
                await scheduler.unpin(moved.ref)
            gated = await job_of(job)
            assert (gated.origin, gated.gated, gated.pinned, gated.state) == (PARTITION, True, None, JobState.PENDING)
            for _ in range(2):
                await scheduler.restore(gated.ref)
            back = await waits_for_nodes(job)
            again = waiting._replace(
                rank=back.rank, other_id=back.other_id
            )  # a task that was changed has a number of its own
            assert back == again and place(lab, job) == before
            assert shown(lab, job, "%f") == "(null)"
        # Slurm changes the partition, and refuses the features of a node that has gone.
        waiting = await waits_for_nodes(two)
        before = place(lab, two)
        with pytest.raises(Refused):
            await scheduler.pin(waiting.ref, "mv_78", ("mvp1",))
        await scheduler.unpin((await job_of(two)).ref)
        await scheduler.restore((await job_of(two)).ref)
        assert (await job_of(two)).at_origin and place(lab, two) == before
        assert (await job_of(f"{array}_2")).at_origin, "the other tasks of the array stay together, and where they are"
    finally:
        lab.run("scancel", one, two, array)
