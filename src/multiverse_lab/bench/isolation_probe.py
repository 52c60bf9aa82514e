"""Tries what a job can do to others, from inside: a program that runs as the job.

`TRIED` has the host and port to report to, the job's id, the token of another user's process and the port at which it
listens, the directory that is shared, the number of processes to start and the MiB of memory to use. Each trial is told
as a line of JSON as soon as it is over, because a later one may end the job. Nothing that it tries changes anything
beyond the job: modules are loaded without content, the clock is set to what it shows.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRIED: dict[str, Any] = {}  # what the line is replaced by
_LIBC = ctypes.CDLL(None, use_errno=True)
_INIT_MODULE = {"x86_64": 175, "aarch64": 105}
_NEW_NAMESPACES = 0x10000000 | 0x00020000  # CLONE_NEWUSER and CLONE_NEWNS
_READ_ALL = 3  # SYSLOG_ACTION_READ_ALL
_NO_MEMORY = 3  # the exit status of a process that got none


def other_process() -> Any:
    own = os.getpid()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int(path.name) != own and TRIED["token"].encode() in (path / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


def other_file() -> Any:
    for path in Path("/tmp").glob(f"{TRIED['token']}*"):
        try:
            return bool(path.read_text())
        except OSError:
            continue
    return False


def other_port() -> Any:
    for host in ("127.0.0.1", *_gateways()):
        try:
            with socket.create_connection((host, TRIED["loopback"]), 2) as connection:
                if connection.recv(256).decode() == TRIED["token"]:
                    return True
        except OSError:
            continue
    return False


def _gateways() -> list[str]:
    """slirp4netns can show the loopback of its host at the gateway."""
    lines = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    return [socket.inet_ntoa(int(line[2], 16).to_bytes(4, "little")) for line in lines if line[1] == "00000000"]


def kernel() -> Any:
    found = os.uname()
    return [found.release, found.version]


def kernel_log() -> Any:
    """The last lines that can be read; None if none can."""
    buffer = ctypes.create_string_buffer(1 << 20)
    size = _LIBC.klogctl(_READ_ALL, buffer, len(buffer))
    return buffer.raw[:size].decode(errors="replace").splitlines()[-3:] if size > 0 else None


def uid() -> Any:
    return os.getuid()


def module() -> Any:
    """Whether a kernel module can be loaded: without the right to it, the kernel does not look at what is given."""
    number = _INIT_MODULE.get(os.uname().machine)
    if number is None:
        return None
    _LIBC.syscall(number, None, 0, None)
    return ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)


def mounting() -> Any:
    """Whether a file system can be mounted, and if not, whether it can in further namespaces."""
    with tempfile.TemporaryDirectory() as place:
        for own in (False, True):
            if _in_child(lambda own=own: _mount(place, own)) == 0:  # type: ignore[misc]
                return "own namespace" if own else "yes"
    return "no"


def _mount(place: str, own: bool) -> int:
    if not own and _LIBC.unshare(0x00020000):  # not into the namespace of the job
        return 1
    if own and _LIBC.unshare(_NEW_NAMESPACES):
        return 1
    return int(_LIBC.mount(b"none", place.encode(), b"tmpfs", 0, None) != 0)


def clock() -> Any:
    try:
        time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME))
    except OSError:
        return False
    return True


def owner() -> Any:
    """Leave a file in the shared directory that belongs to root, if that is possible. Whose it is, is seen outside."""
    place = Path(TRIED["shared"]) / f"{TRIED['token']}-{TRIED['job']}"
    place.write_text("")
    try:
        os.chown(place, 0, 0)
    except OSError:
        return False
    return True


def processes() -> Any:
    """Start processes, report that, and end them when it has been answered; how many there were."""
    found = list[int]()
    for _ in range(TRIED["processes"]):
        try:
            child = os.fork()
        except OSError:
            break
        if child == 0:
            signal.pause()
            os._exit(0)
        found.append(child)
    report("started", len(found))
    _REPORT.recv(64)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(found)


def memory() -> Any:
    """What becomes of a process that uses more memory than the job has requested."""
    status = _in_child(_use)
    return "killed" if status < 0 else {0: "got it", _NO_MEMORY: "refused"}.get(status)


def _use() -> int:
    Path("/proc/self/oom_score_adj").write_text("1000")  # it is to be killed, and not the job
    try:
        got = mmap.mmap(-1, TRIED["memory"] << 20)
    except OSError:
        return _NO_MEMORY
    for page in range(0, len(got), 4096):
        got[page] = 1
    return 0


def _in_child(work: Callable[[], int]) -> int:
    """What `work` returns in a process of its own; negative if that was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def report(name: str, found: Any) -> None:
    _REPORT.sendall(json.dumps([name, found]).encode() + b"\n")


TRIALS = (
    other_process, other_file, other_port, kernel, kernel_log, uid, module, mounting, clock, owner, processes, memory,
)  # fmt: skip

if TRIED:
    _REPORT = socket.create_connection((TRIED["host"], TRIED["port"]), 60)
    _REPORT.sendall(f"{TRIED['job']}\n".encode())
    _REPORT.recv(64)
    for trial in TRIALS:
        if trial is memory:
            report("memory", "tries")  # what is known if the job does not survive it
        report(trial.__name__, trial())
