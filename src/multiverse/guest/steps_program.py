"""Answers slurmd, in a stand-in for the node of a VM that sleeps, in place of the slurmstepds of its job's steps, which
sleep with the VM. It uses the standard library alone.

slurmd registers the steps whose sockets are in its spool directory, and asks them to suspend, resume or end their
processes (`stepd_api.c`). Once they are to end, they are gone: so is the job, and the VM is not woken for that. The
arguments are the directory, the node's name, and a file with the names of the steps (JOB.STEP).
"""

from __future__ import annotations

import select
import socket
import struct
import sys
import threading
from pathlib import Path

# The requests (step_msg_t in stepd_api.h), the same from Slurm 22.05 to 25.11.
SIGNAL, STATE, SUSPEND, RESUME, TERMINATE = 4, 5, 10, 11, 12
RUNNING = 2  # SLURMSTEPD_STEP_RUNNING
WITHOUT_CORES = 40 << 8  # from this protocol version on (Slurm 23.11) requests to suspend name no cores
DEADLY = (9, 15)  # SIGKILL, SIGTERM


def main() -> None:
    directory, node, names = sys.argv[1:]
    directory = directory.replace("%n", node)
    Path(directory).mkdir(parents=True, exist_ok=True)
    poller, listening = select.poll(), dict[int, socket.socket]()
    for name in Path(names).read_text().split():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = f"{directory}/{node}_{name}"
        Path(path).unlink(missing_ok=True)
        sock.bind(path)
        sock.listen(16)
        listening[sock.fileno()] = sock
        poller.register(sock.fileno(), select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            connection, _ = listening[fd].accept()
            path = listening[fd].getsockname()
            threading.Thread(target=serve, args=(connection, path), daemon=True).start()


def serve(connection: socket.socket, path: str) -> None:
    with connection:
        try:
            version = number(connection)
            connection.sendall(struct.pack("i", version))
            while answer(connection, path, version):
                pass
        except (OSError, EOFError):
            pass


def answer(connection: socket.socket, path: str, version: int) -> bool:
    """Answer one request. False if it is none that a step that sleeps can answer."""
    request = number(connection)
    if request == STATE:
        connection.sendall(struct.pack("i", RUNNING))
        return True
    if request == SIGNAL:
        signal, _, length = (number(connection) for _ in range(3))
        take(connection, length)
        number(connection)  # who sends it
        if signal in DEADLY:
            end(path)
    elif request in (SUSPEND, RESUME):
        if version < WITHOUT_CORES:
            take(connection, 2)
    elif request == TERMINATE:
        end(path)
    else:
        return False
    connection.sendall(struct.pack("ii", 0, 0))
    return True


def end(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def number(connection: socket.socket) -> int:
    (found,) = struct.unpack("i", take(connection, 4))
    return int(found)


def take(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


if __name__ == "__main__":
    main()
