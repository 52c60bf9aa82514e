"""Proves every row of the table of options (options.py) on the real lab. All jobs are submitted first, then checked."""

from __future__ import annotations

import gzip
import os
import pty
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse.drivers.slurm.site import gate
from tests.integration.conftest import LabUnderTest
from tests.integration.options import GROUPS, JOBS, Option
from tests.integration.watch import accounted, ended, kill, latest, output_of, qemu_of, release, until

pytestmark = pytest.mark.integration

ROWS = [row for group in GROUPS for row in group.rows]
ENOUGH = 400.0  # seconds for all jobs, on a busy machine


@dataclass
class Board:
    """The submitted jobs: their ids, and the directory of their output."""

    lab: LabUnderTest
    client: Client
    home: Path
    ids: dict[str, str] = field(default_factory=dict)

    def output(self, job: str) -> str:
        path = self.home / ("named.out" if job == "plain" else f"{job}.out")
        return path.read_text() if path.exists() else ""

    def state(self, job: str) -> str:
        """The job's state; empty for a job that Slurm has deleted, for which squeue reports an error."""
        done = self.lab.run("squeue", "-a", "-h", "-t", "all", "-o", "%T", "-j", self.ids[job], check=False)
        assert done.returncode == 0 or "Invalid job id" in done.stderr, done
        return done.stdout.strip()

    def over(self, job: str) -> str:
        """The job's output, after the job has ended and its VMs, which wrote the output, are gone."""
        busy = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED")
        number = self.ids[job]
        until(f"job {job} is over", lambda: not set(busy) & set(self.state(job).split()), ENOUGH)
        until(f"the VMs of job {job} are gone", lambda: number not in self._live(), ENOUGH)
        return self.output(job)

    def _live(self) -> set[str]:
        return {row["job_id"].partition("_")[0] for row in self.client.jobs()}

    def update(self, job: str, *changes: str) -> subprocess.CompletedProcess[str]:
        return self.lab.run("scontrol", "update", f"JobId={self.ids[job]}", *changes, user=self.lab.user, check=False)


def needs_its_release(row: Option, lab: LabUnderTest) -> None:
    """Skip a row that does not apply to this release of Slurm."""
    here = release(lab.run("sbatch", "--version").stdout)
    if not (release(row.since) or here) <= here < (release(row.until) or (99,)):
        pytest.skip(f"Slurm {here[0]}.{here[1]:02} has no such option")


def filled(text: str, board: Board) -> str:
    return text.replace("{home}", str(board.home)).replace("{now}", str(int(time.time())))


@pytest.fixture(scope="module")
def board(lab: LabUnderTest, client: Client) -> Iterator[Board]:
    home = lab.user.home / "options"
    board = Board(lab, client, home)
    until("the controller has published the largest sizes", lab.settings.slurm.inbox.with_name("inbox.limits").exists)
    files = {
        "in": "given\n",
        "named.out": "before\n",
        "nodes": "mvgate1\n",
        "buffer": "#BB capacity=1G\n",
        "programs": "0 echo first\n1 echo second\n",
        "prolog": "#!/bin/sh\necho export PROLOG=yes\n",
        "epilog": f"#!/bin/sh\necho epilogued > {home}/epilogued\n",
        "tool": "#!/bin/sh\necho tool=$0\n",
        "variables": f"COLOUR=blue\0PATH={os.defpath}\0",
    }
    for directory in (home, home / "dir"):
        directory.mkdir()
        os.chown(directory, lab.user.uid, lab.user.uid)
    for name, text in files.items():
        (home / name).write_text(text)
        (home / name).chmod(0o755)
        os.chown(home / name, lab.user.uid, lab.user.uid)
    for name, job in JOBS.items():
        text = filled(job.options, board)
        for other, number in board.ids.items():
            text = text.replace(f"{{{other}}}", number)
        output = [] if "--output" in text else [f"--output={home}/{name}.out"]
        wrapped = f"--wrap={filled(job.script, board)}"
        done = lab.run(
            *job.prefix, "sbatch", "--parsable", *output, *shlex.split(text), wrapped, user=lab.user, check=False
        )
        assert done.returncode == 0, f"{name}: {done.stderr}"
        board.ids[name] = done.stdout.strip().partition(";")[0]
    yield board
    lab.run("scancel", "--user", lab.user.name)
    until("all its VMs are gone", lambda: not client.jobs(), ENOUGH)


def options_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z0-9][a-z0-9-]*", text))


def man_page(command: str) -> str:
    """The headings of the options in the man page, if it is installed: --help does not show all options."""
    page = Path(f"/usr/share/man/man1/{command}.1.gz")
    text = gzip.decompress(page.read_bytes()).decode().replace("\\-", "-") if page.exists() else ""
    return "\n".join(re.findall(r"(?m)^\\fB-.*$", text))


def test_no_option_of_sbatch_srun_or_salloc_is_missing(lab: LabUnderTest) -> None:
    known = options_in(" ".join(row.names for row in ROWS)) | {"--help", "--usage", "--version"}
    for command in ("sbatch", "srun", "salloc"):
        shown = options_in(lab.run(command, "--help").stdout + man_page(command))
        assert not shown - known, command


@pytest.mark.parametrize("row", [row for row in ROWS if row.command], ids=lambda row: row.names)
def test_a_refused_option_is_named_in_the_message(board: Board, row: Option) -> None:
    needs_its_release(row, board.lab)
    words = [filled(word, board) for word in row.command]
    command = words if words[0] in ("srun", "salloc") else ["sbatch", *words, "--begin=now+1hour", "--wrap=true"]
    done = board.lab.run(*command, user=board.lab.user, check=False)
    assert re.search(re.escape(row.message), done.stderr), done.stderr
    assert "Unspecified error" not in done.stderr, "the last line says of what kind the error is"
    assert done.returncode != 0 or "Ignoring" in row.message


def test_a_job_that_truncates_its_output_cannot_ask_to_be_saved(board: Board) -> None:
    script = board.home / "truncates"
    script.write_text("#!/bin/sh\n#SBATCH --open-mode=truncate --comment=vm:save\ntrue\n")
    done = board.lab.run("sbatch", str(script), user=board.lab.user, check=False)
    assert "a job that is saved appends to its output (vm:save): submit without --open-mode=truncate" in done.stderr
    assert done.returncode != 0


HONOURED = [row for row in ROWS if row.job]


@pytest.mark.parametrize("row", HONOURED, ids=lambda row: row.names)
def test_an_honoured_option_is_seen_by_the_job(board: Board, row: Option) -> None:
    lines = [line.strip() for line in board.over(row.job).splitlines()]
    for wanted in row.output_lines:
        assert any(re.fullmatch(wanted, line) for line in lines), (wanted, lines)


# --- what a job's output does not show -------------------------------------------------------------


def _spans(*texts: str) -> list[tuple[float, float]]:
    """When the jobs began and ended, in the order of their begins."""
    found = [re.findall(r"^(?:from|to)=(\S+)$", text, re.MULTILINE) for text in texts]
    return sorted((float(begin), float(end)) for begin, end in found)


def test_an_arrays_limit_holds(board: Board) -> None:
    board.over("array")
    (_, end), (begin, _) = _spans(*(path.read_text() for path in board.home.glob(f"{board.ids['array']}_*.out")))
    assert end <= begin


def test_files_are_named_by_slurms_patterns(board: Board, client: Client) -> None:
    board.over("plain")
    assert output_of(board.home / "dir" / f"{board.ids['plain']}.err") == "complaint\n"
    assert (board.home / "named.out").exists()
    job = board.ids["array"]
    board.over("array")
    vms = {task: client.jobs(f"{job}_{task}")[-1]["vms"][0] for task in (1, 2)}
    assert {path.name for path in board.home.glob(f"{job}_*")} == {f"{job}_{task}-{vm}.out" for task, vm in vms.items()}


def test_licences_are_never_exceeded(board: Board) -> None:
    spans = _spans(*map(board.over, ("first", "nice", "second")))
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_a_job_with_a_nice_value_starts_after_others(board: Board) -> None:
    """It was submitted before the other, while a third job had the licence that both need."""
    nicer, other = _spans(board.over("nice")) + _spans(board.over("second"))
    assert other < nicer


@pytest.mark.slow
def test_a_deadline_ends_a_waiting_job(board: Board, client: Client) -> None:
    over = board.home / "seat.over"
    board.over("second")
    holder = board.lab.sbatch(f"until [ -e {over} ]; do sleep 1; done", "--licenses=seat:1", "--output=/dev/null")
    until("it has the licence", lambda: latest(client, holder).get("state") == "allocated", ENOUGH)
    late = board.lab.sbatch("true", "--licenses=seat:1", "--time=1", "--deadline=now+70", "--output=/dev/null")
    assert accounted(board.lab, late, ENOUGH)[0] == "DEADLINE"
    assert not [vm for row in client.jobs(late) for vm in row["vms"]]
    over.touch()
    ended(client, holder, "done")


def test_a_job_whose_dependency_is_never_met_is_cancelled(board: Board, client: Client) -> None:
    assert board.over("never") == ""
    assert accounted(board.lab, board.ids["never"])[0] == "CANCELLED"
    assert not [vm for row in client.jobs(board.ids["never"]) for vm in row["vms"]]


def test_a_job_gets_its_signal_and_ends_at_its_time_limit(board: Board) -> None:
    assert "signalled\nwent on\n" in board.over("signal")
    assert accounted(board.lab, board.ids["signal"])[0] == "TIMEOUT"


def test_a_held_job_is_changed_and_released(board: Board, client: Client) -> None:
    changes = ("MinMemoryNode=600", "NumCPUs=2", "TimeLimit=20", "JobName=renamed", "Comment=changed")
    for change in changes:
        assert board.update("held", change).returncode == 0, change
    for verb in ("requeue", "suspend"):
        assert board.lab.run("scontrol", verb, board.ids["held"], check=False).returncode != 0, verb
    assert board.state("held") == "PENDING" and not [vm for row in client.jobs(board.ids["held"]) for vm in row["vms"]]
    # With priority/basic a new nice value releases a held job, on any node.
    assert board.update("held", "Nice=7").returncode == 0
    board.lab.run("scontrol", "release", board.ids["held"], user=board.lab.user)
    lines = board.over("held").split()
    memory = next(int(line.partition("=")[2]) for line in lines if line.startswith("memory="))
    assert memory >= 600 and "nproc=2" in lines
    nice = f"Nice={7 - gate.boost('')}"  # that of a job that is let through, from that of its user
    assert {"TimeLimit=00:20:00", "JobName=renamed", "Comment=changed", nice} <= set(lines)


def test_users_cannot_update_what_multiverse_sets(board: Board) -> None:
    job = board.lab.sbatch("true", "--begin=now+1hour", "--output=/dev/null")
    board.ids["fixed"] = job
    before = board.lab.run("squeue", "-h", "-a", "-j", job, "-o", "%P %f %D %m %i").stdout
    for change in (
        "Features=slim",
        "Partition=bare",
        "Licenses=vm:1",
        "ReqNodeList=mvgate1",
        "Prefer=slim",
        "ReservationName=any",
        "MinMemoryNode=0",
        "MinMemoryNode=999999",
        "NumNodes=99",
        "DelayBoot=5",
        "AdminComment=mine",
        "Comment=vm:save",
    ):
        done = board.update("fixed", change)
        assert done.returncode != 0 and "Unspecified error" not in done.stderr, change
    assert board.lab.run("squeue", "-h", "-a", "-j", job, "-o", "%P %f %D %m %i").stdout == before


def test_a_running_job_is_updated_suspended_and_requeued(board: Board, client: Client) -> None:
    lab, job = board.lab, board.ids["busy"]
    until("it runs a step", lambda: "restarts=0" in board.output("busy") and "stepping" in board.output("busy"), ENOUGH)
    (vm,) = client.jobs(job)[-1]["vms"]
    for change in ("TimeLimit=30", "JobName=other", "Comment=running"):
        assert board.update("busy", change).returncode == 0, change
    shown = lab.run("squeue", "-h", "-a", "-j", job, "-o", "%l %j %k").stdout.split()
    assert shown == ["30:00", "other", "running"]
    assert board.update("busy", "NumNodes=2").returncode != 0
    figures = lab.run("sstat", "-n", "-P", "-a", "-j", job, "-o", "JobID,NTasks", user=lab.user).stdout.split()
    assert f"{job}.batch|1" in figures and f"{job}.0|1" in figures

    intruder = lab.run("srun", "--no-allocate", f"--nodelist={vm}", "id", user=lab.other, check=False)
    assert intruder.returncode != 0 and not intruder.stdout, intruder

    lab.run("scontrol", "suspend", job)
    until("it is suspended", lambda: board.state("busy") == "SUSPENDED")
    lab.run("scontrol", "resume", job)
    until("it goes on", lambda: board.state("busy") == "RUNNING")
    for verb in ("hold", "release"):
        lab.run("scontrol", verb, job, user=lab.user)
        assert board.state("busy") == "RUNNING" and client.jobs(job)[-1]["vms"] == [vm], verb

    lab.run("scontrol", "requeue", job, user=lab.user)
    # Before this, slurmctld may start the job on the VM of its first run, which the controller then ends.
    until("its first run is over", lambda: client.jobs(job)[-1]["vms"] != [vm], ENOUGH)
    now = ("scontrol", "update", f"JobId={job}", "StartTime=now")  # without Slurm's delay of two minutes

    def runs_again() -> bool:
        lab.run(*now, user=lab.user, check=False)
        return "restarts=1" in board.output("busy")

    until("it runs again", runs_again, ENOUGH)
    assert client.jobs(job)[-1]["vms"] != [vm]
    (board.home / "busy.over").touch()
    assert "restarts=0" in board.over("busy"), "its output was appended"


def test_a_running_job_gives_a_node_up(board: Board, client: Client) -> None:
    """It goes on without it, and the VM goes with the others when the job ends."""
    lab, go = board.lab, board.home / "smaller.over"
    script = f"until [ -e {go} ]; do sleep 0.5; done; scontrol show job $SLURM_JOB_ID"
    job = board.ids["smaller"] = lab.sbatch(script, "--nodes=2", "--mem=150", f"--output={board.home}/smaller.out")
    until("it runs", lambda: latest(client, job).get("state") == "allocated", ENOUGH)
    assert board.update("smaller", "NumNodes=1").returncode == 0
    assert lab.run("squeue", "-h", "-j", job, "-o", "%T %D").stdout.split() == ["RUNNING", "1"]
    assert board.update("smaller", "NumNodes=2").returncode != 0
    go.touch()
    assert " NumNodes=1 " in board.over("smaller").replace("\n", " ")
    assert [row["state"] for row in client.jobs(job)] == ["done"]
    records = ("sacct", "-X", "-n", "-P", "-o", "State,NNodes", "-j", job)
    until("both sizes are accounted", lambda: lab.run(*records).stdout.split() == ["RESIZING|2", "COMPLETED|1"], 30)


def test_a_request_is_checked_without_a_job(board: Board) -> None:
    for options, accepted in (((), True), (("-c999",), False), (("--reservation=any",), False)):
        done = board.lab.run("sbatch", "--test-only", *options, "--wrap=true", user=board.lab.user, check=False)
        assert (done.returncode == 0) == accepted, done.stderr


def test_sbatch_waits_and_exits_with_the_jobs_code(board: Board) -> None:
    done = board.lab.run("sbatch", "--wait", "--output=/dev/null", "--wrap=exit 3", user=board.lab.user, check=False)
    assert done.returncode == 3


def test_srun_has_a_terminal_in_the_vm(board: Board) -> None:
    lab = board.lab
    ours, theirs = pty.openpty()
    srun = subprocess.Popen(
        ["srun", "--quiet", "--immediate=300", "--pty", "sh", "-c", "tty; hostname"],
        env=lab.env | {"HOME": str(lab.user.home)},
        cwd=lab.user.home,
        user=lab.user.uid,
        group=lab.user.uid,
        extra_groups=[],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while b"\nmv" not in shown:
        shown += os.read(ours, 4096)
    assert b"/dev/pts/" in shown
    assert srun.wait(ENOUGH) == 0
    os.close(ours)


def test_salloc_runs_steps_in_its_vm(board: Board) -> None:
    done = board.lab.run(
        "salloc", "--quiet", "--no-bell", "--ntasks=2", "srun", "--quiet", "hostname", user=board.lab.user
    )
    first, second = done.stdout.split()
    assert first == second and first.startswith("mv")


def test_salloc_without_a_shell_allocates_a_vm(board: Board) -> None:
    lab = board.lab
    done = lab.run("salloc", "--no-shell", "--bell", "--kill-command=TERM", user=lab.user)
    found = re.search(r"Granted job allocation (\d+)", done.stderr)
    assert found
    assert lab.run("srun", "--quiet", f"--jobid={found[1]}", "hostname", user=lab.user).stdout.startswith("mv")
    lab.run("scancel", found[1], user=lab.user)


def test_root_submits_for_a_user(board: Board, client: Client) -> None:
    lab = board.lab
    options = [f"--uid={lab.user.name}", f"--gid={lab.user.uid}", "--priority=77", f"--chdir={board.home}"]
    wrapped = "--wrap=id -u; squeue -h -a -j $SLURM_JOB_ID -o priority=%Q"
    done = lab.run("sbatch", "--parsable", *options, "--output=for.out", wrapped)
    ended(client, done.stdout.strip(), "done")
    assert (board.home / "for.out").read_text().split() == [str(lab.user.uid), "priority=77"]
    for option in options[:2]:
        assert lab.run("sbatch", option, "--wrap=true", user=lab.user, check=False).returncode != 0


def test_mail_is_sent(board: Board) -> None:
    board.over("plain")
    mails = board.lab.where.slurmctld / "mail"
    until(
        "slurmctld sent it", lambda: mails.exists() and f"Job_id={board.ids['plain']} Name=named" in mails.read_text()
    )


def test_a_step_is_sampled_at_the_requested_interval(board: Board) -> None:
    """The job uses 100 MiB for four seconds, which the default interval of 30 s would miss."""
    board.over("plain")
    accounted(board.lab, board.ids["plain"])
    shown = board.lab.run("sacct", "-n", "-P", "--units=M", "-o", "MaxRSS", "-j", f"{board.ids['plain']}.batch").stdout
    assert float(shown.strip().rstrip("M")) >= 100, shown


def test_sacct_shows_a_jobs_efficiency(board: Board) -> None:
    """CPU time divided by the allocated CPU time, as in seff: of a job that computes, and of one that sleeps."""

    def efficiency(job: str) -> float:
        board.over(job)
        accounted(board.lab, board.ids[job])
        ask = ("sacct", "-n", "-P", "-o", "TotalCPU,CPUTimeRAW", "-j", board.ids[job])
        used, had = (
            board.lab.run(*ask).stdout.splitlines()[0].split("|")
        )  # the line of the job, which sums up its steps
        minutes, seconds = used.split(":")[-2:]
        return (60 * int(minutes) + float(seconds)) / int(had)

    assert efficiency("burn") > 0.5
    assert efficiency("signal") < 0.2


def test_without_a_spare_nothing_starts_immediately(board: Board) -> None:
    """With one it does (`test_pool`)."""
    done = board.lab.run("srun", "--immediate", "true", user=board.lab.user, check=False)
    assert done.returncode != 0
    assert "no VM is ready for this job" in done.stderr and "Job can not start immediately" in done.stderr


def test_heterogeneous_jobs_are_refused(board: Board) -> None:
    done = board.lab.run("sbatch", "-n1", ":", "-n1", "--wrap=true", user=board.lab.user, check=False)
    assert done.returncode != 0
    assert "heterogeneous jobs are not supported: submit each component as a separate job" in done.stderr


@pytest.mark.skipif(not shutil.which("xauth"), reason="srun asks xauth for the display's key before it asks slurmctld")
def test_x11_is_not_forwarded(board: Board) -> None:
    lab = board.lab
    (lab.user.home / ".Xauthority").touch()
    os.chown(lab.user.home / ".Xauthority", lab.user.uid, lab.user.uid)
    lab.run("xauth", "add", "localhost:10", ".", "0" * 32, user=lab.user)
    done = lab.run("env", "DISPLAY=localhost:10", "srun", "--x11", "true", user=lab.user, check=False)
    assert done.returncode != 0 and "X11 forwarding not available" in done.stderr, done.stderr


def test_options_of_newer_releases_work(board: Board) -> None:
    lab = board.lab
    needs_its_release(next(row for row in ROWS if row.names == "--oom-kill-step"), lab)
    steps = "srun --quiet --treewidth=off hostname; srun --quiet --external-launcher --ntasks=1 hostname"
    facts = "scontrol show job $SLURM_JOB_ID | grep -o 'Extra=.*'; echo kill_step=$SLURM_OOM_KILL_STEP"
    options = ("--extra=labelled", "--segment=1", "--oom-kill-step=1")
    board.ids["newer"] = lab.sbatch(f"{steps}; {facts}", *options, f"--output={board.home}/newer.out")
    said = board.over("newer").split()
    assert said == [*latest(board.client, board.ids["newer"])["vms"] * 2, "Extra=labelled", "kill_step=1"]


def test_sattach_shows_a_step(board: Board) -> None:
    lab, log = board.lab, board.home / "attached.log"
    job = lab.sbatch(f"srun sh -c 'echo here; touch {log}; sleep 3; echo and gone'", "--output=/dev/null")
    board.ids["attached"] = job
    until("its step runs", log.exists, ENOUGH)
    done = lab.run("sattach", f"{job}.0", user=lab.user, check=False)
    assert "and gone" in done.stdout.splitlines(), done.stderr
    board.over("attached")


@pytest.mark.slow
def test_a_job_that_is_requeued_and_held_waits_without_a_vm(board: Board, client: Client) -> None:
    lab, over = board.lab, board.home / "requeued.over"
    job = lab.sbatch(f"until [ -e {over} ]; do sleep 1; done", "--requeue", "--output=/dev/null")
    until("it runs", lambda: latest(client, job).get("state") == "allocated", ENOUGH)
    lab.run("scontrol", "requeuehold", job, user=lab.user)
    until("it waits again", lambda: latest(client, job)["state"] == "queued", ENOUGH)
    assert lab.run("squeue", "-h", "-a", "-j", job, "-o", "%T %Q").stdout.split() == ["PENDING", "0"]
    until("its VM is gone", lambda: client.jobs(job)[0]["state"] == "requeued", ENOUGH)
    (first, second) = client.jobs(job)
    assert second["state"] == "queued" and not second["vms"]
    over.touch()
    lab.run("scontrol", "release", job, user=lab.user)
    lab.run("scontrol", "update", f"JobId={job}", "StartTime=now", user=lab.user)  # without Slurm's delay
    assert ended(client, job, "done")["vms"] != first["vms"]
    assert accounted(lab, job)[0] == "COMPLETED"


@pytest.mark.slow
def test_a_job_that_must_not_be_requeued_ends_with_its_vm(board: Board, client: Client) -> None:
    job = board.lab.sbatch("sleep 900", "--no-requeue", "--output=/dev/null")
    row = until("it runs", lambda: (r := latest(client, job)).get("state") == "allocated" and r, ENOUGH)
    kill(qemu_of(row["vms"][0]))
    ended(client, job, "done")
    assert accounted(board.lab, job)[0] == "NODE_FAIL" and len(client.jobs(job)) == 1


@pytest.mark.slow
def test_a_job_with_no_kill_outlives_one_of_its_vms(board: Board, client: Client) -> None:
    lab, over = board.lab, board.home / "outlived.over"
    job = lab.sbatch(f"until [ -e {over} ]; do sleep 1; done", "--no-kill", "--nodes=2", "--output=/dev/null")
    until("it runs", lambda: client.jobs(job) and client.jobs(job)[-1]["state"] == "allocated", ENOUGH)
    first = lab.run("squeue", "-h", "-a", "-j", job, "-o", "%B").stdout.strip()
    (other,) = set(client.jobs(job)[-1]["vms"]) - {first}
    kill(qemu_of(other))
    until(
        "Slurm has it on one node", lambda: lab.run("squeue", "-h", "-a", "-j", job, "-o", "%N").stdout.strip() == first
    )
    over.touch()
    ended(client, job, "done")
    # One line for each size of the job: before and after the loss.
    account = ("sacct", "-X", "-n", "-P", "-D", "-o", "State", "-j", job)
    until("it completed", lambda: lab.run(*account).stdout.split() == ["RESIZING", "COMPLETED"], 30)


def revoked(board: Board, *command: str) -> str:
    """The record of a job that is submitted and then cancelled by the controller."""
    done = board.lab.run(*command, user=board.lab.user, check=False)
    found = re.search(r"(?:Submitted batch job|Pending job allocation) (\d+)", done.stdout + done.stderr)
    assert found, done
    ended(board.client, found[1], "revoked")
    return board.lab.run("scontrol", "show", "job", found[1]).stdout


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("salloc", "--no-shell", "--profile=task"), "profiles of VMs are not supported: submit without --profile"),
        (
            ("sbatch", "--cluster-constraint=any", "--wrap=true"),
            "--cluster-constraint is not supported: submit without",
        ),
    ],
)
def test_an_option_that_only_the_controller_sees_revokes_the_job(
    board: Board, command: tuple[str, ...], message: str
) -> None:
    assert message in revoked(board, *command)


def test_a_container_id_that_only_the_controller_sees_revokes_the_job(board: Board) -> None:
    needs_its_release(next(row for row in ROWS if row.names == "srun, salloc --container-id"), board.lab)
    assert "--container-id is not supported" in revoked(board, "salloc", "--no-shell", "--container-id=x")


def test_a_profile_that_sbatch_inherits_from_a_job_is_left_to_the_controller(board: Board) -> None:
    """It is that of the job in which sbatch runs, and the submitted job has none."""
    command = (
        "env",
        "SLURM_JOB_ID=1",
        "SLURM_PROFILE=Task",
        "sbatch",
        "--parsable",
        "--wrap=true",
        "--begin=now+1hour",
    )
    done = board.lab.run(*command, user=board.lab.user)
    record = board.lab.run("scontrol", "show", "job", done.stdout.strip()).stdout
    board.lab.run("scancel", done.stdout.strip())
    assert "JobState=PENDING" in record
