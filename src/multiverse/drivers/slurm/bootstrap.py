"""What a guest is given to become a node: a configuration of its own, the munge key, munged and slurmd."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from multiverse.config import Settings
from multiverse.core.errors import Broken
from multiverse.core.model import Daemon, GuestFile, NodeBootstrap, NodeSpec
from multiverse.drivers.slurm import conf
from multiverse.guest.protocol import INTRODUCED

_DIRECTORIES = (
    ("/etc/munge", "munge", 0o700),
    ("/run/munge", "munge", 0o755),
    ("/var/lib/munge", "munge", 0o711),
    ("/var/log/munge", "munge", 0o700),
    ("/etc/slurm", "root", 0o755),
    ("/var/spool/slurmd", "root", 0o755),
    ("/sys/fs/cgroup/system.slice", "root", 0o755),  # cgroup/v2 makes its scope there, systemd or not
)
_SOCKET = "/run/munge/munge.socket.2"
_PROLOG = "/etc/slurm/multiverse-prolog"
_WAIT = f"""\
#!/bin/sh
# A job that took this node as it was submitted waits here until its user is known.
read -r _ < {INTRODUCED}
""".encode()


def read(path: Path) -> str:
    """A configuration file with what it includes. `Broken` if it cannot be read."""
    try:
        text = path.read_text()
    except OSError as error:
        raise Broken(f"cannot read {path}: {error.strerror}", hint="set slurm.conf in the settings") from error
    return text + "".join("\n" + read(path.parent / name) for name in conf.included(text))


def bootstrap(settings: Settings, node: NodeSpec) -> NodeBootstrap:
    """Files, directories and daemons for one VM. Reads the site's slurm.conf and munge key: blocks briefly."""
    line = conf.node_conf(node.size, (settings.slurm.node_feature, *node.features))
    slurmd = Daemon(
        "slurmd", ("/usr/sbin/slurmd", "-D", "-Z", "-N", node.name, "-f", "/etc/slurm/slurm.conf", "--conf", line)
    )
    return NodeBootstrap(
        files=tuple(_files(settings, spare=node.spare)), directories=_DIRECTORIES, daemons=(_munged(node), slurmd)
    )


def _munged(node: NodeSpec) -> Daemon:
    """It holds up slurmd, which waits for a second if it is not there: so it is spared what a node has no use for,
    more threads, a look at the name service for its own address, and reading all groups (measured: 0.1 s)."""
    spared = ("--num-threads=1", f"--origin={node.address.partition('/')[0]}", "--group-update-time=-1")
    return Daemon("munged", ("/usr/sbin/munged", "--foreground", *spared), user="munge", ready_path=_SOCKET)


def may_be_offered(settings: Settings, node: NodeSpec) -> bool:
    """Whether a job may take this spare by itself: its node keeps it waiting until its user is introduced, which it
    does not with a slurm.conf of the site's own; nobody else asks who that is before; and Slurm gives no job more CPUs
    for its memory than it asked for, which would not fit any more."""
    own, text = settings.slurm.guest_conf, read(settings.slurm.conf)
    waits = own is None or not (own / "slurm.conf").is_file()
    known_before = "disable_send_gids" not in conf.value(text, "LaunchParameters").lower()
    most = conf.value(text, "MaxMemPerCPU")
    return waits and known_before and (not most.isdigit() or node.size.memory <= int(most or 0) * node.size.cpus)


def _files(settings: Settings, *, spare: bool) -> Iterator[GuestFile]:
    slurm = settings.slurm
    address = slurm.controller_address or settings.network.gateway
    derived = {
        "slurm.conf": conf.for_guest(read(slurm.conf), address, _PROLOG if spare else "").encode(),
        "cgroup.conf": conf.CGROUP.encode(),
    }
    if spare:
        yield GuestFile(_PROLOG, _WAIT, 0o755)
    for name, content in sorted((derived | dict(_replacements(slurm.guest_conf))).items()):
        yield GuestFile(f"/etc/slurm/{name}", content)
    try:
        key = slurm.munge_key.read_bytes()
    except OSError as error:
        raise Broken(f"cannot read {slurm.munge_key}: {error.strerror}", hint="set slurm.munge_key") from error
    yield GuestFile("/etc/munge/munge.key", key, 0o400, "munge")


def _replacements(directory: Path | None) -> Iterable[tuple[str, bytes]]:
    """A site's own files for guests; they replace the derived ones of the same name."""
    if directory is None:
        return ()
    return ((path.name, path.read_bytes()) for path in sorted(directory.iterdir()) if path.is_file())
