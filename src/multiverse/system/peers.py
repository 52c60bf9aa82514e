"""Who is at the other end of a Unix socket."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_UCRED = "3i"


class Peer(NamedTuple):
    """A process, with its user and group, as of its connect(2)."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """The peer of a connected Unix socket (socket(7), SO_PEERCRED)."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_UCRED))
    return Peer(*struct.unpack(_UCRED, found))
