"""VMs inside jobs without a plugin of Slurm: steps of the batch file launch them, run in them and give them back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from multiverse_lab.lab import spank
from multiverse_lab.lab.configure import hostname
from multiverse_lab.lab.services import AGENT
from tests.integration.bare_node import BareNode, bare_node, ensure_agent
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import accounted, kill, until

pytestmark = pytest.mark.integration

LAUNCH = "srun --quiet --ntasks-per-node=1 multiverse-vm launch"
RUN = "srun --quiet multiverse-vm run --"
RECLAIM = "srun --quiet --ntasks-per-node=1 multiverse-vm reclaim"


@dataclass(frozen=True)
class Tasks:
    """The node, and what is in the environment of jobs there."""

    node: BareNode

    @property
    def lab(self) -> LabUnderTest:
        return self.node.under_test

    @property
    def environment(self) -> str:
        """The line of a script that finds the program, and the agent of this lab."""
        where = self.lab.where
        return f"export PATH={where.programs}:$PATH MULTIVERSE_JOBS_SOCKET={where.jobs_socket}"

    def sbatch(self, name: str, *lines: str, options: tuple[str, ...] = ("--comment=vm:image=slim,vcpu=1",)) -> str:
        script = "\n".join([self.environment, *lines])
        out = self.node.output(name)
        return self.lab.sbatch(script, "--partition=bare", "--mem=700", f"--output={out}", *options)

    def said(self, name: str) -> str:
        out = self.node.output(name)
        return out.read_text() if out.exists() else ""

    def has_vm(self, job: str) -> bool:
        """Whether the job has a VM that is complete."""
        return (self.lab.where.run / "jobs" / f"{job}.groups").exists()


@pytest.fixture(scope="module")
def tasks(lab: LabUnderTest, _images: None) -> Iterator[Tasks]:
    with bare_node(lab, 'design = "tasks"') as node:
        yield Tasks(node)


@pytest.fixture(autouse=True)
def _nothing_left(tasks: Tasks) -> Iterator[None]:
    yield
    tasks.node.nothing_left()


def test_a_batch_file_launches_a_vm_runs_in_it_and_gives_it_back(tasks: Tasks) -> None:
    job = tasks.sbatch(
        "batch", "hostname",
        f"{RUN} hostname; echo without $?",
        f"{LAUNCH} --vcpu-per-vm=none; echo mistake $?; {LAUNCH} --vcpu-per-vm=64; echo many $?",
        LAUNCH, f"{LAUNCH} --vcpu-per-vm=1 --vm-per-node=1",
        "export COLOUR='blue sky' LD_LIBRARY_PATH=/mine",
        f"{RUN} sh -c 'echo $(hostname) $(id -un) $PWD $COLOUR $LD_LIBRARY_PATH $(nproc); echo oops >&2'",
        f"{RUN} touch /tmp/first",
        f"echo word | {RUN} cat; {RUN} sh -c 'exit 7'; echo status $?",
        f"{RUN} sh -c 'kill -USR1 $$' 2>/dev/null; echo signal $?",
        f"{RUN} srun hostname; echo nested $?",
        f"{LAUNCH} --disk-size=1G; echo other $?",
        f"{RECLAIM}; {RUN} hostname; echo after $?",
        f"{LAUNCH}; {RUN} test -e /tmp/first; echo the first $?",
    )  # fmt: skip
    assert accounted(tasks.lab, job, 300) == ("COMPLETED", "0:0"), tasks.said("batch")
    lines = [line for line in tasks.said("batch").splitlines() if not line.startswith(("multiverse: ", "srun: "))]
    name, user = lines[5].split()[0], tasks.lab.user
    assert name.startswith("mvjob-")
    address = lines[4].split()[1]
    assert lines == [
        hostname(), "without 1", "mistake 1", "many 1", f"mvjob-{job}-0 {address}", f"mvjob-{job}-0 {address}",
        f"{name} {user.name} {user.home} blue sky /mine 1", "oops", "word", "status 7", "signal 138", "nested 1",
        "other 1", "after 1", f"mvjob-{job}-0 {address}", "the first 1",
    ]  # fmt: skip
    said = [line.removeprefix("multiverse: ") for line in tasks.said("batch").splitlines() if "multiverse: " in line]
    assert len(said) == 6 and f"job {job} has no VM on this node (launch it first" in said[0] and said[5] == said[0]
    assert "a number of virtual CPUs" in said[1] and "submit it with --cpus-per-task=64" in said[2]
    assert "would run its command on the bare node" in said[3] and "this job has other VMs" in said[4]


def test_a_job_that_is_cancelled_leaves_nothing(tasks: Tasks) -> None:
    job = tasks.sbatch("cancelled", LAUNCH, f"{RUN} sh -c 'echo runs; sleep 600'")
    until("it runs in its VM", lambda: "runs" in tasks.said("cancelled"), 180)
    tasks.lab.run("scancel", job)
    assert accounted(tasks.lab, job, 90)[0] == "CANCELLED"


def test_a_job_that_is_cancelled_while_its_vm_is_launched_leaves_nothing(tasks: Tasks) -> None:
    known = tasks.lab.where.agent / "jobs"
    job = tasks.sbatch("early", LAUNCH)
    until("its VM is being made", (known / f"{job}.json").exists, 90)
    tasks.lab.run("scancel", job)
    accounted(tasks.lab, job, 90)


def test_nobody_else_launches_enters_or_reclaims_the_vms_of_a_job(tasks: Tasks) -> None:
    lab, socket = tasks.lab, str(tasks.lab.where.jobs_socket)
    job = tasks.sbatch("mine", LAUNCH, f"{RUN} sleep 600")
    until("its VM runs", lambda: tasks.has_vm(job), 180)
    for user in (lab.other, lab.user):
        for operation in (("launch", "--vm-image=slim"), ("list",), ("run", "--", "id"), ("reclaim",)):
            argv = ("env", f"MULTIVERSE_JOBS_SOCKET={socket}", spank.installed(lab.where, "multiverse-vm"), *operation)
            outside = lab.run(*argv, user=user, check=False)
            assert outside.returncode == 1 and not outside.stdout
            assert "in no control groups of a job" in outside.stderr, "a process outside of jobs has none"
    own = ("run -- id", f"reclaim --job={job}", "reclaim", "list")
    shell = "; ".join([tasks.environment, *(f"multiverse-vm {operation}" for operation in own)])
    other = lab.run(
        "srun", "--quiet", "--partition=bare", "--mem=100", "sh", "-c", shell, user=lab.other, check=False, timeout=90
    )
    assert not other.stdout and other.stderr.count("has no VM on this node") == 2
    assert "only root may do that" in other.stderr
    entered = lab.run(
        spank.installed(lab.where, "mventer"), socket, job, "0", "step", "id", user=lab.other, check=False
    )
    assert entered.returncode == 1 and "has no VM of yours" in entered.stderr and not entered.stdout
    assert tasks.has_vm(job)
    lab.run("scancel", job)


def test_the_next_agent_goes_on_with_the_vms_of_jobs_and_releases_those_of_ended_ones(tasks: Tasks) -> None:
    lab, go = tasks.lab, tasks.node.output("go")
    wait = f"until [ -e {go} ]; do sleep 0.2; done"
    job = tasks.sbatch("goes-on", LAUNCH, wait, f"{RUN} hostname", RECLAIM, f"{RUN} hostname; echo after $?")
    until("its VM runs", lambda: tasks.has_vm(job), 180)
    kill(_pid_of_agent(tasks))
    ensure_agent(tasks.node.lab)
    go.touch()
    assert accounted(lab, job, 180) == ("COMPLETED", "0:0"), tasks.said("goes-on")
    assert tasks.said("goes-on").splitlines()[1].startswith("mvjob-") and "after 1" in tasks.said("goes-on")
    job = tasks.sbatch("ends", LAUNCH, "sleep 600")
    until("its VM runs", lambda: tasks.has_vm(job), 180)
    (vm,) = json.loads((lab.where.agent / "jobs" / f"{job}.json").read_text())
    assert vm["watched"] and vm["groups"]
    kill(_pid_of_agent(tasks))
    lab.run("scancel", job)
    assert accounted(lab, job, 90)[0] == "CANCELLED", "Slurm does not wait for the VM"
    assert tasks.node.left()
    ensure_agent(tasks.node.lab)


def _pid_of_agent(tasks: Tasks) -> int:
    running = AGENT.running(tasks.lab.where)
    assert running is not None
    return running.pid


def test_without_the_agent_no_command_runs(tasks: Tasks) -> None:
    asyncio.run(AGENT.stop(tasks.lab.where))
    try:
        job = tasks.sbatch("no-agent", f"{LAUNCH}; {RUN} hostname")
        assert accounted(tasks.lab, job, 90)[0] == "FAILED"
        assert tasks.said("no-agent").count("the agent of this host does not answer") == 2
        assert hostname() not in tasks.said("no-agent").splitlines()
    finally:
        ensure_agent(tasks.node.lab)
