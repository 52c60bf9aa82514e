"""A job that Slurm itself queues again is not run more often than Slurm would."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.conftest import LabUnderTest
from tests.integration.restarting_daemon import StartDaemon
from tests.integration.watch import ended, latest, until

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root")]

PASSWD = Path("/etc/passwd")


@contextmanager
def vanished(name: str) -> Iterator[None]:
    """The user is in no name service of slurmctld's."""
    text = PASSWD.read_text()
    try:
        PASSWD.write_text("".join(line for line in text.splitlines(True) if not line.startswith(f"{name}:")))
        yield
    finally:
        PASSWD.write_text(text)


@pytest.mark.slow
def test_a_job_that_slurm_cannot_launch_waits_for_slurms_own_delay(
    lab: LabUnderTest, start_daemon: StartDaemon
) -> None:
    """slurmctld makes no credential for a user whom it cannot name, and queues the job again, with a begin time two
    minutes later ("Can not create job credential, attempting to requeue"), or held (24.11)."""
    daemon = start_daemon([])
    until("it is up", daemon.ensure_up)
    client, user = daemon.client, lab.other
    first = lab.sbatch("true", "--output=/dev/null", user=user)  # the controller knows the user from here on
    ended(client, first, "done")
    job = lab.sbatch("true", "--hold", "--output=/dev/null", user=user)
    until("it is seen", lambda: latest(client, job))
    with vanished(user.name):
        lab.run("scontrol", "release", job)
        until("Slurm queues it again", lambda: restarts(lab, job) == 1 and len(client.jobs(job)) == 2)
        until("it is over", lambda: client.jobs(job)[0]["state"] == "requeued")
        held = lab.run("squeue", "-h", "-j", job, "-o", "%Q").stdout.strip() == "0"
        began = time.monotonic()
        while time.monotonic() - began < 15:  # in which it ran six times
            assert restarts(lab, job) == 1 and latest(client, job)["state"] in ("ungated", "queued")
            time.sleep(1)
        (why,) = client.explain(job)["jobs"]
        assert held or "the scheduler queued it again, not because of Multiverse" in why["text"]
        remedy = f"scontrol release {job}" if held else f"scontrol update JobId={job} StartTime=now"
        assert remedy in why["todo"]
    lab.run(*remedy.split(), user=user)
    ended(client, job, "done")
    assert restarts(lab, job) == 1


def restarts(lab: LabUnderTest, job: str) -> int:
    shown = lab.run("scontrol", "-o", "show", "job", job).stdout
    return int(shown.partition("Restarts=")[2].split()[0])
