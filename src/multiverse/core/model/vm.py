"""VMs: as rows, as specified and as observed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from multiverse.core.model.keys import Key
from multiverse.core.model.sizes import CloneKind, Depth, Size
from multiverse.core.model.template import TemplateKey


class Offer(StrEnum):
    """How it stands with a joined spare that jobs may take by themselves, as they are submitted."""

    OPEN = "open"
    TAKEN = "taken"  # by a submission: its job is on its way, unless it was refused after that
    CLOSING = "closing"  # being withdrawn: it may be taken yet
    CLOSED = "closed"  # withdrawn, and nobody took it; it is never offered again


class VmCondition(StrEnum):
    MAKING = "making"  # begun, not complete
    PARKED = "parked"  # restored and paused, or ready to boot; no identity yet
    STARTING = "starting"  # it runs, but is not all itself yet: mounts, users, daemons
    RUNNING = "running"  # it has its identity, its mounts, and its daemons have been started
    DEAD = "dead"  # its process is gone or its guest has stopped; things of it remain


@dataclass(frozen=True, slots=True)
class VmSeen:
    """A VM as its host sees it. Memory in MiB (0: not measured), a few seconds old at most: `private` goes when the
    VM ends; `shared` is what it maps of its template and of programs, whole, however many map it too. `introduced` are
    the users that its guest was told of after its start. `address` is the one that the platform assigned, with its
    prefix length, where the platform assigns addresses; `placed_on` names the machine that runs the VM, where the
    platform places VMs on its machines itself."""

    name: str
    host: str
    condition: VmCondition
    reason: str = ""
    cpu_s: float = 0.0
    private: float = 0.0
    shared: float = 0.0
    introduced: tuple[int, ...] = ()
    address: str = ""
    placed_on: str = ""


class VmRef(NamedTuple):
    """Where a VM is found: its name, and the source that answers for it (empty where a hypervisor has only one)."""

    name: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class VmSpec:
    """What `create` needs. Nothing of a job is in it: a created VM has no identity. `template` is what it is
    forked from; None for one that boots from its image. `spare`: made before anybody waits for it, so it may take
    longer now to be quicker later."""

    name: str
    host: str
    image: str
    kind: CloneKind
    size: Size
    mac: str
    template: TemplateKey | None = None
    spare: bool = False


class VmState(StrEnum):
    PLANNED = "planned"
    PARKED = "parked"
    STARTING = "starting"
    JOINED = "joined"
    SERVING = "serving"
    LOST = "lost"
    RELEASING = "releasing"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Vm:
    """A VM from before it exists until it is seen gone. `size` is the VM's own, `told` the node's.

    `pool` says that it was made for the warm pool, and how far; it is spare until it serves an `attempt`.
    `forget` says that no job was seen on its node since it was ended: only then may the node be deleted.
    `fenced` says that an operator vouched for its host being off: it counts as ended, though nobody saw it.
    `parent` is the size of the template that it is forked from, None if it boots from its image, `account` whose
    template that is, and `origin` the template's row, which may be gone before it. A joined spare's `offer` stands so
    since `offered`; `unwanted` is why it is to be released once it is closed.
    """

    id: int  # the serial
    version: int
    state: VmState
    since: float
    name: str
    host: str
    image: str
    kind: CloneKind
    size: Size
    told: Size
    mac: str
    address: str  # with prefix length
    attempt: int | None = None
    reason: str = ""
    failed: bool = False
    forget: bool = False
    fenced: bool = False
    quarantined: str = ""
    parent: Size | None = None
    account: str = ""
    origin: int | None = None
    pool: Depth | None = None
    offer: Offer | None = None
    offered: float = 0.0
    unwanted: str = ""

    @property
    def key(self) -> Key:
        return Key("vm", self.id)

    @property
    def template(self) -> TemplateKey | None:
        return TemplateKey(self.host, self.image, self.parent, self.account) if self.parent else None

    @property
    def feature(self) -> str:
        """What a job is tied to that takes it when it has joined already, and cannot learn another feature."""
        return f"mv_v{self.id}"


@dataclass(frozen=True, slots=True)
class Stage:
    """How long a named part of an effect took, in seconds. Stages of one effect follow each other."""

    name: str
    seconds: float


def is_spare(vm: Vm) -> bool:
    return vm.pool is not None and vm.attempt is None and not vm.quarantined and not vm.failed


def is_parked_spare(vm: Vm) -> bool:
    return is_spare(vm) and vm.state is VmState.PARKED
