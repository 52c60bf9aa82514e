"""Real jobs in real VMs on the lab, with nothing simulated."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from multiverse.client import Client
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import accounted, ended, kill, latest, nothing_left, qemu_of, until, written

pytestmark = pytest.mark.integration


def test_a_job_runs_in_a_vm_of_its_own_as_its_user_where_it_was_submitted(lab: LabUnderTest, client: Client) -> None:
    out = lab.user.home / "hello.out"
    job = lab.sbatch("hostname; id -u; id -un; pwd; nproc; echo to-stderr >&2", f"--output={out}")
    row = ended(client, job, "done")
    lines = written(out).split()
    assert lines == [row["vms"][0], str(lab.user.uid), lab.user.name, str(lab.user.home), "1", "to-stderr"]
    assert out.stat().st_uid == lab.user.uid
    assert accounted(lab, job) == ("COMPLETED", "0:0")
    nothing_left(lab, client)


def test_slurmctld_logs_no_error_for_a_vm(lab: LabUnderTest, client: Client) -> None:
    """Neither before its node has registered nor after it was deleted, nor because a guest has a slurm.conf of its
    own."""
    (log,) = lab.where.root.rglob("slurmctld.log")
    before = log.stat().st_size
    ended(client, lab.sbatch("true", "--output=/dev/null"), "done")
    nothing_left(lab, client)
    with log.open() as file:
        file.seek(before)
        assert [line for line in file if "lookup failure" in line or "different slurm.conf" in line] == []


def test_the_exit_code_is_the_scripts(lab: LabUnderTest, client: Client) -> None:
    job = lab.sbatch("exit 3", "--output=/dev/null")
    ended(client, job, "done")
    assert accounted(lab, job) == ("FAILED", "3:0")


def test_a_job_has_the_requested_size(lab: LabUnderTest, client: Client) -> None:
    out = lab.user.home / "size.out"
    job = lab.sbatch(
        "nproc; awk '/MemTotal/{print int($2/1024)}' /proc/meminfo", f"--output={out}", "-n3", "--mem=1700"
    )
    ended(client, job, "done")
    cpus, memory = map(int, written(out).split())
    assert cpus == 3 and memory >= 1700


def test_each_task_of_an_array_has_a_vm_of_its_own(lab: LabUnderTest, client: Client) -> None:
    job = lab.sbatch("hostname", "--array=1-3", f"--output={lab.user.home}/task-%a.out")
    for task in (1, 2, 3):
        ended(client, f"{job}_{task}", "done")
    hosts = {written(lab.user.home / f"task-{task}.out").strip() for task in (1, 2, 3)}
    assert len(hosts) == 3


def test_srun_waits_at_the_gate_and_goes_on_as_usual(lab: LabUnderTest, client: Client) -> None:
    done = lab.run("srun", "--quiet", "hostname", user=lab.user)
    assert done.stdout.startswith("mv")
    nothing_left(lab, client)


def test_a_job_of_two_vms_runs_on_both(lab: LabUnderTest, client: Client) -> None:
    out = lab.user.home / "gang.out"
    job = lab.sbatch("srun --quiet hostname", "-N2", f"--output={out}")
    row = ended(client, job, "done")
    assert sorted(written(out).split()) == sorted(row["vms"]) and len(row["vms"]) == 2


def test_a_job_cancelled_while_its_vm_is_created_leaves_nothing(lab: LabUnderTest, client: Client) -> None:
    out = lab.user.home / "never.out"
    job = lab.sbatch("echo ran", f"--output={out}")
    until("its VM is being created", lambda: latest(client, job).get("state") in ("claimed", "spawning"))
    lab.run("scancel", job, user=lab.user)
    ended(client, job, "cancelled")
    assert accounted(lab, job)[0] == "CANCELLED" and not out.exists()
    nothing_left(lab, client)


def test_a_running_job_that_is_cancelled_ends_its_vm(lab: LabUnderTest, client: Client) -> None:
    job = lab.sbatch("sleep 600", "--output=/dev/null")
    until("it runs", lambda: latest(client, job).get("state") == "allocated")
    lab.run("scancel", job, user=lab.user)
    ended(client, job, "done")
    assert accounted(lab, job)[0] == "CANCELLED"
    nothing_left(lab, client)


def test_a_job_larger_than_any_host_is_refused_with_the_largest_size(lab: LabUnderTest, client: Client) -> None:
    limits = lab.settings.slurm.inbox.with_name("inbox.limits")
    until("the controller has published the largest sizes", limits.exists)
    done = lab.run("sbatch", "-c64", "--mem=1T", "--wrap=true", user=lab.user, check=False)
    assert done.returncode != 0
    assert "64 CPUs" in done.stderr and "the largest VM for a job here has 8 CPUs" in done.stderr


def test_clones_share_no_identity(lab: LabUnderTest, client: Client) -> None:
    script = (
        "cat /etc/machine-id; cat /sys/class/net/eth0/address; head -c 16 /dev/urandom | od -An -tx1 | tr -d ' ';"
        " date +%s"
    )
    job = lab.sbatch(script, "--array=1-4", f"--output={lab.user.home}/strange-%a.out")
    before = time.time()
    for task in range(1, 5):
        ended(client, f"{job}_{task}", "done")
    told = [written(lab.user.home / f"strange-{task}.out").split() for task in range(1, 5)]
    for column in range(3):
        assert len({lines[column] for lines in told}) == 4, told
    assert all(before - 2 <= int(lines[3]) <= time.time() + 2 for lines in told), "the clocks are right"


def test_a_restarted_controller_continues(lab: LabUnderTest, client: Client, controller: Callable[[], int]) -> None:
    out = lab.user.home / "survivor.out"
    running = lab.sbatch("sleep 8; echo survived", f"--output={out}")
    until("it runs", lambda: latest(client, running).get("state") == "allocated")
    making = lab.sbatch("echo made", f"--output={lab.user.home}/made.out")
    until("the other VM is being created", lambda: latest(client, making).get("state") in ("claimed", "spawning"))
    kill(controller())
    controller()
    ended(client, running, "done")
    ended(client, making, "done")
    assert written(out) == "survived\n" and written(lab.user.home / "made.out") == "made\n"
    assert len(client.jobs(running)) == 1, "the job ran once, in one attempt"
    nothing_left(lab, client)


def test_a_vm_that_is_killed_under_its_job_is_noticed_and_the_job_is_requeued(
    lab: LabUnderTest, client: Client
) -> None:
    job = lab.sbatch("sleep 600", "--output=/dev/null", "--requeue")
    row = until("it runs", lambda: (r := latest(client, job)).get("state") == "allocated" and r)
    (vm,) = row["vms"]
    kill(qemu_of(vm))
    first = until("its attempt is over", lambda: (r := client.jobs(job)[0])["state"] == "requeued" and r, 60)
    assert first["reason"]
    second = until("it runs again", lambda: (r := latest(client, job)).get("state") == "allocated" and r)
    assert second["vms"] != [vm], "the second run has a new VM"
    lab.run("scancel", job, user=lab.user)
    ended(client, job, "done")
    nothing_left(lab, client)


@pytest.mark.slow
def test_a_full_clone_runs_a_job_as_an_instant_one_does(lab: LabUnderTest, client: Client) -> None:
    out = lab.user.home / "full.out"
    job = lab.sbatch("hostname", "-C", "full", f"--output={out}")
    row = ended(client, job, "done")
    assert row["kind"] == "full" and written(out).strip() == row["vms"][0]


def test_the_phases_of_a_job_add_up(lab: LabUnderTest, client: Client) -> None:
    job = lab.sbatch("true", "--output=/dev/null")
    ended(client, job, "done")
    (one,) = client.timeline(job)
    assert [p["name"] for p in one["phases"]] == ["queued", "clone", "join", "launch", "run", "reclaim"]
    stages = {name for phase in one["phases"] for name, _ in phase["stages"]}
    assert {"overlay", "exec", "restore", "first_byte", "identity", "mounts"} <= stages
    for phase in one["phases"]:
        assert sum(seconds for _, seconds in phase["stages"]) <= phase["seconds"] + 0.05
