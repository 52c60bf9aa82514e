"""The addresses of new VMs."""

from __future__ import annotations

import ipaddress
from collections.abc import Container

from multiverse.core.policy import Policy


def address_of(serial: int, used: Container[str], policy: Policy) -> str | None:
    """An address with its prefix length for the VM `serial`; None if all are in use. Neighbouring serials get
    neighbouring addresses, and one is used again only after all others: a peer's stale ARP entry for it has long
    expired by then."""
    net = policy.subnet
    span = net.num_addresses - 1 - policy.first_address
    for step in range(span):
        candidate = net.network_address + policy.first_address + (serial + step) % span
        text = f"{candidate}/{net.prefixlen}"
        if text not in used and candidate != ipaddress.IPv4Address(policy.gateway):
            return text
    return None
