"""Jobs of several VMs that are saved go on in the next run of the job, with what spans their VMs: with real Slurm and
real QEMU, without a controller. The table in docs/users.md says what holds: each of its rows is a test here."""

from __future__ import annotations

import re
import time

import pytest

from tests.integration.images import mpi
from tests.integration.saved_jobs import Saver
from tests.integration.test_gangs import MPICH, OPEN_MPI
from tests.integration.test_saving import TICKS, go, goes_on, saver
from tests.integration.watch import until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_controller")]

__all__ = ["saver"]  # a fixture

STEP = "bash -c 'echo {0} begins on $(hostname); until [ -e {0} ]; do sleep 0.2; done; echo {0} ended; exit {1}'"
"""A step says where it begins, and ends with a code once there is a file of its name."""


@pytest.mark.slow
@pytest.mark.parametrize("saves", [1, 2])
def test_steps_across_vms_end_with_their_own_exit_codes(saver: Saver, saves: int) -> None:
    """An old step runs in both VMs while they are saved, and a new one of its number beside it."""
    job = saver.run(
        f"srun --overlap {STEP.format('old', 4)} & old=$!\n{TICKS}\n"
        f"srun --overlap {STEP.format('new', 5)} & new=$!\n"
        "wait $old; echo old $?; touch waited; wait $new; echo new $?; exit 7",
        vms=2,
    )
    home = saver.lab.user.home
    until("both tasks have begun", lambda: saver.output().count("old begins") == 2)
    for _ in range(saves):
        saver.cycle(job)
        goes_on(saver)
    go(saver)
    until("both new tasks have begun", lambda: saver.output().count("new begins") == 2)
    (home / "old").touch()
    until("the old step ended", lambda: (home / "waited").exists(), 30)
    time.sleep(8)  # a slurmstepd tries for six seconds to tell that of another node that its step has ended
    assert saver.lab.run("squeue", "-hs", "-j", job.id).stdout.count(".0"), "the new step is over"
    (home / "new").touch()
    assert saver.end(job) == ("FAILED", "7:0")
    said = saver.output()
    assert "old 4" in said and "new 5" in said and "slurmstepd" not in said, said
    for name in ("old", "new"):
        assert said.count(f"{name} ended") == 2
        assert {line.split()[-1] for line in said.splitlines() if f"{name} begins" in line} == set(job.vms)
    steps = [(row["State"].split()[0], row["ExitCode"]) for row in saver.records(job) if row["JobID"] == f"{job.id}.0"]
    assert steps[-1] == ("FAILED", "5:0"), steps


@pytest.mark.slow
def test_a_vm_without_a_process_of_the_job_is_saved_and_takes_steps_afterwards(saver: Saver) -> None:
    job = saver.run(f"scontrol show hostnames; {TICKS}; scontrol show hostnames; srun hostname; exit 0", vms=2)
    saver.says("tick 2")
    saver.cycle(job)
    goes_on(saver)
    go(saver)
    assert saver.end(job) == ("COMPLETED", "0:0")
    said = [line for line in saver.output().splitlines() if not line.startswith("tick")]
    assert said[:2] == said[2:4] == job.vms and sorted(said[4:]) == sorted(job.vms), said


TALK = """
import os, socket, time
if os.environ["SLURM_PROCID"] == "0":
    server = socket.create_server(("", 7000))
    open("listens", "w").write(socket.gethostname())
    link, number = server.accept()[0], 0
    while not os.path.exists("go"):
        link.sendall(b"%d\\n" % number)
        assert link.recv(100) == b"%d\\n" % number
        number += 1
        time.sleep(0.05)
    print("exchanged", number, flush=True)
else:
    while not os.path.exists("listens") or not (name := open("listens").read()):
        time.sleep(0.1)
    link = socket.create_connection((name, 7000))
    while data := link.recv(100):
        link.sendall(data)
    print("closed", flush=True)
"""


@pytest.mark.slow
def test_connections_between_vms_of_a_job_go_on(saver: Saver) -> None:
    home = saver.lab.user.home
    (home / "talk.py").write_text(TALK)
    job = saver.run(f"srun --overlap python3 talk.py & {TICKS}; wait %1; echo ended $?", vms=2)
    until("the tasks are connected", lambda: (home / "listens").exists())
    saver.says("tick 5")
    saver.cycle(job)
    goes_on(saver)
    go(saver)
    assert saver.end(job) == ("COMPLETED", "0:0")
    said = saver.output()
    assert "exchanged" in said and "closed" in said and "ended 0" in said, said
    (home / "listens").unlink()


@pytest.mark.slow
def test_signals_reach_earlier_steps_in_the_vm_of_the_script_alone(saver: Saver) -> None:
    """Slurm knows nothing of what began in another VM in an earlier run. That ends with its VM."""
    step = "bash -c 'n=0; while :; do echo $((n += 1)) >at-$(hostname); sleep 0.2; done'"
    job = saver.run(f"srun --overlap {step} & {TICKS}; wait", vms=2)
    places = [saver.lab.user.home / f"at-{vm}" for vm in job.vms]
    until("both tasks count", lambda: all(place.exists() for place in places))
    saver.cycle(job)
    goes_on(saver)

    def counting() -> list[bool]:
        before = [place.read_text() for place in places]
        time.sleep(3)
        return [place.read_text() != text for place, text in zip(places, before, strict=True)]

    until("both go on", lambda: counting() == [True, True])
    saver.lab.run("scontrol", "suspend", job.id)
    until("the one beside the script stops", lambda: counting() == [False, True])
    saver.lab.run("scontrol", "resume", job.id)
    until("it goes on", lambda: counting() == [True, True])
    saver.lab.run("scancel", job.id)
    assert saver.end(job)[0] == "CANCELLED"
    for spec in job.specs:
        saver.host.destroy(spec.name, 10.0, spec.token)
    assert counting() == [False, False]
    for place in places:
        place.unlink()


def test_a_save_of_several_vms_can_be_undone_until_they_are_cut_off(saver: Saver) -> None:
    job = saver.run(f"srun --overlap {STEP.format('old', 4)} & {TICKS}; touch old; wait %1; exit $?", vms=2)
    until("both tasks have begun", lambda: saver.output().count("old begins") == 2)
    for spec in job.specs:
        saver.freeze(spec)
    before = saver.output()
    time.sleep(2)
    assert saver.output().count("tick") <= before.count("tick") + 1
    saver.thaw(job)
    goes_on(saver)
    go(saver)
    assert saver.end(job) == ("FAILED", "4:0")


LOOP = """
import ctypes, os, socket, sys, time
mpi = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
if "mpich" in sys.argv[1]:
    world, integer, add = 0x44000000, 0x4C000405, 0x58000003
else:
    names = ("ompi_mpi_comm_world", "ompi_mpi_int", "ompi_mpi_op_sum")
    world, integer, add = (ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, n))) for n in names)
rank, total, rounds = ctypes.c_int(), ctypes.c_int(), 0
mpi.MPI_Init(None, None)
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
while total.value < 1000:
    mine = ctypes.c_int(10 ** rank.value + (1000 if not rank.value and os.path.exists("end") else 0))
    mpi.MPI_Allreduce(ctypes.byref(mine), ctypes.byref(total), 1, integer, add, world)
    rounds += 1
    if not rank.value:
        print("round", rounds, total.value, flush=True)
    time.sleep(0.2)
print(f"rank {rank.value} on {socket.gethostname()} after {rounds}", flush=True)
if "mpich" in sys.argv[1]:
    mpi.MPI_Barrier(world)
    os._exit(0)
mpi.MPI_Finalize()
"""
"""Two ranks add up numbers until there is a file `end`."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "how"),
    [
        pytest.param(OPEN_MPI, "mpirun.openmpi", id="openmpi-mpirun"),
        pytest.param(OPEN_MPI, "srun -Q --overlap --mpi=pmix", id="openmpi-pmix"),
        pytest.param(MPICH, "mpirun.mpich", id="mpich-mpirun"),
        pytest.param(MPICH, "srun -Q --overlap --mpi=pmi2", id="mpich-pmi2"),
    ],
)
def test_mpi_over_tcp_goes_on(saver: Saver, library: str, how: str) -> None:
    mpi()
    home = saver.lab.user.home
    (home / "loop.py").write_text(LOOP)
    script = f"{how} python3 loop.py {library}; echo ended $?; {how} python3 loop.py {library}; echo again $?"
    job = saver.run(script, memory=400, vms=2, image="mpi")
    saver.says("round 3")
    saver.cycle(job)
    before = saver.output().count("round")
    until("the ranks go on", lambda: saver.output().count("round") > before + 3)
    (home / "end").touch()
    assert saver.end(job, 120) == ("COMPLETED", "0:0")
    said = saver.output()
    assert "ended 0" in said and "again 0" in said, said
    ranks = re.findall(r"rank (\d) on (\S+) after \d", said)  # mpirun may put what two ranks write in one line
    assert len(ranks) == 4 and {vm for _, vm in ranks} == set(job.vms), said
    assert all(line.split()[2] in ("11", "1011") for line in said.splitlines() if line.startswith("round")), said
    (home / "end").unlink()
