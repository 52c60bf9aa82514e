"""The streams on which Slurm serves PMI to a task: the host has one end of each, and the task's command the other.

With `srun --mpi=pmi2` there is one, which the command inherits. With `srun --mpi=pmix` each process of MPI connects to
a port of the host's loopback interface. For the command it is a port of this guest's, where we accept the connections.
"""

from __future__ import annotations

import os
import re
import select
import socket

LARGEST_READ = 1 << 13
MOST_STREAMS = 64  # STREAMS in spank/streams.c; further connections wait
INHERITED = 0  # the number of the stream of PMI-2
PMIX_SERVER = re.compile(rb"(tcp4://127\.0\.0\.1:)[0-9]+")


class PmiStream:
    """This process's end of one stream. `fd` is its descriptor, or -1 once it is closed."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.host_ended = False
        self._waiting = bytearray()  # for the command
        os.set_blocking(fd, False)

    @property
    def events(self) -> int:
        """What poll(2) should watch the descriptor for."""
        return select.POLLIN | (select.POLLOUT if self._waiting else 0)

    def take(self, data: bytes) -> None:
        """Pass on what the host has sent; nothing is its end."""
        self._waiting += data
        self.host_ended = self.host_ended or not data

    def carry(self) -> bytes:
        """Write what can be written. Returns what the command has sent since then. At the end of either side this end
        is closed. Never blocks."""
        try:
            while self._waiting:
                del self._waiting[: os.write(self.fd, self._waiting[:LARGEST_READ])]
        except BlockingIOError:
            pass
        except OSError:
            self._waiting.clear()  # nobody reads it
        try:
            data = os.read(self.fd, LARGEST_READ)
        except BlockingIOError:
            data = b""
            if self.host_ended and not self._waiting:
                self.close()
        except OSError:
            data = b""
            self.close()
        else:
            if not data:
                self.close()
        return data

    def close(self) -> None:
        """Close this end; again is success."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class PmiStreams:
    """Those of one task. A stream has a number: its frames begin with it. Both sides say its end, and then the number
    may stand for another one."""

    def __init__(self) -> None:
        self._streams: dict[int, PmiStream] = {}
        self._server: socket.socket | None = None

    def inherit(self, environment: dict[bytes, bytes]) -> int:
        """Make the stream of PMI-2. Returns the descriptor that the command is to inherit."""
        ours, theirs = (end.detach() for end in socket.socketpair())
        self._streams[INHERITED] = PmiStream(ours)
        environment[b"PMI_FD"] = b"%d" % theirs
        return theirs

    def serve(self, environment: dict[bytes, bytes]) -> None:
        """Accept the connections of PMIx if the environment says where the host serves it."""
        servers = [name for name in environment if name.startswith(b"PMIX_SERVER_URI")]
        if not any(PMIX_SERVER.search(environment[name]) for name in servers):
            return
        self._server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._server.bind(("127.0.0.1", 0))
        self._server.listen(MOST_STREAMS)
        self._server.setblocking(False)
        port = b"%d" % self._server.getsockname()[1]
        for name in servers:
            environment[name] = PMIX_SERVER.sub(lambda found: found[1] + port, environment[name])
        # The other modules for data share files with the host, and say that they find none.
        environment[b"PMIX_GDS_MODULE"] = b"hash"
        environment.setdefault(b"PMIX_MCA_gds", b"hash")

    @property
    def watched(self) -> dict[int, int]:
        """What poll(2) should watch."""
        found = {stream.fd: stream.events for stream in self._streams.values() if stream.fd >= 0}
        if self._server is not None and len(self._streams) < MOST_STREAMS:
            found[self._server.fileno()] = select.POLLIN
        return found

    def take(self, frame: bytes) -> None:
        """Pass on what the host has sent."""
        if (stream := self._streams.get(frame[0])) is not None:
            stream.take(frame[1:])

    def carry(self) -> list[bytes]:
        """Accept connections, and write what can be written. Returns what is to be sent to the host."""
        frames = []
        while self._server is not None and len(self._streams) < MOST_STREAMS:
            try:
                connection, _ = self._server.accept()
            except OSError:
                break
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            free = next(number for number in range(INHERITED + 1, MOST_STREAMS + 1) if number not in self._streams)
            self._streams[free] = PmiStream(connection.detach())
        for number, stream in list(self._streams.items()):
            if stream.fd >= 0:
                if data := stream.carry():
                    frames.append(bytes((number,)) + data)
                if stream.fd < 0:
                    frames.append(bytes((number,)))
            if stream.fd < 0 and stream.host_ended:
                del self._streams[number]
        return frames

    def close(self) -> None:
        """Close all."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        if self._server is not None:
            self._server.close()
