"""Whether somebody listens at an address."""

from __future__ import annotations

import socket
from contextlib import closing

_TIMEOUT = 3.0  # seconds for a connection


def unreachable(address: str, port: int) -> str:
    """Why no connection can be made; empty if one can."""
    try:
        with closing(socket.create_connection((address, port), _TIMEOUT)):
            return ""
    except OSError as error:
        return error.strerror or str(error)
