"""What the old processes of a resumed job use, for Slurm's accounting.

slurmstepd adds up what /proc/PID/stat shows for its task and for all descendants of that. Of a resumed job, the task is
the program that stands for the old shell, and the old processes are no descendants of it. So the agent mounts a file
over that one file of this program, which shows the sums of the program's control group: the processor time since its
processes went on there, and the memory. ps(1) shows the same.
"""

# ruff: noqa: PTH208

from __future__ import annotations

import os
import socket
import struct
import time

from multiverse.guest.agent.system import MNT_DETACH, MS_BIND, mount, read, suppress, unmount, write

SPOOLS = "/var/spool"  # slurmd's directories are here: see `drivers.slurm.site.conf`
SHOWN = "/run/multiverse/attach-stat"
PERIOD = 5.0  # seconds from one look to the next
UTIME, STIME, VSIZE, RSS = 11, 12, 20, 21  # places of fields of /proc/PID/stat behind the name (proc(5), 14 to 24)
TICK = 10000  # microseconds of a unit of these times
LENGTH = 500  # of the file: slurmstepd reads up to 511 bytes, and the file must not become shorter while it does
BATCH_STEP = 4294967291  # <slurm/slurm.h>
REQUEST_STEP_STAT = 17  # stepd_api.h of Slurm 22.05 to 25.05
ANY_PROTOCOL = 0x7F00  # newer than any: slurmstepd answers with its own
ASK_TIMEOUT = 2.0  # seconds


class GroupUsage:
    """Shows the usage of a control group as that of one of its processes, until `close`."""

    def __init__(self, pid: int, group: str) -> None:
        self._place, self._group = f"/proc/{pid}/stat", group
        self._begin, _, rest = read(self._place).rpartition(")")
        self._fields = rest.split()
        self._looked = 0.0
        write(SHOWN, b"")
        self.look()
        mount(SHOWN, self._place, "", MS_BIND)

    def look(self, at_once: bool = True) -> None:
        """Show what the group uses now."""
        now = time.monotonic()
        if not at_once and now - self._looked < PERIOD:
            return
        self._looked = now
        used = dict(line.split() for line in read(f"{self._group}/cpu.stat").splitlines())
        fields = list(self._fields)
        fields[UTIME], fields[STIME] = (str(int(used[f"{kind}_usec"]) // TICK) for kind in ("user", "system"))
        virtual = resident = 0
        for pid in read(f"{self._group}/cgroup.procs").split():
            with suppress(FileNotFoundError, ProcessLookupError):
                pages = read(f"/proc/{pid}/statm").split()
                virtual, resident = virtual + int(pages[0]), resident + int(pages[1])
        fields[VSIZE], fields[RSS] = str(virtual * os.sysconf("SC_PAGE_SIZE")), str(resident)
        line = f"{self._begin}) {' '.join(fields)}"
        write(SHOWN, line.ljust(LENGTH) + "\n")

    def close(self) -> None:
        with suppress(OSError):  # the process has ended
            unmount(self._place, MNT_DETACH)


def make_slurmstepd_look(job: str) -> None:
    """Let the slurmstepd of the batch step look at its task now, and wait until it has. By itself it looks seldom, and
    after the end of the task there is nothing to see any more. Nothing is done if it does not answer."""
    for place in os.listdir(SPOOLS):
        for name in os.listdir(f"{SPOOLS}/{place}") if place.startswith("slurmd") else ():
            if name.endswith(f"_{job}.{BATCH_STEP}"):
                with suppress(OSError, struct.error):
                    ask_slurmstepd(f"{SPOOLS}/{place}/{name}")


def ask_slurmstepd(path: str) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(ASK_TIMEOUT)
        sock.connect(path)
        sock.sendall(struct.pack("i", ANY_PROTOCOL))
        sock.recv(4)
        sock.sendall(struct.pack("i", REQUEST_STEP_STAT))
        sock.recv(4)
    finally:
        sock.close()
