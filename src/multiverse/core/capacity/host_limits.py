"""On which hosts the VMs of one placement may be, and how many of them on each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from multiverse.core.model import MOST_NODES, Attempt, Vm
from multiverse.core.state import State

Accept = Callable[[str], bool]
Limit = Callable[[str], int]


def any_host(_name: str) -> bool:
    """Every host is accepted."""
    return True


def any_number(_name: str) -> int:
    """Any number of VMs may be on a host."""
    return MOST_NODES


class HostLimits(NamedTuple):
    """Which hosts may be used, and for how many VMs each."""

    accept: Accept = any_host
    limit: Limit = any_number


NO_LIMITS = HostLimits()
"""All hosts may be used, for any number of VMs."""


def others_on(state: State, attempt: Attempt, taken: Iterable[Vm] = ()) -> Limit:
    """How many more of an attempt's VMs may be on a host, beside those that are there and spares that it takes."""
    per_host = attempt.request.per_host
    if not per_host:
        return any_number
    vms = (*(one for one in state.vms_of(attempt) if not one.failed), *taken)
    there = Counter(place.host for vm in vms for place in vm.places)
    return lambda name: per_host - there[name]
