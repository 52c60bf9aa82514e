"""Limits on what a QEMU takes of its host: control groups `multiverse/<vm>` (cgroups(7)), of version 2 or 1.

They are found by their mounts and made when a VM is; what cannot be limited here is said once. The group of a VM is
empty when its QEMU has ended, and is removed with the VM, the common one with the last of them.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from multiverse.core.errors import Broken

log = structlog.get_logger(__name__)

COMMON = "multiverse"
_LIMITS = {2: {"memory": "memory.max", "pids": "pids.max"}, 1: {"memory": "memory.limit_in_bytes", "pids": "pids.max"}}
_EMPTY = 5.0  # seconds for the kernel to take the last thread of a dead process out of its group


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A mounted one that may limit `controllers`; our groups are below `common`."""

    common: Path
    version: int
    controllers: tuple[str, ...]

    def make(self, name: str) -> Path:
        """The group of that name, made if need be. OSError if we may not."""
        group = self.common / name
        while True:
            try:
                group.mkdir(exist_ok=True)
                return group
            except FileNotFoundError:  # also if the last VM's end has just removed it
                self.common.mkdir(exist_ok=True)
                if self.version == 2:
                    for parent in (self.common.parent, self.common):
                        wanted = " ".join(f"+{each}" for each in self.controllers)
                        (parent / "cgroup.subtree_control").write_text(wanted)


class Cgroups:
    """The groups of this host's VMs. A machine without any, or where we may not make them, is said so at once."""

    def __init__(self, mounts: Path = Path("/proc/mounts")) -> None:
        self._hierarchies = [each for each in _mounted(mounts) if _works(each)]
        missing = {"memory", "pids"} - {each for found in self._hierarchies for each in found.controllers}
        self._counts = "pids" not in missing
        if missing:
            log.warning(
                "there is no control group to limit VMs' QEMUs by: they may take what memory there is"
                if "memory" in missing
                else "there is no control group to count VMs' threads by: each QEMU's user is limited instead",
                missing=sorted(missing),
            )

    def limit(self, name: str, memory: int, tasks: int) -> None:
        """Let that VM's QEMU have so many MiB and threads. `Broken` if that is refused."""
        values = {"memory": memory << 20, "pids": tasks}
        try:
            for found in self._hierarchies:
                group = found.make(name)
                for each in found.controllers:
                    (group / _LIMITS[found.version][each]).write_text(str(values[each]))
        except OSError as error:
            raise Broken(f"cannot limit VM {name}: {error}", hint="who else manages the control groups?") from error

    def put(self, name: str, pid: int, tasks: int) -> None:
        """Put its QEMU there. One that has ended meanwhile is no error."""
        try:
            for found in self._hierarchies:
                (found.common / name / "cgroup.procs").write_text(str(pid))
            if not self._counts:
                resource.prlimit(pid, resource.RLIMIT_NPROC, (tasks, tasks))
        except ProcessLookupError:
            return
        except OSError as error:
            raise Broken(f"cannot limit VM {name}: {error}", hint="who else manages the control groups?") from error

    def remove(self, name: str) -> None:
        """Remove that VM's groups, whose QEMU has ended. Absent is success."""
        deadline = time.monotonic() + _EMPTY
        for found in self._hierarchies:
            while not _removed(found.common / name):
                if time.monotonic() > deadline:
                    raise Broken(f"{found.common / name} is not empty", hint="see its cgroup.procs")
                time.sleep(0.002)
            _removed(found.common)


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise Broken(f"cannot remove {group}: {error.strerror}", hint="who else manages it?") from error
        return False
    return True


def _mounted(mounts: Path) -> list[Hierarchy]:
    """Of each mount, what it may limit; a controller belongs to one hierarchy only (cgroups(7))."""
    found = []
    for line in mounts.read_text().splitlines():
        _, where, kind, options, *_ = line.split(" ")
        if kind == "cgroup2":
            try:
                there, version = (Path(where) / "cgroup.controllers").read_text().split(), 2
            except OSError:
                continue
        elif kind == "cgroup":
            there, version = options.split(","), 1
        else:
            continue
        controllers = tuple(each for each in ("memory", "pids") if each in there)
        if controllers:
            found.append(Hierarchy(Path(where) / COMMON, version, controllers))
    return found


def _works(hierarchy: Hierarchy) -> bool:
    probe = f"probe-{os.getpid()}"  # others may be probing too
    try:
        group = hierarchy.make(probe)
        works = all((group / _LIMITS[hierarchy.version][each]).exists() for each in hierarchy.controllers)
    except OSError:
        return False
    finally:
        for path in (hierarchy.common / probe, hierarchy.common):
            with suppress(Broken):  # others' are not ours to remove
                _removed(path)
    return works
