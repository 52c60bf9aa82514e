"""What a controller asks of the agent of a host.

A call is declared once, as a class: its name, what is asked, what it results in, and how the agent answers it. The
controller awaits `AgentConnection.call` with an object of the class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field

from multiverse.core.errors import Refused
from multiverse.core.model import (
    Host,
    HostUsage,
    HypervisorView,
    Identity,
    Member,
    Neighbour,
    Size,
    Stage,
    TemplateKey,
    TemplateSeen,
    User,
    VmRef,
    VmSeen,
    VmSpec,
)
from multiverse.ports import Groups, GuestUsers, Hypervisor, Source, Templates


class Message(BaseModel):
    """Part of a line. Bytes are written in base 64 (URL-safe)."""

    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")


# --- results -------------------------------------------------------------------------------------


class Nothing(Message):
    """It was done."""


class Stages(Message):
    """It was done, and how long its parts took."""

    stages: tuple[Stage, ...] = ()


class HypervisorAnswer(Message):
    """An observation. Templates are pairs, because their keys are no strings."""

    hosts: dict[str, Host]
    vms: dict[str, VmSeen]
    templates: tuple[tuple[TemplateKey, TemplateSeen], ...]

    @staticmethod
    def of(view: HypervisorView) -> HypervisorAnswer:
        # Nothing is checked: these are objects of our own, and this is done at each observation.
        return HypervisorAnswer.model_construct(
            hosts=dict(view.hosts), vms=dict(view.vms), templates=tuple(view.templates.items())
        )

    def view(self) -> HypervisorView:
        return HypervisorView(self.hosts, self.vms, dict(self.templates))


class Measured(Message):
    """By VM, what `measure` returns of it."""

    vms: dict[str, tuple[float, float, float]]


class Examined(Message):
    """By VM, what `examine` returns of it."""

    vms: dict[str, dict[str, str | int]]


class Counted(Message):
    """Numbers of processes, by program."""

    programs: dict[str, int]


class Utilized(Message):
    """What the host and the VMs of the site have used."""

    host: HostUsage


# --- what answers --------------------------------------------------------------------------------


class VmConnections(Protocol):
    """The VXLAN that connects this host's bridge with VMs of other hosts."""

    async def connect(self, vm: VmRef, neighbours: Sequence[Neighbour]) -> None:
        """Let a VM reach these addresses, beside those that it was or will be started with. `Gone` if there is no such
        VM, `Refused` if the VM of that name has another token."""
        ...


class LocalHypervisor(Hypervisor, Source, Protocol):
    """The hypervisor of one host: itself the only source, with templates and users, and with what operators ask for."""

    @property
    def templates(self) -> Templates: ...

    @property
    def users(self) -> GuestUsers: ...

    @property
    def groups(self) -> Groups: ...

    @property
    def vxlan(self) -> VmConnections | None:
        """None if nothing but the site's own layer 2 connects the bridges of hosts."""
        ...

    async def measure(self) -> Mapping[str, tuple[float, float, float]]:
        """(CPU seconds, unique MiB, proportional MiB) of each VM that lives."""
        ...

    async def examine(self) -> Mapping[str, Mapping[str, str | int]]:
        """What each running guest says of itself now; `error` if it does not answer."""
        ...


class SiteAgent(Protocol):
    """The agent of a host, as it serves the controller of one site."""

    @property
    def host(self) -> str: ...

    @property
    def hypervisor(self) -> LocalHypervisor: ...

    @property
    def processes(self) -> Mapping[str, int]:
        """How many processes the agent has started, by program."""
        ...

    async def observe(self) -> HypervisorView:
        """What the hypervisor shows, with what the agent itself knows."""
        ...

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        """Create a VM, which observations show from now on."""
        ...

    async def usage(self, span: float) -> HostUsage:
        """What the host and the site's VMs have used in the last `span` seconds. `Refused` if nothing is sampled."""
        ...


# --- calls ---------------------------------------------------------------------------------------

R = TypeVar("R", bound=Message)
_CALLS: list[type[AgentCall[Any]]] = []


class AgentCall(Message, Generic[R]):
    """What a controller asks for, which results in an `R`. A class has a `name` of its own on the line."""

    name: str
    result: ClassVar[type[Message]]
    since: ClassVar[int] = 1
    """The first protocol that has it: agents of an earlier one are not asked, because they would end the connection."""
    adds: ClassVar[bool] = False
    """Whether it brings something onto the host, so that an agent that is about to end refuses it."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if results := cls.__bases__[0].__pydantic_generic_metadata__["args"]:  # type: ignore[attr-defined]
            cls.result = results[0]
            _CALLS.append(cls)

    async def answer(self, agent: SiteAgent) -> R:
        """Do what is asked, on the agent's side."""
        raise NotImplementedError


class Observe(AgentCall[HypervisorAnswer]):
    """See `ports.Source.observe`."""

    name: Literal["observe"] = "observe"

    async def answer(self, agent: SiteAgent) -> HypervisorAnswer:
        return HypervisorAnswer.of(await agent.observe())


class Create(AgentCall[Stages]):
    """See `ports.Hypervisor.create`."""

    name: Literal["create"] = "create"
    adds = True
    vm: VmSpec

    async def answer(self, agent: SiteAgent) -> Stages:
        return Stages(stages=tuple(await agent.create(self.vm)))


class Start(AgentCall[Stages]):
    """See `ports.Hypervisor.start`."""

    name: Literal["start"] = "start"
    adds = True
    vm: VmRef
    size: Size
    identity: Identity

    async def answer(self, agent: SiteAgent) -> Stages:
        return Stages(stages=tuple(await agent.hypervisor.start(self.vm, self.size, self.identity)))


class Connect(AgentCall[Nothing]):
    """See `VmConnections`."""

    name: Literal["connect"] = "connect"
    vm: VmRef
    neighbours: tuple[Neighbour, ...]

    async def answer(self, agent: SiteAgent) -> Nothing:
        if agent.hypervisor.vxlan is None:
            raise Refused("this host has no VXLAN", hint="set vxlan.enabled on all hosts")
        await agent.hypervisor.vxlan.connect(self.vm, self.neighbours)
        return Nothing()


class Destroy(AgentCall[Nothing]):
    """See `ports.Hypervisor.destroy`."""

    name: Literal["destroy"] = "destroy"
    vm: VmRef
    grace: float

    async def answer(self, agent: SiteAgent) -> Nothing:
        await agent.hypervisor.destroy(self.vm, self.grace)
        return Nothing()


class AddUser(AgentCall[Nothing]):
    """See `ports.GuestUsers.add_user`."""

    name: Literal["add_user"] = "add_user"
    vm: VmRef
    user: User
    group: int = 0

    async def answer(self, agent: SiteAgent) -> Nothing:
        await agent.hypervisor.users.add_user(self.vm, self.user, self.group)
        return Nothing()


class TellMembers(AgentCall[Nothing]):
    """See `ports.Groups.tell`."""

    name: Literal["tell_members"] = "tell_members"
    members: tuple[Member, ...]
    gone: tuple[str, ...]
    whole: bool

    async def answer(self, agent: SiteAgent) -> Nothing:
        await agent.hypervisor.groups.tell(agent.host, self.members, self.gone, whole=self.whole)
        return Nothing()


class BuildTemplate(AgentCall[Stages]):
    """See `ports.Templates.build_template`."""

    name: Literal["build_template"] = "build_template"
    adds = True
    template: TemplateKey

    async def answer(self, agent: SiteAgent) -> Stages:
        return Stages(stages=tuple(await agent.hypervisor.templates.build_template(self.template)))


class DeleteTemplate(AgentCall[Nothing]):
    """See `ports.Templates.delete_template`."""

    name: Literal["delete_template"] = "delete_template"
    template: TemplateKey

    async def answer(self, agent: SiteAgent) -> Nothing:
        await agent.hypervisor.templates.delete_template(self.template)
        return Nothing()


class Measure(AgentCall[Measured]):
    """See `LocalHypervisor.measure`."""

    name: Literal["measure"] = "measure"

    async def answer(self, agent: SiteAgent) -> Measured:
        return Measured(vms=dict(await agent.hypervisor.measure()))


class Examine(AgentCall[Examined]):
    """See `LocalHypervisor.examine`."""

    name: Literal["examine"] = "examine"

    async def answer(self, agent: SiteAgent) -> Examined:
        return Examined(vms={name: dict(facts) for name, facts in (await agent.hypervisor.examine()).items()})


class CountProcesses(AgentCall[Counted]):
    """How many processes the agent has started, by program."""

    name: Literal["count_processes"] = "count_processes"

    async def answer(self, agent: SiteAgent) -> Counted:
        return Counted(programs=dict(agent.processes))


class Utilization(AgentCall[Utilized]):
    """See `ports.Measurements`."""

    name: Literal["utilization"] = "utilization"
    span: float

    async def answer(self, agent: SiteAgent) -> Utilized:
        return Utilized(host=await agent.usage(self.span))


if TYPE_CHECKING:
    AnyCall = AgentCall[Any]
else:
    AnyCall = Annotated[Union[tuple(_CALLS)], Field(discriminator="name")]  # noqa: UP007
