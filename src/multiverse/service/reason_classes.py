"""The reasons why jobs wait, as a few words to count by: the sentences have figures and names in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

BEGINNINGS = {
    "waiting behind earlier jobs": "behind",
    "waiting for a turn": "turn",
    "waiting for capacity": "capacity",
    "waiting for memory": "memory",
    "waiting for disk": "disk",
    "waiting for bandwidth": "bandwidth",
    "waiting for a free address": "address",
    "waiting for a host that is drained": "drained",
    "waiting for a host to be leased": "lease",
    "waiting for a host that is avoided": "avoided",
    "waiting until the name service": "user",
    "no host has image": "image",
    "no host is in sight": "no host",
}
"""How the sentences of the core begin, each with its word."""

EARLIER_RUN = "earlier run"
"""Of which sentences say in their middle that it may go on."""

SCHEDULER, OTHER = "scheduler", "other"
"""The words for a job that the scheduler itself keeps waiting (a hold, a dependency), and for all other reasons."""


def word(reason: str) -> str:
    """The word of one reason; empty reasons are the scheduler's."""
    if not reason:
        return SCHEDULER
    if "limit" in reason:
        return "limit"
    if "fits on no host" in reason:
        return "too large"
    if EARLIER_RUN in reason:
        return EARLIER_RUN
    return next((short for beginning, short in BEGINNINGS.items() if reason.startswith(beginning)), OTHER)


def counted(reasons: Iterable[str]) -> Counter[str]:
    """How many jobs wait, by the word of their reason; each word is there, also with none."""
    found = Counter(dict.fromkeys((*BEGINNINGS.values(), "limit", "too large", EARLIER_RUN, SCHEDULER, OTHER), 0))
    found.update(map(word, reasons))
    return found
