"""Reservations of the scheduler that keep jobs off all nodes of VMs, those that are there and those to come."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from multiverse.core.model.reason import Reason, Why


@dataclass(frozen=True, slots=True)
class NodeReservation:
    """From `begins` until `ends` (Unix times) no job of ours can run. A job cannot start before either, unless its time
    limit ends it in time."""

    name: str
    begins: float
    ends: float

    def is_on(self, now: float) -> bool:
        """Whether it has begun, and is not over."""
        return self.begins <= now < self.ends

    def keeps(self, now: float, limit: float | None) -> bool:
        """Whether a job that takes `limit` seconds at most (None: nobody knows) cannot start now because of it."""
        return now < self.ends and now + (limit or 0.0) > self.begins

    def why(self) -> Reason:
        """Why such a job waits."""
        return Why.RESERVED(name=self.name, begins=self.begins, ends=self.ends)


def first_on(reservations: Collection[NodeReservation], now: float) -> NodeReservation | None:
    """The one of those that have begun that ends last."""
    return max((one for one in reservations if one.is_on(now)), key=lambda one: one.ends, default=None)


def first_keeping(reservations: Collection[NodeReservation], now: float, limit: float | None) -> NodeReservation | None:
    """The one because of which a job that takes `limit` seconds at most cannot start now: that which begins first."""
    return min((one for one in reservations if one.keeps(now, limit)), key=lambda one: one.begins, default=None)
