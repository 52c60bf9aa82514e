"""The moves of VMs from this host to others. See `moves`."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import structlog
from pydantic import TypeAdapter

from multiverse.core.errors import Broken, Exhausted, Gone, MultiverseError, Refused, Unknown
from multiverse.core.model.machine import MachineKind
from multiverse.core.model.vm import Stage
from multiverse.host import manifest, network
from multiverse.host.links import HostLink, MoveHello, MovePeer, dial, shut_down
from multiverse.host.manifest import Manifest, Moving, VmPhase
from multiverse.host.qemu import lifecycle, migration
from multiverse.host.qemu.channels import Monitor
from multiverse.host.qemu.context import HostContext, MoveConfig, VmStageTimer
from multiverse.host.qemu.hotplug import backends_of
from multiverse.host.qemu.migration import Limits, Sender, Wire
from multiverse.host.qemu.saved_files import COMPRESS
from multiverse.system import files
from multiverse.system.locks import locked_directory

log = structlog.get_logger(__name__)

_READY = 60.0  # seconds for the other host to make the VM
_COMPLETE = 30.0  # seconds for it to read the last of the memory
_DECIDED = 10.0  # seconds for it to say whether it took the VM over
_PING = 5.0  # seconds between signs of life
_AGAIN, _AGAIN_LIMIT = 0.2, 30.0  # seconds before it is asked again: doubled each time up to the limit
_CANCELLED = 30.0  # seconds in which a move that is cancelled ends
_TAIL = 64 << 10  # bytes of the console and of QEMU's log that go with the VM
_ERRORS = {kind.__name__: kind for kind in (Refused, Exhausted, Gone, Broken)}


MANIFESTS = TypeAdapter(Manifest)


SHARED = ".shared"  # a file in the directory of a VM that moves: a word, by which another host knows the directory


@dataclass(frozen=True)
class SharedDisk:
    """Where a host that reaches the same file system finds the disk of the VM."""

    home: Path  # the VM's directory
    word: str  # in its file `SHARED`
    image: Path  # the image's disk, which the VM's refers to


@dataclass(frozen=True)
class Facts:
    """What the host that receives a VM has to know to make the same machine."""

    manifest: Manifest
    image_key: str
    machine: MachineKind
    backends: tuple[str, ...]  # of plugged memory, by name
    disk: int  # bytes of a disk that is a copy of the image's; 0: it is an overlay
    shared: SharedDisk | None = None  # None: written by a release that shares none


FACTS = TypeAdapter(Facts)


class OutgoingVm:
    """One move of a VM to another host."""

    def __init__(self, host: HostContext, config: MoveConfig, name: str, moving: Moving, closed: threading.Event):
        self.number = moving.number
        self.result: Future[Sequence[Stage]] = Future()
        self._host, self._config, self._name, self._moving, self._closed = host, config, name, moving, closed
        self._paths = host.paths(name)
        self._peer = MovePeer(moving.address, moving.port, moving.certificate)
        self._token = ""
        self._link: HostLink | None = None
        self._cancelled = threading.Event()
        self._handed_over = threading.Event()
        self._absent = False  # the controller says that the other host has no such VM
        self._wake = threading.Event()
        self._pinged = 0.0
        self._timer = VmStageTimer()

    # --- from outside ---------------------------------------------------------------------------------

    def run(self, token: str) -> None:
        """Move the VM. What comes of it is the `result`."""
        self._conclude(lambda: self._move(token))

    def settle(self) -> None:
        """Go on with a move that an earlier process has handed over."""
        self._handed_over.set()
        self._conclude(lambda: self._settle(ExitStack()))

    def stay(self) -> None:
        """Give up a move that an earlier process has not handed over."""
        self._conclude(lambda: self._give_up(Broken("its agent was restarted", hint="move the VM again")))

    def end_absent(self) -> None:
        """Let a VM go on here that was handed over: the other host has none, and never will by this move. Raises what
        comes of that, unless it is success."""
        self._absent = True
        self._wake.set()
        try:
            self.result.result(_CANCELLED)
        except (Broken, Gone, Refused):
            return  # this is how such a move ends
        except FutureTimeout:
            raise Unknown(f"VM {self._name} does not go on yet", hint="see the log of the agent") from None

    def cancel(self) -> None:
        """End it, unless it is too late. Raises `Unknown` if that is not done in time."""
        self._cancelled.set()
        deadline = time.monotonic() + _CANCELLED
        while not (self.result.done() or self._handed_over.is_set()):
            self.interrupt()
            if time.monotonic() > deadline:
                raise Unknown(f"the move of VM {self._name} does not end", hint="see the log of the agent")
            time.sleep(0.02)

    def interrupt(self) -> None:
        """Let it notice at once that it is cancelled, or that this process ends."""
        self._wake.set()
        if (link := self._link) is not None:
            link.shut_down()

    def _conclude(self, work: Callable[[], Sequence[Stage]]) -> None:
        try:
            self.result.set_result(work())
        except MultiverseError as error:
            log.warning("VM not moved", vm=self._name, move=self.number, reason=str(error))
            self.result.set_exception(error)
        except BaseException as error:
            self.result.set_exception(Unknown(f"{type(error).__name__}: {error}"))
            raise

    # --- until it is handed over ----------------------------------------------------------------------

    def _move(self, token: str) -> Sequence[Stage]:
        self._begin(token)
        try:
            with self._connected() as stack:
                self._transfer(stack)
                self._hand_over()
                return self._settle(stack)
        except (MultiverseError, OSError) as error:
            if self._handed_over.is_set():
                raise
            self._give_up(error)

    def _begin(self, token: str) -> None:
        """Record that the VM moves. From here on nothing else continues it."""
        home = self._paths.home
        with locked_directory(home, create=False) as there:
            known = manifest.read(home) if there else None
            manifest.refuse_other(known, token)
            if known is None or not known.process.is_alive():
                raise Gone(f"there is no running VM {self._name}", hint="see `multiverse vms`")
            if problem := _why_not(known, self.number):
                raise Refused(f"VM {self._name} cannot move: {problem}")
            with Monitor.connect(self._paths.monitor) as monitor:
                if not monitor.execute("query-status")["running"]:
                    raise Refused(f"VM {self._name} is paused", hint="has the disk of its host room?")
            bridge = network.bridge_of(self._name)
            self._moving = replace(self._moving, bridge=bridge[0] if bridge else "")
            manifest.write(home, replace(known, moving=self._moving))
        self._token = known.token

    @contextmanager
    def _connected(self) -> Iterator[ExitStack]:
        """What is entered there is closed before the move is given up."""
        with ExitStack() as stack:
            try:
                yield stack
            except MultiverseError:
                if self._link is not None and not self._handed_over.is_set():
                    with suppress(MultiverseError):
                        self._link.send(type="cancel")
                raise
            finally:
                if self._link is not None:
                    self._link.close()

    def _transfer(self, stack: ExitStack) -> None:
        host, config = self._host, self._config
        known = self._known()
        image = host.image(known.image)
        monitor = stack.enter_context(Monitor.connect(self._paths.monitor))
        disk = self._paths.disk
        whole = disk == self._paths.full_disk
        emulated = host.accelerator.name != "kvm"
        limits = Limits(config.bandwidth, config.downtime, time.monotonic() + config.timeout, emulated)
        sender = Sender(monitor, limits, self._tick)
        link = self._link = HostLink(self._dial("control"))
        kind, word = host.machine_kind(), secrets.token_hex(16)
        (self._paths.home / SHARED).write_text(word)
        known = replace(known, moving=None, most=host.most_of(known, image))
        facts = Facts(known, image.key, replace(kind, cpu=known.cpu or kind.cpu), tuple(backends_of(monitor)),
                      disk.stat().st_size if whole else 0, SharedDisk(self._paths.home, word, image.disk))  # fmt: skip
        link.send(type="facts", facts=FACTS.dump_python(facts, mode="json"))
        sender.flatten(image.disk)  # meanwhile the other host makes the VM
        is_shared = self._expect("ready", "shares", timeout=_READY) == "shares"
        if is_shared:  # the disk is as it will be, so the other host can make the VM
            link.send(type="flat")
            self._expect("ready", timeout=_READY)
        self._timer("prepare")
        if not is_shared:
            sender.send_disk(self._wire("disk", stack), whole=whole)
        files.write_back(disk)  # QEMU does so when the guest stops
        self._timer("disk")
        sender.send_memory(self._wire("memory", stack, *(COMPRESS if config.compress else ())))
        self._timer("memory")
        if not is_shared:
            sender.end_disk()
        sender.end_memory()
        link.send(type="sent")
        self._expect("complete", timeout=_COMPLETE)
        self._timer("switch")

    def _known(self) -> Manifest:
        known = manifest.read(self._paths.home)
        if known is None or known.moving is None or known.moving.number != self.number:
            raise Gone(f"VM {self._name} was destroyed")
        return known

    def _dial(self, channel: str) -> socket.socket:
        hello = MoveHello(self._name, self._token, self.number, self._moving.secret, channel)
        return dial(self._peer, hello, self._config.namespace)

    def _wire(self, channel: str, stack: ExitStack, *program: str) -> socket.socket:
        """A socket for QEMU that leads to the other host. It is closed here once QEMU has it."""
        link = self._link
        assert link is not None
        connection = self._dial(channel)
        if not self._peer.certificate and not program:
            connection.setblocking(True)
            stack.callback(connection.close)
            stack.callback(shut_down, connection)  # first
            found = connection.dup()
        else:
            wire = Wire(connection, program)
            stack.callback(wire.close)
            found = wire.qemu
        link.send(type=channel)
        return found

    def _expect(self, *answers: str, timeout: float) -> str:
        """One of these answers. Raises what the other host says instead."""
        assert self._link is not None
        self._check_wanted()
        message = self._link.receive(timeout)
        self._check_wanted()
        if (found := str(message.get("type"))) not in answers:
            kind = _ERRORS.get(str(message.get("kind")), Broken)
            raise kind(str(message.get("message", "the other host refused the VM")), hint=str(message.get("hint", "")))
        return found

    def _check_wanted(self) -> None:
        if self._cancelled.is_set():
            raise Refused(f"the move of VM {self._name} was cancelled")
        if self._closed.is_set():
            raise Broken("the agent ends", hint="move the VM again")

    def _tick(self) -> None:
        self._check_wanted()
        now = time.monotonic()
        if self._link is not None and now - self._pinged > _PING:
            self._pinged = now
            self._link.send(type="ping")

    def _give_up(self, error: BaseException) -> NoReturn:
        """Let the VM go on here. Raises the error, as what it means for the VM."""
        pause = _AGAIN
        while True:
            try:
                goes_on = self._go_on()
                break
            except MultiverseError as problem:
                log.warning("VM does not go on yet", vm=self._name, reason=str(problem))
            if self._closed.wait(pause):
                raise Unknown(f"the agent ends before VM {self._name} goes on") from error
            pause = min(2 * pause, _AGAIN_LIMIT)
        if not goes_on:
            raise Gone(f"VM {self._name} has ended", hint="see `multiverse vms`") from error
        if self._cancelled.is_set():
            raise Refused(f"the move of VM {self._name} was cancelled") from error
        if isinstance(error, Refused | Exhausted | Broken | Gone):
            raise error
        raise Broken(f"VM {self._name} was not moved: {error}", hint="see the logs of both agents") from error

    def _go_on(self) -> bool:
        """Let the VM go on here, and record that. False if it has ended."""
        home = self._paths.home
        with locked_directory(home, create=False) as there:
            known = manifest.read(home) if there else None
            if known is None or known.moving is None or known.moving.number != self.number:
                return known is not None and known.process.is_alive()
            ended = replace(known, moving=None, moved=max(known.moved, self.number))
            with suppress(OSError):
                (home / SHARED).unlink(missing_ok=True)
            if known.process.is_alive():
                # Recorded last: whoever finds the record does all of it again.
                with suppress(OSError):  # a host that shared it had given it to its own user
                    os.chown(self._paths.disk, known.uid, known.uid)
                if known.moving.bridge:
                    network.join_bridge(self._name, known.moving.bridge, known.mac)
                    separated = bool(known.peers) or self._host.firewall.separates(known)
                    network.set_isolated(self._name, not separated)
                try:
                    with Monitor.connect(self._paths.monitor) as monitor:
                        migration.stay(monitor)
                except MultiverseError:
                    if known.process.is_alive():
                        raise
            manifest.write(home, ended)
            return known.process.is_alive()

    # --- from then on ---------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        home = self._paths.home
        with locked_directory(home, create=False) as there:
            self._check_wanted()
            known = self._known() if there else None
            if known is None or known.moving is None or not known.process.is_alive():
                raise Gone(f"VM {self._name} has ended")
            network.leave_bridge(self._name)
            manifest.write(home, replace(known, moving=replace(known.moving, handed_over=True)))
            self._handed_over.set()

    def _settle(self, stack: ExitStack) -> Sequence[Stage]:
        """Learn what the other host made of the VM, and do what follows."""
        link, pause, asked = self._link, 0.0, ""
        self._wake.clear()
        while True:
            if self._closed.is_set() or (self._wake.wait(pause) and self._closed.is_set()):
                raise Unknown(f"VM {self._name} was handed over, and the agent ends", hint="the next one goes on")
            if self._absent:
                answer = "absent"
                break
            known = manifest.read(self._paths.home)
            if known is None or not known.handed_over:
                raise Gone(f"VM {self._name} was destroyed")
            self._token = known.token
            try:
                link = link or HostLink(self._dial("settle"))
                answer = self._ask(link, known)
                break
            except MultiverseError as error:
                if str(error) != asked:
                    log.warning("VM handed over, and no answer yet", vm=self._name, reason=str(error))
                asked = str(error)
                if link is not None:
                    link.close()
                link = None
            pause = min(max(2 * pause, _AGAIN), _AGAIN_LIMIT)
        self._timer("take over")
        stack.close()  # QEMU serves one connection
        try:
            if answer == "received" and link is not None:
                self._remove(self._known())
                with suppress(MultiverseError):
                    link.send(type="removed")
                self._timer("remove")
                log.info("VM moved", vm=self._name, move=self.number, to=self._moving.address)
                return self._timer.stages
        finally:
            if link is not None:
                link.close()
        self._give_up(
            Broken(f"{self._moving.address} has no VM {self._name} any more", hint="see the log of its agent")
        )

    def _ask(self, link: HostLink, known: Manifest) -> str:
        """Hand the VM over. Whether the other host has `received` it or it is `absent` there."""
        link.send(
            type="handed_over",
            manifest=MANIFESTS.dump_python(replace(known, moving=None), mode="json"),
            outputs=self._outputs(known),
        )
        answer = str(link.receive(_DECIDED).get("type"))
        if answer not in ("received", "absent"):
            raise Unknown(f"the other host has answered {answer!r}")
        return answer

    def _outputs(self, known: Manifest) -> dict[str, str]:
        """What QEMU's log and the console end with, by the names of their files."""
        found = {}
        self._host.outputs.save(self._name, known.process, self._paths.outputs)
        for path in self._paths.outputs:
            with suppress(OSError):
                found[path.name] = path.read_bytes()[-_TAIL:].decode("latin-1")
        return found

    def _remove(self, known: Manifest) -> None:
        pause = _AGAIN
        while True:
            try:
                return lifecycle.remove(self._host, self._name, 0.0, known.token)
            except MultiverseError as error:
                log.warning("VM moved, and its remains are left", vm=self._name, reason=str(error))
                if self._closed.wait(pause):
                    raise Unknown(f"VM {self._name} has moved, and its remains are left: {error.message}") from error
            pause = min(2 * pause, _AGAIN_LIMIT)


def _why_not(known: Manifest, number: int) -> str:
    if known.moving is not None:
        return "it is moving already"
    if number <= known.moved:
        return f"its move {number} has ended"
    if known.phase is not VmPhase.STARTED:
        return "it is not started"
    if known.job_groups:
        return "it is inside of a job"
    if known.checkpoint:
        return "a checkpoint of it is being made"
    if known.frozen or known.freezing or known.kept:
        return "its job is being saved, or resumed"
    return ""
