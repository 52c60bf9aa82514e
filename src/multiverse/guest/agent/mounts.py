"""The file systems of the cluster that a clone mounts."""

from __future__ import annotations

import socket

from multiverse.guest.agent.contract import DAEMON_TIMEOUT, GuestAgentError
from multiverse.guest.agent.files import make_directory
from multiverse.guest.agent.modules import load_on_demand
from multiverse.guest.agent.processes import run
from multiverse.guest.agent.syscalls import mount

# Options of mount(8) that are flags of mount(2), from <linux/mount.h>.
MOUNT_FLAGS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "sync": 16, "dirsync": 128, "noatime": 1024,
               "nodiratime": 2048, "relatime": 1 << 21, "strictatime": 1 << 24}  # fmt: skip
# Options of fstab(5) that are for mount(8), not for the kernel.
USERSPACE_OPTIONS = frozenset(
    {"", "rw", "defaults", "_netdev", "auto", "noauto", "nofail", "user", "nouser", "hard", "x-systemd"}
)


def mount_one(source: str, target: str, kind: str, options: str) -> None:
    """Mount a file system; the arguments are the fields of fstab(5). Raises GuestAgentError.

    NFSv4 is mounted by mount(2) without a helper program. Other types are mounted by mount(8).
    """
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
