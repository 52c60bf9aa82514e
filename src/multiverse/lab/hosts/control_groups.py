"""The control groups of a lab's hosts.

In each hierarchy that has a controller for VMs, a host has the group `<lab>/<host>`. The host sees it as the whole
hierarchy. Its own daemons are in `system` below it, because on version 2 a group with controllers for its children has
no process itself (cgroups(7)).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from multiverse.core.errors import Broken
from multiverse.host.cgroups import CONTROLLERS, hierarchies

_DAEMONS = "system"
_ALL = ("memory", "pids", "cpu", "cpuacct", "cpuset", "devices", "freezer", "blkio")
_EMPTY_TIMEOUT = 5.0  # seconds for the kernel to take the last process of a host that has ended out of its groups


def create(lab: str, host: str, *, every: bool = False) -> dict[Path, Path]:
    """Create the groups of a host, and put this process into them: in the hierarchies that have a controller for VMs,
    or in all that Slurm uses. Returns each by where its hierarchy is mounted. A hierarchy in which that is not
    permitted is left out: its limits are not available to VMs on this machine either."""
    found = {}
    for hierarchy in hierarchies(parent=lab, controllers=_ALL if every else CONTROLLERS):
        with suppress(OSError):
            group = hierarchy.create(host)
            for each in (group.parent, group):
                _inherit_cpuset(each)
            (group / "cgroup.procs").write_text("0")
            found[hierarchy.parent.parent] = group
    return found


def _inherit_cpuset(group: Path) -> None:
    """Give the group its parent's CPUs and memory nodes: on version 1 a new one has none, and takes no process."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (file := group / name).exists() and not file.read_text().strip():
            file.write_text((group.parent / name).read_text())


def join_daemons() -> None:
    """Put this process, which is on the host, among the host's daemons."""
    for hierarchy in hierarchies(controllers=_ALL):  # those that the host sees
        group = hierarchy.parent.with_name(_DAEMONS)
        group.mkdir(exist_ok=True)
        _inherit_cpuset(group)
        (group / "cgroup.procs").write_text("0")


def remove(lab: str, host: str) -> None:
    """Remove the groups of a host that has ended, and those of the lab with its last host. Absent is success."""
    deadline = time.monotonic() + _EMPTY_TIMEOUT
    for hierarchy in hierarchies(parent=lab, controllers=_ALL):
        group = hierarchy.parent / host
        while not _removed(group):
            if time.monotonic() > deadline:
                raise Broken(f"the control group {group} is not empty", hint="see cgroup.procs in it and below it")
            time.sleep(0.01)
        with suppress(OSError):  # another host of the lab is there
            hierarchy.parent.rmdir()


def _removed(group: Path) -> bool:
    """Try to remove a group and those below it. False if one of them is not empty."""
    try:
        for path, _, _ in os.walk(group, topdown=False):
            Path(path).rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
