"""Evictions as they are planned: the methods that propose them, and their steps. `model.job` has those of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from multiverse.core.model.job import Attempt
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.vm import Vm


class Method(StrEnum):
    DRAIN = "drain"
    PREEMPTION = "preemption"
    LEASE_END = "lease"  # what does not leave is lost
    PACKING = "packing"


CAUSES: Mapping[Why, str] = MappingProxyType(
    {
        Why.HOST_DRAINED: Method.DRAIN,
        Why.PREEMPTED: Method.PREEMPTION,
        Why.LEAVES_LEASE: Method.LEASE_END,
        Why.LEASE_EMPTIED: Method.PACKING,
        Why.OPERATOR: "operator",
        Why.SAVE_ORDERED: "operator",
    }
)
"""What evicts jobs, by the reason of the eviction: a method, or an operator."""

LIMITS: Mapping[Why, str] = MappingProxyType(
    {Why.EVICTIONS_AT_ONCE: "at_once", Why.EVICTION_RATE: "bandwidth", Why.EVICTED_OFTEN: "per_job"}
)
"""The setting of each limit that holds evictions back, by the reason that it gives."""


def cause_of(why: Reason) -> str:
    """What evicts a job for this reason; empty if it is none of an eviction."""
    return str(CAUSES.get(why.kind, ""))


@dataclass(frozen=True, slots=True)
class Step:
    """One eviction: the VM of a job moves, or the job is saved, or else its run ends."""

    method: Method
    attempt: Attempt
    vm: Vm
    to: str  # the host to which the VM moves; empty: it does not
    why: Reason
    memory: int  # MiB to be sent
    held: Reason | None = None  # why it does not begin now, although it would help
    held_since: float = 0.0  # since when such steps for the same reason are held without a break (monotonic)
    ends: Literal["requeue", "cancel", ""] = ""  # how the run ends; empty: it does not, the job moves or is saved
