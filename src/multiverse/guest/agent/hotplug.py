"""CPUs and memory that the host plugs into a clone."""

# ruff: noqa: PTH110, PTH208

from __future__ import annotations

import os
import time

from multiverse.guest.agent.contract import DAEMON_TIMEOUT, GuestAgentError
from multiverse.guest.agent.files import read, write_kernel_file

CPUS, BLOCKS = "/sys/devices/system/cpu", "/sys/devices/system/memory"

# MiB at the fork point: memory blocks that were online, and the memory that the kernel gave to processes.
_boot_blocks = _boot_usable = 0


def remember_boot_memory() -> None:
    """Record how much memory there is before any is plugged."""
    global _boot_blocks, _boot_usable
    _boot_blocks, _boot_usable = memory_blocks(), usable_memory()


def use_plugged(cpus: int, memory: int) -> None:
    """Set plugged CPUs online; wait until `cpus` CPUs and `memory` MiB more than at the fork point are online.

    Raises GuestAgentError if that takes longer than DAEMON_TIMEOUT.
    """
    if cpus == 1 and not memory:
        return
    deadline = time.monotonic() + DAEMON_TIMEOUT
    while True:
        online = count_cpus("online")
        for number in range(1, cpus) if online < cpus else ():
            path = f"{CPUS}/cpu{number}/online"
            if os.path.exists(path) and read(path)[:1] == "0":
                write_kernel_file(path, "1")
                online = count_cpus("online")
        # A large guest has hundreds of blocks, so they are counted only when the memory is nearly there. The kernel may
        # keep 1/64 of each block for itself.
        nearly = memory and usable_memory() - _boot_usable >= memory * 63 // 64
        blocks = memory_blocks() - _boot_blocks if nearly else 0
        if online >= cpus and blocks >= memory:
            return
        if time.monotonic() > deadline:
            raise GuestAgentError(
                f"of {cpus} CPUs and {memory} MiB plugged memory, {online} and {blocks} MiB came online"
            )
        time.sleep(0.01)  # the kernel needs this CPU for the plugging


def count_cpus(which: str) -> int:
    """The number of CPUs that are `online`, or `possible`: the most that the kernel supports. A file says `0-2,5`."""
    count = 0
    for part in read(f"{CPUS}/{which}").strip().split(","):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


def usable_memory() -> int:
    """MiB of memory that the kernel gives to processes. This takes one system call."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20


def memory_blocks() -> int:
    """MiB of all memory blocks that are online. This reads one file for each block."""
    size = int(read(f"{BLOCKS}/block_size_bytes"), 16) >> 20
    names = [n for n in os.listdir(BLOCKS) if n[:6] == "memory" and n[6:].isdigit()]
    return size * sum(read(f"{BLOCKS}/{name}/online")[:1] == "1" for name in names)
