"""Offers: joined spares that jobs may take by themselves, as they are submitted."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from multiverse.core.model.keys import Key
from multiverse.core.model.reason import Reason


class OfferState(StrEnum):
    OPEN = "open"  # a job may take the VM
    TAKEN = "taken"  # a submission took it; its job appears in the scheduler soon, unless it was refused after that
    CLOSING = "closing"  # the VM is being withdrawn and may still be taken
    CLOSED = "closed"  # withdrawn, and no job took the VM; it is never offered again
    ENDED = "ended"  # the VM is gone


@dataclass(frozen=True, slots=True)
class Offer:
    """The offer of one joined spare. `id` is its VM's serial. `uid` is the user whose submission took it, if known."""

    id: int
    version: int = field(default=0, kw_only=True)
    state: OfferState = field(default=OfferState.OPEN, kw_only=True)
    since: float
    reason: Reason | None = None
    quarantined: Reason | None = None
    uid: int | None = None

    @property
    def key(self) -> Key:
        return Key("offer", self.id)
