"""A VM whose job is suspended, and that is about to sleep: its memory is written to a file, and its QEMU ends.

Nothing in the guest is stopped or ended for that: Slurm has stopped the job's processes. `fall_asleep` writes file
systems back, and tells which steps the job has. What Slurm asks for while the VM falls asleep, sleeps or wakes does not
reach it. So `settle_steps` asks the slurmstepd of each step afterwards, as slurmd does (`stepd_resume` in stepd_api.c).
"""

# ruff: noqa: PTH119, PTH208

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any

from multiverse.guest.agent.saving import job_groups, processes_in, within
from multiverse.guest.agent.system import GuestAgentError, read
from multiverse.guest.agent.usage import SPOOLS

SUSPEND, RESUME = 10, 11  # REQUEST_STEP_SUSPEND, REQUEST_STEP_RESUME (stepd_api.h)
ANY_VERSION = 0xFFFF  # a protocol version that every slurmstepd accepts: it answers with its own
NO_CORES = 0xFFFE  # NO_VAL16: no specialized cores
WITHOUT_CORES = 40 << 8  # from this protocol version on (Slurm 23.11) the request has no such field
ANSWERS = 10.0  # seconds for a slurmstepd
STOPS = 10.0  # seconds for Slurm to stop the processes of a job that it shows as suspended: it takes two


def steps_of(job: str) -> dict[str, str]:
    """The sockets of the slurmstepds of the job with that control group, by the names of the steps."""
    infix, found = f"_{job.rpartition('_')[2]}.", {}
    for place in os.listdir(SPOOLS):
        for name in os.listdir(f"{SPOOLS}/{place}") if place.startswith("slurmd") else ():
            if infix in name:
                found[name.rpartition("_")[2]] = f"{SPOOLS}/{place}/{name}"
    return found


def fall_asleep(sync_timeout: float) -> dict[str, str]:
    """Write all file systems back within `sync_timeout` seconds. The sockets of the job's steps, by their names. Raises
    GuestAgentError if there is no job, or not one alone, or if a process of it has not been stopped."""
    groups = job_groups()
    if len(groups) != 1:
        raise GuestAgentError(f"there are {len(groups)} jobs with control groups in this VM")
    deadline = time.monotonic() + STOPS
    while going := [pid for pid in tasks_of(groups[0]) if runs(pid)]:
        if time.monotonic() > deadline:
            raise GuestAgentError(f"the process {name_of(going[0])} of the job has not stopped")
        time.sleep(0.05)
    within(sync_timeout, os.sync, "the file systems were not written back")
    return steps_of(groups[0])


def tasks_of(job: str) -> list[int]:
    """The pids of the job's own processes: without slurmstepd, which is never stopped."""
    groups = [directory for directory, _, _ in os.walk(job) if os.path.basename(directory) == "user"]
    return [pid for group in groups for pid in processes_in(group)]


def name_of(pid: int) -> str:
    try:
        return read(f"/proc/{pid}/comm").strip()
    except OSError:
        return str(pid)


def runs(pid: int) -> bool:
    """Whether a process may go on: it is neither stopped nor over (proc(5), the states of stat)."""
    try:
        return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] not in "TtZX"
    except OSError:
        return False


def settle_steps(run: bool) -> None:
    """Let the processes of the job go on, or stop them. Again is success. Raises GuestAgentError."""
    for job in job_groups():
        for path in steps_of(job).values():
            settle_step(path, RESUME if run else SUSPEND)


def settle_step(path: str, request: int) -> None:
    """Ask the slurmstepd with that socket to let its processes go on, or to stop them. It refuses if they do already,
    which is success, as is a step that has ended. Raises GuestAgentError if it does not answer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(ANSWERS)
        try:
            sock.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return
        try:
            sock.sendall(struct.pack("i", ANY_VERSION))
            (version,) = struct.unpack("i", take(sock, 4))
            sock.sendall(struct.pack("i", request) + (struct.pack("H", NO_CORES) if version < WITHOUT_CORES else b""))
            take(sock, 8)
        except OSError as error:
            raise GuestAgentError(f"slurmstepd does not answer at {path}: {error}") from error


def take(sock: Any, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise OSError("it closed the connection")
        data += more
    return data
