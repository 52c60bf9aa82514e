"""The control groups of a job of the scheduler: a VM inside the job's allocation is a child of them, beside the job's
steps, so that the job's limits hold for it and the end of a step does not end it.

It has no limits of its own there: the job's hold for all that the job has on this host. Where the job has no groups,
the VM has those of any other VM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from multiverse.core.errors import Broken, Refused
from multiverse.host.cgroups import Cgroups, inherit_cpuset, remove_with_children
from multiverse.system.files import matching

_SLURMD = 0  # the user that makes the control groups of jobs
_HINT = "did the job end meanwhile? see the control groups of its node"


def find_job_groups(job: str, pid: int, proc: Path = Path("/proc")) -> tuple[str, ...]:
    """The directories of the control groups of that job, which the process `pid` is in one step of.

    The freezers of version 1 are left out: the scheduler finds the processes of a step by them. Empty if the scheduler
    has no control groups for jobs. Raises `Refused` if the process has ended.
    """
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
    """What is mounted here, and which control groups that process is in."""
    try:
        return (proc / "mounts").read_text(), (proc / str(pid) / "cgroup").read_text()
    except OSError as error:
        raise Refused("the process that asked has ended", hint="ask again") from error


def _memberships(text: str) -> Iterator[tuple[set[str], str]]:
    """Controllers and path of each hierarchy in /proc/PID/cgroup. The one of version 2 has no controllers there."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        yield set(filter(None, controllers.split(","))), path


def _mount_of(controllers: set[str], mounts: str) -> str | None:
    """Where the hierarchy with these controllers is mounted."""
    for line in mounts.splitlines():
        _, where, kind, options, *_ = line.split(" ")
        if kind == "cgroup" and controllers and controllers <= set(options.split(",")):
            return where
        if kind == "cgroup2" and not controllers:
            return where
    return None


def find_job(pid: int, proc: Path = Path("/proc")) -> int:
    """The id of the job in whose control groups the process is; 0 if it is in none, or in those of two.

    Users can have control groups of their own, with any name, but those of jobs are root's. Raises `Refused` if the
    process has ended.
    """
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
    alone is no sign of one: Slurm leaves it there if a killed process has not left it yet."""
    return any(_has_process(file) for directory in job for file in matching(directory, "step_*/**/cgroup.procs"))


def _has_process(procs: Path) -> bool:
    with suppress(OSError):  # the group is gone, or a threaded one, whose processes its parent shows
        return bool(procs.read_text())
    return False


@dataclass(frozen=True, slots=True)
class JobGroups:
    """The groups of one VM: `<directory>/<name>` in each of these directories, which are the job's, and those that it
    has `beside` them."""

    job: Sequence[str]
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
            raise Broken(f"cannot make a control group for VM {name}: {error}", hint=_HINT) from error

    def add_process(self, name: str, pid: int, threads: int) -> None:
        """Put the QEMU of that VM into its groups. A process that has ended meanwhile is no error."""
        self.beside.add_process(name, pid, threads)
        try:
            for directory in self.job:
                Path(directory, name, "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            return
        except OSError as error:
            raise Broken(f"cannot put VM {name} into its job's control group: {error}", hint=_HINT) from error

    def directories(self, name: str) -> list[str]:
        """The groups of that VM."""
        return [*(f"{directory}/{name}" for directory in self.job), *self.beside.directories(name)]

    def remove(self, name: str) -> None:
        """Remove the groups of that VM, whose QEMU has ended, and those of its job and of the job's user if they are
        empty: the scheduler could not remove them before. Absent is success."""
        self.beside.remove(name)
        if left := remove_with_children(Path(directory, name) for directory in self.job):
            raise Broken(f"the control group {left[0]} is not empty", hint="see its cgroup.procs")
        for directory in map(Path, self.job):
            for above in _above(directory):
                with suppress(OSError):  # a step runs, or another job of the user
                    above.rmdir()


def _above(job: Path) -> Iterator[Path]:
    yield job
    if job.parent.name.startswith("uid_"):
        yield job.parent
