"""Limits of resources: those of a well-kept node, and those that the kernel computes from the memory it booted with.

A clone's kernel has booted with the template's memory. Once more is plugged, these are raised to what the kernel would
have computed from all of it; nearly all are in proportion to it. What costs nothing to be high is set before the fork
point, where it costs a clone no time.
"""

# ruff: noqa: PTH110

from __future__ import annotations

import math
import os
import resource

from multiverse.guest.agent.files import read, write_kernel_file
from multiverse.guest.agent.hotplug import usable_memory
from multiverse.guest.agent.syscalls import mount

OF_NODES = ((resource.RLIMIT_NOFILE, 131072), (resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY),
            (resource.RLIMIT_STACK, resource.RLIM_INFINITY))  # fmt: skip
"""As slurmd.service of Slurm sets them."""

BY_MEMORY = (resource.RLIMIT_NPROC, resource.RLIMIT_SIGPENDING)
"""kernel/fork.c, fork_init(): half of threads-max."""

KERNEL_FILES = (
    # A mapping may be larger than the guest's memory, as it may be smaller than that of a large node: what a job really
    # uses is limited by its control group, and Slurm is told of that (decision 90).
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
    """Give this process the limits of a node, which the daemons inherit, and set what is the same for all sizes. Call
    it before a daemon is started. What the kernel does not have is left out."""
    for number, limit in OF_NODES:
        resource.setrlimit(number, (limit, limit))
    for path, text in KERNEL_FILES:
        try:
            write_kernel_file(path, text)
        except OSError:
            continue


def remember_limits() -> None:
    """Record the kernel's limits before any memory is plugged."""
    global _booted
    _booted = usable_memory()
    _values.clear()
    for path, most in KERNEL_LIMITS:
        if os.path.exists(path):
            _values.append((path, [int(word) for word in read(path).split()], most))


def raise_process_limits(daemons: list[int]) -> None:
    """Let this process, and the daemons that were started before, have as many processes as suit the memory that there
    is now. Does nothing if none was plugged."""
    now = usable_memory()
    if now <= _booted:
        return
    for number in BY_MEMORY:
        limit = resource.getrlimit(number)[1] * now // _booted
        for pid in (0, *daemons):
            resource.prlimit(pid, number, (limit, limit))
    # The kernel counts in pages what a share of the memory is.
    pages = os.sysconf("SC_PHYS_PAGES")
    mount("shm", SHM, "tmpfs", SHM_FLAGS | MS_REMOUNT, f"size=50%,nr_inodes={pages // 2},mode=1777")


def raise_kernel_limits() -> None:
    """Raise the kernel's limits to what suits the memory that there is now. Does nothing if none was plugged."""
    now = usable_memory()
    if now <= _booted:
        return
    for path, values, most in _values:
        raised = [value * now // _booted for value in values]
        if most:  # of several values the last one alone depends on the memory
            raised = [*values[:-1], max(values[-1], min(most, raised[-1]))]
        try:
            write_kernel_file(path, " ".join(map(str, raised)))
        except OSError:
            continue


def use_huge_pages() -> None:
    """Let all programs have huge pages without being asked for them, and let jobs have the memory that the kernel then
    keeps free for making them: 5 % of it, up to 66 MiB. What it keeps without huge pages stays free, as
    init_per_zone_wmark_min() in mm/page_alloc.c computes it."""
    write_kernel_file("/sys/kernel/mm/transparent_hugepage/enabled", "always")
    write_kernel_file("/proc/sys/vm/min_free_kbytes", str(math.isqrt(16 * 1024 * usable_memory())))
