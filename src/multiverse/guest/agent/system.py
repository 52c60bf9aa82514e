"""The contract of agent and host, and functions for files, system calls and programs that all modules use."""

# ruff: noqa: PTH103, PTH110, PTH112, PTH119, PTH120, PTH123

from __future__ import annotations

import ctypes
import fcntl
import os
import pwd
import signal
import struct
import time

VERSION = 1  # of the protocol
PORT = "org.multiverse.agent"  # name of the virtio port
MAX_LINE = 1 << 20  # bytes of one message, in either direction
TEMPLATE = "multiverse.template"  # on the kernel's command line of a VM that will be frozen as a template
DISK = "multiverse.disk="  # there, too: MiB of the disk that users may write; the rest of it is kept reserved
USER_ADDED = "/run/multiverse/user-added"  # a pipe that can be read once the job's user is known
MOST_WAIT = 64  # lines that are written to that pipe; each waiting process reads one

# TCP, where the agent accepts the tasks of a job. No user's process can listen there, and NFS mounts connect from other
# ports: from 600 on (bindresvport(3)), or 665 (sunrpc.min_resvport).
TASKS_PORT = 599
LONGEST_FRAME = 1 << 20  # bytes in a frame of a task's connection
SOCKETS = "/run/multiverse/tasks"  # of the processes that carry tasks, by pid

CGROUPS = "/sys/fs/cgroup"
LOGS = "/var/log/multiverse"  # directory of the daemons' logs
KILL_TIMEOUT = 5.0  # seconds until a killed process has ended
DAEMON_TIMEOUT = 30.0  # seconds until a daemon must be ready, a plugged CPU or memory usable, or a mount done


class GuestAgentError(Exception):
    """The agent could not do what the host asked for. The text is for the operator."""


# --- files -------------------------------------------------------------------------------------------


class suppress:
    """contextlib.suppress, without loading that module."""

    def __init__(self, *errors: type[BaseException]) -> None:
        self.errors = errors

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self.errors)


_known_owners = {"root": (0, 0)}


def read(path: str) -> str:
    """The content of a small file, at most MAX_LINE bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, MAX_LINE).decode("utf-8", "surrogateescape")
    finally:
        os.close(fd)


def write(path: str, content: str | bytes, mode: int = 0o644, owner: tuple[int, int] = (0, 0)) -> None:
    """Make a file hold `content`, with this mode and owner (uid, gid). Nobody else can open a new file before that. It
    is written in place: a rename would make the kernel allocate and write blocks. A symbolic link is not followed."""
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


def write_kernel_file(path: str, text: str) -> None:
    """Write to a file of procfs or sysfs, by one call."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def make_directory(path: str) -> None:
    """Make a directory and its parents. Testing first runs less code than catching an exception."""
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)


def make_pipe(path: str) -> int:
    """Make a named pipe and return a descriptor of it, which is open for writing, so that readers block."""
    make_directory(os.path.dirname(path))
    with suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def owner_ids(name: str) -> tuple[int, int]:
    """The uid and gid of a user of the image. Raises GuestAgentError for an unknown user."""
    if name not in _known_owners:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise GuestAgentError(f"the image has no user {name!r}") from None
        _known_owners[name] = entry.pw_uid, entry.pw_gid
    return _known_owners[name]


# --- system calls ------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)

RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207  # <linux/random.h>
SYS_FINIT_MODULE = 313  # <asm/unistd_64.h>
MNT_DETACH, MS_BIND = 2, 4096  # <sys/mount.h>
PTRACE_TRACEME, PTRACE_CONT, PTRACE_GETREGS, PTRACE_SETREGS, PTRACE_DETACH = 0, 7, 12, 13, 17  # <linux/ptrace.h>


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    args = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(_libc.mount(*args), target)


def unmount(target: str, flags: int = 0) -> None:
    _check(_libc.umount2(os.fsencode(target), flags), target)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)


def fallocate(fd: int, size: int) -> None:
    """fallocate(2) of the first `size` bytes. Where the file system cannot, os.posix_fallocate would write them."""
    args = (ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_long(0), ctypes.c_long(size))
    _check(_libc.fallocate(*args), "fallocate")


def add_entropy(seed: bytes) -> None:
    """Give random bytes to the kernel and make its generator use them at once (random(4)). Adding them alone would
    leave two clones with identical bytes until the kernel reseeds its generator."""
    device = os.open("/dev/random", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, RNDADDENTROPY, struct.pack("ii", len(seed) * 8, len(seed)) + seed)
        fcntl.ioctl(device, RNDRESEEDCRNG)
    finally:
        os.close(device)


def load_module(path: str) -> None:
    """finit_module(2), by number because glibc has no wrapper. A module that is loaded already is no error."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.syscall(ctypes.c_long(SYS_FINIT_MODULE), ctypes.c_int(fd), b"", ctypes.c_int(0)), path)
    except FileExistsError:
        pass
    finally:
        os.close(fd)


def ptrace(request: int, pid: int, data: ctypes.Array[ctypes.c_ulong] | None = None) -> None:
    _check(_libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), None, data), "ptrace")


def sync_file_system(path: str) -> None:
    """syncfs(2): write back the file system that `path` is in."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.syncfs(ctypes.c_int(fd)), path)
    finally:
        os.close(fd)


# --- programs ----------------------------------------------------------------------------------------

HWLOC = {"HWLOC_COMPONENTS": "-x86", "HWLOC_PLUGINS_PATH": "/var/empty"}
"""slurmd and slurmstepd examine the machine with hwloc. Without the first variable it would ask the CPU (CPUID) for
facts that the kernel also has, and a virtual CPU answers slowly. Without the second it would load plugins with the
libraries of X11, OpenCL and XML, to look for GPUs."""


def run(argv: list[str], timeout: float = 20.0) -> int:
    """Run a program to its end, or kill it after `timeout` seconds. Returns its wait status, or -1."""
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


def preload_job_programs() -> None:
    """Run the programs of the first job: then they are in memory and translated. slurmstepd gets no request and
    ends."""
    for argv in (["/bin/sh", "-c", ":"], ["/usr/sbin/slurmstepd"], ["/bin/bash", "-c", "exit 0"]):
        for _ in range(2):
            run(argv, 5.0)


def spawn(name: str, argv: list[str], user: str, traced: bool = False) -> int:
    """Start a program as `user` in a process group of its own, with its output in the log `name`. Returns its pid. A
    traced program stops when it is executed. Raises OSError, and KeyError if the image has no such user."""
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
        os.execve(argv[0], argv, {**os.environ, **HWLOC})
    except BaseException as error:
        os.write(2, f"{error}\n".encode())
    os._exit(127)


def kill_and_wait(pid: int) -> None:
    """Kill a process, and wait until it has ended; whoever collects its wait status may do so later."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_TIMEOUT
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.005)


def has_ended(pid: int) -> bool:
    """Whether there is no such process, or its wait status alone is left of it."""
    try:
        return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def ending(status: int) -> str:
    """How a process ended, for the operator, by its wait status."""
    code = os.waitstatus_to_exitcode(status)
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


# --- the kernel's modules ----------------------------------------------------------------------------

MODULES = ("virtio_console", "virtio_net", "nfsv4", "nfs")


def load_modules() -> None:
    """Load the modules that each clone needs, after their dependencies (modules.dep(5))."""
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


def load_on_demand(allowed: bool) -> None:
    """Allow or forbid the kernel to run modprobe for a module that it misses. It is forbidden while a clone starts: all
    modules that are needed are loaded by then, but each mount makes the kernel ask for modules that do not exist. Each
    time it would run a program, which takes 0.25 s on an emulated CPU and 12 MiB of memory that clones do not share."""
    write_kernel_file("/proc/sys/kernel/modprobe", "/sbin/modprobe\n" if allowed else "\n")
