"""Offers: joined spares that jobs may take by themselves, as they are submitted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from multiverse.core.model.keys import Key


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
    version: int
    state: OfferState
    since: float
    reason: str = ""
    quarantined: str = ""
    uid: int | None = None

    @property
    def key(self) -> Key:
        return Key("offer", self.id)

    def closing(self, reason: str) -> Offer:
        """Itself, its VM to be taken by no job any more."""
        return replace(self, state=OfferState.CLOSING, reason=reason)
