"""A job that runs out of memory: in a VM it has the states and the output that it has on bare metal.

Most tests run twice, in a VM and on a plain slurmd of this machine with task/cgroup and ConstrainRAMSpace, and assert
the same facts.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.lab import baremetal
from multiverse_lab.lab.plan import load
from multiverse_lab.lab.services import Lab
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import accounted, ended, nothing_left, output_of, until

pytestmark = pytest.mark.integration

HOG = "head -c {size}M /dev/zero | tail | wc -c"
"""Makes tail(1) allocate `size` MiB, because the input has no line end."""

TIGHT = 165
"""MiB: the largest job in a VM of 288 MiB, which has no memory beside the reserve."""

KILLED = ("OUT_OF_MEMORY", "0:125")
"""State and exit code in Slurm's accounting."""

MESSAGE = re.compile(r"slurmstepd(?:-[\w-]+)?: error: Detected \d+ oom[-_]kill event(?:\(s\)|s)? in StepId=([\w.]+)\.")


@dataclass
class Place:
    """Where the jobs of a test run: in VMs of the controller that `client` asks, or on bare metal."""

    lab: LabUnderTest
    options: tuple[str, ...]
    client: Client | None

    def run(self, script: str, *options: str) -> tuple[str, str]:
        """Run a job to its end. Returns its id and what it wrote to stdout and stderr."""
        out = self.lab.user.home / "memory.out"
        out.unlink(missing_ok=True)
        job = self.lab.sbatch(script, f"--output={out}", *self.options, *options)
        until(
            f"job {job} has ended", lambda: not self.lab.run("squeue", "-h", "-t", "PD,R,CG", "-j", job).stdout, 120.0
        )
        if client := self.client:
            # slurmd reports the end of a job once slurmstepd no longer answers. slurmstepd closes the file a little
            # later, and only then the guest writes slurmstepd's own messages to the NFS server.
            until(f"the VM of job {job} is gone", lambda: not client.vms(), 60.0)
        return job, output_of(out)

    def states(self, job: str) -> dict[str, tuple[str, str]]:
        """State and exit code of the job ("") and of its steps, once all of them have ended."""

        def ask() -> dict[str, tuple[str, str]] | None:
            lines = self.lab.run("sacct", "-n", "-P", "-o", "JobID,State,ExitCode,End", "-j", job).stdout.splitlines()
            rows = [line.split("|") for line in lines]
            over = all(end != "Unknown" for *_, end in rows)  # see `accounted`
            return {name.partition(".")[2]: (state.split()[0], code) for name, state, code, _ in rows} if over else None

        found: dict[str, tuple[str, str]] = until(f"the steps of {job} have ended", ask, 30.0)
        return found


@pytest.fixture(scope="module")
def bare(lab: LabUnderTest) -> Iterator[str]:
    """A plain slurmd that limits the memory of jobs; the reason why there is none, if so."""
    groups = Path("/sys/fs/cgroup")
    if not (groups / "memory").is_dir() and "memory" not in (groups / "cgroup.controllers").read_text().split():
        yield "this machine has no cgroup controller for memory"
        return
    plan = load(lab.where)
    assert plan is not None
    own = Lab(lab.where, plan)
    try:
        asyncio.run(baremetal.start(own, memory_limited=True))
    except Broken as error:
        yield f"slurmd does not run here: {error}"
        return
    yield ""
    asyncio.run(baremetal.stop(own))


@pytest.fixture(params=["vm", "bare"])
def place(lab: LabUnderTest, client: Client, bare: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "bare":
        if bare:
            pytest.skip(bare)
        yield Place(lab, ("--partition=bare",), None)
        return
    yield Place(lab, (), client)
    nothing_left(lab, client)


def test_a_child_of_the_script_is_killed_and_the_job_is_out_of_memory(place: Place) -> None:
    job, said = place.run(f"{HOG.format(size=400)}; echo after", "--mem=120")
    assert "after" in said.split(), "the script goes on"
    assert MESSAGE.findall(said) == [f"{job}.batch"], said
    assert place.states(job) == {"": KILLED, "batch": KILLED}


def test_a_mapping_may_be_larger_than_the_memory_and_only_its_use_ends_the_job(place: Place) -> None:
    """Python is told of no error when it reserves the memory: the guest has less than that."""
    job, said = place.run('exec python3 -c "print(1); b = bytearray(900 << 20)"', "--mem=200")
    assert "MemoryError" not in said and MESSAGE.findall(said) == [f"{job}.batch"], said
    assert place.states(job)[""] == KILLED
    lazy = "import mmap; m = mmap.mmap(-1, 4 << 30); m[0] = m[-1] = 1; print(len(m) >> 30)"
    job, said = place.run(f"exec python3 -c '{lazy}'", "--mem=200")
    assert said == "4\n" and place.states(job)[""] == ("COMPLETED", "0:0")


def test_a_step_is_out_of_memory_and_the_job_goes_on(place: Place) -> None:
    step = f"srun --quiet --mem=60 sh -c '{HOG.format(size=200)}'"
    job, said = place.run(f"{step}; srun --quiet --mem=60 echo after", "--mem=120")
    assert "after" in said.split()
    assert MESSAGE.findall(said) == [f"{job}.0"], said
    states = place.states(job)
    assert states["0"] == KILLED
    assert states[""] == states["batch"] == states["1"] == ("COMPLETED", "0:0")


@pytest.mark.slow
def test_memory_for_each_cpu_is_a_limit_for_all_cpus_together(place: Place) -> None:
    small = HOG.format(size=70)
    job, said = place.run(f"{small}; echo first; {HOG.format(size=400)}", "--mem-per-cpu=60", "--cpus-per-task=2")
    assert [str(70 << 20), "first"] == said.split()[:2], "one process may have more than the share of a CPU"
    assert place.states(job)[""] == KILLED


def test_only_the_array_task_that_runs_out_of_memory_fails(place: Place) -> None:
    script = f"[ $SLURM_ARRAY_TASK_ID = 1 ] || {HOG.format(size=400)}"
    job = place.lab.sbatch(script, "--array=1-2", "--mem=120", "--output=/dev/null", *place.options)
    assert accounted(place.lab, f"{job}_1", 120.0) == ("COMPLETED", "0:0")
    assert accounted(place.lab, f"{job}_2", 120.0) == KILLED


@pytest.mark.parametrize("memory", [TIGHT, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_job_may_use_what_it_asked_for(place: Place, memory: int) -> None:
    """Python itself and the script have the rest."""
    job, said = place.run(f"exec python3 -IS -c 'print(len(b\"x\" * ({memory - 20} << 20)))'", f"--mem={memory}")
    assert said.split() == [str(memory - 20 << 20)]
    assert place.states(job)[""] == ("COMPLETED", "0:0")


WRITE = "f=$(mktemp -p {directory}); dd if=/dev/zero of=$f bs=1M count=300 status=none && echo written; rm -f $f"


def test_the_page_cache_is_reclaimed(place: Place) -> None:
    job, said = place.run(WRITE.format(directory="/tmp"), "--mem=120")
    assert said.split() == ["written"]
    assert place.states(job)[""] == ("COMPLETED", "0:0")


def test_files_in_memory_count(lab: LabUnderTest, client: Client) -> None:
    """In a VM only: the largest process is slurmstepd, which cannot protect itself in every container."""
    place = Place(lab, (), client)
    job, said = place.run(WRITE.format(directory="/dev/shm"), "--mem=60")
    assert "written" not in said.split()
    assert MESSAGE.findall(said) == [f"{job}.batch"], said
    assert place.states(job)[""] == KILLED
    nothing_left(lab, client)


ADJUSTMENTS = """\
for process in /proc/[0-9]*; do
    { read -r value < $process/oom_score_adj && read -r _ name < $process/status; } 2>/dev/null && echo adj $value $name
done
"""


@pytest.mark.slow
def test_the_kernel_ends_processes_of_the_job_only(lab: LabUnderTest, client: Client) -> None:
    place = Place(lab, (), client)
    hogs = "for i in 1 2 3 4 5 6; do tail /dev/zero & done; wait"
    job, said = place.run(f"grep cgroup2 /proc/mounts\n{ADJUSTMENTS}\n{hogs}; srun --quiet hostname", f"--mem={TIGHT}")
    found = [line.split(maxsplit=2)[1:] for line in said.splitlines() if line.startswith("adj ")]
    for daemon in ("agent.py", "munged", "slurmd", "slurmstepd"):
        assert {value for value, name in found if name == daemon} == {"-1000"}, (daemon, found)
    assert {value for value, name in found if name == "slurm_script"} == {"0"}, found
    assert "favordynmods" in said, "Linux 6.0 and later: starting the job does not wait for RCU"
    row = ended(client, job, "done")
    assert row["vms"][0] in said.split(), "slurmd runs another step"
    assert place.states(job)["batch"] == KILLED
    nothing_left(lab, client)
