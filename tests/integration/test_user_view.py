"""What an ordinary user sees of jobs in VMs with Slurm's own commands, on the login node and in the VM."""

from __future__ import annotations

import re

import pytest

from multiverse.client import Client
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import ended, latest, nothing_left, until, written

pytestmark = pytest.mark.integration


def test_a_user_sees_and_cancels_a_running_job_in_the_partition_of_its_submission(
    lab: LabUnderTest, client: Client
) -> None:
    home, user = lab.user.home, lab.user
    inside = (
        f"echo $SLURM_JOB_PARTITION > {home}/partition; squeue --me -h -o %i:%T > {home}/inside; "
        f"sbatch --parsable -p $SLURM_JOB_PARTITION -d singleton -o /dev/null --wrap true > {home}/successor; sleep 600"
    )
    job = lab.sbatch(inside, "--output=/dev/null")
    until("it runs", lambda: latest(client, job).get("state") == "allocated")

    def shows(*command: str) -> str:
        return lab.run(*command, user=user).stdout

    until("its own commands have run in the VM", lambda: (home / "successor").exists() and written(home / "successor"))
    assert written(home / "partition").strip() == "vm" and f"{job}:RUNNING" in written(home / "inside")
    successor = written(home / "successor").strip()
    assert successor.isdigit(), "a successor may name the partition of its job"
    for options in (("--me",), ("-u", user.name), ("-t", "R"), ("-p", "vm"), ("-s", "-u", user.name), ("-j", job)):
        assert job in shows("squeue", "-h", *options), options
    assert "Partition=vm " in shows("scontrol", "show", "job", job).replace("\n", " ")
    assert f"StepId={job}.batch" in shows("scontrol", "show", "step")
    ask = ("sacct", "-nXP", "-r", "vm", "-j", job, "-o", "JobID,Partition,State")
    until("it is accounted as running", lambda: f"{job}|vm|RUNNING" in shows(*ask).split())
    nodes = shows("sinfo")
    assert "drain" not in nodes
    assert set(re.findall(r"(\S+) +mvgate", nodes)) <= {"idle~"}, "22.05 does not show them"
    lab.run("scancel", "-p", "vm", "-u", user.name, user=user)
    ended(client, job, "done")
    ended(client, successor, "cancelled")
    until("it is accounted there", lambda: f"{job}|vm|CANCELLED" in shows(*ask))
    nothing_left(lab, client)


TEMPLATE_OF_ITS_OWN = 600.0  # seconds: a guest that cannot plug CPUs is forked from a template of its size


def test_what_a_waiting_job_says_frightens_nobody_and_is_one_word(lab: LabUnderTest, client: Client) -> None:
    """Tools split the columns of squeue at blanks, and take "down" and "drained" for failure."""
    user = lab.user
    holder = lab.sbatch("sleep 600", "-c8", "--output=/dev/null")
    until("the host is full", lambda: latest(client, holder).get("state") == "allocated", TEMPLATE_OF_ITS_OWN)
    waiting = lab.sbatch("true", "-c8", "--array=1-3%2", "--output=/dev/null")
    gang = lab.sbatch("true", "-N2", "-c4", "--output=/dev/null")

    def reasons() -> set[str]:
        shown = lab.run("squeue", "-h", "-r", "-j", f"{waiting},{gang}", "-o", "%i %P %T %r %f %R", user=user).stdout
        rows = [line.split() for line in shown.splitlines()]
        assert all(len(row) == 6 and row[1:3] == ["vm", "PENDING"] for row in rows), shown
        return {row[3] for row in rows}

    until("slurmctld has looked at all of them", lambda: reasons() <= {"Licenses", "Priority", "JobArrayTaskLimit"})
    lab.run("scancel", "-u", user.name, user=user)
    done = lab.run("srun", "true", user=user, timeout=TEMPLATE_OF_ITS_OWN)
    said = [line for line in done.stderr.splitlines() if line]
    known = r"srun: (job \d+ (queued and waiting for|has been allocated) resources|Licenses currently unavailable)"
    assert all(re.fullmatch(known, line) for line in said), said  # 24.11 tells the reason for which it waits
    nothing_left(lab, client)


def test_a_job_that_gets_past_the_gate_is_taken_back_and_runs_in_a_vm(lab: LabUnderTest, client: Client) -> None:
    """Somebody deletes the reservation that holds the licence, while jobs wait."""
    holder = lab.sbatch("sleep 600", "-c8", "--output=/dev/null")
    until("the host is full", lambda: latest(client, holder).get("state") == "allocated", TEMPLATE_OF_ITS_OWN)
    out = lab.user.home / "taken-back.out"
    job = lab.sbatch("hostname", "-c8", f"--output={out}")
    until("it waits for the licence", lambda: lab.run("squeue", "-h", "-j", job, "-o", "%r").stdout == "Licenses\n")
    lab.run("scontrol", "delete", "ReservationName=mvgate")
    refused = lab.run("sbatch", "--wrap=true", user=lab.user, check=False)
    assert refused.returncode != 0 and "no job can wait in partition vm now" in refused.stderr
    reserved = ("scontrol", "-o", "show", "reservation", "mvgate")
    until("the licence is held again", lambda: "Licenses=vm:1" in lab.run(*reserved, check=False).stdout, 150)
    until("it waits again", lambda: lab.run("squeue", "-h", "-j", job, "-o", "%T %N").stdout.split() == ["PENDING"])
    lab.run("scancel", holder)
    (vm,) = ended(client, job, "done")["vms"]
    assert written(out).strip() == vm, "it ran once, in a VM"
    nothing_left(lab, client)


def test_commands_that_ask_slurmd_work_in_the_vm_and_on_the_login_node(lab: LabUnderTest, client: Client) -> None:
    home, user = lab.user.home, lab.user
    inside = (
        f"cd {home}; sleep 600 & sleep 3; scontrol pidinfo $$ > pidinfo 2>&1; "
        "scontrol listpids $SLURM_JOB_ID > listpids 2>&1; "
        "echo $$ >> listpids; sstat -nP -a -j $SLURM_JOB_ID -o JobID,NTasks > sstat.new 2>&1; mv sstat.new sstat; wait"
    )
    job = lab.sbatch(inside, "--output=/dev/null")
    until("its commands have run", lambda: (home / "sstat").exists())
    assert f"Slurm JobId={job} ends at" in written(home / "pidinfo"), written(home / "pidinfo")
    *rows, shell = written(home / "listpids").splitlines()
    assert [row.split()[1:4] for row in rows if row.split()[0] == shell] == [[job, "batch", "0"]], rows
    assert f"{job}.batch|1" in written(home / "sstat"), written(home / "sstat")
    shown = lab.run("sstat", "-nP", "-a", "-j", job, "-o", "JobID,NTasks", user=user)
    assert f"{job}.batch|1" in shown.stdout, shown.stderr
    lab.run("scancel", job, user=user)
    ended(client, job, "done")
    nothing_left(lab, client)
