"""What users are promised of saved jobs: what waits for their end, what is refused, their bytes, signals and quotas."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse.core.errors import Refused
from multiverse_lab.lab import lifecycle
from tests.integration.conftest import LabUnderTest, more_settings
from tests.integration.test_save_command import running, stored
from tests.integration.test_users import command
from tests.integration.watch import accounted, ended, kill, latest, nothing_left, qemu_of, until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COUNTS = "for i in $(seq 8); do echo count $i; sleep 0.5; done; echo over"
"""Its last line tells that the job has ended."""
WAITS = "echo count 1; until [ -e go ]; do sleep 0.2; done; echo over"
"""It ends once the file `go` is there."""


@pytest.fixture(autouse=True)
def _clean(lab: LabUnderTest) -> None:
    """Nothing in the user's home is of an earlier test."""
    for path in lab.user.home.iterdir():
        if path.is_file():
            path.unlink()


@contextmanager
def begun(lab: LabUnderTest, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """A command of the user that goes on while the context lasts."""
    user = lab.user
    process = subprocess.Popen(
        argv, env=lab.env | {"HOME": str(user.home)}, cwd=user.home, user=user.uid, group=user.uid, extra_groups=[],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def state(lab: LabUnderTest, job: str) -> str:
    return lab.run("squeue", "-h", "-j", job, "-o", "%T", check=False).stdout.strip()


def says(path: Path, text: str) -> None:
    until(f"{path.name} has {text}", lambda: path.exists() and text in path.read_text())


def save_and_hold(client: Client, job: str) -> None:
    client.save(job, hold=True)
    until(f"job {job} is saved", lambda: stored(client, job))


def seats_used(lab: LabUnderTest) -> int:
    """Of the lab's licence `seat`."""
    found = re.search(r"LicenseName=seat\s.*?\bUsed=(\d+)", lab.run("scontrol", "show", "licenses").stdout, re.DOTALL)
    assert found is not None
    return int(found[1])


def test_what_waits_for_a_job_waits_for_its_real_end(lab: LabUnderTest, client: Client) -> None:
    """Meanwhile another job takes the licence that it had, and ends."""
    home = lab.user.home
    options = ("--wait", "--parsable", "--licenses=seat:1", "--job-name=same", "--output=first.txt")
    with begun(lab, "stdbuf", "-oL", "sbatch", *options, f"--wrap={COUNTS}") as waiting:
        assert waiting.stdout is not None
        job = waiting.stdout.readline().strip()
        wanted = {
            "afterok": f"--dependency=afterok:{job}",
            "afterany": f"--dependency=afterany:{job}",
            "singleton": "--dependency=singleton --job-name=same",
        }
        look = "tail -n1 first.txt"
        after = {name: lab.sbatch(look, *words.split(), f"--output={name}.txt") for name, words in wanted.items()}
        says(home / "first.txt", "count 1")
        assert seats_used(lab) == 1
        save_and_hold(client, job)
        taker = lab.sbatch(look, "--licenses=seat:1", "--output=taker.txt")
        ended(client, taker, "done")
        assert (home / "taker.txt").read_text().startswith("count ")
        assert {state(lab, one) for one in after.values()} == {"PENDING"} and waiting.poll() is None
        client.resume(job)
        ended(client, job, "done")
        assert waiting.wait(60) == 0
        for name, one in after.items():
            ended(client, one, "done")
            assert (home / f"{name}.txt").read_text() == "over\n", name
    nothing_left(lab, client)


def test_a_task_that_corresponds_to_a_saved_task_waits_for_its_real_end(lab: LabUnderTest, client: Client) -> None:
    home = lab.user.home
    array = lab.sbatch(COUNTS, "--array=0-1", "--output=task-%a.txt")
    look = "tail -n1 task-$SLURM_ARRAY_TASK_ID.txt"
    after = lab.sbatch(look, "--array=0-1", f"--dependency=aftercorr:{array}", "--output=after-%a.txt")
    says(home / "task-0.txt", "count 1")
    save_and_hold(client, f"{array}_0")
    for one in (f"{array}_1", f"{after}_1"):
        ended(client, one, "done")
    assert state(lab, f"{after}_0") == "PENDING"
    client.resume(f"{array}_0")
    for one in (f"{array}_0", f"{after}_0"):
        ended(client, one, "done")
    for number in range(2):
        assert (home / f"after-{number}.txt").read_text() == "over\n"
    nothing_left(lab, client)


def test_a_quota_refuses_a_save_and_the_job_goes_on(lab: LabUnderTest, client: Client) -> None:
    with more_settings(lab, "[save]\nenabled = true\nuser_quota = 1\n"):
        job, output = running(lab, client, WAITS)
        with pytest.raises(Refused, match=r"its state may take \d+ MiB, and those of its user take 0 of 1 MiB"):
            client.save(job)
        assert client.saved() == []
        (lab.user.home / "go").touch()
        ended(client, job, "done")
    assert output.read_text() == "count 1\nover\n"


def test_users_save_and_resume_their_own_jobs_and_no_others(lab: LabUnderTest, client: Client) -> None:
    job, output = running(lab, client, WAITS)

    def told(uid: int, *words: str) -> str:
        done = command(lab, uid, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(uid: int, *words: str) -> str:
        done = command(lab, uid, *words)
        assert done.returncode == 1 and not done.stdout, done
        return done.stderr

    mine, other = lab.user.uid, lab.other.uid
    assert f"job {job} runs in no VM" in refused(other, "save", job)
    assert client.saved() == []
    assert f"Job {job} is saved" in told(mine, "save", job, "--hold")
    assert job in told(mine, "saved") and told(other, "saved") == "No job is saved.\n"
    for words in (("resume", job), ("resume", job, "--anew")):
        assert f"job {job} is not saved" in refused(other, *words)
    assert stored(client, job) and state(lab, job) == "PENDING"
    told(mine, "resume", job)
    until("it goes on", lambda: latest(client, job)["state"] == "allocated")
    until("its state is used up", lambda: client.saved() == [])
    save_and_hold(client, job)
    assert f"job {job} was saved and is held by an operator" in refused(mine, "resume", job)
    client.resume(job)
    (lab.user.home / "go").touch()
    ended(client, job, "done")
    assert output.read_text() == "count 1\nover\n" and accounted(lab, job) == ("COMPLETED", "0:0")
    nothing_left(lab, client)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process stands still while the context lasts."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


WRITTEN = 200_000
"""Bytes that the program writes into an open file each time it is told to (SIGUSR1)."""
WRITES = f"""
import os, signal, socket, sys
signals = (signal.SIGUSR1, signal.SIGUSR2)
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
file, report = os.open("written.txt", os.O_WRONLY | os.O_CREAT), socket.socket(type=socket.SOCK_DGRAM)
print("count 1", flush=True)
os.fsync(1)
while signal.sigwait(signals) == signal.SIGUSR1:
    os.write(file, (b" " * 998 + b"x\\n") * ({WRITTEN} // 1000))
    report.sendto(b"written", (sys.argv[1], int(sys.argv[2])))
print("over", flush=True)
"""
"""Its process is the only one of its job: the end of another one would write back what that has open."""


def test_what_a_job_wrote_is_on_the_file_server_before_it_is_saved_or_it_is_not_saved(
    lab: LabUnderTest, client: Client
) -> None:
    (lab.user.home / "writes.py").write_text(WRITES)
    file = lab.user.home / "written.txt"
    with socket.socket(type=socket.SOCK_DGRAM) as reports:
        reports.bind((lab.settings.network.gateway, 0))
        reports.setblocking(False)
        address, port = reports.getsockname()
        job, output = running(lab, client, f"exec python3 writes.py {address} {port}")

        def is_written() -> bool:
            with suppress(BlockingIOError):
                return reports.recv(100) == b"written"
            return False

        def write() -> None:
            lab.run("scancel", "-b", "-s", "USR1", job)
            until("the program has written", is_written)

        with stopped(int(lifecycle.status(lab.where)["ganesha"]["pid"])):
            write()
            client.save(job)
            until("the save is over", lambda: client.saved() == [])
            assert state(lab, job) == "RUNNING"
            why = "the file systems were not written back within 20 s"
            told = client.explain(job)["jobs"][0]["text"]
            assert "It was not saved: " in told and why in told
            assert file.stat().st_size == 0, "the server stood still"
        write()
    save_and_hold(client, job)
    assert file.stat().st_size == 2 * WRITTEN
    client.resume(job)
    until("it goes on", lambda: client.saved() == [])
    lab.run("scancel", "-b", "-s", "USR2", job)
    ended(client, job, "done")
    assert file.read_text() == (" " * 998 + "x\n") * (2 * WRITTEN // 1000)
    assert output.read_text() == "count 1\nover\n" and accounted(lab, job) == ("COMPLETED", "0:0")
    nothing_left(lab, client)


def test_what_slurm_cannot_queue_again_is_not_saved_and_is_told_why(lab: LabUnderTest, client: Client) -> None:
    script = lab.user.home / "truncates"
    script.write_text(f"#!/bin/sh\n#SBATCH --open-mode=truncate\n#SBATCH --output=/dev/null\n{WAITS}\n")
    script.chmod(0o755)
    wish = "--comment=vm:save"
    for argv, why in (
        (("srun", wish, "true"), "jobs of srun and salloc cannot be saved"),
        (("sbatch", wish, "--no-requeue", "--wrap=true"), "submit without --no-requeue"),
        (("sbatch", wish, str(script)), "submit without --open-mode=truncate"),
    ):
        done = lab.run(*argv, user=lab.user, check=False)
        assert done.returncode != 0 and why in done.stderr, argv
    with begun(lab, "srun", "--job-name=interactive", "sleep", "1000"):
        once = lab.sbatch(WAITS, "--no-requeue", "--output=/dev/null")
        truncating = [
            lab.sbatch(WAITS, "--open-mode=truncate", "--output=/dev/null"),
            lab.run("sbatch", "--parsable", str(script), user=lab.user).stdout.strip(),
        ]
        named = lambda: lab.run("squeue", "-h", "-n", "interactive", "-o", "%i").stdout.strip()  # noqa: E731
        interactive = until("srun has a job", named)
        for job in (interactive, once, *truncating):
            until(f"job {job} runs", lambda job=job: latest(client, job).get("state") == "allocated")
        with pytest.raises(Refused, match="of srun or salloc"):
            client.save(interactive)
        with pytest.raises(Refused, match=r"not to be queued again \(--no-requeue\)"):
            client.save(once)
        assert client.saved() == []
        for job in truncating:
            client.save(job)
            until("the save is over", lambda: client.saved() == [])
            told = client.explain(job)["jobs"][0]["text"]
            assert f"It was not saved: job {job} has --open-mode=truncate" in told
        assert {state(lab, job) for job in (interactive, once, *truncating)} == {"RUNNING"}
        lab.run("scancel", interactive)
    (lab.user.home / "go").touch()
    for job in (once, *truncating):
        ended(client, job, "done")
        assert accounted(lab, job) == ("COMPLETED", "0:0")
    nothing_left(lab, client)


def test_accounting_shows_each_run_and_its_user_the_sum_of_all(lab: LabUnderTest, client: Client) -> None:
    # Counting alone may take less than half a CPU second, which is told as 0.
    job, _ = running(lab, client, f"{COUNTS}; timeout --preserve-status 2 yes > /dev/null; exit 0")
    save_and_hold(client, job)
    client.resume(job)
    ended(client, job, "done")
    assert accounted(lab, job) == ("COMPLETED", "0:0")

    def runs(*options: str) -> list[str]:
        rows = lab.run("sacct", "-nPX", *options, "-j", job, "-o", "State,Elapsed").stdout.split()
        return [row.split("|")[0] for row in rows]

    assert runs() == ["COMPLETED"] and runs("-D") == ["REQUEUED", "COMPLETED"]

    def told() -> re.Match[str] | None:  # sacctmgr of 22.05 writes small letters
        text = lab.run("sacct", "-nPX", "-j", job, "-o", "AdminComment").stdout.lower()
        return re.search(r" in (\d+) s,.* with its earlier run, (\d+) s and (\d+) cpu seconds in all", text)

    last, seconds, cpu_seconds = map(int, until("its user is told", told).groups())
    assert seconds > last and cpu_seconds > 0


def test_a_job_gets_the_signal_before_its_time_limit_in_its_last_run_alone(lab: LabUnderTest, client: Client) -> None:
    script, output = lab.user.home / "signalled", lab.user.home / "signalled.txt"
    options = ("--time=3", "--signal=B:USR1@20", "--comment=vm:save", f"--output={output}")
    asks = "".join(f"#SBATCH {option}\n" for option in options)
    script.write_text(f"#!/bin/bash\n{asks}trap 'echo signal' USR1\necho count 1\nwhile :; do sleep 0.5; done\n")
    script.chmod(0o755)
    with more_settings(lab, "[save]\nenabled = true\nmax_runs = 2\n"):
        job = lab.run("sbatch", "--parsable", str(script), user=lab.user).stdout.strip()
        says(output, "count 1")
        assert "It is saved by" in client.explain(job)["jobs"][0]["text"]
        until("its first run is over", lambda: len(client.jobs(job)) == 2, 240)
        assert output.read_text() == "count 1\n", "it was saved before the signal"
        until("its last run has begun", lambda: latest(client, job).get("state") == "allocated")
        until("its state is used up", lambda: client.saved() == [])
        assert "it has had 2 runs, as many as the site permits" in client.explain(job)["jobs"][0]["text"]
        ended(client, job, "done", 300)
    said = output.read_text()
    assert said.startswith("count 1\nsignal\n") and said.count("signal\n") == 1 and "DUE TO TIME LIMIT" in said
    runs = lab.run("sacct", "-nPXD", "-j", job, "-o", "State,Timelimit").stdout.split()
    assert runs == ["REQUEUED|00:03:00", "TIMEOUT|00:03:00"]
    nothing_left(lab, client)


@contextmanager
def held_back(program: Path, place: Path) -> Iterator[Path]:
    """A program waits while the context lasts, and then works as ever. The file that it makes as it is started."""
    began, goes_on, original, stand_in = (place / name for name in ("began", "goes-on", "original", "stand-in"))
    shutil.copy(program, original)
    waits = f"touch {began}; until [ -e {goes_on} ]; do sleep 0.1; done"
    stand_in.write_text(f'#!/bin/sh\n{waits}; exec {original} "$@"\n')
    stand_in.chmod(0o755)
    subprocess.run(["mount", "--bind", str(stand_in), str(program)], check=True)
    try:
        yield began
    finally:
        subprocess.run(["umount", "-l", str(program)], check=True)
        goes_on.touch()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_job_whose_vm_dies_while_its_state_is_written_begins_anew_once_and_if_its_user_agrees(
    lab: LabUnderTest, client: Client, tmp_path: Path, restarts: bool
) -> None:
    comment = "vm:save,restart" if restarts else ""
    runs = lab.user.home / "runs.txt"
    job = lab.sbatch(f"echo begins >> {runs}; {WAITS}; exit 5", f"--comment={comment}", "--output=saved.txt")
    says(runs, "begins")
    (vm,) = client.vms()
    with held_back(Path("/usr/bin/zstd"), tmp_path) as began:
        client.save(job)
        until("its state is being written", began.exists)
        assert [one["state"] for one in client.saved()] == ["writing"]
        kill(qemu_of(vm["name"]))
    if not restarts:
        reason = lambda: lab.run("squeue", "-h", "-j", job, "-o", "%r").stdout.strip()  # noqa: E731
        until("it is held", lambda: reason() == "JobHeldUser")
        until("its state is given up", lambda: client.saved() == [])
        until("its VM is gone", lambda: not client.vms())
        told = lambda: str(client.explain(job)["jobs"][0]["text"])  # noqa: E731
        until("that is explained", lambda: f"its VM {vm['name']} was lost before its state was complete" in told())
        assert runs.read_text() == "begins\n"
        lab.run("scontrol", "release", job, user=lab.user)
    until("it begins anew", lambda: runs.read_text() == "begins\nbegins\n")
    (lab.user.home / "go").touch()
    ended(client, job, "done")
    assert runs.read_text() == "begins\nbegins\n" and accounted(lab, job) == ("FAILED", "5:0")
    assert client.saved() == [] and not list((lab.where.root / "saved").glob("*mv*"))
    nothing_left(lab, client)
