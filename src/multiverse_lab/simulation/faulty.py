"""The ports with faults: every call goes through a `faults.FaultyLink`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from multiverse.core.model import (
    HypervisorView,
    Identity,
    JobLimits,
    JobRef,
    LeaseSpec,
    NodeBootstrap,
    NodeSpec,
    SchedulerPart,
    SchedulerView,
    Size,
    Stage,
    TemplateKey,
    User,
    VmRef,
    VmSpec,
)
from multiverse.ports import (
    Expansion,
    GuestUsers,
    Hypervisor,
    Leases,
    Offers,
    Parts,
    Scheduler,
    Source,
    SubmissionLimits,
    Templates,
)
from multiverse_lab.simulation.faults import FaultyLink


class FaultyExpansion:
    """A `ports.Expansion` behind the scheduler's link."""

    def __init__(self, inner: Expansion, link: FaultyLink) -> None:
        self._inner, self._call = inner, link.call

    async def restore(self, job: JobRef) -> None:
        await self._call("restore", job.job_id, lambda: self._inner.restore(job), job)


class FaultyScheduler:
    """A `ports.Scheduler` behind a faulty link."""

    def __init__(self, inner: Scheduler, link: FaultyLink) -> None:
        self._inner = inner
        self._call = link.call
        self.offers = FaultyOffers(inner.offers, link) if inner.offers else None
        self.parts = FaultyParts(inner.parts, link) if inner.parts else None
        self.leases = FaultyLeases(inner.leases, link) if inner.leases else None
        self.expansion = FaultyExpansion(inner.expansion, link) if inner.expansion else None
        self.submission = FaultySubmissionLimits(inner.submission, link) if inner.submission else None
        self.addresses = inner.addresses  # a file, which the controller's machine writes by itself

    async def observe(self) -> SchedulerView:
        return await self._call("observe", "", lambda: self._inner.observe())

    async def pin(self, job: JobRef, tag: str, nodes: Sequence[str], text: str = "", *, at_once: bool = False) -> None:
        make = lambda: self._inner.pin(job, tag, nodes, text, at_once=at_once)  # noqa: E731
        await self._call("pin", job.job_id, make, job, tag)

    async def hold(self, job: JobRef, reason: str) -> None:
        await self._call("hold", job.job_id, lambda: self._inner.hold(job, reason), job)

    async def unpin(self, job: JobRef) -> None:
        await self._call("unpin", job.job_id, lambda: self._inner.unpin(job), job)

    async def requeue(self, job: JobRef) -> None:
        await self._call("requeue", job.job_id, lambda: self._inner.requeue(job), job)

    async def revoke(self, job: JobRef, reason: str) -> None:
        await self._call("revoke", job.job_id, lambda: self._inner.revoke(job, reason), job)

    async def set_down(self, node: str, reason: str) -> None:
        await self._call("set_down", node, lambda: self._inner.set_down(node, reason), node)

    async def delete_node(self, node: str) -> None:
        await self._call("delete_node", node, lambda: self._inner.delete_node(node), node)

    async def explain(self, jobs: Sequence[JobRef], text: str) -> None:
        await self._call("explain", jobs[0].job_id, lambda: self._inner.explain(jobs, text), *jobs)

    async def bootstrap(self, node: NodeSpec) -> NodeBootstrap:
        return await self._call("bootstrap", node.name, lambda: self._inner.bootstrap(node), node)

    async def user(self, uid: int) -> User:
        return await self._call("user", str(uid), lambda: self._inner.user(uid), uid)


class FaultyParts:
    """A `ports.Parts` behind a faulty link."""

    def __init__(self, inner: Parts, link: FaultyLink) -> None:
        self._inner = inner
        self._call = link.call

    async def read(
        self, jobs: Mapping[str, int | None], users: Collection[int], nodes: Collection[str]
    ) -> SchedulerPart:
        return await self._call("read", "", lambda: self._inner.read(jobs, users, nodes))


class FaultyOffers:
    """A `ports.Offers` behind a faulty link."""

    def __init__(self, inner: Offers, link: FaultyLink) -> None:
        self._inner = inner
        self._call = link.call

    async def offer(self, node: NodeSpec) -> None:
        await self._call("offer", node.name, lambda: self._inner.offer(node), node)

    async def withdraw(self, node: str) -> None:
        await self._call("withdraw", node, lambda: self._inner.withdraw(node), node)

    async def exclude(self, users: Collection[int]) -> None:
        await self._call("exclude", "", lambda: self._inner.exclude(users), *sorted(users))


class FaultyLeases:
    """A `ports.Leases` behind a faulty link."""

    def __init__(self, inner: Leases, link: FaultyLink) -> None:
        self._inner = inner
        self._call = link.call

    async def request(self, lease: LeaseSpec) -> None:
        await self._call("request", lease.name, lambda: self._inner.request(lease), lease)

    async def release(self, name: str, pilots: Sequence[str]) -> None:
        await self._call("release", name, lambda: self._inner.release(name, pilots), name, *pilots)


class FaultySubmissionLimits:
    """A `ports.SubmissionLimits` behind a faulty link."""

    def __init__(self, inner: SubmissionLimits, link: FaultyLink) -> None:
        self._inner = inner
        self._call = link.call

    async def publish(self, limits: JobLimits) -> None:
        await self._call("publish", "", lambda: self._inner.publish(limits))


class FaultySource:
    """A `ports.Source` behind a faulty link."""

    def __init__(self, inner: Source, link: FaultyLink) -> None:
        self._inner = inner
        self._call = link.call
        self.name = inner.name

    @property
    def hosts(self) -> Sequence[str]:
        return self._inner.hosts

    @property
    def silence(self) -> float | None:
        return self._inner.silence

    async def observe(self) -> HypervisorView:
        return await self._call("observe", self.name, lambda: self._inner.observe())


class FaultyTemplates:
    """A `ports.Templates` behind a faulty link."""

    def __init__(self, inner: Templates, link: FaultyLink) -> None:
        self._inner = inner
        self._call = link.call

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        what = f"{template.host}/{template.image}"
        return await self._call("build_template", what, lambda: self._inner.build_template(template), template)

    async def delete_template(self, template: TemplateKey) -> None:
        what = f"{template.host}/{template.image}"
        await self._call("delete_template", what, lambda: self._inner.delete_template(template), template)


class FaultyUsers:
    """A `ports.GuestUsers` behind a faulty link."""

    def __init__(self, inner: GuestUsers, link: FaultyLink) -> None:
        self._inner = inner
        self._call = link.call

    async def add_user(self, vm: VmRef, user: User, group: int = 0) -> None:
        await self._call("add_user", vm.name, lambda: self._inner.add_user(vm, user, group), vm.name, user)


class FaultyHypervisor:
    """A `ports.Hypervisor` behind a faulty link."""

    def __init__(self, inner: Hypervisor, link: FaultyLink) -> None:
        self._inner = inner
        self._call = link.call
        self._link = link
        self._sources: dict[Source, FaultySource] = {}
        self.membership = inner.membership
        self.templates = FaultyTemplates(inner.templates, link) if inner.templates else None
        self.users = FaultyUsers(inner.users, link) if inner.users else None
        self.groups = inner.groups  # its connections fail by themselves

    @property
    def sources(self) -> Sequence[FaultySource]:
        known = self._sources
        self._sources = {one: known.get(one) or FaultySource(one, self._link) for one in self._inner.sources}
        return list(self._sources.values())

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        return await self._call("create", vm.name, lambda: self._inner.create(vm), vm)

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> Sequence[Stage]:
        return await self._call(
            "start", vm.name, lambda: self._inner.start(vm, size, identity), vm.name, size, identity
        )

    async def destroy(self, vm: VmRef, grace: float) -> None:
        await self._call("destroy", vm.name, lambda: self._inner.destroy(vm, grace), vm.name, grace)
