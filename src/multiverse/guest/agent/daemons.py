"""The daemons that make a clone a node. In the template they are stopped before their first instruction."""

# ruff: noqa: PTH108, PTH110, PTH123

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import time
from typing import Any

from multiverse.guest.agent.system import (
    DAEMON_TIMEOUT,
    LOGS,
    PTRACE_CONT,
    PTRACE_DETACH,
    PTRACE_GETREGS,
    PTRACE_SETREGS,
    GuestAgentError,
    ending,
    kill_and_wait,
    make_directory,
    owner_ids,
    ptrace,
    spawn,
    suppress,
)

AT_ENTRY = 9  # <linux/auxvec.h>: the address of a program's first instruction
RIP, RSP, FS_BASE, REGISTERS = 16, 19, 21, 27  # <sys/user.h> of x86-64: places in user_regs_struct, and its words
STACK_GUARD = 0x28  # place of the stack guard in the thread's control block (glibc's tcbhead_t)
INT3 = b"\xcc"  # the breakpoint instruction


class StoppedProcess:
    """A program that is stopped before its first instruction; `release` continues it with arguments. The program is
    loaded and linked once for all clones, but has read no argument, key or random byte. The clones share the random
    place of the program in memory, as they share the kernel's. The guard of its stack is drawn again at its release.
    This works on x86-64 only (ptrace(2), ld.so(8)). Raises OSError."""

    def __init__(self, name: str, program: str, user: str) -> None:
        self.program, self.user = program, user
        self.pid = spawn(name, [program], user, traced=True)
        self._wait_for_stop()
        self._memory = os.open(f"/proc/{self.pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        with open(f"/proc/{self.pid}/auxv", "rb") as file:
            entry = dict(struct.iter_unpack("QQ", file.read()))[AT_ENTRY]
        code = os.pread(self._memory, 1, entry)
        os.pwrite(self._memory, INT3, entry)
        ptrace(PTRACE_CONT, self.pid)
        self._wait_for_stop()
        os.pwrite(self._memory, code, entry)
        self._registers = (ctypes.c_ulong * REGISTERS)()
        ptrace(PTRACE_GETREGS, self.pid, self._registers)
        self._registers[RIP] = entry
        # A program's stack begins with the number of its arguments (here one), the arguments, 0, its environment, 0.
        words = os.pread(self._memory, 4096, self._registers[RSP] + 24)
        pointers = struct.unpack_from(f"{len(words) // 8}Q", words)
        self._environment = pointers[: pointers.index(0) + 1]

    def _wait_for_stop(self) -> None:
        status = os.waitpid(self.pid, 0)[1]
        if not os.WIFSTOPPED(status) or os.WSTOPSIG(status) != signal.SIGTRAP:
            raise OSError(errno.ESRCH, f"{self.program} did not stop: wait status {status:#x}")

    def release(self, argv: list[str]) -> int:
        """Continue the program with these arguments, and return its pid. ps(1) goes on showing its first arguments."""
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


_stopped: dict[str, StoppedProcess] = {}  # by the name of the daemon


def stop_daemons_at_entry() -> None:
    """Start the daemons that clones will continue. A clone that starts a missing one reports it."""
    for path in ("/etc/slurm", "/var/lib/munge", "/var/log/munge", "/var/spool/slurmd"):
        make_directory(path)  # making one takes a clone 15 ms; the clone sets owner and mode
    for name, user in (("munged", "munge"), ("slurmd", "root")):
        with suppress(OSError, KeyError, GuestAgentError):
            owner_ids(user)
            _stopped[name] = StoppedProcess(name, f"/usr/sbin/{name}", user)


def stopped_pids() -> list[int]:
    return [process.pid for process in _stopped.values()]


def take_stopped(name: str, program: str, user: str) -> StoppedProcess | None:
    """The stopped process of the daemon `name`, once; None if it is another program or runs as another user."""
    process = _stopped.pop(name, None)
    if process is not None and (process.program, process.user) == (program, user):
        return process
    return None


LASTING = 10.0  # seconds; a daemon that ends sooner after it was started again would go on doing that


class DaemonProcess:
    """A child of the agent that is to live as long as the VM. `spec` is the daemon's part of the identity message."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name: str = spec["name"]
        self.argv: list[str] = list(spec["argv"])
        self.user: str = spec["user"]
        self.ready_path: str = spec["ready_path"]
        self.pid = 0
        self.status: int | None = None  # its wait status, once it has ended
        self.again = 0.0  # when it was started again

    def start(self) -> None:
        """Start it in a process group of its own, with its output in a log. Raises GuestAgentError."""
        if self.ready_path:
            with suppress(FileNotFoundError):
                os.unlink(self.ready_path)  # an old one would make a daemon look ready too early
        try:
            stopped = take_stopped(self.name, self.argv[0], self.user)
            self.pid = spawn(self.name, self.argv, self.user) if stopped is None else stopped.release(self.argv)
        except (OSError, KeyError) as error:
            raise GuestAgentError(f"cannot start {self.name} ({self.argv[0]}): {error}") from error

    def start_again(self) -> bool:
        """Start it once more after it has ended, unless it ended soon. Returns whether it was started."""
        now = time.monotonic()
        if self.again and now - self.again < LASTING:
            return False
        self.again, self.status = now, None
        try:
            self.start()
        except GuestAgentError:
            return False
        return True

    def log_tail(self) -> str:
        """The last 600 bytes of its log on one line, for the operator."""
        try:
            with open(f"{LOGS}/{self.name}.log", "rb") as file:
                return file.read()[-600:].decode(errors="replace").strip().replace("\n", "; ")
        except OSError:
            return ""


class Children:
    """The daemons, and all other children of the agent that end. The first process of a guest inherits orphans."""

    def __init__(self, on_end: Any) -> None:
        """`on_end` is called with the pid and the wait status of each child that has ended."""
        self._daemons: list[DaemonProcess] = []
        self.on_end = on_end

    def start(self, daemon: DaemonProcess) -> None:
        """Start a daemon and wait until its ready path exists. Raises GuestAgentError if it ends or takes too long."""
        self._daemons.append(daemon)
        daemon.start()
        deadline = time.monotonic() + DAEMON_TIMEOUT
        while daemon.ready_path and not os.path.exists(daemon.ready_path):
            self.collect()
            if daemon.status is not None:
                raise GuestAgentError(f"{daemon.name} ended ({ending(daemon.status)}): {daemon.log_tail()}")
            if time.monotonic() > deadline:
                raise GuestAgentError(f"{daemon.name} did not make {daemon.ready_path}: {daemon.log_tail()}")
            time.sleep(0.005)

    def end_daemons(self) -> None:
        """End the daemons, the last that was started first. They are not started again."""
        for daemon in reversed(self._daemons):
            kill_and_wait(daemon.pid)
        self._daemons.clear()

    def collect(self) -> list[DaemonProcess]:
        """Collect the wait status of each child that has ended. Returns the daemons among them."""
        ended: list[DaemonProcess] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            self.on_end(pid, status)
            for daemon in self._daemons:
                if daemon.pid == pid:
                    daemon.status = status
                    ended.append(daemon)
