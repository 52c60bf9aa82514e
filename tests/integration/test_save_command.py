"""Jobs that are saved by `multiverse save`, and go on in a later run: the whole way, with controller and agent."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse.core.errors import Broken, Refused
from multiverse.core.model.saved import SavedState
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.services import AGENT, CONTROLLER, SERVICES
from tests.integration.conftest import LabUnderTest, StartDaemon, more_settings
from tests.integration.restarting_daemon import RestartingDaemon, attempt_is
from tests.integration.watch import accounted, ended, latest, nothing_left, qemu_of, until

pytestmark = pytest.mark.integration

ASKS = (
    "hostname",
    "srun -w $SLURMD_NODENAME hostname",
    "srun --overcommit -n2 hostname",
    "mpirun -n 2 --oversubscribe hostname",
    "scontrol show hostnames",
    "sbcast -f $0 /tmp/copy && cmp -s $0 /tmp/copy && hostname",
    "other=$(sbatch --parsable --hold --wrap true) && scancel $other && hostname",
)
"""What a resumed script runs, and is told: each prints the name of its node, and two of them twice."""
ANSWERS = len(ASKS) + 2
"""The lines that they print."""
COUNTS = f"for i in $(seq 8); do echo count $i; sleep 0.5; done; {'; '.join(ASKS)}; exit 5"


def running(lab: LabUnderTest, client: Client, script: str = COUNTS, comment: str = "") -> tuple[str, Path]:
    """A job that has written its first line, and its output."""
    job = lab.sbatch(script, "--output=saved-%j.txt", f"--comment={comment}")
    output = lab.user.home / f"saved-{job}.txt"
    until("its script runs", lambda: output.exists() and "count 1" in output.read_text())
    return job, output


def stored(client: Client, job: str) -> bool:
    return any((one["job_id"], one["state"]) == (job, "stored") for one in client.saved())


def ended_once(lab: LabUnderTest, client: Client, job: str, output: Path) -> None:
    ended(client, job, "done")
    lines = output.read_text().splitlines()
    assert lines[:8] == [f"count {number}" for number in range(1, 9)]
    assert len(set(lines[8:])) == 1 and len(lines) == 8 + ANSWERS, lines
    assert accounted(lab, job) == ("FAILED", "5:0")


def went_on(lab: LabUnderTest, client: Client, job: str, output: Path) -> None:
    """Each line was written once, by both runs together, on the same node, and the script's own code is that of the
    job."""
    ended_once(lab, client, job, output)
    until("nothing is left of its state", lambda: client.saved() == [])
    assert not list((lab.where.root / "saved").glob("[!.]*"))


@pytest.fixture
def ends(lab: LabUnderTest) -> Iterator[Path]:
    """What the site's own EpilogSlurmctld writes at the end of each run. It takes a while."""
    said, program, conf = lab.where.slurmctld / "ends", lab.where.etc / "site-epilog", lab.where.etc / "site.conf"
    program.write_text(
        f'#!/bin/sh\n{lab.where.etc}/multiverse-epilog\nsleep 2\necho "$SLURM_JOB_ID $SLURM_JOB_NODELIST" >> {said}\n'
    )
    program.chmod(0o755)
    before = conf.read_text()
    conf.write_text(f"{before}EpilogSlurmctld={program}\n")
    lab.run("scontrol", "reconfigure")
    try:
        yield said
    finally:
        conf.write_text(before)
        lab.run("scontrol", "reconfigure")


def test_a_saved_job_goes_on_where_it_stopped(lab: LabUnderTest, client: Client, ends: Path) -> None:
    job, output = running(lab, client)
    vm = client.vms()[0]["name"]
    client.save(job)
    went_on(lab, client, job, output)
    assert [row["state"] for row in client.jobs(job)] == ["requeued", "done"]
    nothing_left(lab, client)
    until("each run has its end", lambda: ends.exists() and ends.read_text().splitlines() == [f"{job} {vm}"] * 2)


STEP = "srun --overlap -Q bash -c 'for i in $(seq 8); do echo $SLURM_PROCID step $i; sleep 0.5; done; exit 4'"


@pytest.mark.slow
@pytest.mark.parametrize("at_limit", [False, True])
def test_a_saved_job_of_several_vms_goes_on_where_it_stopped(
    lab: LabUnderTest, client: Client, *, at_limit: bool
) -> None:
    """With a step that runs in both of its VMs, and one that begins afterwards."""
    step = STEP.replace("seq 8", "seq 40").replace("0.5", "1") if at_limit else STEP
    options = ("--comment=vm:save=30s", "--time=1") if at_limit else ()
    script = f"{step}; echo ended $?; srun -Q hostname; exit 5"
    job = lab.sbatch(script, "--nodes=2", "--output=saved-%j.txt", *options)
    output = lab.user.home / f"saved-{job}.txt"
    until("both tasks run", lambda: output.exists() and {"0 step 1", "1 step 1"} <= set(output.read_text().split("\n")))
    vms = {vm["name"] for vm in client.vms()}
    if not at_limit:
        client.save(job)
    seen = until("its VMs are frozen", lambda: [one for one in client.saved() if one["spread"] is not None])
    assert set(seen[0]["vms"]) == vms
    ended(client, job, "done")
    lines = output.read_text().splitlines()
    for rank in "01":
        steps = 40 if at_limit else 8
        assert [line for line in lines if line.startswith(f"{rank} step")] == [
            f"{rank} step {number}" for number in range(1, steps + 1)
        ]
    assert "ended 4" in lines and set(lines[-2:]) == vms, lines
    assert accounted(lab, job) == ("FAILED", "5:0")
    assert [row["state"] for row in client.jobs(job)] == ["requeued", "done"]
    until("nothing is left of its state", lambda: client.saved() == [])
    assert not list((lab.where.root / "saved").glob("[!.]*"))
    nothing_left(lab, client)


def test_a_held_job_is_resumed_after_all_daemons_were_restarted(lab: LabUnderTest, client: Client) -> None:
    job, output = running(lab, client)
    client.save(job, hold=True)
    until("it is saved", lambda: stored(client, job))
    until("its VM is gone", lambda: not client.vms())
    (slurmctld,) = (service for service in SERVICES if service.name == "slurmctld")
    for service in (CONTROLLER, AGENT, slurmctld):
        asyncio.run(service.stop(lab.where))
    asyncio.run(lifecycle.up(lab.where, LabOptions()))
    assert stored(client, job)
    client.resume(job)
    went_on(lab, client, job, output)


@pytest.mark.slow
def test_a_task_of_an_array_is_saved_alone_and_leaves_its_slot_to_another(lab: LabUnderTest, client: Client) -> None:
    array = lab.sbatch(COUNTS, "--array=0-1%1", "--output=task-%a.txt")
    tasks = [(f"{array}_{number}", lab.user.home / f"task-{number}.txt") for number in range(2)]
    (saved, first), (_, second) = tasks
    until("the first task runs", lambda: first.exists() and "count 1" in first.read_text())
    client.save(saved, hold=True)
    until("it is saved", lambda: stored(client, saved))
    until("the other task runs", lambda: second.exists() and "count 1" in second.read_text())
    client.resume(saved)
    for task, output in tasks:
        ended_once(lab, client, task, output)
    until("nothing is left of its state", lambda: client.saved() == [])
    nothing_left(lab, client)


def test_a_saved_job_that_is_cancelled_leaves_nothing(lab: LabUnderTest, client: Client) -> None:
    job, _ = running(lab, client)
    client.save(job, hold=True)
    until("it is saved", lambda: stored(client, job))
    lab.run("scancel", job, user=lab.user)
    ended(client, job, "cancelled")
    until("its state is removed", lambda: client.saved() == [])
    assert not list((lab.where.root / "saved").glob("[!.]*"))
    nothing_left(lab, client)


@pytest.mark.slow
def test_a_job_is_saved_at_its_time_limit_and_others_wait_for_its_end(lab: LabUnderTest, client: Client) -> None:
    counts = "for i in $(seq 36); do echo count $i; sleep 1; done; exit 5"
    job = lab.sbatch(counts, "--comment=vm:save=30s", "--time=1", "--output=limit-%j.txt")
    after = lab.sbatch("true", f"--dependency=afternotok:{job}", "--output=/dev/null")
    until("it runs", lambda: latest(client, job).get("state") == "allocated")
    assert "It is saved by" in client.explain(job)["jobs"][0]["text"]
    ended(client, job, "done")
    ended(client, after, "done")
    lines = (lab.user.home / f"limit-{job}.txt").read_text().splitlines()
    assert lines == [f"count {number}" for number in range(1, 37)]
    runs = lab.run("sacct", "-D", "-n", "-P", "-X", "-j", job, "-o", "State,ExitCode,Timelimit").stdout.split()
    assert runs == ["REQUEUED|0:0|00:01:00", "FAILED|5:0|00:01:00"], "the next run has a limit of the same length"
    began = lab.run("sacct", "-n", "-P", "-X", "-j", f"{job},{after}", "-o", "JobID,Start,End").stdout.split()
    times = {row.split("|")[0]: row.split("|")[1:] for row in began}
    assert times[after][0] >= times[job][1]
    nothing_left(lab, client)


def test_what_cannot_be_saved_is_refused_with_the_reason(lab: LabUnderTest, client: Client) -> None:
    job = lab.sbatch("sleep 100", "--hold")
    with pytest.raises(Refused, match="runs in no VM"):
        client.save(job)
    lab.run("scancel", job)
    both = lab.sbatch("sleep 100", "--nodes=2", "--output=/dev/null")
    until("it runs", lambda: latest(client, both).get("state") == "allocated")
    with pytest.raises(Refused, match="checkpoints are made of jobs of one VM"):
        client.checkpoint(both)
    lab.run("scancel", both)
    ended(client, both, "done")


BESIDE_THE_WAY = (
    SavedState.CAPTURING,
    SavedState.UNDOING,
    SavedState.COPYING,
    SavedState.RESUMING,
    SavedState.KEEPING,
    SavedState.HOLDING,
    SavedState.QUEUEING,  # only if slurmctld is killed within seconds of a requeue, and forgets it
)
"""The states that a job does not pass which is saved and goes on at once."""

SOON_AFTER_THE_NODE = (SavedState.THAWING, SavedState.DISCARDING, SavedState.GONE)
"""slurmctld writes its state some seconds late. Killed in these states, it may have forgotten the node of the restored
VM, and queues the job on it again, as any job on a node that has just registered."""

KEPT_WITHIN = 6.0
"""Seconds. slurmctld writes a change into its state at most 5 s later (SAVE_MAX_WAIT in its state_save.c). Killed
before, it forgets that the job began, and begins it anew."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "killed"),
    [
        ("before", "controller"),
        ("after", "controller"),
        ("before", "agent"),
        ("after", "agent"),
        ("after", "slurmctld"),
    ],
)
def test_a_job_goes_on_once_though_a_daemon_is_killed_at_each_step(
    lab: LabUnderTest, start_daemon: StartDaemon, when: str, killed: str
) -> None:
    daemon = start_daemon(())
    until("the daemon answers", lambda: daemon.call(lambda client: client.status()))
    job, output = running(lab, daemon.client, COUNTS.replace("0.5", "3"))
    save_and_kill(lab, daemon, job, when, killed)
    went_on(lab, daemon.client, job, output)
    nothing_left(lab, daemon.client)


@pytest.mark.slow
@pytest.mark.parametrize(("when", "killed"), [("before", "controller"), ("after", "agent"), ("after", "slurmctld")])
def test_a_job_of_several_vms_goes_on_once_though_a_daemon_is_killed_at_each_step(
    lab: LabUnderTest, start_daemon: StartDaemon, when: str, killed: str
) -> None:
    daemon = start_daemon(())
    until("the daemon answers", lambda: daemon.call(lambda client: client.status()))
    job = lab.sbatch(f"{STEP.replace('0.5', '3')}; echo ended $?; exit 5", "--nodes=2", "--output=saved-%j.txt")
    output = lab.user.home / f"saved-{job}.txt"
    both = {"0 step 1", "1 step 1"}
    until("both tasks run", lambda: output.exists() and both <= set(output.read_text().split("\n")))
    save_and_kill(lab, daemon, job, when, killed)
    ended(daemon.client, job, "done")
    lines = output.read_text().splitlines()
    wanted = [f"{rank} step {number}" for rank in "01" for number in range(1, 9)]
    assert sorted(line for line in lines if "step" in line) == wanted and "ended 4" in lines, lines
    assert accounted(lab, job) == ("FAILED", "5:0")
    until("nothing is left of its state", lambda: daemon.client.saved() == [])
    nothing_left(lab, daemon.client)


def save_and_kill(lab: LabUnderTest, daemon: RestartingDaemon, job: str, when: str, killed: str) -> None:
    """Save a job, and kill a daemon at each step of that, until the job is over."""
    skipped = (*BESIDE_THE_WAY, *(SOON_AFTER_THE_NODE if killed == "slurmctld" else ()))
    steps = [state for state in SavedState if state not in skipped]
    if killed == "slurmctld":
        time.sleep(KEPT_WITHIN)
    daemon.set_crash_points([f"{when} saved:{state} {killed}" for state in steps])
    saving = lambda: daemon.call(lambda client: client.saved())  # noqa: E731
    until("it is being saved", lambda: saving() or daemon.call(lambda client: client.save(job)))

    def goes_on() -> bool:
        if killed == "slurmctld":
            with suppress(Broken):  # it was killed again as it started
                asyncio.run(lifecycle.up(lab.where, LabOptions(), controller=False))
        return daemon.ensure_up()

    until(f"job {job} is over", lambda: goes_on() and attempt_is(daemon, job), 240)
    until("each step was reached", lambda: goes_on() and not daemon.crash_points_left(), 60)


@pytest.mark.slow
def test_a_job_goes_on_from_the_checkpoint_that_it_asked_for(lab: LabUnderTest, client: Client) -> None:
    """Its VM dies. The lines that it had written after the checkpoint are written again, and are there once."""
    with more_settings(lab, "[save]\nenabled = true\ncheckpoint_every = 1\n"):
        counts = COUNTS.replace("seq 8", "seq 24")
        job = lab.sbatch(counts, "--comment=vm:checkpoint=3s", "--output=saved-%j.txt")
        output = lab.user.home / f"saved-{job}.txt"
        until("it has a checkpoint", lambda: stored(client, job))
        assert "Its last checkpoint is of " in client.explain(job)["jobs"][0]["text"]
        (vm,) = client.vms()
        os.kill(qemu_of(vm["name"]), signal.SIGKILL)
        ended(client, job, "done")
        lines = output.read_text().splitlines()
        assert lines[:24] == [f"count {number}" for number in range(1, 25)]
        assert len(set(lines[24:])) == 1 and len(lines) == 24 + ANSWERS, lines
        assert accounted(lab, job) == ("FAILED", "5:0")
        until("nothing is left of it", lambda: client.saved() == [])
        assert not list((lab.where.root / "saved").glob("[!.]*"))
