"""The nouns of Multiverse: immutable values, shared by every layer.

Memory and disk are MiB, times are seconds, processors are counts of vCPUs. Monotonic times (`since`,
`began`) come from `Clock.now()` and mean nothing across a reboot; wall times are Unix time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

# --- sizes and requests ----------------------------------------------------------------------------


class CloneKind(StrEnum):
    """How a VM comes from its template or image (DESIGN, "Words"). `AUTO` is a wish only: no VM is of that kind."""

    INSTANT = "instant"
    LINKED = "linked"
    FULL = "full"
    AUTO = "auto"


class Depth(StrEnum):
    """How far a VM of the warm pool is made before any job asks for it."""

    PARKED = "parked"  # restored and paused: of any size yet, and nobody yet
    JOINED = "joined"  # an idle node of one size


class Offer(StrEnum):
    """How it stands with a joined spare that jobs may take by themselves, as they are submitted."""

    OPEN = "open"
    TAKEN = "taken"  # by a submission: its job is on its way, unless it was refused after that
    CLOSING = "closing"  # being withdrawn: it may be taken yet
    CLOSED = "closed"  # withdrawn, and nobody took it; it is never offered again


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """How large a VM or a request is. `disk` 0 means the image's own size."""

    cpus: int
    memory: int
    disk: int = 0

    def __str__(self) -> str:
        text = f"{self.cpus} CPU{'s' if self.cpus != 1 else ''}, {self.memory} MiB"
        return f"{text}, {self.disk} MiB disk" if self.disk else text


@dataclass(frozen=True, slots=True)
class Request:
    """What a job asks for, per node. `size.memory` is what the job may use, not what its VM has. `account`: its VMs
    are forked from that account's own templates; empty where all share them."""

    nodes: int
    size: Size
    image: str | None = None
    kind: CloneKind | None = None
    features: tuple[str, ...] = ()
    account: str = ""


# --- the scheduler's side --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class JobRef:
    """One run of one job. Job ids come again and requeued jobs keep theirs, hence all three.

    `job_id` is the scheduler's own string (`123`, `123_4`), `submitted` Unix time, `restarts` the
    scheduler's restart count. A store serves one cluster, so the cluster's name is not repeated here.
    """

    job_id: str
    submitted: int
    restarts: int = 0


class JobState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETING = "completing"  # ended, but its node is not free of it yet
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Job:
    """A job of ours as the scheduler shows it; jobs outside our partitions are never shown.

    `rank` orders pending jobs as the scheduler would start them (lower first). `eligible` says that
    nothing but the gate keeps it waiting, and limits that are counted: no hold, dependency, begin time
    or other limit. `gated` says that it waits at the gate; `pinned` names the attempt's feature it is
    tied to. `problem` says why its request cannot be served at all; `request` is None exactly then.
    `result` is the scheduler's own word for how it ended (`COMPLETED`, `FAILED`, ...). `uses` is what a
    pending job will take of which of the view's limits once it runs.
    """

    ref: JobRef
    name: str
    uid: int
    state: JobState
    request: Request | None
    problem: str = ""
    reason: str = ""
    rank: int = 0
    eligible: bool = True
    held: bool = False
    gated: bool = True
    pinned: str | None = None
    nodes: tuple[str, ...] = ()
    result: str = ""
    exit_code: int = 0
    work_dir: str = ""
    uses: tuple[tuple[str, int], ...] = ()


class NodeState(StrEnum):
    IDLE = "idle"
    BUSY = "busy"  # runs a job, or is completing one
    DOWN = "down"  # down, drained, failing or not answering
    JOINING = "joining"  # known by name, not registered yet


@dataclass(frozen=True, slots=True)
class Node:
    """A VM as the scheduler sees it; only dynamic nodes of our site are shown."""

    name: str
    state: NodeState
    features: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """One look. `jobs` by job id, `nodes` by name. Ended jobs may be missing or shown as ended. `limits`
    is how much more each lets run, beside all that runs or ran when the jobs were looked at. `offers` are the names
    of the nodes that jobs may take by themselves, and of those that were taken: True."""

    jobs: Mapping[str, Job] = field(default_factory=lambda: MappingProxyType({}))
    nodes: Mapping[str, Node] = field(default_factory=lambda: MappingProxyType({}))
    limits: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    offers: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))


# --- the hypervisor's side -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that runs VMs: what it declares to have for them, and what it can do.

    `abilities` are names such as `instant`, `full`, `plug_memory`, `plug_cpus`. `machine` is what the
    machine itself has, shown beside the declared capacity; None if the platform does not tell.
    `template_copies` is how often the memory of a template is held there while it has clones.
    `available` is what the machine could give to new processes at this look, in MiB; 0 if that is unknown.
    `images` are those that are there, each with what it can do: `fork`, `plug_cpus`, `plug_memory`.
    """

    name: str
    capacity: Size
    abilities: frozenset[str] = frozenset()
    machine: Size | None = None
    accelerator: str = ""
    template_copies: int = 1
    available: int = 0
    images: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def image_can(self, image: str, ability: str) -> bool:
        """Whether the image is there, and has that ability."""
        return ability in self.images.get(image, ())


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
    the users that its guest was told of after its start."""

    name: str
    host: str
    condition: VmCondition
    reason: str = ""
    cpu_s: float = 0.0
    private: float = 0.0
    shared: float = 0.0
    introduced: tuple[int, ...] = ()


class TemplateCondition(StrEnum):
    BUILDING = "building"
    READY = "ready"
    BROKEN = "broken"


class TemplateKey(NamedTuple):
    """Which template: a host may have several of one image, by size, and each account its own (empty: for all)."""

    host: str
    image: str
    size: Size
    account: str = ""


@dataclass(frozen=True, slots=True)
class TemplateSeen:
    """A template as its host sees it. `held` is the memory that it takes there now, all copies, in MiB."""

    name: str
    host: str
    image: str
    condition: TemplateCondition
    size: Size
    reason: str = ""
    held: float = 0.0
    account: str = ""

    @property
    def which(self) -> TemplateKey:
        return TemplateKey(self.host, self.image, self.size, self.account)


@dataclass(frozen=True, slots=True)
class HypervisorView:
    """One look. VMs and hosts by name."""

    hosts: Mapping[str, Host] = field(default_factory=lambda: MappingProxyType({}))
    vms: Mapping[str, VmSeen] = field(default_factory=lambda: MappingProxyType({}))
    templates: Mapping[TemplateKey, TemplateSeen] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class VmSpec:
    """What `create` needs. Nothing of a job is in it: a created VM has no identity. `template` is what it is
    forked from; None for one that boots from its image. `spare`: made before anybody waits for it, so it may take
    longer now to be quicker later. `token` is random and the VM's own, `address` has a prefix length; either is empty
    if it is not known."""

    name: str
    host: str
    image: str
    kind: CloneKind
    size: Size
    mac: str
    template: TemplateKey | None = None
    spare: bool = False
    token: str = ""
    address: str = ""


# --- identity --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class User:
    """A user as the guest must know him: passwd entry and every group he is in, (name, gid)."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str
    groups: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system that the guest mounts: fields as in fstab(5). `options` go to the file system."""

    source: str
    target: str
    type: str = "nfs4"
    options: str = ""


@dataclass(frozen=True, slots=True)
class GuestFile:
    """A file that the agent writes before anything starts. `owner` is a user name in the image."""

    path: str
    content: bytes
    mode: int = 0o644
    owner: str = "root"


@dataclass(frozen=True, slots=True)
class Daemon:
    """A process that the agent starts and watches. It runs in the foreground, as `user`.

    `ready_path`, when set, is a path (a socket) whose appearing says that it serves; the next
    daemon starts only then.
    """

    name: str
    argv: tuple[str, ...]
    user: str = "root"
    ready_path: str = ""


@dataclass(frozen=True, slots=True)
class NodeBootstrap:
    """What a node needs to join the scheduler: opaque to all but the scheduler's driver and the agent."""

    files: tuple[GuestFile, ...] = ()
    directories: tuple[tuple[str, str, int], ...] = ()  # path, owner, mode
    daemons: tuple[Daemon, ...] = ()


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a clone itself. Random bytes and the clock are added when it is sent, never kept."""

    hostname: str
    mac: str
    address: str  # with prefix length: 10.1.2.3/16
    gateway: str  # may be empty
    machine_id: str  # 32 hex digits
    users: tuple[User, ...] = ()
    mounts: tuple[Mount, ...] = ()
    peers: tuple[tuple[str, str], ...] = ()  # (host name, address)
    bootstrap: NodeBootstrap = NodeBootstrap()


# --- our rows --------------------------------------------------------------------------------------


class AttemptState(StrEnum):
    QUEUED = "queued"
    CLAIMED = "claimed"
    SPAWNING = "spawning"
    SPAWNED = "spawned"
    ALLOCATED = "allocated"
    RECLAIMING = "reclaiming"
    DONE = "done"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    REVOKED = "revoked"
    FAILED = "failed"


class VmState(StrEnum):
    PLANNED = "planned"
    PARKED = "parked"
    STARTING = "starting"
    JOINED = "joined"
    SERVING = "serving"
    LOST = "lost"
    RELEASING = "releasing"
    GONE = "gone"


class TemplateState(StrEnum):
    ABSENT = "absent"
    BUILDING = "building"
    READY = "ready"
    BROKEN = "broken"
    RETIRING = "retiring"


Outcome = Literal["done", "cancelled", "requeued", "revoked", "failed"]
RowKind = Literal["attempt", "vm", "template"]


class Key(NamedTuple):
    """Names a row: an attempt by its number, a VM by its serial, a template by its number."""

    kind: RowKind
    id: int

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at giving a job its VMs.

    `since` is when it entered its state; `not_before` when it may be admitted (back-off); `tries`
    counts the attempts before it that failed in a row; `replaced` the VMs replaced within it.
    `note` is what the user is told while it waits. `gated` says that its job is known to be at the
    gate; `stray` that the job was seen running on nodes that are not this attempt's.
    """

    id: int
    version: int
    state: AttemptState
    since: float
    job: JobRef
    job_name: str
    uid: int
    request: Request
    outcome: Outcome | None = None
    reason: str = ""
    gated: bool = True
    stray: bool = False
    not_before: float = 0.0
    tries: int = 0
    replaced: int = 0
    note: str = ""
    work_dir: str = ""
    quarantined: str = ""
    pin: str = ""  # the feature of the one VM that it took joined from the pool
    choice: str = ""  # what its VMs are, and why: its user is told when it is pinned

    @property
    def key(self) -> Key:
        return Key("attempt", self.id)

    @property
    def feature(self) -> str:
        """The feature that ties its job to its nodes."""
        return self.pin or f"mv_{self.id}"


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
class Template:
    """A template of one image at one size on one host, for one account or for all. References are counted from the
    VM rows, not kept here."""

    id: int
    version: int
    state: TemplateState
    since: float
    host: str
    image: str
    size: Size
    reason: str = ""
    tries: int = 0
    quarantined: str = ""
    account: str = ""

    @property
    def key(self) -> Key:
        return Key("template", self.id)

    @property
    def which(self) -> TemplateKey:
        return TemplateKey(self.host, self.image, self.size, self.account)


Row = Attempt | Vm | Template


@dataclass(frozen=True, slots=True)
class Claim:
    """Capacity held on a host by one row."""

    owner: Key
    host: str
    size: Size


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seen(Generic[T]):
    """A value that was looked at; the look began at `began` (monotonic). Anything newer is not in it."""

    value: T
    began: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the controller remembers of what went before, and a restart forgets: nothing but the pace hangs on it.

    `arrivals` is how many VMs a second jobs are given, by image. `seconds` is how long VMs lately took from claim to
    node, by image and kind. `paced` says until when the making of clones is paid for, by (host, image, kind): see
    `pacing.Meter`. `rest` says before when the pool of an image makes no more, for its VMs failed.
    """

    arrivals: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    seconds: Mapping[tuple[str, CloneKind], float] = field(default_factory=lambda: MappingProxyType({}))
    paced: Mapping[tuple[str, str, CloneKind], float] = field(default_factory=lambda: MappingProxyType({}))
    rest: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class World:
    """All that was seen, and when effects last ended. A source that is None is unknown, never empty.

    `quiet` maps a row to the time its last effect ended, infinity while one runs: absence counts
    only in a look that began later.
    """

    scheduler: Seen[SchedulerView] | None = None
    hypervisor: Seen[HypervisorView] | None = None
    quiet: Mapping[Key, float] = field(default_factory=lambda: MappingProxyType({}))
    forecast: Forecast = Forecast()


@dataclass(frozen=True, slots=True)
class Stage:
    """How long a named part of an effect took, in seconds. Stages of one effect follow each other."""

    name: str
    seconds: float


Detail = Mapping[str, Any]
