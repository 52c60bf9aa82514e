"""`multiverse audit identity` on the real lab: clones that were made at the same time share no identity."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import pytest

from multiverse.client import Client
from tests.integration.conftest import LabUnderTest
from tests.integration.test_jobs import ended, latest, nothing_left, until
from tests.integration.test_status import multiverse

pytestmark = pytest.mark.integration


def all_run(client: Client, tasks: Sequence[str]) -> None:
    until("all run", lambda: all(latest(client, task).get("state") == "allocated" for task in tasks))


def test_two_clones_share_no_identity(lab: LabUnderTest, client: Client, controller: Callable[[], int]) -> None:
    job = lab.sbatch("sleep 900", "--array=1-2", "--output=/dev/null")
    tasks = [f"{job}_1", f"{job}_2"]
    all_run(client, tasks)
    done = multiverse(lab, "audit", "identity")
    assert done.returncode == 0 and "2 VMs, all distinct." in done.stdout, done.stdout
    lab.run("scancel", job, user=lab.user)
    for task in tasks:
        ended(client, task, "done")


@pytest.mark.slow
def test_clones_made_together_share_no_identity_and_keep_theirs(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    alone = multiverse(lab, "audit", "identity")
    assert alone.returncode == 1 and "no two VMs" in alone.stdout
    go = lab.user.home / "audited"
    # The jobs keep their CPUs busy; together they have more CPUs than most hosts of this test.
    job = lab.sbatch(f"until [ -e {go} ]; do :; done", "--array=1-4", "--output=/dev/null")
    tasks = [f"{job}_{task}" for task in range(1, 5)]
    all_run(client, tasks)
    began = time.monotonic()

    done = multiverse(lab, "audit", "identity", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["distinct"], found
    assert sorted(vm["job_id"] for vm in found["vms"]) == tasks
    first = {vm["name"]: vm for vm in found["vms"]}
    assert all(vm["facts"][key] for vm in first.values() for key in ("machine_id", "boot_id", "random", "mac"))

    # Another daemon asks a minute later: every identity is the same, and every clock is still right.
    asked = controller()
    lab.run("kill", "-9", str(asked))
    controller()
    until("the new daemon observes", lambda: all(source["known"] for source in client.status()["sources"]))
    until("a minute is over", lambda: time.monotonic() - began > 60)
    done = multiverse(lab, "audit", "identity")
    assert done.returncode == 0 and "4 VMs, all distinct." in done.stdout, done.stdout
    for vm in client.audit_identity()["vms"]:
        before = first[vm["name"]]["facts"]
        assert {key for key, value in vm["facts"].items() if value != before[key]} == {"fresh"}
        assert abs(vm["skew"]) < 1000
    go.touch()
    for task in tasks:
        ended(client, task, "done")
    nothing_left(lab, client)
