"""Connects this process's standard input and output to a Unix socket, until either side ends.

It runs at the far end of `ssh HOST multiverse agent dial-stdio`. It imports little, so that it starts quickly.
"""

from __future__ import annotations

import os
import selectors
import socket
from pathlib import Path

from multiverse.core.errors import Refused, Unknown

_PIECE = 1 << 16


def dial_stdio(path: Path, source: int = 0, target: int = 1) -> None:
    """Copy from the descriptor `source` to the socket, and from the socket to `target`. Returns as soon as either side
    has ended: a bridge that outlives its connection would keep a dead controller's connection open. Raises `Unknown`
    if nothing listens at `path`."""
    with socket.socket(socket.AF_UNIX) as agent, selectors.DefaultSelector() as ready:
        try:
            agent.connect(str(path))
        except OSError as error:
            text = f"no agent answers at {path}: {error.strerror}"
            raise Unknown(text, hint="is `multiverse agent` running on this host?") from error
        ready.register(source, selectors.EVENT_READ, agent.fileno())
        ready.register(agent, selectors.EVENT_READ, target)
        while True:
            for key, _ in ready.select():
                data = os.read(key.fd, _PIECE)
                if not data:
                    return
                _write(key.data, data)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def permitted(asked: str) -> tuple[str, ...]:
    """The request of a controller by ssh: `dial-stdio`, or `receive-image` with a name and a digest, as the last words
    of the command line `asked`. Earlier words, such as the path of the program, mean nothing here. No shell reads the
    line. Raises `Refused` for all else."""
    match asked.split():
        case [*_, "dial-stdio"]:
            return ("dial-stdio",)
        case [*_, "receive-image", name, digest] if digest.isalnum():
            return ("receive-image", name, digest)
    raise Refused(
        f"this key may not be used for {asked!r}" if asked else "this key opens no shell",
        hint="its command in authorized_keys permits `dial-stdio` and `receive-image NAME DIGEST` only",
    )
