"""Jobs whose VM is saved go on in the next run of the job: with real Slurm and real QEMU, without a controller."""

from __future__ import annotations

import os
import time

import pytest

from multiverse.drivers.slurm.site.conf import seconds_of
from multiverse.host import manifest
from tests.integration.huge_pages import RESERVED, huge_pages
from tests.integration.saved_jobs import Saver, saver
from tests.integration.watch import until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_controller")]

__all__ = ["huge_pages", "saver"]  # fixtures

TICKS = 'for i in $(seq 1000); do echo "tick $i"; sleep 0.5; [ -e go ] && break; done'
"""A script writes a line twice a second, until the file `go` is there."""


def go(saver: Saver) -> None:
    (saver.lab.user.home / "go").touch()


def ticks(saver: Saver) -> int:
    return saver.output().count("tick")


def goes_on(saver: Saver) -> None:
    before = ticks(saver)
    until("the script goes on", lambda: ticks(saver) > before + 1, 20)


MAPS = """
import ctypes, os, time  # a guest's Python has no module mmap
libc, file = ctypes.CDLL(None), open("mapped", "r+b")
libc.mmap.restype = ctypes.c_void_p
at, number = ctypes.c_void_p(libc.mmap(None, 4096, 3, 1, file.fileno(), ctypes.c_long(0))), 0
print("maps a file", flush=True)
while not os.path.exists("go"):
    number += 1
    ctypes.memmove(at, b"%08d" % number, 8)
    time.sleep(0.2)
print("mapped", number)
"""


@pytest.mark.parametrize("saves", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_saved_job_goes_on_with_its_files_and_keeps_its_exit_code(saver: Saver, saves: int) -> None:
    """Two files on NFS, one open and one mapped. With each save the guest's clock jumps an hour, and the job goes on on
    a host of another size."""
    home, user = saver.lab.user.home, saver.lab.user.uid
    for name, content in (("maps.py", MAPS.encode()), ("mapped", bytes(4096))):
        (home / name).write_bytes(content)
        os.chown(home / name, user, user)
    job = saver.run(
        f"echo begins; date +at=%s; python3 maps.py & exec 5>>open; {TICKS.replace('done', 'echo $i >&5; done')}; "
        "wait; date +at=%s; hostname; srun hostname; squeue -h -j $SLURM_JOB_ID -o %T; exit 7"
    )
    for number in range(saves):
        saver.says("tick")
        saver.says("maps a file")
        saver.save(job, behind=3600.0)
        saver.move_to_host(6 + number, 12288 - 2048 * number)
        before = ticks(saver)
        saver.restore(job)
        assert ticks(saver) >= before
        goes_on(saver)
    go(saver)
    assert saver.end(job) == ("FAILED", "7:0")
    said = saver.output()
    assert said.count("begins") == 1
    numbers = [int(line.split()[1]) for line in said.splitlines() if line.startswith("tick")]
    assert numbers == list(range(1, len(numbers) + 1))
    assert said.splitlines()[-3:] == [job.vm, job.vm, "RUNNING"]
    began, ended = (int(text.split()[0]) for text in said.split("at=")[1:])
    assert 0 < ended - began < 600, "an hour was not lost"
    assert [int(line) for line in (home / "open").read_text().splitlines()] == numbers[:-1]
    assert int((home / "mapped").read_bytes()[:8]) == int(said.split("mapped ")[1].split()[0])
    assert [row["State"] for row in saver.records(job) if row["JobID"] == job.id] == ["REQUEUED"] * saves + ["FAILED"]


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 1])
def test_steps_that_ran_during_the_save_end_with_their_own_exit_codes(saver: Saver, before: int) -> None:
    """The old step was begun in a run that was resumed `before` times. A new step begins with its number, while it
    still runs. Each has its own end."""
    step = "bash -c 'echo {0} begins; until [ -e {0} ]; do sleep 0.2; done; echo {0} ended; exit {1}'"
    job = saver.run(
        f"until [ -e begin ]; do echo waits; sleep 0.2; done; "
        f"srun --overlap -n 2 --overcommit {step.format('old', 4)} & old=$!\n{TICKS}\n"
        f"srun --overlap {step.format('new', 5)} & new=$!\n"
        "wait $old; echo old $?; touch waited; wait $new; echo new $?; exit 0"
    )
    home = saver.lab.user.home
    saver.says("waits")
    for _ in range(before):
        saver.cycle(job)
    (home / "begin").touch()
    until("both tasks have begun", lambda: saver.output().count("old begins") == 2)
    saver.cycle(job)
    goes_on(saver)
    go(saver)
    saver.says("new begins")
    (home / "old").touch()
    until("the old step ended", lambda: (home / "waited").exists(), 30)
    time.sleep(3)
    assert saver.lab.run("squeue", "-hs", "-j", job.id).stdout.count(".0"), "the new step is over"
    (home / "new").touch()
    assert saver.end(job) == ("COMPLETED", "0:0")
    said = saver.output()
    assert "old 4" in said and "new 5" in said and "slurmstepd" not in said, said
    assert said.count("old ended") == 2 and said.count("new ended") == 1
    steps = [(row["State"].split()[0], row["ExitCode"]) for row in saver.records(job) if row["JobID"] == f"{job.id}.0"]
    assert steps[-1] == ("FAILED", "5:0"), steps


@pytest.mark.parametrize(
    ("end", "wanted"),
    [
        pytest.param("exit 0", ("COMPLETED", "0:0"), id="success"),
        pytest.param("kill -SEGV $$; sleep 5", ("FAILED", "0:11"), id="signal"),
        pytest.param("kill -KILL $$; sleep 5", ("FAILED", "0:9"), id="killed"),
    ],
)
@pytest.mark.slow
def test_a_resumed_job_ends_as_its_script_ends(saver: Saver, end: str, wanted: tuple[str, str]) -> None:
    job = saver.run(f"{TICKS}; {end}")
    saver.says("tick 2")
    saver.cycle(job)
    go(saver)
    assert saver.end(job) == wanted


@pytest.mark.slow
def test_scancel_reaches_a_resumed_script_and_ends_children_that_ignore_it(saver: Saver) -> None:
    job = saver.run(f"trap 'echo caught' TERM; (trap '' TERM; while :; do echo child; sleep 0.5; done) & {TICKS}")
    saver.says("tick 2")
    saver.cycle(job)
    goes_on(saver)
    saver.lab.run("scancel", job.id)
    assert saver.end(job)[0] == "CANCELLED"
    said = saver.says("caught")
    assert said.count("caught") == 1
    time.sleep(2)
    assert saver.output() == said


@pytest.mark.slow
def test_signals_reach_the_script_of_a_resumed_job(saver: Saver) -> None:
    traps = "; ".join(f"trap 'echo got {name}' {name}" for name in ("USR1", "USR2", "HUP"))
    job = saver.run(f"{traps}; {TICKS}; {TICKS}", "--time=10", "--signal=B:USR2@535")
    saver.says("tick 2")
    saver.cycle(job)
    saver.lab.run("scancel", "-b", "-s", "USR1", job.id)
    saver.says("got USR1", 10)
    saver.lab.run("scancel", "-b", "-s", "HUP", job.id)
    saver.says("got HUP", 10)
    saver.says("got USR2", 150)
    assert saver.output().count("got") == 3
    goes_on(saver)


@pytest.mark.slow
def test_a_resumed_job_ends_at_its_time_limit(saver: Saver) -> None:
    job = saver.run(f"trap 'echo caught' TERM; {TICKS}; sleep 1000", "--time=1")
    saver.says("tick 2")
    saver.cycle(job)
    assert saver.end(job, 180)[0] == "TIMEOUT"
    said = saver.output()
    assert said.count("caught") == 1 and "DUE TO TIME LIMIT" in said


@pytest.mark.slow
def test_a_resumed_job_is_suspended_and_resumed_by_slurm(saver: Saver) -> None:
    job = saver.run(f"{TICKS}; exit 3")
    saver.says("tick 2")
    saver.cycle(job)
    goes_on(saver)
    saver.lab.run("scontrol", "suspend", job.id)
    until("the script stops", lambda: (before := ticks(saver), time.sleep(3)) and ticks(saver) == before, 30)
    saver.lab.run("scontrol", "resume", job.id)
    goes_on(saver)
    go(saver)
    assert saver.end(job) == ("FAILED", "3:0")


@pytest.mark.slow
def test_memory_of_before_the_save_counts_after_it(saver: Saver) -> None:
    """60 % of the job's memory before the save, and more than the rest after it."""
    job = saver.run(f"{grow(60, 'one')}; {TICKS}; {grow(60, 'two')}; sleep 3; exit 0")
    saver.says("one grown")
    saver.cycle(job)
    goes_on(saver)
    go(saver)
    assert saver.end(job)[0] == "OUT_OF_MEMORY"


def grow(mib: int, name: str) -> str:
    """A script that makes a process of that size, which stays. tail(1) keeps what it has read until the end."""
    return f"(head -c {mib}M /dev/zero; echo {name} grown >&2; sleep 1000) | tail -c {mib}M >/dev/null & sleep 2"


@pytest.mark.slow
def test_a_clock_that_jumps_by_an_hour_harms_neither_script_nor_step(saver: Saver) -> None:
    job = saver.run(
        "srun bash -c 'while ! [ -e old ]; do sleep 0.2; done; exit 4' & "
        f"date +%s; (sleep 4; echo slept) & {TICKS}; date +%s; touch old; wait %1; echo old $?; exit 2"
    )
    saver.says("tick 2")
    saver.save(job, behind=3600.0)
    saver.restore(job)
    saver.says("slept", 20)
    goes_on(saver)
    go(saver)
    assert saver.end(job) == ("FAILED", "2:0")
    said = saver.output()
    assert "old 4" in said
    first, last = (int(line) for line in said.splitlines() if line.isdigit())
    assert 0 < last - first < 600


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True])
def test_a_save_can_be_undone_until_the_job_is_cut_off(saver: Saver, resumed: bool) -> None:
    job = saver.run(f"{TICKS}; exit 6")
    saver.says("tick 2")
    if resumed:
        saver.cycle(job)
    saver.freeze(job.spec)
    before = ticks(saver)
    time.sleep(2)
    assert ticks(saver) <= before + 1
    saver.thaw(job)
    goes_on(saver)
    go(saver)
    assert saver.end(job) == ("FAILED", "6:0")


BURN = "burn() { local end=$((SECONDS + $1)); while [ $SECONDS -lt $end ]; do :; done; }"


@pytest.mark.slow
def test_accounting_has_what_the_old_processes_used_since_the_resume_alone(saver: Saver) -> None:
    job = saver.run(f"{BURN}; burn 12; {grow(60, 'one')}; {TICKS}; burn 5; (burn 3; exit 0); exit 0")
    saver.says("tick 2")
    saver.cycle(job)
    go(saver)
    assert saver.end(job) == ("COMPLETED", "0:0")
    rows = [row for row in saver.records(job) if row["JobID"] == f"{job.id}.batch"]
    used = [seconds_of(row["TotalCPU"]) for row in rows]
    assert used[-1] <= 12 and used[-1] >= 6, rows
    assert rows[-1]["MaxRSS"].endswith("K") and int(rows[-1]["MaxRSS"][:-1]) > 60000, rows


@pytest.mark.slow
def test_a_job_goes_on_in_ordinary_memory_after_huge_pages_and_the_other_way_round(
    huge_pages: int, saver: Saver
) -> None:
    """The stream of a state names the backends of memory: they are called the same, whatever their pages are."""
    job = saver.run(f"{grow(100, 'one')}; {TICKS}", memory=200)

    def in_huge_pages() -> int:
        known = manifest.read(saver.host._context.paths(job.vm).home)
        return known.huge_memory if known is not None else -1

    saver.says("tick 2")
    assert in_huge_pages() > 0
    for reserved in ("0", str(huge_pages // 2)):
        saver.save(job)
        RESERVED.write_text(reserved)
        saver.restore(job)
        assert bool(in_huge_pages()) == bool(int(reserved))
        goes_on(saver)
    go(saver)
    assert saver.end(job) == ("COMPLETED", "0:0")
