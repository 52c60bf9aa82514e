"""Compare our own code with the libraries that could replace it (docs/decisions/0019-libraries.md).

    pip install --target DIR psutil filelock qemu.qmp     # pyroute2 is installed with Multiverse
    apt-get download python3-nftables && dpkg -x python3-nftables_*.deb DEB
    PYTHONPATH=DIR:DEB/usr/lib/python3/dist-packages python -m multiverse_lab.bench.libraries

Each round runs our code and the library's once, in alternating order, so that other load affects both alike.
A table gives both medians and their ratio with a 95 % interval; a list of facts follows. A library that is not
installed is named and left out. Root, `unshare`, `nft`, `ip` and QEMU are needed. Links and rules are made in a network
namespace that ends with this process, and files in a temporary directory.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import fcntl
import importlib
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiverse.host import firewall, manifest, process, tap
from multiverse.host.nft import Nft
from multiverse.host.qemu.qmp import Command, Monitor
from multiverse.system.processes import ProcessIdentity
from multiverse_lab.bench.stats import median, ratio

BRIDGE, MAC = "mvbench", "02:4d:00:00:00:07"
_INSIDE = "MULTIVERSE_BENCH_NAMESPACE"

Action = Callable[[], Any]


def nothing() -> None:
    """No cleaning up is needed."""


@dataclass(frozen=True, slots=True)
class Case:
    """One operation done by our code and by a library. `restore` runs after each of them and is not timed."""

    operation: str
    ours: Action
    theirs: Action
    restore: Action = nothing
    rounds: int = 1000


@dataclass(frozen=True, slots=True)
class Row:
    """Medians in microseconds."""

    operation: str
    ours: float
    theirs: float
    ratio: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Fact:
    question: str
    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class Surrounding:
    """Where the measurements run: a temporary directory, and a QEMU whose VM is stopped."""

    directory: Path
    qmp: Path
    pid: int


def compare(pair: Case, scale: float) -> Row:
    """Time both in interleaved rounds; a tenth of the rounds comes first and does not count."""
    samples: tuple[list[float], list[float]] = ([], [])
    rounds = max(5, int(pair.rounds * scale))
    for number in range(-(rounds // 10) - 1, rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            action = (pair.ours, pair.theirs)[which]
            began = time.perf_counter_ns()
            taken = action()
            elapsed = (time.perf_counter_ns() - began) / 1000
            pair.restore()
            if number >= 0:  # an action that times itself returns its seconds
                samples[which].append(taken * 1e6 if isinstance(taken, float) else elapsed)
    estimate = ratio(samples[1], samples[0])
    assert estimate is not None
    return Row(
        pair.operation, median(samples[0]), median(samples[1]), estimate.value, estimate.low, estimate.high, rounds
    )


def optional(name: str) -> Any:
    """The module, or None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# ------------------------------------------------------------------------------------------ psutil


def psutil_pairs(psutil: Any, place: Surrounding) -> Iterator[Case]:
    pid, identity = place.pid, ProcessIdentity.of(place.pid)
    handle = psutil.Process(pid)
    created = handle.create_time()

    def same() -> bool:
        found = psutil.Process(pid)
        return bool(found.create_time() == created and found.status() not in ("zombie", "dead"))

    def usage() -> object:
        with handle.oneshot():
            return handle.cpu_times(), handle.memory_info()

    def found() -> list[int]:
        part = f"{place.qmp}"
        return [p.pid for p in psutil.process_iter(["cmdline"]) if any(part in a for a in p.info["cmdline"] or ())]

    yield Case("is a recorded process alive", identity.is_alive, same)
    yield Case("the same, psutil's object kept", identity.is_alive, handle.is_running)
    yield Case("CPU time and resident memory", lambda: (process.cpu_seconds(pid), process.resident_memory(pid)), usage)
    yield Case(
        "unique memory and PSS of a QEMU", lambda: process.exact_memory(pid), handle.memory_full_info, rounds=100
    )
    yield Case(
        "find processes by command line", lambda: list(process.find_by_argument(str(place.qmp))), found, rounds=100
    )


def psutil_facts(psutil: Any, place: Surrounding) -> Iterator[Fact]:
    """The clock is "set" by a copy of /proc whose boot time is a second later, as the kernel shows after a step."""
    pid = place.pid
    before = psutil.Process(pid).create_time()
    copy = place.directory / "proc"
    (copy / str(pid)).mkdir(parents=True)
    stat = Path("/proc/stat").read_text()
    btime = next(line for line in stat.splitlines() if line.startswith("btime"))
    (copy / "stat").write_text(stat.replace(btime, f"btime {int(btime.split()[1]) + 1}"))
    shutil.copyfile(f"/proc/{pid}/stat", copy / str(pid) / "stat")
    psutil.PROCFS_PATH = str(copy)
    after = psutil.Process(pid).create_time()
    psutil.PROCFS_PATH = "/proc"
    yield Fact("a recorded start time holds after the clock is set", "yes, by definition: clock ticks since boot",
               "yes" if before == after else f"no: it moved by {after - before:g} s")  # fmt: skip
    child = subprocess.Popen(["true"])
    zombie = ProcessIdentity.of(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield Fact("a zombie counts as running", "yes" if zombie.is_alive() else "no",
               "yes" if psutil.Process(child.pid).is_running() else "no")  # fmt: skip
    child.wait()


# ------------------------------------------------------------------------------------------ pyroute2


def open_tap(ip: Any, name: str) -> int:
    """What tap.open_tap does, with pyroute2 for all but the descriptor, which it has no call for."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    flags = tap.IFF_TAP | tap.IFF_NO_PI | tap.IFF_VNET_HDR
    fcntl.ioctl(fd, tap.TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    index = socket.if_nametoindex(name)
    ip.link("set", index=index, address="fe" + MAC[2:], master=socket.if_nametoindex(BRIDGE))
    ip.brport("set", index=index, isolated=1, unicast_flood=0)
    ip.link("set", index=index, state="up")  # with brport, "state" would be the port's state of spanning tree
    ip.fdb("add", ifindex=index, lladdr=MAC, state=tap.NUD_NOARP, flags=tap.NTF_MASTER)
    return fd


def pyroute2_pairs(pyroute2: Any, place: Surrounding) -> Iterator[Case]:
    kept = pyroute2.IPRoute()
    opened: list[int] = []

    def ours() -> None:
        opened.append(tap.open_tap("mvb-tap", BRIDGE, MAC))

    def theirs() -> None:
        opened.append(open_tap(kept, "mvb-tap"))

    def theirs_opened() -> None:
        with pyroute2.IPRoute() as ip:
            opened.append(open_tap(ip, "mvb-tap"))

    def close() -> None:
        while opened:
            os.close(opened.pop())

    yield Case("make a tap that is a bridge's port", ours, theirs, close, rounds=200)
    yield Case("the same, a socket for each", ours, theirs_opened, close, rounds=200)
    fd = tap.open_tap("mvb-port", BRIDGE, MAC)
    index = socket.if_nametoindex("mvb-port")
    yield Case("isolate a port", lambda: tap.set_isolated("mvb-port", True),
               lambda: kept.brport("set", index=index, isolated=1), rounds=500)  # fmt: skip
    octets = bytes.fromhex(MAC.replace(":", ""))
    entry = {"ifindex": index, "lladdr": MAC, "state": tap.NUD_NOARP, "flags": tap.NTF_MASTER}
    yield Case("one entry of the bridge's table", lambda: tap._add_fdb_entry(index, octets),
               lambda: kept.fdb("replace", **entry), rounds=500)  # fmt: skip
    os.close(fd)
    kept.close()


def port(name: str) -> str:
    """What the kernel says of a port: its flags, its address, and the entries of the bridge for it."""
    sys_net = Path("/sys/class/net") / name
    files = ("address", "flags", "brport/isolated", "brport/unicast_flood")
    words = [(sys_net / file).read_text().strip() for file in files]
    entries = subprocess.run(["bridge", "fdb", "show", "dev", name], capture_output=True, text=True, check=True).stdout
    return " ".join([*words, *sorted(line.strip() for line in entries.splitlines() if line.startswith(MAC))])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  (numbers, not paths)


def pyroute2_facts(pyroute2: Any, place: Surrounding) -> Iterator[Fact]:
    fd = tap.open_tap("mvb-fact", BRIDGE, MAC)
    ours = port("mvb-fact")
    os.close(fd)
    before = descriptors()
    with pyroute2.IPRoute() as ip:
        held = descriptors() - before
        fd = open_tap(ip, "mvb-fact")
        theirs = port("mvb-fact")
        os.close(fd)
        before = descriptors()
        for _ in range(20):
            user = threading.Thread(target=lambda: ip.link("set", index=1, state="up"))
            user.start()
            user.join()
        left = descriptors() - before
    yield Fact("the port in the kernel", ours, "the same" if ours == theirs else theirs)
    yield Fact("descriptors kept by each thread that has an object of its own", "0", str(held))
    yield Fact("descriptors left by 20 threads that used one object in turn and ended", "0", str(left))
    yield Fact("works where an event loop runs", "yes", in_loop(lambda: pyroute2.IPRoute().get_links()))


def in_loop(action: Action) -> str:
    """Does it work in a thread in which an event loop runs?"""

    async def run() -> str:
        try:
            action()
        except Exception as error:
            return f"no: {type(error).__name__}"
        return "yes"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return asyncio.run(run())


# ------------------------------------------------------------------------------------------ nftables

_GUEST = f'"mvb-1" . {MAC} . 10.9.0.7'


def elements(verb: str) -> str:
    """The elements of one VM with one peer, as Firewall.allow adds them."""
    lines = [f"guests {{ {_GUEST} }}", "addresses { 10.9.0.7 }"]
    lines += [f'pairs {{ "{a}" . "{b}" }}' for a, b in (("mvb-1", "mvb-2"), ("mvb-2", "mvb-1"))]
    return "\n".join(f"{verb} element bridge mvb {line}" for line in lines)


def json_elements(verb: str) -> dict[str, Any]:
    """The same in libnftables-json(5)."""
    pairs = [["mvb-1", "mvb-2"], ["mvb-2", "mvb-1"]]
    sets: list[tuple[str, list[Any]]] = [
        ("guests", [{"concat": ["mvb-1", MAC, "10.9.0.7"]}]),
        ("addresses", ["10.9.0.7"]),
        ("pairs", [{"concat": pair} for pair in pairs]),
    ]
    return {
        "nftables": [
            {verb: {"element": {"family": "bridge", "table": "mvb", "name": name, "elem": elem}}} for name, elem in sets
        ]
    }


def nftables_pairs(nftables: Any, place: Surrounding) -> Iterator[Case]:
    own, theirs = Nft(), nftables.Nftables()
    table = firewall._TABLE.format(table="mvb", prefix="mvb-", guests="10.9.0.1-10.9.0.254")
    assert own.run(table) == ""
    both = elements("add") + "\n" + elements("delete")

    def ours() -> None:
        assert own.run(elements("add")) == "" and own.run(elements("delete")) == ""

    def library() -> None:
        assert theirs.cmd(elements("add"))[0] == 0 and theirs.cmd(elements("delete"))[0] == 0

    def library_json() -> None:
        assert theirs.json_cmd(json_elements("add"))[0] == 0 and theirs.json_cmd(json_elements("delete"))[0] == 0

    def program() -> None:
        subprocess.run(["nft", "-f", "-"], input=both, text=True, check=True)

    yield Case("admit a VM and forget it", ours, library, rounds=500)
    yield Case("the same, as JSON", ours, library_json, rounds=500)
    yield Case("the same, by the program nft", ours, program, rounds=50)
    yield Case("make the whole table", lambda: own.run(table), lambda: theirs.cmd(table), rounds=100)


def inheritable() -> set[int]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208  (numbers, not paths)
        with suppress(OSError):
            if os.get_inheritable(int(entry)):
                found.add(int(entry))
    return found


def nftables_facts(nftables: Any, place: Surrounding) -> Iterator[Fact]:
    counts = []
    for make in (Nft, nftables.Nftables):
        before = inheritable()
        held = make()
        counts.append(len(inheritable() - before))
        del held
    yield Fact(
        "sockets left inheritable by opening it, for every program started later", str(counts[0]), str(counts[1])
    )


# ------------------------------------------------------------------------------------------ filelock


def filelock_pairs(filelock: Any, place: Surrounding) -> Iterator[Case]:
    directory = place.directory / "locked"
    directory.mkdir()
    path = directory / "lock"
    kept = filelock.FileLock(path)

    def ours() -> None:
        with manifest.locked(directory, create=False):
            pass

    def theirs() -> None:
        with filelock.FileLock(path):
            pass

    def theirs_kept() -> None:
        with kept:
            pass

    yield Case("lock and unlock", ours, theirs, rounds=3000)
    yield Case("the same, filelock's object kept", ours, theirs_kept, rounds=3000)
    yield Case("from release to the waiter's turn", lambda: handover(lambda: manifest.locked(directory, create=False)),
               lambda: handover(lambda: filelock.FileLock(path)), rounds=40)  # fmt: skip


def handover(lock: Callable[[], Any]) -> float:
    """Seconds from the release of a lock until a thread that waits for it has it."""
    taken: list[float] = []
    ready = threading.Event()

    def wait() -> None:
        ready.set()
        with lock():
            taken.append(time.perf_counter())

    with lock():
        waiter = threading.Thread(target=wait)
        waiter.start()
        ready.wait()
        time.sleep(0.02 + random.random() * 0.05)
        released = time.perf_counter()
    waiter.join()
    return taken[0] - released


def filelock_facts(filelock: Any, place: Surrounding) -> Iterator[Fact]:
    directory = place.directory / "removed"
    directory.mkdir()
    try:
        with filelock.FileLock(directory, timeout=0.2):
            answer = "yes"
    except OSError as error:
        answer = f"no: {errno.errorcode.get(error.errno or 0, type(error).__name__)}"
    yield Fact("locks a directory itself", "yes", answer)


# ------------------------------------------------------------------------------------------ qemu.qmp


def qmp_pairs(qmp: Any, place: Surrounding) -> Iterator[Case]:
    legacy = importlib.import_module("qemu.qmp.legacy")
    path = str(place.qmp)
    four: list[Command] = [("query-status", {}), ("query-name", {}), ("query-kvm", {}), ("query-uuid", {})]

    def ours() -> None:
        with Monitor.connect(place.qmp) as monitor:
            monitor.execute("query-status")

    async def session() -> None:
        client = qmp.QMPClient("bench")
        await client.connect(path)
        await client.execute("query-status")
        await client.disconnect()

    def synchronous() -> None:
        monitor = legacy.QEMUMonitorProtocol(path)
        monitor.connect()
        monitor.cmd("query-status")
        monitor.close()

    yield Case("connect, one command, close", ours, lambda: asyncio.run(session()), rounds=200)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield Case("the same, an event loop kept", ours, lambda: loop.run_until_complete(session()), rounds=200)
    yield Case("the same, its synchronous shim", ours, synchronous, rounds=200)
    # QEMU serves one connection of a monitor at a time, hence its second monitor.
    client = qmp.QMPClient("bench")
    loop.run_until_complete(client.connect(f"{path}2"))

    async def together() -> None:
        await asyncio.gather(*(client.execute(name, arguments) for name, arguments in four))

    with Monitor.connect(place.qmp) as monitor:
        yield Case("one command on an open connection", lambda: monitor.execute("query-status"),
                   lambda: loop.run_until_complete(client.execute("query-status")))  # fmt: skip
        yield Case("four commands sent together", lambda: monitor.execute_all(four),
                   lambda: loop.run_until_complete(together()))  # fmt: skip
    loop.run_until_complete(client.disconnect())
    loop.close()
    asyncio.set_event_loop(None)


def qmp_facts(qmp: Any, place: Surrounding) -> Iterator[Fact]:
    legacy = importlib.import_module("qemu.qmp.legacy")

    def theirs() -> None:
        monitor = legacy.QEMUMonitorProtocol(str(place.qmp))
        monitor.connect()
        monitor.close()

    yield Fact("works where an event loop runs", in_loop(lambda: Monitor.connect(place.qmp).close()), in_loop(theirs))


# ------------------------------------------------------------------------------------------ footprint

_CHILD = """
import importlib, json, os, sys, time, warnings
warnings.simplefilter("ignore")
import multiverse.service.daemon
from multiverse.host import process
ours, theirs = sys.argv[1:]
def cost(name):
    before, count, began = process.exact_memory(os.getpid())[0], len(sys.modules), time.perf_counter()
    importlib.import_module(name)
    return time.perf_counter() - began, process.exact_memory(os.getpid())[0] - before, len(sys.modules) - count
del sys.modules[ours]
print(json.dumps([cost(ours), cost(theirs)]))
"""


def footprint(ours: str, theirs: str, rounds: int) -> Fact:
    """Import each in a process that has all that the daemon imports; ours is imported once more there."""
    answers = []
    for _ in range(rounds):
        done = subprocess.run([sys.executable, "-c", _CHILD, ours, theirs], capture_output=True, text=True, check=True)
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    words = []
    for which in (0, 1):
        seconds, memory, modules = (median([answer[which][i] for answer in answers]) for i in range(3))
        words.append(f"{seconds * 1000:.1f} ms, {memory:.1f} MiB, {modules:.0f} modules")
    return Fact("import into the daemon", *words)


# ------------------------------------------------------------------------------------------ the whole


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    module: str
    ours: str
    pairs: Callable[[Any, Surrounding], Iterator[Case]]
    facts: Callable[[Any, Surrounding], Iterator[Fact]]
    install: str = "pip install --target DIR, and DIR in PYTHONPATH"


CANDIDATES = (
    Candidate("psutil", "psutil", "multiverse.host.process", psutil_pairs, psutil_facts),
    Candidate("pyroute2", "pyroute2", "multiverse.host.tap", pyroute2_pairs, pyroute2_facts),
    Candidate("python3-nftables", "nftables", "multiverse.host.firewall", nftables_pairs, nftables_facts,
              "a Debian package; its directory in PYTHONPATH"),
    Candidate("filelock", "filelock", "multiverse.system.locks", filelock_pairs, filelock_facts),
    Candidate("qemu.qmp", "qemu.qmp", "multiverse.host.qemu.qmp", qmp_pairs, qmp_facts),
)  # fmt: skip


@contextmanager
def prepared() -> Iterator[Surrounding]:
    """A bridge, a temporary directory and a QEMU with two monitors; nothing of them remains."""
    for argv in (["link", "add", BRIDGE, "type", "bridge"], ["link", "set", BRIDGE, "up"]):
        subprocess.run(["ip", *argv], check=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        sockets = [directory / "qmp", directory / "qmp2"]
        argv = ["qemu-system-x86_64", "-S", "-nodefaults", "-display", "none", "-m", "64"]
        for path in sockets:
            argv += ["-qmp", f"unix:{path},server=on,wait=off"]
        with subprocess.Popen(argv) as qemu:
            try:
                deadline = time.monotonic() + 10
                while not all(path.exists() for path in sockets) and time.monotonic() < deadline:
                    time.sleep(0.05)
                Monitor.connect(sockets[0]).close()
                yield Surrounding(directory, sockets[0], qemu.pid)
            finally:
                qemu.kill()


def measure(candidate: Candidate, module: Any, place: Surrounding, scale: float) -> None:
    print(f"\n{candidate.name} {getattr(module, '__version__', '')}\n")
    print(f"  {'microseconds, medians':38}{'ours':>10}{'theirs':>10}{'ratio':>8}   95 % interval   rounds")
    for pair in candidate.pairs(module, place):
        row = compare(pair, scale)
        interval = f"{row.low:.2f} to {row.high:.2f}"
        print(f"  {row.operation:38}{row.ours:10.1f}{row.theirs:10.1f}{row.ratio:8.2f}   {interval:16}{row.rounds:6}")
    for fact in (footprint(candidate.ours, candidate.module, max(3, int(7 * scale))), *candidate.facts(module, place)):
        print(f"  {fact.question}: ours {fact.ours}; theirs {fact.theirs}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="names of libraries; default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the numbers of rounds")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("Root is needed to make links and rules in a network namespace: use sudo.", file=sys.stderr)
        return 2
    if os.environ.get(_INSIDE) is None:
        os.environ[_INSIDE] = "1"
        script = 'mount -t sysfs sysfs /sys && exec "$@"'  # /sys shows the links of the namespace that mounted it
        again = [sys.executable, "-m", "multiverse_lab.bench.libraries", *sys.argv[1:]]
        os.execvp("unshare", ["unshare", "--net", "--mount", "sh", "-c", script, "sh", *again])
    with prepared() as place:
        for candidate in CANDIDATES:
            if options.only and candidate.name not in options.only:
                continue
            module = optional(candidate.module)
            if module is None:
                print(f"\n{candidate.name}: not installed, so it is not measured ({candidate.install})")
            else:
                measure(candidate, module, place, options.scale)
    return 0


if __name__ == "__main__":
    sys.exit(main())
