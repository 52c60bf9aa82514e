"""How fast and how often: the policy that the planner follows, and the back-off after failures."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from multiverse.core.model import CloneKind, Size


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that decisions depend on. Times in seconds, memory in MiB."""

    subnet: ipaddress.IPv4Network
    gateway: str
    first_address: int = 256
    image: str = "slim"
    kind: CloneKind = CloneKind.INSTANT
    base: Size = Size(1, 256)
    guest_reserve: int = 80
    vm_overhead: int = 32  # QEMU's own memory beside the guest's
    overcommit: float = 1.0  # times its declared memory that a host may claim
    floor: int = 1024  # above 1, what its machine must keep available all the same
    settle: float = 30.0  # then, how long a VM serves its job before it counts as what it takes
    provisioning: int = 4
    spawn_timeout: float = 60.0
    pin_timeout: float = 60.0
    held_timeout: float = 10.0  # a pinned job that the scheduler holds back; its reason may be an old one till then
    complete_timeout: float = 120.0
    retry_base: float = 2.0
    retry_limit: float = 300.0
    replacements: int = 2
    attempts: int = 12
    patience: float = 2.0  # how long a job waits before its user is told why

    def backoff(self, tries: int) -> float:
        """Seconds to wait after `tries` failures in a row: doubled each time, up to the limit."""
        if tries <= 0:
            return 0.0
        return float(min(self.retry_limit, self.retry_base * 2 ** min(tries - 1, 30)))
