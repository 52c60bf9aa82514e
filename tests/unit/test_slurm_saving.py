"""How Slurm is told that a job is saved: which commands are run for a job in each state."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from multiverse.controller.effects import OTHER_TIMEOUT
from multiverse.core.errors import Exhausted, Gone, MultiverseError, Refused, Stale, Unknown
from multiverse.core.model.job import JobRef
from multiverse.drivers.slurm.acting.jobs import CurrentJob
from multiverse.drivers.slurm.acting.saving import SlurmSaving
from multiverse.drivers.slurm.command import meaning
from multiverse_lab.simulation.loop import run

JOB = JobRef("7", 500)
RUNNING = CurrentJob(
    state="RUNNING", partition="vm", own=(), pinned="mv_1", at_gate=False, priority=5, reason="", requeued=False,
    comment="", record="7",
)  # fmt: skip
PENDING = replace(RUNNING, state="PENDING", pinned=None)


Answer = MultiverseError | float | str  # of sacct: an error, the line after so many seconds, or another line


class Slurm:
    """Records the commands, and answers with one job."""

    def __init__(self, job: CurrentJob) -> None:
        self.job, self.ran, self.gated, self.released = job, list[tuple[str, ...]](), list[CurrentJob](), 0
        self.script, self.line = "#!/bin/sh\n", "sbatch job.sh\n"
        self.accounting: list[Answer] = []  # the first ones
        self.nodes = ""
        commands: Any = self
        self.saving = SlurmSaving(commands, self._reread, self._to_gate, self._release)

    async def run(self, *argv: str) -> str:
        if argv[0] == "sacct":
            match self.accounting.pop(0) if self.accounting else self.line:
                case MultiverseError() as error:
                    raise error
                case float() as seconds:
                    await asyncio.sleep(seconds)
                    return self.line
                case line:
                    return line
        if argv[:2] == ("scontrol", "write"):
            assert argv[3] == self.job.record, "it would be read up to the first letter that is no digit"
            return self.script
        self.ran.append(argv)
        return self.nodes if argv[:3] == ("scontrol", "show", "nodes") else ""

    async def _reread(self, job: JobRef) -> CurrentJob:
        assert job == JOB
        return self.job

    async def _to_gate(self, job: JobRef, current: CurrentJob) -> None:
        self.gated.append(current)

    async def _release(self, job: JobRef) -> None:
        self.released += 1


def test_the_node_of_a_job_that_is_to_be_saved_is_drained() -> None:
    slurm = Slurm(RUNNING)
    asyncio.run(slurm.saving.prepare(JOB, ["mv1"]))
    assert [argv[:4] for argv in slurm.ran] == [("scontrol", "update", "NodeName=mv1", "State=DRAIN")]


def test_all_nodes_of_a_job_are_drained_by_one_command_and_serve_again_one_by_one() -> None:
    slurm = Slurm(RUNNING)
    asyncio.run(slurm.saving.prepare(JOB, ["mv2", "mv1"]))
    asyncio.run(slurm.saving.undo(JOB, ["mv2", "mv1"]))
    assert [argv[2:4] for argv in slurm.ran] == [
        ("NodeName=mv2,mv1", "State=DRAIN"),
        ("NodeName=mv2", "State=RESUME"),
        ("NodeName=mv1", "State=RESUME"),
    ]


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        ("NodeName=n1 Arch=x\nNodeName=mv2 Arch=x\nNodeName=mv1 Arch=x\n", ""),
        ("NodeName=mv1 Arch=x\nNodeName=mv2 Arch=x\n", "on mv1, not on mv2"),
        ("NodeName=n1 Arch=x\n", "on another node, not on mv2"),
    ],
)
def test_a_script_starts_on_the_node_that_is_listed_first(shown: str, told: str) -> None:
    slurm = Slurm(PENDING)
    slurm.nodes = shown
    try:
        asyncio.run(slurm.saving.check_script(["mv2", "mv1"]))
    except Refused as error:
        assert told and told in str(error)
    else:
        assert not told


@pytest.mark.parametrize(
    ("job", "error"),
    [(PENDING, Stale), (replace(RUNNING, batch=False), Refused), (replace(RUNNING, state="COMPLETED"), Stale)],
)
def test_no_other_job_is_prepared(job: CurrentJob, error: type[Exception]) -> None:
    slurm = Slurm(job)
    with pytest.raises(error):
        asyncio.run(slurm.saving.prepare(JOB, ["mv1"]))
    assert slurm.ran == []


@pytest.mark.parametrize(("hold", "command"), [(False, "requeue"), (True, "requeuehold")])
def test_only_an_incomplete_run_is_requeued_and_its_job_moved_to_the_gate(hold: bool, command: str) -> None:
    slurm = Slurm(RUNNING)
    asyncio.run(slurm.saving.requeue(JOB, hold=hold))
    assert slurm.ran == [("scontrol", command, "Incomplete", "7")]
    assert [job.priority for job in slurm.gated] == [0 if hold else 5], "a new nice value would release a held job"


def test_a_run_that_was_requeued_before_is_only_moved() -> None:
    slurm = Slurm(replace(RUNNING, state="COMPLETING", requeued=True))
    asyncio.run(slurm.saving.requeue(JOB))
    assert slurm.ran == [] and len(slurm.gated) == 1


def test_a_job_that_has_ended_is_not_requeued() -> None:
    slurm = Slurm(replace(RUNNING, state="CANCELLED"))
    with pytest.raises(Stale):
        asyncio.run(slurm.saving.requeue(JOB))
    assert slurm.ran == []


def test_only_a_pending_job_is_released() -> None:
    slurm = Slurm(PENDING)
    asyncio.run(slurm.saving.release(JOB))
    assert slurm.released == 1
    with pytest.raises(Stale):
        asyncio.run(Slurm(RUNNING).saving.release(JOB))


@pytest.mark.parametrize("error", [Gone("no such node"), Refused("Invalid node state specified")])
def test_a_node_that_is_gone_or_serves_already_needs_no_undoing(
    monkeypatch: pytest.MonkeyPatch, error: MultiverseError
) -> None:
    slurm = Slurm(RUNNING)

    async def gone(*argv: str) -> str:
        raise error

    monkeypatch.setattr(slurm, "run", gone)
    asyncio.run(slurm.saving.undo(JOB, ["mv1"]))


@pytest.mark.parametrize(
    ("line", "script", "refused"),
    [
        ("sbatch --open-mode=truncate job.sh", "", True),
        ("sbatch --open-mode t job.sh", "", True),
        ("sbatch --open-mode=append job.sh", "", False),
        ("sbatch job.sh", "#!/bin/sh\n#SBATCH -n 1 --open-mode=truncate\n", True),
        ("sbatch job.sh", "#!/bin/sh\necho --open-mode=truncate\n", False),
    ],
)
def test_a_job_that_would_truncate_its_output_is_refused(line: str, script: str, refused: bool) -> None:
    slurm = Slurm(RUNNING)
    slurm.line, slurm.script = line, script
    if refused:
        with pytest.raises(Refused, match="its next run would delete the output so far"):
            asyncio.run(slurm.saving.prepare(JOB, ["mv1"]))
        assert slurm.ran == []
    else:
        asyncio.run(slurm.saving.prepare(JOB, ["mv1"]))
        assert slurm.ran


AWAY = Unknown("sacct: Problem talking to the database: Connection refused")


@pytest.mark.parametrize("answers", [[AWAY], [30.0], ["", AWAY]], ids=["fails", "hangs", "does not show the job"])
def test_the_accounting_is_asked_again(answers: list[Answer]) -> None:
    slurm = Slurm(RUNNING)
    slurm.accounting, slurm.line = answers, "sbatch --open-mode=truncate job.sh\n"
    with pytest.raises(Refused, match="its next run would delete the output so far"):
        run(slurm.saving.check(JOB), 1)


@pytest.mark.parametrize(
    ("answer", "why"),
    [(AWAY, "Connection refused"), (30.0, "did not end within 10 s"), ("", "sacct does not show the job")],
)
def test_a_job_whose_output_may_be_truncated_is_not_saved(answer: Answer, why: str) -> None:
    async def main() -> float:
        slurm = Slurm(RUNNING)
        slurm.accounting = [answer] * 9
        with pytest.raises(Exhausted, match=f"{why}.*try again when `sacct -j 7` shows the job"):
            await slurm.saving.prepare(JOB, ["mv1"])
        assert slurm.ran == []
        return asyncio.get_running_loop().time()

    assert run(main(), 1) < OTHER_TIMEOUT, "the reason is told, not that it took too long"


@pytest.mark.parametrize(("script", "refused"), [("#SBATCH --open-mode=truncate\n", True), ("", False)])
def test_without_accounting_the_script_alone_says_it(script: str, refused: bool) -> None:
    slurm = Slurm(RUNNING)
    slurm.script = f"#!/bin/sh\n{script}"
    slurm.accounting = [meaning("sacct", "Slurm accounting storage is disabled\n")]
    if refused:
        with pytest.raises(Refused, match="its next run would delete the output so far"):
            run(slurm.saving.check(JOB), 1)
    else:
        run(slurm.saving.check(JOB), 1)


def test_the_script_of_a_task_of_an_array_is_read_by_the_id_of_its_record() -> None:
    slurm = Slurm(replace(RUNNING, record="13"))
    slurm.script = "#!/bin/sh\n#SBATCH --open-mode=truncate\n"
    with pytest.raises(Refused, match="its next run would delete the output so far"):
        run(slurm.saving.check(JOB), 1)


def test_a_job_that_is_not_to_be_queued_again_can_be_until_it_goes_on() -> None:
    slurm = Slurm(RUNNING)
    asyncio.run(slurm.saving.prepare(JOB, ["mv1"], requeues=False))
    assert slurm.ran[0] == ("scontrol", "update", "JobId=7", "Requeue=1"), "before its node takes no other job"
    slurm.ran.clear()
    asyncio.run(slurm.saving.forbid_requeue(JOB))
    asyncio.run(slurm.saving.undo(JOB, ["mv1"], requeues=False))
    restored = ("scontrol", "update", "JobId=7", "Requeue=0")
    assert slurm.ran == [restored, ("scontrol", "update", "NodeName=mv1", "State=RESUME"), restored]


def test_its_user_is_told_before_the_job_is_queued_again() -> None:
    slurm = Slurm(replace(RUNNING, comment="mine"))
    asyncio.run(slurm.saving.requeue(JOB, text="saved since noon"))
    told = ("scontrol", "update", "JobId=7", "AdminComment=mine [multiverse: saved since noon]")
    assert slurm.ran == [told, ("scontrol", "requeue", "Incomplete", "7")]
    assert slurm.gated[0].comment == "mine [multiverse: saved since noon]"
