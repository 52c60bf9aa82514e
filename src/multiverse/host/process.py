"""Processes of VMs, which outlive this one: each is started in a session of its own."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from multiverse.core.errors import Broken
from multiverse.system.processes import ProcessIdentity, stat_fields

T = TypeVar("T")

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# proc(5), oom_score_adj: the process counts as if it had half of the machine's memory more. So the kernel's OOM killer
# ends a VM rather than slurmctld or the daemon, but not instead of a process that took even more.
_OOM_SCORE_ADJUSTMENT = 500


# setresgid(2) and setresuid(2) in <asm/unistd.h>: on x86-64, and where Linux has one list for all machines.
_SET_IDS = (119, 117) if os.uname().machine == "x86_64" else (149, 147)
_libc = ctypes.CDLL(None, use_errno=True)
_DEFAULT_SIGNALS = frozenset(range(1, 32)) - {signal.SIGXFSZ}


def set_all_close_on_exec() -> None:
    """Keep descriptors that this process inherited from the programs that it starts: a lock or a pipe among them would
    stay open as long as a VM lives. Python opens its own files close-on-exec."""
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208  (numbers, not paths)
        if int(entry) > 2:
            with suppress(OSError):  # the descriptor of the listing itself is closed by now
                os.set_inheritable(int(entry), False)


def spawn(argv: Sequence[str], fds: Sequence[int], log: Path, environment: Mapping[str, str]) -> ProcessIdentity:
    """Start a program with its output appended to `log`; see `execute`."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return identify(execute(argv, fds, out, environment))
    finally:
        os.close(out)


def execute(argv: Sequence[str], fds: Sequence[int], out: int, environment: Mapping[str, str]) -> int:
    """Start a program in a new session, with its output written to `out` and `fds` open at the same numbers. Returns
    its pid. Other descriptors are close-on-exec (`set_all_close_on_exec`); glibc clears that flag for a dup2 of a
    descriptor onto itself. SIGXFSZ stays ignored, as Python has it: a program that reaches the limit of `limit_files`
    gets an error and is not killed. Raises OSError if the program cannot be executed."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, out, 1), (os.POSIX_SPAWN_DUP2, out, 2),
                   *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds)]  # fmt: skip
        return os.posix_spawnp(argv[0], list(argv), environment, file_actions=actions, setsid=True,
                               setsigdef=_DEFAULT_SIGNALS, setsigmask=())  # fmt: skip
    finally:
        os.close(null)


def limit_files(process: ProcessIdentity, uid: int, size: int) -> None:
    """Let no file of that process grow beyond `size` bytes (RLIMIT_FSIZE): writes fail there with EFBIG. `uid` is its
    user, 0 for that of this process. A process that has ended is no error. Raises `Broken` if this is not permitted."""
    try:
        try:
            _limit(process, resource.RLIMIT_FSIZE, size)
        except PermissionError:  # prlimit(2): only with CAP_SYS_RESOURCE may a user limit processes of others
            if not uid:
                raise
            _call_as(uid, lambda: _limit(process, resource.RLIMIT_FSIZE, size))
    except (OSError, ValueError) as error:  # the resource module raises ValueError where a limit cannot be raised
        hint = "the daemon needs CAP_SYS_RESOURCE, or CAP_SETUID and CAP_SETGID"
        raise Broken(f"cannot limit the files of process {process.pid}: {error}", hint=hint) from error


def limit_locked_memory(process: ProcessIdentity, size: int) -> None:
    """Let that process keep so many bytes of memory in place (RLIMIT_MEMLOCK). A process that has ended is no error.
    Raises `Broken` if this is not permitted."""
    try:
        _limit(process, resource.RLIMIT_MEMLOCK, size)
    except (OSError, ValueError) as error:
        what = f"cannot let process {process.pid} keep {size >> 20} MiB in place: {error}"
        raise Broken(what, hint="the agent needs CAP_SYS_RESOURCE") from error


def _limit(process: ProcessIdentity, which: int, size: int) -> None:
    with suppress(ProcessLookupError):
        if process.is_alive():
            resource.prlimit(process.pid, which, (size, size))


def _call_as(uid: int, function: Callable[[], None]) -> None:
    """Call a function in a thread that has that user and group. On Linux each thread has ids of its own; glibc's
    functions would change those of all threads (nptl(7))."""

    def run() -> None:
        for number in _SET_IDS:
            if _libc.syscall(*map(ctypes.c_long, (number, uid, uid, uid))):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        function()

    in_thread(run)


def in_thread(work: Callable[[], T]) -> T:
    """Do `work` in a thread that ends afterwards, so that no other thread has the ids or namespaces that it takes."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return done.result()


def identify(pid: int) -> ProcessIdentity:
    """The process that was just started. When memory runs out, the kernel ends it among the first."""
    with suppress(OSError):  # the program has ended already
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(_OOM_SCORE_ADJUSTMENT))
    return ProcessIdentity.of(pid)


def cpu_seconds(pid: int) -> float:
    """User and system time of the process in seconds; 0 if there is none."""
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def available_memory() -> int:
    """MiB that this machine could give to new processes without swapping (proc(5), MemAvailable); 0 if unknown."""
    try:
        with open("/proc/meminfo") as file:  # noqa: PTH123  (read at each observation)
            return next((int(line.split()[1]) >> 10 for line in file if line.startswith("MemAvailable:")), 0)
    except OSError:
        return 0


def resident_memory(pid: int) -> tuple[float, float]:
    """(private, shared) memory in MiB, from /proc/PID/statm; zeros if there is no such process. Private are anonymous
    pages, which are freed when the process ends. Shared are pages of files, even if no other process maps them. Reading
    takes some ten microseconds; `exact_memory` is exact, and slower."""
    try:
        with open(f"/proc/{pid}/statm") as file:  # noqa: PTH123  (read at each observation, for each VM)
            _, pages, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0.0, 0.0
    return max(0, pages - shared) * _PAGE / 2**20, shared * _PAGE / 2**20


def exact_memory(pid: int, shared_file: str = "") -> tuple[float, float]:
    """(unique, proportional) memory in MiB: private pages, and PSS (proc(5), smaps). Takes milliseconds. Mappings of
    files whose path ends with `shared_file` count as unique with their written pages only: the other pages belong to
    the file, even if no other process maps them."""
    unique = proportional = 0
    shared = False
    try:
        with open(f"/proc/{pid}/smaps") as file:  # noqa: PTH123
            for line in file:
                key, _, rest = line.partition(":")
                if key == "Anonymous" if shared else key in ("Private_Clean", "Private_Dirty", "Private_Hugetlb"):
                    unique += int(rest.split()[0])
                if key in ("Pss", "Private_Hugetlb"):  # huge pages are in no other figure
                    proportional += int(rest.split()[0])
                elif "-" in key:  # the head of a mapping: its range, and last its path
                    shared = bool(shared_file) and line.rstrip().removesuffix(" (deleted)").endswith(shared_file)
    except OSError:
        return 0.0, 0.0
    return unique / 1024, proportional / 1024


def kill(process: ProcessIdentity, timeout: float = 10.0) -> bool:
    """Kill that process, and wait up to `timeout` seconds until it is gone. False if it is still there. A process that
    has ended is success. Another process with the same pid is not touched."""
    handle = process.open()
    if handle is None:
        return True
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return _wait(handle, timeout)
    except ProcessLookupError:
        return True
    finally:
        os.close(handle)


def _wait(handle: int, timeout: float) -> bool:
    """Wait for a process to end by its pidfd, and reap it if it is a child of this one."""
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    if not poller.poll(timeout * 1000):
        return False
    with suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOHANG)
    return True


def reap(process: ProcessIdentity) -> None:
    """Reap that process if it has died and is a child of this one."""
    handle = process.open()
    if handle is not None:
        _wait(handle, 0.0)
        os.close(handle)


def find_by_argument(part: str) -> Iterator[ProcessIdentity]:
    """Each process with `part` in its command line, up to the end of an argument or a comma, also an unrecorded one."""
    wanted = (os.fsencode(part) + b"\0", os.fsencode(part) + b",")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if any(each in line for each in wanted):
                found = ProcessIdentity.of(int(entry.name))
                if found.started:
                    yield found
