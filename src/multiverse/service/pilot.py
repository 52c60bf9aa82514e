"""Composes the pilot of a lease, in the job that the controller has submitted for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog

from multiverse.config import Settings, jobs_leave_leases, move_address, vxlan_address
from multiverse.core.errors import Refused
from multiverse.core.model.identity import site_of_lease
from multiverse.drivers.qemu.driver import vxlan_config
from multiverse.drivers.slurm.leases import ENDING, preempted_at
from multiverse.drivers.slurm.site.conf import kill_wait
from multiverse.host.links import NodeNetwork
from multiverse.host.vxlan import VxlanConfig
from multiverse.pilot.lease import memory_limit, vxlan_of_node, write_end
from multiverse.pilot.run import PilotOrder, run

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PilotJob:
    """The job of a pilot. What is empty is as the environment says."""

    id: str = ""
    cores: int = 0
    memory: int = 0  # MiB
    token: str = ""  # the lease's
    node: str = ""  # as Slurm calls it

    @classmethod
    def parse(cls, text: str, token: str) -> PilotJob:
        """From `ID,CORES,MEMORY`, with `,NODE` after it or not, or from nothing. Raises `Refused` for other text."""
        if not text:
            return cls(token=token)
        job, *sizes = text.split(",", 3)
        node = sizes.pop() if len(sizes) == 3 else ""
        if len(sizes) != 2 or not all(size.isdigit() for size in sizes):
            raise Refused(f"{text!r} is no job of a pilot", hint="write it as ID,CORES,MIB or ID,CORES,MIB,NODE")
        return cls(job, int(sizes[0]), int(sizes[1]), token, node)


def run_pilot(settings: Settings, name: str, given: PilotJob) -> int:
    """Run the pilot of the lease `name`; its exit status. Raises `Refused` for an unknown job, and as
    `pilot.run`."""
    job = _completed(given, os.environ)
    order = PilotOrder(
        name,
        job.id,
        job.cores,
        job.memory,
        settings,
        _run_agent,
        _vxlan(settings, name, job.node),
        _address(settings, job.node),
        kill_wait=kill_wait(settings.slurm.conf),
    )

    def signalled(state: Path) -> None:
        _tell(settings, job)
        # No thread: none can be started after unshare(CLONE_NEWPID), see clone(2).
        if order.kill_wait and os.fork() == 0:
            try:
                _find_grace(settings, job, order.kill_wait, state)
            finally:
                os._exit(0)

    return run(order, signalled)


def _completed(given: PilotJob, environment: Mapping[str, str]) -> PilotJob:
    """The job, with what Slurm's environment says of it (sbatch(1))."""

    def number(*names: str) -> int:
        return next((int(value) for name in names if (value := environment.get(name, "")).isdigit() and int(value)), 0)

    job = PilotJob(
        given.id or environment.get("SLURM_JOB_ID", ""),
        given.cores or number("SLURM_CPUS_ON_NODE"),
        given.memory or number("SLURM_MEM_PER_NODE"),
        given.token,
        given.node or environment.get("SLURMD_NODENAME", ""),
    )
    if not job.id or not job.cores:
        raise Refused("the pilot is in no job", hint="the controller submits it; see [[lease]] in the settings")
    if job.memory:
        return job
    if each := number("SLURM_MEM_PER_CPU"):
        return replace(job, memory=each * job.cores)
    # It asks for all of a node: Slurm says so by control groups alone.
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    return replace(job, memory=min(memory_limit() or machine, machine))


def _vxlan(settings: Settings, lease: str, node: str) -> VxlanConfig | None:
    """The VXLAN of the node; None if the site has none."""
    config = vxlan_config(settings, site_of_lease(lease))
    if config is None:
        return None
    return vxlan_of_node(config, settings.agent.leases, partial(vxlan_address, settings, node or settings.host.name))


def _address(settings: Settings, node: str) -> str:
    """The node's address for other hosts and the controller; empty if nothing moves, and no job leaves a lease."""
    if not (settings.move.enabled or jobs_leave_leases(settings)):
        return ""
    try:
        return move_address(settings, node or settings.host.name)
    except Refused as error:
        log.warning("no VM moves from or to this lease, and none is saved as it ends", reason=str(error))
        return ""


def _run_agent(settings: Settings, node: NodeNetwork) -> None:
    from multiverse.service.agent import serve  # imported late: the first process of a lease stays small

    asyncio.run(serve(settings, node=node))


def _scontrol(settings: Settings) -> tuple[str, dict[str, str]]:
    """The program and its environment. Times are shown as seconds."""
    program = str(settings.slurm.bin_dir / "scontrol") if settings.slurm.bin_dir else "scontrol"
    return program, {**os.environ, "SLURM_CONF": str(settings.slurm.conf), "SLURM_TIME_FORMAT": "%s"}


def _find_grace(settings: Settings, job: PilotJob, kill_wait: float, state: Path) -> None:
    """Tell the agent when the pilot is killed, if it is preempted with a GraceTime. While slurmctld does not answer, it
    holds its VMs for no longer than KillWait."""
    program, environment = _scontrol(settings)
    argv = [program, "show", "job", "-o", job.id]
    try:
        shown = subprocess.run(
            argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
        if end := preempted_at(shown.stdout):
            write_end(state, end + kill_wait)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the end of the pilot's GraceTime is not known", reason=str(error))


def _tell(settings: Settings, job: PilotJob) -> None:
    """Write into the job's comment that the pilot was told to end. Nothing waits for it."""
    program, environment = _scontrol(settings)
    argv = [program, "update", f"JobId={job.id}", f"Comment={job.token} {ENDING}"]
    try:
        subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL)
    except OSError as error:
        log.warning("the controller is not told that the pilot ends", reason=str(error))
