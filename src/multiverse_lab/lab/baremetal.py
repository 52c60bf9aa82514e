"""A plain slurmd on this machine as a node of the lab: the baseline of benchmarks and of comparisons in tests.

Its control groups are in a namespace of its own (`lab.hosts.confined`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from multiverse.core.errors import Broken
from multiverse.system.interrupts import held, whole
from multiverse_lab.lab.configure import BARE_FEATURE, BARE_NODE, cgroup_conf, changed_conf, environment
from multiverse_lab.lab.hosts import control_groups
from multiverse_lab.lab.layout import Layout
from multiverse_lab.lab.process import DaemonCommand
from multiverse_lab.lab.service import Lab, Service

NODE = BARE_NODE
_DELETED = 10.0  # seconds in which slurmctld takes the jobs off a node that is DOWN, and deletes the node
_CONFINED = "multiverse_lab.lab.hosts.confined"


def _directory(lab: Lab) -> Path:
    return lab.where.run / "bare"


def _hierarchies(lab: Lab) -> Path:
    """Where the node sees control groups."""
    return _directory(lab) / "cgroup"


def control_groups_of(lab: Lab) -> list[Path]:
    """The node's control groups, one in each hierarchy that has one."""
    return control_groups.existing(lab.where.control_group, NODE)


def _prepare(lab: Lab) -> None:
    """Write a configuration directory: the lab's slurm.conf, with a cgroup.conf that works on any machine. Without the
    plugin for VMs inside jobs, whose prolog and epilog a plain node does not pay for."""
    plugstack = _directory(lab) / "plugstack.conf"
    _write_configuration(lab, {"PlugStackConfig": str(plugstack)}, "")
    plugstack.write_text("")


def _prepare_declared(lab: Lab) -> None:
    """The same, where the CPUs that the node declares count, and not this machine's."""
    _prepare(lab)
    path = _directory(lab) / "slurm.conf"
    path.write_text(changed_conf(path.read_text(), {"SlurmdParameters": "config_overrides"}))


def _prepare_with_memory_limits(lab: Lab) -> None:
    """The same, with task/cgroup limiting the memory of jobs."""
    _write_configuration(lab, {"TaskPlugin": "task/cgroup"}, "ConstrainRAMSpace=yes\n")


def _write_configuration(lab: Lab, more: Mapping[str, str], cgroup: str) -> None:
    directory = _directory(lab)
    for path in (directory, directory / "spool"):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
    changed = {"SlurmdSpoolDir": f"{directory}/spool", "DebugFlags": "NO_CONF_HASH", **more}
    (directory / "slurm.conf").write_text(changed_conf(lab.where.slurm_conf.read_text(), changed))
    (directory / "cgroup.conf").write_text(cgroup_conf(cgroup, _hierarchies(lab)))


def _slurmd(lab: Lab, cpus: int | None = None) -> DaemonCommand:
    directory = _directory(lab)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    node = f"CPUs={cpus or os.cpu_count() or 1} RealMemory={memory * 3 // 4} Feature={BARE_FEATURE}"
    confined = [sys.executable, "-m", _CONFINED, lab.where.control_group, NODE, str(_hierarchies(lab))]
    argv = [*confined, "slurmd", "-D", "-Z", "-N", NODE, "-f", f"{directory}/slurm.conf", "--conf", node]
    return DaemonCommand(argv, lab.where.log / "slurmd.out", env={"SLURM_CONF": f"{directory}/slurm.conf"})


def _ready(lab: Lab) -> bool:
    shown = _slurm(lab, "sinfo", "-h", "-n", NODE, "-o", "%T")
    return shown.returncode == 0 and shown.stdout.strip() == "idle"


def _slurm(lab: Lab, *argv: str) -> subprocess.CompletedProcess[str]:
    more = environment(lab.where)
    # Not among those that a terminal's Ctrl-C reaches.
    return subprocess.run(
        argv, env=os.environ | more, capture_output=True, text=True, timeout=30, check=False, process_group=0
    )


SLURMD = Service("slurmd", _slurmd, ready=_ready, prepare=_prepare)


async def start(lab: Lab, *, memory_limited: bool = False, cpus: int | None = None) -> None:
    """Start slurmd, with task/cgroup if memory is to be limited. Its node has this machine's CPUs, or declares `cpus`
    whatever this machine has. Returns when the node is idle in partition `bare`.

    `Broken` if slurmd does not start.
    """
    prepare = _prepare_with_memory_limits if memory_limited else _prepare_declared if cpus else _prepare
    await replace(SLURMD, prepare=prepare, command=partial(_slurmd, cpus=cpus)).ensure(lab)


async def stop(lab: Lab) -> None:
    """Stop slurmd and the jobs on its node, and delete the node with its control groups. The processes and the control
    groups are gone afterwards, whatever slurmctld says. `Broken` if it does not delete the node."""
    with held():
        try:
            await whole(_slurm, lab, "scontrol", "update", f"NodeName={NODE}", "State=DOWN", "Reason=stopped")
        finally:
            await end(lab.where)
        said = await whole(_delete_node, lab)
    if said:
        raise Broken(f"cannot delete node {NODE}: {said}", hint="wait until no job is on it")


async def end(where: Layout) -> bool:
    """End slurmd with all that runs on its node, and remove its control groups; whether slurmd was alive."""
    was_alive = await SLURMD.stop(where)
    await whole(control_groups.end, where.control_group, NODE)
    return was_alive


def _delete_node(lab: Lab) -> str:
    """Delete the node, as soon as the jobs that ran there are off it; why that is not possible. Absent is success.

    slurmctld itself deletes a node that is DOWN although a job on it is completing. It crashes when the job's
    EpilogSlurmctld ends, because it looks up the node for steps that are left (22.05.8, _step_dealloc_lps).
    """
    deadline = time.monotonic() + _DELETED
    while True:
        jobs = _slurm(lab, "squeue", "-h", "-a", "-w", NODE, "-t", "R,S,CG", "-o", "job %i is on it")
        said = jobs.stdout.strip()
        if not said:
            done = _slurm(lab, "scontrol", "delete", f"NodeName={NODE}")
            if done.returncode == 0 or "Invalid node name" in done.stderr:
                return ""
            said = done.stderr.strip()
        if time.monotonic() > deadline or "contact" in said:
            return said
        time.sleep(0.2)


@asynccontextmanager
async def baremetal(lab: Lab, cpus: int | None = None) -> AsyncIterator[str]:
    """Run the node while the context lasts, with `cpus` if they are given; gives the node's name."""
    await start(lab, cpus=cpus)
    try:
        yield NODE
    finally:
        await stop(lab)
