"""What lets `mpirun` start ranks in all VMs of a job: where they are, and a launcher in place of ssh.

The launcher (`guest.slurm_command`, by another name) starts a command in another VM of the job as a step of srun, which
the host runs. So Slurm decides whether the user may, and the step ends with the job. Launchers of MPI find it, and the
VMs, by variables in the environment of each task.
"""

# ruff: noqa: PTH108, PTH211

from __future__ import annotations

import os
import re

from multiverse.guest.agent.files import make_directory, write
from multiverse.guest.agent.requests import PROGRAM

DIRECTORY = "/run/multiverse/mpi"
VMS = f"{DIRECTORY}/vms"  # for the launcher: a line for each VM, of its name, its node and its number there
LAUNCHERS = (f"{DIRECTORY}/launch", f"{DIRECTORY}/launch-hydra")  # that of Open MPI, and that of MPICH
RADIX = b"16"  # of the tree in which Open MPI starts its daemons: fewer than commands run at once for a task
COUNTS = re.compile(rb"([0-9]+)(?:\(x([0-9]+)\))?")  # as Slurm writes the tasks of nodes: 2(x3),1

JobVms = list[tuple[str, str, int]]


def install_launcher(vms: JobVms) -> None:
    """Put the launchers into their place. `vms` are the job's, in their order: name, node, and number on the node."""
    make_directory(DIRECTORY)
    write(VMS, "".join(f"{name} {node} {number}\n" for name, node, number in vms))
    for path in LAUNCHERS:
        if not os.path.lexists(path):
            os.symlink(PROGRAM, path)


def prepare_mpi(environment: dict[bytes, bytes], vms: JobVms) -> list[str]:
    """Tell the launchers of MPI, by a task's environment, of the job's VMs and of ours. What the user has set stays.
    Returns the files that are to be removed after the task."""
    if not vms:
        return []
    slots = list(zip((name for name, _, _ in vms), slots_of(environment, vms), strict=True))
    files = [f"{DIRECTORY}/{os.getpid()}.{who}" for who in ("openmpi", "hydra")]
    write(files[0], "".join(f"{name} slots={count}\n" for name, count in slots))
    write(files[1], "".join(f"{name}:{count}\n" for name, count in slots))
    ours = {
        b"OMPI_MCA_plm": b"rsh",
        b"OMPI_MCA_ras": b"^slurm",  # it would take nodes for hosts
        b"OMPI_MCA_plm_rsh_agent": os.fsencode(LAUNCHERS[0]),
        b"OMPI_MCA_orte_default_hostfile": os.fsencode(files[0]),
        b"OMPI_MCA_routed_radix": RADIX,
        b"HYDRA_LAUNCHER": b"ssh",
        b"HYDRA_LAUNCHER_EXEC": os.fsencode(LAUNCHERS[1]),
        b"HYDRA_HOST_FILE": os.fsencode(files[1]),
    }
    for name, value in ours.items():
        # A step has the variables of the task that started it, whose files are in another VM.
        if name not in environment or environment[name].startswith(os.fsencode(DIRECTORY)):
            environment[name] = value
    return files


def slots_of(environment: dict[bytes, bytes], vms: JobVms) -> list[int]:
    """How many ranks each VM is for: the tasks that the job has on its node, divided as srun divides them, at least 1.

    A step of fewer nodes does not know the tasks of all nodes. Then it is as if the job had named none.
    """
    each = max(number for _, _, number in vms) + 1
    nodes = len(vms) // each
    tasks = _counts(environment.get(b"SLURM_TASKS_PER_NODE", b""))
    if len(tasks) != nodes:
        cores = _counts(environment.get(b"SLURM_JOB_CPUS_PER_NODE", b""))
        needed = max(_counts(environment.get(b"SLURM_CPUS_PER_TASK", b"")) or [1])
        tasks = [count // max(needed, 1) for count in cores] if len(cores) == nodes else [0] * nodes
    found = []
    for count in tasks:
        blocks = [0] * each
        for task in range(count):
            blocks[task * each // count] += 1
        found += [max(1, block) for block in blocks]
    return found


def _counts(text: bytes) -> list[int]:
    return [int(count) for count, times in COUNTS.findall(text) for _ in range(int(times or 1))]


def remove_files(paths: list[str]) -> None:
    """Remove those of a task."""
    for path in paths:
        try:
            os.unlink(path)
        except OSError:
            continue
