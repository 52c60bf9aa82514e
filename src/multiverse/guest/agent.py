#!/usr/bin/python3 -IS
"""The agent: the one resident process of ours in a guest. Standard library only, one file, no shell.

In a slim image it is the first process; in a stock image systemd starts it. It makes the guest ready,
says that it is at the fork point and blocks in a read. A template is frozen there; each clone wakes up
in that read, with its identity already waiting, and becomes itself: randomness first, for until then it
would draw the same bytes as its siblings; then clock, names, addresses, users, mounts, daemons.

It acts by system calls rather than by tools: on an emulated CPU an exec costs 30 ms, a call nothing.
Modules with a random state of their own (random, tempfile, uuid) are never imported here.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import gc
import hashlib
import json
import os
import pwd
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

VERSION = 1
PORT = "org.multiverse.agent"
MAX_LINE = 1 << 20  # bytes of one message, either way
LOGS = "/var/log/multiverse"
DAEMON_TIMEOUT = 30.0  # seconds for a daemon's ready path to appear, and for plugged memory to come
MODULES = ("virtio_console", "virtio_net", "nfsv4", "nfs")

_libc = ctypes.CDLL(None, use_errno=True)

# <linux/random.h>, <linux/if.h>, <linux/sockios.h>, <linux/route.h>, <linux/mount.h>
RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207
SIOCADDRT, SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFHWADDR = (
    0x890B, 0x8913, 0x8914, 0x8916, 0x891C, 0x8924)  # fmt: skip
IFF_UP, RTF_UP, RTF_GATEWAY, ARPHRD_ETHER = 0x1, 0x1, 0x2, 1
MS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "sync": 16, "dirsync": 128, "noatime": 1024,
      "nodiratime": 2048, "relatime": 1 << 21, "strictatime": 1 << 24}  # fmt: skip
NOT_FOR_THE_KERNEL = frozenset({"", "rw", "defaults", "_netdev", "auto", "noauto", "nofail", "user", "nouser", "hard", "x-systemd"})
MS_BIND, MNT_DETACH = 4096, 2


class Failure(Exception):
    """Something in the identity could not be done; the text is for the operator."""


# --- system calls ----------------------------------------------------------------------------------


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2). Raises OSError."""
    args = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode())
    if _libc.mount(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def unmount(target: str, flags: int = 0) -> None:
    """umount2(2). Raises OSError."""
    if _libc.umount2(os.fsencode(target), flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def mounted() -> list[tuple[str, str]]:
    """(target, type) of each mount, in order of mounting (proc(5), octal escapes undone)."""
    found = []
    for line in open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape"):  # noqa: SIM115
        _, target, kind = line.split(" ")[:3]
        for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            target = target.replace(code, char)
        found.append((target, kind))
    return found


def add_entropy(seed: bytes) -> None:
    """Feed the kernel and make its generator start from that (random(4)).

    The first alone leaves two clones with identical bytes until the next scheduled reseeding.
    """
    with open("/dev/random", "rb", buffering=0) as device:
        fcntl.ioctl(device, RNDADDENTROPY, struct.pack("ii", len(seed) * 8, len(seed)) + seed)
        fcntl.ioctl(device, RNDRESEEDCRNG)


def load_module(path: str) -> None:
    """finit_module(2) by number, for glibc has no wrapper. One that is loaded already is fine."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.syscall(ctypes.c_long(313), ctypes.c_int(fd), b"", ctypes.c_int(0)) != 0:
            code = ctypes.get_errno()
            if code != errno.EEXIST:
                raise OSError(code, os.strerror(code), path)
    finally:
        os.close(fd)


def _sockaddr(address: str) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def interface() -> str:
    """The first network interface that is not the loopback."""
    names = sorted(n for n in os.listdir("/sys/class/net") if n != "lo" and os.path.exists(f"/sys/class/net/{n}/device"))
    if not names:
        raise Failure("the guest has no network interface")
    return names[0]


def link_up(sock: socket.socket, name: str, up: bool = True) -> None:
    raw = bytearray(struct.pack("16sh14x", name.encode(), 0))
    fcntl.ioctl(sock, SIOCGIFFLAGS, raw)
    flags = struct.unpack_from("h", raw, 16)[0]
    fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", name.encode(), flags | IFF_UP if up else flags & ~IFF_UP))


def set_network(mac: str, address: str, gateway: str) -> None:
    """Give the interface its MAC, address with prefix length and default route (netdevice(7), route(8))."""
    name = interface()
    host, _, prefix = address.partition("/")
    mask = socket.inet_ntoa(struct.pack("!I", (0xFFFFFFFF << (32 - int(prefix or "24"))) & 0xFFFFFFFF))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        with open(f"/sys/class/net/{name}/address") as file:
            current = file.read().strip()
        if current != mac.lower():
            link_up(sock, name, False)
            raw = bytes.fromhex(mac.replace(":", ""))
            fcntl.ioctl(sock, SIOCSIFHWADDR, struct.pack("16sH6s8x", name.encode(), ARPHRD_ETHER, raw))
        fcntl.ioctl(sock, SIOCSIFADDR, struct.pack("16s16s", name.encode(), _sockaddr(host)))
        fcntl.ioctl(sock, SIOCSIFNETMASK, struct.pack("16s16s", name.encode(), _sockaddr(mask)))
        link_up(sock, name)
        if gateway:
            zero = _sockaddr("0.0.0.0")
            # struct rtentry on a 64-bit machine: pad, dst, gateway, genmask, flags, and the rest zero.
            route = struct.pack("Q16s16s16sH", 0, zero, _sockaddr(gateway), zero, RTF_UP | RTF_GATEWAY)
            try:
                fcntl.ioctl(sock, SIOCADDRT, route + bytes(120 - len(route)))
            except OSError as error:
                if error.errno != errno.EEXIST:
                    raise


# --- getting ready ---------------------------------------------------------------------------------


def write(path: str, content: str | bytes, mode: int = 0o644, owner: tuple[int, int] = (0, 0)) -> None:
    """Replace a file. It is never seen with wider permissions than `mode`."""
    data = content.encode() if isinstance(content, str) else content
    fresh = f"{path}.new"
    try:
        os.unlink(fresh)
    except FileNotFoundError:
        pass
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data) if data else None
        os.fchown(fd, *owner)
        os.fchmod(fd, mode)
    finally:
        os.close(fd)
    os.rename(fresh, path)


def prepare_first() -> None:
    """What a service manager would have done, when there is none: file systems, loopback, limits."""
    for source, target, kind, flags, data in (
        ("proc", "/proc", "proc", 14, ""), ("sysfs", "/sys", "sysfs", 14, ""), ("dev", "/dev", "devtmpfs", 2, "mode=0755"),
        ("devpts", "/dev/pts", "devpts", 10, "gid=5,mode=620,ptmxmode=000"), ("shm", "/dev/shm", "tmpfs", 6, "mode=1777"),
        ("run", "/run", "tmpfs", 6, "mode=0755"), ("mqueue", "/dev/mqueue", "mqueue", 14, ""),
    ):  # fmt: skip
        try:
            os.makedirs(target, exist_ok=True)
            mount(source, target, kind, flags, data)
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENODEV):
                raise
    os.makedirs("/run/lock", exist_ok=True)
    os.chmod("/run/lock", 0o1777)
    for link, target in (("/dev/fd", "/proc/self/fd"), ("/dev/stdin", "/proc/self/fd/0"),
                         ("/dev/stdout", "/proc/self/fd/1"), ("/dev/stderr", "/proc/self/fd/2")):  # fmt: skip
        if not os.path.islink(link):
            os.symlink(target, link)
    os.umask(0o022)
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        link_up(sock, "lo")


def prepare_cgroups() -> None:
    """What slurmd needs on cgroup v2 without systemd: the hierarchy, its controllers, `system.slice`."""
    top = "/sys/fs/cgroup"
    if not os.path.exists(f"{top}/cgroup.controllers"):
        try:
            mount("cgroup2", top, "cgroup2", 14)
        except OSError:
            return  # a guest with the old hierarchy: the site's cgroup.conf says what is to be done with it
    slice_ = f"{top}/system.slice"
    os.makedirs(slice_, exist_ok=True)
    with open(f"{top}/cgroup.controllers") as file:
        wanted = " ".join(f"+{name}" for name in file.read().split())
    for directory in (top, slice_):
        try:
            with open(f"{directory}/cgroup.subtree_control", "w") as file:
                file.write(wanted)
        except OSError:
            pass  # under a service manager they are its own business


def load_modules() -> None:
    """Load what a clone needs at once, with what that needs (modules.dep(5))."""
    base = f"/lib/modules/{os.uname().release}"
    needs: dict[str, list[str]] = {}
    path_of: dict[str, str] = {}
    try:
        with open(f"{base}/modules.dep") as file:
            for line in file:
                path, _, rest = line.partition(":")
                needs[path] = rest.split()
                path_of[os.path.basename(path).split(".", 1)[0].replace("-", "_")] = path
    except OSError:
        return
    for name in MODULES:
        if name in path_of and not os.path.exists(f"/sys/module/{name}"):
            for path in [*reversed(needs[path_of[name]]), path_of[name]]:
                load_module(f"{base}/{path}")


def find_port() -> str:
    """The device of our channel, found by the name that QEMU gave it. Waits for the driver to show it."""
    base = "/sys/class/virtio-ports"
    deadline = time.monotonic() + DAEMON_TIMEOUT
    while True:
        for entry in os.listdir(base) if os.path.isdir(base) else ():
            with open(f"{base}/{entry}/name") as file:
                if file.read().strip() == PORT and os.path.exists(f"/dev/{entry}"):
                    return f"/dev/{entry}"
        if time.monotonic() > deadline:
            raise Failure(f"the VM has no virtio port {PORT}")
        time.sleep(0.01)


# --- warming ---------------------------------------------------------------------------------------


def run(argv: list[str], timeout: float = 20.0) -> int:
    """Run a program to its end, silently, killed after `timeout` seconds. Returns its wait status, or -1."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    try:
        pid = os.posix_spawn(argv[0], argv, os.environ, setpgroup=0, setsigdef=range(1, 32), setsigmask=(),
                             file_actions=[(os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1, 2)])  # fmt: skip
    except OSError:
        return -1
    finally:
        os.close(null)
    deadline = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1]
        time.sleep(0.005)


def warm() -> None:
    """Touch what every clone will touch, so that it lies in memory that all of them share.

    Programs are run in ways that end by themselves and need neither key nor network; of the libraries
    and plugins every byte is read. Anything that is missing in this image is passed over.
    """
    for argv in (["/usr/sbin/slurmd", "-V"], ["/usr/sbin/slurmd", "-C"], ["/usr/sbin/munged", "--version"],
                 ["/usr/sbin/slurmstepd", "infinity"], ["/usr/bin/srun", "--version"], ["/bin/bash", "-c", "exit 0"],
                 ["/bin/bash", "-lc", "hostname; id; date; sleep 0"], ["/bin/sh", "-c", "exit 0"]):  # fmt: skip
        run(argv, 5.0)
    plugins = [f"{top}/{name}" for top in ("/usr/lib/x86_64-linux-gnu/slurm-wlm", "/usr/lib/x86_64-linux-gnu/slurm")
               if os.path.isdir(top) for name in sorted(os.listdir(top))]  # fmt: skip
    for path in ["/usr/sbin/slurmd", "/usr/sbin/slurmstepd", "/usr/sbin/munged", *plugins]:
        try:
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass
        except OSError:
            continue


# --- the channel -----------------------------------------------------------------------------------


class Channel:
    """JSON lines over the virtio port, either way at most `MAX_LINE` bytes each."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        # The driver sends SIGIO when the host's end opens or closes: while closed, poll(2) would return at once.
        fcntl.fcntl(self.fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
        self._buffer = bytearray()

    def send(self, type_: str, **fields: Any) -> None:
        """Send a message; without a host to read it, it is lost: the host asks again if it must know."""
        data = json.dumps({"type": type_, **fields}, separators=(",", ":")).encode() + b"\n"
        while data:
            try:
                data = data[os.write(self.fd, data):]
            except BlockingIOError:
                poller = select.poll()
                poller.register(self.fd, select.POLLOUT)
                if any(event & select.POLLHUP for _, event in poller.poll(5000)):
                    return
            except OSError:
                return

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Messages that have arrived, and whether the host's end is open. Never blocks."""
        messages: list[dict[str, Any]] = []
        while True:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                return messages, True
            except OSError:
                return messages, False
            if not data:
                self._buffer.clear()  # the rest of a line will not come
                return messages, False
            self._buffer += data
            while (end := self._buffer.find(b"\n")) >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                try:
                    message = json.loads(line)
                except ValueError:
                    continue
                if isinstance(message, dict):
                    messages.append(message)
            if len(self._buffer) > MAX_LINE:
                self._buffer.clear()


# --- becoming someone ------------------------------------------------------------------------------


def set_hosts(hostname: str, address: str, peers: list[list[str]]) -> None:
    lines = ["127.0.0.1 localhost", f"{address} {hostname}", *(f"{peer} {name}" for name, peer in peers)]
    write("/etc/hosts", "\n".join(lines) + "\n")


def add_users(users: list[dict[str, Any]]) -> None:
    """Add passwd and group entries. A name that the image has keeps its id there; a user's groups all become his."""
    with open("/etc/passwd") as file:
        passwd = {line.split(":", 1)[0]: line.rstrip("\n") for line in file}
    with open("/etc/group") as file:
        groups = {line.split(":", 1)[0]: line.rstrip("\n").split(":") for line in file if line.count(":") >= 3}
    for user in users:
        name = user["name"]
        passwd[name] = f"{name}:*:{user['uid']}:{user['gid']}::{user['home']}:{user['shell']}"
        for group, gid in user["groups"]:
            same = next((g for g in groups.values() if g[2] == str(gid)), None)
            entry = same or groups.setdefault(group, [group, "*", str(gid), ""])
            members = [m for m in entry[3].split(",") if m]
            if name not in members:
                entry[3] = ",".join([*members, name])
    write("/etc/passwd", "".join(f"{line}\n" for line in passwd.values()))
    write("/etc/group", "".join(":".join(entry) + "\n" for entry in groups.values()))


def mount_one(source: str, target: str, kind: str, options: str) -> None:
    """Mount a file system where fstab(5) would. NFSv4 goes straight to mount(2), which wants the addresses."""
    os.makedirs(target, exist_ok=True)
    if kind != "nfs4":
        argv = ["/bin/mount", "-t", kind, *(["-o", options] if options else []), "--", source, target]
        if run(argv, DAEMON_TIMEOUT) != 0:
            raise Failure(f"cannot mount {source} on {target} (type {kind})")
        return
    server, colon, path = source.partition(":")
    if not colon or not path.startswith("/"):
        raise Failure(f"{source!r} is no NFS source: it wants SERVER:/PATH")
    flags, data = 0, []
    for option in options.split(","):
        if option in MS:
            flags |= MS[option]
        elif option not in NOT_FOR_THE_KERNEL and not option.startswith("x-"):
            data.append(option)
    try:
        address = socket.gethostbyname(server)
        # Which address of ours faces the server: the kernel's choice of route tells, nothing is sent.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 2049))
            client = sock.getsockname()[0]
        given = {o.partition("=")[0] for o in data}
        data += [f"{key}={value}" for key, value in (("addr", address), ("clientaddr", client)) if key not in given]
        mount(source, target, "nfs4", flags, ",".join(data))
    except OSError as error:
        raise Failure(f"cannot mount {source} on {target}: {error.strerror}") from error


def plug(cpus: int, memory: int) -> None:
    """Put plugged CPUs to work, and wait until `cpus` of them and `memory` MiB of plugged memory are there."""
    deadline = time.monotonic() + DAEMON_TIMEOUT
    base = "/sys/devices/system/cpu"
    while True:
        for name in os.listdir(base):
            online = f"{base}/{name}/online"
            if name[:3] == "cpu" and name[3:].isdigit() and os.path.exists(online):
                with open(online, "r+") as file:
                    if file.read(1) == "0":
                        file.write("1")
        have = len(os.sched_getaffinity(0)) if os.getpid() != 1 else _online(f"{base}/online")
        blocks = _plugged_memory()
        if have >= cpus and blocks >= memory:
            return
        if time.monotonic() > deadline:
            raise Failure(f"of {cpus} CPUs and {memory} MiB plugged memory, {have} and {blocks} MiB came")
        time.sleep(0.002)


def _online(path: str) -> int:
    count = 0
    with open(path) as file:
        for part in file.read().strip().split(","):
            first, _, last = part.partition("-")
            count += int(last or first) - int(first) + 1
    return count


def _memory_blocks() -> int:
    """MiB of memory blocks that are online."""
    base = "/sys/devices/system/memory"
    with open(f"{base}/block_size_bytes") as file:
        size = int(file.read(), 16) >> 20
    count = 0
    for name in os.listdir(base):
        if name[:6] == "memory" and name[6:].isdigit():
            with open(f"{base}/{name}/online") as file:
                count += file.read(1) == "1"
    return count * size


_boot_memory = 0


def _plugged_memory() -> int:
    return _memory_blocks() - _boot_memory


class Daemon:
    """A child that is to live as long as the VM."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name: str = spec["name"]
        self.argv: list[str] = list(spec["argv"])
        self.user: str = spec["user"]
        self.ready_path: str = spec["ready_path"]
        self.pid = 0
        self.status: int | None = None

    def start(self) -> None:
        """Start it in a process group of its own, its output in a log. Raises Failure."""
        if self.ready_path:
            try:
                os.unlink(self.ready_path)  # one from before would say too early that it serves
            except FileNotFoundError:
                pass
        log = os.open(f"{LOGS}/{self.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if self.user == "root":
                actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
                self.pid = os.posix_spawn(self.argv[0], self.argv, os.environ, file_actions=actions, setpgroup=0,
                                          setsigdef=range(1, 32), setsigmask=())  # fmt: skip
            else:
                self.pid = self._fork(null, log)
        except (OSError, KeyError) as error:
            raise Failure(f"cannot start {self.name} ({self.argv[0]}): {error}") from error
        finally:
            os.close(log)
            os.close(null)

    def _fork(self, null: int, log: int) -> int:
        user = pwd.getpwnam(self.user)
        groups = os.getgrouplist(self.user, user.pw_gid)
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setpgid(0, 0)
            for source, target in ((null, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            for number in (signal.SIGCHLD, signal.SIGIO, signal.SIGPIPE, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.setgroups(groups)
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            os.execve(self.argv[0], self.argv, os.environ)
        except BaseException as error:
            os.write(2, f"{error}\n".encode())
        os._exit(127)

    def tail(self) -> str:
        """The last lines of its log, for the operator."""
        try:
            with open(f"{LOGS}/{self.name}.log", "rb") as file:
                return file.read()[-600:].decode(errors="replace").strip().replace("\n", "; ")
        except OSError:
            return ""


class Agent:
    """Answers the host's messages and watches the daemons."""

    def __init__(self, channel: Channel, wake: int) -> None:
        self.channel = channel
        self.wake = wake
        self.daemons: list[Daemon] = []
        self.mounts: list[str] = []
        # What `hello` is answered with: a host that lost our word, or has restarted, asks again.
        self.state: dict[str, Any] = {"type_": "fork_point", "version": VERSION}

    def serve(self) -> None:
        """The main loop; ends with the VM."""
        poller = select.poll()
        poller.register(self.wake, select.POLLIN)
        poller.register(self.channel.fd, select.POLLIN)
        while True:
            messages, open_ = self.channel.receive()
            for message in messages:
                self.handle(message)
            poller.modify(self.channel.fd, select.POLLIN) if open_ else self._leave(poller)
            poller.poll()
            self.reap()

    def _leave(self, poller: select.poll) -> None:
        # Nobody at the other end: only a signal (SIGIO when he is back, SIGCHLD) ends the next wait.
        poller.unregister(self.channel.fd)
        poller.poll()
        self.reap()
        poller.register(self.channel.fd, select.POLLIN)

    def handle(self, message: dict[str, Any]) -> None:
        """Do what a message says; unknown ones are ignored. What goes wrong is reported, never raised."""
        try:
            if message.get("type") == "identity":
                self.become(message)
            elif message.get("type") == "flush":
                self.flush()
            elif message.get("type") == "hello":
                self.channel.send(**self.state)
        except Failure as error:
            self._say("failed", reason=str(error))
        except Exception as error:
            self._say("failed", reason=f"the agent failed: {type(error).__name__}: {error}")

    def _say(self, type_: str, **fields: Any) -> None:
        self.state = {"type_": type_, **fields}
        self.channel.send(**self.state)

    def become(self, message: dict[str, Any]) -> None:
        """Take on an identity. A second one changes nothing: this VM is somebody already."""
        if self.state["type_"] != "fork_point":
            self.channel.send(**self.state)
            return
        self.channel.send("forked")
        self.state = {"type_": "becoming"}
        stages: list[tuple[str, float]] = []
        last = time.monotonic()

        def stage(name: str) -> None:
            nonlocal last
            now = time.monotonic()
            stages.append((name, round(now - last, 6)))
            last = now

        identity = message["identity"]
        add_entropy(base64.b64decode(message["random"]))
        time.clock_settime(time.CLOCK_REALTIME, message["time"] + (time.monotonic() - last))
        write("/etc/machine-id", identity["machine_id"] + "\n", 0o444)
        hostname, address = identity["hostname"], identity["address"]
        socket.sethostname(hostname)
        write("/etc/hostname", hostname + "\n")
        set_hosts(hostname, address.partition("/")[0], identity["peers"])
        add_users(identity["users"])
        stage("identity")
        set_network(identity["mac"], address, identity["gateway"])
        stage("network")
        membership = identity["membership"]
        for path, owner, mode in membership["directories"]:
            os.makedirs(path, exist_ok=True)
            os.chown(path, *self._owner(owner))
            os.chmod(path, mode)
        for file in membership["files"]:
            os.makedirs(os.path.dirname(file["path"]), exist_ok=True)
            write(file["path"], base64.b64decode(file["content"]), file["mode"], self._owner(file["owner"]))
        stage("files")
        daemons = [Daemon(spec) for spec in membership["daemons"]]
        if daemons and not self.daemons:
            self._start(daemons[0])  # it comes up while we mount and plug
        for each in identity["mounts"]:
            mount_one(each["source"], each["target"], each["type"], each["options"])
            self.mounts.append(each["target"])
        stage("mounts")
        plug(message["cpus"], message["plugged"])
        stage("plugged")
        for i, daemon in enumerate(daemons):
            if i:
                self._start(daemon)
            self._await(daemon)
            stage(f"daemon_{daemon.name}")
        self._say("started", stages=stages, audit=self.audit())

    def audit(self) -> dict[str, Any]:
        """What tells clones apart and shows their size, without giving anything away."""
        with open("/proc/meminfo") as file:
            total = int(file.readline().split()[1]) >> 10
        with open("/etc/machine-id", "rb") as id_:
            machine_id = hashlib.sha256(id_.read()).hexdigest()[:16]
        with open("/proc/sys/kernel/random/boot_id", "rb") as id_:
            boot_id = hashlib.sha256(id_.read()).hexdigest()[:16]
        drawn = hashlib.sha256(os.urandom(32)).hexdigest()[:16]
        online = _online("/sys/devices/system/cpu/online")
        return {"cpus": online, "memory": total, "machine_id": machine_id, "boot_id": boot_id, "random": drawn}

    def _owner(self, name: str) -> tuple[int, int]:
        if name == "root":
            return 0, 0
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise Failure(f"the image has no user {name!r}") from None
        return entry.pw_uid, entry.pw_gid

    def _start(self, daemon: Daemon) -> None:
        self.daemons.append(daemon)
        daemon.start()

    def _await(self, daemon: Daemon) -> None:
        """Wait for a daemon's ready path, watching that it does not die meanwhile."""
        deadline = time.monotonic() + DAEMON_TIMEOUT
        while daemon.ready_path and not os.path.exists(daemon.ready_path):
            self._collect()
            if daemon.status is not None:
                raise Failure(f"{daemon.name} ended ({_ending(daemon.status)}): {daemon.tail()}")
            if time.monotonic() > deadline:
                raise Failure(f"{daemon.name} did not make {daemon.ready_path}: {daemon.tail()}")
            time.sleep(0.001)

    def _collect(self) -> list[Daemon]:
        """Reap every child that has ended; as first process, orphans too. Returns the daemons among them."""
        dead: list[Daemon] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return dead
            if pid == 0:
                return dead
            for daemon in self.daemons:
                if daemon.pid == pid:
                    daemon.status = status
                    dead.append(daemon)

    def reap(self) -> None:
        try:
            os.read(self.wake, 4096)
        except BlockingIOError:
            pass
        for daemon in self._collect():
            self.channel.send("daemon_ended", name=daemon.name, reason=f"{_ending(daemon.status or 0)}: {daemon.tail()}")

    def flush(self) -> None:
        """Write back and unmount what lies on the network. The job is over, so its processes are not asked."""
        os.sync()
        for target in reversed(self.mounts):
            try:
                unmount(target)
            except OSError:
                try:
                    unmount(target, MNT_DETACH)
                except OSError:
                    continue
        self.mounts.clear()
        self.channel.send("flushed")


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def main() -> None:
    """Get ready, say so, serve."""
    first = os.getpid() == 1
    if first:
        prepare_first()
        prepare_cgroups()
    load_modules()
    os.makedirs(LOGS, exist_ok=True)
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGIO):
        signal.signal(number, lambda *_: None)
    if first:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    global _boot_memory
    channel = Channel(find_port())
    try:
        _boot_memory = _memory_blocks()
        warm()
        agent = Agent(channel, reading)
        # What exists now never goes away: the collector need not touch, and so unshare, its pages.
        gc.collect()
        gc.freeze()
        gc.disable()
        channel.send("fork_point", version=VERSION)
        agent.serve()
    except BaseException as error:
        channel.send("failed", reason=f"the agent ended: {type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main()
