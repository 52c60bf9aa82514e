"""The moves of VMs from other hosts to this one. See `moves`."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import structlog
from pydantic import ValidationError

from multiverse.core.errors import Exhausted, MultiverseError, Refused, Unknown
from multiverse.core.model.basics import Size
from multiverse.core.model.identity import Neighbour
from multiverse.core.model.machine import why_other_machine
from multiverse.core.model.vm import VmSpec
from multiverse.guest.protocol import Report, names_message
from multiverse.host import manifest, network, path_security, process
from multiverse.host.links import HostLink, MoveHello
from multiverse.host.manifest import Manifest, Moving, Received, Specification, VmPhase
from multiverse.host.qemu import lifecycle, migration, saves, templates
from multiverse.host.qemu.channels import Monitor
from multiverse.host.qemu.context import HostContext, MoveConfig, VmStageTimer
from multiverse.host.qemu.departures import FACTS, MANIFESTS, SHARED, Facts
from multiverse.host.qemu.hotplug import plug
from multiverse.host.qemu.lifecycle import VmParts
from multiverse.host.qemu.machine import Feature
from multiverse.host.qemu.migration import Wire
from multiverse.host.qemu.saved_files import DECOMPRESS
from multiverse.host.qemu.session import Paths, QemuSession
from multiverse.images.catalog import Image
from multiverse.system import files
from multiverse.system.locks import locked_directory

log = structlog.get_logger(__name__)

_ANNOUNCED = 60.0  # seconds that a VM is waited for which the controller has announced
_TALK = 30.0  # seconds within which the other host says something
_CONNECTED = 15.0  # seconds for a connection that it has announced
_COMPLETE = 30.0  # seconds for the last of the memory
_ORPHANED = 30.0  # seconds after which a VM is removed whose host calls no more
_ANNOUNCED_AGAIN = (0.2, 1.0)  # seconds after which it is said again on the network where a VM is
_TAKEN = 2.0  # seconds until a guest has taken a message
_LATE = 600.0  # seconds by which a call of the controller may be late
_KEPT_NUMBERS = 1000

Answer = Literal["received", "absent"]


@dataclass(frozen=True)
class _Announced:
    spec: Specification
    number: int
    secret: str
    neighbours: tuple[Neighbour, ...]  # that it reaches by the VXLAN
    until: float  # monotonic


@dataclass
class _Arrival:
    """A VM that is being received now."""

    announced: _Announced
    session: QemuSession | None = None
    is_shared: bool = False  # its disk is the one that it had
    connections: queue.Queue[tuple[str, socket.socket]] = field(default_factory=queue.Queue)
    over: threading.Event = field(default_factory=threading.Event)


class IncomingVms:
    """The VMs that come to this host."""

    def __init__(self, host: HostContext, config: MoveConfig, closed: threading.Event) -> None:
        self._host, self._config, self._closed = host, config, closed
        self._lock = threading.Lock()
        self._deciding = threading.Lock()  # held while it is decided whether a VM goes on here
        self._announced: dict[str, _Announced] = {}
        self._arriving: dict[str, _Arrival] = {}
        # The highest number of a move of that VM that is received no more, and until when (monotonic): a call that
        # announces it may come late. A VM that is saved and resumed is moved by the same numbers again.
        self._ended: dict[str, tuple[int, float]] = {}

    # --- the controller -------------------------------------------------------------------------------

    def announce(self, spec: Specification, number: int, secret: str, neighbours: Iterable[Neighbour]) -> None:
        """Expect that VM. The same again is success. Raises `Refused` if that move was cancelled, or if there is a VM
        of that name."""
        self._host.check_name(spec.name)
        spec.check()
        with self._lock:
            if self._is_ended(spec.name, number):
                raise Refused(f"move {number} of VM {spec.name} was cancelled", hint="move it again")
            arriving = self._arriving.get(spec.name)
            if arriving is not None and arriving.announced.number == number:
                return
            known = manifest.read(self._host.paths(spec.name).home)
            if known is not None and (known.token, known.moved) == (spec.token, number) and known.moving is None:
                return  # it has come
            if known is not None and (known.moving is None or known.moving.number != number):
                raise Refused(f"there is a VM {spec.name} on {self._host.config.host}", hint="destroy it first")
            # The controller moves a VM again only when its last move is settled: no host asks about that any more.
            manifest.forget_received(self._host.config.vms, spec.name)
            until = time.monotonic() + _ANNOUNCED
            self._announced[spec.name] = _Announced(spec, number, secret, tuple(neighbours), until)

    def coming(self) -> Mapping[str, VmSpec]:
        """The VMs that were announced, or that are being received, by name."""
        with self._lock:
            late = [name for name, one in self._announced.items() if one.until < time.monotonic()]
            for name in late:
                del self._announced[name]
            return {name: one.spec for name, one in self._announced.items()} | {
                name: one.announced.spec for name, one in self._arriving.items()
            }

    def cancel(self, name: str, token: str, number: int) -> bool:
        """Receive that move and earlier ones no more, and remove what has come of them, unless it was taken over.
        Whether it was."""
        with self._lock:
            self._end(name, number)
        with self._deciding:
            self._remove(name, number)
            received = self._received(name)
            return received is not None and received.move >= number and token in ("", received.token)

    def withdraw(self, name: str) -> None:
        """Receive the VM no more that is expected by that name, or is coming: it is destroyed."""
        with self._lock:
            found = [one.number for one in (self._announced.get(name),) if one is not None]
            found += [one.announced.number for one in (self._arriving.get(name),) if one is not None]
            if found:
                self._end(name, max(found))

    def _end(self, name: str, number: int) -> None:
        before, _ = self._ended.pop(name, (0, 0.0))
        self._ended[name] = max(number, before), time.monotonic() + _LATE
        while len(self._ended) > _KEPT_NUMBERS:
            del self._ended[next(iter(self._ended))]
        announced = self._announced.get(name)
        if announced is not None and announced.number <= number:
            del self._announced[name]

    def _is_ended(self, name: str, number: int) -> bool:
        last, until = self._ended.get(name, (0, 0.0))
        return number <= last and time.monotonic() < until

    # --- the other host -------------------------------------------------------------------------------

    def serve(self, sock: socket.socket, hello: MoveHello) -> None:
        """Answer one connection, whose first line was read. Raises `Refused` if nobody expects it."""
        if hello.channel == "control":
            self._receive(sock, hello)
        elif hello.channel == "settle":
            self._settle(sock, hello)
        else:
            self._attach(sock, hello)

    def _attach(self, sock: socket.socket, hello: MoveHello) -> None:
        with self._lock:
            arrival = self._arriving.get(hello.name)
        if arrival is None or not _fits(arrival.announced, hello):
            raise Refused(f"nobody expects a connection for VM {hello.name}")
        arrival.connections.put((hello.channel, sock))
        arrival.over.wait()

    def _receive(self, sock: socket.socket, hello: MoveHello) -> None:
        name, number = hello.name, hello.move
        with self._lock:
            announced = self._announced.get(name)
            if announced is None or not _fits(announced, hello) or name in self._arriving:
                raise Refused(f"nobody expects VM {name}", hint="is it announced by the controller?")
            arrival = self._arriving[name] = _Arrival(announced)
            del self._announced[name]
        link, answer = HostLink(sock), ""
        try:
            with ExitStack() as stack:
                answer = self._follow(link, arrival, stack)
        except MultiverseError as error:
            log.warning("VM not received", vm=name, move=number, reason=str(error))
        finally:
            link.close()
            arrival.over.set()
            with self._lock:
                if self._arriving.get(name) is arrival:
                    del self._arriving[name]
            if answer == "" and self._may_come(name, number):
                self._closed.wait(_ORPHANED)  # the other host may call again
            if answer != "received" and not self._closed.is_set():
                self._remove_orphan(name, number)

    def _may_come(self, name: str, number: int) -> bool:
        """Whether the other host may have handed that VM over, and not have learnt what came of it."""
        known = manifest.read(self._host.paths(name).home)
        return known is not None and _is_of(known, number) and known.process.is_alive()

    def _follow(self, link: HostLink, arrival: _Arrival, stack: ExitStack) -> str:
        """Receive a VM. Returns what came of it; nothing if the other host has not handed it over."""
        announced = arrival.announced
        name, number = announced.spec.name, announced.number
        try:
            facts = _facts(link.receive(_TALK))
            self._make(arrival, facts, link)
        except MultiverseError as error:
            with suppress(MultiverseError):
                link.send(type="refused", kind=type(error).__name__, message=error.message, hint=error.hint)
            self._remove_orphan(name, number)
            raise
        session = arrival.session
        assert session is not None
        link.send(type="ready")
        while True:
            message = link.receive(_TALK)
            match message.get("type"):
                case "ping":
                    pass
                case "disk":
                    self._connect_disk(name, session.monitor, self._connection(arrival, "disk"), stack)
                case "memory":
                    sock = self._connection(arrival, "memory")
                    self._connect_memory(session.monitor, sock, stack, is_shared=arrival.is_shared)
                    _write_back(self._host.paths(name))
                case "sent":
                    session.monitor.wait_event("MIGRATION", _COMPLETE, status="completed")
                    link.send(type="complete")
                case "handed_over":
                    return self._answer(link, name, announced.spec.token, number, message)
                case "cancel":
                    self._remove_orphan(name, number)
                    return "absent"
                case other:
                    raise Unknown(f"the other host has said {other!r}")

    def _connection(self, arrival: _Arrival, channel: str) -> socket.socket:
        try:
            found, sock = arrival.connections.get(timeout=_CONNECTED)
        except queue.Empty:
            raise Unknown(f"the connection for the {channel} did not come") from None
        if found != channel:
            raise Unknown(f"a connection for the {found} came in place of the {channel}")
        return sock

    def _connect_disk(self, name: str, monitor: Monitor, sock: socket.socket, stack: ExitStack) -> None:
        path = self._host.paths(name).run / migration.NBD
        migration.serve_disk(monitor, path)
        near = migration.connect_disk(path)
        wire = Wire(sock, qemu=(near, near))
        stack.callback(wire.close)

    def _connect_memory(self, monitor: Monitor, sock: socket.socket, stack: ExitStack, *, is_shared: bool) -> None:
        if self._config.private and not self._config.compress:
            sock.setblocking(True)
            migration.receive_memory(monitor, sock.dup(), is_shared=is_shared)
            return
        wire = Wire(sock, DECOMPRESS if self._config.compress else (), outwards=False)
        stack.callback(wire.close)
        migration.receive_memory(monitor, wire.qemu, is_shared=is_shared)

    def _settle(self, sock: socket.socket, hello: MoveHello) -> None:
        """The other host has handed a VM over earlier, and asks what came of it."""
        known = manifest.read(self._host.paths(hello.name).home)
        if known is not None and known.moving is not None and not hello.knows(known.token, known.moving.secret):
            raise Refused(f"the secret of VM {hello.name} is another one")
        link = HostLink(sock)
        try:
            message = link.receive(_TALK)
            if message.get("type") == "handed_over":
                self._answer(link, hello.name, hello.token, hello.move, message)
        except MultiverseError as error:
            log.warning("another host was not answered", vm=hello.name, reason=str(error))

    def _answer(self, link: HostLink, name: str, token: str, number: int, message: Mapping[str, Any]) -> Answer:
        """Decide whether the VM goes on here, and say so. If that fails the other host asks again."""
        answer = self._decide(name, token, number, message)
        with self._lock:
            arrival = self._arriving.get(name)
            if arrival is not None and arrival.announced.number == number:
                del self._arriving[name]
        link.send(type=answer)
        if answer == "received":
            self._greet(name)
            with suppress(MultiverseError):
                if link.receive(_TALK).get("type") == "removed":
                    manifest.forget_received(self._host.config.vms, name)
            self._announce(name)
        return answer

    # --- making it ------------------------------------------------------------------------------------

    def _make(self, arrival: _Arrival, facts: Facts, link: HostLink) -> None:
        """Make a QEMU that waits for the VM."""
        spec, host = arrival.announced.spec, self._host
        name, paths = spec.name, host.paths(spec.name)
        problem = _difference(spec, facts.manifest) or why_other_machine(facts.machine, host.machine_kind())
        if problem:
            raise Refused(f"VM {name} cannot come to {host.config.host}: {problem}", hint="move it to another host")
        image = host.image(spec.image)
        if image.key != facts.image_key:
            what = f"{host.config.host} has another image {spec.image} than the host of VM {name}"
            raise Refused(what, hint="copy the image: see `multiverse image`")
        host.uids.check()
        try:
            with locked_directory(paths.home, create=True):
                if any(paths.home.iterdir()):
                    raise Refused(f"there are remains of a VM {name} here", hint=f"destroy {name} first")
                arrival.session = self._launch(spec, arrival, facts, image, link)
                host.connections.sessions[name] = arrival.session
                if host.vxlan is not None:
                    host.vxlan.add(name, arrival.announced.neighbours)
        except OSError as error:
            hint = f"is there room in {host.config.vms}?"
            raise Exhausted(f"cannot receive VM {name}: {error}", hint=hint) from error
        self._check_wanted(name, arrival.announced.number)

    def _launch(
        self, spec: Specification, arrival: _Arrival, facts: Facts, image: Image, link: HostLink
    ) -> QemuSession:
        host, of, announced = self._host, facts.manifest, arrival.announced
        paths, huge = host.paths(spec.name), Feature.HUGE_PAGES in host.features.in_use
        total = Size(of.total_cpus or of.cpus, of.total_memory or of.memory)
        spec = replace(spec, kind=of.kind, size=total)
        record, user = lifecycle.allocate(host, spec, image, None)
        record = replace(
            of, phase=VmPhase.CREATING, pid=0, started=0, boot_id=record.boot_id, uid=record.uid, numa=None,
            total_cpus=total.cpus, total_memory=total.memory, huge_memory=0, disk_cost=record.disk_cost,
            template_build="", cpu=facts.machine.cpu, moved=announced.number - 1,
            moving=Moving(announced.number, announced.secret, bridge=spec.bridge),
        )  # fmt: skip
        manifest.write(paths.home, record)
        arrival.is_shared = share_disk(facts, image, paths, link)
        if not arrival.is_shared:
            _make_disk(paths, image, facts.disk)
        saves.write_stubs(image, paths.home)

        def complete(session: QemuSession, record: Manifest) -> Manifest:
            process.limit_files(record.process, record.uid, record.disk << 20)
            record = lifecycle.choose_node(host, record, total)
            plugged = total.memory - of.memory
            made = plug(session.monitor, record, total.cpus, plugged, huge=huge, backends=facts.backends)
            return replace(record, huge_memory=made)

        booted = Size(of.cpus, of.memory)
        machine = saves.machine(host, spec, booted, image, paths, paths.disk).as_made(facts.machine.cpu, of.most)
        parts = VmParts(machine, image, None, record, user, complete=complete, phase=VmPhase.INCOMING)
        return lifecycle.launch(host, spec, parts, VmStageTimer())

    def _check_wanted(self, name: str, number: int) -> None:
        with self._lock:
            if self._is_ended(name, number):
                raise Refused(f"move {number} of VM {name} was cancelled")

    # --- the decision ---------------------------------------------------------------------------------

    def _decide(self, name: str, token: str, number: int, message: Mapping[str, Any]) -> Answer:
        """Whether the VM that the other host has handed over goes on here, or never will. Raises an error if neither is
        known; then the other host asks again."""
        with self._deciding:
            received = self._received(name)
            if received is not None and received.token == token and received.move >= number:
                self._finish(name, number)
                return "received"
            known = manifest.read(self._host.paths(name).home)
            if known is not None and known.token == token and known.moving is None and known.moved >= number:
                return "received"
            if self._take_over(name, token, number, message):
                self._finish(name, number)
                return "received"
            self._remove(name, number)
            return "absent"

    def _take_over(self, name: str, token: str, number: int, message: Mapping[str, Any]) -> bool:
        """Record that a VM goes on here, if all of it is here. False: nothing is recorded."""
        vms, paths = self._host.config.vms, self._host.paths(name)
        with locked_directory(paths.home, create=False) as there:
            known = manifest.read(paths.home) if there else None
            with self._lock:
                cancelled = self._is_ended(name, number)
            if known is None or known.token != token or not _is_of(known, number) or cancelled:
                return False
            try:
                with self._monitor(name) as monitor:
                    if not migration.is_complete(monitor):
                        return False
                manifest.write(paths.home, _with_latest(known, message))
            except MultiverseError as error:
                log.warning("VM not taken over", vm=name, reason=str(error))
                return False
            for path in paths.outputs:
                if text := message.get("outputs", {}).get(path.name):
                    self._host.outputs.append(name, path, str(text).encode("latin-1", "replace"))
            try:
                manifest.write_received(vms, name, Received(token, number))
            except OSError as error:
                # The file may be there all the same: then it counts, here and after a restart.
                found = manifest.read_received(vms, name)
                if found is not None and (found.token, found.move) == (token, number):
                    return True
                log.warning("VM not taken over", vm=name, reason=str(error))
                return False
        return True

    def _finish(self, name: str, number: int) -> None:
        """Let a VM run that is recorded as received, if it does not run yet. The same again is success."""
        host, paths = self._host, self._host.paths(name)
        with locked_directory(paths.home, create=False) as there:
            known = manifest.read(paths.home) if there else None
            if known is None or known.moving is None or not _is_of(known, number):
                return
            record = replace(known, phase=VmPhase.STARTED, moving=None, moved=number)
            if known.process.is_alive():
                if known.moving.bridge:
                    network.join_bridge(name, known.moving.bridge, known.mac)
                host.firewall.allow(record)
                lifecycle.separate(host, record)
                _see_latest(paths.disk)
                with self._monitor(name) as monitor:
                    migration.go_on(monitor)
                network.announce(known.moving.bridge, known.mac, known.address)
            manifest.write(paths.home, record)  # last: whoever does not find it does all of it again
        if (session := host.connections.sessions.get(name)) is not None:
            host.connections.keep_channel(name, session, Report("started"))
        log.info("VM received", vm=name, move=number)

    @contextmanager
    def _monitor(self, name: str) -> Iterator[Monitor]:
        """The monitor of a VM that is coming: QEMU serves one connection, which is that of its session if there is
        one."""
        session = self._host.connections.sessions.get(name)
        if session is not None:
            yield session.monitor
            return
        with Monitor.connect(self._host.paths(name).monitor) as monitor:
            yield monitor

    def _greet(self, name: str) -> None:
        """Tell the guest the time: its clock stood still. Its failure to listen is no error."""
        known = manifest.read(self._host.paths(name).home)
        if known is None or known.phase is not VmPhase.STARTED:
            return
        names = self._host.names.first(name, self._host.firewall.group(known))
        # An empty line first: the guest may have got a part of a message from the other host.
        line = b"\n" + names_message(sorted(names), [], whole=True, now=time.time())
        try:
            self._host.connections.started_channel(name).tell(line, _TAKEN)
        except MultiverseError as error:
            log.warning("a guest was not told the time", vm=name, reason=str(error))

    def _announce(self, name: str) -> None:
        """Tell the network again where the VM is: frames get lost."""
        for pause in _ANNOUNCED_AGAIN:
            if self._closed.wait(pause):
                return
            known, bridge = manifest.read(self._host.paths(name).home), network.bridge_of(name)
            if known is not None and bridge is not None:
                network.announce(bridge[0], known.mac, known.address)

    # --- the end --------------------------------------------------------------------------------------

    def _remove_orphan(self, name: str, number: int) -> None:
        with self._deciding:
            try:
                self._remove(name, number)
            except MultiverseError as error:
                log.warning("what came of a VM was not removed", vm=name, reason=str(error))

    def _remove(self, name: str, number: int) -> None:
        """Remove what has come of that move or an earlier one, unless it is received. Hold `_deciding`."""
        known = manifest.read(self._host.paths(name).home)
        if known is None or not _is_of(known, number):
            return
        received = self._received(name)
        if received is None or known.moving is None or received.token != known.token:
            is_received = False
        else:
            is_received = received.move >= known.moving.number
        if not is_received:
            lifecycle.remove(self._host, name, 0.0, known.token)

    def _received(self, name: str) -> Received | None:
        try:
            return manifest.read_received(self._host.config.vms, name)
        except OSError as error:
            raise Unknown(f"cannot read what was received of VM {name}: {error}") from error

    def resume(self, known: Manifest) -> None:
        """Go on with a VM that an earlier process was receiving."""
        if known.moving is None:
            return
        name, number = known.name, known.moving.number
        try:
            received = self._received(name)
            if received is not None and (received.token, received.move) == (known.token, number):
                self._finish(name, number)
                self._greet(name)
                self._announce(name)
                return
        except MultiverseError as error:  # the other host asks again
            log.warning("VM not received yet", vm=name, reason=str(error))
            return
        if known.phase is VmPhase.INCOMING:
            self._closed.wait(_ORPHANED)
        if not self._closed.is_set():
            self._remove_orphan(name, number)


def _fits(announced: _Announced, hello: MoveHello) -> bool:
    return hello.knows(announced.spec.token, announced.secret) and hello.move == announced.number


def _is_of(known: Manifest, number: int) -> bool:
    """Whether this VM is coming here by that move or an earlier one, and does not run yet."""
    coming = known.phase in (VmPhase.INCOMING, VmPhase.CREATING)
    return coming and known.moving is not None and known.moving.number <= number


def _write_back(paths: Paths) -> None:
    """Write the disk of a VM that is coming to that of the host: QEMU would while the guest stands still."""
    with suppress(OSError):
        files.write_back(paths.disk)


def _see_latest(disk: Path) -> None:
    """Make what another host has written last to a disk visible here: NFS asks for that when a file is opened."""
    with suppress(OSError), disk.open("rb"):
        pass


def share_disk(facts: Facts, image: Image, paths: Paths, link: HostLink) -> bool:
    """Make the disk of a VM this host's, too, if it lies on a file system that both hosts reach. It gets a second
    name, so that each of them may remove its own. QEMU opens it when it refers to the image alone, and neither
    reads nor writes it before the VM goes on here."""
    there, disk = facts.shared, paths.full_disk if facts.disk else paths.overlay
    try:
        if there is None or there.image != image.disk or (there.home / SHARED).read_text() != there.word:
            return False
        path_security.check(there.home)
        os.link(there.home / disk.name, disk, follow_symlinks=False)
    except FileNotFoundError:  # nearly always: they share no file system
        return False
    except (OSError, Refused) as error:  # another mount of it, or one that has no second names
        log.info("the disk of a VM is copied", vm=paths.home.name, reason=str(error))
        return False
    link.send(type="shares")
    while (said := link.receive(_TALK).get("type")) == "ping":
        pass
    if said != "flat":
        raise Unknown(f"the other host has said {said!r}")
    return True


def _make_disk(paths: Paths, image: Image, size: int) -> None:
    """Make an empty disk for what the other host sends: of `size` bytes, or on top of the image's if that is 0."""
    if size:
        with paths.full_disk.open("wb") as file:
            file.truncate(size)
    else:
        templates.create_overlay(paths.overlay, image.disk, "raw", image.disk.stat().st_size)


def _facts(message: Mapping[str, Any]) -> Facts:
    try:
        return FACTS.validate_python(message.get("facts"))
    except ValidationError as error:
        what = "the description of the VM cannot be read"
        raise Refused(what, hint="is the other host of this release or of its neighbour?") from error


def _with_latest(known: Manifest, message: Mapping[str, Any]) -> Manifest:
    """The manifest, with what has changed of the VM since its move was begun."""
    try:
        latest = MANIFESTS.validate_python(message.get("manifest"))
    except ValidationError as error:
        raise Unknown("what the other host says of the VM cannot be read") from error
    return replace(known, users_added=latest.users_added, group=latest.group, peers=latest.peers,
                   peer_addresses=latest.peer_addresses, net=latest.net)  # fmt: skip


def _difference(spec: VmSpec, of: Manifest) -> str:
    """What tells a VM from the one that the controller has announced."""
    same = {
        "name": spec.name == of.name,
        "token": spec.token == of.token,
        "MAC": spec.mac == of.mac,
        "kind": spec.kind == of.kind,
        "image": spec.image == of.image,
        "address": not spec.address or spec.address.partition("/")[0] == of.address,
    }
    other = [what for what, matches in same.items() if not matches]
    return f"it has another {' and '.join(other)} than was announced" if other else ""
