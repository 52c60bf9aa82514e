"""What a guest needs to become a node: its Slurm configuration, the munge key, munged and slurmd."""

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
    ("/sys/fs/cgroup/system.slice", "root", 0o755),  # cgroup/v2 creates its scope there, with or without systemd
)
_SOCKET = "/run/munge/munge.socket.2"
_PROLOG = "/etc/slurm/multiverse-prolog"
_WAIT = f"""\
#!/bin/sh
# A job that took this node as it was submitted waits here until the guest knows the job's user.
read -r _ < {INTRODUCED}
""".encode()


def read(path: Path) -> str:
    """The text of a configuration file and of the files that it includes. `Broken` if one cannot be read."""
    try:
        text = path.read_text()
    except OSError as error:
        raise Broken(f"cannot read {path}: {error.strerror}", hint="set slurm.conf in the settings") from error
    return text + "".join("\n" + read(path.parent / name) for name in conf.included(text))


def _optional(path: Path) -> str:
    """The text of a configuration file; nothing if there is no such file. `Broken` if it cannot be read."""
    return read(path) if path.exists() else ""


def bootstrap(settings: Settings, node: NodeSpec) -> NodeBootstrap:
    """Files, directories and daemons for one VM. Blocks briefly: reads the site's slurm.conf and munge key."""
    line = conf.node_conf(node.size, (settings.slurm.node_feature, *node.features))
    slurmd = Daemon(
        "slurmd", ("/usr/sbin/slurmd", "-D", "-Z", "-N", node.name, "-f", "/etc/slurm/slurm.conf", "--conf", line)
    )
    return NodeBootstrap(
        files=tuple(_files(settings, spare=node.spare)), directories=_DIRECTORIES, daemons=(_munged(node), slurmd)
    )


def _munged(node: NodeSpec) -> Daemon:
    """munged without what a node does not need: more threads, a name lookup of its own address, reading all groups.

    That saves 0.1 s (measured). slurmd waits for munged, and for a whole second if the socket is not there yet.
    """
    options = ("--num-threads=1", f"--origin={node.address.partition('/')[0]}", "--group-update-time=-1")
    return Daemon("munged", ("/usr/sbin/munged", "--foreground", *options), user="munge", ready_path=_SOCKET)


def may_be_offered(settings: Settings, node: NodeSpec) -> bool:
    """Whether a job may take this node as it is submitted.

    Three conditions: The guest's prolog makes the job wait until its user was added, which is not so with a slurm.conf
    of the site's own. slurmd does not look up the user before the prolog. And Slurm does not give the job more CPUs
    because of its memory (MaxMemPerCPU): the node would be too small then.
    """
    own, text = settings.slurm.guest_conf, read(settings.slurm.conf)
    has_prolog = own is None or not (own / "slurm.conf").is_file()
    no_lookup = "disable_send_gids" not in conf.value(text, "LaunchParameters").lower()
    limit = conf.value(text, "MaxMemPerCPU")
    return has_prolog and no_lookup and (not limit.isdigit() or node.size.memory <= int(limit) * node.size.cpus)


def _files(settings: Settings, *, spare: bool) -> Iterator[GuestFile]:
    slurm = settings.slurm
    address = slurm.controller_address or settings.network.gateway
    text = read(slurm.conf)
    own = dict(_replacements(slurm.guest_conf))
    of_site = _optional(slurm.conf.with_name("cgroup.conf"))
    cgroup = own.get("cgroup.conf", conf.cgroup_for_guest(text, of_site).encode())
    limited = conf.limits_memory(cgroup.decode(errors="replace"))
    derived = {
        "slurm.conf": conf.for_guest(text, address, _PROLOG if spare else "", memory_limited=limited).encode(),
        "cgroup.conf": cgroup,
    }
    if spare:
        yield GuestFile(_PROLOG, _WAIT, 0o755)
    for name, content in sorted((derived | own).items()):
        yield GuestFile(f"/etc/slurm/{name}", content)
    try:
        key = slurm.munge_key.read_bytes()
    except OSError as error:
        raise Broken(f"cannot read {slurm.munge_key}: {error.strerror}", hint="set slurm.munge_key") from error
    yield GuestFile("/etc/munge/munge.key", key, 0o400, "munge")


def _replacements(directory: Path | None) -> Iterable[tuple[str, bytes]]:
    """The site's own files for guests, which replace derived files of the same name."""
    if directory is None:
        return ()
    return ((path.name, path.read_bytes()) for path in sorted(directory.iterdir()) if path.is_file())
