"""The control groups of a lease: inside those that the scheduler has given to the pilot's job.

Slurm signals and kills the processes in a step's own control group, not those in groups below it or beside it. So the
pilot stays in the step's, and all that it starts is elsewhere: Slurm's first signal reaches the pilot alone, and its
SIGKILL ends the pilot and with that all. The job's limits hold for all of them.

In version 1 a lease's group is below the step's. In version 2 a group with processes has no controllers for its
children (cgroups(7)), so it is beside that of the step's task.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from multiverse.host.cgroups import hierarchies, remove_with_children

_DAEMONS = "system"
_MEMORY = {2: "memory.max", 1: "memory.limit_in_bytes"}
_NO_LIMIT = 1 << 40  # MiB; version 1 shows nearly 2**63 bytes
_OF_A_JOB = re.compile(r"(task|step|job)_[^/]+")


@dataclass(frozen=True, slots=True)
class LeaseGroup:
    """A lease's group in one hierarchy, which is mounted at `mount`."""

    mount: Path
    path: Path
    version: int


def job_of(groups: str) -> str:
    """The job whose control group a process is in, by its /proc/PID/cgroup; empty if it is in none of Slurm's."""
    found = re.search(r"/job_(\d+)", groups)
    return found[1] if found else ""


def make_groups(
    name: str, mounts: Path = Path("/proc/mounts"), own: Path = Path("/proc/self/cgroup")
) -> list[LeaseGroup]:
    """Make the groups of that lease in each hierarchy that limits VMs, or by which Slurm finds processes. One in which
    that is not permitted is left out: its limits are not available to VMs either."""
    lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    found = []
    for hierarchy in hierarchies(mounts, controllers=("memory", "pids", "freezer")):
        mount = hierarchy.parent.parent
        where = [
            path for _, controllers, path in lines if _is_of(controllers, hierarchy.version, hierarchy.controllers)
        ]
        if not where or "/.." in where[0]:  # not below what is mounted here
            continue
        base = mount / where[0].lstrip("/")
        group = (base.parent if hierarchy.version == 2 and base != mount else base) / name
        with suppress(OSError):
            group.mkdir(exist_ok=True)
            if hierarchy.version == 2:
                with suppress(OSError):  # those that Slurm has not enabled here stay off
                    (group.parent / "cgroup.subtree_control").write_text("+memory +pids")
            (group / _DAEMONS).mkdir(exist_ok=True)
            found.append(LeaseGroup(mount, group, hierarchy.version))
    return found


def memory_limit(mounts: Path = Path("/proc/mounts"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """MiB that this process's control groups permit, those of its job among them; None if they set no limit."""
    lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    found = []
    for hierarchy in hierarchies(mounts, controllers=("memory",)):
        mount = hierarchy.parent.parent
        where = next((path for _, of, path in lines if _is_of(of, hierarchy.version, hierarchy.controllers)), "/..")
        group = mount / where.lstrip("/")
        for each in (group, *group.parents) if "/.." not in where else ():
            with suppress(OSError, ValueError):  # "max"
                found.append(int((each / _MEMORY[hierarchy.version]).read_text()) >> 20)
            if each == mount:
                break
    return min((limit for limit in found if limit < _NO_LIMIT), default=None)


def _is_of(controllers: str, version: int, wanted: Sequence[str]) -> bool:
    """Whether a line of /proc/PID/cgroup is of the hierarchy with these controllers."""
    return controllers == "" if version == 2 else bool(set(controllers.split(",")) & set(wanted))


def join(groups: Sequence[LeaseGroup]) -> None:
    """Put this process, which sees each group as the whole hierarchy, among the daemons of a lease."""
    for group in groups:
        (group.mount / _DAEMONS / "cgroup.procs").write_text("0")


def remove_groups(paths: Sequence[Path]) -> list[str]:
    """Remove the groups of a lease whose processes have ended, with those of its job that Slurm could not remove
    because of them. Returns those that are left. Absent is success."""
    left = remove_with_children(paths)
    for path in paths:
        above = path.parent
        with suppress(OSError):  # Slurm has removed it, or uses it still
            while _OF_A_JOB.fullmatch(above.name):
                above.rmdir()
                above = above.parent
    return list(map(str, left))
