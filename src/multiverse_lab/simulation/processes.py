"""What scripts have computed: the same processes may go on in another VM, after theirs was saved and restored.

The ledger knows how far the processes of each script have come. A VM that goes on with them at another point would
execute work twice, or leave work out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from multiverse.core.model.identity import Identity
from multiverse.core.model.vm import VmSpec
from multiverse_lab.simulation.jobs import JobRecord

_EQUAL = 1e-4  # seconds by which two points of a script may differ: each timer ends some microseconds late


@dataclass(eq=False)
class ScriptProcesses:
    """The processes of a script that began in a run of a job. `run` is the restart that they serve, or served last."""

    job: JobRecord
    run: int
    computed: float = 0.0  # seconds of the script that were executed, wherever
    vm: str = ""  # in which they execute at this moment
    place: object = None  # the guest of that VM
    states: int = 0  # that were saved of them
    completed: bool = False


@dataclass(frozen=True)
class FrozenProcesses:
    """ScriptProcesses as a VM has them in its memory, while they do not execute. None in a VM of a job of several in
    which the script does not run: what its steps do there is not simulated."""

    which: ScriptProcesses | None
    computed: float
    cut: bool  # they belong to no run of their job


@dataclass(eq=False)
class SavedFiles:
    """The files of a saved VM. `attached` is the guest in which the processes went on."""

    name: str
    spec: VmSpec
    identity: Identity
    frozen: FrozenProcesses | None
    bytes: int
    written: float  # Unix time
    attached: object = None
    checkpoint: bool = False  # the processes went on


@dataclass(eq=False)
class Ledger:
    """All processes that ever began, and what went wrong with them."""

    every: list[ScriptProcesses] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def begin(self, job: JobRecord) -> ScriptProcesses:
        begun = ScriptProcesses(job, job.restarts)
        self.every.append(begun)
        return begun

    def go_on(self, which: ScriptProcesses, at: float, vm: str, place: object) -> None:
        """A guest lets processes go on, at a second of their script."""
        name = f"job {which.job.job_id}"
        if which.place is not None and which.place is not place:
            self.violations.append(f"the processes of {name} go on in {vm}, and in another VM ({which.vm})")
        if abs(at - which.computed) > _EQUAL:
            reached = f"and had come to {which.computed:.3f} s"
            self.violations.append(f"the processes of {name} go on in {vm} at {at:.3f} s of the script, {reached}")
        which.vm, which.place = vm, place

    def stop(self, which: ScriptProcesses, at: float, place: object) -> None:
        """They do not execute any more in that guest."""
        if which.place is place:
            which.computed, which.vm, which.place = max(at, which.computed), "", None

    def attach(self, files: SavedFiles, job: JobRecord, vm: str, place: object) -> FrozenProcesses | None:
        """The next run of a job takes over the processes that were saved; None if there are none."""
        if (frozen := files.frozen) is None or frozen.which is None:
            return None
        what = f"the state {files.name} of job {frozen.which.job.job_id}"
        later = job.restarts - frozen.which.run
        if frozen.which.job is not job or not (later > 0 if files.checkpoint else later == 1):
            self.violations.append(f"{what}, restart {frozen.which.run}, attached to {job.job_id}, {job.restarts}")
        if files.attached not in (None, place) and not files.checkpoint:
            self.violations.append(f"{what} attached a second time, in {vm}")
        if files.checkpoint:  # what was executed since is executed again
            frozen.which.computed = frozen.computed
        files.attached, frozen.which.run = place, job.restarts
        return replace(frozen, cut=False)

    def lost_work(self, *, disturbed: bool) -> list[str]:
        """Scripts that ended before all of their work was executed and, unless something broke or users had jobs begin
        again, jobs whose scripts began more than once."""
        found = [
            f"job {one.job.job_id} completed after {one.computed:.3f} of {one.job.batch.seconds:g} s"
            for one in self.every
            if one.completed and abs(one.computed - one.job.batch.seconds) > _EQUAL
        ]
        if not disturbed:
            begun = Counter(one.job.number for one in self.every)
            jobs = [one.job for one in self.every]
            again = sorted({job.job_id for job in jobs if begun[job.number] > 1 + job.preempted})
            found += [f"the script of job {job_id} began again, and nothing had gone wrong" for job_id in again]
        return found
