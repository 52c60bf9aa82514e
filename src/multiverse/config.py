"""Settings: one TOML file, read into frozen values. Every mistake is named with its key and a hint."""

from __future__ import annotations

import difflib
import ipaddress
import tomllib
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from multiverse.core.errors import Refused
from multiverse.core.model import CloneKind, Depth, Mount


@dataclass(frozen=True)
class HostSettings:
    """What this machine declares for VMs, apart from what it has. Memory and disk in MiB."""

    name: str = "localhost"
    cores: int = 2
    memory: int = 4096
    disk: int = 65536
    overcommit: float = 1.0  # times `memory` that VMs may claim; above 1, VMs that have run for a while count as what
    floor: int = 1024  # they take, and nobody starts who might leave the machine with less than this available


@dataclass(frozen=True)
class SlurmSettings:
    """Where the site's Slurm is, and the names that our partitions and features have there."""

    conf: Path = Path("/etc/slurm/slurm.conf")
    bin_dir: Path | None = None  # None: found on PATH
    gate_partition: str = "vm"
    run_partition: str = "vmrun"
    gate_feature: str = "mvgate"
    node_feature: str = "vm"  # every VM has it; the run partition's node set is made of it
    inbox: Path = Path("/run/multiverse/inbox")  # where job_submit.lua and the epilog drop hints
    munge_key: Path = Path("/etc/munge/munge.key")
    controller_address: str = ""  # slurmctld as the guests reach it; empty: the network's gateway
    guest_conf: Path | None = None  # a directory with files that replace the derived ones in guests
    command_timeout: float = 20.0


@dataclass(frozen=True)
class QemuSettings:
    binary: str = "qemu-system-x86_64"
    accel: Literal["auto", "kvm", "tcg"] = "auto"
    images: Path = Path("/var/lib/multiverse/images")
    templates: Path = Path("/dev/shm/multiverse/templates")  # memory files: a file system in memory
    vms: Path = Path("/var/lib/multiverse/vms")
    run: Path = Path("/run/multiverse/vms")  # sockets; keep it short, socket paths are at most 107 bytes
    bridge: str = "mvbr0"
    # The first user, and how many, that QEMUs run as, one for each VM, and that nothing else may have. By default
    # from where systemd's list of users (UIDS-GIDS) has lions. [0, 0]: they all run as the daemon's own.
    uids: tuple[int, int] = (0x7000_0000, 65536)
    base_cpus: int = 1
    base_memory: int = 256
    max_cpus: int = 64  # a VM can be plugged up to this many
    max_memory: int = 262144
    # MiB that an emulated guest's translated code may take; what does not fit is translated again. 0: as much as it
    # comes to, some 60 of a VM with a job. Less memory for each VM, for more of the CPUs' time.
    tb_size: int = 0


@dataclass(frozen=True)
class NetworkSettings:
    """The guests' network: addresses come from here, by serial; there is no DHCP."""

    subnet: str = "10.213.0.0/16"
    gateway: str = "10.213.0.1"  # this host on the bridge
    first: int = 256  # the first address given to a VM, counted from the subnet's own
    hosts: tuple[tuple[str, str], ...] = ()  # (name, address) that every guest's /etc/hosts holds


@dataclass(frozen=True)
class ImageSettings:
    default: str = "slim"
    kind: CloneKind = CloneKind.INSTANT  # for jobs that ask for none
    guest_reserve: int = 80  # MiB of a VM's memory that its kernel and daemons need
    per_account: bool = False  # templates, and the layout of addresses that their VMs share, are one account's alone
    tmp_disk: int = 12288  # MiB that a job may ask for with --tmp: every image has them free on its disk


@dataclass(frozen=True)
class PacingSettings:
    provisioning: int = 4  # VMs between claim and node at the same time
    spawn_timeout: float = 60.0  # from start to a registered node
    pin_timeout: float = 60.0  # from pin to running
    reclaim_grace: float = 5.0  # for the guest to write back and unmount
    complete_timeout: float = 120.0  # for a job to leave COMPLETING
    retry_base: float = 2.0  # back-off after a failed attempt: base, doubled each time,
    retry_limit: float = 300.0  # up to this
    replacements: int = 2  # VMs replaced within one attempt
    # Clones a second from one template, or of one image on one host; 0: as fast as they are made.
    instant_rate: float = 0.0
    linked_rate: float = 0.0
    full_rate: float = 0.0
    attempts: int = 12  # failed attempts in a row before the job is given up; with the back-off, half an hour


@dataclass(frozen=True)
class PoolSettings:
    """A warm pool: VMs that are made before any job asks. Between `min` and `max` of them, by the arrival rate."""

    image: str = "slim"
    depth: Depth = Depth.PARKED
    min: int = 1
    max: int = 0  # no more than min
    cpus: int = 1  # of joined ones: the size that their nodes have; parked ones become of any
    memory: int = 512
    max_age: float = 3600.0  # seconds after which a spare is replaced by a fresh one
    offer: bool = True  # joined ones: whether a job takes one as it is submitted, without waiting at the gate


@dataclass(frozen=True)
class Settings:
    include: Path | None = None  # another file of settings; what it says holds instead of what this one does
    state_dir: Path = Path("/var/lib/multiverse")
    socket: Path = Path("/run/multiverse/api.sock")
    poll: float = 2.0  # seconds between looks when nothing hints
    trace: Path | None = (
        None  # a file that every call to Slurm and to the hypervisor is recorded in, anew at each start
    )
    host: HostSettings = field(default_factory=HostSettings)
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    qemu: QemuSettings = field(default_factory=QemuSettings)
    network: NetworkSettings = field(default_factory=NetworkSettings)
    image: ImageSettings = field(default_factory=ImageSettings)
    pacing: PacingSettings = field(default_factory=PacingSettings)
    mounts: tuple[Mount, ...] = ()
    pool: tuple[PoolSettings, ...] = ()


def load(path: Path) -> Settings:
    """Read settings from a TOML file, and the one that it includes. Raises `Refused`, naming every wrong key, if any
    is wrong."""
    raw = _read(path)
    include = raw.get("include")
    if not isinstance(include, str):
        return parse(raw, str(path))
    other = path.parent / include
    return parse(_merged(raw, _read(other)), f"{path} with {other}")


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged, key by key; of all else what is `above` holds."""
    both = {key: _merged(below[key], above[key]) for key in below.keys() & above.keys()
            if isinstance(below[key], dict) and isinstance(above[key], dict)}  # fmt: skip
    return {**below, **above, **both}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}", hint="name the file with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{path} is not TOML: {error}", hint="mend that line") from error


def parse(raw: dict[str, Any], origin: str) -> Settings:
    """Settings from a parsed document. `origin` is what errors call it."""
    problems = list(_unknown_keys(Settings, raw, ""))
    if not problems:
        try:
            settings = TypeAdapter(Settings).validate_python(raw)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors()]
        else:
            problems = list(_contradictions(settings))
            if not problems:
                return settings
    raise Refused(f"{origin}: " + "; ".join(problems), hint="mend these keys and start again")


def _unknown_keys(cls: type, raw: dict[str, Any], prefix: str) -> list[str]:
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls)]
    found: list[str] = []
    for key, value in raw.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            found.append(f"{prefix}{key}: no such key" + (f", did you mean {near[0]}?" if near else ""))
            continue
        inner = hints[key]
        if is_dataclass(inner) and isinstance(inner, type) and isinstance(value, dict):
            found += _unknown_keys(inner, value, f"{prefix}{key}.")
        elif get_origin(inner) is tuple and isinstance(value, list):
            item = get_args(inner)[0]
            if isinstance(item, type) and is_dataclass(item):
                for i, one in enumerate(value):
                    if isinstance(one, dict):
                        found += _unknown_keys(item, one, f"{prefix}{key}.{i}.")
    return found


def _contradictions(s: Settings) -> list[str]:
    found: list[str] = []
    try:
        network = ipaddress.IPv4Network(s.network.subnet)
        if ipaddress.IPv4Address(s.network.gateway) not in network:
            found.append(f"network.gateway: {s.network.gateway} is not in network.subnet {network}")
        if not 0 < s.network.first < network.num_addresses - 2:
            found.append(f"network.first: must lie within {network}")
    except ValueError as error:
        found.append(f"network: {error}")
    if not 1 <= len(s.qemu.bridge) <= 15:
        found.append("qemu.bridge: an interface name has 1 to 15 bytes")
    first, count = s.qemu.uids
    if (first, count) != (0, 0) and not (first > 0 and count > 1 and first + count <= 1 << 31):
        found.append("qemu.uids: the first user and how many, two at least, below 2147483648; or [0, 0]")
    for i, pool in enumerate(s.pool):
        most = pool.max or pool.min
        if not 0 <= pool.min <= most or most < 1:
            found.append(f"pool.{i}: min is at least 0, max at least 1 and no less than min")
        if pool.cpus < 1 or pool.memory < 1 or pool.max_age <= 0:
            found.append(f"pool.{i}: cpus, memory and max_age are more than 0")
    if s.pool and s.image.per_account:
        found.append("pool: its VMs are forked from templates for all: not with image.per_account")
    same = [(p.image, p.depth, (p.cpus, p.memory) if p.depth is Depth.JOINED else ()) for p in s.pool]
    if len(set(same)) < len(same):
        found.append("pool: two of them keep the same VMs: join them into one")
    if min(s.pacing.instant_rate, s.pacing.linked_rate, s.pacing.full_rate) < 0:
        found.append("pacing: a rate is clones a second, or 0 for no limit")
    if s.host.cores < 1 or s.host.memory < s.qemu.base_memory:
        found.append(f"host: needs at least one core and {s.qemu.base_memory} MiB of memory")
    if s.qemu.tb_size != 0 and s.qemu.tb_size < 8:
        found.append("qemu.tb_size: 8 MiB at least, or 0")
    if s.host.overcommit < 1:
        found.append("host.overcommit: 1 or more; to claim less, declare less host.memory")
    if s.host.floor < 0:
        found.append("host.floor: MiB that stay available, 0 or more")
    longest = len(str(s.qemu.run)) + len("/mvxxxxx-99999999/agent")
    if longest > 107:
        found.append(f"qemu.run: {s.qemu.run} is too long for the sockets in it, at most {107 - 24} bytes")
    return found
