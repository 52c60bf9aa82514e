"""One document of everything, kept as text for each row, so that a new snapshot costs what has changed.

Decides nothing. The texts are JSON of the types in `multiverse.api.grid`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from multiverse.api import Alert, HostView, SizeView
from multiverse.api.grid import GridAlert, GridHost, GridJob, GridSummary, GridVm
from multiverse.core.model import Attempt, Vm, VmSeen, text_of
from multiverse.core.model.identity import without_prefix_length
from multiverse.core.policy import Policy, image_of
from multiverse.service import convert

KINDS = ("hosts", "vms", "jobs", "alerts")

AVAILABLE_STEP = 128
"""MiB by which a host's available memory has to change until it is sent again."""

UNKNOWN_ORDER = 1 << 52
"""The place of a job that the scheduler does not show: behind all others. JavaScript can represent it."""

_COMMAND = re.compile(r"\bmultiverse [a-z][^;,()]*")


@cache
def _adapter(of: Any) -> TypeAdapter[Any]:
    return TypeAdapter(of)


def encoded(value: object) -> str:
    """A value of the API as JSON."""
    return _adapter(type(value)).dump_json(value).decode()  # type: ignore[arg-type]  # a type is hashable


Source = tuple[str, tuple[Any, ...], Callable[[], object]]
"""A document's key, what it is made from, and what makes it. Of what it is made from, the first is compared by
identity: a row that has changed is another object."""


class Changed(NamedTuple):
    """Keys of documents that are new or have changed, and of those that are gone."""

    changed: Sequence[str]
    gone: Sequence[str]

    def __bool__(self) -> bool:
        return bool(self.changed or self.gone)


@dataclass(slots=True)
class Documents:
    """Texts by key, each with what it was made from: as long as that is the same, the text is not made again."""

    texts: dict[str, str] = field(default_factory=dict)
    _made_from: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def update(self, found: Iterable[Source]) -> Changed:
        """Take all documents that there are, and tell how they differ from those before."""
        changed, seen = [], set()
        for key, made_from, make in found:
            seen.add(key)
            if _same(self._made_from.get(key), made_from):
                continue
            self._made_from[key] = made_from
            text = encoded(make())
            if self.texts.get(key) != text:
                self.texts[key] = text
                changed.append(key)
        gone = [key for key in self.texts if key not in seen] if len(seen) != len(self.texts) else []
        for key in gone:
            del self.texts[key], self._made_from[key]
        return Changed(changed, gone)


def _same(before: tuple[Any, ...] | None, now: tuple[Any, ...]) -> bool:
    return before is not None and before[0] is now[0] and before[1:] == now[1:]


def host_documents(hosts: Sequence[HostView], wall: float) -> Iterator[Source]:
    for host in hosts:
        made = grid_host(host, wall)
        yield host.name, ("host", made), partial(_itself, made)


def grid_host(host: HostView, wall: float) -> GridHost:
    """What viewers see of a host. `wall` is the present Unix time."""
    usable = SizeView(
        int(host.declared.cpus * host.cpu_overcommit),
        int(host.declared.memory * host.overcommit),
        int(host.declared.disk * host.disk_overcommit),
    )
    return GridHost(
        name=host.name,
        state=host.state,
        usable=usable,
        claimed=host.claimed,
        available=host.available // AVAILABLE_STEP * AVAILABLE_STEP,
        accelerator=host.accelerator,
        images=tuple(host.images),
        features=host.features,
        reason=host.reason,
        why=host.why,
        todo=host.todo,
        away_since=None if host.reachable else float(round(wall - host.away_for)),
    )


def vm_documents(vms: Iterable[tuple[Vm, VmSeen | None, str]], epoch: float) -> Iterator[Source]:
    """Of live VMs, each with how its host shows it and its job. `epoch` is the Unix time of the monotonic clock's 0."""
    for vm, seen, job_id in vms:
        private = round(seen.private) if seen else 0
        yield vm.name, (vm, private, job_id), partial(_vm, vm, private, job_id, epoch)


def _vm(vm: Vm, private: int, job_id: str, epoch: float) -> GridVm:
    return GridVm(
        name=vm.name,
        state=str(vm.state),
        host=vm.host,
        image=vm.image,
        kind=str(vm.kind),
        cpus=vm.size.cpus,
        memory=vm.size.memory,
        address=without_prefix_length(vm.address),
        job_id=job_id,
        attempt=vm.attempt,
        since=round(epoch + vm.since, 1),
        private=private,
        reason=text_of(vm.reason),
        quarantined=text_of(vm.quarantined),
    )


class ShownJob(NamedTuple):
    """What is said of a job beside its attempt. `user` is its user's name, or uid."""

    waiting: str
    order: int
    user: str
    vms: tuple[str, ...]


def job_documents(attempts: Iterable[tuple[Attempt, ShownJob]], policy: Policy, epoch: float) -> Iterator[Source]:
    for attempt, facts in attempts:
        yield str(attempt.id), (attempt, facts), partial(_job, attempt, facts, policy, epoch)


def _job(attempt: Attempt, facts: ShownJob, policy: Policy, epoch: float) -> GridJob:
    request = attempt.request
    return GridJob(
        attempt=attempt.id,
        job_id=attempt.job.job_id,
        name=attempt.job_name,
        user=facts.user,
        state=str(attempt.state),
        stage=convert.stage_of(attempt),
        nodes=request.nodes,
        cpus=request.size.cpus,
        memory=request.size.memory,
        image=image_of(attempt, policy),
        kind=str(request.kind or policy.kind),
        since=round(epoch + attempt.since, 1),
        order=facts.order,
        reason=facts.waiting or text_of(attempt.reason),
        restarts=attempt.job.restarts,
        vms=facts.vms,
        quarantined=text_of(attempt.quarantined),
    )


def alert_documents(alerts: Sequence[Alert]) -> Iterator[Source]:
    for alert in alerts:
        made = GridAlert(alert.kind, alert.name, alert.message, alert.remedy, command_of(alert), alert.jobs)
        yield f"{alert.kind} {alert.name}", ("alert", made), partial(_itself, made)


def command_of(alert: Alert) -> str:
    """The command that an operator can copy: the alert's repair, or the command that its remedy names; or none."""
    if alert.repair:
        return f"multiverse repair {alert.name}" + " --fenced" * alert.needs_fenced
    named = _COMMAND.search(alert.remedy)
    return named[0].strip() if named else ""


def _itself(made: object) -> object:
    return made


def whole(number: int, summary: GridSummary, documents: Mapping[str, Documents]) -> str:
    """A `Snapshot` as JSON."""
    parts = (f'"{kind}":[{",".join(documents[kind].texts.values())}]' for kind in KINDS)
    return f'{{"number":{number},"summary":{encoded(summary)},{",".join(parts)}}}'


def changes(
    number: int, summary: GridSummary | None, documents: Mapping[str, Documents], found: Mapping[str, Changed]
) -> str:
    """A `Delta` as JSON."""
    parts = [f'"number":{number}', f'"summary":{encoded(summary) if summary else "null"}']
    for kind in KINDS:
        texts = documents[kind].texts
        parts.append(f'"{kind}":[{",".join(texts[key] for key in found[kind].changed)}]')
    gone = {kind: found[kind].gone for kind in KINDS if found[kind].gone}
    return "{" + ",".join([*parts, f'"gone":{json.dumps(gone)}']) + "}"
