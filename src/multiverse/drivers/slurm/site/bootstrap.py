"""What a guest needs to become a node: its Slurm configuration, the munge key, munged and slurmd."""

from __future__ import annotations

import platform
import socket
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import structlog

from multiverse.config import Settings
from multiverse.core.errors import Broken, MultiverseError
from multiverse.core.model import Daemon, GuestFile, NodeBootstrap, NodeSpec
from multiverse.drivers.slurm.site import conf, guest_scripts, slurm_user
from multiverse.drivers.slurm.site.conf_hash import with_hash_of
from multiverse.drivers.slurm.site.gate import MOVED_FROM
from multiverse.guest.protocol import USER_ADDED

log = structlog.get_logger()

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
_SLURMD_CONF = "/etc/slurm/multiverse-slurmd.conf"
_SLURM_CONF = "/etc/slurm/slurm.conf"
_STEPD = "/etc/slurm/multiverse-slurmstepd"
_START_STEPD = f"""\
#!/bin/sh
# slurmd gives each job the path of its own slurm.conf, which must not name this node. This one names it (decision 83).
SLURM_CONF={_SLURM_CONF} exec /usr/sbin/slurmstepd "$@"
""".encode()


def read(path: Path) -> str:
    """The text of a configuration file and of the files that it includes. `Broken` if one cannot be read."""
    try:
        text = path.read_text()
    except OSError as error:
        raise Broken(f"cannot read {path}: {error.strerror}", hint="set slurm.conf in the settings") from error
    return text + "".join("\n" + read(path.parent / name) for name in conf.included(text))


def _as_slurm_reads_it(path: Path, directory: Path) -> bytes:
    """The same in Slurm's order: a file stands behind the line that includes it. Names are relative to `directory`."""
    lines = path.read_bytes().splitlines(keepends=True)
    found = ((line, conf.included(line.decode(errors="replace"))) for line in lines)
    return b"".join(
        line + b"".join(_as_slurm_reads_it(directory / name, directory) for name in names) for line, names in found
    )


def slurm_uid(settings: Settings) -> int | None:
    """The uid of slurmctld's user, who writes hints; None, with a warning in the log, if it cannot be told. Blocks
    while the name service answers."""
    try:
        return slurm_user.of(read(settings.slurm.conf)).uid
    except MultiverseError as error:
        log.warning("SlurmUser unknown", reason=str(error))
        return None


def _optional(path: Path) -> str:
    """The text of a configuration file; nothing if there is no such file. `Broken` if it cannot be read."""
    return read(path) if path.exists() else ""


def bootstrap(settings: Settings, node: NodeSpec) -> NodeBootstrap:
    """Files, directories, daemons and users for one VM. Blocks: reads the site's slurm.conf and munge key, and at first
    asks the name service for the addresses of slurmctld and for its user."""
    text = read(settings.slurm.conf)
    owner = slurm_user.of(text)
    moved = (MOVED_FROM + one.partition for one in settings.overflow)  # jobs of these partitions ask for it
    line = conf.node_conf(node.size, (settings.slurm.node_feature, *node.features, *moved), node.sockets)
    argv = ("/usr/sbin/slurmd", "-D", "-Z", "-N", node.name, "-f", _SLURMD_CONF, "-d", _STEPD, "--conf", line)
    return NodeBootstrap(
        files=tuple(_files(settings, text, node)),
        directories=_DIRECTORIES,
        daemons=(_munged(node), Daemon("slurmd", argv)),
        users=(owner,) if owner.uid else (),
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


def controllers(settings: Settings, text: str) -> list[conf.Slurmctld]:
    """Every slurmctld of this slurm.conf, the primary first, with the address at which guests reach it.

    That is the one of the settings; or else the gateway's, of the only slurmctld or of the one on this machine; or else
    the one in slurm.conf, as a number if this machine can tell it, because guests have no name service.
    """
    given = [address.strip() for address in settings.slurm.controller_address.split(",")]
    found = conf.controllers(text) or [conf.Slurmctld("slurmctld", "")]
    here, named = {platform.node(), platform.node().partition(".")[0]}, dict(settings.network.hosts)

    def address_of(position: int, one: conf.Slurmctld) -> str:
        if position < len(given) and given[position]:
            return given[position]
        if len(found) == 1 or not here.isdisjoint(one.name.split(",")):
            return settings.network.gateway
        return named.get(one.name) or _resolved(one.address or one.name)

    return [conf.Slurmctld(one.name, address_of(position, one)) for position, one in enumerate(found)]


def databases(settings: Settings, text: str, slurmctlds: Sequence[conf.Slurmctld]) -> dict[str, str]:
    """Where guests reach slurmdbd and its backup, by their keys in slurm.conf. What this machine's own names are, and
    localhost, is slurmctld's machine."""
    known = dict(settings.network.hosts) | {one.name: one.address for one in slurmctlds}
    found = {key: known.get(name) or _resolved(name) for key, name in conf.databases(text).items()}
    own = ("localhost", "127.", "::1")
    return {key: slurmctlds[0].address if address.startswith(own) else address for key, address in found.items()}


def _resolved(name: str) -> str:
    try:
        return _address(name)
    except OSError as error:
        log.warning("a machine of slurm.conf has no known address", name=name, reason=str(error))
        return name  # the image may know the name


@lru_cache(maxsize=64)
def _address(name: str) -> str:
    """Kept for this process, because each VM asks; errors are not kept."""
    return socket.gethostbyname(name)


def _files(settings: Settings, text: str, node: NodeSpec) -> Iterator[GuestFile]:
    slurm = settings.slurm
    own = dict(_replacements(slurm.guest_conf))
    of_site = _optional(slurm.conf.with_name("cgroup.conf"))
    cgroup = own.get("cgroup.conf", conf.cgroup_for_guest(text, of_site).encode())
    limited = conf.limits_memory(cgroup.decode(errors="replace"))
    slurmctlds = controllers(settings, text)
    run = dict(guest_scripts.programs(text, USER_ADDED if node.spare else ""))
    yield from run.values()
    named = {key: file.path for key, file in run.items()}
    derived = {
        "slurm.conf": conf.for_guest(
            text, slurmctlds, named, databases=databases(settings, text, slurmctlds), memory_limited=limited
        ).encode(),
        "cgroup.conf": cgroup,
    }
    files = derived | own
    # slurmd, which declares its own node itself, ends if its slurm.conf names it, too. What a job runs needs both.
    own_conf = files.pop("slurm.conf") + b"\n" + conf.addresses(node.peers).encode()
    yield GuestFile(_SLURMD_CONF, with_hash_of(own_conf, _as_slurm_reads_it(slurm.conf, slurm.conf.parent)))
    itself = (node.name, node.address.partition("/")[0])
    yield GuestFile(_SLURM_CONF, f"Include {_SLURMD_CONF}\n{conf.addresses([itself])}".encode())
    yield GuestFile(_STEPD, _START_STEPD, 0o755)
    for name, content in sorted(files.items()):
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
