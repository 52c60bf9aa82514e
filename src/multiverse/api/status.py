"""The state of the daemon, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

AlertKind = Literal[
    "source",
    "hints",
    "store",
    "memory",
    "disk",
    "image",
    "quarantine",
    "back-off",
    "avoided",
    "placement",
    "template",
    "host",
    "fenced",
    "nodes",
    "user",
    "effect",
    "orphan",  # an orphan: an object with our site's name that no record explains
    "unserved",
]

Severity = Literal["critical", "warning", "notice"]


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that is wrong. `message` (transmitted as `wrong`) says what, `remedy` (transmitted as `todo`) what an
    operator can do. `repair` says what `multiverse repair NAME` would do (empty: there is no such repair). With
    `needs_fenced` that repair needs the operator's assurance that the host is switched off. `version` rises whenever
    the record has changed, so an alert that is still there after a repair is recognised as a new one. `jobs` are the
    jobs that are affected. `severity`: what is critical stops or endangers jobs now, and a notice asks for nothing."""

    kind: AlertKind
    name: str
    message: Annotated[str, Field(alias="wrong")]
    remedy: Annotated[str, Field(alias="todo")]
    repair: str = ""
    needs_fenced: bool = False
    version: int = 0
    jobs: tuple[str, ...] = ()
    severity: Severity = "warning"


@dataclass(frozen=True, slots=True)
class SourceView:
    """A source of observations. `observations` (transmitted as `looks`) counts them since the daemon's start. `age` is
    the time since the last successful one began (0: there is none), `unknown_for` how long every observation has
    failed, `failure` the last error."""

    name: str
    known: bool
    observations: Annotated[int, Field(alias="looks")]
    age: float
    unknown_for: float
    failure: str


@dataclass(frozen=True, slots=True)
class PoolView:
    """A warm pool. It keeps between `least` and `most` spares. `wanted` is the present target, `ready` and `making`
    count the spares, `offered` counts those that a job may take by itself. A pool of parked VMs has no size: `cpus` and
    `memory` are 0."""

    image: str
    depth: str
    cpus: int
    memory: int
    least: int
    most: int
    wanted: int
    ready: int
    making: int
    offered: int


@dataclass(frozen=True, slots=True)
class StatusView:
    """The daemon's process and site, its sources, the number of objects by state, its pools and its alerts
    (transmitted as `troubles`). `jobs` counts jobs that are waiting, provisioning, running and ending."""

    pid: int
    version: str
    site: str
    up: float
    sources: tuple[SourceView, ...]
    jobs: Mapping[str, int]
    attempts: Mapping[str, int]
    vms: Mapping[str, int]
    templates: Mapping[str, int]
    pools: tuple[PoolView, ...]
    alerts: Annotated[tuple[Alert, ...], Field(alias="troubles")]


@dataclass(frozen=True, slots=True)
class PruneView:
    """How many records were deleted, or would be, and how many entries of their journal. `older_than` is in seconds.
    `next` is where the next request goes on (`PruneRequest.after`); empty when all is done."""

    older_than: float
    next: str
    dry_run: bool
    attempts: int
    vms: int
    offers: int
    templates: int
    journal: int
    leases: int = 0
    hosts: int = 0
