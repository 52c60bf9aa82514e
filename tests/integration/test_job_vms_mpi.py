"""MPI across the VMs of a job, by mpirun and by srun's PMI, on bare-metal nodes of a lab."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.conftest import LabUnderTest
from tests.integration.images import mpi
from tests.integration.physical_nodes import nothing_left
from tests.integration.test_gangs import ALLREDUCE, MPICH, OPEN_MPI
from tests.integration.watch import accounted, until, written

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _nothing_left(lab_of_two: LabUnderTest) -> Iterator[None]:
    """After each test, no part of a VM remains on a node, and the nodes take jobs."""
    yield
    nothing_left(lab_of_two)


def _program(lab: LabUnderTest, name: str, text: str) -> str:
    """A program that guests find in the user's home."""
    path = lab.user.home / f"{name}.py"
    path.write_text(text)
    return str(path)


PMI_1 = """
import os, socket
stream = socket.socket(fileno=int(os.environ["PMI_FD"]))
lines = stream.makefile("rw")
def ask(question):
    lines.write(question + "\\n")
    lines.flush()
    return dict(word.partition("=")[::2] for word in lines.readline().split())
ask("cmd=init pmi_version=1 pmi_subversion=1")
rank, size, kvs = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"]), ask("cmd=get_my_kvsname")["kvsname"]
ask(f"cmd=put kvsname={kvs} key=from-{rank} value={socket.gethostname()}")
ask("cmd=barrier_in")
print(rank, *(ask(f"cmd=get kvsname={kvs} key=from-{other}")["value"] for other in range(size)), flush=True)
ask("cmd=finalize")
"""


@pytest.mark.slow
def test_the_tasks_of_a_step_exchange_what_they_know_by_sruns_pmi(lab_of_two: LabUnderTest) -> None:
    program = _program(lab_of_two, "pmi", PMI_1)
    where = ("--quiet", "--partition=physical", "--nodes=2", "--ntasks-per-node=2", "--mem=700", "--vm-image=slim")
    step = ("srun", *where, "--mpi=pmi2", "python3", program)
    done = lab_of_two.run(*step, user=lab_of_two.user, check=False, timeout=300)
    said = {int(rank): names for rank, *names in map(str.split, done.stdout.splitlines())}
    assert sorted(said) == [0, 1, 2, 3], done.stderr
    (names,) = {tuple(names) for names in said.values()}
    assert names[0] == names[1] != names[2] == names[3], "each node has one VM"


def _ranks(lab: LabUnderTest, script: str, *options: str) -> tuple[str, list[list[str]]]:
    """The job, and what the ranks of MPI said that its script started with $ALLREDUCE: their number among all, the sum
    that they reduced, and their VM."""
    out = lab.user.home / "ranks.out"
    out.unlink(missing_ok=True)
    program = _program(lab, "allreduce", ALLREDUCE)
    job = lab.sbatch(f"ALLREDUCE='python3 {program}'\n{script}", "--partition=physical", f"--output={out}", *options)
    assert accounted(lab, job, 600) == ("COMPLETED", "0:0"), out.read_text()
    return job, [line.split() for line in sorted(written(out).splitlines()) if "/4 " in line]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 1])
def test_mpirun_starts_ranks_in_all_vms_of_the_job_without_ssh(lab_of_two: LabUnderTest, nodes: int) -> None:
    tasks = ("--nodes=2", "--ntasks-per-node=2") if nodes == 2 else ("--nodes=1", "--ntasks=4")
    script = f"mpirun $ALLREDUCE {OPEN_MPI}"
    job, said = _ranks(lab_of_two, script, *tasks, "--vm-per-node=2", "--mem=1000", "--vm-image=slim")
    vms = [f"mvjob-{job}-{place}" for place in (range(4) if nodes == 2 else (0, 0, 1, 1))]
    assert said == [[f"{rank}/4", "1111", vm] for rank, vm in enumerate(vms)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "ways"),
    [
        (
            ("--nodes=2", "--ntasks-per-node=2", "--mem=1000"),
            (
                f"mpirun.openmpi $ALLREDUCE {OPEN_MPI}",
                f"mpirun.mpich $ALLREDUCE {MPICH}",
                f"srun --mpi=pmi2 $ALLREDUCE {MPICH}",
            ),
        ),
        (
            ("--nodes=1", "--ntasks=4", "--vm-per-node=2", "--mem=1500"),
            (f"mpirun.openmpi $ALLREDUCE {OPEN_MPI}", f"mpirun.mpich $ALLREDUCE {MPICH}"),
        ),
    ],
)
def test_each_mpi_runs_across_the_vms_of_a_job(
    lab_of_two: LabUnderTest, options: tuple[str, ...], ways: tuple[str, ...]
) -> None:
    mpi()
    script = "\n".join(("set -e", *ways))
    job, said = _ranks(lab_of_two, script, *options, "--vm-image=mpi")
    vms = [f"mvjob-{job}-{place}" for place in (0, 0, 1, 1)]
    assert said == [[f"{rank}/4", "1111", vm] for rank, vm in enumerate(vms) for _ in ways]


def test_another_user_starts_nothing_in_the_vms_of_a_job(lab_of_two: LabUnderTest) -> None:
    lab, ran = lab_of_two, lab_of_two.user.home / "ran"
    options = ("--nodes=1", "--nodelist=mvp1", "--vm-image=slim", "--mem=700")
    job = lab.sbatch(f"touch {ran}; exec sleep 600", "--partition=physical", "--output=/dev/null", *options)
    try:
        until("the job runs", ran.exists, 180)
        step = ("srun", "--overlap", f"--jobid={job}", "--export=ALL,MULTIVERSE_VM=0", "hostname")
        own, others = (lab.run(*step, user=user, check=False, timeout=120) for user in (lab.user, lab.other))
        assert own.stdout == f"mvjob-{job}-0\n", own.stderr
        assert others.returncode != 0 and not others.stdout and "ermission" in others.stderr, others.stderr
        wrong = lab.run(*step[:3], "--export=ALL,MULTIVERSE_VM=1", "hostname", user=lab.user, check=False, timeout=120)
        assert wrong.returncode != 0 and "the job has the VMs 0 to 0 on this node" in wrong.stderr
    finally:
        lab.run("scancel", job)
