"""Limits of accounting, licences and arrays on the real lab.

Jobs with VMs, pinned jobs and running jobs together never exceed a limit, and no VM is created for a job that may not
start. A real slurmctld enforces the limits, and jobs run in real VMs.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse.core.model.identity import serial_of
from multiverse.core.queue import BEHIND
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.services import CONTROLLER
from tests.integration.conftest import LabUnderTest, more_settings
from tests.integration.watch import ended, latest, nothing_left, until

pytestmark = pytest.mark.integration

SITE = """\
AccountingStorageEnforce=associations,limits,qos
PriorityType=priority/multifactor
PriorityWeightQOS=100000
PriorityWeightFairshare=1000
PriorityCalcPeriod=1
"""
ACTIVE = ("claimed", "spawning", "spawned", "allocated")


def sacctmgr(lab: LabUnderTest, *words: str) -> None:
    lab.run("sacctmgr", "-i", *words)


@pytest.fixture(scope="module")
def limited(lab: LabUnderTest) -> Iterator[None]:
    """Slurm enforces limits during the tests of this module. Whatever failed, later modules find the lab as it was."""
    try:
        _limit(lab)
        yield
    finally:
        _unlimit(lab)


def _limit(lab: LabUnderTest) -> None:
    sacctmgr(lab, "add", "account", "physics", "Description=physics", "Organization=lab")
    sacctmgr(lab, "add", "qos", "tight", "GrpTRES=cpu=2")
    sacctmgr(lab, "add", "qos", "urgent", "Priority=100")
    sacctmgr(lab, "add", "qos", "closed", "GrpTRES=cpu=0")
    qos = "qos=normal,tight,urgent"
    sacctmgr(lab, "add", "user", lab.user.name, "account=physics", "MaxJobs=2", "Fairshare=1", qos)
    sacctmgr(lab, "add", "user", lab.other.name, "account=physics", "Fairshare=1000", qos)
    (lab.where.etc / "site.conf").write_text(SITE)
    asyncio.run(lifecycle.up(lab.where, LabOptions(), controller=False))


def _unlimit(lab: LabUnderTest) -> None:
    """slurmdbd deletes no account, and no user of it, who has a job that goes on."""
    (lab.where.etc / "site.conf").write_text("")
    for user in (lab.user, lab.other):
        lab.run("scancel", f"--user={user.name}", check=False)
        until(f"no job of {user.name} goes on", lambda name=user.name: not lab.run("squeue", "-h", "-u", name).stdout)
    for words in ("account physics", "qos tight,urgent,closed"):
        lab.run("sacctmgr", "-i", "delete", *words.split(), check=False)  # one that is not there is an error
    asyncio.run(lifecycle.up(lab.where, LabOptions(), controller=False))


@pytest.fixture(scope="module")
def controller(limited: None, controller: Callable[[], int]) -> Callable[[], int]:
    return controller


def active(client: Client) -> set[str]:
    """The jobs that have VMs or run at this moment."""
    return {str(row["job_id"]) for row in client.jobs() if row["state"] in ACTIVE}


def at_once(lab: LabUnderTest, jobs: Sequence[str]) -> int:
    """The largest number of these jobs that were admitted and had not ended, at any time.

    Computed from the controller's journal and slurmdbd's accounts. The accounts have whole seconds, so a job may end up
    to a second later than computed.
    """
    ask = ("env", "SLURM_TIME_FORMAT=%s", "sacct", "-X", "-n", "-P", "-o", "JobID,End", "-j", ",".join(jobs))
    lines = until("they are accounted", lambda: "Unknown" not in (text := lab.run(*ask).stdout) and text)
    ends = {job: float(end) for job, end in (line.split("|") for line in lines.split())}
    with closing(sqlite3.connect(lab.settings.state_dir / "multiverse.db")) as database:
        begins = database.execute(
            "SELECT attempts.job_id, journal.wall FROM journal JOIN attempts ON attempts.id = journal.id "
            "WHERE journal.kind = 'attempt' AND journal.event = 'admitted'"
        ).fetchall()
    changes = [(wall, 1) for job, wall in begins if job in ends] + [(end, -1) for end in ends.values()]
    assert len(changes) == 2 * len(jobs)
    return max(accumulate(change for _, change in sorted(changes)))


def journalled(lab: LabUnderTest, job: str) -> dict[str, int]:
    """The positions of a job's events in the journal."""
    with closing(sqlite3.connect(lab.settings.state_dir / "multiverse.db")) as database:
        return dict(
            database.execute(
                "SELECT journal.event, journal.seq FROM journal JOIN attempts ON attempts.id = journal.id "
                "WHERE journal.kind = 'attempt' AND attempts.job_id = ?",
                (job,),
            ).fetchall()
        )


@pytest.mark.slow
def test_limits_hold_for_waiting_pinned_and_running_jobs_together(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    controller()
    go = lab.user.home / "go"
    go.unlink(missing_ok=True)
    out, script = "--output=/dev/null", f"until [ -e {go} ]; do sleep 0.2; done"
    array = lab.sbatch(script, out, "--array=1-2%1", user=lab.other)
    groups = {
        "MaxJobs of ada": (2, [lab.sbatch(script, out) for _ in range(3)]),
        "GrpTRES of a QOS": (2, [lab.sbatch(script, out, "--qos=tight", user=lab.other) for _ in range(3)]),
        "one licence": (1, [lab.sbatch(script, out, "--licenses=seat", user=lab.other) for _ in range(2)]),
        "one task of the array": (1, [f"{array}_1", f"{array}_2"]),
    }
    everyone = [job for _, jobs in groups.values() for job in jobs]

    def settled() -> bool:
        now = active(client)
        for name, (limit, jobs) in groups.items():
            those = now.intersection(jobs)
            assert len(those) <= limit, f"{name}: {those} have VMs"
        told = [row["waiting"].partition(":")[0] for row in client.jobs() if row["job_id"] in everyone]
        why = ("AssocMaxJobsLimit", "QOSGrpCpuLimit", "Licenses", "JobArrayTaskLimit")
        return sorted(filter(None, told)) == sorted(f"held back by {limit}" for limit in why)

    until("each limit is used up, and the other jobs show the reason", settled)
    go.touch()
    for job in everyone:
        ended(client, job, "done")
    assert {job: len(client.jobs(job)) for job in everyone} == dict.fromkeys(everyone, 1), "no job was requeued"
    for name, (limit, jobs) in groups.items():
        assert at_once(lab, jobs) == limit, name
    nothing_left(lab, client)


def test_jobs_start_in_the_order_of_slurms_priority(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    controller()
    asyncio.run(CONTROLLER.stop(lab.where))
    later = lab.sbatch("true", "--output=/dev/null", user=lab.other)
    first = lab.sbatch("true", "--output=/dev/null", "--qos=urgent")
    controller()
    assert in_order_of_start(client, (later, first)) == [first, later]
    nothing_left(lab, client)


def in_order_of_start(client: Client, jobs: Sequence[str]) -> list[str]:
    """These jobs, after they have ended, in the order of their VMs' serial numbers."""
    serial = {job: serial_of(ended(client, job, "done")["vms"][0]) for job in jobs}
    return sorted(jobs, key=serial.__getitem__)


@pytest.mark.slow
def test_a_user_who_has_used_less_of_the_share_comes_first(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    controller()
    ended(client, lab.sbatch("true", "--output=/dev/null"), "done")
    asyncio.run(CONTROLLER.stop(lab.where))

    def factor(user: str) -> float:
        return float(lab.run("sshare", "-n", "-P", "-U", "-A", "physics", "-u", user, "-o", "FairShare").stdout)

    until("Slurm has updated the fair shares", lambda: factor(lab.other.name) > factor(lab.user.name))
    later = lab.sbatch("true", "--output=/dev/null")
    first = lab.sbatch("true", "--output=/dev/null", user=lab.other)
    controller()
    assert in_order_of_start(client, (later, first)) == [first, later]
    nothing_left(lab, client)


@pytest.mark.slow
def test_a_limit_that_slurm_shows_only_after_the_pin_sends_the_job_back_with_a_reason(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    """A QOS of the partition. Slurm tests the gate's licence before it, and so does not show it at the gate."""
    controller()
    partition = f"PartitionName={lab.settings.slurm.partition}"
    lab.run("scontrol", "update", partition, "QOS=closed")
    try:
        job = lab.sbatch("true", "--output=/dev/null")
        until("its attempt is given up", lambda: any(row["state"] == "requeued" for row in client.jobs(job)))
        assert "QOSGrpCpuLimit" in client.jobs(job)[0]["reason"]
        shown = ("scontrol", "show", "job", job)
        told = lambda: re.search("AdminComment=.*QOSGrpCpuLimit", lab.run(*shown, user=lab.user).stdout)  # noqa: E731
        until("its user sees the reason", told)
    finally:
        lab.run("scontrol", "update", partition, "QOS=")
    ended(client, job, "done")
    nothing_left(lab, client)


@pytest.mark.slow
def test_500_jobs_that_may_not_start_delay_no_job_that_may(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    """Shown by the journal: such a job is admitted before the controller has seen a job that was submitted later."""
    controller()
    holders = [lab.sbatch("sleep 3600", "--output=/dev/null") for _ in range(2)]
    until("ada's two jobs run", lambda: active(client).issuperset(holders))
    waiting = [lab.sbatch("true", "--output=/dev/null") for _ in range(500)]
    try:
        for _ in range(3):
            free = lab.sbatch("true", "--output=/dev/null", user=lab.other)
            until("the controller has seen it", lambda job=free: client.jobs(job))
            waiting.append(lab.sbatch("true", "--output=/dev/null"))
            ended(client, free, "done")
            until("the controller has seen the next one", lambda: client.jobs(waiting[-1]))
            assert journalled(lab, free)["admitted"] < journalled(lab, waiting[-1])["submitted"]
        assert active(client) == set(holders)
        until("the first one says why", lambda: "AssocMaxJobsLimit" in str(latest(client, waiting[0]).get("waiting")))
        assert latest(client, waiting[-1])["waiting"] == str(BEHIND)
        assert "held back by AssocMaxJobsLimit" in client.explain(waiting[-1])["jobs"][0]["text"]
    finally:
        lab.run("scancel", f"--user={lab.user.name}")
    nothing_left(lab, client)


@pytest.fixture
def pool(lab: LabUnderTest, controller: Callable[[], int]) -> Iterator[Path]:
    """The controller keeps a joined spare on offer; the directory of the offers."""
    with more_settings(lab, '[[pool]]\ndepth = "joined"\nmin = 1\nmemory = 300\n'):
        yield lab.settings.slurm.inbox / "spares"


@pytest.mark.slow
def test_of_jobs_beyond_a_limit_only_the_first_takes_a_spare(lab: LabUnderTest, client: Client, pool: Path) -> None:
    """The submit script cannot know the limit, but its user gets no spare for a while after that."""
    go = lab.user.home / "go"
    go.unlink(missing_ok=True)
    script = f"until [ -e {go} ]; do sleep 0.2; done"
    within = [lab.sbatch(script, "--output=/dev/null", "--mem=400") for _ in range(2)]
    until("the limit is used up", lambda: active(client).issuperset(within))
    offers = pool / "list"
    spare = until("a spare is on offer", lambda: offers.exists() and re.findall(r"\bmv\w+-\d+", offers.read_text()))[0]
    beyond = [lab.sbatch(script, "--output=/dev/null", "--mem=250")]
    assert (pool / f"taken.{spare}.{lab.user.uid}").exists()
    until("its user is excluded", lambda: f"\nexcluded {lab.user.uid}\n" in offers.read_text())

    def another() -> str | None:
        found = [name for name in re.findall(r"\bmv\w+-\d+", offers.read_text()) if name != spare]
        return found[0] if found else None

    second = until("another spare is on offer", another)
    beyond += [lab.sbatch(script, "--output=/dev/null", "--mem=250") for _ in range(3)]
    reason = "held back by AssocMaxJobsLimit"
    rows = lambda: {row["job_id"]: row["waiting"] for row in client.jobs()}  # noqa: E731
    until("all wait", lambda: all(rows().get(job, "").startswith(reason) for job in beyond[1:]))
    assert (pool / f"open.{second}").exists(), "nobody took it"
    go.touch()
    for job in (*within, *beyond):
        ended(client, job, "done")
