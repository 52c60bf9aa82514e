"""What a job's user is told after its end: in slurmdbd, about that run, and beside what others wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from multiverse.config import Settings
from multiverse.core.errors import Gone, Refused, Stale
from multiverse.core.model.job import JobRef
from multiverse.drivers.slurm.command import Completed
from multiverse.drivers.slurm.driver import SlurmScheduler

RUN = JobRef("7_1", 500)


class Slurm:
    """One job, and what sacctmgr is asked to write."""

    def __init__(self, comment: str = "", **job: str) -> None:
        known = {"JobArrayID": "7_1", "State": "COMPLETED", "Partition": "vm", "RestartCnt": "0"}
        self.job = {**known, "SubmitTime": "500", "PriorityLong": "9", **job}
        self.comment, self.written = comment, list[Sequence[str]]()
        self.failure = ""

    async def execute(self, argv: Sequence[str], env: Mapping[str, str], timeout: float) -> Completed:
        if argv[0] == "squeue":
            *columns, comment = [column.partition(":") for column in argv[-1].split(",")]
            row = "".join(self.job.get(name, "").ljust(int(width)) for name, _, width in columns)
            return Completed(0, f"{row}{self.comment}{comment[2][1:]}\n".encode(), b"")
        self.written.append(argv)
        return Completed(1 if self.failure else 0, b"", self.failure.encode())

    def report(self, text: str = "used 1 of 2 CPUs [50%]") -> None:
        scheduler = SlurmScheduler(Settings(), "ab12c", env={}, execute=self.execute)
        asyncio.run(scheduler.report(RUN, text))


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "TIMEOUT", "COMPLETING"])
def test_the_line_is_written_into_the_accounting_beside_what_others_wrote(state: str) -> None:
    slurm = Slurm("of a plugin [multiverse: instant on h0]", State=state)
    slurm.report()
    (argv,) = slurm.written
    assert argv[:6] == ("sacctmgr", "-i", "modify", "job", "where", "jobid=7_1")
    assert argv[6:] == ("set", "AdminComment=of a plugin [multiverse: used 1 of 2 CPUs (50%)]")


@pytest.mark.parametrize(
    "job", [{"State": "PENDING"}, {"State": "RUNNING"}, {"RestartCnt": "1"}, {"SubmitTime": "501"},
            {"State": "COMPLETING", "RestartCnt": "1"}],
)  # fmt: skip
def test_another_run_is_not_told(job: dict[str, str]) -> None:
    slurm = Slurm(**job)
    with pytest.raises(Stale):
        slurm.report()
    assert slurm.written == []


@pytest.mark.parametrize("others", ["Of a plugin", "it's of a plugin", 'of "a plugin" [multiverse: instant on h0]'])
def test_what_others_wrote_is_not_written_in_small_letters(others: str) -> None:
    slurm = Slurm(others)
    with pytest.raises(Refused, match="what others wrote"):
        slurm.report()
    assert slurm.written == []


def test_a_job_that_slurm_has_forgotten_is_gone() -> None:
    slurm = Slurm(JobArrayID="7_2")
    with pytest.raises(Gone):
        slurm.report()


def test_without_accounting_it_is_refused() -> None:
    slurm = Slurm()
    slurm.failure = "You are not running a supported accounting_storage plugin"
    with pytest.raises(Refused, match="accounting_storage"):
        slurm.report()


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("7_1|01:33.250\n7_1.batch|01:32.000\n7_1.0|00:01.250\n", 93.25),
        ("7_1|02:00:03\n", 7203.0),
        ("7_1|1-02:00:03\n", 93603.0),
        ("7_1|\n", 0.0),
        ("7_10|01:33.250\n", 0.0),
        ("", 0.0),
    ],
)
def test_the_accounting_tells_the_cpu_seconds_of_a_job(said: str, seconds: float) -> None:
    async def execute(argv: Sequence[str], env: Mapping[str, str], timeout: float) -> Completed:
        assert argv == ("sacct", "-n", "-P", "-j", "7_1", "-o", "JobID,TotalCPU")
        return Completed(0, said.encode(), b"")

    scheduler = SlurmScheduler(Settings(), "ab12c", env={}, execute=execute)
    assert asyncio.run(scheduler.cpu_seconds(RUN)) == seconds
