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

from multiverse.core.errors import Broken
from multiverse.host.cgroups import Cgroups, inherit_cpuset, remove_with_children

_HINT = "did the job end meanwhile? see the control groups of its node"


def find_job_groups(job: str, pid: int, proc: Path = Path("/proc")) -> tuple[str, ...]:
    """The directories of the control groups of that job, which the process `pid` is in one step of.

    The freezers of version 1 are left out: the scheduler finds the processes of a step by them. Empty if the scheduler
    has no control groups for jobs.
    """
    found = []
    mounts = [line.split(" ") for line in (proc / "mounts").read_text().splitlines()]
    for line in (proc / str(pid) / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        match = re.match(rf"(.*/job_{re.escape(job)})(?:/|$)", path)
        if match is None or "freezer" in controllers.split(","):
            continue
        for _, where, kind, options, *_ in mounts:
            named = set(controllers.split(",")) <= set(options.split(","))
            if kind == "cgroup2" if number == "0" else kind == "cgroup" and named:
                found.append(f"{where}{match[1]}")
                break
    return tuple(found)


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
