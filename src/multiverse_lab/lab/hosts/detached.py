"""Starts a process in the PID namespace that this program has entered or made, tells its pid, and ends.

The process is a child of that namespace's first process, or is the first process itself. A child of a process outside
would keep a host that has died in existence until its parent reaps it (pid_namespaces(7)).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

_CREDENTIALS = struct.Struct("=iII")  # struct ucred (unix(7)): pid, uid, gid


def run(prepare: Callable[[], None], work: Callable[[], None] = lambda: None, *, first: bool = False) -> None:
    """Start a process that calls `prepare` and then `work`. When `prepare` has returned, or has replaced the program,
    print the process's pid as this process sees it. Its output goes to this program's error output. `first` says that
    it is the first process of the namespace.

    Raises `SystemExit` with what went wrong if `prepare` raises OSError.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # close-on-exec
    here.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    child = os.fork()
    if child == 0:
        here.close()
        if first or os.fork() == 0:
            _be_process(there, prepare, work)
        os._exit(0)
    there.close()
    if not first:
        os.waitpid(child, 0)
    # The kernel adds the sender's pid, as it is in this process's namespace.
    _, ancillary, _, _ = here.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
    problem = here.recv(4096)
    if problem or not ancillary:
        raise SystemExit(problem.decode() or "the process was killed as it began")
    print(_CREDENTIALS.unpack(ancillary[0][2])[0], flush=True)


def _be_process(outside: socket.socket, prepare: Callable[[], None], work: Callable[[], None]) -> None:
    try:
        os.setsid()
        os.dup2(2, 1)
        outside.send(b"begun")
        try:
            prepare()
        except OSError as error:
            outside.send(str(error).encode())
            return
        outside.close()
        work()
    finally:
        os._exit(0)
