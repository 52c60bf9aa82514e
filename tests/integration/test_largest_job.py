"""The largest job that the host can hold: accepted and run at exactly that size, refused at submission above it."""

from __future__ import annotations

import re
import subprocess

import pytest

from multiverse.client import Client
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import accounted, ended, nothing_left, until, written

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def largest(lab: LabUnderTest, client: Client) -> tuple[int, int]:
    """The CPUs and the memory in MiB of the largest job of the default image, as the controller published them."""
    limits = lab.settings.slurm.inbox.with_name("inbox.limits")

    def published() -> tuple[int, int] | None:
        text = limits.read_text() if limits.exists() else ""
        found = re.findall(r"^\S+ 1 \d+ \S+ 1 \d+/(\d+) \S+ (\d+)", text, re.MULTILINE)
        return (int(found[0][0]), int(found[0][1])) if found else None

    size: tuple[int, int] = until("the controller has published the largest sizes", published)
    return size


def submit(lab: LabUnderTest, cpus: int, memory: int, *options: str) -> subprocess.CompletedProcess[str]:
    sized = (f"--cpus-per-task={cpus}", f"--mem={memory}", *options)
    return lab.run("sbatch", "--parsable", *sized, "--wrap=nproc", user=lab.user, check=False)


def test_a_job_above_the_largest_size_is_refused_at_submission(lab: LabUnderTest, largest: tuple[int, int]) -> None:
    cpus, memory = largest
    assert (cpus, memory) < (lab.settings.host.cores + 1, lab.settings.host.memory), "a VM costs more than its job"
    for done in (submit(lab, cpus, memory + 1), submit(lab, cpus + 1, memory), submit(lab, 1, memory + 1, "-Cslim")):
        assert done.returncode != 0 and f"{cpus} CPUs and {memory} MiB" in done.stderr, done


def test_a_job_of_exactly_the_largest_size_runs(lab: LabUnderTest, client: Client, largest: tuple[int, int]) -> None:
    cpus, memory = largest
    out = lab.user.home / "largest.out"
    done = submit(lab, cpus, memory, f"--output={out}")
    assert done.returncode == 0, done
    job = done.stdout.strip()
    ended(client, job, "done")
    assert written(out).split() == [str(cpus)] and accounted(lab, job) == ("COMPLETED", "0:0")
    assert len(client.jobs(job)) == 1
    nothing_left(lab, client)


def test_a_gang_that_the_host_cannot_hold_at_once_is_refused_and_one_that_it_can_hold_runs(
    lab: LabUnderTest, client: Client, largest: tuple[int, int]
) -> None:
    cpus, _ = largest
    assert cpus >= 4, "two nodes of two CPUs have to fit"

    def gang(nodes: str, tasks: int) -> subprocess.CompletedProcess[str]:
        out = lab.user.home / "gang.out"
        options = ("--parsable", f"-N{nodes}", f"-n{tasks}", "--mem=200", f"--output={out}")
        return lab.run("sbatch", *options, "--wrap=echo $SLURM_JOB_NUM_NODES", user=lab.user, check=False)

    refused = gang("2", 2 * cpus)
    assert (
        refused.returncode != 0 and f"2 nodes with {cpus} CPUs" in refused.stderr and "can hold 1 of" in refused.stderr
    )
    assert gang(f"{cpus + 1}", cpus + 1).returncode != 0, "one node of one CPU too many"
    assert gang(f"2-{cpus}", 2 * cpus).returncode != 0, "no number of the range has fewer CPUs in all"
    for nodes, expected in (("2", "2"), (f"1-{cpus}", "1")):
        done = gang(nodes, 4)
        assert done.returncode == 0, done
        job = done.stdout.strip()
        ended(client, job, "done")
        assert written(lab.user.home / "gang.out").strip() == expected
        assert len(client.jobs(job)) == 1, "it was cancelled and tried again by nobody"
    nothing_left(lab, client)
