"""What users of the real lab are told while their jobs wait."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable

import pytest

from multiverse.client import Client
from multiverse.core.queue import BEHIND
from multiverse_lab.lab.services import CONTROLLER
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import latest, until

pytestmark = pytest.mark.integration

WHY = "waiting for capacity: the hosts are full"


EXPECTED = re.compile(r"; expected to start by \d{4}-\d\d-\d\d \d\d:\d\d UTC")
"""What the first job reads besides. Another controller may expect it a minute sooner or later."""


def records(lab: LabUnderTest) -> dict[str, str]:
    """AdminComment of each of slurmctld's records at the gate, by its job id, without expected starts."""
    return {job: EXPECTED.sub("", text) for job, text in comments(lab).items()}


def comments(lab: LabUnderTest) -> dict[str, str]:
    """The same as it is."""
    rows = lab.run("squeue", "-h", "-r", "-t", "PD", "-p", "vm", "-O", "JobID:0;,admin_comment:0").stdout.splitlines()
    return dict(row.split(";", 1) for row in rows)


def comments_written(lab: LabUnderTest) -> int:
    return sum(path.read_text().count("setting admin_comment") for path in lab.where.root.rglob("slurmctld.log"))


def test_waiting_jobs_and_arrays_are_told_once_and_a_restart_repeats_nothing(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    """One job has all CPUs of the host."""
    full = lab.sbatch("sleep 600", "-n8", "--mem=800", "--output=/dev/null")
    until("the host is full", lambda: latest(client, full).get("state") == "allocated")
    array = lab.sbatch("true", "--array=1-30")
    lab.run("scontrol", "update", f"JobId={array}_7", "AdminComment=reviewed")
    jobs = [lab.sbatch("true") for _ in range(13)]
    until("all are told", lambda: all("multiverse:" in text for text in records(lab).values()), 60.0)
    told = records(lab)
    assert len(told) == 1 + 1 + len(jobs), "the array is not split"
    assert Counter(text for job, text in told.items() if job in jobs) == {
        f"[multiverse: {WHY}]": 9,
        f"[multiverse: {BEHIND}]": 4,
    }
    assert Counter(text for job, text in told.items() if job not in jobs) == {
        f"[multiverse: {WHY}]": 1,
        f"reviewed [multiverse: {WHY}]": 1,
    }
    before = comments(lab)
    expected = {job for job, text in before.items() if EXPECTED.search(text)}
    assert expected == told.keys() - set(jobs), "the first, which is the array, of which two records have the text"
    assert latest(client, jobs[0])["waiting"] == WHY and latest(client, jobs[-1])["waiting"] == str(BEHIND)
    written = comments_written(lab)
    asyncio.run(CONTROLLER.stop(lab.where))
    controller()
    until("jobs have their reasons again", lambda: latest(client, jobs[-1]).get("waiting") == str(BEHIND))
    extra = lab.sbatch("true")
    until("another job is told", lambda: "multiverse:" in records(lab)[extra], 60.0)
    assert records(lab) == told | {extra: f"[multiverse: {BEHIND}]"}
    changed = comments(lab).items() - before.items()
    assert comments_written(lab) == written + len(changed), "no text was written that was there"
    lab.run("scancel", full, array, *jobs, extra)


def test_a_limit_of_an_array_that_its_user_changes_as_a_task_starts_holds_at_once(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    """Slurm's table of jobs is the same before and after such a change, and the array has just been read."""
    controller()
    array = lab.sbatch("sleep 600", "--array=1-3%1", "--output=/dev/null")

    def states() -> list[str]:
        return [latest(client, f"{array}_{task}").get("state", "") for task in (1, 2, 3)]

    until("one task runs", lambda: states() == ["allocated", "queued", "queued"])
    lab.run("scontrol", "update", f"JobId={array}", "ArrayTaskThrottle=2", user=lab.user)
    until("two tasks run", lambda: states() == ["allocated", "allocated", "queued"], 30.0)
    lab.run("scontrol", "update", f"JobId={array}", "ArrayTaskThrottle=0")
    until("all tasks run after the operator's change", lambda: states() == ["allocated"] * 3, 30.0)
    lab.run("scancel", array)
