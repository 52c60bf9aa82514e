"""The control groups of a lab's hosts.

In each hierarchy that has a controller for VMs, a host has the group `<lab>/<host>`. The host sees it as the whole
hierarchy. Its own daemons are in `system` below it, because on version 2 a group with controllers for its children has
no process itself (cgroups(7)).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from multiverse.core.errors import Broken
from multiverse.host.cgroups import CONTROLLERS, hierarchies, inherit_cpuset, remove_with_children

_END = 5.0  # seconds in which killed processes end
_DAEMONS = "system"
_ALL = ("memory", "pids", "cpu", "cpuacct", "cpuset", "devices", "freezer", "blkio")


def create(lab: str, host: str, *, every: bool = False) -> dict[Path, Path]:
    """Create the groups of a host, and put this process into them: in the hierarchies that have a controller for VMs,
    or in all that Slurm uses. Returns each by where its hierarchy is mounted. A hierarchy in which that is not
    permitted is left out: its limits are not available to VMs on this machine either."""
    found = {}
    for hierarchy in hierarchies(parent=lab, controllers=_ALL if every else CONTROLLERS):
        with suppress(OSError):
            group = hierarchy.create(host)
            for each in (group.parent, group):
                inherit_cpuset(each)
            (group / "cgroup.procs").write_text("0")
            found[hierarchy.parent.parent] = group
    return found


def existing(*names: str) -> list[Path]:
    """The control groups of this machine whose paths end with these names, in all hierarchies.

    `Path.glob` cannot be used: it raises FileNotFoundError if another program removes a group that is being read.
    """
    return sorted(Path(path) for path, _, _ in os.walk("/sys/fs/cgroup") if Path(path).parts[-len(names) :] == names)


def join_daemons() -> None:
    """Put this process, which is on the host, among the host's daemons."""
    for hierarchy in hierarchies(controllers=_ALL):  # those that the host sees
        join_daemons_of(hierarchy.parent.parent)


def join_daemons_of(root: Path) -> None:
    """Put this process among the daemons of the host whose own control group in one hierarchy is `root`."""
    group = root / _DAEMONS
    group.mkdir(exist_ok=True)
    inherit_cpuset(group)
    (group / "cgroup.procs").write_text("0")
    if (root / "cgroup.controllers").exists():
        _make_slice(root)


def _make_slice(root: Path) -> None:
    """Make the group of version 2 that slurmd has its jobs in, with all controllers, as systemd makes it."""
    place = root / "system.slice"
    place.mkdir(exist_ok=True)
    for each in (root, place):
        wanted = " ".join(f"+{name}" for name in (each / "cgroup.controllers").read_text().split())
        with suppress(OSError):  # what has started the first daemon is still in `root`: then the next daemon does this
            (each / "cgroup.subtree_control").write_text(wanted)


def end(lab: str, host: str) -> None:
    """Kill what is in the groups of a host, if there is anything, and remove them."""
    deadline = time.monotonic() + _END
    while found := processes(lab, host):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    remove(lab, host)


def processes(lab: str, host: str) -> set[int]:
    """What is in the groups of a host and below them. A process that is no more than a record of its end counts."""
    found: set[int] = set()
    for hierarchy in hierarchies(parent=lab, controllers=_ALL):
        for path, _, _ in os.walk(hierarchy.parent / host):
            with suppress(OSError):  # it is removed meanwhile
                found |= {int(pid) for pid in Path(path, "cgroup.procs").read_text().split()}
    return found - {0}


def remove(lab: str, host: str) -> None:
    """Remove the groups of a host that has ended, and those of the lab with its last host. Absent is success."""
    parents = [hierarchy.parent for hierarchy in hierarchies(parent=lab, controllers=_ALL)]
    if left := remove_with_children(parent / host for parent in parents):
        raise Broken(f"the control group {left[0]} is not empty", hint="see cgroup.procs in it and below it")
    for parent in parents:
        with suppress(OSError):  # another host of the lab is there
            parent.rmdir()
