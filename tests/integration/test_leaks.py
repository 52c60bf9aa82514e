"""Many small jobs in a row: each runs once, and no resource of the controller or the host grows with their number."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pytest

from multiverse.client import Client
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import below, nothing_left, until

pytestmark = pytest.mark.integration

AT_ONCE = 4
JOURNAL_PER_JOB = 8 << 10
"""Bytes that the database may keep for each job: its attempt, its VM, and some twenty lines of journal."""


@dataclass(frozen=True)
class ResourceUsage:
    """What is in use at one moment, with no job running. Memory in KiB, the database in bytes."""

    memory: int
    descriptors: int
    threads: int
    links: int
    mounts: int
    files: int
    database: int


def usage(lab: LabUnderTest, pid: int) -> ResourceUsage:
    process = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    places = (lab.where.controller, lab.where.run, lab.where.memory, lab.where.etc, lab.where.inbox)
    with sqlite3.connect(f"file:{lab.settings.state_dir}/multiverse.db?mode=ro", uri=True) as store:
        ((pages,),), ((size,),) = store.execute("PRAGMA page_count"), store.execute("PRAGMA page_size")
    store.close()
    return ResourceUsage(
        memory=int(fields["VmRSS"].split()[0]),
        descriptors=len(list((process / "fd").iterdir())),
        threads=int(fields["Threads"]),
        links=len(list(Path("/sys/class/net", lab.settings.qemu.bridge, "brif").iterdir())),
        mounts=len((process / "mounts").read_text().splitlines()),
        files=sum(1 for place in places for path in below(place) if path.is_file()),
        database=pages * size,
    )


def run_in_a_row(lab: LabUnderTest, client: Client, jobs: int) -> None:
    """Run so many jobs, at most `AT_ONCE` at a time; each writes a file, which shows that it ran once."""
    word = lab.user.home / "row"
    word.mkdir(exist_ok=True)
    os.chown(word, lab.user.uid, lab.user.uid)
    waiting: list[str] = []
    ran: list[str] = []
    for _ in range(jobs):
        if len(waiting) == AT_ONCE:
            until("a job has ended", partial(ended_of, word, waiting))
        over = ended_of(word, waiting)
        ran, waiting = [*ran, *over], [job for job in waiting if job not in over]
        waiting.append(lab.sbatch(f"echo $SLURM_RESTART_COUNT >> {word}/$SLURM_JOB_ID", "--output=/dev/null"))
    ran += waiting
    until("all have ended", lambda: all((word / job).exists() for job in ran))
    nothing_left(lab, client)
    assert {job: (word / job).read_text() for job in ran} == dict.fromkeys(ran, "\n"), "once each, never restarted"
    for path in word.iterdir():
        path.unlink()


def ended_of(word: Path, jobs: list[str]) -> list[str]:
    """The jobs that have written their file."""
    return [job for job in jobs if (word / job).exists()]


def check_for_leaks(lab: LabUnderTest, client: Client, pid: int, warming: int, jobs: int) -> None:
    """After `warming` jobs, `jobs` more must not increase any resource."""
    readings = []
    for some in (warming, jobs // 2, jobs - jobs // 2):
        run_in_a_row(lab, client, some)
        readings.append(usage(lab, pid))
        print(f"\nafter {some} more: {asdict(readings[-1])}")
    before, half, after = readings
    # The heap grows at first: SQLite's cache, and the arenas of threads. A leak of even a small object per job would
    # show in the second half as in the first.
    assert min(half.memory - before.memory, after.memory - half.memory) <= 4096 + jobs // 2
    assert after.memory - before.memory <= 8192 + jobs
    # Threads are created when they are first needed, 64 at most; an observation uses a descriptor or two for a moment.
    assert after.threads <= 64 + 32
    assert after.descriptors <= before.descriptors + 6
    assert (after.links, after.mounts, after.files) == (before.links, before.mounts, before.files)
    assert after.database - before.database <= jobs * JOURNAL_PER_JOB


@pytest.mark.slow
def test_a_dozen_jobs_in_a_row_leave_nothing_behind(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    check_for_leaks(lab, client, controller(), 4, 8)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_a_thousand_jobs_in_a_row_leave_nothing_behind(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    check_for_leaks(lab, client, controller(), 100, int(os.environ.get("MULTIVERSE_ROW", "1000")) - 100)
