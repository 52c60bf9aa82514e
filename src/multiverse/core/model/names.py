"""Names of VMs, which never recur: `mv<site>-<serial>`. The only place that makes or reads them. And those of leases.

A name is at most 15 bytes, because it names a network interface too (IFNAMSIZ in <linux/if.h>): seven characters are
left for the serial beside a site of five. Up to 9,999,999 a serial is written in decimal. From
10,000,000 on it is written with seven digits of base 36 of which the first is a letter, from `a000000` on: no name has
two meanings, and none that was ever given has another one than before.
"""

from __future__ import annotations

import re
import zlib
from hashlib import blake2b, sha256
from ipaddress import IPv4Address

from multiverse.core.errors import Exhausted

LAST_DECIMAL = 9_999_999
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_PLACES = 7
_OFFSET = 10 * 36 ** (_PLACES - 1) - (LAST_DECIMAL + 1)  # the value of `a000000` in base 36 stands for the serial 10^7
LAST_SERIAL = 36**_PLACES - 1 - _OFFSET
"""56 thousand million: a hundred VMs a second for 17 years."""

SERIAL = r"(?:[0-9]{1,18}|[a-z][0-9a-z]{6})"
"""A regular expression for the serial in a name."""

_NAME = re.compile(rf"mv(?P<site>.*)-(?P<serial>{SERIAL})")


def vm_name(site: str, serial: int) -> str:
    """The name of a VM, which is its node's name too. Host names hold no underscore. Raises `Exhausted` beyond
    `LAST_SERIAL`."""
    return f"{vm_prefix(site)}{_written(serial)}"


def vm_prefix(site: str) -> str:
    """What the names of all VMs of one site begin with."""
    return f"mv{site}-"


def lease_name(site: str, number: int) -> str:
    """The name of a lease, which is that of its host and of its pilot, too. It is no name of a VM."""
    return f"lease-{site}-{_in_base_36(number)}"


def site_of_lease(name: str) -> str:
    """The site in the name of a lease; empty if it is not one."""
    match = re.fullmatch(r"lease-(?P<site>[0-9a-z]{1,5})-[0-9a-z]+", name)
    return match["site"] if match else ""


def is_site(text: str) -> bool:
    """Whether this can be the site in names of VMs."""
    return re.fullmatch("[0-9a-z]{1,5}", text) is not None


def site_of(name: str) -> str:
    """The site in a VM's name; empty if it is not the name of a VM."""
    match = _NAME.fullmatch(name)
    return match["site"] if match else ""


def serial_of(name: str) -> int:
    """The serial in a VM's name; 0 if it has none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return 0
    text = match["serial"]
    return int(text) if text.isdecimal() else int(text, 36) - _OFFSET


def _written(serial: int) -> str:
    if serial <= LAST_DECIMAL:
        return str(serial)
    if serial > LAST_SERIAL:
        raise Exhausted("all names of VMs of this site have been used", hint="begin with a new state directory")
    return _in_base_36(serial + _OFFSET)


def _in_base_36(number: int) -> str:
    """A positive number in base 36."""
    rest, places = number, ""
    while rest:
        rest, digit = divmod(rest, 36)
        places = _DIGITS[digit] + places
    return places


def mac_of(site: str, serial: int) -> str:
    """A locally administered MAC address: 16 bits of the site, 29 of the serial. The highest five of the latter are in
    the first octet, which stays below that of the taps (0xfe)."""
    first = 0x02 | (serial >> 24 & 0x1F) << 2
    tail = (zlib.crc32(site.encode()) & 0xFFFF).to_bytes(2, "big") + (serial & 0xFFFFFF).to_bytes(3, "big")
    return ":".join(f"{byte:02x}" for byte in (first, *tail))


def mac_of_address(address: str) -> str:
    """A locally administered MAC address for what has this IPv4 address, where no other network gives any such."""
    return f"02:4d:{IPv4Address(address).packed.hex(':')}"


def network_id_of(site: str) -> int:
    """The 24-bit id of the site's virtual network, which is not 0. Two sites may have the same: no host accepts packets
    from another site's machines."""
    return zlib.crc32(site.encode()) % 0xFFFFFF + 1


def machine_id(name: str) -> str:
    """32 hex digits (machine-id(5)) that no other VM has. They are the same each time, so that an identity that is sent
    again is the same identity."""
    return sha256(f"multiverse machine-id {name}".encode()).hexdigest()[:32]


def token_of(entropy: str, serial: int) -> str:
    """The token of a VM: 32 hex digits. `entropy` is random for each pass, so that a VM made from a database that was
    restored from a copy has another token than the VM that had its serial before."""
    return blake2b(f"{entropy}/{serial}".encode(), digest_size=16).hexdigest()


def without_prefix_length(address: str) -> str:
    """An address with a prefix length, without it."""
    return address.partition("/")[0]
