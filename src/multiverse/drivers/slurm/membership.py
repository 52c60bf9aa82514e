"""What a guest is given to become a node: a configuration of its own, the munge key, munged and slurmd."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from multiverse.config import Settings
from multiverse.core.errors import Broken
from multiverse.core.model import Attempt, Daemon, GuestFile, Membership, Vm
from multiverse.core.pool import node_features
from multiverse.drivers.slurm import conf

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


def read(path: Path) -> str:
    """A configuration file with what it includes. `Broken` if it cannot be read."""
    try:
        text = path.read_text()
    except OSError as error:
        raise Broken(f"cannot read {path}: {error.strerror}", hint="set slurm.conf in the settings") from error
    return text + "".join("\n" + read(path.parent / name) for name in conf.included(text))


def membership(settings: Settings, vm: Vm, attempt: Attempt | None) -> Membership:
    """Files, directories and daemons for one VM. Reads the site's slurm.conf and munge key: blocks briefly."""
    node = conf.node_conf(vm.told, (settings.slurm.node_feature, *node_features(vm, attempt)))
    slurmd = Daemon(
        "slurmd", ("/usr/sbin/slurmd", "-D", "-Z", "-N", vm.name, "-f", "/etc/slurm/slurm.conf", "--conf", node)
    )
    return Membership(files=tuple(_files(settings)), directories=_DIRECTORIES, daemons=(_munged(vm), slurmd))


def _munged(vm: Vm) -> Daemon:
    """It holds up slurmd, which waits for a second if it is not there: so it is spared what a node has no use for,
    more threads, a look at the name service for its own address, and reading all groups (measured: 0.1 s)."""
    spared = ("--num-threads=1", f"--origin={vm.address.partition('/')[0]}", "--group-update-time=-1")
    return Daemon("munged", ("/usr/sbin/munged", "--foreground", *spared), user="munge", ready_path=_SOCKET)


def _files(settings: Settings) -> Iterator[GuestFile]:
    slurm = settings.slurm
    address = slurm.controller_address or settings.network.gateway
    derived = {
        "slurm.conf": conf.for_guest(read(slurm.conf), address).encode(),
        "cgroup.conf": conf.CGROUP.encode(),
    }
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
