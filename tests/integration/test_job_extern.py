"""Jobs with VMs inside on a cluster where each job has an extern step, and where salloc starts its shell by a step."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from tests.integration.conftest import new_lab, nodes_with_job_vms
from tests.integration.job_nodes import JobNode, job_nodes
from tests.integration.watch import accounted, kill, until, written

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SITE = """PrologFlags=Alloc,Contain
LaunchParameters=use_interactive_step
"""
OF_EXTERN_STEPS = "100000000"
"""The seconds for which the process that Slurm has in each extern step sleeps."""
ADOPTED = """for each in $(find /sys/fs/cgroup -path "*/job_$1/step_extern/cgroup.procs"); do echo $$ > $each; done
exec sleep 1234
"""


@pytest.fixture(scope="module")
def node(accelerator: Path, _images: None) -> Iterator[JobNode]:
    with new_lab(accelerator, nodes_with_job_vms(1), controller=False) as made:
        (made.where.etc / "site.conf").write_text(SITE)
        asyncio.run(lifecycle.up(made.where, LabOptions(), controller=False))
        (node,) = job_nodes(made)
        node.kill("slurmd")
        node.ensure("slurmd")  # with a copy of the site's settings
        node.begin()
        yield node


@pytest.fixture(autouse=True)
def _nothing_left(node: JobNode) -> Iterator[None]:
    yield
    node.nothing_left()


def test_the_shell_of_salloc_has_a_terminal_in_the_vm(node: JobNode) -> None:
    lab = node.under_test
    ours, theirs = pty.openpty()
    out = lab.user.home / "of-the-shell"
    options = ("--partition=physical", "--vm-image=slim", "--mem=700", "--immediate=60")
    shell = subprocess.Popen(
        ["setsid", "--ctty", "--wait", "salloc", "--quiet", *options],
        env=lab.env | {"HOME": str(lab.user.home), "SHELL": "/bin/sh"},
        cwd=lab.user.home,
        user=lab.user.uid,
        group=lab.user.uid,
        extra_groups=[],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    os.write(ours, f"(tty; hostname; squeue -h -o %N; srun --quiet hostname) > {out}; exit 7\n".encode())
    said = _read(ours)
    assert shell.wait(60) == 7, said
    terminal, first, queue, second = written(out).splitlines()
    assert terminal.startswith("/dev/pts/") and first.startswith("mvjob-")
    assert (queue, second) == (node.name, first), "Slurm's commands work there"


def _read(terminal: int) -> str:
    """All that is written to a terminal until nobody has it open any more."""
    said = b""
    try:
        while more := os.read(terminal, 4096):
            said += more
    except OSError:  # EIO: the other side is closed
        pass
    finally:
        os.close(terminal)
    return said.decode().replace("\r", "")


def test_a_step_from_outside_without_an_environment_runs_in_the_vm(node: JobNode) -> None:
    job, out = node.begun("sleep 1000")
    variables = [f"{name}={value}" for name, value in node.under_test.env.items() if name in ("PATH", "SLURM_CONF")]
    for options in ((), ("--export=NONE",)):
        command = ("srun", "--quiet", f"--jobid={job}", "--overlap", *options, "hostname")
        done = node.under_test.run("env", "-i", *variables, *command, user=node.under_test.user, timeout=120)
        assert done.stdout == out.read_text(), done.stderr
    node.under_test.run("scancel", job)
    assert accounted(node.under_test, job, 120)[0] == "CANCELLED"


def test_a_killed_slurmstepd_of_the_extern_step_leaves_no_vm(node: JobNode) -> None:
    job, _ = node.begun("sleep 1000")
    assert set(node.stepds(job)) == {"batch", "extern"}
    kill(node.stepds(job)["extern"])
    node.under_test.run("scancel", job)
    assert accounted(node.under_test, job, 120)[0] == "CANCELLED"
    for pid in node.processes(OF_EXTERN_STEPS, here=True):  # Slurm leaves it, with or without a VM
        kill(pid)
    node.nothing_left(killed=job)
    node.ran_in_vm()


def test_what_a_user_has_left_in_the_extern_step_ends_with_the_job(node: JobNode) -> None:
    """pam_slurm_adopt(8) moves sessions of ssh there."""
    job, _ = node.begun("sleep 1000")

    def adopted() -> bool:
        files = (file for group in node.groups_of(job) for file in group.glob("step_extern/cgroup.procs"))
        found = {Path(f"/proc/{pid}/cmdline").read_text() for file in files for pid in file.read_text().split()}
        return "sleep\0001234\0" in found

    with subprocess.Popen([*node.inside, "sh", "-c", ADOPTED, "adopted", job]) as left:
        try:
            until("it is there", adopted, 30)
            node.under_test.run("scancel", job)
            assert accounted(node.under_test, job, 120)[0] == "CANCELLED"
            assert left.wait(60) == -signal.SIGKILL, "Slurm has ended it"
        finally:
            left.kill()
