"""The protocol between a controller and the agent of a host: lines of JSON in both directions.

    controller                                   agent
    {"hello": …}                   →
                                   ←  {"welcome": …}, or {"refused": …} and the end
    {"take": 7}                    →
                                   ←  {"taken": 7, "link": …}, or {"refused": …} and the end
    {"id": 1, "call": {…}}         →                       any number at the same time
    {"id": 2, "call": {…}}         →
                                   ←  {"id": 2, "result": {…}}
    {"cancel": 1}                  →                       the controller no longer waits for this call
                                   ←  {"id": 1, "error": {…}}
    {"ping": 5}                    →
                                   ←  {"pong": 5}

An epoch numbers the controllers of a site: each takes a higher one than all before it. An agent refuses a controller
whose epoch is below the highest that the agent has seen. In the middle of a connection, it answers the next line with
`refused` and ends the connection. An observation that equals the last one on the same connection is sent as
`{"id": 3, "same": true}`.

A call is declared once, as a class: its name, its arguments, its result, and how the agent answers it. The controller
awaits `AgentConnection.call` with an object of the class.

A field that the other release does not know is ignored; one that it does not send has its default. So fields may be
added, with defaults, and `PROTOCOL` rises when there is another call (`AgentCall.since`) or the meaning of a field
changes. An agent and a controller understand each other if each one's `PROTOCOL` is at least the other's `OLDEST`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from multiverse.core.errors import Broken, Damaged, Exhausted, Gone, MultiverseError, Refused, Stale, Unknown
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.identity import Identity, Member, Neighbour, User
from multiverse.core.model.saved import SavedSeen
from multiverse.core.model.usage import HostUsage
from multiverse.core.model.vm import Stage, TemplateKey, TemplateSeen, VmRef, VmSeen, VmSpec
from multiverse.ports import Groups, GuestUsers, Hypervisor, Saves, Sleeps, Source, Templates


class Message(BaseModel):
    """Part of a line. Bytes are written in base 64 (URL-safe)."""

    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")


# --- results -------------------------------------------------------------------------------------


class Nothing(Message):
    """The call was done."""


class Stages(Message):
    stages: tuple[Stage, ...] = ()  # how long the parts of the call took


class HypervisorAnswer(Message):
    """An observation. Templates are pairs, because their keys are no strings."""

    hosts: dict[str, Host]
    vms: dict[str, VmSeen]
    templates: tuple[tuple[TemplateKey, TemplateSeen], ...]
    saved: dict[str, SavedSeen] = {}

    @staticmethod
    def of(view: HypervisorView) -> HypervisorAnswer:
        # Nothing is checked: these are objects of our own, and this is done at each observation.
        return HypervisorAnswer.model_construct(
            hosts=dict(view.hosts),
            vms=dict(view.vms),
            templates=tuple(view.templates.items()),
            saved=dict(view.saved),
        )

    def view(self) -> HypervisorView:
        return HypervisorView(self.hosts, self.vms, dict(self.templates), self.saved)


class Measured(Message):
    vms: dict[str, tuple[float, float, float]]  # by name: see `LocalHypervisor.measure`


class Examined(Message):
    vms: dict[str, dict[str, str | int]]  # by name: see `LocalHypervisor.examine`


class Counted(Message):
    programs: dict[str, int]  # numbers of processes


class Utilized(Message):
    host: HostUsage


class MoveOffer(Message):
    """Where a host receives VMs. Without a certificate (PEM) connections to it are plain."""

    address: str
    port: int
    certificate: str = ""


class AgentLink(MoveOffer):
    """Where a controller reaches the agent of a lease, also once no step of its pilot begins any more."""

    secret: str = Field(repr=False)


# --- what answers --------------------------------------------------------------------------------


class VmConnections(Protocol):
    """The VXLAN that connects this host's bridge with VMs of other hosts."""

    async def connect(self, vm: VmRef, neighbours: Sequence[Neighbour]) -> None:
        """Let a VM reach these addresses too. Addresses that it was or will be started with stay. `Gone` if there is no
        such VM, `Refused` if the VM of that name has another token."""


MoveHolds = Literal["kept", "handed_over", "received", "absent"]
"""What a host has of a VM by a move that it ends: the VM itself; one that it may not let go on; one that it has taken
over, which may have ended since; or nothing, for ever."""


class MoveEnd(Message):
    has: MoveHolds


class VmExchange(Protocol):
    """Hands VMs of this host over to other hosts, and takes theirs, while they run. See `ports.Moves`: the controller
    tells the host that a VM goes to, and then the one that it leaves, each the same secret."""

    async def receive_move(self, vm: VmSpec, number: int, secret: str, neighbours: Sequence[Neighbour]) -> MoveOffer:
        """Expect that VM for a minute. The same again is success. `Refused` if that move was cancelled, or if there is
        a VM of that name."""

    async def send_move(self, vm: VmRef, number: int, secret: str, offer: MoveOffer) -> Sequence[Stage]:
        """Move a VM to the host that has offered to receive it: see `ports.Moves.move`."""

    async def cancel_move(self, vm: VmRef, number: int, *, absent: bool) -> MoveHolds:
        """End that move and earlier ones, where that is possible yet, and say what this host has of the VM then. With
        `absent` the other host has said that it has nothing: a VM that was handed over to it goes on here."""


class LocalHypervisor(Hypervisor, Source, Protocol):
    """The hypervisor of one host, which is its only source. It has templates, and users can be added."""

    @property
    def templates(self) -> Templates: ...

    @property
    def users(self) -> GuestUsers: ...

    @property
    def groups(self) -> Groups: ...

    @property
    def vxlan(self) -> VmConnections | None:
        """None if nothing but the site's own layer 2 connects the bridges of hosts."""

    @property
    def exchange(self) -> VmExchange | None:
        """None if VMs neither leave nor come while they run."""

    async def measure(self) -> Mapping[str, tuple[float, float, float]]:
        """(CPU seconds, unique MiB, proportional MiB) of each VM that lives."""

    async def examine(self) -> Mapping[str, Mapping[str, str | int]]:
        """The facts that each running guest tells of itself now; `error` if it does not answer."""


class SiteAgent(Protocol):
    """The agent of a host, as it serves the controller of one site."""

    @property
    def host(self) -> str: ...

    @property
    def hypervisor(self) -> LocalHypervisor: ...

    @property
    def processes(self) -> Mapping[str, int]: ...  # how many processes the agent has started, by program

    async def observe(self) -> HypervisorView:
        """The observation of the hypervisor, with facts that only the agent knows."""

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        """Create a VM, which observations show from now on."""

    async def usage(self, span: float) -> HostUsage:
        """The usage of the host and the site's VMs in the last `span` seconds. `Refused` if nothing is sampled."""


# --- calls: each does what the method of that name in `ports` or in `SiteAgent` does -------------

R = TypeVar("R", bound=Message)
_CALLS: list[type[AgentCall[Any]]] = []


class AgentCall(Message, Generic[R]):
    """A call by a controller. Its result is an `R`."""

    name: str  # of the call, in a line of the protocol
    result: ClassVar[type[Message]]
    # The first protocol that has the call. An agent of an earlier one is not asked: it would end the connection.
    since: ClassVar[int] = 1
    # Whether the call brings something onto the host. An agent that is about to end refuses such calls.
    adds: ClassVar[bool] = False

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if results := cls.__bases__[0].__pydantic_generic_metadata__["args"]:  # type: ignore[attr-defined]
            cls.result = results[0]
            _CALLS.append(cls)

    async def answer(self, agent: SiteAgent) -> R:
        """Do what is asked. Runs in the agent."""
        raise NotImplementedError


class Observe(AgentCall[HypervisorAnswer]):
    name: Literal["observe"] = "observe"

    async def answer(self, agent: SiteAgent) -> HypervisorAnswer:
        return HypervisorAnswer.of(await agent.observe())


class Create(AgentCall[Stages]):
    name: Literal["create"] = "create"
    adds = True
    vm: VmSpec

    async def answer(self, agent: SiteAgent) -> Stages:
        return Stages(stages=tuple(await agent.create(self.vm)))


class Start(AgentCall[Stages]):
    name: Literal["start"] = "start"
    adds = True
    vm: VmRef
    size: Size
    identity: Identity

    async def answer(self, agent: SiteAgent) -> Stages:
        return Stages(stages=tuple(await agent.hypervisor.start(self.vm, self.size, self.identity)))


class Connect(AgentCall[Nothing]):
    name: Literal["connect"] = "connect"
    vm: VmRef
    neighbours: tuple[Neighbour, ...]

    async def answer(self, agent: SiteAgent) -> Nothing:
        if agent.hypervisor.vxlan is None:
            raise Refused("this host has no VXLAN", hint="set vxlan.enabled on all hosts")
        await agent.hypervisor.vxlan.connect(self.vm, self.neighbours)
        return Nothing()


class Destroy(AgentCall[Nothing]):
    name: Literal["destroy"] = "destroy"
    vm: VmRef
    grace: float

    async def answer(self, agent: SiteAgent) -> Nothing:
        await agent.hypervisor.destroy(self.vm, self.grace)
        return Nothing()


class AddUser(AgentCall[Nothing]):
    name: Literal["add_user"] = "add_user"
    vm: VmRef
    user: User
    group: int = 0

    async def answer(self, agent: SiteAgent) -> Nothing:
        await agent.hypervisor.users.add_user(self.vm, self.user, self.group)
        return Nothing()


class TellMembers(AgentCall[Nothing]):
    name: Literal["tell_members"] = "tell_members"
    members: tuple[Member, ...]
    gone: tuple[str, ...]
    whole: bool

    async def answer(self, agent: SiteAgent) -> Nothing:
        await agent.hypervisor.groups.tell(agent.host, self.members, self.gone, whole=self.whole)
        return Nothing()


def _saves(agent: SiteAgent) -> Saves:
    if (saves := agent.hypervisor.saves) is None:
        raise Refused("this host saves no VMs", hint="set save.enabled for it")
    return saves


class Freeze(AgentCall[Nothing]):
    name: Literal["freeze"] = "freeze"
    vm: VmRef
    script: bool = True

    async def answer(self, agent: SiteAgent) -> Nothing:
        await _saves(agent).freeze(self.vm, script=self.script)
        return Nothing()


class Cut(AgentCall[Nothing]):
    name: Literal["cut"] = "cut"
    vm: VmRef

    async def answer(self, agent: SiteAgent) -> Nothing:
        await _saves(agent).cut(self.vm)
        return Nothing()


class Save(AgentCall[Stages]):
    name: Literal["save"] = "save"
    vm: VmRef
    saved: str
    key: str = ""

    async def answer(self, agent: SiteAgent) -> Stages:
        return Stages(stages=tuple(await _saves(agent).save(self.vm, self.saved, self.key)))


class MakeCheckpoint(AgentCall[Stages]):
    name: Literal["checkpoint"] = "checkpoint"
    vm: VmRef
    saved: str
    key: str = ""
    shared_files: bool = False

    async def answer(self, agent: SiteAgent) -> Stages:
        saves = _saves(agent)
        stages = await saves.checkpoint(self.vm, self.saved, self.key, shared_files=self.shared_files)
        return Stages(stages=tuple(stages))


class Copy(AgentCall[Nothing]):
    name: Literal["copy"] = "copy"
    saved: str
    key: str = ""

    async def answer(self, agent: SiteAgent) -> Nothing:
        await _saves(agent).copy(agent.host, self.saved, self.key)
        return Nothing()


class Keep(AgentCall[Nothing]):
    name: Literal["keep"] = "keep"
    vm: VmRef
    saved: str

    async def answer(self, agent: SiteAgent) -> Nothing:
        await _saves(agent).keep_in_memory(self.vm, self.saved)
        return Nothing()


class Thaw(AgentCall[Nothing]):
    name: Literal["thaw"] = "thaw"
    vm: VmRef

    async def answer(self, agent: SiteAgent) -> Nothing:
        await _saves(agent).thaw(self.vm)
        return Nothing()


class Discard(AgentCall[Nothing]):
    name: Literal["discard"] = "discard"
    saved: str

    async def answer(self, agent: SiteAgent) -> Nothing:
        await _saves(agent).discard(agent.host, self.saved)
        return Nothing()


def _sleeps(agent: SiteAgent) -> Sleeps:
    if (sleeps := agent.hypervisor.sleeps) is None:
        raise Refused(f"no VM sleeps on {agent.host}", hint="set save.enabled for it")
    return sleeps


class PutToSleep(AgentCall[Stages]):
    name: Literal["sleep"] = "sleep"
    vm: VmRef
    number: int
    identity: Identity
    key: str = ""

    async def answer(self, agent: SiteAgent) -> Stages:
        return Stages(stages=tuple(await _sleeps(agent).sleep(self.vm, self.number, self.identity, self.key)))


class Wake(AgentCall[Stages]):
    name: Literal["wake"] = "wake"
    vm: VmRef
    number: int
    runs: bool
    key: str = ""

    async def answer(self, agent: SiteAgent) -> Stages:
        return Stages(stages=tuple(await _sleeps(agent).wake(self.vm, self.number, runs=self.runs, key=self.key)))


def _exchange(agent: SiteAgent) -> VmExchange:
    if (exchange := agent.hypervisor.exchange) is None:
        raise Refused(f"VMs move neither to nor from {agent.host}", hint="set move.enabled for it")
    return exchange


class ReceiveMove(AgentCall[MoveOffer]):
    name: Literal["receive_move"] = "receive_move"
    since = 2
    adds = True
    vm: VmSpec
    number: int
    secret: str
    neighbours: tuple[Neighbour, ...] = ()  # that it reaches by the VXLAN

    async def answer(self, agent: SiteAgent) -> MoveOffer:
        return await _exchange(agent).receive_move(self.vm, self.number, self.secret, self.neighbours)


class SendMove(AgentCall[Stages]):
    name: Literal["send_move"] = "send_move"
    since = 2
    vm: VmRef
    number: int
    secret: str
    offer: MoveOffer

    async def answer(self, agent: SiteAgent) -> Stages:
        stages = await _exchange(agent).send_move(self.vm, self.number, self.secret, self.offer)
        return Stages(stages=tuple(stages))


class CancelMove(AgentCall[MoveEnd]):
    name: Literal["cancel_move"] = "cancel_move"
    since = 2
    vm: VmRef
    number: int
    absent: bool = False

    async def answer(self, agent: SiteAgent) -> MoveEnd:
        return MoveEnd(has=await _exchange(agent).cancel_move(self.vm, self.number, absent=self.absent))


class BuildTemplate(AgentCall[Stages]):
    name: Literal["build_template"] = "build_template"
    adds = True
    template: TemplateKey

    async def answer(self, agent: SiteAgent) -> Stages:
        return Stages(stages=tuple(await agent.hypervisor.templates.build_template(self.template)))


class DeleteTemplate(AgentCall[Nothing]):
    name: Literal["delete_template"] = "delete_template"
    template: TemplateKey

    async def answer(self, agent: SiteAgent) -> Nothing:
        await agent.hypervisor.templates.delete_template(self.template)
        return Nothing()


class Measure(AgentCall[Measured]):
    name: Literal["measure"] = "measure"

    async def answer(self, agent: SiteAgent) -> Measured:
        return Measured(vms=dict(await agent.hypervisor.measure()))


class Examine(AgentCall[Examined]):
    name: Literal["examine"] = "examine"

    async def answer(self, agent: SiteAgent) -> Examined:
        return Examined(vms={name: dict(facts) for name, facts in (await agent.hypervisor.examine()).items()})


class CountProcesses(AgentCall[Counted]):
    name: Literal["count_processes"] = "count_processes"

    async def answer(self, agent: SiteAgent) -> Counted:
        return Counted(programs=dict(agent.processes))


class Utilization(AgentCall[Utilized]):
    name: Literal["utilization"] = "utilization"
    span: float

    async def answer(self, agent: SiteAgent) -> Utilized:
        return Utilized(host=await agent.usage(self.span))


if TYPE_CHECKING:
    AnyCall = AgentCall[Any]
else:
    AnyCall = Annotated[Union[tuple(_CALLS)], Field(discriminator="name")]  # noqa: UP007


M = TypeVar("M", bound=BaseModel)

PROTOCOL = 2  # what this release speaks
OLDEST = 1  # the oldest protocol that this release understands: that of the release before it, once there is one
LONGEST_LINE = 1 << 24
"""Bytes. An observation of a thousand VMs has about 250 kB. A longer line than this is an error of the other side."""

PING = 5.0  # seconds after which a controller that has heard nothing asks whether the agent is there
SILENCE = 20.0
"""Seconds without a line after which a controller takes a connection for lost. An agent waits three times as long."""


# --- handshake -----------------------------------------------------------------------------------


class Hello(Message):
    """The first line of a controller."""

    release: str
    protocol: int
    oldest: int  # the oldest protocol that it understands
    controller: str  # a random name of this run of the controller
    site: str  # marks its VMs
    machine: str = ""  # where the controller runs


class Welcome(Message):
    """The agent's answer to `Hello`."""

    release: str
    protocol: int
    host: str
    boot_id: str
    agent: str  # a random name of this run of the agent
    epoch: int = 0  # the highest that the agent has seen of this site; 0: none
    holder: str = ""  # the run of the controller that took this epoch
    commanding: float | None = None  # for how many seconds the holder has been connected; None: it is not connected
    machine: str = ""  # where the holder runs, while it is connected


class CallFailure(Message):
    """An error of `core.errors`, by the name of its class."""

    kind: str
    message: str
    hint: str = ""

    @staticmethod
    def of(error: MultiverseError) -> CallFailure:
        return CallFailure(kind=type(error).__name__.lower(), message=error.message, hint=error.hint)

    def error(self) -> MultiverseError:
        """The error itself. An error that this release does not know says nothing about what was done: `Unknown`."""
        return _ERRORS.get(self.kind, Unknown)(self.message, hint=self.hint)


_ERRORS = {kind.__name__.lower(): kind for kind in (Refused, Exhausted, Gone, Stale, Unknown, Broken, Damaged)}


# --- lines ---------------------------------------------------------------------------------------


class Line(Message):
    """A line of a controller. One field is set, or `id` and `call`, or `ping` and `heard`."""

    hello: Hello | None = None
    take: int | None = None
    id: int | None = None
    call: AnyCall | None = None
    cancel: int | None = None
    ping: int | None = None
    # The last ping that was answered; 0: none. So the agent knows until when the controller has surely heard it.
    heard: int | None = None


class Answer(Message):
    """A line of an agent. One field is set, or `id` and one more."""

    welcome: Welcome | None = None
    refused: CallFailure | None = None
    taken: int | None = None
    link: AgentLink | None = None  # with `taken`
    id: int | None = None
    result: dict[str, Any] | None = None  # its type is `AgentCall.result`
    error: CallFailure | None = None
    same: bool = False
    pong: int | None = None


def encode(message: Line | Answer) -> bytes:
    return message.model_dump_json(exclude_none=True).encode() + b"\n"


def decode(kind: type[M], data: bytes) -> M:
    """A line of a controller (`Line`) or of an agent (`Answer`). Raises `Refused` for anything else."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        # Not pydantic's own text: it quotes the input, which may hold a secret.
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise Refused(
            f"a line of {len(data)} bytes is not of this protocol: {place or 'the line'}: {first['msg']}",
            hint="see that the other side is of this release or of its neighbour",
        ) from None
