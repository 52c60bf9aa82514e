"""Everything that makes a guest a node: its Slurm configuration, the munge key, munged and slurmd."""

from __future__ import annotations

import os
import platform
import pwd
import re
import socket
import subprocess
from binascii import crc_hqx
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import structlog

from multiverse.config import Settings
from multiverse.core.errors import Broken, MultiverseError, Unknown
from multiverse.core.model.identity import Daemon, GuestFile, NodeBootstrap, User
from multiverse.core.model.job import NodeSpec
from multiverse.drivers.slurm.site import conf
from multiverse.drivers.slurm.site.gate import MOVED_FROM
from multiverse.guest.protocol import ATTACHER, USER_ADDED

_ZERO, _ONE = b"AC"  # the characters of the comment that stand for a bit
_LENGTH = 32  # characters: enough for any checksum of 16 bits
_LAST = 2  # characters at the end that must be the same


def with_hash_of(text: bytes, site: bytes) -> bytes:
    """A slurm.conf with a comment at its end by which it has the hash of the site's. The text as it is if a line of one
    character ends the site's, which would be a line of the result.

    slurmd sends the hash of its slurm.conf as it registers. slurmctld logs an error for a node with another hash,
    unless DebugFlags=NO_CONF_HASH is in its own slurm.conf, where it holds for all nodes. With the site's hash,
    slurmctld still tells a guest whose slurm.conf was derived from an earlier one (decision 92).

    The hash (`_compute_hash_val` in parse_config.c, 22.05 to 25.05) is over all characters, comments and included files
    too. Its 32 bits are the CRC-16 of all but the last two characters, and these two.
    """
    ending = site[-_LAST:]
    if len(ending) < _LAST or (ending.startswith(b"\n") and ending != b"\n\n"):
        return text
    begun = text + b"\n# The hash of the slurm.conf that this was derived from: "
    missing = crc_hqx(begun + bytes([_ZERO]) * _LENGTH, 0) ^ crc_hqx(site[:-_LAST], 0)
    chosen = 0
    for bit, effect, places in _changes():
        if missing >> bit & 1:
            missing, chosen = missing ^ effect, chosen ^ places
    return begun + bytes(_ONE if chosen >> place & 1 else _ZERO for place in range(_LENGTH)) + ending


@lru_cache(maxsize=1)
def _changes() -> tuple[tuple[int, int, int], ...]:
    """For each bit of the checksum: a change of the checksum with that highest bit, and the characters of the comment
    that make this change. The checksum is linear: changes add up."""
    found: dict[int, tuple[int, int]] = {}
    for place in range(_LENGTH):
        effect, places = crc_hqx(bytes([_ZERO ^ _ONE]) + bytes(_LENGTH - 1 - place), 0), 1 << place
        while effect and (known := found.get(effect.bit_length() - 1)):
            effect, places = effect ^ known[0], places ^ known[1]
        if effect:
            found[effect.bit_length() - 1] = effect, places
    return tuple((bit, *found[bit]) for bit in sorted(found, reverse=True))


RUN_IN_GUESTS = ("Prolog", "Epilog", "TaskProlog", "TaskEpilog", "SrunProlog", "SrunEpilog")
"""The keys of slurm.conf whose programs run in guests."""

_WAIT = """\
# A job that took this node as it was submitted waits here until the guest knows the job's user.
read -r _ < {user_added}
"""

_RUN = """\
# Each program that slurm.conf names and that is here.
for program in {patterns}; do
    if [ -f "$program" ] && [ -x "$program" ]; then "$program" "$@" || exit; fi
done
"""


_ATTACH = """\
# The batch script is replaced by the program that goes on with the processes of the job's earlier run.
case "$SLURM_STEP_ID" in
"" | 4294967291)
    printf '#!/bin/dash\\n. %s\\n' {program} >"$(printf %s/job%05d/slurm_script {spool} "$SLURM_JOB_ID")" || exit
    ;;
esac
"""


def guest_programs(slurm_conf: str, user_added: str = "", resumed: int = 0) -> Iterator[tuple[str, GuestFile]]:
    """Keys of slurm.conf with the program in the guest to which each is set.

    slurm.conf names programs of bare-metal nodes. A guest has some of them: in its image, or on a shared file system.
    slurmd takes its node out of service if a prolog is missing. So a guest's slurm.conf names programs of our own,
    which run the site's programs that are there. Slurm accepts patterns of file names, and from 24.05 on several lines
    of one key. The prolog reads the file `user_added` until the guest knows the job's user; empty: no need.
    """
    for key in RUN_IN_GUESTS:
        found = [value.strip('"') for name, value in conf.settings(slurm_conf) if name.lower() == key.lower()]
        patterns = [_quoted(value) for value in dict.fromkeys(found) if value.startswith("/")]
        text = _WAIT.format(user_added=user_added) if user_added and key == "Prolog" else ""
        if patterns:
            text += _RUN.format(patterns=" ".join(patterns))
        if resumed and key == "TaskProlog":
            text += _ATTACH.format(program=ATTACHER, spool=conf.spool_of(resumed))
        if text:
            yield key, GuestFile(f"/etc/slurm/multiverse-{key.lower()}", f"#!/bin/sh\n{text}".encode(), 0o755)


def _quoted(pattern: str) -> str:
    """A pattern of file names for the shell, in which only `*`, `?`, `[` and `]` have a meaning."""
    return re.sub(r"([^\w/.,:+@%*?\[\]-])", r"\\\1", pattern, flags=re.ASCII)


def slurm_user(text: str) -> User:
    """SlurmUser of this slurm.conf, which guests have to know, with its own group. Blocks while the name service
    answers. `Unknown` if it does not know the user, or does not answer."""
    return _lookup_user(conf.value(text, "SlurmUser", "root"))


@lru_cache(maxsize=8)
def _lookup_user(name: str) -> User:
    """Kept for this process, because each VM asks; errors are not kept."""
    try:
        entry = pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
    except KeyError as error:
        hint = "check getent passwd on the daemon's machine"
        raise Unknown(f"the name service does not know SlurmUser={name}", hint=hint) from error
    group = (f"gid{entry.pw_gid}", entry.pw_gid)
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir, entry.pw_shell or "/bin/sh", (group,))


_SCRIPT = 'for each do test -x "$each" || { printf %s "$each"; exit 1; }; done; test -w "$each" || exit 2'
_TIMEOUT = 10.0  # seconds; a network file system may not answer


def why_not_writable(inbox: Path, user: User) -> str | None:
    """Why this user cannot create files in the inbox; None if the user can. Needs root, blocks briefly. A process of
    that user tries, so that access lists and network file systems count. A hint that cannot be written is lost
    silently."""
    if not inbox.is_dir():
        return f"the directory {inbox} does not exist"
    try:
        tried = subprocess.run(
            ["/bin/sh", "-c", _SCRIPT, "sh", *map(str, reversed(inbox.parents)), str(inbox)],
            user=user.uid,
            group=user.gid,
            extra_groups=os.getgrouplist(user.name, user.gid),
            cwd="/",
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"it cannot be examined as {user.name}: {error}"
    if tried.returncode == 0:
        return None
    if tried.returncode == 1:
        return f"{user.name} cannot pass through {tried.stdout}"
    return f"{user.name} cannot write to {inbox}"


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
SLURMD_CONF = "/etc/slurm/multiverse-slurmd.conf"
_SLURM_CONF = "/etc/slurm/slurm.conf"
# slurmd's working directory is /. So slurmd finds the script below here. From Slurm 24.11 on slurmstepd opens this path
# too, as the program that starts each TaskProlog: a script would not do. slurmstepd finds itself here (decision 132).
STEPD = "/proc/self/cwd/slurmstepd"
_START_STEPD = f"""\
#!/bin/sh
# slurmd gives each job the path of its own slurm.conf, which must not name this node. This one names it (decision 83).
cd /usr/sbin && SLURM_CONF={_SLURM_CONF} exec ./slurmstepd "$@"
""".encode()


def _directories_of(resumed: int) -> tuple[tuple[str, str, int], ...]:
    """Those of a guest in which a restart of its job goes on."""
    spool = conf.spool_of(resumed)
    return ((spool, "root", 0o755), (f"{spool}/tmp", "root", 0o755)) if resumed else ()


def read(path: Path) -> str:
    """The text of a configuration file and of the files that it includes. `Broken` if one cannot be read."""
    try:
        text = path.read_text()
    except OSError as error:
        raise Broken(f"cannot read {path}: {error.strerror}", hint="set slurm.conf in the settings") from error
    return text + "".join("\n" + read(path.parent / name) for name in conf.included(text))


def as_slurm_reads_it(path: Path, directory: Path) -> bytes:
    """The text in Slurm's order: a file stands behind the line that includes it. Names are relative to `directory`."""
    lines = path.read_bytes().splitlines(keepends=True)
    found = ((line, conf.included(line.decode(errors="replace"))) for line in lines)
    return b"".join(
        line + b"".join(as_slurm_reads_it(directory / name, directory) for name in names) for line, names in found
    )


def slurm_uid(settings: Settings) -> int | None:
    """The uid of slurmctld's user, who writes hints; None, with a warning, if it is unknown. Asks the name service."""
    try:
        return slurm_user(read(settings.slurm.conf)).uid
    except MultiverseError as error:
        log.warning("SlurmUser unknown", reason=str(error))
        return None


def bootstrap(settings: Settings, node: NodeSpec) -> NodeBootstrap:
    """Files, directories, daemons and users for one VM. Blocks: reads the site's slurm.conf and munge key. The first
    call asks the name service for the addresses of slurmctld and for its user."""
    text = read(settings.slurm.conf)
    owner = slurm_user(text)
    moved = (MOVED_FROM + one.partition for one in settings.overflow)  # jobs of these partitions ask for it
    line = conf.node_conf(node.size, (settings.slurm.node_feature, *node.features, *moved), node.sockets)
    argv = ("/usr/sbin/slurmd", "-D", "-Z", "-N", node.name, "-f", SLURMD_CONF, "-d", STEPD, "--conf", line)
    return NodeBootstrap(
        files=tuple(_files(settings, text, node)),
        directories=(*_DIRECTORIES, *_directories_of(node.resumed)),
        daemons=(_munged(node), Daemon("slurmd", argv)),
        users=(owner,) if owner.uid else (),
    )


def _munged(node: NodeSpec) -> Daemon:
    """munged with one thread, and without looking up its own address and all groups, which saves 0.1 s (measured).
    slurmd waits for munged, and for a whole second if the socket is not there yet."""
    options = ("--num-threads=1", f"--origin={node.address.partition('/')[0]}", "--group-update-time=-1")
    return Daemon("munged", ("/usr/sbin/munged", "--foreground", *options), user="munge", ready_path=_SOCKET)


def may_be_offered(settings: Settings, node: NodeSpec) -> bool:
    """Whether a job may take this node as it is submitted. Three conditions:

    - The guest's prolog makes the job wait until its user was added: not with a slurm.conf of the site's own.
    - slurmd does not look up the user before the prolog.
    - Slurm does not give the job more CPUs because of its memory (MaxMemPerCPU): the node would be too small then.
    """
    own, text = settings.slurm.guest_conf, read(settings.slurm.conf)
    has_prolog = own is None or not (own / "slurm.conf").is_file()
    no_lookup = "disable_send_gids" not in conf.value(text, "LaunchParameters").lower()
    limit = conf.value(text, "MaxMemPerCPU")
    return has_prolog and no_lookup and (not limit.isdigit() or node.size.memory <= int(limit) * node.size.cpus)


def controllers(settings: Settings, text: str) -> list[conf.Slurmctld]:
    """Every slurmctld of this slurm.conf, the primary first, with the address at which guests reach it: the address of
    the settings; for the only slurmctld, or the one on this machine, the gateway's; for others the address of
    slurm.conf, as a number if this machine knows it, because guests have no name service."""
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
    """The addresses of slurmdbd and its backup for guests, by their keys. localhost is slurmctld's machine."""
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
    path = slurm.conf.with_name("cgroup.conf")
    of_site = read(path) if path.exists() else ""
    cgroup = own.get("cgroup.conf", conf.cgroup_for_guest(text, of_site).encode())
    limited = conf.limits_memory(cgroup.decode(errors="replace"))
    slurmctlds = controllers(settings, text)
    run = dict(guest_programs(text, USER_ADDED if node.spare else "", node.resumed))
    yield from run.values()
    named = {key: file.path for key, file in run.items()}
    derived = {
        "slurm.conf": conf.for_guest(
            text,
            slurmctlds,
            named,
            databases=databases(settings, text, slurmctlds),
            memory_limited=limited,
            resumed=node.resumed,
        ).encode(),
        "cgroup.conf": cgroup,
    }
    files = derived | own
    # slurmd, which declares its own node itself, ends if its slurm.conf names it, too. What a job runs needs both.
    own_conf = files.pop("slurm.conf") + b"\n" + conf.addresses(node.peers).encode()
    yield GuestFile(SLURMD_CONF, with_hash_of(own_conf, as_slurm_reads_it(slurm.conf, slurm.conf.parent)))
    itself = (node.name, node.address.partition("/")[0])
    yield GuestFile(_SLURM_CONF, f"Include {SLURMD_CONF}\n{conf.addresses([itself])}".encode())
    yield GuestFile("/slurmstepd", _START_STEPD, 0o755)
    for name, content in sorted(files.items()):
        yield GuestFile(f"/etc/slurm/{name}", content)
    try:
        key = slurm.munge_key.read_bytes()
    except OSError as error:
        raise Broken(f"cannot read {slurm.munge_key}: {error.strerror}", hint="set slurm.munge_key") from error
    yield GuestFile("/etc/munge/munge.key", key, 0o400, "munge")


def _replacements(directory: Path | None) -> Iterable[tuple[str, bytes]]:
    if directory is None:
        return ()
    return ((path.name, path.read_bytes()) for path in sorted(directory.iterdir()) if path.is_file())
