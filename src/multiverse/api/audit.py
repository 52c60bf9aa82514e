"""The comparison of all running VMs, as `multiverse audit identity` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, slots=True)
class VmIdentity:
    """What one guest reports about itself. `skew` is its clock minus the host's, in milliseconds. `facts` has an entry
    for each property that must be unique; `problems` says what is wrong with them, one sentence each."""

    name: str
    job_id: str
    skew: int
    facts: Mapping[str, str]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IdentityAudit:
    """All running VMs. `distinct` (transmitted as `strangers`) is true if there are at least two, all have answered,
    and none has a problem."""

    vms: tuple[VmIdentity, ...]
    distinct: Annotated[bool, Field(alias="strangers")]
