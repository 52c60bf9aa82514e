"""What names a row."""

from __future__ import annotations

from typing import Literal, NamedTuple

RowKind = Literal["attempt", "vm", "template", "offer", "host", "lease"]


class Key(NamedTuple):
    """Names a row: an attempt, a template, a host and a lease by their number, a VM by its serial, an offer by its VM's
    serial."""

    kind: RowKind
    id: int

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


class ClaimKey(NamedTuple):
    """Names a claim: whose it is, and in which capacity domain, a host or a cloud's quota. A VM at two places holds
    two."""

    owner: Key
    domain: str
