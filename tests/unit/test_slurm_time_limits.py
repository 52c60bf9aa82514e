"""How long Slurm lets a job run, as slurm.conf and squeue say it."""

from __future__ import annotations

import pytest

from multiverse.core.model.job import YEAR, JobState
from multiverse.drivers.slurm.reading import parse
from multiverse.drivers.slurm.site.conf import CHECKED_EVERY, TimeLimits, minutes_of, seconds, time_limits
from tests.unit.test_slurm_parse import NAMES, NOW, by_name, one
from tests.unit.test_slurm_table import END, TABLE, read, table

DEFAULT = CHECKED_EVERY + 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", 300),
        ("5:30", 330),
        ("1:00:00", 3600),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("1-02:03:04", 93784),
        ("INFINITE", YEAR),
        ("UNLIMITED", YEAR),
        ("-1", YEAR),
        ("", YEAR),
    ],
)
def test_times_of_slurm_are_understood(text: str, expected: int) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1-00:00:00", 1440), ("10:00", 10), ("UNLIMITED", None), ("Partition_Limit", None), ("", None)],
)
def test_the_limit_of_a_job_is_understood(text: str, expected: int | None) -> None:
    assert minutes_of(text) == expected


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("", TimeLimits(YEAR, DEFAULT)),
        ("PartitionName=vm MaxTime=60\n", TimeLimits(3600, DEFAULT)),
        ("PartitionName=vm MaxTime=60\nPartitionName=vmrun MaxTime=30\n", TimeLimits(1800, DEFAULT)),
        ("PartitionName=other MaxTime=60\n", TimeLimits(YEAR, DEFAULT)),
        ("PartitionName=DEFAULT MaxTime=90\nPartitionName=vm Nodes=x\n", TimeLimits(5400, DEFAULT)),
        ("PartitionName=vm Nodes=x \\\n  MaxTime=2-0\n", TimeLimits(172800, DEFAULT)),
        ("OverTimeLimit=10\nKillWait=5\n", TimeLimits(YEAR, 635)),
        ("PartitionName=vm OverTimeLimit=3\n", TimeLimits(YEAR, DEFAULT + 180)),
        ("OverTimeLimit=UNLIMITED\n", TimeLimits(YEAR, YEAR)),
    ],
)
def test_slurm_conf_limits_the_jobs_of_our_partitions(text: str, limits: TimeLimits) -> None:
    assert time_limits(text, "vm", "vmrun") == limits


def test_the_smaller_limit_of_job_and_partition_counts() -> None:
    limits = TimeLimits(3600, 60)
    assert [limits.of(minutes) for minutes in (10, 120, None)] == [660, 3660, 3660]
    assert TimeLimits().of(None) == YEAR + DEFAULT


def test_a_running_job_ends_after_its_end_time_and_what_is_granted_beyond() -> None:
    running = by_name("run", end_time=int(NOW) + 500, time_limit=20)
    job = one(running)
    assert (job.state, job.limit, job.ends) == (JobState.RUNNING, 1200 + DEFAULT, NOW // 1 + 500 + DEFAULT)


@pytest.mark.parametrize(
    "changes", [{"job_state": "SUSPENDED"}, {"job_state": "PENDING"}, {"end_time": 0xFFFFFFFF}, {"end_time": 0}]
)
def test_of_other_jobs_nobody_knows_the_end(changes: dict[str, object]) -> None:
    assert one(by_name("run", **{"end_time": int(NOW) + 500, **changes})).ends is None


def test_limits_are_read_from_the_table() -> None:
    """The rest of the table was captured; this column was added later."""
    row = next(row for row in TABLE.split(END + "\n") if row.startswith("15003\x1f"))
    for shown, expected in (("UNLIMITED", YEAR + DEFAULT), ("10:00", 600 + DEFAULT), ("1-00:00:00", 86400 + DEFAULT)):
        changed = row.replace("\x1fNotSet\x1fUNLIMITED\x1f", f"\x1fNotSet\x1f{shown}\x1f")
        assert read(table(), TABLE.replace(row, changed))["15003"].limit == expected
    assert parse.SiteNames("x", "vm", "g", "vm").time_limits == NAMES.time_limits == TimeLimits()
