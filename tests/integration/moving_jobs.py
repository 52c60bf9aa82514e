"""Programs that run in VMs while these move, and see from inside whether all is right. Each writes what it has seen, as
JSON, when the file `stop` appears in its directory, which is on NFS."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiverse.client import Client
from tests.integration import stream_server
from tests.integration.watch import until

if TYPE_CHECKING:
    from tests.integration.conftest import LabUnderTest

# Notes the time each millisecond.
CLOCK = """
import json, os, sys, time
home, name = sys.argv[1:]
count = back = 0
steady, wall, gap, ahead = time.monotonic(), time.time(), 0.0, 0.0
began = due = steady
while True:
    time.sleep(0.001)
    now, clock = time.monotonic(), time.time()
    back += now < steady or clock < wall - 1.0
    gap = max(gap, now - steady)
    steady, wall, count = now, clock, count + 1
    if now > due:
        due = now + 0.5
        with open(f"{home}/{name}.time.new", "w") as file:
            file.write(f"{time.time()}")
        os.rename(f"{home}/{name}.time.new", f"{home}/{name}.time")
        if os.path.exists(f"{home}/stop"):
            break
with open(f"{home}/{name}.json", "w") as file:
    json.dump({"count": count, "back": back, "gap": gap, "ran": now - began}, file)
"""

# Writes and verifies a file: by calls with fsync, and by a mapping. `place` is a directory on its own disk or on NFS.
FILES = """
import hashlib, json, mmap, os, sys, time
home, name, place = sys.argv[1:]
BLOCKS, SIZE = 64, 65536
def block(n): return (b"%09d " % n) * 6553 + b"012345"
path = f"{place}/{name}.blocks"
file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
mapped = os.open(path + ".mapped", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
os.ftruncate(mapped, BLOCKS * SIZE)
memory = mmap.mmap(mapped, BLOCKS * SIZE)
written = wrong = 0
while not os.path.exists(f"{home}/stop"):
    at = written % BLOCKS * SIZE
    os.pwrite(file, block(written), at)
    memory[at : at + SIZE] = block(written)
    written += 1
    if written % 16 == 0:
        os.fsync(file)
        memory.flush()
    old = (written * 7919) % min(written, BLOCKS)
    number = written - 1 - (written - 1 - old) % BLOCKS
    wrong += os.pread(file, SIZE, old * SIZE) != block(number)
    wrong += memory[old * SIZE : (old + 1) * SIZE] != block(number)
    time.sleep(0.02)
os.fsync(file)
memory.flush()
def digest(read): return hashlib.sha256(b"".join(read(n) for n in range(BLOCKS))).hexdigest()
expected = {written - 1 - (written - 1 - n) % BLOCKS: n for n in range(min(written, BLOCKS))}
for number, n in expected.items():
    wrong += os.pread(file, SIZE, n * SIZE) != block(number)
with open(f"{home}/{name}.json", "w") as out:
    json.dump({"written": written, "wrong": wrong, "path": path,
               "digests": [digest(lambda n: os.pread(file, SIZE, n * SIZE)),
                           digest(lambda n: memory[n * SIZE : (n + 1) * SIZE])]}, out)
"""

# Sends blocks with their digests to a server, and compares the digest of all that the server has got.
STREAM = """
import hashlib, json, os, socket, struct, sys, time
home, name, host, port = sys.argv[1:]
for attempt in range(200):
    try:
        sock = socket.create_connection((host, int(port)), 10)
        break
    except OSError:
        time.sleep(0.1)
sock.settimeout(120)
answers, every, sent, wrong = sock.makefile("rb"), hashlib.sha256(), 0, 0
while not os.path.exists(f"{home}/stop"):
    payload = os.urandom(1024) * 32
    every.update(payload)
    sock.sendall(struct.pack("!I", len(payload)) + hashlib.sha256(payload).digest() + payload)
    sent += 1
    wrong += answers.readline().split() != [b"%d" % sent, every.hexdigest().encode()]
    time.sleep(0.02)
sock.sendall(struct.pack("!I", 0))
with open(f"{home}/{name}.json", "w") as file:
    json.dump({"sent": sent, "wrong": wrong, "digest": every.hexdigest()}, file)
"""

# Passes blocks round a ring of MPI's processes, each with its digest. Asks, because MPI_Recv would take all of a CPU.
RING = """
import ctypes, hashlib, json, os, sys, time
home, name, library = sys.argv[1:]
mpi = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
world, byte = (ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, n))) for n in
               ("ompi_mpi_comm_world", "ompi_mpi_byte"))
rank, size, flag = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
mpi.MPI_Init(None, None)
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
mpi.MPI_Comm_size(world, ctypes.byref(size))
rank, size = rank.value, size.value
LENGTH = 32768
def send(data):
    assert mpi.MPI_Send(data, LENGTH, byte, (rank + 1) % size, 1, world) == 0
def receive():
    while True:
        assert mpi.MPI_Iprobe((rank - 1) % size, 1, world, ctypes.byref(flag), None) == 0
        if flag.value:
            break
        time.sleep(0.005)
    data = ctypes.create_string_buffer(LENGTH)
    assert mpi.MPI_Recv(data, LENGTH, byte, (rank - 1) % size, 1, world, None) == 0
    return data.raw
def message(lap, last):
    body = (b"%d %d " % (lap, last)).ljust(16) + os.urandom(256) * 127
    return (hashlib.sha256(body).digest() + body).ljust(LENGTH)
def read(data):
    body = data[32 : 32 + 16 + 256 * 127]
    lap, last = map(int, body[:16].split())
    return lap, last, data[:32] != hashlib.sha256(body).digest()
lap = wrong = last = 0
while not last:
    if rank == 0:
        sent = message(lap, os.path.exists(f"{home}/stop"))
        send(sent)
        got = receive()
        wrong += got != sent
    else:
        got = receive()
        send(got)
    number, last, bad = read(got)
    wrong += bad or number != lap
    lap += 1
    if rank == 0:
        if lap == 1:
            open(f"{home}/{name}.runs", "w").close()
        time.sleep(0.02)
with open(f"{home}/{name}.{rank}.json", "w") as file:
    json.dump({"laps": lap, "wrong": wrong, "size": size}, file)
mpi.MPI_Finalize()
"""

PROGRAMS = {"clock": CLOCK, "files": FILES, "stream": STREAM, "ring": RING}


def install(directory: Path) -> None:
    """Write the programs into a directory. `server.py` is one of them."""
    for name, text in PROGRAMS.items():
        (directory / f"{name}.py").write_text(text)
    shutil.copy(stream_server.__file__, directory / "server.py")


def result(directory: Path, name: str) -> dict[str, Any]:
    """What a program has seen."""
    return dict(json.loads((directory / f"{name}.json").read_text()))


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def begin(lab: LabUnderTest, *argv: str, **streams: Any) -> subprocess.Popen[str]:
    """Begin a command as the lab's user, at home."""
    environment = lab.env | {"HOME": str(lab.user.home), "TERM": "dumb"}
    return subprocess.Popen(
        argv, env=environment, cwd=lab.user.home, user=lab.user.uid, group=lab.user.uid, extra_groups=[], text=True,
        **streams,
    )  # fmt: skip


class Terminal:
    """A shell in a VM, by `srun --pty`, at which lines are typed."""

    def __init__(self, lab: LabUnderTest, *options: str) -> None:
        self._asked = 0
        self._ours, theirs = pty.openpty()
        shell = ("srun", "--quiet", *options, "--pty", "bash", "--norc")
        self._process = begin(lab, *shell, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)

    def ask(self, line: str, timeout: float = 120.0) -> str:
        """Type a line. What it has printed."""
        self._asked += 1
        first, last = f"begin-{self._asked}.", f"end-{self._asked}."
        typed = f"echo be''gin-{self._asked}.; {line}; echo e''nd-{self._asked}.\n"
        os.write(self._ours, typed.encode())
        said, deadline = b"", time.monotonic() + timeout
        while last.encode() not in said:
            assert select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0], (line, said)
            said += os.read(self._ours, 65536)
        return said.decode().replace("\r", "").partition(first)[2].partition(last)[0].strip()

    def leave(self, timeout: float = 120.0) -> int:
        """Leave the shell. The exit status of srun."""
        os.write(self._ours, b"exit\n")
        return self._process.wait(timeout)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


class Step:
    """A step in a job that runs, by srun from outside, which goes on until it is told to end."""

    def __init__(self, lab: LabUnderTest, job: str, name: str) -> None:
        self._ends = lab.user.home / f"{name}.ends"
        script = f"echo begun; until [ -e {self._ends} ]; do sleep 0.1; done; echo ended"
        step = ("srun", "--quiet", f"--jobid={job}", "--overlap", "sh", "-c", script)
        self._process = begin(lab, *step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said == "begun\n", said

    def end(self, timeout: float = 120.0) -> None:
        """Let it end, and see that it ends well."""
        self._ends.touch()
        said, _ = self._process.communicate(timeout=timeout)
        assert (said, self._process.returncode) == ("ended\n", 0)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def vms_of(client: Client, job: str) -> list[dict[str, Any]]:
    return [vm for vm in client.vms() if vm["job_id"] == job]


def vm_named(client: Client, name: str) -> dict[str, Any]:
    return next((vm for vm in client.vms() if vm["name"] == name), {})


def move(client: Client, *names: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Move these VMs at the same time, and do something while they move."""
    begun = [client.move(name) for name in names]
    meanwhile()
    for one in begun:
        until(f"{one['vm']} has moved", lambda one=one: vm_named(client, one["vm"]).get("state") == "serving")
        assert vm_named(client, one["vm"])["host"] == one["target"] != one["host"], client.timeline(one["job_id"])
