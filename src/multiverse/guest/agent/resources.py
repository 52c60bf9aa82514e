"""CPUs, memory and disk of the guest: plugging, the users' allowance, and limits in proportion to memory."""

# ruff: noqa: PTH110, PTH116, PTH208

from __future__ import annotations

import math
import os
import resource
import time

from multiverse.guest.agent.system import (
    DAEMON_TIMEOUT,
    DISK,
    GuestAgentError,
    fallocate,
    mount,
    read,
    suppress,
    write_kernel_file,
)

CPUS, BLOCKS = "/sys/devices/system/cpu", "/sys/devices/system/memory"

# MiB at the fork point: memory blocks that were online, and the memory that the kernel gave to processes.
_boot_blocks = _boot_usable = 0


def remember_boot_memory() -> None:
    global _boot_blocks, _boot_usable
    _boot_blocks, _boot_usable = memory_blocks(), usable_memory()


def use_plugged(cpus: int, memory: int) -> None:
    """Set plugged CPUs online; wait until `cpus` CPUs and `memory` MiB more than at the fork point are online. Raises
    GuestAgentError if that takes longer than DAEMON_TIMEOUT."""
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
    """The number of CPUs that are `online` or `possible`. A file says `0-2,5`."""
    count = 0
    for part in read(f"{CPUS}/{which}").strip().split(","):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


def usable_memory() -> int:
    """MiB of memory that the kernel gives to processes. This takes one system call."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20


def memory_blocks() -> int:
    """MiB of all memory blocks that are online. This reads a file for each block."""
    size = int(read(f"{BLOCKS}/block_size_bytes"), 16) >> 20
    names = [n for n in os.listdir(BLOCKS) if n[:6] == "memory" and n[6:].isdigit()]
    return size * sum(read(f"{BLOCKS}/{name}/online")[:1] == "1" for name in names)


# --- disk --------------------------------------------------------------------------------------------

RESERVE = "/.multiverse-reserve"
NODE_FILES = 64 << 20  # bytes beside the allowance, for logs and scripts of jobs

_allowance = 0  # MiB; 0: nothing is reserved


def reserve_disk(options: list[str]) -> None:
    """Let users write only the MiB that the kernel's command line gives: a file of root's takes all other free space.

    The host lets the files of this VM grow to this allowance and what the file system needs. The reserve makes the file
    system tell users at once that the disk is full, and not by errors when data is written back. Its blocks are
    allocated and never written (fallocate(2)), so they take no space on the host. A disk with less free space than the
    allowance is left as it is.
    """
    global _allowance
    for option in options:
        if option.startswith(DISK):
            _allowance = int(option[len(DISK) :])
    if not _allowance:
        return
    disk = os.statvfs("/")
    size = disk.f_bavail * disk.f_frsize - (_allowance << 20) - NODE_FILES
    if size > 0:
        fd = os.open(RESERVE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fallocate(fd, size)
        finally:
            os.close(fd)


def set_allowance(allowance: int) -> None:
    """Free as much of the reserve as users may write more than was said at boot."""
    global _allowance
    if 0 < _allowance < allowance:
        if os.path.exists(RESERVE):
            size = os.stat(RESERVE).st_size
            os.truncate(RESERVE, max(0, size - (allowance - _allowance << 20)))
        _allowance = allowance


# --- limits ------------------------------------------------------------------------------------------

OF_NODES = ((resource.RLIMIT_NOFILE, 131072), (resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY),
            (resource.RLIMIT_STACK, resource.RLIM_INFINITY))  # fmt: skip
"""As slurmd.service of Slurm sets them."""
BY_MEMORY = (resource.RLIMIT_NPROC, resource.RLIMIT_SIGPENDING)  # half of threads-max (kernel/fork.c, fork_init())

KERNEL_FILES = (
    # A mapping may be larger than the guest's memory, which may be smaller than that of a large node. The job's control
    # group limits its use, and Slurm is told of that (decision 90).
    ("/proc/sys/vm/overcommit_memory", "1"),
    # As systemd sets them (its sysctl.d/50-pid-max.conf, and bump_file_max_and_nr_open() in its main.c).
    ("/proc/sys/kernel/pid_max", "4194304"), ("/proc/sys/fs/file-max", "9223372036854775807"),
    # When the pages that were used within this time (milliseconds) no longer fit into the memory, the kernel ends
    # processes of the job. Otherwise it evicts and reads those of slurmd again and again, and the node falls silent.
    ("/sys/kernel/mm/lru_gen/enabled", "y"), ("/sys/kernel/mm/lru_gen/min_ttl_ms", "1000"),
)  # fmt: skip

KERNEL_LIMITS = (
    # By the kernel's source: fork_init(), inotify_user_setup(), fanotify_user_setup(), eventpoll_init(),
    # tcp_init_mem(), tcp_init(), udp_table_init(). Some have an upper end.
    ("/proc/sys/kernel/threads-max", 0),
    ("/proc/sys/fs/inotify/max_user_watches", 1 << 20), ("/proc/sys/fs/fanotify/max_user_marks", 1 << 20),
    ("/proc/sys/fs/epoll/max_user_watches", 0),
    ("/proc/sys/net/ipv4/tcp_mem", 0), ("/proc/sys/net/ipv4/udp_mem", 0),
    ("/proc/sys/net/ipv4/tcp_rmem", 6 << 20), ("/proc/sys/net/ipv4/tcp_wmem", 4 << 20),
    ("/proc/sys/net/ipv4/tcp_max_orphans", 262144), ("/proc/sys/net/ipv4/tcp_max_tw_buckets", 262144),
    *((f"/proc/sys/user/max_{name}_namespaces", 0) for name in ("cgroup", "ipc", "mnt", "net", "pid", "time", "user",
                                                                "uts")),
)  # fmt: skip

SHM, SHM_FLAGS, MS_REMOUNT = "/dev/shm", 6, 32  # nosuid and nodev; <linux/mount.h>

_booted = 0  # MiB that the kernel gave to processes at the fork point
_values: list[tuple[str, list[int], int]] = []  # of KERNEL_LIMITS at the fork point


def set_node_limits() -> None:
    """Give this process, and its later daemons, the limits of a node, and set the kernel's limits that do not depend on
    the size. A limit that the kernel does not have is left out."""
    for number, limit in OF_NODES:
        resource.setrlimit(number, (limit, limit))
    for path, text in KERNEL_FILES:
        with suppress(OSError):
            write_kernel_file(path, text)


def remember_limits() -> None:
    global _booted
    _booted = usable_memory()
    _values.clear()
    for path, most in KERNEL_LIMITS:
        if os.path.exists(path):
            _values.append((path, [int(word) for word in read(path).split()], most))


def raise_process_limits(daemons: list[int]) -> None:
    """Let this process, and the daemons that were started before, have as many processes as suit the plugged memory."""
    now = usable_memory()
    if now <= _booted:
        return
    for number in BY_MEMORY:
        limit = resource.getrlimit(number)[1] * now // _booted
        for pid in (0, *daemons):
            resource.prlimit(pid, number, (limit, limit))
    # The kernel counts shares of the memory in pages.
    pages = os.sysconf("SC_PHYS_PAGES")
    mount("shm", SHM, "tmpfs", SHM_FLAGS | MS_REMOUNT, f"size=50%,nr_inodes={pages // 2},mode=1777")


def raise_kernel_limits() -> None:
    """Raise the kernel's limits to what suits the plugged memory."""
    now = usable_memory()
    if now <= _booted:
        return
    for path, values, most in _values:
        raised = [value * now // _booted for value in values]
        if most:  # of several values the last one alone depends on the memory
            raised = [*values[:-1], max(values[-1], min(most, raised[-1]))]
        with suppress(OSError):
            write_kernel_file(path, " ".join(map(str, raised)))


def use_huge_pages() -> None:
    """Let all programs have huge pages without asking, and let jobs have the memory that the kernel then keeps free for
    making them: up to 66 MiB. It keeps as much as without huge pages (init_per_zone_wmark_min())."""
    write_kernel_file("/sys/kernel/mm/transparent_hugepage/enabled", "always")
    write_kernel_file("/proc/sys/vm/min_free_kbytes", str(math.isqrt(16 * 1024 * usable_memory())))
