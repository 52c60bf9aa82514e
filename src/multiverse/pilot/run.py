"""Runs a pilot in its job: makes what the lease has on the node, starts its first process, and cleans up after it."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from multiverse.config import LEASE_RESERVE, Settings
from multiverse.core.errors import Broken, MultiverseError, Refused
from multiverse.host import links
from multiverse.host.links import NodeNetwork
from multiverse.host.vxlan import VxlanConfig
from multiverse.pilot import lease
from multiverse.pilot.lease import LeaseDirectory, LeaseGroup, PilotRecord
from multiverse.system import kernel
from multiverse.system.kernel import mount_new, mount_sys
from multiverse.system.locks import is_locked
from multiverse.system.processes import ProcessIdentity

log = structlog.get_logger()


# --- the first process of a lease -------------------------------------------------------------------

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
END_VMS = signal.SIGUSR1  # tells the agent to take no more VMs, to end its VMs, and then itself
_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
_RESTART = 1.0  # seconds until an agent that has ended is started again


@dataclass(frozen=True, slots=True)
class PilotOrder:
    """What the pilot of a lease is told."""

    name: str
    job: str
    cores: int  # the job's
    memory: int  # MiB, the job's
    settings: Settings
    agent: Callable[[Settings, NodeNetwork], None]  # runs an agent until it is told to end
    vxlan: VxlanConfig | None = None  # the node's
    address: str = ""  # of the node, for other hosts and the controller; empty: they do not connect to it
    drain: float = 25.0  # seconds that the agent has to end its VMs, if nobody knows when the pilot is killed
    kill_wait: float = 0.0  # seconds from the scheduler's first signal until it kills a job; 0: nobody knows


def leased_settings(order: PilotOrder, place: LeaseDirectory, slot: int) -> Settings:
    """The settings of the lease's agent: the node's own, for a host with what the job has. Other directories of VMs,
    sockets and templates are mounted at the same places (`_mount_own`)."""
    settings = order.settings
    free = os.statvfs(place.root)
    disk = min(settings.host.disk, free.f_bavail * free.f_frsize >> 20)
    memory = max(order.memory - LEASE_RESERVE, 0)
    return replace(
        settings,
        hosts=(),
        job_vms=replace(settings.job_vms, enabled=False, only=False),  # those are of the node's own agent
        host=replace(settings.host, name=order.name, cores=order.cores, memory=memory, disk=disk),
        agent=replace(settings.agent, socket=place.socket, state_dir=place.state, self_fence=0.0, metrics=""),
        qemu=replace(settings.qemu, uids=lease.share_of(settings.qemu.uids, slot)),
    )


def begin(
    order: PilotOrder,
    place: LeaseDirectory,
    made: Sequence[LeaseGroup],
    slot: int,
    node: NodeNetwork,
    connected: Callable[[], None],
) -> int:
    """Be the first process of the lease; the exit status. `connected` waits until the network has its uplink."""
    kernel.die_with_parent()
    try:
        kernel.unshare(_NAMESPACES)
        connected()
        lease.make_bridge(order.name, order.settings.qemu.bridge)
        _mount_own(order.settings, place, made)
        settings = leased_settings(order, place, slot)
    except (OSError, MultiverseError) as error:
        print(f"the pilot cannot start: {error}", file=sys.stderr, flush=True)
        return 1
    return _Supervisor(order, settings, made, node).run()


def _mount_own(settings: Settings, place: LeaseDirectory, made: Sequence[LeaseGroup]) -> None:
    """Mount the lease's own directories where the settings name them. Sockets and templates are in memory of the
    lease's control groups."""
    kernel.mount(None, Path("/"), kernel.MS_REC | kernel.MS_PRIVATE)
    qemu = settings.qemu
    for path, mode in ((qemu.run, "0700"), (qemu.templates, "0711")):
        path.mkdir(parents=True, exist_ok=True)
        mount_new(path, "tmpfs", f"mode={mode}")
    qemu.vms.mkdir(parents=True, exist_ok=True)
    kernel.mount(str(place.vms), qemu.vms, kernel.MS_BIND)
    mount_new(Path("/proc"), "proc")
    mount_sys({group.mount: group.path for group in made}, qemu.run)


class _Supervisor:
    def __init__(self, order: PilotOrder, settings: Settings, made: Sequence[LeaseGroup], node: NodeNetwork) -> None:
        self._order, self._settings, self._made, self._node = order, settings, made, node
        self._agent = 0
        self._told = 0.0  # monotonic time at which it was told to end; 0: it is not to end

    def run(self) -> int:
        """Until the pilot is told to end, and its VMs have ended or had their time. The rest ends with this process."""
        self._start()
        while self._agent or not self._told:
            left = self._left() if self._told else _RESTART
            if left <= 0:
                break
            got = signal.sigtimedwait(SIGNALS, left)
            if got is not None and got.si_signo != signal.SIGCHLD:
                self._end_vms()
            self._reap()
            if got is None and not self._agent and not self._told:
                self._start()
        return 0

    def _left(self) -> float:
        """Seconds that are left for the VMs to leave or to be ended."""
        drained = self._told + self._order.drain - time.monotonic()
        return max(drained, lease.read_end(self._settings.agent.state_dir) - time.time())

    def _end_vms(self) -> None:
        if not self._told:
            self._told = time.monotonic()
            if self._agent:
                os.kill(self._agent, END_VMS)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if pid == self._agent:
                    self._agent = 0

    def _start(self) -> None:
        self._agent = os.fork()
        if self._agent == 0:
            status = 1
            try:
                os.setsid()
                lease.join_groups(self._made)
                signal.signal(END_VMS, signal.SIG_IGN)  # until the agent handles it
                signal.pthread_sigmask(signal.SIG_SETMASK, set())
                self._order.agent(self._settings, self._node)
                status = 0
            except (OSError, MultiverseError) as error:
                print(f"the agent cannot start: {error}", file=sys.stderr, flush=True)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)


# --- the pilot --------------------------------------------------------------------------------------

_LOGS = ".logs"
_KEPT = 20  # logs of pilots that have ended


def run(order: PilotOrder, signalled: Callable[[Path], None] = lambda _: None) -> int:
    """Run until the lease's first process has ended; the exit status. `signalled` is called when anybody tells the
    pilot to end (SIGTERM), with the agent's state directory, to which it may write a later end (`lease.write_end`).
    Then nothing is left on the node; after a SIGKILL the epilog or the next pilot cleans up. Raises `Refused` for a bad
    name, and where another agent has this node; `Broken` without a bridge; what `lease.join_vxlan` raises."""
    settings = order.settings
    if os.geteuid() != 0:
        raise Refused("the pilot is not root", hint="set become under [[lease]], or let pilots be jobs of root")
    if is_locked(settings.agent.state_dir / "lock"):
        hint = "lease other nodes, or set job_vms.only if the agent is for VMs inside jobs alone"
        raise Refused("this node is a host of the site already: its agent runs", hint=hint)
    place = lease.directory_of(settings.agent.leases, order.name)
    settings.state_dir.mkdir(parents=True, exist_ok=True)  # what is found out about the node is kept there
    settings.state_dir.chmod(0o711)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    lease.sweep(settings.agent.leases)
    with place.held() as ours, lease.slot(settings.agent.leases) as number:
        if not ours:
            raise Refused(f"another pilot of {order.name} runs on this node", hint="cancel one of them")
        _log_to(settings.agent.leases / _LOGS, order.name)
        own = lease.job_of(Path("/proc/self/cgroup").read_text())
        if own != order.job:
            log.warning("the pilot is in no control group of its job", job=order.job, group_of=own)
        made = lease.make_groups(order.name)
        try:
            if order.vxlan is not None:
                lease.join_vxlan(order.vxlan, settings.network.gateway)
            return _run(order, place, made, number, signalled)
        finally:
            left = lease.remove_place(place, place.recorded())
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
    order: PilotOrder, place: LeaseDirectory, made: Sequence[LeaseGroup], number: int, signalled: Callable[[Path], None]
) -> int:
    """Start the first process, connect its network, and wait for its end; its exit status."""
    (ready, made_ready), (go, give) = os.pipe(), os.pipe()

    def wait_for_uplink() -> None:
        os.write(made_ready, b"!")
        if not os.read(go, 1):
            raise Broken("the network was not connected")

    node = _node_network(order, number)
    kernel.unshare(kernel.CLONE_NEWPID)  # of the processes that this one starts from now on
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(give)
            status = begin(order, place, made, number, node, wait_for_uplink)
        finally:
            os._exit(status)
    os.close(made_ready)
    os.close(go)
    if node.listening is not None:
        node.listening.close()  # nobody is to connect once the agent has ended
    found = ProcessIdentity.of(child)
    groups = tuple(str(one.path) for one in made)
    place.record(PilotRecord(order.job, found.pid, found.started, found.boot_id, groups))
    handle = os.pidfd_open(child)
    try:
        if os.read(ready, 1):
            lease.connect_network(order.name, order.settings.qemu.bridge, child)
            os.write(give, b"!")
        os.close(give)
        status = _wait(child, handle, order, place, signalled)
    except BaseException:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        while os.waitpid(-1, 0)[0] != child:  # its namespace ends after all that this process has started there
            pass
        raise
    finally:
        os.close(handle)
    log.info("pilot ended", lease=order.name, status=status)
    return status


def _node_network(order: PilotOrder, slot: int) -> NodeNetwork:
    """The node's network, in which the agent listens by a socket that is made here."""
    listening: socket.socket | None = None
    if order.address:
        try:
            listening = links.listen(order.address, order.settings.move.lease_port + slot)
        except Refused as error:
            log.warning("no VM moves from or to this lease, and none is saved as it ends", reason=str(error))
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    return NodeNetwork(namespace, order.vxlan, listening)


def _wait(child: int, handle: int, order: PilotOrder, place: LeaseDirectory, signalled: Callable[[Path], None]) -> int:
    """Wait for the first process's end, and hand signals on; its exit status."""
    told = False
    while True:
        number = signal.sigwait(SIGNALS)
        if number != signal.SIGCHLD:
            _note_end(order, place)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGTERM)
            if not told:
                told = True
                signalled(place.state)
            continue
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    return os.waitstatus_to_exitcode(ended[1])


def _note_end(order: PilotOrder, place: LeaseDirectory) -> None:
    """Keep when the scheduler kills this job, after it has signalled it. When it signals it again, its GraceTime is
    over, or somebody has cancelled it meanwhile."""
    known, now = lease.read_end(place.state), time.time()
    if order.kill_wait:
        with suppress(OSError):  # a full disk: nothing is held
            lease.write_end(place.state, min(known or math.inf, now + order.kill_wait))
