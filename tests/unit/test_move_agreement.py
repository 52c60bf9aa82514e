"""The agreement of two hosts about a VM that moves: whatever is lost or ends in the middle, the VM never runs on both,
and it runs on one again. QEMU, the network and the connections are stood in for; records and decisions are real."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multiverse.core.errors import Broken, Gone, MultiverseError, Refused, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.machine import MachineKind
from multiverse.host import links, manifest, network
from multiverse.host.links import HostLink, MoveHello, MovePeer
from multiverse.host.manifest import Manifest, Moving, Received, Specification, VmPhase
from multiverse.host.qemu import arrivals, departures, lifecycle, migration, moves, observation
from multiverse.host.qemu.context import MoveConfig
from multiverse.host.qemu.moves import VmMoves
from multiverse.host.qemu.observation import HostObserver
from multiverse.host.qemu.session import Paths
from multiverse.system.locks import locked_directory
from multiverse.system.processes import ProcessIdentity, boot_id
from tests.sampled import one_in

NAME, TOKEN, SECRET = "mvaaaaa-1", "token", "secret"
KIND = MachineKind("tcg", "max", frozenset(), "QEMU 7.2", "pc-q35-7.2")
SPEC = Specification(NAME, "b", "slim", CloneKind.LINKED, Size(1, 256), "02:00:00:00:00:01", token=TOKEN, bridge="br")
SOON = {"_READY": 2.0, "_COMPLETE": 2.0, "_DECIDED": 0.3, "_AGAIN": 0.01, "_AGAIN_LIMIT": 0.05, "_CANCELLED": 3.0,
        "_TALK": 0.5, "_CONNECTED": 1.0, "_ORPHANED": 0.15, "_ANNOUNCED_AGAIN": (), "_ANNOUNCED": 5.0}  # fmt: skip


class Crashed(BaseException):
    """The process of a host has ended."""


_here = threading.local()  # the process that a thread belongs to


@dataclass
class Process:
    """One run of a host's agent."""

    world: World
    host: str
    dead: bool = False
    effects: int = 0
    crash: tuple[int, bool] | None = None  # at which effect, and whether that has been done
    moves: Any = None
    sockets: list[socket.socket] = field(default_factory=list)

    def effect(self, name: str, work: Callable[[], Any]) -> Any:
        """Do what outlives the process, or is seen by others, unless the process ends here."""
        if self.dead:
            raise Crashed
        self.effects += 1
        at = self.crash is not None and self.crash[0] == self.effects
        if at and self.crash is not None and not self.crash[1]:
            self.die()
        result = work()
        if at:
            self.die()
        return result

    def die(self) -> None:
        self.dead = True
        self.moves.close()
        for sock in self.sockets:
            links.shut_down(sock)
        raise Crashed


class Monitor:
    """Stands for QEMU's monitor."""

    def __init__(self, world: World, host: str) -> None:
        self.world, self.host = world, host

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None: ...

    def execute(self, command: str, **_: Any) -> Any:
        state = self.world.qemus.get(self.host, "")
        if not state:
            raise Unknown("QEMU has ended")
        return {"running": state == "running", "status": state}

    def wait_event(self, *_: Any, **__: Any) -> None:
        if self.world.qemus[self.host] != "complete":
            raise Unknown("it is not complete")


class Sender:
    """Stands for a QEMU that sends its VM."""

    def __init__(self, monitor: Monitor, *_: Any) -> None:
        self.monitor, self.world = monitor, monitor.world

    def flatten(self, _: Path) -> None: ...

    def send_disk(self, sock: socket.socket, *, whole: bool) -> None:
        self._send(sock)

    def send_memory(self, sock: socket.socket) -> None:
        self._send(sock)
        process().effect("stop", lambda: self.world.set("a", "stopped"))

    def _send(self, sock: socket.socket) -> None:
        with sock:
            pass
        if self.world.cut:
            raise Broken("its disk could not be copied")

    def end_disk(self) -> None: ...

    def end_memory(self) -> None:
        process().effect("send", lambda: self.world.set("b", "complete"))


def process() -> Process:
    return _here.process  # type: ignore[no-any-return]


class World:
    """Two hosts."""

    shared = True  # the hosts reach the same file system, and have the image at the same path

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place
        self.qemus: dict[str, str] = {}
        self.wrong: list[str] = []
        self.cut = False
        self.lost: int | None = None  # the number of the message that is lost, with its connection
        self.messages = 0
        self.programs: dict[str, subprocess.Popen[bytes]] = {}
        self.threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        for name, value in SOON.items():
            for module in (departures, arrivals):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)
        self._stand_in(monkeypatch)
        self.a, self.b = self.start("a"), self.start("b")

    # --- what is stood in for -------------------------------------------------------------------------

    def _stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def effect(owner: Any, name: str) -> None:
            real = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *args, **more: process().effect(name, lambda: real(*args, **more)))

        for name in ("write", "write_received", "forget_received"):
            effect(manifest, name)
        real_send = HostLink.send

        def send(link: HostLink, **message: Any) -> None:
            process().effect(f"say {message['type']}", lambda: self._say(real_send, link, message))

        monkeypatch.setattr(HostLink, "send", send)
        for name in ("join_bridge", "leave_bridge", "set_isolated", "announce"):
            monkeypatch.setattr(network, name, lambda *args: process().effect("network", lambda: None))
        monkeypatch.setattr(network, "bridge_of", lambda name: ("br", True))
        connect = SimpleNamespace(connect=lambda path, *_: Monitor(self, path.parts[len(self.place.parts)]))
        for module in (departures, arrivals):
            monkeypatch.setattr(module, "Monitor", connect)
        monkeypatch.setattr(departures, "Sender", Sender)
        monkeypatch.setattr(departures, "backends_of", lambda monitor: ())
        monkeypatch.setattr(departures, "dial", self._dial)
        monkeypatch.setattr(migration, "stay", lambda monitor: process().effect("stay", lambda: self.run("a")))
        monkeypatch.setattr(migration, "go_on", lambda monitor: process().effect("cont", lambda: self.run("b")))
        monkeypatch.setattr(migration, "is_complete", lambda monitor: self.qemus.get("b") == "complete")
        monkeypatch.setattr(migration, "serve_disk", lambda monitor, path: None)
        monkeypatch.setattr(migration, "connect_disk", lambda path: socket.socketpair()[0])
        monkeypatch.setattr(migration, "receive_memory", lambda monitor, sock, **_: sock.close())
        monkeypatch.setattr(arrivals.IncomingVms, "_launch", self._launch)
        monkeypatch.setattr(lifecycle, "remove", self._remove)
        monkeypatch.setattr(moves.VmMoves, "_start", lambda _, work: self.thread(process(), work))

    def _say(self, real: Callable[..., None], link: HostLink, message: dict[str, Any]) -> None:
        self.messages += 1
        if self.messages == self.lost:
            link.shut_down()
        real(link, **message)

    def _dial(self, peer: MovePeer, hello: MoveHello, _: int | None = None) -> socket.socket:
        caller = process()
        if self.b.dead:
            raise Unknown("nobody listens")
        if caller.dead:
            raise Crashed
        ours, theirs = socket.socketpair()
        caller.sockets.append(ours)
        self.b.sockets.append(theirs)

        def serve() -> None:
            with suppress(Refused, Unknown), theirs:
                _here.process.moves.serve(theirs, hello)

        self.thread(self.b, serve)
        return ours

    def _launch(self, spec: Specification, arrival: Any, facts: Any, image: Any, link: HostLink) -> Any:
        announced = arrival.announced
        known = replace(facts.manifest, **self.program("b"), moved=announced.number - 1, phase=VmPhase.INCOMING,
                        moving=Moving(announced.number, announced.secret, bridge="br"))  # fmt: skip
        home = self.place / "b/vms" / NAME
        process().effect("record", lambda: (home / manifest.FILE).write_text(as_text(known)))
        arrivals.share_disk(facts, image, Paths(home, home), link)
        process().effect("launch", lambda: self.set("b", "incoming"))
        return SimpleNamespace(monitor=Monitor(self, "b"))

    def _remove(self, host: Any, name: str, grace: float, token: str = "") -> None:
        def remove() -> None:
            with locked_directory(host.paths(name).home, create=False) as there:
                self.set(host.config.host, "")
                if there:
                    shutil.rmtree(host.paths(name).home)

        process().effect("remove", remove)

    def program(self, host: str) -> dict[str, Any]:
        """A process that stands for the VM's QEMU, as a manifest describes it."""
        program = self.programs[host] = subprocess.Popen(["sleep", "1000"])
        identity = ProcessIdentity.of(program.pid)
        return {"pid": identity.pid, "started": identity.started, "boot_id": boot_id()}

    # --- what is seen ---------------------------------------------------------------------------------

    def set(self, host: str, state: str) -> None:
        with self._lock:
            self.qemus[host] = state

    def run(self, host: str) -> None:
        with self._lock:
            other = "b" if host == "a" else "a"
            if self.qemus.get(other) == "running":
                self.wrong.append(f"it runs on {host}, and on {other}")
            if self.qemus.get(host):
                self.qemus[host] = "running"

    def running(self) -> list[str]:
        with self._lock:
            return sorted(host for host, state in self.qemus.items() if state == "running")

    def phase(self, host: str) -> Manifest | None:
        return manifest.read(self.place / host / "vms" / NAME)

    # --- what happens ---------------------------------------------------------------------------------

    def start(self, host: str, crash: tuple[int, bool] | None = None) -> Process:
        made = Process(self, host, crash=crash)
        around = context(self.place / host, host)
        if not self.shared:
            around.image = lambda name: SimpleNamespace(key="key", disk=Path(f"/{host}/image"))
        made.moves = VmMoves(around, MoveConfig(private=True))
        setattr(self, host, made)
        self.thread(made, made.moves.resume).join()
        return made

    def thread(self, of: Process, work: Callable[[], Any]) -> threading.Thread:
        def run() -> None:
            _here.process = of
            with suppress(Crashed):
                work()

        found = threading.Thread(target=run, daemon=True)
        self.threads.append(found)
        found.start()
        return found

    def make_vm(self) -> None:
        home = self.place / "a/vms" / NAME
        home.mkdir()
        (home / "disk.qcow2").write_text("written by the guest")
        known = Manifest(NAME, SPEC.kind, VmPhase.STARTED, SPEC.mac, 1, 256, token=TOKEN, image="slim",
                         address="10.0.0.1", **self.program("a"))  # fmt: skip
        (home / manifest.FILE).write_text(as_text(known))
        self.set("a", "running")

    def move(self, number: int = 1) -> threading.Thread:
        """Begin a move, as the controller does."""

        def send() -> None:
            with suppress(MultiverseError):
                self.a.moves.send(NAME, TOKEN, number, SECRET, MovePeer("b", 1))

        def receive() -> None:
            with suppress(MultiverseError):
                self.b.moves.receive(SPEC, number, SECRET)

        self.thread(self.b, receive).join(5)
        return self.thread(self.a, send)

    def settled(self, seconds: float = 5.0) -> None:
        """The VM runs on one host, and nothing of it is left on the other one."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            known = [self.phase(host) for host in ("a", "b")]
            there = [one for one in known if one is not None]
            if len(self.running()) == 1 and len(there) == 1 and there[0].moving is None:
                return self.check_disk()
            time.sleep(0.005)
        raise AssertionError(f"{self.qemus}, {[self.phase(host) for host in ('a', 'b')]}")

    def check_disk(self) -> None:
        """The disk is where the VM runs, and the other host has no name of it left."""
        (host,) = self.running()
        disk = self.place / host / "vms" / NAME / "disk.qcow2"
        assert disk.exists() == (host == "a" or self.shared)
        if disk.exists():
            assert (disk.read_text(), disk.stat().st_nlink) == ("written by the guest", 1)
        assert not list(self.place.glob(f"*/vms/{NAME}/{departures.SHARED}")) or host == "b"

    def close(self) -> None:
        for host in (self.a, self.b):
            with suppress(Crashed):
                host.die()
        self._end_programs()
        for thread in self.threads:
            thread.join(5)
        self._end_programs()  # which a thread has begun meanwhile

    def _end_programs(self) -> None:
        while self.programs:
            _, program = self.programs.popitem()
            program.kill()
            program.wait()


def as_text(known: Manifest) -> str:
    return str(departures.MANIFESTS.dump_json(known), "utf-8")


def context(place: Path, host: str) -> Any:
    (place / "vms").mkdir(parents=True, exist_ok=True)

    @contextmanager
    def nothing(*_: Any) -> Iterator[None]:
        yield

    quiet = SimpleNamespace(
        sessions={}, keep_channel=lambda *_: None, started_channel=lambda name: SimpleNamespace(tell=lambda *_: None)
    )
    return SimpleNamespace(
        config=SimpleNamespace(vms=place / "vms", host=host, prefix="mvaaaaa-"),
        paths=lambda name: Paths(place / "vms" / name, place / "run" / name),
        check_name=lambda name: None,
        image=lambda name: SimpleNamespace(key="key", disk=Path("/image")),
        machine_kind=lambda: KIND,
        most_of=lambda known, image: Size(known.cpus, known.memory),
        connections=quiet,
        firewall=SimpleNamespace(allow=lambda known: None, separates=lambda known: False, group=lambda known: 0),
        names=SimpleNamespace(first=lambda *_: frozenset()),
        outputs=SimpleNamespace(save=lambda *_: None, append=lambda *_: None),
        uids=SimpleNamespace(check=lambda: None),
        accelerator=SimpleNamespace(name="tcg"),
        vxlan=None,
    )


@pytest.fixture(params=["shared", "apart"])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr("multiverse.system.files.write_back", lambda path: None)
    monkeypatch.setattr(World, "shared", request.param == "shared")
    made = World(tmp_path, monkeypatch)
    made.make_vm()
    try:
        yield made
    finally:
        made.close()
        assert made.wrong == []


def test_a_vm_moves(world: World) -> None:
    world.move().join(5)
    world.settled()
    assert world.running() == ["b"]
    known = world.phase("b")
    assert known is not None and (known.phase, known.moved, known.address) == (VmPhase.STARTED, 1, "10.0.0.1")


CRASHES = [(host, number, done) for host in "ab" for number in range(1, 27) for done in (False, True)]


@pytest.mark.parametrize("crash", one_in(3, CRASHES), ids=str)
def test_a_process_ends_at_any_step(world: World, crash: tuple[str, int, bool]) -> None:
    """It ends before or after its step of that number, and another process goes on."""
    host, number, done = crash
    process: Process = getattr(world, host)
    process.crash = (process.effects + number, done)
    moving = world.move()
    deadline = time.monotonic() + 3
    while not process.dead and moving.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    if process.dead:
        world.start(host)
    world.settled()


@pytest.mark.parametrize("lost", range(1, 12))
def test_a_message_is_lost_with_its_connection(world: World, lost: int) -> None:
    world.lost = lost
    world.move().join(5)
    world.settled()


def test_both_processes_end_after_it_was_handed_over(world: World) -> None:
    """`say handed_over` is the effect after which the source may not continue by itself."""
    real = world.a.effect

    def effect(name: str, work: Callable[[], Any]) -> Any:
        if name == "say handed_over":
            world.b.dead = True  # what it is told is lost with it
            world.a.die()
        return real(name, work)

    world.a.effect = effect  # type: ignore[method-assign]
    world.move().join(5)
    assert world.running() == []
    known = world.phase("a")
    assert known is not None and known.handed_over
    for host in (world.b, world.a):
        with suppress(Crashed):
            host.die()
    world.start("a")
    time.sleep(0.05)
    assert world.running() == [], "nobody has said that the other host has none"
    world.start("b")
    world.settled()
    assert world.running() == ["b"], "all of it had come"


def stuck(world: World) -> threading.Thread:
    """A move that was handed over, to a host that is out of reach now. It has not been taken over there."""
    real, first = world.a.effect, world.b

    def effect(name: str, work: Callable[[], Any]) -> Any:
        if name == "say handed_over" and not first.dead:
            with suppress(Crashed):
                world.b.die()
            raise Unknown("the cable was cut")
        return real(name, work)

    world.a.effect = effect  # type: ignore[method-assign]
    moving = world.move()
    deadline = time.monotonic() + 3
    while not world.b.dead and time.monotonic() < deadline:
        time.sleep(0.002)
    return moving


def call(of: Process, work: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except MultiverseError as error:
            found.append(error)

    of.world.thread(of, run).join(60)
    return found[0]


def test_the_controller_carries_the_word_that_the_other_host_has_none(world: World) -> None:
    moving = stuck(world)
    assert call(world.a, lambda: world.a.moves.cancel(NAME, TOKEN, 1)) == "handed_over"
    assert world.running() == [], "only `absent` lets it go on"
    assert call(world.a, lambda: world.a.moves.cancel(NAME, TOKEN, 1, absent=True)) == "kept"
    moving.join(3)
    assert world.running() == ["a"]
    again = call(world.a, lambda: world.a.moves.send(NAME, TOKEN, 1, SECRET, MovePeer("b", 1)))
    assert isinstance(again, MultiverseError), "it says how that move ended"


def test_a_host_that_took_a_vm_over_says_so_when_the_vm_is_gone(world: World) -> None:
    """Otherwise the job would go on from an old state, after it has ended."""
    stuck(world)
    (world.place / "b/vms").mkdir(exist_ok=True)
    _here.process = Process(world, "b", moves=world.b.moves)
    manifest.write_received(world.place / "b/vms", NAME, Received(TOKEN, 1))
    shutil.rmtree(world.place / "b/vms" / NAME)
    world.set("b", "")
    world.start("b")
    deadline = time.monotonic() + 3
    while world.phase("a") is not None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert world.phase("a") is None and world.running() == []
    assert call(world.b, lambda: world.b.moves.cancel(NAME, TOKEN, 1)) in ("received", "absent")


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_move_is_cancelled_at_both_hosts_in_either_order(world: World, first: str) -> None:
    order = [world.a, world.b] if first == "a" else [world.b, world.a]
    moving = world.move()
    time.sleep(0.01)
    ends = {host.host: call(host, lambda host=host: host.moves.cancel(NAME, TOKEN, 1)) for host in order}
    moving.join(5)
    world.settled()
    if world.running() == ["a"]:
        assert ends["b"] == "absent"
        again = call(world.a, lambda: world.a.moves.send(NAME, TOKEN, 1, SECRET, MovePeer("b", 1)))
        assert isinstance(again, MultiverseError) and world.running() == ["a"]
        assert isinstance(call(world.b, lambda: world.b.moves.receive(SPEC, 1, SECRET)), Refused)
        world.move(2).join(5)
        world.settled()
        assert world.running() == ["b"]


def test_nothing_comes_that_nobody_has_announced(world: World) -> None:
    for hello in (
        MoveHello(NAME, TOKEN, 1, SECRET, "control"),
        MoveHello(NAME, TOKEN, 1, SECRET, "disk"),
        MoveHello(NAME, TOKEN, 1, SECRET, "anything"),
    ):
        assert isinstance(
            call(world.b, lambda hello=hello: world.b.moves.serve(socket.socketpair()[0], hello)), Refused
        )
    call(world.b, lambda: world.b.moves.receive(SPEC, 1, SECRET))
    for wrong in (
        MoveHello(NAME, TOKEN, 1, "guessed", "control"),
        MoveHello(NAME, "other", 1, SECRET, "control"),
        MoveHello(NAME, TOKEN, 2, SECRET, "control"),
    ):
        assert isinstance(
            call(world.b, lambda wrong=wrong: world.b.moves.serve(socket.socketpair()[0], wrong)), Refused
        )
    assert NAME in world.b.moves.coming() and world.phase("b") is None


def test_a_vm_that_is_saved_or_inside_of_a_job_does_not_move(world: World) -> None:
    known = world.phase("a")
    assert known is not None
    for changed, why in (
        (replace(known, frozen=True), "saved"),
        (replace(known, job_groups=("/sys/fs/cgroup/x",)), "inside of a job"),
        (replace(known, phase=VmPhase.PARKED), "not started"),
        (replace(known, moved=9), "has ended"),
    ):
        (world.place / "a/vms" / NAME / manifest.FILE).write_text(as_text(changed))
        world.a.moves._departures.clear()
        found = call(world.a, lambda: world.a.moves.send(NAME, TOKEN, 3, SECRET, MovePeer("b", 1)))
        assert isinstance(found, Refused) and why in found.message
    other = call(world.a, lambda: world.a.moves.send(NAME, "other", 10, SECRET, MovePeer("b", 1)))
    assert isinstance(other, Refused) and world.running() == ["a"]


def test_a_host_that_makes_another_machine_takes_no_vm(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter([KIND, replace(KIND, release="QEMU 8")])  # asked by the first host, then by the other one
    monkeypatch.setattr(world.a.moves._host, "machine_kind", lambda: next(made))
    monkeypatch.setattr(world.b.moves._host, "machine_kind", lambda: next(made))
    call(world.b, lambda: world.b.moves.receive(SPEC, 1, SECRET))
    found = call(world.a, lambda: world.a.moves.send(NAME, TOKEN, 1, SECRET, MovePeer("b", 1)))
    assert isinstance(found, Refused) and "it has QEMU QEMU 8, not QEMU 7.2" in found.message
    world.settled()
    assert world.running() == ["a"]


def test_a_vm_keeps_the_cpu_model_that_it_was_started_with(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings may have been changed since. The host that receives it runs that model, too, or refuses the VM."""
    known = manifest.read(world.place / "a/vms" / NAME)
    assert known is not None
    call(world.a, lambda: manifest.write(world.place / "a/vms" / NAME, replace(known, cpu="Haswell-v2")))
    now = replace(KIND, accelerator="kvm", cpu="Skylake-Server-v3")
    made = [
        now,
        now,
        now,
        replace(now, models=("Haswell-v2",)),
    ]  # asked by a, then by b, twice
    for host in (world.a, world.b):
        monkeypatch.setattr(host.moves._host, "machine_kind", lambda: made.pop(0))
    call(world.b, lambda: world.b.moves.receive(SPEC, 1, SECRET))
    found = call(world.a, lambda: world.a.moves.send(NAME, TOKEN, 1, SECRET, MovePeer("b", 1)))
    assert isinstance(found, Refused) and "does not run guests with CPU model Haswell-v2" in found.message
    call(world.b, lambda: world.b.moves.receive(SPEC, 2, SECRET))
    call(world.a, lambda: world.a.moves.send(NAME, TOKEN, 2, SECRET, MovePeer("b", 1)))
    world.settled()
    assert world.running() == ["b"]


def test_a_vm_that_was_destroyed_meanwhile_is_gone(world: World) -> None:
    stuck(world)
    shutil.rmtree(world.place / "a/vms" / NAME)
    world.set("a", "")
    found = call(world.a, lambda: world.a.moves.send(NAME, TOKEN, 1, SECRET, MovePeer("b", 1)))
    assert isinstance(found, Gone)


def test_a_vm_that_was_saved_and_resumed_moves_by_the_same_numbers_again(world: World) -> None:
    """What each host remembers of the earlier moves says nothing of the later ones."""
    world.move().join(5)
    world.settled()
    manifest_of_b = world.place / "b/vms" / NAME
    shutil.rmtree(manifest_of_b)  # it was saved there
    world.set("b", "")
    _here.process = world.b
    manifest.write_received(world.place / "b/vms", NAME, Received(TOKEN, 1))  # nobody has said that all is removed
    call(world.a, lambda: world.a.moves.cancel(NAME, TOKEN, 1))
    world.make_vm()
    world.move().join(5)
    world.settled()
    assert world.running() == ["b"]


def test_a_vm_that_is_destroyed_before_it_has_come_does_not_come(world: World) -> None:
    call(world.b, lambda: world.b.moves.receive(SPEC, 1, SECRET))
    call(world.b, lambda: world.b.moves.withdraw(NAME))
    assert NAME not in world.b.moves.coming()
    hello = MoveHello(NAME, TOKEN, 1, SECRET, "control")
    assert isinstance(call(world.b, lambda: world.b.moves.serve(socket.socketpair()[0], hello)), Refused)
    assert isinstance(call(world.b, lambda: world.b.moves.receive(SPEC, 1, SECRET)), Refused)


def test_a_vm_that_moves_is_continued_by_nothing_else_and_shown_dead_once_it_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Paused(set[str]):
        def ask(self, name: str) -> None:
            asked.append(name)

    quiet = SimpleNamespace(poll_reports=lambda name: [], is_mute=lambda name: False)
    outputs = SimpleNamespace(save=lambda *_: None, finish=lambda name: None)
    host: Any = SimpleNamespace(
        config=SimpleNamespace(host="a", saves=None, copies=None), connections=quiet, outputs=outputs, paused=Paused(),
        paths=lambda name: Paths(tmp_path / name, tmp_path / "run" / name),
    )  # fmt: skip
    monkeypatch.setattr(observation, "_MEASURED_FOR", 0.0)
    monkeypatch.setattr("multiverse.host.process.cpu_seconds", lambda pid: 0.0)  # as of a guest that is paused
    own = ProcessIdentity.of(os.getpid())
    (tmp_path / NAME).mkdir()
    shown = []
    for moving in (None, Moving(1, SECRET, "10.0.0.2"), Moving(1, SECRET, "10.0.0.2", handed_over=True)):
        known = Manifest(NAME, SPEC.kind, VmPhase.STARTED, SPEC.mac, 1, 256, own.pid, own.started, boot_id(),
                         moving=moving)  # fmt: skip
        manifest.write(tmp_path / NAME, known)
        observer = HostObserver(host)
        for _ in range(2):  # it is asked only if it has used no CPU time since it was measured
            seen = observer._vm(tmp_path / NAME)
        shown.append((str(seen.condition), seen.reason, len(asked)))
    assert shown == [("running", "", 2), ("running", "", 2), ("dead", "it was handed over to 10.0.0.2", 2)]


class _Talk:
    """`HostLink` to a host whose answers are known."""

    def __init__(self, *answers: str) -> None:
        self.said: list[str] = []
        self._answers = iter(answers)

    def send(self, *, type: str) -> None:
        self.said.append(type)

    def receive(self, _: float) -> dict[str, str]:
        return {"type": next(self._answers)}


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        (lambda home: None, True),
        (lambda home: (home / departures.SHARED).write_text("another"), False),
        (lambda home: (home / departures.SHARED).unlink(), False),
        (lambda home: (home / "disk.qcow2").unlink(), False),
        (lambda home: home.chmod(0o777), False),
        (lambda home: home.rename(home.with_name("elsewhere")), False),
    ],
    ids=["there", "another word", "no word", "no disk", "anybody could change it", "elsewhere"],
)
def test_a_disk_is_shared_where_the_directory_of_the_other_host_is_seen(
    tmp_path: Path, change: Callable[[Path], Any], shared: bool
) -> None:
    home, image = tmp_path / "a", SimpleNamespace(disk=Path("/image"))
    for directory in (home, tmp_path / "b"):
        directory.mkdir()
    (home / departures.SHARED).write_text("word")
    (home / "disk.qcow2").write_text("written by the guest")
    facts = SimpleNamespace(shared=departures.SharedDisk(home, "word", image.disk), disk=0)
    change(home)
    paths, talk = Paths(tmp_path / "b", tmp_path / "b"), _Talk("ping", "flat")
    assert arrivals.share_disk(facts, image, paths, talk) == shared  # type: ignore[arg-type]
    assert (talk.said, paths.disk.exists()) == (["shares"] * shared, shared)
    if shared:
        paths.disk.unlink()
        with pytest.raises(Unknown, match="cancel"):
            arrivals.share_disk(facts, image, paths, _Talk("cancel"))  # type: ignore[arg-type]
