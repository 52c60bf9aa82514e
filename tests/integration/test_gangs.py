"""Jobs of several VMs: a job gets all VMs or none, and steps and MPI run across them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from multiverse.client import Client
from tests.integration.conftest import LabUnderTest
from tests.integration.images import mpi
from tests.integration.watch import accounted, ended, kill, latest, nothing_left, qemu_of, until, written

pytestmark = pytest.mark.integration

# An MPI program without a compiler: Python calls the library. MPICH's handles are numbers (mpi.h), Open MPI's are the
# addresses of objects. MPICH 4.0 over UCX may hang in MPI_Finalize: a rank flushes data that another rank, which waits
# in PMI's barrier already, would have to acknowledge. Therefore MPICH's ranks exit without MPI_Finalize.
ALLREDUCE = """\
import ctypes, os, socket, sys
mpi = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
if "mpich" in sys.argv[1]:
    world, integer, add = 0x44000000, 0x4C000405, 0x58000003
else:
    names = ("ompi_mpi_comm_world", "ompi_mpi_int", "ompi_mpi_op_sum")
    world, integer, add = (ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, n))) for n in names)
rank, size, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
mpi.MPI_Init(None, None)
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
mpi.MPI_Comm_size(world, ctypes.byref(size))
mine = ctypes.c_int(10 ** rank.value)
mpi.MPI_Allreduce(ctypes.byref(mine), ctypes.byref(total), 1, integer, add, world)
print(f"{rank.value}/{size.value} {total.value} {socket.gethostname()}\\n", end="", flush=True)
if "mpich" in sys.argv[1]:
    mpi.MPI_Barrier(world)
    os._exit(0)
mpi.MPI_Finalize()
"""
OPEN_MPI, MPICH = "libmpi.so.40", "libmpich.so.12"


def test_vms_of_a_job_know_each_other_and_steps_run_on_all(lab: LabUnderTest, client: Client) -> None:
    out = lab.user.home / "gang.out"
    each = "echo $(hostname) $(scontrol show hostnames | xargs getent hosts | wc -l)"
    last = "srun -Q -N1 -n1 -r3 sh -c 'cat; exit 7' 2> /dev/null"
    script = f"srun -Q sh -c '{each}'; echo over the wire | {last}; echo exit $?"
    job = lab.sbatch(script, "-N4", "--ntasks-per-node=2", f"--output={out}")
    row = ended(client, job, "done")
    *said, wire, code = written(out).splitlines()
    assert sorted(said) == sorted(f"{vm} 4" for vm in row["vms"] for _ in range(2)) and len(row["vms"]) == 4
    assert (wire, code) == ("over the wire", "exit 7")
    assert accounted(lab, job) == ("COMPLETED", "0:0")
    nothing_left(lab, client)


@pytest.mark.parametrize("state", [pytest.param("claimed", marks=pytest.mark.slow), "spawning"])
def test_a_job_that_loses_a_vm_before_its_pin_still_gets_all_vms(
    lab: LabUnderTest, client: Client, controller: Callable[[], int], state: str
) -> None:
    controller()
    out = lab.user.home / f"lost-{state}.out"
    job = lab.sbatch("srun -Q -l hostname", "-N3", f"--output={out}")
    victim = until("a VM has its QEMU", lambda: being_made(client, job, state))
    kill(victim)
    row = ended(client, job, "done")
    lines = written(out).split()
    ran = set(lines[1::2])
    assert len(lines) == 6 and len(ran) == 3 and ran <= set(row["vms"]), "the step ran once, on three VMs"
    whole = [other for other in client.jobs(job) if other["state"] == "done"]
    assert len(whole) == 1 and accounted(lab, job) == ("COMPLETED", "0:0")
    nothing_left(lab, client)


def being_made(client: Client, job: str, state: str) -> int:
    """The pid of QEMU of one of the job's VMs while the attempt is in that state, or else 0."""
    row = latest(client, job)
    if row.get("state") == "done":
        pytest.fail("the job ended before a VM could be killed")
    if row.get("state") != state:
        return 0
    for vm in row["vms"]:
        try:
            return qemu_of(vm)
        except AssertionError:
            continue
    return 0


def allreduce(lab: LabUnderTest, client: Client, *run: str, library: str, options: tuple[str, ...] = ()) -> None:
    """Run an allreduce with two ranks on each of two VMs, with each launcher in `run`."""
    program = lab.user.home / "allreduce.py"
    program.write_text(ALLREDUCE)
    out = lab.user.home / f"{Path(library).stem}.out"
    script = "\n".join(f"{how} python3 {program} {library} || echo failed {how}" for how in run)
    job = lab.sbatch(script, "-N2", "--ntasks-per-node=2", "--mem=500", f"--output={out}", *options)
    row = ended(client, job, "done")
    lines = written(out).splitlines()
    said = sorted(line for line in lines if "/4 " in line)
    assert [line.split()[:2] for line in said] == [[f"{rank}/4", "1111"] for rank in range(4) for _ in run], lines
    for start in range(len(run)):
        assert {line.split()[2] for line in said[start :: len(run)]} == set(row["vms"]), "the ranks ran on both VMs"


@pytest.mark.slow
def test_open_mpi_by_mpirun(lab: LabUnderTest, client: Client, controller: Callable[[], int]) -> None:
    controller()
    allreduce(lab, client, "mpirun", library=OPEN_MPI)
    nothing_left(lab, client)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "ways"),
    [(OPEN_MPI, ("mpirun.openmpi", "srun -Q --mpi=pmix")), (MPICH, ("mpirun.mpich", "srun -Q --mpi=pmi2"))],
)
def test_each_mpi_by_mpirun_and_by_srun(
    lab: LabUnderTest, client: Client, controller: Callable[[], int], library: str, ways: tuple[str, ...]
) -> None:
    mpi()
    controller()  # writes the image into Slurm's configuration
    allreduce(lab, client, *ways, library=library, options=("--constraint=mpi",))
    nothing_left(lab, client)
