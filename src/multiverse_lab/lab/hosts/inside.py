"""Starts a daemon on a lab host, as a program: python -m multiverse_lab.lab.hosts.inside PID PROGRAM [ARGUMENT...].

PID is the host's first process. The daemon's pid, as this machine sees it, is printed.
"""

from __future__ import annotations

import os
import sys

from multiverse.system import kernel
from multiverse_lab.lab.hosts import control_groups, detached

_ALL = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWCGROUP
)


def main() -> None:
    pid, *argv = sys.argv[1:]
    try:
        kernel.setns(os.pidfd_open(int(pid)), _ALL)
    except OSError as error:
        raise SystemExit(f"process {pid} is no host: {error}") from error

    def execute() -> None:
        os.chdir("/")
        control_groups.join_daemons()
        os.execvp(argv[0], argv)

    detached.run(execute)


if __name__ == "__main__":
    main()
