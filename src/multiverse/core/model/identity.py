"""What makes a clone itself: its names, its identity, and the group of VMs that it reaches.

A VM's name is `mv<site>-<serial>` and never recurs; only this module makes or reads it. It has at most 15 bytes, as the
name of a network interface (IFNAMSIZ). Serials up to 9,999,999 are decimal; from 10,000,000 on they have seven digits
of base 36 and begin with a letter, from `a000000` on: no name has two meanings.

VMs of one group, a number, reach each other; those of group 0 only what their job says. Hosts compare groups as marks
of frames (32 bits): the groups of users are their uids, those of jobs and of the site are numbers that no user has.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b, sha256
from ipaddress import IPv4Address

from multiverse.core.errors import Exhausted
from multiverse.core.model.job import Attempt

LAST_DECIMAL = 9_999_999
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_PLACES = 7
_OFFSET = 10 * 36 ** (_PLACES - 1) - (LAST_DECIMAL + 1)  # the value of `a000000` in base 36 stands for the serial 10^7
LAST_SERIAL = 36**_PLACES - 1 - _OFFSET  # 56 thousand million: a hundred VMs a second for 17 years
SERIAL = r"(?:[0-9]{1,18}|[a-z][0-9a-z]{6})"  # a regular expression for the serial in a name

_NAME = re.compile(rf"mv(?P<site>.*)-(?P<serial>{SERIAL})")


def vm_name(site: str, serial: int) -> str:
    """The name of a VM and of its node. Raises `Exhausted` beyond `LAST_SERIAL`."""
    return f"{vm_prefix(site)}{_written(serial)}"


def vm_prefix(site: str) -> str:
    return f"mv{site}-"


def lease_name(site: str, number: int) -> str:
    """The name of a lease, its host and its pilot. It is no name of a VM."""
    return f"lease-{site}-{_in_base_36(number)}"


def site_of_lease(name: str) -> str:
    match = re.fullmatch(r"lease-(?P<site>[0-9a-z]{1,5})-[0-9a-z]+", name)
    return match["site"] if match else ""


def is_site(text: str) -> bool:
    return re.fullmatch("[0-9a-z]{1,5}", text) is not None


def site_of(name: str) -> str:
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
    rest, places = number, ""
    while rest:
        rest, digit = divmod(rest, 36)
        places = _DIGITS[digit] + places
    return places


def mac_of(site: str, serial: int) -> str:
    """A locally administered MAC address: 16 bits of the site, 29 of the serial. It is below those of taps (0xfe)."""
    first = 0x02 | (serial >> 24 & 0x1F) << 2
    tail = (zlib.crc32(site.encode()) & 0xFFFF).to_bytes(2, "big") + (serial & 0xFFFFFF).to_bytes(3, "big")
    return ":".join(f"{byte:02x}" for byte in (first, *tail))


def mac_of_address(address: str) -> str:
    """A locally administered MAC address for what has this IPv4 address, where no other network gives any such."""
    return f"02:4d:{IPv4Address(address).packed.hex(':')}"


def network_id_of(site: str) -> int:
    """The 24-bit id of the site's virtual network, not 0. Hosts refuse packets of another site with the same id."""
    return zlib.crc32(site.encode()) % 0xFFFFFF + 1


def machine_id(name: str) -> str:
    """32 hex digits (machine-id(5)): no other VM has them, and a VM has the same each time."""
    return sha256(f"multiverse machine-id {name}".encode()).hexdigest()[:32]


def token_of(entropy: str, serial: int) -> str:
    """The token of a VM: 32 hex digits. `entropy` is random for each pass, so a serial given twice has two tokens."""
    return blake2b(f"{entropy}/{serial}".encode(), digest_size=16).hexdigest()


def without_prefix_length(address: str) -> str:
    return address.partition("/")[0]


@dataclass(frozen=True, slots=True)
class User:
    """A user as the guest must know him: passwd entry and every group he is in, (name, gid)."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str
    groups: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class UserSeen:
    """An answer of the name service about a uid. Times are monotonic. Without an answer a user is unknown."""

    exists: bool
    began: float  # when the look-up began
    since: float  # when it first gave this answer
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system that each VM mounts, as in fstab(5)."""

    source: str
    """What is mounted, such as fileserver:/home."""
    target: str
    """The directory of the VM where it is mounted."""
    type: str = "nfs4"
    """The type of the file system."""
    options: str = ""
    """Options of the file system, separated by commas."""


@dataclass(frozen=True, slots=True)
class GuestFile:
    """A file that the agent writes before anything starts. `owner` is a user name in the image."""

    path: str
    content: bytes
    mode: int = 0o644
    owner: str = "root"


@dataclass(frozen=True, slots=True)
class Daemon:
    """A process that the agent starts and watches. It runs in the foreground."""

    name: str
    argv: tuple[str, ...]
    user: str = "root"
    ready_path: str = ""  # appears (a socket) when it serves; the next daemon starts only then


@dataclass(frozen=True, slots=True)
class NodeBootstrap:
    """What a node needs to join the scheduler: opaque to all but its driver and the agent."""

    files: tuple[GuestFile, ...] = ()
    directories: tuple[tuple[str, str, int], ...] = ()  # path, owner, mode
    daemons: tuple[Daemon, ...] = ()
    users: tuple[User, ...] = ()  # whom the daemons have to know, beside the users of jobs


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What a VM reaches through the VXLAN of the hosts."""

    address: str
    mac: str
    machine: str  # where that is: its address in the network of the hosts


@dataclass(frozen=True, slots=True)
class TaskAccess:
    """What a VM inside a job knows, beside its identity."""

    hostname: str  # among the job's VMs
    hosts: tuple[tuple[str, str], ...]  # names and addresses of other machines
    vms: tuple[tuple[str, str], ...]  # of the job, as many on each of its nodes
    nodes: tuple[str, ...]
    token: str  # begins connections for tasks
    commands: str  # where the machine that makes these has the scheduler's commands


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a clone itself. Random bytes and the clock are added when it is sent, never kept."""

    hostname: str
    mac: str
    address: str  # with prefix length: 10.1.2.3/16
    gateway: str  # may be empty
    machine_id: str  # 32 hex digits
    users: tuple[User, ...] = ()
    mounts: tuple[Mount, ...] = ()
    peers: tuple[tuple[str, str], ...] = ()  # (host name, address)
    bootstrap: NodeBootstrap = NodeBootstrap()
    neighbours: tuple[Neighbour, ...] = ()  # for the VM's host: its guest is not told of them
    tasks: TaskAccess | None = None  # a VM inside a job, to whose guest its tasks are sent
    group: int = 0  # for the VM's host: the VMs that reach each other


_NO_USERS = 1 << 31  # from here on there are no uids: they look negative to many programs
OF_SITE = (1 << 32) - 1  # the group of all VMs of a site that reach each other


class Reach(StrEnum):
    """Which other VMs a VM reaches."""

    JOB = "job"  # the VMs of its job
    USER = "user"  # the VMs of its user
    SITE = "site"  # all of the site


@dataclass(frozen=True, slots=True)
class Member:
    """A VM of a group."""

    name: str
    address: str  # without prefix length
    mac: str
    host: str
    group: int
    machine: str = ""  # its host's address in the network of the hosts; empty: no VXLAN


def group_of(attempt: Attempt | None, reach: Reach) -> int:
    """The group of a VM that serves an attempt, or none yet. A VM that is alone in its group has none."""
    if reach is Reach.SITE:
        return OF_SITE
    if attempt is None:
        return 0
    if reach is Reach.USER and 0 < attempt.uid < _NO_USERS:
        return attempt.uid
    # Two attempts with the same number would have to be four thousand million attempts apart.
    return _NO_USERS + attempt.id % (_NO_USERS - 1) if attempt.request.nodes > 1 else 0
