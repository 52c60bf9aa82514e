"""Templates, VMs and offers: as rows, as specified and as observed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from multiverse.core.model.basics import ClaimKey, CloneKind, Depth, Key, Size, is_pin
from multiverse.core.model.reason import Reason


class TemplateKey(NamedTuple):
    """Which template: a host may have several of one image, by size, and each account its own (empty: for all)."""

    host: str
    image: str
    size: Size
    account: str = ""


class TemplateCondition(StrEnum):
    BUILDING = "building"
    READY = "ready"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class TemplateSeen:
    """A template as its host sees it."""

    name: str
    host: str
    image: str
    condition: TemplateCondition
    size: Size
    reason: str = ""
    held: float = 0.0  # MiB that it takes now, all copies
    account: str = ""
    build: str = ""  # another one each time that it is built; empty while it is being built

    @property
    def which(self) -> TemplateKey:
        return TemplateKey(self.host, self.image, self.size, self.account)


class TemplateState(StrEnum):
    ABSENT = "absent"
    BUILDING = "building"
    READY = "ready"
    BROKEN = "broken"
    RETIRING = "retiring"


@dataclass(frozen=True, slots=True)
class Template:
    """A template of one image at one size on one host."""

    id: int
    version: int = field(default=0, kw_only=True)
    state: TemplateState = field(default=TemplateState.BUILDING, kw_only=True)
    since: float
    host: str
    image: str
    size: Size
    reason: Reason | None = None
    tries: int = 0
    quarantined: Reason | None = None
    account: str = ""  # empty: for all
    source: str = ""  # answers for its host
    build: str = ""  # which build is ready, as its host calls it

    @property
    def key(self) -> Key:
        return Key("template", self.id)

    @property
    def claim_key(self) -> ClaimKey:
        return ClaimKey(self.key, self.host)

    @property
    def which(self) -> TemplateKey:
        return TemplateKey(self.host, self.image, self.size, self.account)


class VmCondition(StrEnum):
    CREATING = "creating"  # its creation has begun and is not complete
    PARKED = "parked"  # restored and paused, or ready to boot; without identity
    STARTING = "starting"  # it runs, but its mounts, users and daemons are not complete
    RUNNING = "running"  # it has its identity and its mounts, and its daemons have been started
    PAUSED = "paused"  # as RUNNING, but its host has no room for what it writes; it goes on when there is room again
    ASLEEP = "asleep"  # its memory is in a file, and something stands in for its node
    DEAD = "dead"  # its process is gone or its guest has stopped; remains of it exist


@dataclass(frozen=True, slots=True)
class VmSeen:
    """A VM as its source shows it. Memory is in MiB, a few seconds old at most; 0 if it was not measured."""

    name: str
    host: str
    condition: VmCondition
    reason: str = ""
    cpu_s: float = 0.0
    private: float = 0.0  # memory that is freed when it ends
    shared: float = 0.0  # what it maps of its template and of programs, counted whole
    users_added: tuple[int, ...] = ()  # uids added to its guest after its start
    address: str = ""  # with prefix length, if it is known, as is the MAC
    mac: str = ""
    placed_on: str = ""  # the machine, where the hypervisor chooses it
    token: str = ""  # empty: the hypervisor keeps none
    frozen: bool = False  # the processes of its job are stopped
    freezing: bool = False  # they were to be stopped, and nothing tells whether they are
    mute: bool = False  # its guest cannot be told anything any more
    size: Size | None = None  # with all that was plugged; None: unknown
    disk: int = 0  # MiB that its files can grow to; 0: unknown
    sleeps: int = 0  # the number of its latest sleep, as its host knows it
    told: bool | None = None  # whether its job runs, as its guest was told last after that; None: it was told nothing
    template_build: str = ""  # that it was forked from; empty: none, or unknown
    template_memory: int = 0  # MiB of that template

    @property
    def runs(self) -> bool:
        """Whether it goes on there, or will once its host has room again."""
        return self.condition in (VmCondition.RUNNING, VmCondition.PAUSED)


class VmRef(NamedTuple):
    """Where a VM is found. A VM with another token is another VM, which is not touched."""

    name: str
    source: str = ""  # answers for it; empty: the only one
    token: str = ""  # empty: whichever VM has the name


@dataclass(frozen=True, slots=True)
class VmSpec:
    """What `create` needs. A created VM has no identity, so nothing of a job is in it."""

    name: str
    host: str
    image: str
    kind: CloneKind
    size: Size
    mac: str  # empty where the hypervisor assigns it, as is the address
    template: TemplateKey | None = None  # that it is forked from; None: it boots from its image
    spare: bool = False  # creation may take longer if the VM is quicker later
    token: str = ""  # random; nothing adopts a VM with another one
    address: str = ""
    source: str = ""  # answers for the VM
    saved: str = ""  # the saved VM that it goes on as; empty: it begins anew
    storage: str = ""  # of the saved VM; empty: that to which its host writes
    key: str = field(default="", repr=False)  # of the saved VM, hexadecimal; empty: it is not encrypted

    @property
    def ref(self) -> VmRef:
        return VmRef(self.name, self.source, self.token)


class VmState(StrEnum):
    PLANNED = "planned"  # claimed; being created
    PARKED = "parked"  # it exists, without identity
    STARTING = "starting"  # it is given its identity, and its node is to register
    JOINED = "joined"  # an idle node
    SERVING = "serving"  # its job runs
    MOVING = "moving"  # the same, while it goes from its first place to its second
    SETTLING = "settling"  # the same: its move is to end, so that it is at one place
    FALLING_ASLEEP = "falling_asleep"  # its job is suspended, and its memory is to be written to a file
    ASLEEP = "asleep"  # its memory is in a file and claims nothing; something stands in for its node
    DELAYED = "delayed"  # the same: its job was resumed, and it waits for memory
    WAKING = "waking"  # it is to go on, with its memory claimed again
    RETIRING = "retiring"  # a joined spare that is to go as soon as no job can take it any more
    ORPHAN = "orphan"  # it was found on its host, and no row explained it
    DEAD = "dead"  # it has died, and its job may still be tied to its node: the node stays until the job is not
    LOST = "lost"  # its host is out of reach
    ENDING = "ending"  # it is destroyed at once and its node set DOWN; a job may be on the node, which stays
    REMOVING = "removing"  # the same, and no job is on its node, which is deleted
    RELEASING = "releasing"  # its guest writes back; then it is destroyed and its node deleted
    DELETING = "deleting"  # it is gone and claims nothing; its node is left, and is deleted once the scheduler lets it
    GONE = "gone"


FAILED_STATES = (VmState.DEAD, VmState.LOST, VmState.ENDING, VmState.REMOVING)
"""A VM in one of these states serves its job no more, through no decision of its attempt."""

LEAVING_STATES = (VmState.ENDING, VmState.REMOVING, VmState.RELEASING)  # a VM in one of these states is being destroyed
MOVING_STATES = (VmState.MOVING, VmState.SETTLING)  # a VM in one of these states has two places, and its job runs
SLEEPING_STATES = (VmState.FALLING_ASLEEP, VmState.ASLEEP, VmState.DELAYED, VmState.WAKING)
"""A VM in one of these states has a job that is suspended, or was resumed and does not go on yet."""

UPCOMING_STATES = (VmState.PLANNED, VmState.PARKED, VmState.STARTING)  # a VM in one of these states is not a node yet


Fault = Literal["", "host", "job"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a VM is, or may be."""

    host: str  # where its capacity is claimed: a host, or a cloud's quota
    source: str = ""  # answers for it there
    template: TemplateKey | None = None  # that it maps there; None: it boots from its image
    template_id: int | None = None  # its row, which may end before the VM; negative: no row tells


@dataclass(frozen=True, slots=True)
class Vm:
    """A VM, from before it exists until it is seen gone."""

    id: int  # the serial, except of a VM that was found as an orphan
    version: int = field(default=0, kw_only=True)
    state: VmState = field(default=VmState.PLANNED, kw_only=True)
    since: float
    name: str
    places: tuple[Place, ...]  # first: where it is or is to be; second: where it may be too, while it moves
    image: str
    kind: CloneKind
    size: Size  # its own
    node_size: Size  # what its node declares
    mac: str  # empty until it is known, where the hypervisor assigns it
    address: str  # the same; with prefix length
    attempt: int | None = None
    reason: Reason | None = None
    quarantined: Reason | None = None
    account: str = ""  # whose template it is forked from
    pool: Depth | None = None  # made for a warm pool, so far; a spare until it serves an attempt
    token: str = ""
    job_id: str = ""  # that was seen on the node of an orphan
    saved: str = ""  # the saved VM that it is restored from; empty: it begins anew
    storage: str = ""  # from which that is read
    fault: Fault = ""  # who is at fault that it did not come up: see `core.avoidance`
    moves: int = 0  # that were begun: the number of the latest one
    sleeps: int = 0  # that were begun: the number of the latest one
    runs: bool | None = None  # of one that wakes, or is to: whether its job was resumed
    left: float | None = None  # of one whose job was resumed: seconds that its time limit left then; None: any

    @property
    def key(self) -> Key:
        return Key("vm", self.id)

    @property
    def place(self) -> Place:
        return self.places[0]

    @property
    def host(self) -> str:
        return self.places[0].host

    def place_on(self, host: str) -> Place:
        first = self.places[0]
        return first if first.host == host else next(place for place in self.places if place.host == host)

    @property
    def claim_keys(self) -> tuple[ClaimKey, ...]:
        return tuple(ClaimKey(self.key, place.host) for place in self.places)

    def ref_at(self, place: Place) -> VmRef:
        return VmRef(self.name, place.source, self.token)

    @property
    def ref(self) -> VmRef:
        return self.ref_at(self.place)

    @property
    def feature(self) -> str:
        """The tag of a joined spare: a job that takes it cannot be given the tag of an attempt."""
        return f"mv_v{self.id}"

    def owns(self, features: Collection[str]) -> bool:
        """Whether a node of its name that has these features is its own, by their tag. A VM that was restored after it
        has the same name. An orphan was found by its name, and no row says which tag its node has."""
        if self.attempt is None and self.pool is None:
            return True
        tags = {feature for feature in features if is_pin(feature)}
        return not tags or not tags.isdisjoint((self.feature, f"mv_{self.attempt}"))

    @property
    def failed(self) -> bool:
        """Whether it serves its job no more, through no decision of its attempt. Derived from its state."""
        return self.state in FAILED_STATES

    @property
    def leaving(self) -> bool:
        return self.state in LEAVING_STATES

    @property
    def is_spare(self) -> bool:
        """Whether it was made for a pool and serves no attempt yet."""
        return self.pool is not None and self.attempt is None and not self.quarantined and not self.failed


@dataclass(frozen=True, slots=True)
class Stage:
    """How long a named part of an effect took, in seconds. Stages of one effect follow each other."""

    name: str
    seconds: float


class OfferState(StrEnum):
    OPEN = "open"  # a job may take the VM
    TAKEN = "taken"  # a submission took it; its job appears in the scheduler soon, unless it was refused after that
    CLOSING = "closing"  # the VM is being withdrawn and may still be taken
    CLOSED = "closed"  # withdrawn, and no job took the VM; it is never offered again
    ENDED = "ended"  # the VM is gone


@dataclass(frozen=True, slots=True)
class Offer:
    """The offer of one joined spare."""

    id: int  # its VM's serial
    version: int = field(default=0, kw_only=True)
    state: OfferState = field(default=OfferState.OPEN, kw_only=True)
    since: float
    reason: Reason | None = None
    quarantined: Reason | None = None
    uid: int | None = None  # whose submission took it, if known

    @property
    def key(self) -> Key:
        return Key("offer", self.id)
