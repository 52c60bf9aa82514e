"""Kernel modules: those that clones need are loaded before the fork point, and none while a clone starts."""

# ruff: noqa: PTH110, PTH119, PTH123

from __future__ import annotations

import os

from multiverse.guest.agent.files import write_kernel_file
from multiverse.guest.agent.syscalls import load_module

MODULES = ("virtio_console", "virtio_net", "nfsv4", "nfs")


def load_modules() -> None:
    """Load the modules that each clone needs, after their dependencies (modules.dep(5))."""
    base = f"/lib/modules/{os.uname().release}"
    needs: dict[str, list[str]] = {}
    path_of: dict[str, str] = {}
    try:
        with open(f"{base}/modules.dep") as file:
            for line in file:
                path, _, rest = line.partition(":")
                needs[path] = rest.split()
                path_of[os.path.basename(path).split(".", 1)[0].replace("-", "_")] = path
    except OSError:
        return
    for name in MODULES:
        if name in path_of and not os.path.exists(f"/sys/module/{name}"):
            for path in [*reversed(needs[path_of[name]]), path_of[name]]:
                load_module(f"{base}/{path}")


def load_on_demand(allowed: bool) -> None:
    """Allow or forbid the kernel to run modprobe for a module that it misses.

    It is forbidden while a clone starts. Each mount makes the kernel ask for modules that do not exist. Each time it
    would run a program, which takes 0.25 s on an emulated CPU and 12 MiB of memory that clones do not share. All
    modules that are needed are loaded by then.
    """
    write_kernel_file("/proc/sys/kernel/modprobe", "/sbin/modprobe\n" if allowed else "\n")
