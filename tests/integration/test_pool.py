"""Warm pools on the real lab: VMs that are there before their job, each for one job alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from multiverse.client import Client
from tests.integration.conftest import CONTROLLER, LabUnderTest, more_settings
from tests.integration.watch import ended, kill, nothing_left, until, written

pytestmark = pytest.mark.integration

POOLS = """\
[[pool]]
depth = "parked"
min = 1

[[pool]]
depth = "joined"
min = 1
memory = 300
"""


@pytest.fixture(scope="module")
def controller(lab: LabUnderTest, controller: Callable[[], int]) -> Iterator[Callable[[], int]]:
    """The lab's controller keeps two pools while this module's tests run, and nothing of them afterwards."""
    with more_settings(lab, POOLS):
        yield controller
    nothing_left(lab, Client(lab.settings.socket))


def full(client: Client) -> dict[str, str]:
    """The spare of each depth by its name, once the pools are full."""

    def ask() -> dict[str, str] | None:
        pools = client.status()["pools"]
        spares = {vm["state"]: vm["name"] for vm in client.vms() if not vm["job_id"] and vm["state"] in DEPTHS}
        return spares if all(p["ready"] == p["wanted"] == 1 for p in pools) and len(spares) == 2 else None

    return dict(until("both pools are full", ask))


def on_offer(lab: LabUnderTest, client: Client, controller: Callable[[], int]) -> dict[str, str]:
    """The spares, once the joined one is on offer from a controller that would not be started anew now."""
    controller()
    found, spares = full(client), lab.settings.slurm.inbox / "spares" / "list"
    until("it is on offer", lambda: spares.exists() and found["joined"] in spares.read_text())
    return found


DEPTHS = ("parked", "joined")


def cpus(client: Client) -> int:
    """More than the template has, where guests take up CPUs while they run."""
    (host,) = client.hosts()
    return 2 if "plug_cpus" in host["images"]["slim"] else 1


def events(client: Client, job: str) -> list[dict[str, Any]]:
    return [entry for one in client.timeline(job) for entry in one["entries"]]


def test_a_job_of_another_size_takes_the_parked_one_and_the_pool_is_filled_behind_it(
    lab: LabUnderTest, client: Client
) -> None:
    before, most = full(client), cpus(client)
    out = lab.user.home / "parked.out"
    script = "hostname; nproc; awk '/MemTotal/{print int($2/1024)}' /proc/meminfo; id -un"
    job = lab.sbatch(script, f"--output={out}", f"-n{most}", "--mem=700")
    ended(client, job, "done")
    host, has, memory, user = written(out).split()
    assert (host, has, user) == (before["parked"], str(most), lab.user.name) and int(memory) >= 700
    assert any(entry["event"] == "taken" for entry in events(client, job))
    assert full(client)["parked"] != before["parked"]


def test_a_job_that_fits_the_joined_one_is_its_user_at_home_there(lab: LabUnderTest, client: Client) -> None:
    before = full(client)
    out = lab.user.home / "joined.out"
    job = lab.sbatch("hostname; id -un; echo $HOME; pwd; date +%s", f"--output={out}", "--mem=250")
    ended(client, job, "done")
    host, user, home, place, _ = written(out).split()
    assert (host, user, home, place) == (before["joined"], lab.user.name, str(lab.user.home), str(lab.user.home))
    told = lab.run("scontrol", "show", "job", job).stdout
    assert "AdminComment=[multiverse: instant on" in told and "joined before" in told
    assert any(entry["event"] == "took a spare" for entry in events(client, job)), "as it was submitted"
    after = full(client)
    assert after["joined"] != before["joined"], "whoever has served a job serves no other"
    assert after["parked"] == before["parked"]


def test_left_to_us_the_kind_is_chosen_and_the_reason_is_told(lab: LabUnderTest, client: Client) -> None:
    full(client)
    job = lab.sbatch("true", "--output=/dev/null", "--constraint=auto", f"-n{cpus(client)}", "--mem=700")
    ended(client, job, "done")
    (admitted,) = [entry for entry in events(client, job) if entry["event"] == "admitted"]
    assert "parked before, one is parked" in admitted["reason"]
    assert admitted["reason"] in lab.run("scontrol", "show", "job", job).stdout


def test_srun_takes_the_joined_one_too(lab: LabUnderTest, client: Client) -> None:
    before = full(client)
    done = lab.run("srun", "--mem=250", "sh", "-c", "hostname; id -un", user=lab.user)
    assert done.stdout.split() == [before["joined"], lab.user.name]


def test_what_waits_at_the_gate_gets_the_joined_one_once_it_is_withdrawn(lab: LabUnderTest, client: Client) -> None:
    before = full(client)
    out = lab.user.home / "array.out"
    job = lab.sbatch("hostname", f"--output={out}", "--mem=250", "--array=7-7")
    ended(client, f"{job}_7", "done")
    assert written(out).split() == [before["joined"]]
    story = {entry["event"] for entry in events(client, f"{job}_7")}
    assert "taken" in story and "took a spare" not in story


def test_a_job_that_came_when_the_controller_had_died_waits_in_its_node_until_that_is_back(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    before = on_offer(lab, client, controller)
    out = lab.user.home / "alone.out"
    kill(controller())
    job = lab.sbatch("hostname; id -un", f"--output={out}", "--mem=250")
    until("it runs", lambda: state(lab, job) == "RUNNING")
    time.sleep(1.0)
    assert state(lab, job) == "RUNNING" and not out.exists(), "its user is not known there yet"
    controller()
    ended(client, job, "done")
    assert written(out).split() == [before["joined"], lab.user.name]


def test_an_immediate_job_starts_on_one(lab: LabUnderTest, client: Client, controller: Callable[[], int]) -> None:
    before = on_offer(lab, client, controller)
    done = lab.run("srun", "--immediate", "--mem=250", "hostname", user=lab.user)
    assert done.stdout.split() == [before["joined"]]


def test_no_job_takes_one_when_the_controller_was_stopped(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    before = full(client)
    asyncio.run(CONTROLLER.stop(lab.where))
    job = lab.sbatch("true", "--output=/dev/null", "--mem=250")
    shown = lab.run("squeue", "-h", "-a", "-j", job, "-o", "%T %P %f").stdout.split()
    assert shown == ["PENDING", "vm", "mvgate"]
    controller()
    ended(client, job, "done")
    assert any(entry["event"] == "taken" for entry in events(client, job)), "at the gate"
    assert full(client)["joined"] != before["joined"]


@pytest.mark.slow
def test_a_job_that_is_cancelled_before_it_was_let_in_leaves_nothing(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    before = on_offer(lab, client, controller)
    kill(controller())
    job = lab.sbatch("true", "--output=/dev/null", "--mem=250")
    until("it runs", lambda: state(lab, job) == "RUNNING")
    lab.run("scancel", job, user=lab.user)
    controller()
    until("it is over", lambda: not state(lab, job))
    assert full(client)["joined"] != before["joined"], "whoever was taken serves no other"


@contextmanager
def submissions_tested(lab: LabUnderTest) -> Iterator[None]:
    """Meanwhile the other user tests submissions in a loop, and submits nothing."""
    over = threading.Event()

    def loop() -> None:
        while not over.wait(0.2):
            lab.run("sbatch", "--test-only", "--mem=250", "--wrap=true", user=lab.other, check=False)

    thread = threading.Thread(target=loop, name="submissions")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_a_user_who_only_tests_submissions_gets_no_spares_for_a_while_and_others_go_on(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    first, spares = on_offer(lab, client, controller)["joined"], lab.settings.slurm.inbox / "spares"
    numbers = [0]

    def excluded() -> bool:
        numbers.append(sum(not vm["job_id"] for vm in client.vms()))
        return f"\nexcluded {lab.other.uid}\n" in (spares / "list").read_text()

    with submissions_tested(lab):
        until("it is taken in vain", (spares / f"taken.{first}.{lab.other.uid}").exists)
        ended(client, lab.sbatch("true", "--output=/dev/null", "--mem=250"), "done")
        until("the user is excluded", excluded)
        second = on_offer(lab, client, controller)["joined"]
        tested = lab.run("sbatch", "--test-only", "--mem=250", "--wrap=true", user=lab.other, check=False)
        assert second not in tested.stderr and (spares / f"open.{second}").exists()
        out = lab.user.home / "other.out"
        job = lab.sbatch("hostname", f"--output={out}", "--mem=250")
        ended(client, job, "done")
    assert written(out).split() == [second] and second != first
    assert any(entry["event"] == "took a spare" for entry in events(client, job))
    assert max(numbers) <= 2, "one for each pool"


def state(lab: LabUnderTest, job: str) -> str:
    """Pending, running or completing; nothing of one that is over."""
    return lab.run("squeue", "-h", "-a", "-j", job, "-t", "PD,R,CG", "-o", "%T", check=False).stdout.strip()
