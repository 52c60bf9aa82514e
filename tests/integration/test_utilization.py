"""What a job uses is seen from outside of its VM, while it runs and afterwards."""

from __future__ import annotations

import re
from typing import Any

import pytest

from multiverse.client import Client
from multiverse.drivers.slurm.site.conf import seconds_of
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import ended, latest, nothing_left, until

pytestmark = pytest.mark.integration

MIB = 300

BURN = f"""exec python3 -c "
import os
held = b'x' * ({MIB} << 20)
while not os.path.exists('burnt'):
    pass
" """


def told(lab: LabUnderTest, job: str) -> str:
    """What the user of a job reads in its accounting. sacctmgr of 22.05 writes small letters."""
    return lab.run("sacct", "-n", "-X", "-P", "-j", job, "-o", "AdminComment").stdout.strip().lower()


@pytest.mark.slow
def test_a_job_that_burns_cpu_and_memory_shows_in_the_figures(lab: LabUnderTest, client: Client) -> None:
    job = lab.sbatch(BURN, "--mem=400", "--output=/dev/null")
    until("the job runs", lambda: latest(client, job).get("state") == "allocated")

    def used() -> dict[str, Any] | None:
        """What its VM uses now, once that includes the job's memory."""
        found = next((one for one in client.utilization() if one["job_id"] == job), None)
        now = found and found["now"]
        return found if now and now["memory"] > MIB and now["cpus"] > 0.1 else None

    try:
        shown = until("its VM is seen to burn", used)
    finally:
        (lab.user.home / "burnt").touch()
    assert shown["host"] == client.hosts()[0]["name"]
    host = client.utilization([shown["host"]])[0]
    assert host["kind"] == "host" and host["now"]["cpus"] > 0.1 and host["now"]["memory"] > MIB
    assert f'multiverse_vm_memory_used_bytes{{host="{shown["host"]}",vm="{shown["name"]}"}}' in client.metrics()
    ended(client, job, "done")
    nothing_left(lab, client)
    usage = until("what it used is known", lambda: latest(client, job)["usage"])
    assert usage["cpus"] > 0.1 and MIB < usage["peak"] < 2 * MIB and usage["seconds"] > 1

    until("its user is told", lambda: told(lab, job) == f"[multiverse: {usage['text']}]".lower())


@pytest.mark.slow
def test_each_task_of_an_array_is_told_what_it_used(lab: LabUnderTest, client: Client) -> None:
    array = lab.sbatch("sleep 3", "--array=0-1", "--output=/dev/null")
    for task in (f"{array}_0", f"{array}_1"):
        ended(client, task, "done")
        usage = until("what the task used is known", lambda task=task: latest(client, task)["usage"])
        line = f"[multiverse: {usage['text']}]".lower()
        until("its user is told", lambda task=task, line=line: told(lab, task) == line)


@pytest.mark.slow
def test_no_less_is_told_than_sacct_has(lab: LabUnderTest, client: Client) -> None:
    """Eight jobs want a CPU each for more than a minute; where the machine has fewer, their guests count more than it
    gave."""
    jobs = [lab.sbatch("timeout 75 sh -c 'while :; do :; done'", "--output=/dev/null") for _ in range(8)]
    for job in jobs:
        ended(client, job, "done")
    for job in jobs:
        line = until("its user is told", lambda job=job: "used" in (text := told(lab, job)) and text)
        used, seconds = (float(re.findall(form, line)[0]) for form in (r"used ([\d.]+) of 1 cpu\b", r"in (\d+) s"))
        asked = ("sacct", "-n", "-P", "-j", job, "-o", "TotalCPU")
        counted = seconds_of(lab.run(*asked).stdout.splitlines()[0])
        assert counted > 1 and used >= counted / seconds - 0.02, (line, counted)
    nothing_left(lab, client)
