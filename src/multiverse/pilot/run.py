"""Runs a pilot in its job: makes what the lease has on the node, starts its first process, and cleans up after it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from multiverse.core.errors import Broken, Refused
from multiverse.pilot import init, network, remains, vxlan
from multiverse.pilot.groups import LeaseGroup, job_of, make_groups
from multiverse.pilot.init import SIGNALS, PilotOrder
from multiverse.pilot.lease_directory import LeaseDirectory, PilotRecord, directory_of, slot
from multiverse.system import kernel
from multiverse.system.locks import is_locked
from multiverse.system.processes import ProcessIdentity

log = structlog.get_logger()

_LOGS = ".logs"
_KEPT = 20  # logs of pilots that have ended


def run(order: PilotOrder, signalled: Callable[[], None] = lambda: None) -> int:
    """Run until the lease's first process has ended; the exit status. `signalled` is called when Slurm, or anybody
    else, tells the pilot to end (SIGTERM). Nothing is left on the node then, as far as a process can see to that: after
    a SIGKILL the epilog does, or the next pilot.

    Raises `Refused` for a name that is none, and where another agent has this node; `Broken` without a bridge; what
    `vxlan.join` raises.
    """
    settings = order.settings
    if os.geteuid() != 0:
        raise Refused("the pilot is not root", hint="set become under [[lease]], or let pilots be jobs of root")
    if is_locked(settings.agent.state_dir / "lock"):
        hint = "lease other nodes, or set job_vms.only if the agent is for VMs inside jobs alone"
        raise Refused("this node is a host of the site already: its agent runs", hint=hint)
    place = directory_of(settings.agent.leases, order.name)
    settings.state_dir.mkdir(parents=True, exist_ok=True)  # what is found out about the node is kept there
    settings.state_dir.chmod(0o711)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    remains.sweep(settings.agent.leases)
    with place.held() as ours, slot(settings.agent.leases) as number:
        if not ours:
            raise Refused(f"another pilot of {order.name} runs on this node", hint="cancel one of them")
        _log_to(settings.agent.leases / _LOGS, order.name)
        own = job_of(Path("/proc/self/cgroup").read_text())
        if own != order.job:
            log.warning("the pilot is in no control group of its job", job=order.job, group_of=own)
        made = make_groups(order.name)
        try:
            if order.vxlan is not None:
                vxlan.join(order.vxlan, settings.network.gateway)
            return _run(order, place, made, number, signalled)
        finally:
            left = remains.remove_place(place, place.recorded())
            if left:
                log.warning("something is left of the lease", left=left)


def _log_to(logs: Path, name: str) -> None:
    """Write what this process and its children say to a file of the lease's; older ones are removed."""
    logs.mkdir(exist_ok=True)
    logs.chmod(0o700)
    kept = sorted((path for path in logs.iterdir() if path.is_file()), key=lambda path: path.stat().st_mtime)
    for old in kept[:-_KEPT]:
        old.unlink(missing_ok=True)
    fd = os.open(logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for standard in (1, 2):
        os.dup2(fd, standard)


def _run(
    order: PilotOrder, place: LeaseDirectory, made: Sequence[LeaseGroup], number: int, signalled: Callable[[], None]
) -> int:
    """Start the first process, connect its network, and wait for its end; its exit status."""
    (ready, made_ready), (go, give) = os.pipe(), os.pipe()
    kernel.unshare(kernel.CLONE_NEWPID)  # of the processes that this one starts from now on
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(give)
            status = init.begin(order, place, made, number, lambda: _wait_for_uplink(made_ready, go))
        finally:
            os._exit(status)
    os.close(made_ready)
    os.close(go)
    found = ProcessIdentity.of(child)
    groups = tuple(str(one.path) for one in made)
    place.record(PilotRecord(order.job, found.pid, found.started, found.boot_id, groups))
    handle = os.pidfd_open(child)
    try:
        if os.read(ready, 1):
            network.plug(order.name, order.settings.qemu.bridge, child)
            os.write(give, b"!")
        os.close(give)
        status = _wait(child, handle, signalled)
    except BaseException:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    finally:
        os.close(handle)
    log.info("pilot ended", lease=order.name, status=status)
    return status


def _wait_for_uplink(ready: int, go: int) -> None:
    os.write(ready, b"!")
    if not os.read(go, 1):
        raise Broken("the network was not connected")


def _wait(child: int, handle: int, signalled: Callable[[], None]) -> int:
    """Wait for the first process's end, and hand signals on; its exit status."""
    told = False
    while True:
        number = signal.sigwait(SIGNALS)
        if number != signal.SIGCHLD:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGTERM)
            if not told:
                told = True
                signalled()
            continue
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    return os.waitstatus_to_exitcode(ended[1])
