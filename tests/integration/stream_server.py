"""Takes streams of blocks with digests (`moving_jobs.STREAM`): in a test, or as a program in a VM."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any


class StreamServer:
    """Takes streams, on all addresses. Run as a program with a directory and a name it serves one stream in a VM."""

    def __init__(self, port: int = 0) -> None:
        self._server = socket.create_server(("", port))
        self.port: int = self._server.getsockname()[1]
        self.taken: list[dict[str, Any]] = []
        self._threads: list[threading.Thread] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._take, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _take(self, connection: socket.socket) -> None:
        every, got, wrong = hashlib.sha256(), 0, 0
        with connection, connection.makefile("rb") as stream:
            while length := struct.unpack("!I", stream.read(4))[0]:
                digest, payload = stream.read(32), stream.read(length)
                wrong += hashlib.sha256(payload).digest() != digest
                every.update(payload)
                got += 1
                connection.sendall(f"{got} {every.hexdigest()}\n".encode())
        self.taken.append({"got": got, "wrong": wrong, "digest": every.hexdigest()})

    def result(self, timeout: float = 30.0) -> dict[str, Any]:
        """What the first stream was, after its end."""
        self._threads[0].join(timeout)
        return self.taken[0]

    def close(self) -> None:
        self._server.close()


def main() -> None:
    home, name = Path(sys.argv[1]), sys.argv[2]
    server = StreamServer()
    told = home / f"{name}.new"
    told.write_text(json.dumps([socket.gethostname(), server.port]))
    told.rename(home / f"{name}.listens")
    while not server.taken:
        time.sleep(0.2)
    (home / f"{name}.json").write_text(json.dumps(server.taken[0]))
    os._exit(0)


if __name__ == "__main__":
    main()
