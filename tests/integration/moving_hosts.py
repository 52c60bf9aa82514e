"""Two hosts whose VMs move to each other, as processes with the host library in network namespaces of their own.

`python -m tests.integration.moving_hosts CONFIG PORT` is one of them: it reads a call from each line of its input, and
writes what comes of it to a line of its output. It has a bridge, which a cable connects with that of the other host.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import structlog
from pydantic import TypeAdapter

from multiverse.config import HostSettings, ImageSettings, QemuSettings, Settings
from multiverse.core import errors
from multiverse.core.errors import MultiverseError
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.identity import Daemon, GuestFile, Identity, NodeBootstrap, User
from multiverse.core.model.vm import TemplateKey
from multiverse.drivers.qemu.driver import host_config
from multiverse.host import links, manifest, network
from multiverse.host.cgroups import hierarchies
from multiverse.host.links import MoveListener, MovePeer
from multiverse.host.manifest import Specification
from multiverse.host.process import kill
from multiverse.host.qemu import arrivals, departures, migration
from multiverse.host.qemu.channels import Monitor
from multiverse.host.qemu.context import MoveConfig, QemuHostConfig
from multiverse.host.qemu.library import QemuHost
from multiverse.system.processes import ProcessIdentity
from tests.integration.watch import until

SITE = "mvtwo"
BRIDGE = "mvbr"
CABLE = "cable"
NETWORK = "10.97.1"
ADDRESSES = {"a": f"{NETWORK}.251", "b": f"{NETWORK}.252"}
PORT = 14790
WATCHED = 7000
BASE = Size(1, 256)
PLUGGED = Size(2, 384)
SECRET = "secret"

# Notes the time each millisecond, and writes and verifies a file. It tells of itself whoever connects.
WATCH = """
import json, os, socket, sys, time
with open("/dev/console", "w") as console: console.write("the watch begins\\n")
def block(n): return (b"%09d " % n) * 6553 + b"012345"
file = os.open("/root/blocks", os.O_RDWR | os.O_CREAT)
listening = socket.create_server(("", PORT))
listening.setblocking(False)
count = written = wrong = 0
gap, last = 0.0, time.monotonic()
while True:
    time.sleep(0.001)
    now = time.monotonic()
    gap, last = max(gap, now - last), now
    count += 1
    if count % 10 == 0 and written < 4000:
        os.pwrite(file, block(written), written % 200 << 16)
        written += 1
        if written % 50 == 0: os.fsync(file)
        old = (written * 7919) % min(written, 200)
        expected = block(written - 1 - (written - 1 - old) % 200)
        wrong += os.pread(file, 65536, old << 16) != expected
    try:
        found, _ = listening.accept()
    except BlockingIOError:
        continue
    with found:
        found.setblocking(True)
        found.sendall(json.dumps({"count": count, "written": written, "wrong": wrong, "gap": gap,
                                  "time": time.time()}).encode())
    gap, last = 0.0, time.monotonic()
""".replace("PORT", str(WATCHED))

# --- one host ----------------------------------------------------------------------------------------

_MODULES = {"arrivals": arrivals, "departures": departures, "manifest": manifest, "network": network,
            "migration": migration, "links": links}  # fmt: skip


class Served:
    """The calls of one host."""

    def __init__(self, config: QemuHostConfig, address: str) -> None:
        self.host = QemuHost(config)
        self.host.check()
        assert self.host.moves is not None and config.moves is not None
        self.moves = self.host.moves
        pair = None if config.moves.private else links.certificate(config.cache)
        self.certificate = pair[0].read_text() if pair is not None else ""
        self.listener = MoveListener(links.listen(address, PORT), pair, self.moves.serve)
        self.moves.resume()

    def build(self, image: str) -> None:
        self.host.build_template(TemplateKey(self.host.config.host, image, BASE))

    def create(self, spec: dict[str, Any]) -> None:
        self.host.create(TypeAdapter(Specification).validate_python(spec))

    def start(self, spec: dict[str, Any], script: str) -> None:
        made = TypeAdapter(Specification).validate_python(spec)
        files = (GuestFile("/root/watch.py", script.encode(), 0o755),)
        daemons = (Daemon("watch", ("/usr/bin/python3", "/root/watch.py")),)
        bootstrap = NodeBootstrap(files=files, daemons=daemons)
        self.host.start(made.name, made.size, Identity(made.name, made.mac, made.address, "", "1" * 32,
                                                       bootstrap=bootstrap))  # fmt: skip

    def receive(self, spec: dict[str, Any], number: int) -> dict[str, Any]:
        self.moves.receive(TypeAdapter(Specification).validate_python(spec), number, SECRET)
        return {"port": self.listener.port, "certificate": self.certificate}

    def send(self, name: str, token: str, number: int, address: str, offer: dict[str, Any]) -> dict[str, float]:
        peer = MovePeer(address, offer["port"], offer["certificate"])
        return {stage.name: stage.seconds for stage in self.moves.send(name, token, number, SECRET, peer)}

    def cancel(self, name: str, number: int, absent: bool = False) -> str:
        return self.moves.cancel(name, "", number, absent=absent)

    def observe(self) -> dict[str, Any]:
        self.host.resume_paused()
        return {name: [str(seen.condition), seen.reason] for name, seen in self.host.observe().vms.items()}

    def running(self, name: str) -> bool:
        """Whether the guest's CPUs run, whatever is recorded. Who goes on with a move has QEMU's monitor meanwhile."""
        deadline = time.monotonic() + 60
        while True:
            known = manifest.read(self.host.config.vms / name)
            if known is None or not known.process.is_alive():
                return False
            try:
                with Monitor.connect(self.host.config.run / name / "qmp", 2.0) as monitor:
                    return bool(monitor.execute("query-status")["running"])
            except errors.Unknown:
                if time.monotonic() > deadline:
                    raise

    def qmp(self, name: str, command: str) -> Any:
        with Monitor.connect(self.host.config.run / name / "qmp", 2.0) as monitor:
            return monitor.execute(command)

    def examine(self, name: str) -> dict[str, Any]:
        return dict(self.host.examine(name))

    def watched(self, address: str) -> dict[str, Any]:
        with socket.create_connection((address, WATCHED), 10) as sock:
            data = b""
            while piece := sock.recv(4096):
                data += piece
        return dict(json.loads(data))

    def add_user(self, name: str) -> None:
        self.host.add_user(name, User("late", 4711, 4711, "/home/late", "/bin/sh", (("late", 4711),)))

    def seen(self, name: str) -> dict[str, Any]:
        seen = self.host.observe().vms[name]
        return {"users": seen.users_added, "size": str(seen.size), "disk": seen.disk, "token": seen.token}

    def is_moving(self, name: str) -> bool:
        """Whether a move of the VM from here has not ended yet."""
        known = manifest.read(self.host.config.vms / name)
        return known is not None and known.moving is not None

    def destroy(self, name: str) -> None:
        self.host.destroy(name, 0.0)

    def kill_qemu(self, name: str) -> None:
        self.host.kill([name])

    def die(self, module: str, function: str, after: bool) -> None:
        """Let this process be killed where it next calls that function, or after the call."""
        owner: Any = _MODULES[module]
        *path, last = function.split(".")
        for part in path:
            owner = getattr(owner, part)
        real = getattr(owner, last)

        def dying(*args: Any, **kwargs: Any) -> Any:
            if after:
                real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, last, dying)

    def sent(self) -> int:
        """Bytes that have left by the cable."""
        return int(Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes").read_text())

    def ip(self, command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True)


def serve(served: Served) -> None:
    lock = threading.Lock()

    def answer(call: dict[str, Any]) -> None:
        try:
            result = {"result": getattr(served, call["call"])(**call["with"])}
        except MultiverseError as error:
            result = {"error": type(error).__name__, "message": str(error)}
        except Exception as error:  # for the test that has called
            result = {"error": "Exception", "message": repr(error)}
        with lock:
            print(json.dumps({"id": call["id"], **result}), flush=True)

    for line in sys.stdin:
        threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()
    served.listener.close()
    served.host.close()
    os._exit(0)


def main() -> None:
    place, name = Path(sys.argv[1]), sys.argv[2]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    sys.stdin.readline()  # the cable is there
    has_bridge = Path(f"/sys/class/net/{BRIDGE}").exists()  # an earlier process has made it
    for command in (
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"addr add {ADDRESSES[name]}/24 dev {BRIDGE}",
        f"link set {CABLE} master {BRIDGE} up",
        f"link set {BRIDGE} up",
    ):
        if not has_bridge:
            subprocess.run(["ip", *command.split()], check=True)
    served = Served(TypeAdapter(QemuHostConfig).validate_json((place / "config.json").read_text()), ADDRESSES[name])
    print(json.dumps({"id": 0, "result": None}), flush=True)
    serve(served)


# --- both, for a test --------------------------------------------------------------------------------


class MovingHost:
    """One of the two hosts, seen from a test. Its namespaces stay when its process is killed."""

    def __init__(self, place: Path, name: str) -> None:
        self.place, self.name = place, name
        # What keeps the namespaces. Control groups of its own: both hosts have a VM of the same name.
        self.keeper = subprocess.Popen(["unshare", "--net", "--mount", "--", "sleep", "infinity"])
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._next = 0
        self.process: subprocess.Popen[str] | None = None

    def enter(self, *argv: str) -> list[str]:
        return ["nsenter", "--net", "--mount", "-t", str(self.keeper.pid), "--", *argv]

    def run(self, *argv: str) -> None:
        subprocess.run(self.enter(*argv), check=True)

    def begin(self) -> None:
        argv = self.enter(sys.executable, "-m", "tests.integration.moving_hosts", str(self.place), self.name)
        log = (self.place / "host.log").open("ab")
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"},
        )  # fmt: skip
        log.close()
        self._answers = {0: queue.Queue()}
        threading.Thread(target=self._read, args=(self.process, self._answers), daemon=True).start()
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self._answers[0].get(timeout=60)

    @staticmethod
    def _read(process: subprocess.Popen[str], answers: dict[int, queue.Queue[dict[str, Any]]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                answers[message["id"]].put(message)
        for waiting in list(answers.values()):
            waiting.put({"error": "Died", "message": "the host's process has ended"})

    def ask(self, call: str, /, **arguments: Any) -> Callable[[float], Any]:
        """Begin a call. The result waits for its answer, and raises its error; `Unknown` if the process has ended."""
        self._next += 1
        number, waiting = self._next, queue.Queue[dict[str, Any]]()
        self._answers[number] = waiting
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"id": number, "call": call, "with": arguments}) + "\n")
        except OSError:
            waiting.put({"error": "Died", "message": "the host's process has ended"})

        def wait(timeout: float = 60.0) -> Any:
            message = waiting.get(timeout=timeout)
            if "error" in message:
                raise getattr(errors, message["error"], errors.Unknown)(message["message"])
            return message["result"]

        return wait

    def call(self, call: str, /, **arguments: Any) -> Any:
        return self.ask(call, **arguments)(120.0)

    def end(self) -> None:
        """End the process as `multiverse agent` ends."""
        assert self.process is not None and self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait(30)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        for left in _processes_below(self.place):
            kill(left)
        self.keeper.kill()
        self.keeper.wait()


def _processes_below(place: Path) -> Iterator[ProcessIdentity]:
    """Those with a path below that one in their command line, as each QEMU has it, also one that nobody has
    recorded."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(f"{place}/") in entry.read_bytes():
                yield ProcessIdentity.of(int(entry.parent.name))


class MovingHosts:
    """Two hosts, and VMs that move between them."""

    def __init__(self, place: Path, memory: Path, images: Path, moves: MoveConfig) -> None:
        self.place, self.memory = place, memory
        self.numbers: dict[str, int] = {}
        self.sent_before = 0  # bytes by the cable, when the last move was begun
        self._serials = itertools.count(1)
        self.groups: list[Path] = []
        self.hosts: dict[str, MovingHost] = {}
        for name, size in zip(ADDRESSES, ((4, 8192), (3, 6144)), strict=True):  # VMs move to and from smaller hosts
            home = place / name
            home.mkdir()
            home.chmod(0o711)
            qemu = QemuSettings(images=images, templates=memory / name, vms=home / "vms", run=home / "run",
                                bridge=BRIDGE, accel="tcg")  # fmt: skip
            settings = Settings(state_dir=home, host=HostSettings(name, *size), qemu=qemu,
                                image=ImageSettings(scratch=512))  # fmt: skip
            config = replace(host_config(settings, SITE), moves=moves)
            (home / "config.json").write_text(json.dumps(asdict(config), default=str))
            self.hosts[name] = MovingHost(home, name)
        self.a, self.b = self.hosts.values()
        time.sleep(0.2)
        for host in self.hosts.values():
            self._separate(host)
        self._shares = True
        self.share(False)
        pids = [str(host.keeper.pid) for host in self.hosts.values()]
        subprocess.run(["ip", "link", "add", CABLE, "netns", pids[0], "type", "veth", "peer", "name", CABLE, "netns",
                        pids[1]], check=True)  # fmt: skip
        for host in self.hosts.values():
            host.begin()

    def share(self, shares: bool) -> None:
        """Whether each host sees the directory of the other one, by the same path."""
        if shares != self._shares:
            for host, other in ((self.a, self.b), (self.b, self.a)):
                hide = ("mount", "-t", "tmpfs", "-o", "mode=0711", "tmpfs")
                host.run(*(("umount",) if shares else hide), str(other.place))
            self._shares = shares

    def configure(self, moves: MoveConfig, shares: bool = False) -> None:
        """Let VMs move like this from now on, with new processes, no VM, and the cable in place."""
        self.share(shares)
        for host in self.hosts.values():
            if host.process is not None and host.process.poll() is None:
                host.end()
            path = host.place / "config.json"
            config = TypeAdapter(QemuHostConfig).validate_json(path.read_text())
            path.write_text(json.dumps(asdict(replace(config, moves=moves)), default=str))
            host.run("ip", "link", "set", CABLE, "up")
            host.begin()
            for name in host.call("observe"):
                host.call("destroy", name=name)

    def _separate(self, host: MovingHost) -> None:
        """Show the host control groups of its own."""
        commands = ["mount --make-rprivate /", "mount -t sysfs sysfs /sys"]
        for each in hierarchies():
            mounted = each.parent.parent
            group = mounted / f"mvtwo-{os.getpid()}-{host.name}"
            group.mkdir(exist_ok=True)
            self.groups.append(group)
            if each.version == 2:
                continue
            commands.append(f"mount --bind /proc/{os.getpid()}/root{group} {mounted}")
        script = " && ".join(
            [commands[0], "mkdir -p /run/mvtwo", "mount --rbind /sys/fs/cgroup /run/mvtwo", commands[1],
             "mount --rbind /run/mvtwo /sys/fs/cgroup", "umount -R /run/mvtwo", *commands[2:]]
        )  # fmt: skip
        subprocess.run(host.enter("/bin/sh", "-c", script), check=True)

    def spec(self, kind: CloneKind = CloneKind.INSTANT, size: Size = PLUGGED) -> Specification:
        serial = next(self._serials)
        template = TemplateKey("a", "slim", BASE) if kind is CloneKind.INSTANT else None
        return Specification(
            name=f"mv{SITE}-{serial}", host="a", image="slim", kind=kind, size=size, mac=f"02:00:5e:01:02:{serial:02x}",
            template=template, token=f"token-{serial}", address=f"{NETWORK}.{serial}/24", bridge=BRIDGE,
        )  # fmt: skip

    def run(self, spec: Specification, on: MovingHost | None = None, script: str = WATCH) -> None:
        on = on or self.a
        on.call("create", spec=asdict(spec))
        on.call("start", spec=asdict(spec), script=script)
        until("its program listens", lambda: self._listens(on, spec), 60)

    @staticmethod
    def _listens(on: MovingHost, spec: Specification) -> bool:
        try:
            return bool(on.call("watched", address=spec.bare_address))
        except errors.Unknown:
            return False

    def begin_move(self, spec: Specification, source: MovingHost, target: MovingHost) -> Callable[[float], Any]:
        self.sent_before = source.call("sent")
        self.numbers[spec.name] = number = self.numbers.get(spec.name, 0) + 1
        offer = target.call("receive", spec=asdict(replace(spec, host=target.name)), number=number)
        return source.ask("send", name=spec.name, token=spec.token, number=number, address=ADDRESSES[target.name],
                          offer=offer)  # fmt: skip

    def move(self, spec: Specification, source: MovingHost, target: MovingHost) -> dict[str, float]:
        return dict(self.begin_move(spec, source, target)(120.0))

    def running(self, spec: Specification) -> list[str]:
        """The hosts on which the guest runs."""
        return [name for name, host in self.hosts.items() if host.call("running", name=spec.name)]

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
        deadline = time.monotonic() + 5
        for group in self.groups:
            for path in (group / "multiverse").glob("*"):
                while path.is_dir() and time.monotonic() < deadline:
                    with contextlib.suppress(OSError):
                        path.rmdir()
            for path in (group / "multiverse", group):
                with contextlib.suppress(OSError):
                    path.rmdir()


@contextlib.contextmanager
def moving_hosts(images: Path, moves: MoveConfig) -> Iterator[MovingHosts]:
    place, memory = Path(tempfile.mkdtemp(prefix="mvm-")), Path(tempfile.mkdtemp(prefix="mvm-", dir="/dev/shm"))
    try:
        for path in (place, memory):
            path.chmod(0o711)
        hosts = MovingHosts(place, memory, images, moves)
        try:
            yield hosts
        finally:
            hosts.close()
    finally:
        shutil.rmtree(place)
        shutil.rmtree(memory)


if __name__ == "__main__":
    main()
