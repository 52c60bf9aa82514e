"""VMs that move to other hosts while their jobs run. The two hosts agree by themselves which of them has the VM.

    the host that it leaves             the host that receives it
    facts                            →
                                     ←  ready: a QEMU waits for the VM
    disk and memory, by connections of their own
    sent: the guest stands still     →
                                     ←  complete: all of it is here
    *handed over* is recorded        →
                                        *received* is recorded, and the VM goes on
                                     ←  received
    it is removed here

A host that handed a VM over lets it go on only if the other one says that it is *absent*, and never will be there. It
asks until it gets an answer, also after a restart. A host that has recorded *received* never forgets that before the
other one has nothing of the VM any more. Before that, each of them can give up alone: the VM goes on where it was.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from multiverse.core.errors import Refused
from multiverse.core.model.identity import Neighbour
from multiverse.core.model.vm import Stage, VmSpec
from multiverse.host import manifest
from multiverse.host.links import MoveHello, MovePeer
from multiverse.host.manifest import Moving, Specification, VmPhase
from multiverse.host.qemu.arrivals import IncomingVms
from multiverse.host.qemu.context import HostContext, MoveConfig
from multiverse.host.qemu.departures import OutgoingVm
from multiverse.system.locks import locked_directory

_KEPT = 1000  # results of moves

MoveHolds = Literal["kept", "handed_over", "received", "absent"]
"""What a host has of a VM that has moved, or was to. It was `received` also if it has ended there since."""


class VmMoves:
    """The moves of one host's VMs, of one site. Calls block."""

    def __init__(self, host: HostContext, config: MoveConfig) -> None:
        self._host, self._config = host, config
        self._closed = threading.Event()
        self._arrivals = IncomingVms(host, config, self._closed)
        self._lock = threading.Lock()
        self._departures: dict[str, OutgoingVm] = {}  # the last one of each VM

    def receive(self, spec: Specification, number: int, secret: str, neighbours: Iterable[Neighbour] = ()) -> None:
        """Expect that VM for a minute. Nothing else may bring one. See `IncomingVms.announce`."""
        self._arrivals.announce(spec, number, secret, neighbours)

    def coming(self) -> Mapping[str, VmSpec]:
        """VMs that are expected, of which there may be nothing to see yet."""
        return self._arrivals.coming()

    def send(self, name: str, token: str, number: int, secret: str, peer: MovePeer) -> Sequence[Stage]:
        """Move a VM to another host, which expects it. The same again waits for that move, or says how it has ended.
        Raises `Refused`, `Exhausted` or `Broken` if the VM goes on here, `Gone` if it has ended, and `Unknown` if
        neither is known."""
        self._host.check_name(name)
        moving = Moving(number, secret, peer.address, peer.port, peer.certificate)
        known = manifest.read(self._host.paths(name).home)
        # A VM that was saved and resumed here is moved by the same numbers again.
        may_move = known is not None and known.moving is None and known.moved < number
        with self._lock:
            departure = self._departures.get(name)
            is_new = departure is None or (departure.result.done() and (departure.number < number or may_move))
            if departure is None or is_new:
                self._forget_ended()
                departure = self._departures[name] = OutgoingVm(self._host, self._config, name, moving, self._closed)
            elif departure.number != number:
                raise Refused(f"VM {name} has move {departure.number}, not {number}", hint="see `multiverse vms`")
        if is_new:
            departure.run(token)
        return departure.result.result()

    def _forget_ended(self) -> None:
        ended = [name for name, one in self._departures.items() if one.result.done()]
        for name in ended[: max(0, len(ended) - _KEPT)]:
            del self._departures[name]

    def withdraw(self, name: str) -> None:
        """Receive the VM of that name no more: it is destroyed."""
        self._arrivals.withdraw(name)

    def cancel(self, name: str, token: str, number: int, *, absent: bool = False) -> MoveHolds:
        """End that move, and earlier ones, unless it is too late: whether the VM leaves this host or comes to it. They
        are not begun again. Returns what this host has of the VM. `absent`: the other host has said that it has none;
        so one that was handed over goes on here."""
        self._host.check_name(name)
        home = self._host.paths(name).home
        manifest.refuse_other(manifest.read(home), token)
        with self._lock:
            departure = self._departures.get(name)
        if departure is not None and departure.number <= number:
            departure.cancel()
            if absent:
                departure.end_absent()
        if self._arrivals.cancel(name, token, number):
            return "received"
        with locked_directory(home, create=False) as there:
            known = manifest.read(home) if there else None
            if known is None:
                return "absent"
            if known.moving is None and known.moved < number:
                manifest.write(home, replace(known, moved=number))
            return "handed_over" if known.handed_over else "kept"

    def serve(self, sock: socket.socket, hello: MoveHello) -> None:
        """Answer a connection of another host. See `IncomingVms.serve`."""
        self._host.check_name(hello.name)
        self._arrivals.serve(sock, hello)

    def resume(self) -> None:
        """Go on with the moves that an earlier process has begun, in threads."""
        manifest.forget_old_received(self._host.config.vms)
        for home in self._host.config.vms.glob(f"{self._host.config.prefix}*"):
            known = manifest.read(home)
            if known is None or (moving := known.moving) is None:
                continue
            if known.phase is not VmPhase.STARTED:
                self._start(partial(self._arrivals.resume, known))
                continue
            departure = OutgoingVm(self._host, self._config, known.name, moving, self._closed)
            with self._lock:
                self._departures[known.name] = departure
            self._start(departure.settle if moving.handed_over else departure.stay)

    @staticmethod
    def _start(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="move", daemon=True).start()

    def close(self) -> None:
        """End all waiting. A VM that was not handed over goes on here; the rest is the next process's."""
        self._closed.set()
        for departure in list(self._departures.values()):
            departure.interrupt()
