"""Names of VMs, which never recur: `mv<site>-<serial>`. The only place that makes or reads them."""

from __future__ import annotations

import zlib
from hashlib import blake2b, sha256


def vm_name(site: str, serial: int) -> str:
    """The name of a VM, which is its node's name too. Host names hold no underscore."""
    return f"{vm_prefix(site)}{serial}"


def vm_prefix(site: str) -> str:
    """What the names of all VMs of one site begin with."""
    return f"mv{site}-"


def site_of(name: str) -> str:
    """The site in a VM's name; empty if it is not the name of a VM."""
    head, _, serial = name.rpartition("-")
    return head.removeprefix("mv") if head.startswith("mv") and serial.isdigit() else ""


def serial_of(name: str) -> int:
    """The serial in a VM's name; 0 if it has none."""
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else 0


def mac_of(site: str, serial: int) -> str:
    """A locally administered MAC address: 16 bits of the site, 24 of the serial."""
    tail = (zlib.crc32(site.encode()) & 0xFFFF).to_bytes(2, "big") + (serial & 0xFFFFFF).to_bytes(3, "big")
    return ":".join(f"{byte:02x}" for byte in (0x02, *tail))


def machine_id(name: str) -> str:
    """32 hex digits (machine-id(5)) that no other VM has. They are the same each time, so that an identity that is sent
    again is the same identity."""
    return sha256(f"multiverse machine-id {name}".encode()).hexdigest()[:32]


def token_of(entropy: str, serial: int) -> str:
    """The token of a VM: 32 hex digits. `entropy` is random for each pass, so that a VM made from a database that was
    restored from a copy has another token than the VM that had its serial before."""
    return blake2b(f"{entropy}/{serial}".encode(), digest_size=16).hexdigest()
