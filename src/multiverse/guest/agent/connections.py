"""The end of the TCP connections with other machines that a VM has from an earlier time.

A VM that is restored from a checkpoint has the connections of that moment. The other machines have received more on
them since, from the VM that was lost: they acknowledge what this one has not sent yet, and wait. Nothing ends such a
connection for minutes, and NFS mounts would hang as long.
"""

# ruff: noqa: PTH110

from __future__ import annotations

import errno
import os
import socket
import struct

from multiverse.guest.agent.system import GuestAgentError, read

SOCK_DIAG, SOCK_DESTROY = 4, 21  # <linux/netlink.h>, <linux/sock_diag.h>
REQUEST_AND_ANSWER = 1 | 4  # <linux/netlink.h>
ALL_STATES, NO_COOKIE = 0xFFFFFFFF, 0xFFFFFFFF  # <linux/inet_diag.h>
LISTENS = "0A"  # the state of a socket in /proc/net/tcp


def end_connections() -> None:
    """End all TCP connections of this VM with other machines, also those of the kernel. Raises GuestAgentError."""
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG)
    with sock:
        for family, table in ((socket.AF_INET, "/proc/net/tcp"), (socket.AF_INET6, "/proc/net/tcp6")):
            for near, far in connections_in(table) if os.path.exists(table) else ():
                sock.send(destruction(family, near, far))
                code = -struct.unpack_from("=i", sock.recv(4096), 16)[0]  # after the header, which has 16 bytes
                if code not in (0, errno.ENOENT):
                    raise GuestAgentError(f"the kernel does not end TCP connections: {os.strerror(code)}")


def connections_in(table: str) -> list[tuple[tuple[bytes, int], tuple[bytes, int]]]:
    """The address and port of both ends of each connection with another machine, as one of the kernel's tables says."""
    found = [line.split()[1:4] for line in read(table).splitlines()[1:]]
    own = {near.partition(":")[0] for near, _, _ in found}
    return [(end_of(near), end_of(far)) for near, far, state in found if state != LISTENS and not is_own(far, own)]


def is_own(end: str, own: set[str]) -> bool:
    """Whether it is on this machine: the far end of a connection within it is the near end of another line."""
    return end.partition(":")[0] in own


def end_of(text: str) -> tuple[bytes, int]:
    """Address and port of an end. The words of an address are in the order of this machine's bytes."""
    address, _, port = text.partition(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    return struct.pack(f"={len(words)}I", *words), int(port, 16)


def destruction(family: int, near: tuple[bytes, int], far: tuple[bytes, int]) -> bytes:
    """The request to end one connection: `inet_diag_req_v2` in <linux/inet_diag.h>."""
    ends = struct.pack(">HH", near[1], far[1]) + near[0].ljust(16, b"\0") + far[0].ljust(16, b"\0")
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, ALL_STATES) + ends
    request += struct.pack("=III", 0, NO_COOKIE, NO_COOKIE)
    return struct.pack("=IHHII", 16 + len(request), SOCK_DESTROY, REQUEST_AND_ANSWER, 1, 0) + request
