"""What makes NFS servers forget that they know this VM, before it goes on from a checkpoint.

NFS 4.1 and later number the requests of a session, and a server answers a number that it has seen by its earlier
answer (RFC 8881, 2.10.6). The VM that was lost has used numbers that the restored one does not know of, and would use
again: it would take answers to the requests of the other for its own. A client that says that it has been started anew,
by another verifier, loses its sessions and all that it has open (RFC 8881, 2.4.3). This is said here in the name of the
kernel's client, which then finds that its session is gone, and opens its files anew by itself.
"""

from __future__ import annotations

import os
import socket
import struct

from multiverse.guest.agent.system import GuestAgentError, read, suppress

NFS_PROGRAM, NFS_VERSION, NFS_COMPOUND, CALLBACK_PROGRAM = 100003, 4, 1, 0x40000000
EXCHANGE_ID, CREATE_SESSION = 42, 43  # RFC 8881, 16.2.3
AUTH_NONE, AUTH_SYS = 0, 1
NFS_CHANNEL = struct.pack(">6II", 0, 4096, 4096, 512, 8, 1, 0)  # attributes of a session that is never used
NFS_PORT = 2049
NFS_TIMEOUT = 20.0  # seconds for each server


def forget_client() -> None:
    """Let all NFS servers of this VM's mounts forget its sessions. Raises GuestAgentError if one does not answer."""
    for address, port, minor in sorted(mounted_servers()):
        try:
            ServerCalls(address, port, minor).say_restarted()
        except (OSError, struct.error) as error:
            raise GuestAgentError(f"the NFS server {address} does not forget this VM: {error}") from error


def mounted_servers() -> set[tuple[str, int, int]]:
    """Address, port and minor version of the servers whose mounts have sessions."""
    found = set()
    for line in read("/proc/mounts").splitlines():
        _, _, kind, options, *_ = line.split()
        values = dict(each.partition("=")[::2] for each in options.split(","))
        major, _, minor = values.get("vers", "").partition(".")
        if kind == "nfs4" and major == "4" and minor.isdigit() and int(minor):
            found.add((values["addr"], int(values.get("port", NFS_PORT)), int(minor)))
    return found


def kernel_client(minor: int) -> bytes:
    """How the kernel's client calls itself (nfs4_init_uniform_client_string in fs/nfs/nfs4proc.c)."""
    unique = ""
    for path in ("/sys/fs/nfs/net/nfs_client/identifier", "/sys/module/nfs/parameters/nfs4_unique_id"):
        with suppress(OSError):
            unique = unique or read(path).strip().replace("(null)", "")
    return f"Linux NFSv4.{minor} {unique and unique + '/'}{os.uname().nodename}".encode()


class ServerCalls:
    """A connection to a server, as root of this VM, like the kernel's."""

    def __init__(self, address: str, port: int, minor: int) -> None:
        self.minor, self.number = minor, 1
        self.sock = socket.create_connection((address, port), NFS_TIMEOUT)

    def say_restarted(self) -> None:
        with self.sock:
            verifier = os.urandom(8)
            arguments = verifier + opaque(kernel_client(self.minor)) + struct.pack(">III", 0, 0, 0)
            client, sequence = struct.unpack_from(">QI", self.call(EXCHANGE_ID, arguments))
            callbacks = struct.pack(">III", CALLBACK_PROGRAM, 1, AUTH_NONE)
            self.call(CREATE_SESSION, struct.pack(">QII", client, sequence, 0) + NFS_CHANNEL * 2 + callbacks)

    def call(self, operation: int, arguments: bytes) -> bytes:
        """The result of one operation. Raises OSError if the server refuses it."""
        self.number += 1
        credential = struct.pack(">I", 0) + opaque(os.uname().nodename.encode()) + struct.pack(">III", 0, 0, 0)
        header = struct.pack(">6I", self.number, 0, 2, NFS_PROGRAM, NFS_VERSION, NFS_COMPOUND)
        header += struct.pack(">I", AUTH_SYS) + opaque(credential) + struct.pack(">II", AUTH_NONE, 0)
        compound = opaque(b"") + struct.pack(">III", self.minor, 1, operation)
        message = header + compound + arguments
        self.sock.sendall(struct.pack(">I", 1 << 31 | len(message)) + message)
        (length,) = struct.unpack(">I", self.take(4))
        answer = self.take(length & ~(1 << 31))
        # The call's number, that it is a reply, and accepted; no verifier; then its status and that of the compound.
        number, _, denied, _, skipped, accepted = struct.unpack_from(">6I", answer)
        if number != self.number or denied or skipped or accepted:
            raise OSError(f"it refused the call: {denied}, {accepted}")
        status, tag = struct.unpack_from(">II", answer, 24)
        if status:
            raise OSError(f"status {status} of operation {operation}")
        return answer[32 + -(-tag // 4) * 4 + 12 :]

    def take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.sock.recv(size - len(data))
            if not more:
                raise OSError("it closed the connection")
            data += more
        return data


def opaque(data: bytes) -> bytes:
    """Bytes of any number, as XDR has them (RFC 4506, 4.10)."""
    return struct.pack(">I", len(data)) + data + bytes(-len(data) % 4)
