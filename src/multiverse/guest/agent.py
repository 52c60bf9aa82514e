#!/usr/bin/python3 -IS
"""The agent: the one resident process of ours in a guest. Standard library only, one file, no shell.

In a slim image it is the first process; in a stock image systemd starts it. It makes the guest ready,
says that it is at the fork point and blocks in a read. A template is frozen there; each clone wakes up
in that read, with its identity already waiting, and becomes itself: randomness first, for until then it
would draw the same bytes as its siblings; then clock, names, addresses, users, mounts, daemons.

It acts by system calls rather than by tools: on an emulated CPU an exec costs 30 ms, a call nothing. There,
what counts is how much *different* code runs in a clone, in Python and kernel alike, for each piece is
translated once: hence files written in place, plain descriptors, one netlink message, no hashing.
Modules with a random state of their own (random, tempfile, uuid) are never imported here.
"""

# Paths stay strings and files descriptors: pathlib and io are code that each clone would pay for again.
# ruff: noqa: PTH101, PTH103, PTH106, PTH108, PTH110, PTH112, PTH114, PTH119, PTH120, PTH123, PTH208, PTH211

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import gc
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
INTRODUCED = "/run/multiverse/introduced"
MOST_WAIT = 64  # lines in that pipe: as many may read one each
MAX_LINE = 1 << 20  # bytes of one message, either way
LOGS, SSH = "/var/log/multiverse", "/etc/ssh"
DAEMON_TIMEOUT = 30.0  # seconds for a daemon's ready path to appear, and for plugged memory to come
CLOCK_MAY_BE_OFF = 0.5  # seconds; less is not worth a step under daemons that run
TEMPLATE = "multiverse.template"  # on the kernel's command line: this VM is to be frozen, so let it be warm
MODULES = ("virtio_console", "virtio_net", "nfsv4", "nfs")

CPUS, BLOCKS = "/sys/devices/system/cpu", "/sys/devices/system/memory"
_owners = {"root": (0, 0)}
_interface = ""  # our network interface, once it was looked for
_boot_memory = _boot_usable = 0  # MiB that were online at the fork point, and of them those that the kernel gives out

_libc = ctypes.CDLL(None, use_errno=True)

# <linux/random.h>, <linux/if.h>, <linux/sockios.h>, <linux/rtnetlink.h>, <linux/mount.h>
RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFHWADDR, SIOCGIFADDR = 0x8913, 0x8914, 0x8924, 0x8915
IFF_UP, ARPHRD_ETHER = 0x1, 1
RTM_NEWADDR, RTM_DELADDR, RTM_NEWROUTE, NLM_REQUEST_ACK, NLM_CREATE_REPLACE, NLMSG_ERROR = 20, 21, 24, 0x5, 0x500, 2
MS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "sync": 16, "dirsync": 128, "noatime": 1024,
      "nodiratime": 2048, "relatime": 1 << 21, "strictatime": 1 << 24}  # fmt: skip
NOT_FOR_THE_KERNEL = frozenset(
    {"", "rw", "defaults", "_netdev", "auto", "noauto", "nofail", "user", "nouser", "hard", "x-systemd"}
)
MS_BIND, MNT_DETACH = 4096, 2


# <linux/ptrace.h>, <linux/auxvec.h>, <sys/user.h> of x86-64: places in its 27 words; the guard's in the thread's block
PTRACE_TRACEME, PTRACE_CONT, PTRACE_GETREGS, PTRACE_SETREGS, PTRACE_DETACH = 0, 7, 12, 13, 17
AT_ENTRY, RIP, RSP, FS_BASE, STACK_GUARD, INT3 = 9, 16, 19, 21, 0x28, b"\xcc"


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
    device = os.open("/dev/random", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, RNDADDENTROPY, struct.pack("ii", len(seed) * 8, len(seed)) + seed)
        fcntl.ioctl(device, RNDRESEEDCRNG)
    finally:
        os.close(device)


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


def ptrace(request: int, pid: int, data: ctypes.Array[ctypes.c_ulong] | None = None) -> None:
    """ptrace(2) with no address. Raises OSError."""
    if _libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), None, data) == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "ptrace")


def interface() -> str:
    """The first network interface that is a device, remembered. Raises Failure."""
    global _interface
    if not _interface:
        names = sorted(n for n in os.listdir("/sys/class/net") if os.path.exists(f"/sys/class/net/{n}/device"))
        if not names:
            raise Failure("the guest has no network interface")
        _interface = names[0]
    return _interface


def link_up(sock: socket.socket, name: str) -> None:
    """Set an interface up (netdevice(7))."""
    raw = fcntl.ioctl(sock, SIOCGIFFLAGS, struct.pack("16sh14x", name.encode(), 0))
    flags = struct.unpack_from("h", raw, 16)[0]
    if not flags & IFF_UP:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", name.encode(), flags | IFF_UP))


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("HH", 4 + len(value), kind) + value  # values here are multiples of four bytes


def _request(kind: int, body: bytes) -> bytes:
    return struct.pack("IHHII", 16 + len(body), kind, NLM_REQUEST_ACK | NLM_CREATE_REPLACE, 0, 0) + body


def set_network(name: str, mac: str, address: str, gateway: str) -> None:
    """Give an interface that is up its MAC, its address with prefix length and a default route (rtnetlink(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        raw = bytes.fromhex(mac.replace(":", ""))
        fcntl.ioctl(sock, SIOCSIFHWADDR, struct.pack("16sH6s8x", name.encode(), ARPHRD_ETHER, raw))
    index = socket.if_nametoindex(name)
    requests = [_request(RTM_NEWADDR, _address(index, address))]
    if gateway:
        # Table main, protocol static, scope universe, unicast; RTA_GATEWAY, RTA_OIF.
        route = struct.pack("BBBBBBBBI", socket.AF_INET, 0, 0, 0, 254, 4, 0, 1, 0)
        route += _attribute(5, socket.inet_aton(gateway)) + _attribute(4, struct.pack("I", index))
        requests.append(_request(RTM_NEWROUTE, route))
    _netlink(requests)


def _address(index: int, address: str) -> bytes:
    host, _, prefix = address.partition("/")
    local = socket.inet_aton(host)
    body = struct.pack("BBBBI", socket.AF_INET, int(prefix or "24"), 0, 0, index)
    return body + _attribute(2, local) + _attribute(1, local)  # IFA_LOCAL, IFA_ADDRESS


def _netlink(requests: list[bytes]) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.bind((0, 0))
        for request in requests:
            netlink.send(request)
            answer = netlink.recv(4096)
            code = (
                -struct.unpack_from("i", answer, 16)[0] if struct.unpack_from("H", answer, 4)[0] == NLMSG_ERROR else 0
            )
            if code:
                raise OSError(code, os.strerror(code), "rtnetlink")


# --- getting ready ---------------------------------------------------------------------------------


def read(path: str) -> str:
    """A small file's content."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, MAX_LINE).decode("utf-8", "surrogateescape")
    finally:
        os.close(fd)


def write(path: str, content: str | bytes, mode: int = 0o644, owner: tuple[int, int] = (0, 0)) -> None:
    """Make a file hold `content`; nobody else can open it before it has its mode and owner.

    In place, for nothing else runs yet: replacing it by a rename makes the kernel allocate and write blocks.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        before = os.fstat(fd)
        if (before.st_uid, before.st_gid) != owner:
            os.fchown(fd, *owner)
        if before.st_mode & 0o7777 != mode:
            os.fchmod(fd, mode)
        at = 0
        while at < len(data):
            at += os.write(fd, data[at:])
        if before.st_size > len(data):
            os.ftruncate(fd, len(data))
    finally:
        os.close(fd)


def make_directory(path: str) -> None:
    """Make a directory with its parents, if it is not there: asking is less code than an exception."""
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)


def owner_ids(name: str) -> tuple[int, int]:
    """The uid and gid of a user of the image, remembered. Raises Failure."""
    if name not in _owners:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise Failure(f"the image has no user {name!r}") from None
        _owners[name] = entry.pw_uid, entry.pw_gid
    return _owners[name]


def prepare_first() -> None:
    """What a service manager would have done, when there is none: file systems, loopback, limits."""
    for source, target, kind, flags, data in (
        ("proc", "/proc", "proc", 14, ""), ("sysfs", "/sys", "sysfs", 14, ""),
        ("dev", "/dev", "devtmpfs", 2, "mode=0755"),
        ("devpts", "/dev/pts", "devpts", 10, "gid=5,mode=620,ptmxmode=000"),
        ("shm", "/dev/shm", "tmpfs", 6, "mode=1777"),
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


def load_on_demand(wanted: bool) -> None:
    """Whether the kernel may run modprobe for what it finds missing. While a clone wakes it may not: each
    mount makes it ask for modules that nobody has, and each asking is a program run, a quarter of a second
    on an emulated CPU and 12 MiB of memory that no sibling shares. All that is needed is loaded already."""
    write_to("/proc/sys/kernel/modprobe", "/sbin/modprobe\n" if wanted else "\n")


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
                 ["/usr/sbin/slurmstepd"], ["/usr/bin/srun", "--version"], ["/bin/bash", "-c", "exit 0"],
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


def practise() -> None:
    """Run what the first job will start, so that this VM has it loaded, and emulation its code translated.

    slurmstepd ends because nobody tells it what to do.
    """
    for argv in (["/bin/sh", "-c", ":"], ["/usr/sbin/slurmstepd"], ["/bin/bash", "-c", "exit 0"]):
        for _ in range(2):
            run(argv, 5.0)


def make_pipe(path: str) -> int:
    """A named pipe, held open, so that who reads from it waits until something is written. Its descriptor."""
    make_directory(os.path.dirname(path))
    try:
        os.mkfifo(path, 0o600)
    except FileExistsError:
        pass
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


# --- the channel -----------------------------------------------------------------------------------


_IDENTITY, _FORKED = b'{"type":"identity"', b'{"type":"forked"}\n'


class Channel:
    """JSON lines over the virtio port, either way at most `MAX_LINE` bytes each."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._buffer = bytearray()

    def wait(self) -> list[dict[str, Any]]:
        """Block until messages come; none if the host's end is closed. This is the read that clones wake up in."""
        while True:
            data = os.read(self.fd, 65536)
            if data.startswith(_IDENTITY):
                os.write(self.fd, _FORKED)  # before anything else: it takes the measure of the fork
            if not data:
                self._buffer.clear()
                return []
            messages = self._feed(data)
            if messages:
                return messages

    def watch(self) -> None:
        """Never block from now on; SIGIO says when the host's end opens, for while closed poll(2) returns at once."""
        fcntl.fcntl(self.fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)

    def send(self, type_: str, **fields: Any) -> None:
        """Send a message; without a host to read it, it is lost: the host asks again if it must know."""
        data = json.dumps({"type": type_, **fields}, separators=(",", ":")).encode() + b"\n"
        while data:
            try:
                data = data[os.write(self.fd, data) :]
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
            messages += self._feed(data)

    def _feed(self, data: bytes) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
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
        return messages


# --- becoming someone ------------------------------------------------------------------------------


def set_hosts(hostname: str, address: str, peers: list[list[str]]) -> None:
    lines = ["127.0.0.1 localhost", f"{address} {hostname}", *(f"{peer} {name}" for name, peer in peers)]
    write("/etc/hosts", "\n".join(lines) + "\n")


def add_users(users: list[dict[str, Any]]) -> None:
    """Add passwd and group entries. A group that the image has, by its number, keeps its name and gets the user."""
    passwd = read("/etc/passwd").splitlines()
    groups = [line.split(":") for line in read("/etc/group").splitlines() if line.count(":") >= 3]
    for user in users:
        name = user["name"]
        passwd = [line for line in passwd if not line.startswith(f"{name}:")]
        passwd.append(f"{name}:*:{user['uid']}:{user['gid']}::{user['home']}:{user['shell']}")
        for group, gid in user["groups"]:
            entry = next((g for g in groups if g[2] == str(gid)), None)
            if entry is None:
                entry = [group, "*", str(gid), ""]
                groups.append(entry)
            members = [m for m in entry[3].split(",") if m]
            if name not in members:
                entry[3] = ",".join([*members, name])
    write("/etc/passwd", "".join(f"{line}\n" for line in passwd))
    write("/etc/group", "".join(":".join(entry) + "\n" for entry in groups))


def mount_one(source: str, target: str, kind: str, options: str) -> None:
    """Mount a file system where fstab(5) would. NFSv4 goes straight to mount(2), which wants the addresses."""
    make_directory(target)
    if kind != "nfs4":
        load_on_demand(True)
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
        # As bytes: text would go through a codec, and each clone would load that anew.
        address = socket.gethostbyname(server.encode())  # type: ignore[arg-type]
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
    """Put plugged CPUs to work; wait until `cpus` of them, and `memory` MiB more than at the fork point, are there."""
    if cpus == 1 and not memory:
        return
    deadline = time.monotonic() + DAEMON_TIMEOUT
    while True:
        have = count_cpus("online")
        for number in range(1, cpus) if have < cpus else ():
            path = f"{CPUS}/cpu{number}/online"
            if os.path.exists(path) and read(path)[:1] == "0":
                write_to(path, "1")
                have = count_cpus("online")
        # A large guest has hundreds of blocks to look at: not before they can be there. A kernel may keep 1/64 of each.
        near = memory and usable_memory() - _boot_usable >= memory * 63 // 64
        blocks = memory_blocks() - _boot_memory if near else 0
        if have >= cpus and blocks >= memory:
            return
        if time.monotonic() > deadline:
            raise Failure(f"of {cpus} CPUs and {memory} MiB plugged memory, {have} and {blocks} MiB came")
        time.sleep(0.01)  # the kernel needs this very CPU for it


def write_to(path: str, text: str) -> None:
    """Write to a kernel's file."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def count_cpus(which: str) -> int:
    """CPUs that are `online`, or `possible`: what the kernel has room for; the file says `0-2,5`."""
    count = 0
    for part in read(f"{CPUS}/{which}").strip().split(","):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


def usable_memory() -> int:
    """MiB of memory that the kernel gives out, by one call."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20


def memory_blocks() -> int:
    """MiB of memory blocks that are online."""
    size = int(read(f"{BLOCKS}/block_size_bytes"), 16) >> 20
    names = [n for n in os.listdir(BLOCKS) if n[:6] == "memory" and n[6:].isdigit()]
    return size * sum(read(f"{BLOCKS}/{name}/online")[:1] == "1" for name in names)


def spawn(name: str, argv: list[str], user: str, traced: bool = False) -> int:
    """Start a program as `user`, its output in the log of that name; traced, it stops there. Returns its process id.

    Raises OSError, and KeyError if the image has no such user.
    """
    entry = pwd.getpwnam(user)
    groups = os.getgrouplist(user, entry.pw_gid)
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        log = os.open(f"{LOGS}/{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        for number in (signal.SIGCHLD, signal.SIGIO, signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setgroups(groups)
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
        if traced:
            ptrace(PTRACE_TRACEME, 0)
        # hwloc asks the CPU itself for what the kernel tells as well: each question is slow where CPUs are virtual.
        os.execve(argv[0], argv, {**os.environ, "HWLOC_COMPONENTS": "-x86"})
    except BaseException as error:
        os.write(2, f"{error}\n".encode())
    os._exit(127)


class Held:
    """A program that was started in the template and stopped before its first instruction, for each clone to release.

    By then it is loaded and linked, for all clones at once, but has read neither argument, key nor random byte of
    its own. What the kernel drew for it is alike in all clones: where it lies in memory, as with the kernel itself;
    the guard of its stack is drawn anew. Only x86-64 (ptrace(2), ld.so(8)). Raises OSError.
    """

    def __init__(self, name: str, program: str, user: str) -> None:
        self.program, self.user = program, user
        self.pid = spawn(name, [program], user, traced=True)
        self._stopped()
        self._memory = os.open(f"/proc/{self.pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        with open(f"/proc/{self.pid}/auxv", "rb") as file:
            entry = dict(struct.iter_unpack("QQ", file.read()))[AT_ENTRY]
        code = os.pread(self._memory, 1, entry)
        os.pwrite(self._memory, INT3, entry)
        ptrace(PTRACE_CONT, self.pid)
        self._stopped()
        os.pwrite(self._memory, code, entry)
        self._registers = (ctypes.c_ulong * 27)()
        ptrace(PTRACE_GETREGS, self.pid, self._registers)
        self._registers[RIP] = entry
        # As it starts, its stack holds the count of its arguments (one), them, 0, its environment, 0.
        words = os.pread(self._memory, 4096, self._registers[RSP] + 24)
        pointers = struct.unpack_from(f"{len(words) // 8}Q", words)
        self._environment = pointers[: pointers.index(0) + 1]

    def _stopped(self) -> None:
        status = os.waitpid(self.pid, 0)[1]
        if not os.WIFSTOPPED(status) or os.WSTOPSIG(status) != signal.SIGTRAP:
            raise OSError(errno.ESRCH, f"{self.program} did not stop: wait status {status:#x}")

    def release(self, argv: list[str]) -> int:
        """Let it run with these arguments; ps(1) goes on showing the first ones. Returns its process id."""
        text = b"".join(os.fsencode(word) + b"\0" for word in argv)
        at = self._registers[RSP] - len(text) & ~15
        pointers, place = [], at
        for word in argv:
            pointers.append(place)
            place += len(os.fsencode(word)) + 1
        stack = [len(argv), *pointers, 0, *self._environment]
        self._registers[RSP] = at - 8 * len(stack) & ~15
        os.pwrite(self._memory, text, at)
        os.pwrite(self._memory, struct.pack(f"{len(stack)}Q", *stack), self._registers[RSP])
        os.pwrite(self._memory, b"\0" + os.urandom(7), self._registers[FS_BASE] + STACK_GUARD)
        ptrace(PTRACE_SETREGS, self.pid, self._registers)
        os.close(self._memory)
        ptrace(PTRACE_DETACH, self.pid)
        return self.pid


_held: dict[str, Held] = {}  # by the name of the daemon


def hold_daemons() -> None:
    """Start what the clones will let run. What is missing in this image they will be told at the attempt."""
    for path in ("/etc/slurm", "/var/lib/munge", "/var/log/munge", "/var/spool/slurmd"):
        make_directory(path)  # making one costs a clone 15 ms; it sets owner and mode
    for name, user in (("munged", "munge"), ("slurmd", "root")):
        try:
            owner_ids(user)
            _held[name] = Held(name, f"/usr/sbin/{name}", user)
        except (OSError, KeyError, Failure):
            continue


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
        try:
            held = _held.pop(self.name, None)
            if held is not None and (held.program, held.user) == (self.argv[0], self.user):
                self.pid = held.release(self.argv)
            else:
                self.pid = spawn(self.name, self.argv, self.user)
        except (OSError, KeyError) as error:
            raise Failure(f"cannot start {self.name} ({self.argv[0]}): {error}") from error

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
        self.introduced: int | None = None  # a pipe in which a job waits until its user is known
        # What `hello` is answered with: a host that lost our word, or has restarted, asks again.
        self.state: dict[str, Any] = {"type_": "fork_point", "version": VERSION, "possible": count_cpus("possible")}

    def serve(self) -> None:
        """Wait at the fork point, then answer for ever; ends with the VM."""
        while self.state["type_"] == "fork_point" and (messages := self.channel.wait()):
            for message in messages:
                self.handle(message)
        self.channel.watch()
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
            elif message.get("type") == "introduce":
                self.introduce(message)
            elif message.get("type") == "audit":
                self.channel.send("audited", audit={**self.audit(), **self.state.get("audit", {}), **self.present()})
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
        self.state = {"type_": "becoming"}
        stages: list[tuple[str, float]] = []
        last = time.monotonic()

        def stage(name: str) -> None:
            nonlocal last
            now = time.monotonic()
            stages.append((name, round(now - last, 6)))
            last = now

        add_entropy(base64.b64decode(message["random"]))
        time.clock_settime(time.CLOCK_REALTIME, message["time"] + (time.monotonic() - last))
        identity = message["identity"]
        write("/etc/machine-id", identity["machine_id"] + "\n", 0o444)
        hostname, address = identity["hostname"], identity["address"]
        socket.sethostname(hostname)
        write("/etc/hostname", hostname + "\n")
        set_hosts(hostname, address.partition("/")[0], identity["peers"])
        add_users(identity["users"])
        stage("identity")
        set_network(interface(), identity["mac"], address, identity["gateway"])
        stage("network")
        membership = identity["membership"]
        for path, owner, mode in membership["directories"]:
            make_directory(path)
            os.chown(path, *owner_ids(owner))
            os.chmod(path, mode)
        for file in membership["files"]:
            make_directory(os.path.dirname(file["path"]))
            write(file["path"], base64.b64decode(file["content"]), file["mode"], owner_ids(file["owner"]))
        stage("files")
        plug(message["cpus"], message["plugged"])
        stage("plugged")
        if not identity["users"]:
            self.introduced = make_pipe(INTRODUCED)
        # The daemons first, for they wait for others in between, and the mounts in those moments. Nobody runs
        # a job here before `started` is said.
        for daemon in [Daemon(spec) for spec in membership["daemons"]]:
            self._start(daemon)
            self._await(daemon)
            stage(f"daemon_{daemon.name}")
        for each in identity["mounts"]:
            mount_one(each["source"], each["target"], each["type"], each["options"])
            self.mounts.append(each["target"])
        stage("mounts")
        load_on_demand(True)
        if not identity["users"]:  # a spare: nobody waits for it yet
            practise()
            stage("practised")
        self._say("started", stages=stages, audit=self.audit())
        if os.getpid() == 1:
            # Not before: a huge page for each of our own first touches would be 2 MiB that no sibling shares.
            write_to("/sys/kernel/mm/transparent_hugepage/enabled", "always")

    def introduce(self, message: dict[str, Any]) -> None:
        """Know one more user: this VM was a node before anybody knew whose job it would run."""
        add_users([message["user"]])
        if abs(message["time"] - time.time()) > CLOCK_MAY_BE_OFF:
            time.clock_settime(time.CLOCK_REALTIME, message["time"])
        if self.introduced is not None:
            try:
                os.write(self.introduced, b"\n" * MOST_WAIT)
            except BlockingIOError:
                pass  # told before, and so often that there is enough to read
        self.channel.send("introduced")

    def audit(self) -> dict[str, Any]:
        """What tells clones apart, and their size. The random bytes are used for nothing else."""
        boot_id = read("/proc/sys/kernel/random/boot_id").strip()
        return {"cpus": count_cpus("online"), "memory": usable_memory(), "machine_id": read("/etc/machine-id").strip(),
                "boot_id": boot_id, "random": os.urandom(8).hex()}  # fmt: skip

    def present(self) -> dict[str, Any]:
        """What it is and has now: its names on the network, the ends of its host keys, the time in milliseconds."""
        name = interface()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            address = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("16s24x", name.encode()))[20:24]
        keys = [read(f"{SSH}/{file}").split()[1][-20:] for file in sorted(os.listdir(SSH)) if file.endswith("_key.pub")
                ] if os.path.isdir(SSH) else []  # fmt: skip
        return {"hostname": socket.gethostname(), "mac": read(f"/sys/class/net/{name}/address").strip(),
                "address": socket.inet_ntoa(address), "host_keys": " ".join(keys),
                "now": time.time_ns() // 1_000_000, "fresh": os.urandom(8).hex()}  # fmt: skip

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
            time.sleep(0.005)

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
            self.channel.send(
                "daemon_ended", name=daemon.name, reason=f"{_ending(daemon.status or 0)}: {daemon.tail()}"
            )

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


# --- rehearsing, in a template only ----------------------------------------------------------------

_REHEARSAL = "/run/multiverse-rehearsal"
_SLURM_CONF = f"""ClusterName=rehearsal
SlurmctldHost=localhost(127.0.0.1)
AuthInfo=socket={_REHEARSAL}/munge
SlurmdSpoolDir={_REHEARSAL}
SlurmdPidFile={_REHEARSAL}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
NodeName=rehearsal NodeAddr=127.0.0.1 CPUs=1
"""


def rehearse() -> None:
    """Do once, with throwaway facts, what each clone will do: what that reads, resolves or allocates is shared then.

    All of it is undone; the keys used are made up and die with the processes that held them.
    """
    line = json.dumps(
        {"type": "rehearsal", "random": base64.b64encode(os.urandom(64)).decode(), "list": [1.5, None, {}]}
    )
    add_entropy(base64.b64decode(json.loads(line)["random"]))
    time.clock_settime(time.CLOCK_REALTIME, time.time())
    kept = {
        path: read(path) for path in ("/etc/passwd", "/etc/group", "/etc/hosts", "/etc/machine-id", "/etc/hostname")
    }
    add_users(
        [
            {
                "name": "rehearsal",
                "uid": 64999,
                "gid": 64999,
                "home": "/",
                "shell": "/bin/sh",
                "groups": [["rehearsal", 64999]],
            }
        ]
    )
    set_hosts("rehearsal", "127.0.0.1", [["a", "127.0.0.1"]])
    for path, content in kept.items():
        write(path, content, 0o444 if path == "/etc/machine-id" else 0o644)
    name = interface()
    set_network(name, read(f"/sys/class/net/{name}/address").strip(), "192.0.2.1/32", "")  # TEST-NET-1
    _netlink([_request(RTM_DELADDR, _address(socket.if_nametoindex(name), "192.0.2.1/32"))])
    plug(1, 0)
    _rehearse_daemons()


def _rehearse_daemons() -> None:
    try:
        owner = pwd.getpwnam("munge")
    except KeyError:
        return
    os.makedirs(_REHEARSAL, exist_ok=True)
    os.chown(_REHEARSAL, owner.pw_uid, owner.pw_gid)
    write(f"{_REHEARSAL}/key", os.urandom(128), 0o400, (owner.pw_uid, owner.pw_gid))
    write(f"{_REHEARSAL}/slurm.conf", _SLURM_CONF)
    options = [f"--{name}={_REHEARSAL}/{value}" for name, value in (
        ("key-file", "key"), ("socket", "munge"), ("pid-file", "munged.pid"), ("seed-file", "seed"),
        ("log-file", "log"))]  # fmt: skip
    munged = Daemon({"name": "munged", "argv": ["/usr/sbin/munged", "-F", "-f", *options], "user": "munge",
                     "ready_path": f"{_REHEARSAL}/munge"})  # fmt: skip
    argv = ["/usr/sbin/slurmd", "-D", "-N", "rehearsal", "-f", f"{_REHEARSAL}/slurm.conf"]
    slurmd = Daemon({"name": "slurmd", "argv": argv, "user": "root", "ready_path": ""})  # fmt: skip
    started = []
    try:
        for daemon, seconds in ((munged, 1.0), (slurmd, 4.0)):
            daemon.start()
            started.append(daemon)
            deadline = time.monotonic() + seconds
            # slurmd has no controller to register with and would try for ever: it has had what it needs by then.
            while time.monotonic() < deadline and os.waitpid(daemon.pid, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
    except (Failure, ChildProcessError):
        pass
    finally:
        for daemon in started:
            try:
                os.killpg(daemon.pid, signal.SIGKILL)
                os.waitpid(daemon.pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
        for directory in (_REHEARSAL, LOGS):
            for entry in os.listdir(directory):
                path = f"{directory}/{entry}"
                if os.path.isdir(path):
                    run(["/bin/rm", "-rf", path])
                else:
                    os.unlink(path)
        os.rmdir(_REHEARSAL)


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
    global _boot_memory, _boot_usable
    channel = Channel(find_port())
    try:
        _boot_memory, _boot_usable = memory_blocks(), usable_memory()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            link_up(sock, interface())
        load_on_demand(False)
        if TEMPLATE in read("/proc/cmdline").split():
            warm()
            rehearse()
            hold_daemons()
            os.sync()  # or else each clone's first act would be to write this back
        agent = Agent(channel, reading)
        # What exists now never goes away: the collector need not touch, and so unshare, its pages.
        gc.collect()
        gc.freeze()
        gc.disable()
        channel.send(**agent.state)
        agent.serve()
    except BaseException as error:
        channel.send("failed", reason=f"the agent ended: {type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main()
