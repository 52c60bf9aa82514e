"""Slurm's commands in the VM of a job: the host runs them for the processes of a task.

In place of each command lies a program (`guest.slurm_command`) that asks the process that carries its task for a
connection to the host. That one passes the request on; the host makes a connection to this guest's TASKS_PORT for it;
and the process that accepts this one hands it to the former, which hands it to the program. From then on the program
and the host speak with each other alone.
"""

# ruff: noqa: PTH101, PTH108, PTH112, PTH116, PTH120, PTH211

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from multiverse.guest.agent.contract import SOCKETS
from multiverse.guest.agent.files import make_directory, write
from multiverse.guest.agent.syscalls import MNT_DETACH, mount, unmount

MOST_ASKING = 500  # programs of a task that wait for their connections; descriptors are limited
PROGRAM = "/run/multiverse/slurm-command"
PLACES = ("/usr/local/bin", "/usr/bin")  # where an image has commands; they are put into the first one if it has none
MS_BIND = 4096  # <linux/mount.h>


class CommandRequests:
    """The requests of one task's programs, at a socket that its user can connect to. `watched` are the descriptors that
    `attend` should be called for when one of them can be read."""

    def __init__(self, uid: int) -> None:
        self.path = f"{SOCKETS}/{os.getpid()}"
        self.outgoing: list[bytes] = []  # names of requests that the host has to be told
        self._last = 0
        self._asking: dict[bytes, socket.socket] = {}
        self._silent: list[socket.socket] = []  # that have connected and said nothing yet
        make_directory(SOCKETS)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        self._sock.bind(self.path)
        os.chmod(self.path, 0o600)
        os.chown(self.path, uid, -1)
        self._sock.listen(64)
        self._sock.setblocking(False)

    @property
    def watched(self) -> list[int]:
        """See the class."""
        return [sock.fileno() for sock in (self._sock, *self._silent, *self._asking.values())]

    def attend(self) -> None:
        """Accept requests and connections for them, and forget programs that have ended. Never blocks."""
        for sock in list(self._silent):
            self._hear(sock)
        for name, sock in list(self._asking.items()):
            if self._has_ended(sock):
                self.refuse(name)
        while len(self._silent) + len(self._asking) < MOST_ASKING:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            sock.setblocking(False)
            self._silent.append(sock)

    def _hear(self, sock: socket.socket) -> None:
        try:
            data, files, _, _ = socket.recv_fds(sock, 64, 2)
        except BlockingIOError:
            return
        except OSError:
            data, files = b"", []
        self._silent.remove(sock)
        if data and not files:
            self._last += 1
            name = b"%d %d" % (os.getpid(), self._last)
            self._asking[name] = sock
            self.outgoing.append(name)
            return
        asking = self._asking.pop(data, None) if data else None
        try:
            if asking is not None:
                socket.send_fds(asking, [b"connected"], files[:1])
        except OSError:
            pass  # the program has ended
        for each in files:
            os.close(each)
        for one in (sock, asking):
            if one is not None:
                one.close()

    def _has_ended(self, sock: socket.socket) -> bool:
        try:
            return not sock.recv(64)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def refuse(self, name: bytes) -> None:
        """The host makes no connection for this request."""
        if (sock := self._asking.pop(name, None)) is not None:
            sock.close()

    def close(self) -> None:
        """Take no more requests. Programs that wait end with an error."""
        for sock in (self._sock, *self._silent, *self._asking.values()):
            sock.close()
        try:
            os.unlink(self.path)
        except OSError:
            pass


def hand_over(name: bytes, connection: socket.socket) -> None:
    """Give the host's connection to the process that the request `name` came from. Its user describes the name, so it
    is read as numbers only. Raises OSError if nobody waits for it, and ValueError."""
    pid, number = map(int, name.split())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(f"{SOCKETS}/{pid}")
        socket.send_fds(sock, [b"%d %d" % (pid, number)], [connection.fileno()])


def install_commands(commands: dict[str, Any]) -> list[str]:
    """Put the program in the place of each of Slurm's commands: over those that the image or a mounted file system has,
    and otherwise into `directory`, where the host has them, or the first of PLACES. The files of mounted file systems
    stay as they are. Returns what has to be unmounted before those can be."""
    directory = commands["directory"]
    make_directory(os.path.dirname(PROGRAM))
    write(PROGRAM, commands["program"], 0o755)
    covered: list[str] = []
    for name in commands["names"]:
        found = [
            f"{place}/{name}" for place in dict.fromkeys((directory, *PLACES)) if os.path.lexists(f"{place}/{name}")
        ]
        covered += [real for path in found if _cover(real := os.path.realpath(path))]
        if f"{directory}/{name}" not in found and not _link(f"{directory}/{name}") and not found:
            _link(f"{PLACES[0]}/{name}")
    return covered


def uncover(covered: list[str]) -> None:
    """Unmount what `install_commands` has mounted."""
    for path in reversed(covered):
        try:
            unmount(path, MNT_DETACH)
        except OSError:
            continue
    covered.clear()


def _cover(path: str) -> bool:
    try:
        if os.path.realpath(path) != PROGRAM:
            mount(PROGRAM, path, "", MS_BIND, "")
            return True
    except OSError:
        pass
    return False


def _link(path: str) -> bool:
    """Make a link to the program there, unless it would be on a mounted file system, which others may share."""
    parent = os.path.dirname(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    try:
        if os.stat(parent).st_dev != os.stat("/").st_dev:
            return False
        make_directory(os.path.dirname(path))
        os.symlink(PROGRAM, path)
    except OSError as error:
        return error.errno == errno.EEXIST
    return True
