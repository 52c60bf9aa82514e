"""What VMs cost an application inside a job, in Slurm-V's three scenarios: one application at a time in a job that has
its node alone (EASJ), several at once in the VMs of such a job (EACJ), and jobs of different users on a node (SACJ).

An application has two processes. In VMs, each is in one of two VMs with one CPU each, which are connected by the job's
network. The baseline is bare metal under the same emulation: a guest as large as the whole node runs the same processes
beside each other. So guests are compared with guests, and the emulation of CPUs is in both.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from multiverse.core.errors import Broken
from multiverse_lab.bench.hpcc import HPCC_INPUT, hpcc_figures
from multiverse_lab.lab.session import LabSession

BFS, HPL = "bfs", "hpl"
UNITS = {BFS: "MTEPS", HPL: "GFlop/s"}
EASJ, EACJ, SACJ = "EASJ", "EACJ", "SACJ"
SCENARIOS = {
    EASJ: "one after the other",
    EACJ: "two at once in a job",
    SACJ: "two users' jobs",
}
PAPER = {EASJ: 4.0, EACJ: 8.0, SACJ: 6.0}
"""Percent that Graph500 was slower than on bare metal, at most: 64 processes on 8 nodes, with KVM and SR-IOV."""

LIMIT = 900.0
"""Seconds within which a job's applications must have run: on emulated CPUs HPCC takes about a minute."""

_KERNELS = Path(__file__).with_name("kernels")
_SCALE, _EDGES, _SEARCHES = 16, 16, 64  # many: two users' jobs begin up to two seconds apart
_HPL_SIZE = 1000
_PORT = 31000
_MEMORY = 1200  # MiB of a job: two VMs with their QEMUs

# The job's applications begin when all of them are there. Each application is a script that gets a number.
_JOB = """#!/bin/bash
cd {directory}
touch {name}.ready
while [ ! -e {name}.go ]; do sleep 0.1; done
for turn in {turns}; do
    for number in {numbers}; do bash {application}.sh $number > {name}.$turn.$number 2>&1 & done
    wait
done
touch {name}.over
"""
_BFS = """exec srun --quiet --overlap --ntasks=2 --ntasks-per-node=2 bash {directory}/bfs-task.sh $1
"""
_BFS_TASK = """for place in 0 1; do
    address=$(getent ahostsv4 mvjob-$SLURM_JOB_ID-$place | head -n 1 | cut -d ' ' -f 1)
    addresses="$addresses ${{address:-127.0.0.1}}"
done
exec {directory}/bfs {scale} {edges} {searches} $SLURM_PROCID $(({port} + 10 * $1)) $addresses
"""
# In a job's VMs, mpirun knows these and starts what it needs in each.
_HPL = """place={directory}/hpl-$SLURM_JOB_ID-$1
mkdir $place && cd $place && cp ../hpccinf.txt . || exit 1
mpirun --mca mpi_yield_when_idle 1 -np 2 --wdir $place hpcc
cat hpccoutf.txt
cd .. && rm -r $place
"""


@dataclass(frozen=True, slots=True)
class _Place:
    """How many VMs a job has on its node, and how many CPUs each."""

    vms: int
    cpus: int


_WHOLE, _SPLIT = _Place(1, 2), _Place(2, 1)


@dataclass
class ApplicationSamples:
    """The speed of each run of an application, in its unit, by scenario: in the guest that is the whole node, and in
    VMs."""

    whole: dict[str, list[float]] = field(default_factory=lambda: {each: [] for each in SCENARIOS})
    vms: dict[str, list[float]] = field(default_factory=lambda: {each: [] for each in SCENARIOS})


Progress = Callable[[str, int, int, float], None]
"""Called with what was measured, the number of measurements done, the number of all, and the seconds it took."""


def compile_kernel(to: Path, name: str = "bfs.c", *flags: str) -> None:
    """Compile a kernel for any guest. Raises `Broken` without a C compiler."""
    argv = ["cc", "-O2", "-std=gnu11", "-static", "-o", str(to), str(_KERNELS / name), *flags]
    try:
        subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or error
        raise Broken(f"cannot compile {name}: {why}", hint="install gcc and libc6-dev") from error


def run(
    lab: LabSession, image: str, applications: Sequence[str], repeat: int, progress: Progress
) -> Mapping[str, ApplicationSamples]:
    """Measure each application in each scenario, `repeat` times in turns with its baseline."""
    assert lab.other is not None, "the session has two users"
    users = [lab, replace(lab, user=lab.other)]
    for each in users:
        _write_programs(each)
    found = {application: ApplicationSamples() for application in applications}
    done, of = 0, repeat * len(found) * len(SCENARIOS)
    for _ in range(repeat):
        for application, samples in found.items():
            for scenario in SCENARIOS:
                began = time.monotonic()
                runner = _Runner(image, application, scenario)
                samples.whole[scenario] += runner.run(users[:1], _WHOLE)
                samples.vms[scenario] += runner.run(users if scenario == SACJ else users[:1], _SPLIT)
                done += 1
                progress(f"{application} {scenario}", done, of, time.monotonic() - began)
    return found


def _write_programs(lab: LabSession) -> None:
    """Write what the applications consist of to the user's home, which guests see."""
    here = lab.user.home
    text = re.sub(r"(?m)^480 ", f"{_HPL_SIZE} ", HPCC_INPUT)
    values = {"directory": here, "scale": _SCALE, "edges": _EDGES, "searches": _SEARCHES, "port": _PORT}
    programs = {"bfs.sh": _BFS, "bfs-task.sh": _BFS_TASK, "hpl.sh": _HPL}
    for name, program in programs.items():
        (here / name).write_text(program.format(**values))
    (here / "hpccinf.txt").write_text(text)
    compile_kernel(here / "bfs")


class _Runner:
    """Runs an application in a scenario."""

    def __init__(self, image: str, application: str, scenario: str) -> None:
        self._image, self._application, self._scenario = image, application, scenario

    def run(self, users: Sequence[LabSession], place: _Place) -> list[float]:
        """Run the applications as a job of each of the users, at the same time. Returns the speed of each."""
        at_once = 2 if self._scenario != EASJ and len(users) == 1 else 1
        turns = 2 if self._scenario == EASJ else 1
        name = f"{self._application}-{self._scenario}-{place.vms}"
        jobs = [self._submit(user, name, place, at_once, turns) for user in users]
        _until(lambda: all((user.user.home / f"{name}.ready").exists() for user in users), jobs, users[0])
        for user in users:
            (user.user.home / f"{name}.go").touch()
        _until(lambda: all((user.user.home / f"{name}.over").exists() for user in users), jobs, users[0])
        _until(lambda: not users[0].run("squeue", "-h").stdout.strip(), (), users[0])
        said = [path.read_text() for user in users for path in sorted(user.user.home.glob(f"{name}.[0-9]*.[0-9]*"))]
        return [speed_of(self._application, each) for each in said]

    def _submit(self, lab: LabSession, name: str, place: _Place, at_once: int, turns: int) -> str:
        for old in lab.user.home.glob(f"{name}.*"):
            old.unlink()
        script = _JOB.format(
            directory=lab.user.home,
            name=name,
            application=self._application,
            turns=" ".join(map(str, range(turns))),
            numbers=" ".join(map(str, range(at_once))),
        )
        memory = _MEMORY - 200 * place.vms  # QEMUs have the rest
        return lab.submit(
            script,
            f"--output={lab.user.home}/{name}.out",
            "--partition=physical",
            "--nodelist=mvp1",
            "--nodes=1",
            "--ntasks-per-node=2",
            f"--mem={_MEMORY}",
            f"--vm-image={self._image}",
            f"--vm-per-node={place.vms}",
            f"--vcpu-per-vm={place.cpus}",
            f"--memory-per-vm={memory // place.vms}",
        )


def _until(done: Callable[[], bool], jobs: Sequence[str], lab: LabSession) -> None:
    """Wait until something is done by these jobs. Raises `Broken` when they have ended, or after `LIMIT`."""
    deadline = time.monotonic() + LIMIT
    while not done():
        there = lab.run("squeue", "-h", "-j", ",".join(jobs)).stdout.split() if jobs else ["wait"]
        if (not there and not done()) or time.monotonic() > deadline:
            raise Broken(
                f"the applications of jobs {' '.join(jobs)} did not run", hint="see the lab's log/mvp1-agent.log"
            )
        time.sleep(0.2)


def speed_of(application: str, said: str) -> float:
    """The speed in what an application has said. Raises `Broken` if it failed."""
    if application == BFS:
        if match := re.search(r"edges=(\d+) seconds=([\d.]+)", said):
            return int(match[1]) / float(match[2]) / 1e6
    elif figures := hpcc_figures(said):
        return float(figures["HPL_Tflops"]) * 1000
    raise Broken(f"{application} failed: {said[-500:]}", hint="see whether the image has the package hpcc")
