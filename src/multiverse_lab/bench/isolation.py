"""What each way to start a job isolates: a table whose cells a program finds out, as the job (`isolation_probe`).

Another user has a process on the bare-metal node, and one on the machine that runs the VMs: the neighbours. Each
listens at a port of its loopback, and has a file in /tmp. What only shows outside, this process looks at: whose a file
in the shared directory is, and how many of the job's processes are processes of the machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shlex
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from multiverse.core.errors import Broken
from multiverse_lab.bench import isolation_probe, latency
from multiverse_lab.bench.containers import StartWay
from multiverse_lab.bench.latency import StartListener, until
from multiverse_lab.lab.session import LabSession

PROCESSES = 200
MEMORY = 600
"""MiB that the job tries to use: four times what it requests, and more than the smallest VM has."""

_ANSWER = 120.0  # seconds without a word from the job
_READ_ALL = 3  # SYSLOG_ACTION_READ_ALL (syslog(2))

NEIGHBOUR = """
import os, socket, sys
token, port, name = sys.argv[1:]
with socket.create_server(("127.0.0.1", int(port))) as server:
    with open(f"/tmp/{token}-{name}", "x") as file:
        file.write(token)
    while True:
        connection, _ = server.accept()
        connection.sendall(token.encode())
        connection.close()
"""


@dataclass
class IsolationAnswers:
    """What a job reported by the names of the trials, and what was seen outside."""

    said: dict[str, Any] = field(default_factory=dict)
    machine_kernel: bool = False
    machine_log: bool = False
    owner: int | None = None  # of the file in the shared directory
    seen: int | None = None  # of its processes, as processes of the machine


def cells(found: IsolationAnswers, user: int) -> dict[str, str]:
    """The cells of one way by row: what was found, in words; "yes" says that it does not isolate. `user` is the uid of
    the job's user outside."""
    said = found.said
    return {name: cell(found, user) if said else "the job did not report" for name, cell in _ROWS.items()}


def _yes(value: object) -> str:
    return "not tried" if value is None else "yes" if value else "no"


def _is_root(found: IsolationAnswers, _: int) -> str:
    uid = found.said.get("uid")
    return "not tried" if uid is None else "yes" if uid == 0 else f"no: uid {uid}"


def _log(found: IsolationAnswers, _: int) -> str:
    if "kernel_log" not in found.said:
        return "not tried"
    return "no" if not found.said["kernel_log"] else "yes" if found.machine_log else "no: that of a kernel of its own"


def _mounts(found: IsolationAnswers, _: int) -> str:
    said = found.said.get("mounting", "not tried")
    return "only in namespaces that it makes" if said == "own namespace" else str(said)


def _owner(found: IsolationAnswers, user: int) -> str:
    """Whose the file is that the job gave to root."""
    if found.owner is None:
        return "not tried"
    return {user: "no: it is the user's", 0: "yes"}.get(found.owner, f"no: it is of uid {found.owner}")


def _memory(found: IsolationAnswers, _: int) -> str:
    said = found.said.get("memory")
    if said is None:
        return "not tried"
    return {"killed": "no: killed", "refused": "no: refused", "got it": "yes"}.get(str(said), "no: the job ended")


def _bomb(found: IsolationAnswers, _: int) -> str:
    started = found.said.get("started")
    if started is None or found.seen is None:
        return "not tried"
    return f"yes: {found.seen} of {started}" if found.seen else f"no: none of {started}"


Cell = Callable[[IsolationAnswers, int], str]
_ROWS: dict[str, Cell] = {
    "sees another user's process on its machine": lambda found, _: _yes(found.said.get("other_process")),
    "reads another user's file in /tmp": lambda found, _: _yes(found.said.get("other_file")),
    "reaches another user's port on the loopback": lambda found, _: _yes(found.said.get("other_port")),
    "has the machine's kernel": lambda found, _: _yes(found.machine_kernel if "kernel" in found.said else None),
    "reads the machine's kernel log": _log,
    "is root inside": _is_root,
    "loads a kernel module": lambda found, _: _yes(found.said.get("module")),
    "mounts a file system": _mounts,
    "sets the clock": lambda found, _: _yes(found.said.get("clock")),
    "makes a file of root's in the shared directory": _owner,
    "has its processes among the machine's": _bomb,
    "uses more memory than it requested": _memory,
}


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Another user's processes: their token, which is in their arguments, their files and their answers; their port."""

    token: str
    port: int


@contextmanager
def neighbours(lab: LabSession) -> Iterator[Neighbours]:
    """Another user's processes on the bare-metal node and on this machine, while this lasts."""
    if lab.other is None:
        raise Broken("the lab has one user", hint="start the lab with lab.session")
    other = replace(lab, user=lab.other)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token = f"mv-neighbour-{secrets.token_hex(8)}"
    files = {where: Path(f"/tmp/{token}-{where}") for where in ("node", "machine")}  # the node has this machine's /tmp
    argv = {where: ("python3", "-c", NEIGHBOUR, token, str(port), where) for where in files}
    job = other.submit(f"#!/bin/sh\nexec {shlex.join(argv['node'])}\n", "--output=/dev/null", "--partition=physical")
    machine = other.start(Path(os.devnull), *argv["machine"])
    try:
        until(lambda: all(file.exists() for file in files.values()), "another user's processes did not start")
        yield Neighbours(token, port)
    finally:
        machine.kill()
        machine.wait()
        with suppress(Exception):
            other.run("scancel", job)
        for file in files.values():
            file.unlink(missing_ok=True)


def probe(lab: LabSession, listener: StartListener, beside: Neighbours, way: StartWay) -> IsolationAnswers:
    """Run the program as a job in that way. Raises `Broken` if the job does not start."""
    bomb = f"mv-process-{secrets.token_hex(8)}"
    tried = {
        "host": listener.host,
        "port": listener.port,
        "token": beside.token,
        "loopback": beside.port,
        "shared": str(lab.user.home),
        "processes": PROCESSES,
        "memory": MEMORY,
    }
    script = f"#!/bin/bash\nexec python3 - {bomb} <<'PROGRAM'\n{program(tried)}PROGRAM\n"
    errors = lab.user.home / "isolation.err"
    job = lab.submit(way.script(script, lab.user.home), f"--output={errors}", *way.submitted(lab.user.home))
    _, connection = listener.wait(job, latency.JOB_LIMIT, lab.settings.socket.exists)
    with connection, connection.makefile("r") as lines:
        connection.settimeout(_ANSWER)
        connection.sendall(b"go\n")
        found = answers(lines, connection, lambda: processes(f"python3\0-\0{bomb}\0".encode()))
    latency.until_ended(lab, job)
    _look(found, lab.user.home / f"{beside.token}-{job}")
    return found


def program(tried: Mapping[str, Any]) -> str:
    """The program with what it is to try. It adds its own job's id."""
    before, _, after = Path(isolation_probe.__file__).read_text().partition("TRIED: ")
    given = f"TRIED: dict[str, Any] = {dict(tried)!r} | {{'job': os.environ['SLURM_JOB_ID']}}\n"
    return before + given + after.partition("\n")[2]


def answers(lines: Iterable[str], connection: socket.socket, count: Callable[[], int]) -> IsolationAnswers:
    """What a job reports until its connection ends. `count` says how many of its processes there are outside."""
    found = IsolationAnswers()
    with suppress(OSError):  # the job may be killed
        for line in lines:
            name, value = json.loads(line)
            found.said[name] = value
            if name == "started":
                found.seen = count()
                connection.sendall(b"go\n")
    return found


def _look(found: IsolationAnswers, file: Path) -> None:
    """What shows outside."""
    own = os.uname()
    found.machine_kernel = found.said.get("kernel") == [own.release, own.version]
    found.machine_log = bool(found.said.get("kernel_log")) and set(found.said["kernel_log"]) <= set(_kernel_log())
    if file.exists():
        found.owner = file.stat().st_uid
        file.unlink()


def processes(command: bytes) -> int:
    """How many processes of this machine have this command line, but for the first, which started the others."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += path.read_bytes() == command
    return max(found - 1, 0)


def _kernel_log() -> list[str]:
    buffer = ctypes.create_string_buffer(1 << 20)
    size = ctypes.CDLL(None).klogctl(_READ_ALL, buffer, len(buffer))
    return buffer.raw[: max(size, 0)].decode(errors="replace").splitlines()


def table(lab: LabSession, ways: Sequence[StartWay], say: Callable[[str, int], None]) -> dict[str, dict[str, str]]:
    """The cells by row and way. `say` is called with each way and its number as it has been tried."""
    columns: dict[str, Mapping[str, str]] = {}
    with neighbours(lab) as beside, StartListener(lab.settings.network.gateway) as listener:
        for number, way in enumerate(ways, 1):
            columns[way.name] = cells(probe(lab, listener, beside, way), lab.user.uid)
            say(way.name, number)
    return {row: {way: column[row] for way, column in columns.items()} for row in _ROWS}
