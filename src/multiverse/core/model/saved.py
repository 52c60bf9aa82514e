"""Saved jobs: as rows, and as the storage shows their files."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from multiverse.core.model.basics import CloneKind, Key, Size
from multiverse.core.model.job import Eviction, JobRef, Request
from multiverse.core.model.reason import Reason


class SavedState(StrEnum):
    PREPARING = "preparing"  # its node is to take no other job, and the scheduler must be able to queue it again
    FREEZING = "freezing"  # its processes are stopped, and what they wrote is written back
    CUTTING = "cutting"  # it is cut off from the scheduler, which is to queue it again: its run is over from here on
    CAPTURING = "capturing"  # its VM is written to the storage while its job goes on: a checkpoint
    WRITING = "writing"  # its VM is written to the storage
    STORED = "stored"  # its files wait there for the next run of the job
    COPYING = "copying"  # the same; they are to be copied to another storage
    KEEPING = "keeping"  # it cannot be written: its VM is to stay, stopped, in the memory of its host
    RESUMING = "resuming"  # the same; its job, which is held, is to be released
    QUEUEING = "queueing"  # the same; the scheduler has forgotten that it queued the job again, and is to do so again
    HOLDING = "holding"  # its job cannot go on, and is to be held with the reason
    THAWING = "thawing"  # the next run has begun in the restored VM, and the processes are to go on: only once
    UNDOING = "undoing"  # it is not saved after all: its processes are to go on, and its node to serve
    DISCARDING = "discarding"  # its files are removed
    GONE = "gone"


SAVING = (SavedState.PREPARING, SavedState.FREEZING, SavedState.CUTTING, SavedState.WRITING)
"""In these states its job is on its way off its hosts. A checkpoint is in none of them."""
UNWRITTEN = (SavedState.CAPTURING, *SAVING)
HOLDS_VM = (SavedState.CUTTING, SavedState.WRITING, SavedState.KEEPING)
"""In these states the VM is needed although the run of its job is over."""
COMPLETE = (SavedState.STORED, SavedState.COPYING)
"""In these states a VM can be restored from it."""
WAITS_FOR_RUN = (*HOLDS_VM, *COMPLETE, SavedState.RESUMING, SavedState.QUEUEING, SavedState.HOLDING)
"""In these states the next run of the job goes on with the state, or waits until it is complete."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a host keeps the files of saved VMs, and which of them it can restore."""

    name: str  # of the storage: hosts that share a directory show the same one
    machine: str  # a VM can be restored where this is the same: version of QEMU, accelerator, CPU


@dataclass(frozen=True, slots=True)
class SavedSeen:
    """The files of a saved VM as a source shows them."""

    name: str
    token: str  # of the VM
    size: int  # bytes
    storage: str
    written: float = 0.0  # Unix time
    complete: bool = True  # a VM can be restored from them; else nothing but their name and storage is known
    kept: bool = False  # there are no files: it is kept in the memory of the host that shows it
    copy: str = ""  # another storage that has the same files, complete


@dataclass(frozen=True, slots=True)
class SavedPart:
    """One VM of a saved job."""

    vm: int  # the number of the VM's row
    vm_name: str  # that it has again when it is restored, as its MAC and address
    token: str  # of the VM that was saved
    mac: str
    address: str  # with prefix length
    size: Size
    source: str  # that writes it


@dataclass(frozen=True, slots=True)
class Saved:
    """A job that is saved, from the request until nothing is left of it in the storage. `vm` to `source` are of the VM
    with its script, `others` those of a job of several VMs: its state is complete when all of them are."""

    id: int
    version: int = field(default=0, kw_only=True)
    state: SavedState = field(default=SavedState.PREPARING, kw_only=True)
    since: float
    job: JobRef  # the run that was saved; its next restart goes on with the state, and no other one
    # Its job went on: the state serves each later run that begins because an earlier one was lost, until there is a
    # newer one.
    checkpoint: bool = field(default=False, kw_only=True)
    shared_files: bool = field(default=False, kw_only=True)  # a checkpoint that may be of a job that writes to some
    uid: int
    vm: int  # the number of the VM's row
    vm_name: str  # that it has again when it is restored, as its MAC and address
    token: str  # of the VM that was saved
    mac: str
    address: str  # with prefix length
    image: str
    kind: CloneKind
    size: Size
    node_size: Size
    account: str
    source: str  # that writes it
    storage: str  # where its files are read from, if a host reaches it
    machine: str
    asked: Reason  # who asked for it, or why
    begun: float = 0.0  # Unix time of that
    hold: bool = False  # the job is to be held until somebody releases it
    froze: bool = False  # its processes were to be stopped: some may be, whatever its host knows
    requeues: bool = True  # the scheduler was to queue it again if its node failed, before it was saved
    runs: int = 1  # of its processes so far
    limit: float | None = None  # seconds that a run might take then, by its time limit; None: nobody knew
    remaining: float | None = None  # seconds that the next run may take; None: as long as its time limit says
    beyond: float = 0.0  # seconds after its time limit until the scheduler has ended a run
    bound: int = 0  # bytes that its files may take
    bytes: int = 0  # that they take, once they are complete
    tries: int = 0  # that failed to write them
    copy: str = ""  # another storage with the same files; empty: there is none as yet
    copy_tries: int = 0  # that failed to copy them
    copy_reason: Reason | None = None  # of the last such failure
    kept: str = ""  # the host that keeps it in its memory, because it could not be written
    encrypted: bool = False  # its files are
    may_restart: bool = False  # its user agreed that the job begins anew if it cannot go on
    ends: bool = False  # its state is given up as soon as its job is held, or is held no more
    written: float = 0.0  # Unix time at which it was complete
    again: JobRef | None = (
        None  # the run that goes on with it, once the scheduler shows that: its submit time is another
    )
    others: tuple[SavedPart, ...] = ()
    evictions: tuple[Eviction, ...] = ()  # of its job, for the run that goes on with it
    spread: float | None = None  # seconds between the first and the last VM that was frozen, as the controller saw it
    reason: Reason | None = None
    quarantined: Reason | None = None

    @property
    def key(self) -> Key:
        return Key("saved", self.id)

    @property
    def name(self) -> str:
        """Of its directory in the storage. A VM may be saved several times, each time under another number."""
        return self.name_of(self)

    @property
    def parts(self) -> tuple[Saved | SavedPart, ...]:
        """Its VMs, the one with the script first."""
        return (self, *self.others)

    @property
    def names(self) -> list[str]:
        """Of the directories of all its VMs."""
        return [self.name_of(part) for part in self.parts]

    def name_of(self, part: Saved | SavedPart) -> str:
        return f"{part.vm_name}-{self.id}"

    def holds(self, request: Request) -> bool:
        """Whether its node is what a job asks for, which may have been changed since it was saved."""
        asked = request.size
        fits = asked.cpus <= self.node_size.cpus and asked.memory <= self.node_size.memory
        return fits and asked.disk <= self.size.disk and request.nodes == len(self.parts)

    @property
    def stands(self) -> bool:
        """Whether it is a checkpoint that is complete: it waits, whatever its job does."""
        return self.checkpoint and self.state in COMPLETE

    @property
    def claimed(self) -> int:
        """Bytes of the storage that count for it."""
        return 0 if self.kept else self.bytes or self.bound

    @property
    def storages(self) -> tuple[str, ...]:
        """That have its files, complete: the one first that they are read from."""
        return tuple(filter(None, (self.storage, self.copy)))

    def is_for(self, job: JobRef) -> bool:
        """Whether this run of a job goes on with the state."""
        if self.again is not None:
            return job == self.again
        if job.job_id != self.job.job_id or job.submitted < self.job.submitted:
            return False
        later = job.restarts - self.job.restarts
        return later > 0 if self.checkpoint else later == 1
