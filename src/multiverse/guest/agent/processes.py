"""Programs that the agent starts."""

from __future__ import annotations

import os
import pwd
import signal
import time

from multiverse.guest.agent.contract import LOGS
from multiverse.guest.agent.syscalls import PTRACE_TRACEME, ptrace

HWLOC = {"HWLOC_COMPONENTS": "-x86", "HWLOC_PLUGINS_PATH": "/var/empty"}
"""The environment of hwloc, by which slurmd and each slurmstepd learn what the machine is. Without the first variable
it would ask the CPU (CPUID) for facts that the kernel also has, and a virtual CPU answers slowly. Without the second it
would load its plugins, and with them the libraries of X11, OpenCL and XML, to look for GPUs."""


def run(argv: list[str], timeout: float = 20.0) -> int:
    """Run a program to its end, without input or output. Returns its wait status, or -1 if it cannot be started.

    It is killed, with its process group, after `timeout` seconds.
    """
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
    """Run what the first job will start, so that the programs are in memory and an emulator has translated them.

    slurmstepd ends at once because it gets no request.
    """
    for argv in (["/bin/sh", "-c", ":"], ["/usr/sbin/slurmstepd"], ["/bin/bash", "-c", "exit 0"]):
        for _ in range(2):
            run(argv, 5.0)


def spawn(name: str, argv: list[str], user: str, traced: bool = False) -> int:
    """Start a program as `user` in a process group of its own, with its output in the log `name`. Returns its pid.

    A traced program stops when it is executed. Raises OSError, and KeyError if the image has no such user.
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
        os.execve(argv[0], argv, {**os.environ, **HWLOC})
    except BaseException as error:
        os.write(2, f"{error}\n".encode())
    os._exit(127)


def ending(status: int) -> str:
    """How a process ended, for the operator. `status` is a wait status."""
    code = os.waitstatus_to_exitcode(status)
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
