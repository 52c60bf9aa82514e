"""The steps by which a clone takes its identity. Each gets its part of the message from the host."""

# ruff: noqa: PTH101, PTH120

from __future__ import annotations

import base64
import os
import socket
import time
from typing import Any

from multiverse.guest.agent.files import make_directory, owner_ids, write
from multiverse.guest.agent.network import set_hosts
from multiverse.guest.agent.syscalls import add_entropy


class StageTimer:
    """Measures stages that follow each other; `stages` are pairs of name and seconds."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, float]] = []
        self._last = time.monotonic()

    def __call__(self, name: str) -> None:
        """End the stage `name`; the next one begins."""
        now = time.monotonic()
        self.stages.append((name, round(now - self._last, 6)))
        self._last = now

    def elapsed(self) -> float:
        """Seconds since the last stage ended, or since the start."""
        return time.monotonic() - self._last


def set_random_state(seed: str) -> None:
    """Give the kernel random bytes of this clone's own, in base64."""
    add_entropy(base64.b64decode(seed))


def set_names(identity: dict[str, Any], others: list[list[str]]) -> None:
    """Set machine-id and host name, and write the names of the node, its peers and other VMs to /etc/hosts."""
    write("/etc/machine-id", identity["machine_id"] + "\n", 0o444)
    set_host_names(identity["hostname"], identity["address"], identity["peers"], others)


def set_host_names(hostname: str, address: str, peers: list[list[str]], others: list[list[str]]) -> None:
    """Set the host name, and write it with its address (with prefix length), the peers' names and those of other VMs to
    /etc/hosts."""
    socket.sethostname(hostname)
    write("/etc/hostname", hostname + "\n")
    set_hosts(hostname, address.partition("/")[0], peers, others)


def write_node_files(bootstrap: dict[str, Any]) -> None:
    """Make the directories and files that the daemons of the node need, with their owners and modes."""
    for path, owner, mode in bootstrap["directories"]:
        make_directory(path)
        os.chown(path, *owner_ids(owner))
        os.chmod(path, mode)
    for file in bootstrap["files"]:
        make_directory(os.path.dirname(file["path"]))
        write(file["path"], base64.b64decode(file["content"]), file["mode"], owner_ids(file["owner"]))
