"""What makes a clone itself: random state, names, files, users, mounts; and facts by which clones are told apart."""

# ruff: noqa: PTH101, PTH108, PTH112, PTH120, PTH208

from __future__ import annotations

import base64
import os
import socket
import time
from typing import Any

from multiverse.guest.agent.network import current_address, interface, set_hosts
from multiverse.guest.agent.resources import count_cpus, usable_memory
from multiverse.guest.agent.system import (
    DAEMON_TIMEOUT,
    GuestAgentError,
    add_entropy,
    load_on_demand,
    make_directory,
    mount,
    owner_ids,
    read,
    run,
    suppress,
    write,
)


class StageTimer:
    """Measures stages that follow each other: `stages` are pairs of name and seconds."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, float]] = []
        self._last = time.monotonic()

    def __call__(self, name: str) -> None:
        now = time.monotonic()
        self.stages.append((name, round(now - self._last, 6)))
        self._last = now

    def elapsed(self) -> float:
        """Seconds since the last stage ended."""
        return time.monotonic() - self._last


def set_random_state(seed: str) -> None:
    add_entropy(base64.b64decode(seed))


def set_names(identity: dict[str, Any], others: list[list[str]]) -> None:
    """Set machine-id and host name, and write the names of the node, its peers and other VMs to /etc/hosts."""
    write("/etc/machine-id", identity["machine_id"] + "\n", 0o444)
    set_host_names(identity["hostname"], identity["address"], identity["peers"], others)


def set_host_names(hostname: str, address: str, peers: list[list[str]], others: list[list[str]]) -> None:
    """Set the host name, and write /etc/hosts with its address, its peers and other VMs."""
    socket.sethostname(hostname)
    write("/etc/hostname", hostname + "\n")
    set_hosts(hostname, address.partition("/")[0], peers, others)


def write_node_files(bootstrap: dict[str, Any], anew: bool = False) -> None:
    """`anew`: leave the files that are there to processes that have them open, and may be frozen while they read."""
    for path, owner, mode in bootstrap["directories"]:
        make_directory(path)
        os.chown(path, *owner_ids(owner))
        os.chmod(path, mode)
    for file in bootstrap["files"]:
        make_directory(os.path.dirname(file["path"]))
        if anew:
            with suppress(FileNotFoundError):
                os.unlink(file["path"])
        write(file["path"], base64.b64decode(file["content"]), file["mode"], owner_ids(file["owner"]))


def add_users(users: list[dict[str, Any]]) -> None:
    """Add passwd and group entries for `users`, replacing entries of the same user name. They precede an entry of the
    same number, which the image may have, or the user under an earlier name. A group of the image with the same number
    keeps its name and gets the user as a member."""
    passwd = read("/etc/passwd").splitlines()
    groups = [line.split(":") for line in read("/etc/group").splitlines() if line.count(":") >= 3]
    for user in users:
        name = user["name"]
        passwd = [line for line in passwd if not line.startswith(f"{name}:")]
        passwd.insert(0, f"{name}:*:{user['uid']}:{user['gid']}::{user['home']}:{user['shell']}")
        for group, gid in user["groups"]:
            _add_to_group(groups, group, str(gid), name)
    write("/etc/passwd", "".join(f"{line}\n" for line in passwd))
    write("/etc/group", "".join(":".join(entry) + "\n" for entry in groups))


def _add_to_group(groups: list[list[str]], group: str, gid: str, user: str) -> None:
    entry = next((g for g in groups if g[2] == gid), None)
    if entry is None:
        entry = [group, "*", gid, ""]
        groups.append(entry)
    members = [m for m in entry[3].split(",") if m]
    if user not in members:
        entry[3] = ",".join([*members, user])


# Options of mount(8) that are flags of mount(2), from <linux/mount.h>.
MOUNT_FLAGS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "sync": 16, "dirsync": 128, "noatime": 1024,
               "nodiratime": 2048, "relatime": 1 << 21, "strictatime": 1 << 24}  # fmt: skip
# Options of fstab(5) that are for mount(8), not for the kernel.
USERSPACE_OPTIONS = frozenset(
    {"", "rw", "defaults", "_netdev", "auto", "noauto", "nofail", "user", "nouser", "hard", "x-systemd"}
)


def mount_one(source: str, target: str, kind: str, options: str) -> None:
    """Mount a file system, NFSv4 by mount(2), others by mount(8). Fields as in fstab(5). Raises GuestAgentError."""
    make_directory(target)
    if kind == "nfs4":
        _mount_nfs4(source, target, options)
        return
    load_on_demand(True)
    argv = ["/bin/mount", "-t", kind, *(["-o", options] if options else []), "--", source, target]
    if run(argv, DAEMON_TIMEOUT) != 0:
        raise GuestAgentError(f"cannot mount {source} on {target} (type {kind})")


def _mount_nfs4(source: str, target: str, options: str) -> None:
    server, colon, path = source.partition(":")
    if not colon or not path.startswith("/"):
        raise GuestAgentError(f"{source!r} is not an NFS source of the form SERVER:/PATH")
    flags, data = _kernel_options(options)
    try:
        # Bytes, because a string would go through a codec that each clone would have to load.
        address = socket.gethostbyname(server.encode())  # type: ignore[arg-type]
        # The kernel's route to the server determines the client's address. Connecting a UDP socket sends nothing.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 2049))
            client = sock.getsockname()[0]
        given = {o.partition("=")[0] for o in data}
        data += [f"{key}={value}" for key, value in (("addr", address), ("clientaddr", client)) if key not in given]
        mount(source, target, "nfs4", flags, ",".join(data))
    except OSError as error:
        raise GuestAgentError(f"cannot mount {source} on {target}: {error.strerror}") from error


def _kernel_options(options: str) -> tuple[int, list[str]]:
    """The flags of mount(2), and the options that the file system itself gets."""
    flags, data = 0, []
    for option in options.split(","):
        if option in MOUNT_FLAGS:
            flags |= MOUNT_FLAGS[option]
        elif option not in USERSPACE_OPTIONS and not option.startswith("x-"):
            data.append(option)
    return flags, data


SSH = "/etc/ssh"


def clone_facts() -> dict[str, Any]:
    """Facts that distinguish clones, and the size of the VM (`memory` in MiB)."""
    boot_id = read("/proc/sys/kernel/random/boot_id").strip()
    return {"cpus": count_cpus("online"), "memory": usable_memory(), "machine_id": read("/etc/machine-id").strip(),
            "boot_id": boot_id, "random": os.urandom(8).hex()}  # fmt: skip


def current_facts() -> dict[str, Any]:
    """Current facts: names on the network, the ends of the public host keys, the time in milliseconds."""
    name = interface()
    files = sorted(os.listdir(SSH)) if os.path.isdir(SSH) else []
    keys = [read(f"{SSH}/{file}").split()[1][-20:] for file in files if file.endswith("_key.pub")]
    return {"hostname": socket.gethostname(), "mac": read(f"/sys/class/net/{name}/address").strip(),
            "address": current_address(name), "host_keys": " ".join(keys),
            "now": time.time_ns() // 1_000_000, "fresh": os.urandom(8).hex()}  # fmt: skip
