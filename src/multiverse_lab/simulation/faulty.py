"""The ports with faults: every call goes through a `faults.FaultyLink`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from multiverse.core.model.job import JobRef
from multiverse.core.model.vm import TemplateKey
from multiverse.ports import Hypervisor, Scheduler
from multiverse.ports.around import PortCall, around
from multiverse_lab.simulation.faults import FaultyLink

_RECORDED: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    "pin": lambda job, tag, **_: (job, tag),
    "hold": lambda job, **_: (job,),
    "revoke": lambda job, **_: (job,),
    "set_down": lambda node, **_: (node,),
    "explain": lambda jobs, text: tuple(jobs),
    "read": lambda **_: (),
    "exclude": lambda users: tuple(sorted(users)),
    "release": lambda name="", pilots=(), job=None: (job,) if job is not None else (name, *pilots),
    "publish": lambda limits: (),
    "start": lambda vm, size, identity: (vm.name, size, identity),
    "destroy": lambda vm, grace: (vm.name, grace),
    "add_user": lambda vm, user, group: (vm.name, user),
}
"""What is recorded of the arguments of a call for the comparison of two checkouts; else all of them."""


def faulty(
    scheduler: Scheduler, hypervisor: Hypervisor, links: tuple[FaultyLink, FaultyLink]
) -> tuple[Scheduler, Hypervisor]:
    """The same ports behind faulty links."""
    return around(scheduler, partial(_call, links[0])), around(hypervisor, partial(_call, links[1]))


async def _call(link: FaultyLink, call: PortCall, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """`ports.around.Through`."""
    record = _RECORDED.get(call.method)
    recorded = record(**call.arguments) if record is not None else tuple(call.arguments.values())
    return await link.call(call.method, call.source or _subject(call), make, *recorded)


def _subject(call: PortCall) -> str:
    """What a call is about, of which each has faults of its own."""
    first: Any = next(iter(call.arguments.values()), "")
    if call.method == "explain":
        first = first[0]
    if isinstance(first, JobRef):
        return first.job_id
    if isinstance(first, TemplateKey):
        return f"{first.host}/{first.image}"
    if call.method in ("copy", "discard"):
        return str(call.arguments["name"])
    return str(first) if isinstance(first, str | int) else str(getattr(first, "name", ""))
