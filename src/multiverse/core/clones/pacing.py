"""How many clones a second are made from one template."""

from __future__ import annotations

from collections.abc import Mapping

from multiverse.core.model import CloneKind
from multiverse.core.policy import Policy

ARRIVALS_FADE = 60.0
"""Seconds after which an arrival counts for 1/e of what it did: what an arrival rate is taken over."""

Parent = tuple[str, str, CloneKind]
"""What a pace is kept of: (host, image, kind), which is the template for instant clones."""


def wait_for(parent: Parent, paced: Mapping[Parent, float], now: float, policy: Policy) -> float:
    """Seconds until the pace lets another clone be made: as many at once as are made in a second, one at least (the
    generic cell rate algorithm of ITU-T I.371, whose whole state is the time until which clones are paid for)."""
    interval = policy.interval(parent[2])
    return max(0.0, paced.get(parent, 0.0) - now - max(0.0, 1.0 - interval)) if interval else 0.0


def paid(parent: Parent, paced: Mapping[Parent, float], now: float, policy: Policy) -> float:
    """Until when the pace is paid for, once another clone has been made."""
    return max(paced.get(parent, 0.0), now) + policy.interval(parent[2])
