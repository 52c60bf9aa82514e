"""Connections to running VMs. Each is a convenience: one that is missing is opened again.

QEMU serves one connection to a monitor, and one to an agent, at a time: while a process holds them, no other process
can start that VM or talk to its guest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from multiverse.core.errors import Gone
from multiverse.guest.protocol import Report
from multiverse.host import manifest
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.qemu.channel import AgentChannel
from multiverse.host.qemu.session import Paths, QemuSession


class Connections:
    """The connections of this process, by the VMs' names: sessions to VMs that are not started yet, and channels to the
    agents of those that are. `paths` gives the files of a VM."""

    def __init__(self, paths: Callable[[str], Paths]) -> None:
        self._paths = paths
        self._sessions: dict[str, QemuSession] = {}
        self._channels: dict[str, AgentChannel] = {}
        self._reports: dict[str, Report] = {}

    def add_session(self, name: str, session: QemuSession) -> None:
        """Keep the session of a VM that was created."""
        self._sessions[name] = session

    def session(self, known: Manifest) -> QemuSession:
        """The session of a VM that is not started. Raises `Unknown` if its QEMU does not answer."""
        session = self._sessions.get(known.name)
        if session is None or session.process != known.process:
            session = self._sessions[known.name] = QemuSession.connect(known.process, self._paths(known.name))
        return session

    def has_session(self, name: str) -> bool:
        return name in self._sessions

    def keep_channel(self, name: str, session: QemuSession, report: Report) -> None:
        """The VM has been started, and its agent sent this report: only the channel is needed from now on."""
        self._reports[name] = report
        self._channels[name] = session.channel  # first: at each moment there is one of the two
        self._sessions.pop(name, None)
        session.monitor.close()

    def started_channel(self, name: str) -> AgentChannel:
        """The channel to the agent of a VM that was started. Raises `Gone` if there is no such VM."""
        paths = self._paths(name)
        known = manifest.read(paths.home)
        if known is None or known.phase is not VmPhase.STARTED or not known.process.is_alive():
            raise Gone(f"there is no running VM {name}", hint="see `multiverse vms`")
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = AgentChannel(paths.agent)
        return channel

    def take_channel(self, name: str) -> AgentChannel | None:
        """The open channel of a VM, which is the caller's from now on."""
        return self._channels.pop(name, None)

    def poll_reports(self, name: str) -> list[Report]:
        """Reports that a guest sent unsolicited since the last call."""
        channel = self._channels.get(name)
        return channel.poll_reports() if channel is not None else []

    def audit(self, name: str) -> Mapping[str, str | int]:
        """What the guest said of itself when it was started; empty if another process started it."""
        report = self._reports.get(name)
        return dict(report.audit) if report is not None else {}

    def drop(self, name: str) -> None:
        """Close all connections to a VM."""
        session = self._sessions.pop(name, None)
        if session is not None:
            session.close()
        channel = self._channels.pop(name, None)
        if channel is not None:
            channel.close()
        self._reports.pop(name, None)

    def shut_down(self) -> None:
        """End all connections, so that nobody waits on one any more. The VMs go on."""
        for session in list(self._sessions.values()):
            session.shut_down()
        for channel in list(self._channels.values()):
            channel.shut_down()
