"""A trace: every call over the ports as a line of JSON, with its result. `simulation.replay` plays a trace.

A line has the call's name, its arguments, when it `began` and `ended` (seconds since the trace began) and its `result`:
"ok", "cancelled", or the class of its error. Of an observation only the differences from the one before it of the same
source are written, if there are any; an object that is no longer shown is null. The contents of a bootstrap and of an
identity are not written, because they hold secrets.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from multiverse.core.errors import Refused
from multiverse.core.model.basics import Size
from multiverse.core.model.host import HypervisorView
from multiverse.core.model.job import Job, JobRef, Preemption, SchedulerPart, SchedulerView
from multiverse.core.model.vm import TemplateKey
from multiverse.ports import Clock, Hypervisor, Scheduler
from multiverse.ports.around import PortCall, around

T = TypeVar("T")
View = dict[str, dict[str, Any]]
"""The objects of an observation, by kind (`jobs`, `vms`, ...) and name, in values of JSON."""

log = structlog.get_logger()


class Trace:
    """An open trace. If it cannot be written any more, for example on a full disk, the trace ends; the calls go on."""

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
        """Wait for an observation and write its differences from the one before it of the same `source`. The line names
        the source, if it has a name."""
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
        """Wait for a part of an observation, and write its differences as an observation."""

        def view(read: SchedulerPart) -> View:
            return self.scheduler_view(self._whole.merged(read, 0.0))

        return await self.observe(name, answer, view)

    def scheduler_view(self, view: SchedulerView) -> View:
        """The objects of a view; parts that are read later are merged into it."""
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
    """The objects of `after` that are new or different; None for objects that only `before` shows."""
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
        **({"preemption": _preemption(view.preemption)} if view.preemption else {}),
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
        **({"preempt_class": job.preempt_class} if job.preempt_class else {}),
        "result": job.result,
        "exit_code": job.exit_code,
    }


def _preemption(rules: Preemption) -> dict[str, Any]:
    """What applies to each class."""
    return {
        name: {
            "takes": sorted(rules.takes.get(name, ())),
            "mode": rules.modes.get(name, "off"),
            "exempt": rules.exempt.get(name, 0.0),
            "grace": rules.grace.get(name, 0.0),
        }
        for name in sorted({*rules.takes, *rules.modes})
    }


def _template(which: TemplateKey) -> dict[str, Any]:
    return {"host": which.host, "image": which.image, "size": plain(which.size), "account": which.account}


def plain(value: Size) -> list[int]:
    return [value.cpus, value.memory, value.disk, *([value.net] if value.net else [])]


def _ref(job: JobRef) -> list[Any]:
    return [job.job_id, job.submitted, job.restarts]


_JOB = lambda job, **_: {"job": _ref(job)}  # noqa: E731
_JOB_AND_REASON = lambda job, reason: {"job": _ref(job), "reason": reason}  # noqa: E731
_NODE = lambda node, **_: {"node": node}  # noqa: E731
_VM = lambda vm: {"vm": vm.name}  # noqa: E731
_TEMPLATE = lambda template: _template(template)  # noqa: E731

_WRITTEN: Mapping[str, Callable[..., dict[str, Any]]] = {
    "pin": lambda job, tag, nodes, text, at_once, limit: {
        "job": _ref(job), "feature": tag, "text": text, "at_once": at_once,
        **({} if limit is None else {"limit": limit}),
    },
    "hold": _JOB_AND_REASON,
    "revoke": _JOB_AND_REASON,
    "unpin": _JOB,
    "requeue": _JOB,
    "restore": _JOB,
    "set_down": _NODE,
    "delete_node": _NODE,
    "withdraw": _NODE,
    "explain": lambda jobs, text: {"refs": [_ref(job) for job in jobs], "text": text},
    "bootstrap": lambda node: {"node": node.name, "told": plain(node.size), "features": list(node.features)},
    "user": lambda uid: {"uid": uid},
    "offer": lambda node: {"node": node.name, "image": node.image, "told": plain(node.size)},
    "exclude": lambda users: {"users": sorted(users)},
    "request": lambda lease: {"lease": lease.name},
    "release": lambda name="", pilots=(), job=None: (
        {"job": _ref(job)} if job is not None else {"lease": name, "pilots": list(pilots)}
    ),
    "prepare": lambda job, nodes, requeues: {"job": _ref(job), "nodes": list(nodes), "requeues": requeues},
    "undo": lambda job, nodes, requeues: {"job": _ref(job), "nodes": list(nodes), "requeues": requeues},
    "check_script": lambda nodes: {"nodes": list(nodes)},
    "forbid_requeue": _JOB,
    "freeze": lambda vm, script: {"vm": vm.name, "script": script},
    "cut": _VM,
    "save": lambda vm, name, key: {"vm": vm.name, "saved": name},
    "checkpoint": lambda vm, name, key, shared_files: {"vm": vm.name, "saved": name, "shared_files": shared_files},
    "check": _JOB,
    "copy": lambda source, name, key: {"source": source, "saved": name},
    "keep_in_memory": lambda vm, name: {"vm": vm.name, "saved": name},
    "thaw": _VM,
    "move": lambda vm, number, target: {"vm": vm.name, "move": number, "target": target.host},
    "sleep": lambda vm, number, identity, key: {"vm": vm.name, "sleep": number},
    "wake": lambda vm, number, runs, key: {"vm": vm.name, "sleep": number, "runs": runs},
    "stand_in": lambda node: {"node": node.name, "told": plain(node.size)},
    "keep_time": lambda job, left: {"job": _ref(job), "left": left},
    "warn": lambda job, text: {"job": _ref(job), "text": text},
    "preempt": lambda job, requeue, text: {"job": _ref(job), "requeue": requeue, "text": text},
    "settle": lambda vm, number, other: {"vm": vm.name, "move": number, "other": other.source},
    "discard": lambda source, name: {"source": source, "saved": name},
    "create": lambda vm: {
        "vm": vm.name, "host": vm.host, "image": vm.image, "kind": str(vm.kind), "size": plain(vm.size), "mac": vm.mac,
        "template": vm.template and _template(vm.template),
    },
    "start": lambda vm, size, identity: {
        "vm": vm.name, "size": plain(size), "hostname": identity.hostname, "mac": identity.mac,
        "address": identity.address,
    },
    "destroy": lambda vm, grace: {"vm": vm.name, "grace": grace},
    "build_template": _TEMPLATE,
    "delete_template": _TEMPLATE,
    "add_user": lambda vm, user, group: {"vm": vm.name, "uid": user.uid},
}  # fmt: skip
"""The written form of each call's arguments."""


def recording(scheduler: Scheduler, hypervisor: Hypervisor, trace: Trace) -> tuple[Scheduler, Hypervisor]:
    """The same ports, with all calls written but those of the limits of submission: nothing follows from them."""
    return (
        around(scheduler, partial(_traced, trace, "scheduler"), besides=("submission",)),
        around(hypervisor, partial(_traced, trace, "hypervisor")),
    )


async def _traced(trace: Trace, port: str, call: PortCall, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """`ports.around.Through`."""
    if call.method == "read":  # a part changes the view of the whole
        return await trace.part(f"{port}.observe", make())
    if call.method == "observe":
        view = hypervisor_view if call.source else trace.scheduler_view
        return await trace.observe(f"{port}.observe", make(), view, call.source)
    return await trace.call(f"{port}.{call.method}", make(), **_WRITTEN[call.method](**call.arguments))
