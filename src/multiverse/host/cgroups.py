"""Control groups of VMs, of version 2 or 1 (cgroups(7))."""

from __future__ import annotations

import copy
import errno
import os
import re
import resource
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from multiverse.core.errors import Broken, Refused
from multiverse.system.files import matching

log = structlog.get_logger(__name__)

PARENT = "multiverse"
CONTROLLERS = ("memory", "pids")
_CPUSET = ("cpuset.cpus", "cpuset.mems")
_LIMITS = {
    2: {"memory": "memory.max", "pids": "pids.max", "cpuset": _CPUSET[0]},
    1: {"memory": "memory.limit_in_bytes", "pids": "pids.max", "cpuset": _CPUSET[0]},
}
_EMPTY_TIMEOUT = 5.0  # seconds for the kernel to take the last thread of a dead process out of its cgroup
_HINT = "does another program manage the control groups?"


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A mounted hierarchy with some of our controllers."""

    parent: Path  # the cgroup above the cgroups of VMs
    version: int
    controllers: tuple[str, ...]

    def create(self, name: str) -> Path:
        """The cgroup of that name, created if it is missing. Raises OSError if this is not permitted."""
        group = self.parent / name
        while True:
            try:
                group.mkdir(exist_ok=True)
                self._complete(group)
                return group
            except FileNotFoundError:  # the end of the last VM may just have removed the parent
                self.parent.mkdir(exist_ok=True)

    def _complete(self, group: Path) -> None:
        """Give the cgroup its controllers. The cgroup above may be of another process, which uses fewer of them."""
        if self.version == 2 and not {*self.controllers} <= _controllers_of(group):
            for above in (self.parent.parent, self.parent):
                wanted = " ".join(f"+{each}" for each in self.controllers)
                (above / "cgroup.subtree_control").write_text(wanted)
        if self.version == 1 and "cpuset" in self.controllers:
            inherit_cpuset(self.parent)
            inherit_cpuset(group)


def _controllers_of(group: Path) -> set[str]:
    """The controllers of a cgroup of version 2; none if it has just been removed."""
    try:
        return {*(group / "cgroup.controllers").read_text().split()}
    except FileNotFoundError:
        return set()


class Cgroups:
    """Limits on the memory, threads and CPUs of each VM's QEMU. The log says once, at the start, which limits are
    impossible on this machine.

    A VM's cgroup is `multiverse/<name>` in each hierarchy that has one of the controllers. It is created with the VM
    and removed after its QEMU has ended; `multiverse` itself is removed with the last of them. The CPUs are limited on
    machines with several NUMA nodes only. The nodes of the memory are never limited (cpuset.mems): the kernel would
    move memory that the VM shares with its template.
    """

    def __init__(self, mounts: Path = Path("/proc/mounts"), *, cpusets: bool = False) -> None:
        """With `cpusets` VMs can be kept on CPUs."""
        self._cpusets = [each for each in hierarchies(mounts, controllers=("cpuset",)) if cpusets and _is_usable(each)]
        if cpusets and not self._cpusets:
            log.warning("VMs are kept on no NUMA node", reason="no usable control group has the cpuset controller")
        self._hierarchies = [each for each in hierarchies(mounts) if _is_usable(each)]
        missing = {"memory", "pids"} - {each for usable in self._hierarchies for each in usable.controllers}
        self._counts_threads = "pids" not in missing
        if "memory" in missing:
            log.warning("VMs have no memory limit", reason="no usable control group has the memory controller")
        if "pids" in missing:
            reason = "no usable control group has the pids controller; each QEMU's user is limited instead"
            log.warning("VMs have no thread limit", reason=reason)

    def beside(self, directories: Sequence[str]) -> Cgroups:
        """The same, without the hierarchies that these groups are in."""
        other = copy.copy(self)
        other._counts_threads = True  # what does not is left as it is
        other._hierarchies = [
            one
            for one in self._hierarchies
            if not any(Path(each).is_relative_to(one.parent.parent) for each in directories)
        ]
        other._cpusets = []  # Slurm says which CPUs the job has
        return other

    @property
    def _own(self) -> list[Hierarchy]:
        """Every hierarchy in which VMs have cgroups, once."""
        return list({each.parent: each for each in (*self._hierarchies, *self._cpusets)}.values())

    def set_limits(self, name: str, memory: int, threads: int) -> None:
        """Allow the QEMU of that VM `memory` MiB and so many threads. Raises `Broken` if this is not permitted."""
        values = {"memory": memory << 20, "pids": threads}
        try:
            for hierarchy in self._hierarchies:
                group = hierarchy.create(name)
                for each in hierarchy.controllers:
                    (group / _LIMITS[hierarchy.version][each]).write_text(str(values[each]))
        except OSError as error:
            raise Broken(f"cannot limit VM {name}: {error}", hint=_HINT) from error

    def keep_on(self, name: str, cpus: Collection[int]) -> None:
        """Let the QEMU of that VM run on these CPUs only, as far as this is permitted."""
        for hierarchy in self._cpusets:
            try:
                (hierarchy.create(name) / _CPUSET[0]).write_text(",".join(map(str, sorted(cpus))))
            except OSError as error:
                log.warning("VM is kept on no NUMA node", vm=name, reason=str(error))

    def add_process(self, name: str, pid: int, threads: int) -> None:
        """Put the QEMU of that VM into its cgroups. A process that has ended meanwhile is no error."""
        try:
            for hierarchy in self._cpusets:
                hierarchy.create(name)
            for hierarchy in self._own:
                (hierarchy.parent / name / "cgroup.procs").write_text(str(pid))
            if not self._counts_threads:
                resource.prlimit(pid, resource.RLIMIT_NPROC, (threads, threads))
        except ProcessLookupError:
            return
        except OSError as error:
            raise Broken(f"cannot limit VM {name}: {error}", hint=_HINT) from error

    def directories(self, name: str) -> list[str]:
        return [str(hierarchy.parent / name) for hierarchy in self._hierarchies]

    def remove(self, name: str) -> None:
        """Remove the cgroups of that VM, whose QEMU has ended. Absent is success."""
        deadline = time.monotonic() + _EMPTY_TIMEOUT
        for hierarchy in self._own:
            while not _is_removed(hierarchy.parent / name):
                if time.monotonic() > deadline:
                    what = f"the control group {hierarchy.parent / name} is not empty"
                    raise Broken(what, hint="see its cgroup.procs")
                time.sleep(0.002)
            _is_removed(hierarchy.parent)


def _is_removed(group: Path) -> bool:
    """Try to remove a cgroup. False if it is not empty."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise Broken(f"cannot remove the control group {group}: {error.strerror}", hint=_HINT) from error
        return False
    return True


def remove_with_children(groups: Iterable[Path]) -> list[Path]:
    """Remove cgroups whose processes have ended, with those below them, and wait until the kernel has taken the last
    thread out of them. Returns those that are not empty by then. Absent is success."""
    deadline, left = time.monotonic() + _EMPTY_TIMEOUT, []
    for group in groups:
        while not _are_removed(group):
            if time.monotonic() > deadline:
                left.append(group)
                break
            time.sleep(0.005)
    return left


def _are_removed(group: Path) -> bool:
    """Try to remove a cgroup and those below it. False if one of them is not empty, or must not be removed."""
    try:
        for path, _, _ in os.walk(group, topdown=False):
            Path(path).rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def inherit_cpuset(group: Path) -> None:
    """Give a cgroup of version 1 the CPUs and nodes of its parent: it has none at first, and takes no process. One of
    version 2 needs nothing: empty files mean the values of its parent, and the uppermost has no such files."""
    if (group / "cgroup.controllers").exists():
        return
    for name in _CPUSET:
        file = group / name
        if file.exists() and not file.read_text().strip():
            file.write_text((group.parent / name).read_text())


def hierarchies(
    mounts: Path = Path("/proc/mounts"), parent: str = PARENT, controllers: Sequence[str] = CONTROLLERS
) -> list[Hierarchy]:
    """The mounted hierarchies that have one of these controllers; a controller belongs to one hierarchy (cgroups(7)).
    `parent` is the name of the cgroup above those of the VMs."""
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
        used = tuple(each for each in controllers if each in there)
        if used:
            found.append(Hierarchy(Path(where) / parent, version, used))
    return found


def _is_usable(hierarchy: Hierarchy) -> bool:
    probe = f"probe-{os.getpid()}-{threading.get_native_id()}"  # others may be probing too
    try:
        group = hierarchy.create(probe)
        return all((group / _LIMITS[hierarchy.version][each]).exists() for each in hierarchy.controllers)
    except OSError:
        return False
    finally:
        for path in (hierarchy.parent / probe, hierarchy.parent):
            with suppress(Broken):  # a cgroup of another process is not ours to remove
                _is_removed(path)


_SLURMD = 0  # the user that makes the control groups of jobs
_JOB_HINT = "did the job end meanwhile? see the control groups of its node"


def find_job_groups(job: str, pid: int, proc: Path = Path("/proc")) -> tuple[str, ...]:
    """The directories of the control groups of that job. The process `pid` is in one of its steps. The freezers of
    version 1 are left out: the scheduler finds the processes of a step by them. Empty if the scheduler has no control
    groups for jobs. Raises `Refused` if the process has ended."""
    found = []
    mounts, groups = _read(pid, proc)
    for controllers, path in _memberships(groups):
        match = re.match(rf"(.*/job_{re.escape(job)})(?:/|$)", path)
        if match is None or "freezer" in controllers:
            continue
        if (where := _mount_of(controllers, mounts)) is not None:
            found.append(f"{where}{match[1]}")
    return tuple(found)


def _read(pid: int, proc: Path) -> tuple[str, str]:
    try:
        return (proc / "mounts").read_text(), (proc / str(pid) / "cgroup").read_text()
    except OSError as error:
        raise Refused("the process that asked has ended", hint="ask again") from error


def _memberships(text: str) -> Iterator[tuple[set[str], str]]:
    """Controllers and path of each hierarchy in /proc/PID/cgroup. That of version 2 has no controllers there."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        yield set(filter(None, controllers.split(","))), path


def _mount_of(controllers: set[str], mounts: str) -> str | None:
    for line in mounts.splitlines():
        _, where, kind, options, *_ = line.split(" ")
        if kind == "cgroup" and controllers and controllers <= set(options.split(",")):
            return where
        if kind == "cgroup2" and not controllers:
            return where
    return None


def find_job(pid: int, proc: Path = Path("/proc")) -> int:
    """The id of the job in whose control groups the process is; 0 if it is in none, or in those of two. Users can have
    control groups of any name, but those of jobs are root's. Raises `Refused` if the process has ended."""
    mounts, groups = _read(pid, proc)
    found = set()
    for controllers, path in _memberships(groups):
        match = re.match(r"(.*?/job_([0-9]+))/step_", path)
        where = _mount_of(controllers, mounts) if match is not None else None
        if match is not None and where is not None:
            with suppress(OSError):
                found.add(int(match[2]) if Path(f"{where}{match[1]}").stat().st_uid == _SLURMD else 0)
    return found.pop() if len(found) == 1 else 0


def has_steps(job: Sequence[str]) -> bool:
    """Whether a process of a step is in one of these directories of a job's control groups. The directory of a step
    alone is no sign: Slurm leaves it there if a killed process has not left it yet."""
    return any(_has_process(file) for directory in job for file in matching(directory, "step_*/**/cgroup.procs"))


def _has_process(procs: Path) -> bool:
    with suppress(OSError):  # the group is gone, or a threaded one, whose processes its parent shows
        return bool(procs.read_text())
    return False


@dataclass(frozen=True, slots=True)
class JobGroups:
    """The groups of a VM inside a job: children of the job's groups, beside its steps. So the job's limits hold for the
    VM, and the end of a step does not end it. In hierarchies without groups of the job, the VM has its usual ones."""

    job: Sequence[str]  # directories of the job's groups
    beside: Cgroups

    def set_limits(self, name: str, memory: int, threads: int) -> None:
        """Make the groups of that VM. Raises `Broken` if there is no such job."""
        self.beside.set_limits(name, memory, threads)
        try:
            for directory in map(Path, self.job):
                group = directory / name
                group.mkdir(exist_ok=True)
                inherit_cpuset(group)
        except OSError as error:
            raise Broken(f"cannot make a control group for VM {name}: {error}", hint=_JOB_HINT) from error

    def add_process(self, name: str, pid: int, threads: int) -> None:
        """Put the QEMU of that VM into its groups. A process that has ended meanwhile is no error."""
        self.beside.add_process(name, pid, threads)
        try:
            for directory in self.job:
                Path(directory, name, "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            return
        except OSError as error:
            raise Broken(f"cannot put VM {name} into its job's control group: {error}", hint=_JOB_HINT) from error

    def directories(self, name: str) -> list[str]:
        return [*(f"{directory}/{name}" for directory in self.job), *self.beside.directories(name)]

    def remove(self, name: str) -> None:
        """Remove the groups of that VM, whose QEMU has ended, and those of its job and of the job's user if they are
        empty: the scheduler could not remove them before. Absent is success."""
        self.beside.remove(name)
        if left := remove_with_children(Path(directory, name) for directory in self.job):
            raise Broken(f"the control group {left[0]} is not empty", hint="see its cgroup.procs")
        for directory in map(Path, self.job):
            above = [directory, directory.parent] if directory.parent.name.startswith("uid_") else [directory]
            for group in above:
                with suppress(OSError):  # a step runs, or another job of the user
                    group.rmdir()
