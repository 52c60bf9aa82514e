"""Daemons that are started in the template and stopped before their first instruction, for the clones to continue."""

# ruff: noqa: PTH123

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct

from multiverse.guest.agent.contract import GuestAgentError
from multiverse.guest.agent.files import make_directory, owner_ids
from multiverse.guest.agent.processes import spawn
from multiverse.guest.agent.syscalls import PTRACE_CONT, PTRACE_DETACH, PTRACE_GETREGS, PTRACE_SETREGS, ptrace

AT_ENTRY = 9  # <linux/auxvec.h>: the address of a program's first instruction
RIP, RSP, FS_BASE, REGISTERS = 16, 19, 21, 27  # <sys/user.h> of x86-64: places in user_regs_struct, and its words
STACK_GUARD = 0x28  # place of the stack guard in the thread's control block (glibc's tcbhead_t)
INT3 = b"\xcc"  # the breakpoint instruction


class StoppedProcess:
    """A program that is stopped before its first instruction; `release` continues it with arguments.

    The program is loaded and linked once for all clones, but has read no argument, key or random byte. The clones share
    what the kernel drew at random for it: its place in memory, as they share the kernel's place. The guard of its stack
    is drawn again at its release. This works on x86-64 only (ptrace(2), ld.so(8)). Raises OSError.
    """

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
    """Start the daemons that clones will continue. A clone reports what this image lacks when it starts the daemon."""
    for path in ("/etc/slurm", "/var/lib/munge", "/var/log/munge", "/var/spool/slurmd"):
        make_directory(path)  # making one takes a clone 15 ms; the clone sets owner and mode
    for name, user in (("munged", "munge"), ("slurmd", "root")):
        try:
            owner_ids(user)
            _stopped[name] = StoppedProcess(name, f"/usr/sbin/{name}", user)
        except (OSError, KeyError, GuestAgentError):
            continue


def stopped_pids() -> list[int]:
    """The processes of the daemons that are stopped."""
    return [process.pid for process in _stopped.values()]


def take_stopped(name: str, program: str, user: str) -> StoppedProcess | None:
    """The stopped process of the daemon `name`, once; none if it is another program or runs as another user."""
    process = _stopped.pop(name, None)
    if process is not None and (process.program, process.user) == (program, user):
        return process
    return None
