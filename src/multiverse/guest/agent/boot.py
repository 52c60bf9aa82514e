"""What the agent sets up when it is the first process of a guest, in place of a service manager."""

# ruff: noqa: PTH101, PTH103, PTH110, PTH114, PTH123, PTH211

from __future__ import annotations

import errno
import os

from multiverse.guest.agent.files import write_kernel_file
from multiverse.guest.agent.network import link_up
from multiverse.guest.agent.syscalls import mount

CGROUPS = "/sys/fs/cgroup"


def protect_from_oom_killer() -> None:
    """Make the kernel never end the agent when memory runs out, nor the daemons that it starts from now on.

    They inherit this, and so does slurmstepd, which undoes it for the processes of a job.
    """
    write_kernel_file("/proc/self/oom_score_adj", "-1000")


def set_up_system() -> None:
    """Mount the kernel's file systems, make the usual links in /dev, and set up the loopback interface."""
    for source, target, kind, flags, data in (
        ("proc", "/proc", "proc", 14, ""), ("sysfs", "/sys", "sysfs", 14, ""),
        ("dev", "/dev", "devtmpfs", 2, "mode=0755"),
        ("devpts", "/dev/pts", "devpts", 10, "gid=5,mode=620,ptmxmode=000"),
        ("shm", "/dev/shm", "tmpfs", 6, "mode=1777"),
        ("run", "/run", "tmpfs", 6, "mode=0755"), ("mqueue", "/dev/mqueue", "mqueue", 14, ""),
    ):  # fmt: skip
        try:
            os.makedirs(target, exist_ok=True)
            mount(source, target, kind, flags, data)
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENODEV):
                raise
    os.makedirs("/run/lock", exist_ok=True)
    os.chmod("/run/lock", 0o1777)
    for link, target in (("/dev/fd", "/proc/self/fd"), ("/dev/stdin", "/proc/self/fd/0"),
                         ("/dev/stdout", "/proc/self/fd/1"), ("/dev/stderr", "/proc/self/fd/2")):  # fmt: skip
        if not os.path.islink(link):
            os.symlink(target, link)
    os.umask(0o022)
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    link_up("lo")


def set_up_cgroups() -> None:
    """Make what slurmd needs on cgroup v2 without systemd: the hierarchy, its controllers and `system.slice`.

    The controllers are enabled here, before the fork point, because the kernel rewrites parts of its code when the
    first group of a controller is made.
    """
    if not os.path.exists(f"{CGROUPS}/cgroup.controllers") and not _mount_cgroups():
        return  # the guest uses cgroup v1; the site's cgroup.conf must be made for that
    slice_ = f"{CGROUPS}/system.slice"
    os.makedirs(slice_, exist_ok=True)
    with open(f"{CGROUPS}/cgroup.controllers") as file:
        wanted = " ".join(f"+{name}" for name in file.read().split())
    for directory in (CGROUPS, slice_):
        try:
            with open(f"{directory}/cgroup.subtree_control", "w") as file:
                file.write(wanted)
        except OSError:
            pass  # a service manager controls these


def _mount_cgroups() -> bool:
    """Mount cgroup v2; False if the kernel cannot.

    slurmstepd moves itself and the job's first process while a job starts. With `favordynmods` (Linux 6.0) a move does
    not wait until all CPUs have passed a quiescent state of RCU.
    """
    for options in ("favordynmods", ""):
        try:
            mount("cgroup2", CGROUPS, "cgroup2", 14, options)
        except OSError:
            continue
        return True
    return False
