"""The first process of a lease: it starts the agent, again if it ends, and all that it has started ends with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from multiverse.config import LEASE_RESERVE, Settings
from multiverse.core.errors import MultiverseError
from multiverse.host.vxlan import VxlanConfig
from multiverse.pilot import groups, network
from multiverse.pilot.groups import LeaseGroup
from multiverse.pilot.lease_directory import LeaseDirectory, share_of
from multiverse.system import kernel
from multiverse.system.sysfs import mount_new, mount_sys

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
END_VMS = signal.SIGUSR1
"""Tells the agent to take no VM any more, to end those that it has, and then itself."""

_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
_RESTART = 1.0  # seconds until an agent that has ended is started again


@dataclass(frozen=True, slots=True)
class PilotOrder:
    """What the pilot of a lease is told. `cores` and `memory` (MiB) are the job's. `agent` runs an agent with these
    settings, and with the `vxlan` of the node if there is to be one, until it is told to end. `drain` is how many
    seconds the agent has to end its VMs."""

    name: str
    job: str
    cores: int
    memory: int
    settings: Settings
    agent: Callable[[Settings, VxlanConfig | None], None]
    vxlan: VxlanConfig | None = None
    drain: float = 25.0


def leased_settings(order: PilotOrder, place: LeaseDirectory, slot: int) -> Settings:
    """The settings of the lease's agent: the node's own, for a host that is the lease and has what the job has. The
    directories of VMs, sockets and templates are the same, because others are mounted there (`_mount`)."""
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
        qemu=replace(settings.qemu, uids=share_of(settings.qemu.uids, slot)),
    )


def begin(
    order: PilotOrder, place: LeaseDirectory, made: Sequence[LeaseGroup], slot: int, connected: Callable[[], None]
) -> int:
    """Be the first process of the lease; the exit status. `connected` waits until the network has its uplink."""
    kernel.die_with_parent()
    try:
        kernel.unshare(_NAMESPACES)
        connected()
        network.make_bridge(order.name, order.settings.qemu.bridge)
        _mount(order.settings, place, made)
        settings = leased_settings(order, place, slot)
    except (OSError, MultiverseError) as error:
        return _failed(str(error))
    return _Supervisor(order, settings, made).run()


def _failed(why: str) -> int:
    print(f"the pilot cannot start: {why}", file=sys.stderr, flush=True)
    return 1


def _mount(settings: Settings, place: LeaseDirectory, made: Sequence[LeaseGroup]) -> None:
    """Mount the lease's own directories where the settings name them. Sockets and templates are in memory, which
    belongs to the lease's control groups and is free when the last process has ended."""
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
    def __init__(self, order: PilotOrder, settings: Settings, made: Sequence[LeaseGroup]) -> None:
        self._order, self._settings, self._made = order, settings, made
        self._agent = 0
        self._ends = 0.0  # monotonic time until which the agent may end its VMs; 0: it is not to end

    def run(self) -> int:
        """Until the pilot is told to end, and its VMs have ended or had their time. The rest ends with this process."""
        self._start()
        while self._agent or not self._ends:
            left = self._ends - time.monotonic() if self._ends else _RESTART
            if self._ends and left <= 0:
                break
            got = signal.sigtimedwait(SIGNALS, left)
            if got is not None and got.si_signo != signal.SIGCHLD:
                self._end_vms()
            self._reap()
            if got is None and not self._agent and not self._ends:
                self._start()
        return 0

    def _end_vms(self) -> None:
        if not self._ends:
            self._ends = time.monotonic() + self._order.drain
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
                groups.join(self._made)
                signal.signal(END_VMS, signal.SIG_IGN)  # until the agent handles it
                signal.pthread_sigmask(signal.SIG_SETMASK, set())
                self._order.agent(self._settings, self._order.vxlan)
                status = 0
            except (OSError, MultiverseError) as error:
                print(f"the agent cannot start: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
