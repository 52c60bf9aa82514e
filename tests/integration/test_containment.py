"""What a QEMU that its guest has taken over can reach: a program that is started in its place tries each thing."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from multiverse.config import Settings
from multiverse.core.errors import Broken, Exhausted
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.identity import Daemon
from multiverse.core.model.vm import VmCondition, VmRef
from multiverse.drivers.qemu.driver import QemuHypervisor, host_config
from multiverse.host import manifest, namespaces, process
from multiverse.host.manifest import Specification
from multiverse.host.namespaces import OUTPUT_ROOM, System, View
from multiverse.host.qemu.library import QemuHost
from multiverse.host.qemu.session import GuestOutput
from multiverse.system import kernel
from multiverse.system.processes import ProcessIdentity
from tests.integration.test_qemu_driver import SITE, Lab, lab, until

__all__ = ["lab"]  # a fixture
pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")]

# What is started in place of QEMU, with QEMU's own arguments. Prints what came of each attempt, as JSON.
_INTRUDER = """#!/usr/bin/python3
import ctypes, errno, json, os, socket, sys
if "--version" in sys.argv:
    sys.exit(print("QEMU emulator version 8.2.0"))
targets = json.load(open(os.path.dirname(sys.argv[0]) + "/targets.json"))
libc = ctypes.CDLL(None, use_errno=True)

def create(directory):
    os.close(os.open(directory + "/intruder", os.O_WRONLY | os.O_CREAT))
    os.unlink(directory + "/intruder")

def connect(family, address):
    with socket.socket(family) as sock:
        sock.connect(address)

def get(call, *arguments):
    if call(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def interfaces(wanted):
    if wanted not in [name for _, name in socket.if_nameindex()]:
        raise OSError(errno.ENODEV, "absent")

ways = {
    "read": lambda path: os.close(os.open(path, os.O_RDONLY)),
    "list": os.listdir,
    "create": create,
    "tcp": lambda port: connect(socket.AF_INET, ("127.0.0.1", port)),
    "abstract": lambda name: connect(socket.AF_UNIX, chr(0) + name),
    "socket": lambda path: connect(socket.AF_UNIX, path),
    "shared memory": lambda key: get(libc.shmget, key, 0, 0),
    "message queue": lambda key: get(libc.msgget, key, 0),
    "signal": lambda pid: os.kill(pid, 0),
    "interface": interfaces,
}
for way, target in targets:
    try:
        ways[way](target)
        print(json.dumps([way, target, "reached"]))
    except OSError as error:
        print(json.dumps([way, target, errno.errorcode.get(error.errno, str(error))]))
"""

# What each attempt gives if what it wants does not exist.
_ABSENT = {"ENOENT", "ENODEV", "ESRCH", "ECONNREFUSED", "ENETUNREACH"}
_KEY = 0x4D560000 + os.getpid() % 65536
_IPC_CREAT, _IPC_RMID = 0o1000, 0


@dataclass
class Intruder:
    """A host whose QEMU is the program. `targets` are what it tries."""

    host: QemuHost
    program: Path
    uid: int
    settings: Settings

    def aim(self, targets: list[tuple[str, object]]) -> None:
        (self.program.parent / "targets.json").write_text(json.dumps(targets))

    def spec(self) -> Specification:
        mac = f"02:00:5e:02:{os.getpid() % 256:02x}:01"
        return Specification(
            f"mv{SITE}-900", self.settings.host.name, "slim", CloneKind.LINKED, Size(1, 256), mac, token="token",
            address="10.98.0.1/16", bridge=self.settings.qemu.bridge,
        )  # fmt: skip

    def inside(self) -> dict[tuple[str, object], str]:
        """What came of each attempt in place of QEMU: the host library starts the program as it starts a QEMU."""
        with pytest.raises(Broken, match="did not start"):
            self.host.create(self.spec())
        known = manifest.read(self.settings.qemu.vms / self.spec().name)
        assert known is not None and known.uid == self.uid
        found = results((self.settings.qemu.vms / self.spec().name / "qemu.log").read_text())
        self.host.destroy(self.spec().name, 0)
        return found

    def outside(self) -> dict[tuple[str, object], str]:
        """What came of each attempt as the same user, but without namespaces."""
        first = self.settings.qemu.uids[0]
        done = subprocess.run([self.program], user=self.uid, group=self.uid, extra_groups=[first], capture_output=True,
                              text=True, check=True)  # fmt: skip
        return results(done.stdout)


def results(printed: str) -> dict[tuple[str, object], str]:
    return {(way, target): result for way, target, result in map(json.loads, printed.splitlines())}


@pytest.fixture
def intruder(settings: Settings) -> Iterator[Intruder]:
    place = Path(tempfile.mkdtemp(prefix="mvi-", dir="/dev/shm"))
    place.chmod(0o711)
    program = place / "bin" / "qemu"
    program.parent.mkdir(mode=0o755)
    program.write_text(_INTRUDER)
    program.chmod(0o755)
    first = settings.qemu.uids[0]
    config = replace(host_config(settings, SITE), binary=str(program), accelerator="tcg", uids=(first, 2))
    host = QemuHost(config)
    host.check()
    try:
        yield Intruder(host, program, first + 1, settings)
    finally:
        host.destroy(f"mv{SITE}-900", 0)
        host.close()
        shutil.rmtree(place)


@pytest.fixture
def targets(intruder: Intruder, settings: Settings) -> Iterator[list[tuple[str, object]]]:
    """Things on this machine that any user, or the user of the QEMU, can reach."""
    with ExitStack() as stack:
        found: list[tuple[str, object]] = [("read", "/etc/passwd"), ("read", "/proc/self/status"), ("list", "/sys")]
        for parent in ("/dev/shm", "/tmp", "/var/tmp"):
            place = Path(tempfile.mkdtemp(prefix="mvi-", dir=parent))
            stack.callback(shutil.rmtree, place)
            place.chmod(0o755)
            (place / "data").write_text("everybody may read this")
            found += [("read", str(place / "data")), ("create", parent)]
        found += [("read", "/dev/full"), ("list", "/proc/1"), ("list", "/usr/local/bin")]
        found.append(("interface", next(name for _, name in socket.if_nameindex() if name != "lo")))
        # The directory of another VM, another template and a saved VM, if their modes were wrong.
        states = Path(tempfile.mkdtemp(prefix="saved-", dir=settings.state_dir))
        stack.callback(shutil.rmtree, states)
        for above in (settings.qemu.vms, settings.qemu.templates, settings.qemu.run, states):
            above.mkdir(exist_ok=True)
            stack.callback(above.chmod, above.stat().st_mode & 0o7777)
            above.chmod(0o711)
            (above / "other").mkdir(mode=0o755)
            stack.callback(shutil.rmtree, above / "other")
            (above / "other" / "memory").write_text("another guest's")
            found.append(("read", str(above / "other" / "memory")))
        found += listeners(stack, Path(settings.state_dir))
        libc = ctypes.CDLL(None)
        memory, queue = libc.shmget(_KEY, 4096, _IPC_CREAT | 0o666), libc.msgget(_KEY, _IPC_CREAT | 0o666)
        stack.callback(libc.shmctl, memory, _IPC_RMID, None)
        stack.callback(libc.msgctl, queue, _IPC_RMID, None)
        found += [("shared memory", _KEY), ("message queue", _KEY)]
        peer = subprocess.Popen(["/bin/sleep", "1000"], user=intruder.uid, group=intruder.uid)
        stack.callback(peer.wait)
        stack.callback(peer.kill)
        found += [("signal", peer.pid), ("list", f"/proc/{peer.pid}/fd")]
        intruder.aim(found)
        yield found


def listeners(stack: ExitStack, place: Path) -> list[tuple[str, object]]:
    """Services: on localhost, at an abstract address, and at a path that everybody can connect to, as munge's."""
    name = f"multiverse-{os.getpid()}"
    tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    for address in (f"\0{name}", str(place / "munge.socket.2")):
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(address)
        listener.listen()
    stack.callback((place / "munge.socket.2").unlink)
    (place / "munge.socket.2").chmod(0o777)
    return [("tcp", tcp.getsockname()[1]), ("abstract", name), ("socket", str(place / "munge.socket.2"))]


def test_a_qemu_that_was_taken_over_reaches_nothing_of_its_host(
    intruder: Intruder, targets: list[tuple[str, object]]
) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    outside = intruder.outside()
    assert outside == dict.fromkeys(targets, "reached"), "without namespaces each attempt succeeds"
    inside = intruder.inside()
    assert inside.keys() == outside.keys()
    # Directories above what is visible exist, and are empty but for that. Only root can create anything in them.
    found = {target: result for target, result in inside.items() if result not in _ABSENT}
    assert found.keys() <= {target for target in targets if target[0] == "create"}
    assert set(found.values()) <= {"EACCES"}
    assert Path("/proc/self/mountinfo").read_text() == mounts


@pytest.fixture
async def all_destroyed(lab: Lab) -> AsyncIterator[None]:
    """Destroys what a test that fails has left."""
    yield
    for name in (await lab.hypervisor.observe()).vms:
        await lab.hypervisor.destroy(VmRef(name), 0)
    lab.hypervisor.close()


def namespaces_of(pid: int) -> dict[str, int]:
    return {kind: Path(f"/proc/{pid}/ns/{kind}").stat().st_ino for kind in ("net", "mnt", "ipc", "pid")}


@pytest.mark.usefixtures("all_destroyed")
async def test_a_qemu_has_namespaces_that_end_with_it(lab: Lab) -> None:
    """From outside it is an ordinary process: it has a pid, and signals arrive."""
    one, two = lab.spec(), lab.spec()
    await lab.started(one)
    await lab.hypervisor.create(two)
    pid = lab.pid(one.name)
    ours, first, second = namespaces_of(os.getpid()), namespaces_of(pid), namespaces_of(lab.pid(two.name))
    assert all(len({ours[kind], first[kind], second[kind]}) == 3 for kind in ours)
    about = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert about["NSpid"].split() == [str(pid), "1"]
    mounted = [line.split()[4] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    qemu = lab.settings.qemu
    own = [str(qemu.vms / one.name / "disk.qcow2")]
    assert [path for path in mounted if path.startswith(str(qemu.vms))] == own
    assert not {"/proc", "/sys", "/run", "/tmp"} & set(mounted)
    os.kill(pid, signal.SIGTERM)

    async def dead() -> bool:
        return await lab.condition(one.name) is VmCondition.DEAD

    await until(dead)
    for spec in (one, two):
        await lab.hypervisor.destroy(VmRef(spec.name), 0)
        assert lab.remains(spec.name) == []
    assert not all_namespaces("net") & {first["net"], second["net"]}


@pytest.mark.usefixtures("all_destroyed")
async def test_what_a_guest_printed_is_kept_when_it_has_died_and_after_a_restart(lab: Lab) -> None:
    spec = lab.spec()
    home = lab.settings.qemu.vms / spec.name
    greeter = Daemon("greeter", ("/bin/sh", "-c", "echo printed by a guest >/dev/console; sleep 1000"))
    await lab.started(spec, greeter)
    assert not (home / "console.log").exists(), "QEMU writes to its own file system"
    lab.hypervisor.close()
    lab.hypervisor = QemuHypervisor(lab.settings, SITE)

    async def copied() -> bool:
        await lab.hypervisor.observe()
        return (home / "console.log").exists() and "printed by a guest" in (home / "console.log").read_text()

    await until(copied)
    assert (home / "console.log").stat().st_uid == 0
    inside = namespaces.open_inside(ProcessIdentity.of(lab.pid(spec.name)), home / "console.log", os.O_WRONLY)
    assert inside is not None
    os.ftruncate(inside, 0)
    os.write(inside, b"the last words")
    os.close(inside)
    os.kill(lab.pid(spec.name), signal.SIGKILL)

    async def dead() -> bool:
        return await lab.condition(spec.name) is VmCondition.DEAD

    await until(dead)
    assert "the last words" in (home / "console.log").read_text()
    await lab.hypervisor.destroy(VmRef(spec.name), 0)
    assert lab.remains(spec.name) == []


# --- the launcher alone -------------------------------------------------------------------------------

_FILL = """
import os, sys
written = 0
try:
    with open(sys.argv[1], "ab", buffering=0) as console:
        while True:
            written += console.write(bytes(65536))
except OSError as error:
    os.truncate(sys.argv[1], 0)
    print(written, error.errno)
"""


@pytest.fixture
def view(tmp_path: Path) -> View:
    (tmp_path / "base").mkdir()
    (tmp_path / "disk").touch()
    system = System.of("/usr/bin/python3", ())
    outputs = (tmp_path / "log", tmp_path / "console")
    return View(system, tmp_path / "base", writable=(tmp_path / "disk",), outputs=outputs, owner=70001)


def run(view: View, *argv: str) -> tuple[int, GuestOutput]:
    """Run a program to its end. Returns its exit code, and what it printed."""
    log = view.outputs[0]
    command = [*namespaces.command_prefix(view), *argv]
    pid, opened = namespaces.start(view, lambda out: process.execute(command, (), out[log], {"PATH": "/usr/bin:/bin"}))
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), GuestOutput(opened)


def test_a_program_cannot_print_more_than_its_room(view: View, tmp_path: Path) -> None:
    code, output = run(view, "/usr/bin/python3", "-c", _FILL, str(tmp_path / "console"))
    output.save()
    written, reason = map(int, (tmp_path / "log").read_text().split())
    assert code == 0 and 0 < written <= OUTPUT_ROOM and reason == errno.ENOSPC
    output.close()
    code, output = run(view, "/usr/bin/head", "-c", "8000000", "/dev/zero")
    output.save()
    output.close()
    assert code != 0
    assert sum(path.stat().st_size for path in tmp_path.iterdir() if path.is_file()) <= 2 * OUTPUT_ROOM


def test_a_file_that_is_full_is_begun_anew_and_the_old_one_is_kept(view: View, tmp_path: Path) -> None:
    _, output = run(view, "/usr/bin/head", "-c", str(OUTPUT_ROOM // 2), "/dev/zero")
    output.save()
    assert (tmp_path / "log.old").stat().st_size == OUTPUT_ROOM // 2
    output.save()
    assert (tmp_path / "log").read_bytes() == b""
    output.close()


def test_a_program_is_killed_with_its_namespace_and_nothing_of_it_is_left(view: View, tmp_path: Path) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    script = "sleep 1000 & sleep 1000 & echo ready; wait"
    pid, opened = namespaces.start(
        view, lambda out: process.execute(["/bin/sh", "-c", script], (), out[view.outputs[0]], {"PATH": "/usr/bin"})
    )
    identity = process.identify(pid)
    deadline = time.monotonic() + 10
    while os.fstat(opened[view.outputs[0]]).st_size == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    inside = namespaces_of(pid)["pid"]
    assert namespaces_of(os.getpid())["pid"] != inside
    GuestOutput(opened).close()
    assert process.kill(identity)
    assert inside not in all_namespaces("pid"), "its children ended with it"
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert list((tmp_path / "base").iterdir()) == []


def all_namespaces(kind: str) -> set[int]:
    found = set()
    for path in Path("/proc").glob(f"[0-9]*/ns/{kind}"):
        with suppress(OSError):
            found.add(path.stat().st_ino)
    return found


def test_proc_shows_the_program_alone_until_it_is_removed(view: View, tmp_path: Path) -> None:
    """A QEMU before 8.2 opens its memory by a path in /proc."""
    script = "ls -d /proc/[0-9]*; while test -e /proc/self; do sleep 0.05; done; echo removed; test ! -e /proc/1"
    seeing = replace(view, proc=True)
    command = [*namespaces.command_prefix(seeing), "/bin/sh", "-c", script]
    log = view.outputs[0]
    pid, opened = namespaces.start(
        seeing, lambda out: process.execute(command, (), out[log], {"PATH": "/usr/bin:/bin"})
    )
    output, identity = GuestOutput(opened), process.identify(pid)
    deadline = time.monotonic() + 10
    while os.fstat(opened[log]).st_size == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    namespaces.remove_proc(identity)
    _, status = os.waitpid(pid, 0)
    output.save()
    output.close()
    said = log.read_text().split()
    assert os.waitstatus_to_exitcode(status) == 0 and said[0] == "/proc/1" and said[-1] == "removed"
    assert all(int(path.rpartition("/")[2]) < 10 for path in said[:-1])
    namespaces.remove_proc(identity)  # it has ended: success


def test_a_root_that_cannot_be_replaced_is_covered(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    """pivot_root(2) is refused where the root is the initial ramdisk."""

    def refused() -> None:
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(kernel, "pivot_root", refused)
    code, output = run(view, "/bin/sh", "-c", "test ! -e /etc/passwd && test ! -e /proc && cd / && test ! -e ../var")
    output.close()
    assert code == 0


@pytest.mark.parametrize("call", ["unshare", "pivot_root"])
@pytest.mark.parametrize(("code", "kind"), [(errno.EPERM, Broken), (errno.ENOSPC, Exhausted)])
def test_namespaces_that_are_refused_are_reported(
    view: View, monkeypatch: pytest.MonkeyPatch, call: str, code: int, kind: type[Exception]
) -> None:
    def refused(*flags: int) -> None:
        raise OSError(code, "refused", call)

    monkeypatch.setattr(kernel, call, refused)
    with pytest.raises(kind, match="namespaces"):
        namespaces.start(view, lambda outputs: None)
    held = [os.fspath(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in held if path.endswith(("/log", "/console"))], "all are closed again"


def test_a_program_in_a_prefix_of_its_own_is_visible(tmp_path: Path) -> None:
    binary = tmp_path / "qemu" / "bin" / "qemu"
    binary.parent.mkdir(parents=True)
    shutil.copy("/bin/true", binary)
    assert binary.parent.parent in System.of(str(binary), ()).programs
    assert Path("/usr/local") in System.of("/bin/true", ()).hidden
