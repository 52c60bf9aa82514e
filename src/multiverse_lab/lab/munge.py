"""munged, which authenticates the messages of Slurm: one for this machine, and one on each bare-metal node."""

from __future__ import annotations

import pwd
import secrets

from multiverse.system import files
from multiverse_lab.lab.layout import Layout
from multiverse_lab.lab.process import DaemonCommand
from multiverse_lab.lab.service import directory


def prepare_munge(where: Layout) -> None:
    """Make munged's directory, and a key if there is none."""
    directory(where.munge, "munge", 0o755)
    where.munge_socket.unlink(missing_ok=True)
    if not where.munge_key.exists():
        write_munge_key(where, secrets.token_bytes(128))


def write_munge_key(where: Layout, key: bytes) -> None:
    """Write the key that all daemons of a cluster share."""
    account = pwd.getpwnam("munge")
    files.replace(where.munge_key, key, mode=0o400, uid=account.pw_uid, gid=account.pw_gid)


def munged_command(where: Layout) -> DaemonCommand:
    """How to run munged as the user munge."""
    argv = [
        "munged",
        "--foreground",
        "--num-threads=4",
        f"--socket={where.munge_socket}",
        f"--key-file={where.munge_key}",
        f"--pid-file={where.munge}/pid",
        f"--log-file={where.munge}/log",
        f"--seed-file={where.munge}/seed",
    ]
    return DaemonCommand(argv, where.log / "munged.log", user="munge")
