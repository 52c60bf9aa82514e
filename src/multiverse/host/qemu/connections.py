"""Connections to running VMs, and the names that guests are told through them.

QEMU serves one connection to a monitor, and one to an agent, at a time: while a process holds them, no other process
can start that VM or talk to its guest. A connection that is missing is opened again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

import structlog

from multiverse.core.errors import Gone, MultiverseError
from multiverse.core.model.identity import Member
from multiverse.guest.protocol import Report, names_message
from multiverse.host import manifest
from multiverse.host.firewall import Firewall
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.qemu.channels import AgentChannel
from multiverse.host.qemu.session import Paths, QemuSession

log = structlog.get_logger(__name__)


class Connections:
    """The connections of this process, by the VMs' names: sessions to VMs that are not started yet, and channels to the
    agents of those that are. `paths` gives the files of a VM."""

    def __init__(self, paths: Callable[[str], Paths]) -> None:
        self._paths = paths
        self.sessions: dict[str, QemuSession] = {}
        self.channels: dict[str, AgentChannel] = {}
        self._reports: dict[str, Report] = {}

    def session(self, known: Manifest) -> QemuSession:
        """The session of a VM that is not started. Raises `Unknown` if its QEMU does not answer."""
        session = self.sessions.get(known.name)
        if session is None or session.process != known.process:
            session = self.sessions[known.name] = QemuSession.connect(known.process, self._paths(known.name))
        return session

    def keep_channel(self, name: str, session: QemuSession, report: Report) -> None:
        """The VM has been started, and its agent sent this report: only the channel is needed from now on."""
        self._reports[name] = report
        self.channels[name] = session.channel  # first: at each moment there is one of the two
        self.sessions.pop(name, None)
        session.monitor.close()

    def started_channel(self, name: str) -> AgentChannel:
        """The channel to the agent of a VM that was started. Raises `Gone` if there is no such VM."""
        paths = self._paths(name)
        known = manifest.read(paths.home)
        if known is None or known.phase is not VmPhase.STARTED or known.handed_over or not known.process.is_alive():
            raise Gone(f"there is no running VM {name}", hint="see `multiverse vms`")
        channel = self.channels.get(name)
        if channel is None:
            channel = self.channels[name] = AgentChannel(paths.agent)
        return channel

    def is_mute(self, name: str) -> bool:
        """Whether the guest was told for the last time, because it had flooded its channel."""
        channel = self.channels.get(name)
        return channel is not None and channel.flooded

    def poll_reports(self, name: str) -> list[Report]:
        """Reports that a guest sent unsolicited since the last call."""
        channel = self.channels.get(name)
        return channel.poll_reports() if channel is not None else []

    def audit(self, name: str) -> Mapping[str, str | int]:
        """The facts that the guest sent when it was started; empty if another process started it."""
        report = self._reports.get(name)
        return dict(report.audit) if report is not None else {}

    def drop(self, name: str) -> None:
        session = self.sessions.pop(name, None)
        if session is not None:
            session.close()
        channel = self.channels.pop(name, None)
        if channel is not None:
            channel.close()
        self._reports.pop(name, None)

    def shut_down(self) -> None:
        """End all connections, so that nobody waits on one any more. The VMs go on."""
        for session in list(self.sessions.values()):
            session.shut_down()
        for channel in list(self.channels.values()):
            channel.shut_down()


PACE = 1.0  # seconds between two messages to a guest, at least
_TIMEOUT = 2.0  # seconds until a guest has taken a message

Names = frozenset[tuple[str, str]]  # of name and address


class GuestNames:
    """The names of other VMs of their groups that this process has told guests. `host` is the host's name. A guest gets
    the names that its host knows with its identity. Later ones it gets from a thread here, once a second at most, so
    that its job is hardly disturbed. Nothing waits for a guest: one that does not take a message gets all names with
    the next change."""

    def __init__(self, host: str, firewall: Firewall, connections: Connections) -> None:
        self._host, self._firewall, self._connections = host, firewall, connections
        self._told: dict[str, Names] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._due, self._closed = threading.Event(), threading.Event()

    def first(self, vm: str, group: int) -> Names:
        """The names for a VM of this group, which the caller is about to send."""
        names = _names(vm, group, self._firewall.members.values())
        self._told[vm] = names
        return names

    def changed(self) -> None:
        """The groups have changed, or a guest can be told now: tell guests soon."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="names", daemon=True)
                self._thread.start()
        self._due.set()

    def started(self, vm: str) -> None:
        """A VM runs: its names may have changed while it was started."""
        if vm in self._firewall.members:
            self.changed()

    def drop(self, vm: str) -> None:
        self._told.pop(vm, None)

    def close(self) -> None:
        self._closed.set()
        self._due.set()

    def _run(self) -> None:
        while True:
            self._due.wait()
            if self._closed.is_set():
                return
            self._due.clear()
            try:
                self.tell()
            except Exception:  # a defect of ours must not end the thread: it would never be noticed
                log.exception("guests were not told names")
            self._closed.wait(PACE)

    def tell(self) -> None:
        """Tell each guest the names that it does not know yet. Blocks as long as guests do not take it."""
        members = self._firewall.members
        for vm in sorted({one.name for one in members.values() if one.host == self._host} | set(self._told)):
            own = members.get(vm)
            names = _names(vm, own.group if own is not None else 0, members.values())
            told = self._told.get(vm)
            if names == told or vm in self._connections.sessions:  # one that is being started is told by that
                continue
            if self._send(vm, names, told):
                self._told[vm] = names
            else:
                self._told.pop(vm, None)

    def _send(self, vm: str, names: Names, told: Names | None) -> bool:
        before = told or frozenset()
        gone = [name for name, _ in sorted(before - names)]
        line = names_message(sorted(names - before), gone, whole=told is None)
        try:
            self._connections.started_channel(vm).tell(line, _TIMEOUT)
        except MultiverseError:
            return False
        return True


def _names(vm: str, group: int, members: Collection[Member]) -> Names:
    return frozenset((one.name, one.address) for one in members if group and one.group == group and one.name != vm)
