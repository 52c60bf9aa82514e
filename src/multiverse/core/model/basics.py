"""What names a row, how large things are, and how VMs are made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from operator import add, sub
from typing import Literal, NamedTuple

RowKind = Literal["attempt", "vm", "template", "offer", "host", "lease", "saved"]


def number_of(count: int, what: str, several: str = "") -> str:
    """A number of things, for people: 1 host, 2 hosts. `several`: their word unless it only has an s more."""
    return f"{count:,} {what if count == 1 else several or f'{what}s'}"


class Key(NamedTuple):
    """Names a row by its number. The number of a VM, and of its offer, is the VM's serial."""

    kind: RowKind
    id: int

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


class ClaimKey(NamedTuple):
    """Names a claim: whose it is, and in which domain, a host or a cloud's quota. A VM at two places holds two."""

    owner: Key
    domain: str


def is_pin(feature: str) -> bool:
    """Whether a node's feature is a tag that ties a job to it: that of an attempt, or of a spare."""
    return re.fullmatch(r"mv_v?\d+", feature) is not None


class CloneKind(StrEnum):
    """How a VM comes from its template or image (DESIGN, "Words"). `AUTO` is a wish only: no VM is of that kind."""

    INSTANT = "instant"
    LINKED = "linked"
    FULL = "full"
    AUTO = "auto"


class Placement(StrEnum):
    """The placement policies that are built in, by name: see `core.capacity.placement_policies`."""

    WORST_FIT = "worst-fit"
    BEST_FIT = "best-fit"
    FIRST_FIT = "first-fit"
    RANDOM_FIT = "random-fit"
    PACK = "pack"
    SPREAD = "spread"
    LEAST_LOADED = "least-loaded"


class Depth(StrEnum):
    """How far a VM of the warm pool is made before any job asks for it."""

    PARKED = "parked"  # restored and paused: of any size yet, and nobody yet
    JOINED = "joined"  # an idle node of one size


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """How large a VM, a request or a claim is."""

    cpus: int
    memory: int  # MiB
    disk: int = 0  # MiB that jobs may write there; 0 in a request: what the site lets every job write
    net: int = 0  # Mbit/s each way; 0 of a VM: no limit, and no claim

    def __str__(self) -> str:
        text = f"{number_of(self.cpus, 'CPU')}, {self.memory} MiB"
        text = f"{text}, {self.disk} MiB disk" if self.disk else text
        return f"{text}, {self.net} Mbit/s" if self.net else text

    def __add__(self, other: Size) -> Size:
        return Size(*map(add, self.amounts, other.amounts))

    def __sub__(self, other: Size) -> Size:
        return Size(*map(sub, self.amounts, other.amounts))

    @property
    def amounts(self) -> tuple[int, int, int, int]:
        """How much of each resource, in the order of `core.capacity_index.Free`."""
        return self.cpus, self.memory, self.disk, self.net
