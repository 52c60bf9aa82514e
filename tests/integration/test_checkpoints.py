"""Checkpoints of jobs that go on, and go on from them after their VM is lost: with real Slurm and real QEMU, without a
controller."""

# ruff: noqa: F401, F811

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.core.errors import Exhausted, Refused
from multiverse.core.model.basics import CloneKind
from multiverse.host.qemu import checkpoints
from multiverse.host.qemu.library import QemuHost
from tests.integration.saved_jobs import Saver
from tests.integration.test_saving import MAPS, TICKS, go, goes_on, saver, ticks
from tests.integration.watch import until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_controller")]

ENDS = "hostname; srun hostname; cmp $0 $0 && squeue -h -j $SLURM_JOB_ID -o %T; exit 7"


class ProcessEndsError(BaseException):
    """Ends a call where nothing else than a process that ends does: its sockets are closed, and nothing is undone."""


def went_on(saver: Saver, vm: str) -> None:
    """Each line was written once, also those that were written after the checkpoint as well."""
    said = saver.output()
    numbers = [int(line.split()[1]) for line in said.splitlines() if line.startswith("tick")]
    assert said.count("begins") == 1
    assert numbers == list(range(1, len(numbers) + 1))
    assert said.splitlines()[-3:] == [vm, vm, "RUNNING"]


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (CloneKind.INSTANT, ""),
        (CloneKind.INSTANT, "0b" * 32),
        (CloneKind.LINKED, ""),
        (CloneKind.FULL, ""),
    ],
)
@pytest.mark.slow
def test_a_job_goes_on_from_its_checkpoint_and_its_output_is_right(
    saver: Saver,
    kind: CloneKind,
    key: str,
) -> None:
    """It is lost twice: the second time it goes on from a checkpoint of the run that was restored."""
    saver.key = key
    job = saver.run(f"echo begins; dd if=/dev/urandom of=/var/tmp/own bs=1M count=20 2>/dev/null; "
                    f"cksum /var/tmp/own > /var/tmp/sum; {TICKS}; cksum /var/tmp/own | cmp - /var/tmp/sum && {ENDS}",
                    kind=kind, memory=150, cpus=2)  # fmt: skip
    saver.says("tick 3", 120)
    for _ in range(2):
        saver.checkpoint(job)
        before = ticks(saver)
        until("the run that is to be lost has written more", lambda: ticks(saver) > before + 4)  # noqa: B023
        saver.lose(job)
        saver.restore(job)
        goes_on(saver)
    go(saver)
    assert saver.end(job) == ("FAILED", "7:0")
    went_on(saver, job.vm)


def test_a_job_that_writes_to_shared_files_is_refused_by_their_names(saver: Saver) -> None:
    job = saver.run(f"exec 5>>other; {TICKS}")
    saver.says("tick")
    with pytest.raises(Refused, match=r"shared files: .*/other"):
        saver.checkpoint(job)
    goes_on(saver)
    saver.checkpoint(job, shared_files=True)
    goes_on(saver)


@pytest.mark.slow
def test_a_mapped_shared_file_is_one_that_is_written(saver: Saver) -> None:
    home = saver.lab.user.home
    for name, content in (("maps.py", MAPS.encode()), ("mapped", bytes(4096))):
        (home / name).write_bytes(content)
        (home / name).chmod(0o666)
    job = saver.run(f"python3 maps.py & {TICKS}")
    saver.says("maps a file")
    with pytest.raises(Refused, match=r"shared files: .*/mapped"):
        saver.checkpoint(job)
    goes_on(saver)


@pytest.mark.slow
def test_srun_steps_go_on_through_checkpoints_and_are_part_of_them(saver: Saver) -> None:
    """A step that runs meanwhile ends with its own code in the run that was restored."""
    step = "bash -c 'until [ -e step ]; do sleep 0.2; done; exit 4'"
    job = saver.run(f"srun --overlap {step} & {TICKS}\nwait $!; echo step $?; exit 0")
    saver.says("tick 3")
    saver.checkpoint(job)
    goes_on(saver)
    saver.lose(job)
    saver.restore(job)
    goes_on(saver)
    (saver.lab.user.home / "step").touch()
    go(saver)
    assert saver.end(job) == ("COMPLETED", "0:0")
    assert "step 4" in saver.output()


@pytest.mark.slow
def test_a_checkpoint_that_finds_no_room_leaves_the_job_as_it_was(
    saver: Saver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = saver.run(TICKS)
    saver.says("tick")

    def full(path: Path, key: str, source: int, **_: object) -> None:
        os.close(source)
        raise Exhausted("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.saved_files, "write", full)
        with pytest.raises(Exhausted, match="no space left"):
            saver.checkpoint(job)
    goes_on(saver)
    saver.checkpoint(job)
    goes_on(saver)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["_mirror", "freeze", "thaw", "_end"])
def test_a_process_that_ends_in_the_middle_leaves_a_job_that_goes_on(
    saver: Saver,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """The library of another process lets the job go on, and makes the checkpoint when it is asked again."""
    job = saver.run(f"echo begins; {TICKS}; {ENDS}")
    saver.says("tick 3")

    def end(*_: object) -> None:
        raise ProcessEndsError

    if method in ("freeze", "thaw"):
        made = QemuHost._checkpoint
        ends = lambda *args, **more: replace(made(*args, **more), **{method: end})  # noqa: E731
        monkeypatch.setattr(QemuHost, "_checkpoint", ends)
    else:
        monkeypatch.setattr(checkpoints.Checkpoint, method, end)
    with pytest.raises(ProcessEndsError):
        saver.checkpoint(job)
    monkeypatch.undo()
    saver.host.settle_checkpoints()
    goes_on(saver)
    saver.checkpoint(job)
    before = ticks(saver)
    until("it goes on", lambda: ticks(saver) > before + 2)
    saver.lose(job)
    saver.restore(job)
    goes_on(saver)
    go(saver)
    assert saver.end(job) == ("FAILED", "7:0")
    went_on(saver, job.vm)
