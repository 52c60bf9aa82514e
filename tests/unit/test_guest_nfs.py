"""What a guest that goes on from a checkpoint tells NFS servers, and which of its connections it ends."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from multiverse.guest.agent import connections, nfs
from multiverse.guest.agent.system import GuestAgentError

MOUNTS = """\
10.0.0.1:/home /home nfs4 rw,vers=4.2,proto=tcp,port={port},clientaddr=10.0.0.9,addr=127.0.0.1 0 0
10.0.0.1:/data /data nfs4 rw,vers=4.2,proto=tcp,port={port},addr=127.0.0.1 0 0
10.0.0.2:/old /old nfs4 rw,vers=4.0,addr=10.0.0.2 0 0
10.0.0.3:/older /older nfs rw,vers=3,addr=10.0.0.3 0 0
/dev/vda / ext4 rw 0 0
"""


@contextmanager
def server(statuses: tuple[int, ...]) -> Iterator[tuple[int, list[bytes]]]:
    """An NFS server that answers calls with these statuses, and keeps what it was told."""
    listening = socket.create_server(("127.0.0.1", 0))
    told: list[bytes] = []

    def serve() -> None:
        for status in statuses:
            if not told or status < 0:
                connection, _ = listening.accept()
            (length,) = struct.unpack(">I", connection.recv(4))
            told.append(connection.recv(length & 0x7FFFFFFF, socket.MSG_WAITALL))
            (number,) = struct.unpack_from(">I", told[-1])
            result = struct.pack(">III", 0, 42, 0) + struct.pack(">QI", 77, 5)
            answer = struct.pack(">6I", number, 1, 0, 0, 0, 0) + struct.pack(">II", status, 0)
            answer += struct.pack(">I", 1) + result[4:]
            connection.sendall(struct.pack(">I", 1 << 31 | len(answer)) + answer)
        connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listening.getsockname()[1], told
    thread.join(10)
    listening.close()


def test_each_server_with_sessions_is_told_once_that_this_client_began_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with server((0, 0)) as (port, told):
        monkeypatch.setattr(nfs, "read", lambda path: MOUNTS.format(port=port) if path == "/proc/mounts" else "")
        nfs.forget_client()
    exchange, create = told
    assert f"Linux NFSv4.2 {os.uname().nodename}".encode() in exchange
    assert struct.pack(">III", 2, 1, nfs.EXCHANGE_ID) in exchange
    assert struct.pack(">III", 2, 1, nfs.CREATE_SESSION) + struct.pack(">QI", 77, 5) in create


def test_a_server_that_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with server((10017,)) as (port, _):
        monkeypatch.setattr(nfs, "read", lambda path: MOUNTS.format(port=port) if path == "/proc/mounts" else "")
        with pytest.raises(GuestAgentError, match="does not forget this VM: status 10017 of operation 42"):
            nfs.forget_client()


def test_a_unique_name_of_the_client_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nfs, "read", lambda path: "abc\n" if path.endswith("identifier") else "(null)\n")
    assert nfs.kernel_client(1).startswith(b"Linux NFSv4.1 abc/")


TABLE = """\
  sl  local_address rem_address   st tx_queue
   0: 00000000:1A85 00000000:0000 0A 00000000:00000000
   1: 0900000A:033E 0100000A:0801 01 00000000:00000000
   2: 0900000A:8000 0900000A:9000 01 00000000:00000000
   3: 0900000A:9000 0900000A:8000 01 00000000:00000000
   4: 0100007F:8001 0100007F:8002 01 00000000:00000000
   5: 0100007F:8002 0100007F:8001 01 00000000:00000000
"""


def test_connections_with_other_machines_are_found(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text(TABLE)
    ends = ((socket.inet_aton("10.0.0.9"), 830), (socket.inet_aton("10.0.0.1"), 2049))
    assert connections.connections_in(str(table)) == [ends]
    request = connections.destruction(socket.AF_INET, *ends)
    assert struct.unpack_from("=IH", request) == (len(request), connections.SOCK_DESTROY)
    assert struct.pack(">HH", 830, 2049) + socket.inet_aton("10.0.0.9") in request
