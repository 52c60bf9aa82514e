"""Reservations of all nodes, and nodes that backfill plans to use, as root makes them beside users' jobs (decisions 85
and 86). slurmctld 22.05.8 used to crash."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest

from multiverse.client import Client
from tests.integration.backfill_cycles import backfill_each_second, cycles, slurmctld, words
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import ended, latest, nothing_left, until

pytestmark = pytest.mark.integration

_ALL = ("nodes=ALL", "users=root", "flags=maint,ignore_jobs", "starttime=now", "duration=10")


@pytest.fixture
def quick_backfill(lab: LabUnderTest, controller: Callable[[], int]) -> Iterator[None]:
    with backfill_each_second(lab):
        yield


@pytest.fixture
def reserve(lab: LabUnderTest) -> Iterator[Callable[..., None]]:
    """Reserve all nodes. What a failed test leaves is deleted."""
    yield lambda: lab.run("scontrol", "create", "reservation", "reservationname=maintenance", *_ALL)
    lab.run("scontrol", "delete", "reservationname=maintenance", check=False)


def admin_comment(lab: LabUnderTest, job: str) -> str:
    return lab.run("squeue", "-h", "-a", "-j", job, "-O", "admin_comment:0").stdout


def test_a_maintenance_reservation_costs_no_job_a_vm_and_no_node_crashes_slurmctld(
    lab: LabUnderTest, client: Client, controller: Callable[[], int], quick_backfill: None,
    reserve: Callable[[], subprocess.CompletedProcess[str]],
) -> None:  # fmt: skip
    """A job that runs goes on, and the VM of one that ends claims nothing. Jobs that come wait, and are told why."""
    before = slurmctld(lab)
    first = lab.sbatch("sleep 600", "--output=/dev/null")
    (vm,) = until("it runs", lambda: (r := latest(client, first)).get("state") == "allocated" and r)["vms"]
    reserve()
    until("the node is reserved", lambda: "RESERVED" in words(lab, vm))
    waiting = [lab.sbatch("true", "--time=5", "--output=/dev/null") for _ in range(2)]
    told = until("the user is told", lambda: "maintenance" in (text := admin_comment(lab, waiting[0])) and text)
    assert "reservation maintenance keeps all nodes" in told
    assert "reservation maintenance keeps all nodes" in client.explain(waiting[1])["jobs"][0]["text"]
    assert [each["name"] for each in client.vms()] == [vm] and latest(client, first)["state"] == "allocated"

    lab.run("scancel", first, user=lab.user)
    ended(client, first, "done")
    (left,) = client.vms()
    assert (left["name"], left["state"]) == (vm, "deleting"), "only its node is left"
    assert "RESERVED" in words(lab, vm), "Slurm keeps it"

    lab.run("scontrol", "delete", "reservationname=maintenance")
    for job in waiting:
        ended(client, job, "done")
    nothing_left(lab, client)
    looked = cycles(lab)

    def has_run_since() -> bool:
        """A cycle counts if a job waits: each does for a moment."""
        ended(client, lab.sbatch("true", "--output=/dev/null"), "done")
        return cycles(lab) > looked

    until("backfill has run since", has_run_since)
    nothing_left(lab, client)
    assert slurmctld(lab) == before, "it is the same process"


def test_a_vm_whose_job_ends_after_a_reconfiguration_is_released_at_once(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    """slurmctld 22.05 counts its job twice, and takes the node for busy until it does not answer any more."""
    before = slurmctld(lab)
    job = lab.sbatch("sleep 600", "--output=/dev/null")
    (vm,) = until("it runs", lambda: (r := latest(client, job)).get("state") == "allocated" and r)["vms"]
    lab.run("scontrol", "reconfigure")
    assert words(lab, vm) & {"ALLOCATED", "MIXED"}
    lab.run("scancel", job, user=lab.user)
    ended(client, job, "done")
    until("its VM and its node are gone", lambda: not client.vms() and not words(lab, vm), 20.0)
    nothing_left(lab, client)
    assert slurmctld(lab) == before
