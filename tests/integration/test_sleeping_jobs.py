"""Jobs that are suspended free the memory of their host, and go on when they are resumed: with controller and agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse.client import Client
from tests.integration.conftest import LabUnderTest, more_settings
from tests.integration.restarting_daemon import StartDaemon
from tests.integration.watch import accounted, ended, nothing_left, until

pytestmark = pytest.mark.integration

COUNTS = "i=0; until [ -e go-$SLURM_JOB_ID ]; do i=$((i+1)); echo count $i; sleep 0.5; done; exit 5"


@pytest.fixture(scope="module")
def sleeping(lab: LabUnderTest, client: Client) -> Iterator[None]:
    """VMs of suspended jobs sleep after a second."""
    with more_settings(lab, "[save]\nsleep_after = 1\n"):
        yield


def running(lab: LabUnderTest, *options: str) -> tuple[str, Path]:
    job = lab.sbatch(COUNTS, "--output=sleeps-%j.txt", *options)
    output = lab.user.home / f"sleeps-{job}.txt"
    until("its script runs", lambda: output.exists() and "count 2" in output.read_text())
    return job, output


def state_of(client: Client, job: str) -> str:
    return next((str(vm["state"]) for vm in client.vms() if vm["job_id"] == job), "")


def counts(output: Path) -> int:
    return output.read_text().count("count")


def goes_on_and_ends(lab: LabUnderTest, client: Client, job: str, output: Path) -> None:
    before = counts(output)
    until("it goes on", lambda: counts(output) > before + 1, 30)
    (lab.user.home / f"go-{job}").touch()
    ended(client, job, "done")
    numbers = [int(line.split()[1]) for line in output.read_text().splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert accounted(lab, job) == ("FAILED", "5:0")


@pytest.mark.usefixtures("sleeping")
def test_a_suspended_job_sleeps_and_goes_on_where_it_was(lab: LabUnderTest, client: Client) -> None:
    job, output = running(lab)
    for _ in range(2):
        lab.run("scontrol", "suspend", job)
        until("its VM sleeps", lambda: state_of(client, job) == "asleep", 30)
        assert "has freed its memory" in client.explain(job)["jobs"][0]["text"]
        before = counts(output)
        lab.run("scontrol", "resume", job)
        until("its VM serves", lambda: state_of(client, job) == "serving", 30)
        until("it goes on", lambda before=before: counts(output) > before, 30)
    goes_on_and_ends(lab, client, job, output)
    nothing_left(lab, client)
    assert not list((lab.where.root / "saved").glob("*asleep"))


@pytest.mark.usefixtures("sleeping")
def test_a_resumed_job_waits_for_memory_and_its_time_limit_grows_by_that(lab: LabUnderTest, client: Client) -> None:
    large = ("--mem=9G", "-t", "3")
    first, output = running(lab, *large)
    lab.run("scontrol", "suspend", first)
    until("its VM sleeps", lambda: state_of(client, first) == "asleep", 60)
    second, _ = running(lab, *large)
    lab.run("scontrol", "resume", first)
    until("it waits", lambda: state_of(client, first) == "delayed", 30)
    assert "waits for memory" in client.explain(first)["jobs"][0]["text"]
    before = counts(output)
    until(
        "its time limit grows", lambda: "TimeLimit=00:03:00" not in lab.run("scontrol", "show", "job", first).stdout, 90
    )
    assert counts(output) == before
    (lab.user.home / f"go-{second}").touch()
    until("its VM serves", lambda: state_of(client, first) == "serving", 60)
    goes_on_and_ends(lab, client, first, output)


@pytest.mark.usefixtures("sleeping")
def test_a_sleeping_job_is_cancelled_and_leaves_nothing(lab: LabUnderTest, client: Client) -> None:
    job, _ = running(lab)
    lab.run("scontrol", "suspend", job)
    until("its VM sleeps", lambda: state_of(client, job) == "asleep", 30)
    lab.run("scancel", job)
    ended(client, job, "done")
    nothing_left(lab, client)
    assert not list((lab.where.root / "saved").glob("*asleep"))


def at_commits(killed: str, *states: str) -> list[str]:
    return [f"{when} vm:{state} {killed}" for state in states for when in ("before", "after")]


def at_agent(*events: str) -> list[str]:
    return [f"{when} {event} agent" for event in events for when in ("before", "after")]


AT_AGENT = [
    ("asleep", ["before manifest:started agent"], at_agent("qemu")),
    ("serving", ["after manifest:started agent"], []),
    ("serving", ["before manifest:asleep agent"], []),
    ("asleep", ["after manifest:asleep agent"], at_agent("manifest:started")),
]
"""What the VM does, and the steps of its host at which the agent is killed. Interrupted in the middle, it stays awake,
and is not tried again for ten minutes."""


@pytest.mark.slow
@pytest.mark.usefixtures("sleeping")
@pytest.mark.parametrize(
    ("becomes", "falling", "waking"),
    [
        ("asleep", at_commits(killed, "falling_asleep", "asleep"), at_commits(killed, "waking", "serving"))
        for killed in ("controller", "agent")
    ]
    + AT_AGENT,
)
def test_a_suspended_job_goes_on_once_though_a_daemon_is_killed_at_each_step(
    lab: LabUnderTest, start_daemon: StartDaemon, becomes: str, falling: list[str], waking: list[str]
) -> None:
    daemon = start_daemon(())
    until("the daemon answers", lambda: daemon.call(lambda client: client.status()))
    job, output = running(lab)

    def has_become(state: str) -> bool:
        return bool(daemon.call(lambda client: state_of(client, job) == state and not daemon.crash_points_left()))

    daemon.set_crash_points(falling)
    lab.run("scontrol", "suspend", job)
    until(f"its VM is {becomes}", lambda: has_become(becomes), 120)
    before = counts(output)
    daemon.set_crash_points(waking)
    lab.run("scontrol", "resume", job)
    until("its VM serves", lambda: has_become("serving"), 120)
    until("it goes on", lambda: counts(output) > before, 30)
    assert daemon.crashes, "killed, and started again"
    goes_on_and_ends(lab, daemon.client, job, output)
    nothing_left(lab, daemon.client)
    assert not list((lab.where.root / "saved").glob("*asleep"))
