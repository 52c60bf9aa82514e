"""A trace: every call over the ports as a line of JSON, with its result. `simulation.replay` plays a trace.

A line has the call's name, its arguments, when it `began` and `ended` (seconds since the trace began) and its `result`:
"ok", "cancelled", or the class of its error. An observation is written only if it differs from the one before it of the
same source, and then with its differences only; an object that is no longer shown is null. The contents of a bootstrap
and of an identity are not written, because they hold secrets.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import structlog

from multiverse.core.errors import Refused
from multiverse.core.model import (
    HypervisorView,
    Identity,
    Job,
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
    Clock,
    Expansion,
    GuestUsers,
    Hypervisor,
    Leases,
    Offers,
    Parts,
    Scheduler,
    Source,
    Templates,
)

T = TypeVar("T")
View = dict[str, dict[str, Any]]
"""What an observation shows, by kind (`jobs`, `vms`, ...) and name, in values of JSON."""

log = structlog.get_logger()


class Trace:
    """An open trace. If it can no longer be written, for example because the disk is full, the trace ends; the calls
    go on."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Begin a new trace in `path`, readable by its owner only. Raises `Refused` if it cannot be written."""
        try:
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", buffering=1)
        except OSError as error:
            raise Refused(f"cannot write {path}: {error.strerror}", hint="set trace in the settings") from error
        self._clock = clock
        self._origin = clock.now()
        self._shown: dict[str, tuple[str, View]] = {}
        self._whole = SchedulerView()  # the latest view, with the parts that were read since

    async def call(self, name: str, answer: Awaitable[T], **arguments: Any) -> T:
        """Wait for the answer to a call and write the line."""
        began, result = self._now(), "ok"
        try:
            return await answer
        except BaseException as error:
            result = _result(error)
            raise
        finally:
            self._write({"call": name, **arguments, "began": began, "ended": self._now(), "result": result})

    async def observe(self, name: str, answer: Awaitable[T], view: Callable[[T], View], source: str = "") -> T:
        """Wait for an observation and write its differences from the one before it of the same source. The line names
        the `source`, if one is given."""
        began = self._now()
        known = f"{name} {source}"
        named = {"source": source} if source else {}
        before = self._shown.get(known, ("", {}))
        seen, result = before[1], "ok"
        try:
            value = await answer
            seen = view(value)
            return value
        except BaseException as error:
            result = _result(error)
            raise
        finally:
            if (result, seen) != before:
                self._shown[known] = (result, seen)
                new = difference(before[1], seen)
                times = {"began": began, "ended": self._now()}
                self._write({"call": name, **named, **times, "result": result, **new})

    async def part(self, name: str, answer: Awaitable[SchedulerPart]) -> SchedulerPart:
        """Wait for a part of an observation, and write as the observation's the differences that it makes."""

        def view(read: SchedulerPart) -> View:
            return self.scheduler_view(self._whole.merged(read, 0.0))

        return await self.observe(name, answer, view)

    def scheduler_view(self, view: SchedulerView) -> View:
        """What a view shows; a part that is read later is merged into it."""
        self._whole = view
        return scheduler_view(view)

    def close(self) -> None:
        self._file.close()

    def _now(self) -> float:
        return round(self._clock.now() - self._origin, 6)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            log.warning("trace ended", reason=str(error))
            try:
                self._file.close()
            except OSError:
                pass  # the unwritten rest is lost; the file is closed all the same


def _result(error: BaseException) -> str:
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__


def difference(before: View, after: View) -> View:
    """The objects of `after` that `before` shows otherwise or not at all; None for objects that only `before` shows."""
    kinds = {kind: {**before.get(kind, {}), **after.get(kind, {})} for kind in {**before, **after}}
    found = {
        kind: {
            name: after.get(kind, {}).get(name)
            for name in names
            if before.get(kind, {}).get(name) != after.get(kind, {}).get(name)
        }
        for kind, names in kinds.items()
    }
    return {kind: changed for kind, changed in found.items() if changed}


def scheduler_view(view: SchedulerView) -> View:
    return {
        "jobs": {job_id: _job(job) for job_id, job in view.jobs.items()},
        "nodes": {name: str(node.state) for name, node in view.nodes.items()},
    }


def hypervisor_view(view: HypervisorView) -> View:
    return {
        "hosts": {
            name: {
                "capacity": plain(host.capacity),
                "abilities": sorted(host.abilities),
                "images": {image: sorted(can) for image, can in host.images.items()},
            }
            for name, host in view.hosts.items()
        },
        "vms": {name: str(vm.condition) for name, vm in view.vms.items()},
        "templates": {
            "/".join((which.host, which.image, str(which.size), which.account)): {
                "condition": str(seen.condition),
                **_template(which),
            }
            for which, seen in view.templates.items()
        },
    }


def _job(job: Job) -> dict[str, Any]:
    asked = job.request
    return {
        "submitted": job.ref.submitted,
        "restarts": job.ref.restarts,
        "state": str(job.state),
        "gated": job.gated,
        "pinned": job.pinned,
        "held": job.held,
        "eligible": job.eligible,
        "nodes": list(job.nodes),
        "request": asked
        and {
            "nodes": asked.nodes,
            "size": plain(asked.size),
            "image": asked.image,
            "kind": asked.kind and str(asked.kind),
            "features": list(asked.features),
            "account": asked.account,
        },
        "problem": job.problem,
        **({"origin": job.origin, "at_origin": job.at_origin} if job.origin else {}),
        "result": job.result,
        "exit_code": job.exit_code,
    }


def _template(which: TemplateKey) -> dict[str, Any]:
    return {"host": which.host, "image": which.image, "size": plain(which.size), "account": which.account}


def plain(value: Size) -> list[int]:
    return [value.cpus, value.memory, value.disk, *([value.net] if value.net else [])]


def _ref(job: JobRef) -> list[Any]:
    return [job.job_id, job.submitted, job.restarts]


class RecordingScheduler:
    """A `ports.Scheduler` that passes every call on to another one and traces it."""

    def __init__(self, inner: Scheduler, trace: Trace) -> None:
        self._inner, self._trace = inner, trace
        self.offers = RecordingOffers(inner.offers, trace) if inner.offers else None
        self.parts = RecordingParts(inner.parts, trace) if inner.parts else None
        self.submission, self.addresses = inner.submission, inner.addresses
        self.leases = RecordingLeases(inner.leases, trace) if inner.leases else None
        self.expansion = RecordingExpansion(inner.expansion, trace) if inner.expansion else None

    async def observe(self) -> SchedulerView:
        return await self._trace.observe("scheduler.observe", self._inner.observe(), self._trace.scheduler_view)

    async def pin(self, job: JobRef, tag: str, nodes: Sequence[str], text: str = "", *, at_once: bool = False) -> None:
        pinning = self._inner.pin(job, tag, nodes, text, at_once=at_once)
        await self._trace.call("scheduler.pin", pinning, job=_ref(job), feature=tag, text=text, at_once=at_once)

    async def hold(self, job: JobRef, reason: str) -> None:
        await self._trace.call("scheduler.hold", self._inner.hold(job, reason), job=_ref(job), reason=reason)

    async def unpin(self, job: JobRef) -> None:
        await self._trace.call("scheduler.unpin", self._inner.unpin(job), job=_ref(job))

    async def requeue(self, job: JobRef) -> None:
        await self._trace.call("scheduler.requeue", self._inner.requeue(job), job=_ref(job))

    async def revoke(self, job: JobRef, reason: str) -> None:
        await self._trace.call("scheduler.revoke", self._inner.revoke(job, reason), job=_ref(job), reason=reason)

    async def set_down(self, node: str, reason: str) -> None:
        await self._trace.call("scheduler.set_down", self._inner.set_down(node, reason), node=node, reason=reason)

    async def delete_node(self, node: str) -> None:
        await self._trace.call("scheduler.delete_node", self._inner.delete_node(node), node=node)

    async def explain(self, jobs: Sequence[JobRef], text: str) -> None:
        explaining = self._inner.explain(jobs, text)
        await self._trace.call("scheduler.explain", explaining, refs=[_ref(job) for job in jobs], text=text)

    async def bootstrap(self, node: NodeSpec) -> NodeBootstrap:
        making = self._inner.bootstrap(node)
        features = list(node.features)
        return await self._trace.call(
            "scheduler.bootstrap", making, node=node.name, told=plain(node.size), features=features
        )

    async def user(self, uid: int) -> User:
        return await self._trace.call("scheduler.user", self._inner.user(uid), uid=uid)


class RecordingExpansion:
    """A `ports.Expansion` that passes every call on to another one and traces it."""

    def __init__(self, inner: Expansion, trace: Trace) -> None:
        self._inner, self._trace = inner, trace

    async def restore(self, job: JobRef) -> None:
        await self._trace.call("scheduler.restore", self._inner.restore(job), job=_ref(job))


class RecordingParts:
    """A `ports.Parts` that passes every call on to another one and traces what it changes in the latest view."""

    def __init__(self, inner: Parts, trace: Trace) -> None:
        self._inner, self._trace = inner, trace

    async def read(
        self, jobs: Mapping[str, int | None], users: Collection[int], nodes: Collection[str]
    ) -> SchedulerPart:
        return await self._trace.part("scheduler.observe", self._inner.read(jobs, users, nodes))


class RecordingOffers:
    """A `ports.Offers` that passes every call on to another one and traces it."""

    def __init__(self, inner: Offers, trace: Trace) -> None:
        self._inner, self._trace = inner, trace

    async def offer(self, node: NodeSpec) -> None:
        offering = self._inner.offer(node)
        await self._trace.call("scheduler.offer", offering, node=node.name, image=node.image, told=plain(node.size))

    async def withdraw(self, node: str) -> None:
        await self._trace.call("scheduler.withdraw", self._inner.withdraw(node), node=node)

    async def exclude(self, users: Collection[int]) -> None:
        await self._trace.call("scheduler.exclude", self._inner.exclude(users), users=sorted(users))


class RecordingLeases:
    """A `ports.Leases` that passes every call on to another one and traces it."""

    def __init__(self, inner: Leases, trace: Trace) -> None:
        self._inner, self._trace = inner, trace

    async def request(self, lease: LeaseSpec) -> None:
        await self._trace.call("scheduler.request", self._inner.request(lease), lease=lease.name)

    async def release(self, name: str, pilots: Sequence[str]) -> None:
        await self._trace.call("scheduler.release", self._inner.release(name, pilots), lease=name, pilots=list(pilots))


class RecordingHypervisor:
    """A `ports.Hypervisor` that passes every call on to another one and traces it."""

    def __init__(self, inner: Hypervisor, trace: Trace) -> None:
        self._inner, self._trace = inner, trace
        self._sources: dict[Source, RecordingSource] = {}
        self.membership = inner.membership
        self.templates = RecordingTemplates(inner.templates, trace) if inner.templates else None
        self.users = RecordingUsers(inner.users, trace) if inner.users else None
        self.groups = inner.groups  # what it tells decides nothing of what follows

    @property
    def sources(self) -> Sequence[RecordingSource]:
        """See `ports.Hypervisor`."""
        known = self._sources
        self._sources = {one: known.get(one) or RecordingSource(one, self._trace) for one in self._inner.sources}
        return list(self._sources.values())

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        return await self._trace.call(
            "hypervisor.create",
            self._inner.create(vm),
            vm=vm.name,
            host=vm.host,
            image=vm.image,
            kind=str(vm.kind),
            size=plain(vm.size),
            mac=vm.mac,
            template=vm.template and _template(vm.template),
        )

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> Sequence[Stage]:
        return await self._trace.call(
            "hypervisor.start",
            self._inner.start(vm, size, identity),
            vm=vm.name,
            size=plain(size),
            hostname=identity.hostname,
            mac=identity.mac,
            address=identity.address,
        )

    async def destroy(self, vm: VmRef, grace: float) -> None:
        await self._trace.call("hypervisor.destroy", self._inner.destroy(vm, grace), vm=vm.name, grace=grace)


class RecordingSource:
    """A `ports.Source` that passes every observation on from another one and traces it."""

    def __init__(self, inner: Source, trace: Trace) -> None:
        self._inner, self._trace = inner, trace
        self.name = inner.name

    @property
    def hosts(self) -> Sequence[str]:
        return self._inner.hosts

    @property
    def silence(self) -> float | None:
        return self._inner.silence

    async def observe(self) -> HypervisorView:
        return await self._trace.observe("hypervisor.observe", self._inner.observe(), hypervisor_view, self.name)


class RecordingTemplates:
    """A `ports.Templates` that passes every call on to another one and traces it."""

    def __init__(self, inner: Templates, trace: Trace) -> None:
        self._inner, self._trace = inner, trace

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        return await self._trace.call(
            "hypervisor.build_template", self._inner.build_template(template), **_template(template)
        )

    async def delete_template(self, template: TemplateKey) -> None:
        await self._trace.call(
            "hypervisor.delete_template", self._inner.delete_template(template), **_template(template)
        )


class RecordingUsers:
    """A `ports.GuestUsers` that passes every call on to another one and traces it."""

    def __init__(self, inner: GuestUsers, trace: Trace) -> None:
        self._inner, self._trace = inner, trace

    async def add_user(self, vm: VmRef, user: User, group: int = 0) -> None:
        await self._trace.call("hypervisor.add_user", self._inner.add_user(vm, user, group), vm=vm.name, uid=user.uid)
