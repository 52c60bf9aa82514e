"""The first process of a stand-in: it starts the daemons of a node in the namespaces that it is in, and restarts those
that end. See `stand_in`. It runs by the machine's own Python, and uses the standard library alone.

Its argument is the number of a connected socket, by which it gets a JSON object: `hostname`, `users` (lines of passwd
and group), `directories` (path, owner, mode), `files` (path, content in base 64, mode, owner), `daemons` (program,
argv, user, ready_path). It says so when these have been started.
"""

from __future__ import annotations

import base64
import os
import pwd
import signal
import socket
import sys
import time
from json import load
from pathlib import Path
from typing import Any

READY = 15.0  # seconds for a daemon's ready path
PAUSE = 1.0  # seconds before a daemon that has ended is started again
LOG_ROOM = 128 << 10  # bytes of the log after which it is begun anew


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        with sock.makefile() as file:
            spec = load(file)
        socket.sethostname(spec["hostname"])
        write_files(spec)
        pids = {start(daemon): daemon for daemon in spec["daemons"]}
        sock.sendall(b"\n")
    while True:
        pid, _ = os.wait()
        if (daemon := pids.pop(pid, None)) is not None:
            time.sleep(PAUSE)
            if os.fstat(1).st_size > LOG_ROOM:
                os.ftruncate(1, 0)
            pids[start(daemon)] = daemon


def write_files(spec: dict[str, Any]) -> None:
    Path("/etc").mkdir(exist_ok=True)
    for name, lines in spec["users"].items():
        Path("/etc", name).write_text(lines)
    for path, owner, mode in spec["directories"]:
        Path(path).mkdir(parents=True, exist_ok=True)
        give(Path(path), owner, mode)
    for path, content, mode, owner in spec["files"]:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(base64.b64decode(content))
        give(Path(path), owner, mode)


def give(path: Path, owner: str, mode: int) -> None:
    entry = pwd.getpwnam(owner)
    os.chown(path, entry.pw_uid, entry.pw_gid)
    path.chmod(mode)


def start(daemon: dict[str, Any]) -> int:
    """Start a daemon, and wait until its ready path exists."""
    ready = daemon["ready_path"]
    if ready:
        Path(ready).unlink(missing_ok=True)
    pid = os.fork()
    if not pid:
        run(daemon)
    deadline = time.monotonic() + READY
    while ready and not Path(ready).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return pid


def run(daemon: dict[str, Any]) -> None:
    try:
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        entry = pwd.getpwnam(daemon["user"])
        os.setgroups([])
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
        os.execv(daemon["program"], daemon["argv"])
    except BaseException as error:
        os.write(2, f"{daemon['program']}: {error}\n".encode())
    os._exit(127)


if __name__ == "__main__":
    main()
