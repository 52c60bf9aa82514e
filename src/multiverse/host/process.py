"""Processes that outlive us: started in a session of their own, known by pid *and* start time."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_DEAD = frozenset({"Z", "X", "x"})
TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# proc(5), oom_score_adj: it counts as if it had half of the machine's memory more. So the kernel, when it has to
# end something, ends a VM rather than slurmctld or the daemon, but not instead of what has really taken it all.
_GIVES_WAY = 500


def hand_on_nothing() -> None:
    """What this process was given by whoever started it goes to none that it starts: a lock or a pipe of his would be
    held for as long as a VM lives. What Python opens is close-on-exec anyway."""
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208  (numbers, not paths)
        if int(entry) > 2:
            with suppress(OSError):  # it was the list's own
                os.set_inheritable(int(entry), False)


def spawn(argv: Sequence[str], fds: Sequence[int], log: Path, environment: Mapping[str, str]) -> tuple[int, int]:
    """Start a program in a new session with `fds` open at the same numbers. Returns pid and start time.

    Only these are inherited: the others are close-on-exec (`hand_on_nothing`), and glibc clears that flag for a dup2
    onto itself.
    When memory runs out it is among the first that the kernel ends.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, out, 1), (os.POSIX_SPAWN_DUP2, out, 2),
                   *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds)]  # fmt: skip
        pid = os.posix_spawnp(argv[0], list(argv), environment, file_actions=actions, setsid=True,
                              setsigdef=range(1, 32), setsigmask=())  # fmt: skip
    finally:
        os.close(null)
        os.close(out)
    with suppress(OSError):  # it has ended
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(_GIVES_WAY))
    return pid, start_time(pid)


def _stat(pid: int) -> list[str] | None:
    """Fields of proc(5) stat from the third (state) on; the second may hold spaces and parentheses."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123  (on the path of each look)
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def start_time(pid: int) -> int:
    """When it started, in clock ticks since boot; 0 if there is none such."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def alive(pid: int, started: int) -> bool:
    """Is it the same process, and neither dead nor waiting to be reaped?"""
    fields = _stat(pid) if pid > 0 else None
    return fields is not None and fields[0] not in _DEAD and int(fields[19]) == started


def cpu_seconds(pid: int) -> float:
    """User and system time spent."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def resident(pid: int) -> tuple[float, float]:
    """(private, shared) memory in MiB, from statm of proc(5): anonymous pages, which go when it ends, and pages of
    files, which others may map too or would. One short line, some ten microseconds; `memory` is exact."""
    try:
        with open(f"/proc/{pid}/statm") as file:  # noqa: PTH123  (on the path of each look)
            _, pages, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0.0, 0.0
    return max(0, pages - shared) * _PAGE / 2**20, shared * _PAGE / 2**20


def memory(pid: int, shared_file: str = "") -> tuple[float, float]:
    """(unique, proportional) memory in MiB: private pages, and PSS (proc(5), smaps).

    Of a mapping of `shared_file` only the pages that were written count as unique: the others stay
    with the file when the process ends, even if nobody else happens to map them now.
    """
    unique = proportional = 0
    shared = False
    try:
        with open(f"/proc/{pid}/smaps") as file:  # noqa: PTH123
            for line in file:
                key, _, rest = line.partition(":")
                if key == "Anonymous" if shared else key in ("Private_Clean", "Private_Dirty", "Private_Hugetlb"):
                    unique += int(rest.split()[0])
                elif key == "Pss":
                    proportional += int(rest.split()[0])
                elif "-" in key:  # the head of a mapping: its range, and last its path
                    shared = bool(shared_file) and line.rstrip().removesuffix(" (deleted)").endswith(shared_file)
    except OSError:
        return 0.0, 0.0
    return unique / 1024, proportional / 1024


def end(pid: int, started: int, timeout: float = 10.0) -> bool:
    """Kill that process, never one that got its number, and wait until it is gone. False if it does not go."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        # The handle was had first: if the process is ours now, the handle is its, whatever comes later.
        if start_time(pid) != started:
            return True
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            return True
        return wait(handle, timeout)
    finally:
        os.close(handle)


def wait(handle: int, timeout: float) -> bool:
    """Wait for a process to end by its pidfd, and reap it if it is our child."""
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    if not poller.poll(timeout * 1000):
        return False
    try:
        os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        pass
    return True


def reap(pid: int, started: int) -> None:
    """Reap that process if it is our child and has died, and no other one that got its number."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if start_time(pid) == started:
            os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        pass
    finally:
        os.close(handle)


def with_part(part: str) -> Iterator[tuple[int, int]]:
    """(pid, start time) of each process whose command line has `part`, up to the end of an argument or a comma.

    For the moment between a start and its being written down: the command line tells whose it is.
    """
    wanted = (os.fsencode(part) + b"\0", os.fsencode(part) + b",")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if any(w in line for w in wanted) and (started := start_time(int(entry.name))):
                yield int(entry.name), started
