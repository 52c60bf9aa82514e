"""Who is at the other end of a Unix socket, and whether somebody listens at an address."""

from __future__ import annotations

import socket
import struct
from contextlib import closing
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


_TIMEOUT = 3.0  # seconds for a connection


def unreachable(address: str, port: int) -> str:
    """Why no connection can be made; empty if one can."""
    try:
        with closing(socket.create_connection((address, port), _TIMEOUT)):
            return ""
    except OSError as error:
        return error.strerror or str(error)
