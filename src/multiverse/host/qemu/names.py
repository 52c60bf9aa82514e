"""The names by which guests find the other VMs of their groups.

A guest that is started gets the names that its host was told, with its identity. Later ones it gets from a thread here,
once a second at most however much changes, so that its job is hardly disturbed. Nothing waits for a guest: one that
does not take a message gets all names with the next change.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

import structlog

from multiverse.core.errors import MultiverseError
from multiverse.core.model import Member
from multiverse.guest.protocol import names_message
from multiverse.host.firewall import Firewall
from multiverse.host.qemu.connections import Connections

log = structlog.get_logger(__name__)

PACE = 1.0
"""Seconds between two messages to a guest, at least."""

_TIMEOUT = 2.0  # seconds until a guest has taken a message

Names = frozenset[tuple[str, str]]
"""Pairs of name and address."""


class GuestNames:
    """What the guests of one host were told by this process. `host` is the host's name."""

    def __init__(self, host: str, firewall: Firewall, connections: Connections) -> None:
        self._host, self._firewall, self._connections = host, firewall, connections
        self._told: dict[str, Names] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._due, self._closed = threading.Event(), threading.Event()

    def first(self, vm: str, group: int) -> Names:
        """The names for a VM of this group that is about to be told them with other facts."""
        names = _names(vm, group, self._firewall.members.values())
        self._told[vm] = names
        return names

    def changed(self) -> None:
        """The groups have changed, or a guest can be told now: tell what is to be told, soon."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="names", daemon=True)
                self._thread.start()
        self._due.set()

    def started(self, vm: str) -> None:
        """A VM runs: it may have been told of other names while it was started."""
        if vm in self._firewall.members:
            self.changed()

    def drop(self, vm: str) -> None:
        """A VM is gone."""
        self._told.pop(vm, None)

    def close(self) -> None:
        """Tell nobody any more."""
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
        """Tell each guest what it does not know yet. Blocks as long as guests do not take it."""
        members = self._firewall.members
        for vm in sorted({one.name for one in members.values() if one.host == self._host} | set(self._told)):
            own = members.get(vm)
            names = _names(vm, own.group if own is not None else 0, members.values())
            told = self._told.get(vm)
            if names == told or self._connections.has_session(vm):  # one that is being started is told by that
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
