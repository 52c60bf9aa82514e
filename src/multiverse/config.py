"""Settings: one TOML file, read into frozen values. An error message names each wrong key."""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
import shutil
import socket
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, reduce
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from multiverse.core.errors import Refused
from multiverse.core.model.basics import CloneKind, Depth, Placement
from multiverse.core.model.host import Overcommitment
from multiverse.core.model.identity import Mount, Reach

_LONGEST_SOCKET = "/mvxxxxx-99999999/agent"  # below qemu.run
LEAST_SELF_FENCE = 60.0  # seconds: contact is made every few seconds, and lost for a moment by a restart
LEAST_SAMPLE, MOST_SAMPLE = 0.1, 10.0  # seconds
LEAST_SCRATCH = 64  # MiB: Slurm writes scripts and logs there, too

LEASE_RESERVE = 512
"""MiB of a pilot's memory that VMs do not get: the pilot, the agent and Slurm's processes in its job need it."""


# What types and fields say of keys, beside pydantic's limits.


class Unit(str):
    """What a number counts. Empty: it is a plain number, such as that of a port, or its meaning says what it counts."""


class Example(str):
    """A value as a file has it, for a key whose default is no example; of a table, such values with their keys."""


class Allowed(str):
    """Which values are right, where the type does not tell."""


class AtReload:
    """Marks a key or a table whose new values are applied when the settings are read again."""


T = TypeVar("T")
Reloaded = Annotated[T, AtReload()]

Count = Annotated[int, Field(ge=0), Unit("")]
Positive = Annotated[int, Field(ge=1), Unit("")]
Cpus = Annotated[int, Field(ge=1), Unit("CPUs")]
Mebibytes = Annotated[int, Field(ge=0), Unit("MiB")]
Seconds = Annotated[float, Field(gt=0), Unit("seconds")]
Wait = Annotated[float, Field(ge=0), Unit("seconds")]
"""Seconds, perhaps none."""
Days = Annotated[float, Field(ge=0, allow_inf_nan=False), Unit("days")]
Rate = Annotated[float, Field(ge=0), Unit("per second")]
MebibytesPerSecond = Annotated[int, Field(ge=0), Unit("MiB/s")]
MegabitsPerSecond = Annotated[int, Field(ge=0), Unit("Mbit/s")]
Factor = Annotated[float, Field(ge=1), Unit("")]
"""How many times the present amount may be claimed."""
Port = Annotated[int, Field(ge=1, le=65535), Unit("")]
Mtu = Annotated[int, Field(ge=576, le=9000), Unit("bytes")]
NetworkId = Annotated[int, Field(ge=0, lt=1 << 24), Unit("")]

LOCALHOST = "localhost"
"""The name of this machine as a host, where it is the only one."""

# The string below each key is its meaning. The manual page and the examples are made of these strings and of the types
# (`site.settings`), so that each must be understood without the others.


@dataclass(frozen=True)
class HostSettings:
    """What this machine offers to VMs: all it has, or less. A class in `[[hosts]]` overrides these values for its
    hosts."""

    name: str = LOCALHOST
    """The name of this machine as a host of VMs. With `[[hosts]]` the default is the machine's short host name."""
    cores: Cpus = 2
    """CPUs of this machine that VMs may use."""
    memory: Annotated[Mebibytes, Allowed("at least qemu.base_memory")] = 4096
    """Memory of this machine that VMs may use."""
    disk: Mebibytes = 65536
    """Disk space in `qemu.vms` that VMs may use."""
    cpu_overcommit: Factor = 1.0
    """How many times `cores` all VMs together may claim. Above 1 they share CPUs. One VM never has more than `cores`
    CPUs."""
    overcommit: Factor = 1.0
    """How many times `memory` all VMs together may claim. Above 1, a VM that has run for a while counts with the
    memory that it really uses."""
    floor: Mebibytes = 1024
    """Memory that has to stay available on the machine. While less is, no VM is started. It counts only if
    `overcommit` is above 1."""
    disk_overcommit: Factor = 1.0
    """How many times `disk` all VMs together may claim. Above 1, a VM that finds no room for what it writes stands
    still until there is room."""
    disk_floor: Mebibytes = 1024
    """Space that has to stay free on the file system of `qemu.vms`. While less is free, no VM is added."""
    net: MegabitsPerSecond = 0
    """Bandwidth of the network that VMs may claim. 0: what the driver of `qemu.uplink` reports, and nothing if there
    is no uplink."""

    @property
    def overcommitment(self) -> Overcommitment:
        return Overcommitment(self.cpu_overcommit, self.overcommit, self.disk_overcommit, self.floor, self.disk_floor)


@dataclass(frozen=True)
class SlurmSettings:
    """Where the site's Slurm is, and the names that Multiverse uses in it."""

    conf: Path = Path("/etc/slurm/slurm.conf")
    """The site's slurm.conf. The files that Multiverse adds to Slurm are in the same directory."""
    bin_dir: Annotated[Path | None, Example('"/opt/slurm/bin"')] = None
    """The directory of Slurm's commands. Not set: they are found on PATH."""
    partition: str = "vm"
    """The partition of VMs. Users submit jobs to it, and jobs wait and run in it."""
    limits: Annotated[str, Example('"MaxTime=2-0 DefaultTime=1:00:00 AllowGroups=staff"')] = ""
    """The limits of that partition, as on its line in slurm.conf: keys such as MaxTime, DefaultTime, AllowGroups,
    AllowAccounts and QOS. With `[[overflow]]` it has those of the partition that overflows instead. After a change:
    `multiverse site install`, then `scontrol reconfigure`."""
    gate_feature: str = "mvgate"
    """The feature that waiting jobs ask for (the gate). Only nodes that never run a job have it."""
    licence: str = "vm"
    """The Slurm licence that keeps jobs waiting. A reservation with the name of `gate_feature` holds it."""
    node_feature: str = "vm"
    """The feature of every VM in Slurm. The partition of VMs has all nodes with this feature."""
    inbox: Path = Path("/run/multiverse/inbox")
    """The directory in which job_submit.lua and EpilogSlurmctld leave small files that tell the controller of new and
    ended jobs."""
    munge_key: Path = Path("/etc/munge/munge.key")
    """The munge key of the cluster, which each VM gets."""
    controller_address: Annotated[str, Example('"10.213.0.1"')] = ""
    """The address of slurmctld as VMs reach it; with backup controllers one for each, separated by commas, in the
    order of the SlurmctldHost lines. Empty: `network.gateway` for a slurmctld on this machine and for an only one,
    and the address in slurm.conf for others."""
    guest_conf: Annotated[Path | None, Example('"/etc/multiverse/guest-slurm"')] = None
    """A directory of Slurm's configuration files for VMs, in place of those that are derived from the site's. Not
    set: all are derived."""
    addresses: Annotated[Path | None, Example('"/etc/slurm/multiverse-addresses.conf"')] = None
    """The file by which srun and other users' commands find VMs; multiverse-client.conf includes it. Every machine on
    which users work must have it at this path. Not set: multiverse-addresses.conf beside slurm.conf."""
    command_timeout: Seconds = 20.0
    """The time that one of Slurm's commands may take before it is killed."""
    commands: Annotated[int, Field(ge=2), Unit("")] = 16
    """How many of Slurm's commands run at the same time at most."""

    def addresses_file(self) -> Path:
        """The file by which users' commands find VMs."""
        return self.addresses or self.conf.with_name("multiverse-addresses.conf")

    def directory(self) -> Path:
        """Where Slurm's commands are on this machine."""
        return self.bin_dir or Path(shutil.which("srun") or "/usr/bin/srun").parent


@dataclass(frozen=True)
class QemuSettings:
    """QEMU on the hosts, its directories, and what VMs are made of."""

    binary: str = "qemu-system-x86_64"
    """The program of QEMU: a name on PATH, or a path."""
    accel: Literal["auto", "kvm", "tcg"] = "auto"
    """How guests run: on KVM (kvm) or emulated (tcg). auto: on KVM if a test guest runs on it, and emulated
    otherwise."""
    cpu: Annotated[str, Allowed("host, or a CPU model of QEMU without options")] = "host"
    """The CPU of guests that run on KVM: host, with all that the host's CPU has, or one of QEMU's CPU models. VMs
    move only between hosts with the same model; with host, only between hosts with equal CPUs. `multiverse doctor`
    names the newest model that all hosts can run. On a host whose CPU lacks something of the model, guests have its
    own CPU."""
    images: Path = Path("/var/lib/multiverse/images")
    """The directory of images."""
    templates: Path = Path("/dev/shm/multiverse/templates")
    """The directory of templates, which are the frozen VMs that clones are made from. It must be on a file system in
    memory (tmpfs)."""
    vms: Path = Path("/var/lib/multiverse/vms")
    """The directory of VMs and their disks."""
    run: Annotated[Path, Allowed("at most 84 bytes")] = Path("/run/multiverse/vms")
    """The directory of the sockets of VMs. The path of a socket may have 107 bytes, so this one has to be short."""
    bridge: Annotated[str, Allowed("a name of 1 to 15 bytes")] = "mvbr0"
    """The network bridge of the host that connects VMs."""
    uplink: Annotated[str, Example('"eth1"')] = ""
    """A network interface of the host that connects the bridge with those of the other hosts. The bridge takes it
    over, so it must not have an address of the host. Empty: the site connects the bridges by itself, or there is one
    host."""
    uids: Annotated[
        tuple[int, int], Allowed("first above 0 and at least 2 of them, all below 2147483648; or [0, 0]")
    ] = (
        0x7000_0000,
        65536,
    )
    """The first uid for QEMU processes, and how many there are. Each VM has a uid of its own, and nothing else on the
    host may use them. The default range is unused according to systemd's UIDS-GIDS. [0, 0]: all QEMU processes have
    the uid of the agent."""
    base_cpus: Cpus = 1
    """CPUs of a template. Clones get more by hot-plugging."""
    base_memory: Annotated[int, Field(ge=64), Unit("MiB")] = 288
    """Memory of a template. Clones get more by hot-plugging. With the default, a job of 165 MiB needs no more."""
    max_cpus: Cpus = 64
    """The most CPUs that one VM can have."""
    max_memory: Mebibytes = 262144
    """The most memory that one VM can have."""
    tb_size: Annotated[Mebibytes, Allowed("0, or at least 8")] = 0
    """Memory for the translated code of an emulated guest (QEMU's tb-size). Code beyond it is translated again, which
    costs CPU time. 0: no limit, which is about 60 MiB for a VM with a job."""
    vhost_net: Literal["auto", "off"] = "auto"
    """Whether the kernel moves the network frames of guests that run on KVM (vhost-net). auto: if the host can."""
    huge_pages: Literal["auto", "off"] = "auto"
    """Whether VMs get huge pages of 2 MiB for the memory that they have beside their template's. auto: if the host
    has some."""
    native_aio: Literal["auto", "on", "off"] = "auto"
    """Whether disks of full clones use the kernel's asynchronous input and output (aio=native). auto: they do not."""
    iothread: Literal["auto", "on", "off"] = "auto"
    """Whether a thread of its own serves the disks of a VM. auto: for guests that run on KVM."""


@dataclass(frozen=True)
class NetworkSettings:
    """The network of VMs. Each address is computed from the serial number of the VM; there is no DHCP."""

    subnet: str = "10.213.0.0/16"
    """The IPv4 network of VMs."""
    gateway: Annotated[str, Allowed("an address in network.subnet")] = "10.213.0.1"
    """The address of the controller's machine on the bridge. VMs send through it what is not for their own
    network."""
    first: Positive = 256
    """The first address that a VM gets, counted from the address of the subnet. Smaller ones are for the site."""
    hosts: Annotated[tuple[tuple[str, str], ...], Example('[["fileserver", "10.213.0.2"]]')] = ()
    """Names and addresses that each VM has in its /etc/hosts."""
    reach: Reach = Reach.USER
    """Which other VMs a VM reaches over the network, and finds by their names: those of its job, those of its user,
    or all of the site. Only the controller's settings count."""
    names: Annotated[str, Example('"/etc/hosts"')] = ""
    """A file in the format of hosts(5) in which the controller keeps the names and addresses of VMs, between two
    lines of its own. Mostly it is /etc/hosts of the controller's machine. Empty: no file is changed."""


@dataclass(frozen=True)
class VxlanSettings:
    """A VXLAN between the hosts and the controller's machine, for sites without a layer 2 network between the hosts.
    All machines must have the same settings."""

    enabled: bool = False
    """Whether the bridges of the hosts are connected by a VXLAN."""
    addresses: Annotated[tuple[tuple[str, str], ...], Example('[["n1", "192.0.2.11"], ["n2", "192.0.2.12"]]')] = ()
    """Names and addresses of the machines as the others reach them: of hosts, of leased nodes by their names in
    Slurm, and of the controller's machine; all of IPv4, or all of IPv6. A machine that is not named here has the
    address that the name service gives."""
    port: Port = 14789
    """The UDP port of the VXLAN. Nothing else on these machines may use it."""
    mtu: Mtu = 1450
    """The largest packet of VMs. It has to be 50 bytes less than the largest packet between hosts, or 70 less with
    IPv6."""
    network: NetworkId = 0
    """The number of the virtual network (VNI). 0: it is derived from the name of the site's database."""


@dataclass(frozen=True)
class ImageSettings:
    """The default image and kind of clone, and what all images have in common."""

    default: str = "slim"
    """The image of jobs that name none."""
    source: Annotated[Path | None, Example('"/shared/multiverse/images"')] = None
    """A directory of images on a file system that the hosts share. Each host copies from it the images that it lacks,
    or that are newer there. Not set: the controller copies its own images to the hosts."""
    templates: Annotated[Path | None, Example('"/shared/multiverse/templates"')] = None
    """A directory on a file system that the hosts share, in which they put the templates that they have built. A host
    of the same kind copies a template from there instead of booting one. Whoever is root on one of these hosts can
    then change the VMs of all. Not set: each host builds its own."""
    kind: CloneKind = CloneKind.INSTANT
    """How VMs are made for jobs that do not say it: instant (memory and disk shared with a running template until
    they are written), linked (disk shared, boots), full (disk copied, boots) or auto (the quickest)."""
    guest_reserve: Mebibytes = 120
    """Memory of a VM beside what its job gets, for its kernel and daemons."""
    per_account: bool = False
    """Whether each Slurm account has templates of its own, so that VMs of different accounts share no memory. No warm
    pool is possible then."""
    scratch: Annotated[Mebibytes, Allowed("64 to image.tmp_disk")] = 2048
    """Disk space that each job may write in its VM. A job that asks for more with --tmp gets that."""
    tmp_disk: Mebibytes = 12288
    """The largest --tmp of a job. Every image must have as much free space."""


@dataclass(frozen=True)
class PacingSettings:
    """Timeouts, retries and rates of the controller."""

    provisioning: Reloaded[Positive] = 4
    """How many VMs are created or started at the same time."""
    silence: Reloaded[Seconds] = 60.0
    """The time for which a host or Slurm may give no answer. After it the VMs there no longer count for their
    jobs."""
    spawn_timeout: Reloaded[Seconds] = 60.0
    """The time that a VM has from its start until its node is registered in Slurm. Then it is replaced."""
    pin_timeout: Reloaded[Seconds] = 60.0
    """The time that a job has until it runs, once its VMs are ready and it was sent to them."""
    reclaim_grace: Wait = 5.0
    """The time that a VM has after its job to write back and unmount its file systems, before it is ended."""
    complete_timeout: Reloaded[Seconds] = 120.0
    """The time that a job has to leave Slurm's state COMPLETING. After it, its VMs are ended anyway."""
    retry_base: Reloaded[Wait] = 2.0
    """The time before the first retry after a failed attempt. It is doubled for each further failure in a row."""
    retry_limit: Reloaded[Wait] = 300.0
    """The longest time before a retry."""
    replacements: Reloaded[Count] = 2
    """How many VMs that failed are replaced within one attempt to start a job."""
    instant_rate: Reloaded[Rate] = 0.0
    """How many instant clones are made from one template on the average. 0: no limit."""
    linked_rate: Reloaded[Rate] = 0.0
    """How many linked clones of one image are made on one host on the average. 0: no limit."""
    full_rate: Reloaded[Rate] = 0.0
    """How many full clones of one image are made on one host on the average. 0: no limit."""
    attempts: Reloaded[Positive] = 12
    """After how many failed attempts in a row a job is cancelled. With the default delays that takes half an hour."""


@dataclass(frozen=True)
class BackfillSettings:
    """Jobs that start ahead of the first one that waits for room, because they do not delay it by their time
    limits."""

    enabled: bool = True
    """Whether later jobs may start ahead of the first one that waits for room."""
    depth: Positive = 100
    """How many jobs behind the first one are considered at a time."""
    overtakes: Count = 20
    """How many times the first job may be overtaken while nobody can tell when it will start."""


@dataclass(frozen=True)
class PlacementSettings:
    """On which hosts the VMs of a job are made."""

    policy: str = Placement.WORST_FIT.value
    """The placement policy of jobs that name none with --constraint=place-NAME: worst-fit, best-fit, first-fit,
    random-fit, pack, spread, least-loaded, or one that a package of the site registers."""


@dataclass(frozen=True)
class WebSettings:
    """The web page. It shows everything to whoever reaches it, and changes nothing. A reverse proxy decides who
    may."""

    listen: Annotated[str, Example('"/run/multiverse/web.sock"')] = ""
    """Where the web page is served: the path of a Unix socket, or a loopback address with a port such as
    127.0.0.1:8642, which every user of this machine reaches. Empty: there is no web page."""
    group: Annotated[str, Example('"www-data"')] = ""
    """The group that may use the Unix socket of `listen`: that of the reverse proxy. Empty: only root may."""
    viewers: Positive = 500
    """How many viewers may follow the page at the same time."""


@dataclass(frozen=True)
class PoolSettings:
    """A warm pool: VMs that exist before a job asks for one. Their number follows the demand between `min` and
    `max`."""

    image: str = "slim"
    """The image of these VMs."""
    depth: Depth = Depth.PARKED
    """How far the VMs are prepared: parked (restored and paused, can get any size) or joined (idle nodes of one
    size)."""
    min: Count = 1
    """How many VMs are kept ready at the least."""
    max: Count = 0
    """How many VMs are kept ready at the most. 0: as many as `min`."""
    cpus: Cpus = 1
    """CPUs of joined VMs. Parked VMs get the CPUs that their job asks for."""
    memory: Annotated[int, Field(ge=1), Unit("MiB")] = 512
    """Memory of joined VMs. Parked VMs get the memory that their job asks for."""
    max_age: Seconds = 3600.0
    """The age at which a VM that waits for a job is replaced by a new one."""
    offer: bool = True
    """Whether a job may take a joined VM at its submission, without waiting for the controller."""


@dataclass(frozen=True)
class HostClass:
    """Hosts that are alike, named in one table. What a class does not give is as in `[host]` and `[qemu]`."""

    nodes: Annotated[str, Example('"n[1-32,40]"')]
    """The names of the hosts, as a node set of ClusterShell."""
    cores: Annotated[Cpus | None, Example("32")] = None
    """CPUs of each of these hosts that VMs may use."""
    memory: Annotated[Mebibytes | None, Example("131072")] = None
    """Memory of each of these hosts that VMs may use."""
    disk: Annotated[Mebibytes | None, Example("524288")] = None
    """Disk space of each of these hosts that VMs may use."""
    cpu_overcommit: Annotated[Factor | None, Example("2.0")] = None
    """How many times `cores` all VMs of one of these hosts together may claim."""
    overcommit: Annotated[Factor | None, Example("1.5")] = None
    """How many times `memory` all VMs of one of these hosts together may claim."""
    floor: Annotated[Mebibytes | None, Example("4096")] = None
    """Memory that has to stay available on each of these hosts. It counts only if `overcommit` is above 1."""
    disk_overcommit: Annotated[Factor | None, Example("1.5")] = None
    """How many times `disk` all VMs of one of these hosts together may claim."""
    disk_floor: Annotated[Mebibytes | None, Example("4096")] = None
    """Space that has to stay free on the file system of the VMs of each of these hosts."""
    net: Annotated[MegabitsPerSecond | None, Example("10000")] = None
    """Bandwidth of the network of each of these hosts that VMs may claim."""
    images: Annotated[Path | None, Example('"/scratch/multiverse/images"')] = None
    """The directory of images on these hosts."""
    templates: Annotated[Path | None, Example('"/dev/shm/multiverse/templates"')] = None
    """The directory of templates on these hosts, on a file system in memory."""
    vms: Annotated[Path | None, Example('"/scratch/multiverse/vms"')] = None
    """The directory of VMs and their disks on these hosts."""
    run: Annotated[Path | None, Example('"/run/multiverse/vms"')] = None
    """The directory of the sockets of VMs on these hosts."""
    bridge: Annotated[str | None, Example('"mvbr0"')] = None
    """The network bridge of these hosts that connects VMs."""
    uplink: Annotated[str | None, Example('"eth1"')] = None
    """The network interface of these hosts that connects their bridges with those of other hosts."""


@dataclass(frozen=True)
class AgentSettings:
    """The agent, which runs the VMs of a host, and how the controller reaches it."""

    socket: Path = Path("/run/multiverse/agent.sock")
    """The Unix socket of the agent on its host."""
    state_dir: Path = Path("/var/lib/multiverse/agent")
    """The directory in which the agent keeps what has to survive its restart."""
    leases: Path = Path("/var/lib/multiverse/leases")
    """The directory on leased nodes that has all files of leases."""
    program: tuple[str, ...] = ("multiverse", "agent")
    """The command that runs an agent on leased nodes."""
    self_fence: Annotated[Wait, Allowed("0, or at least 60")] = 0.0
    """The time without contact to the controller and to slurmctld after which the agent ends its VMs, so that their
    jobs can run elsewhere. Slurm's commands must work on the host, and an outage of both then ends jobs. A longer
    time counts once the controller has seen it. 0: never."""
    sample: Annotated[Wait, Allowed("0, or 0.1 to 10")] = 1.0
    """The time between two samples of what the host and its VMs use. 0: nothing is sampled."""
    metrics: Annotated[str, Example('"10.0.0.7:9341"')] = ""
    """Where Prometheus can read the samples: ADDRESS:PORT, or the path of a Unix socket. Whoever reaches it reads
    figures and names of VMs, and can do nothing else. Empty: nowhere."""
    connect: tuple[str, ...] = (
        "ssh",
        "-T",
        "-x",
        "-a",
        "-oBatchMode=yes",  # asks nobody for a password or for an unknown host key
        "-oConnectTimeout=10",
        "-oServerAliveInterval=15",  # three without an answer end it: a copy of an image has no pings of its own
        "-oControlMaster=no",  # no connection that another process shares, or that outlives ours
        "-oControlPath=none",
        "-oClearAllForwardings=yes",
        "-oEscapeChar=none",
        "-oLogLevel=ERROR",  # no banner: the last words are the reason that is shown
        "-oIdentityFile=/etc/multiverse/ssh_key",  # beside those of ssh_config; ssh passes over a file that is missing
        "--",
        "{host}",
        "multiverse",
        "agent",
        "dial-stdio",
    )
    """The command by which the controller reaches the agent of another host, by the command's standard input and
    output. {host} is replaced by the name of the host. Users, ports, more keys and jump hosts are what root's
    ssh_config says. `multiverse hosts connect` makes the key of -oIdentityFile, and brings it to hosts."""


@dataclass(frozen=True)
class FenceSettings:
    """How the controller makes sure that a lost host is off, so that its jobs can run elsewhere."""

    command: Annotated[tuple[str, ...], Example('["/usr/local/sbin/power-off", "{host}"]')] = ()
    """A command that switches a host off. Exit status 0 means that the host is surely off. {host} is replaced by the
    name of the host. Empty: an operator has to say that the host is off."""
    after: Annotated[Wait, Allowed("at least pacing.silence, if there is a command")] = 60.0
    """The time without any sign of a host after which it is switched off."""
    timeout: Seconds = 120.0
    """The time that the command may take. Then it is killed, and run again later."""
    quorum: Annotated[float, Field(ge=0, le=1), Unit("")] = 0.5
    """The share of the other hosts that must be in sight before a host is switched off; otherwise the controller
    itself may be cut off. 0: none, for a site with a single other host."""


@dataclass(frozen=True)
class LeaseSettings:
    """Physical nodes that are borrowed from a partition while jobs wait for room. Each is held by a job of Slurm, the
    pilot, and serves as a host until it is given back. One table for each partition."""

    partition: Annotated[str, Example('"batch"')]
    """The partition from which nodes are leased: whole nodes, or parts of one size."""
    account: Annotated[str, Example('"operations"')] = ""
    """The account that the pilots are charged to. Empty: the default account of `user`."""
    user: Annotated[str, Example('"multiverse"')] = ""
    """The user whose jobs the pilots are. Empty: the user of the controller, mostly root."""
    cpus: Annotated[Count, Unit("CPUs")] = 0
    """CPUs of a pilot. 0: a whole node, which no other job shares."""
    memory: Mebibytes = 0
    """Memory of a pilot. 0: what the partition gives to a job by default, and all memory of a whole node."""
    time_limit: Reloaded[Seconds] = 14400.0
    """The time limit of a pilot. No job is placed on a lease whose time limit exceeds what is left of it."""
    max: Reloaded[Count] = 1
    """How many nodes are leased at a time. 0: none is added, and leased ones are given back when they are idle."""
    min_wait: Reloaded[Wait] = 10.0
    """The time that a job has waited for room before a node is leased for it."""
    idle: Reloaded[Seconds] = 120.0
    """The time without a VM after which a leased node is given back."""
    start_timeout: Reloaded[Seconds] = 120.0
    """The time that a leased node has from the start of its pilot until its agent answers."""
    preemptable_ok: Reloaded[bool] = False
    """Whether jobs that Slurm cannot queue again (srun, salloc, --no-requeue), or that have no time limit, may use a
    leased node, though its pilot may be preempted or cancelled at any time. Set it where nothing preempts the
    pilots."""
    fence: Reloaded[bool] = False
    """Whether `fence.command` may switch off a physical node on which something of a pilot may be left. Jobs of
    others may be on it by then. Without it, an operator's word or the reboot of the node is waited for."""
    become: Annotated[tuple[str, ...], Example('["sudo", "-n"]')] = ()
    """The command by which a pilot becomes root, where Slurm runs no job of root (DisableRootJobs=YES). It is put in
    front of the pilot's own command. It is not needed if `user` is empty or root."""


@dataclass(frozen=True)
class OverflowSettings:
    """A partition of physical nodes whose jobs run in VMs while it is full. Its users do nothing for that. One table
    for each partition."""

    partition: Annotated[str, Example('"batch"')]
    """The partition whose waiting jobs may run in VMs."""
    constraint: Annotated[str, Example('"anywhere"')] = ""
    """Only jobs that ask for this feature of the physical nodes. Empty: all jobs."""
    accounts: Annotated[tuple[str, ...], Example('["physics", "chemistry"]')] = ()
    """Only jobs of these accounts. Empty: jobs of all accounts."""
    min_wait: Wait = 30.0
    """The time that a job has waited for physical nodes before a VM is made for it."""


@dataclass(frozen=True)
class UsersSettings:
    """How users who are no operators ask about their own jobs."""

    enabled: bool = True
    """Whether users may ask about their own jobs."""
    socket: Annotated[Path | None, Example('"/run/multiverse/users.sock"')] = None
    """The Unix socket that every user of this machine may use. Not set: users.sock beside `socket`."""
    listen: Annotated[str, Example('"10.0.0.5"')] = ""
    """The IP address of this machine at which users of other machines ask; munge says who they are. Empty: they
    cannot."""
    port: Port = 6821
    """The TCP port at `listen`."""


VXLAN_PORTS = 1024
"""Different ports of the networks of jobs. Two jobs with the same one have no VMs on the same host."""


@dataclass(frozen=True)
class JobVmSettings:
    """VMs inside the allocations of jobs on physical nodes. The agent of a node provides them to Slurm's plugin."""

    enabled: bool = False
    """Whether the agent of this node provides VMs inside jobs."""
    only: bool = False
    """Whether the agent provides VMs inside jobs alone, and serves no controller. A node with such an agent can be
    leased, too."""
    design: Literal["plugin", "tasks"] = "plugin"
    """Who asks for the VMs of a job: plugin (Slurm's plugin, for jobs with its options) or tasks (steps of the batch
    file that call multiverse-vm, for sites that may not load a plugin). All nodes must have the same."""
    socket: Path = Path("/run/multiverse/jobs.sock")
    """The Unix socket to which the plugin and the tasks of users connect."""
    records: Path = Path("/run/multiverse/jobs")
    """The directory in which the plugin records which jobs have a VM."""
    plugin: Path = Path("/usr/lib/slurm/multiverse.so")
    """Where the plugin is on the nodes."""
    enter: Path = Path("/usr/libexec/multiverse/mventer")
    """The program that runs the command of a task in the VM of its job."""
    timeout: Annotated[Positive, Unit("seconds")] = 300
    """The time that a task waits for its VM, whose template may have to be built first."""
    feature: str = "job-vms"
    """The feature of nodes that take jobs with VMs inside. The agent gives it to its node as long as the plugin
    passes a test there."""
    node: Annotated[str, Example('"n17"')] = ""
    """The name of this host in Slurm. Empty: the same as `host.name`."""
    check: Annotated[float, Field(ge=1), Unit("seconds")] = 15.0
    """The time between two tests of the plugin."""
    bridge: Annotated[str, Allowed("a name of 1 to 11 bytes")] = "mvjobs"
    """The beginning of the names of the bridges that jobs have on their hosts; a number follows it. Bridges of
    different jobs are not connected. All hosts must have the same."""
    subnet: Annotated[str, Allowed("at least 65536 addresses, none of network.subnet")] = "10.214.0.0/16"
    """The IPv4 network of VMs inside jobs. All jobs have the same addresses, because their networks are separate."""
    platform: Literal["host", "agent"] = "host"
    """What makes the VMs: host (this machine, in the control groups of the job) or agent (the agent of another host,
    `platform_host`)."""
    platform_host: Annotated[str, Example('"vmhost1"')] = ""
    """The host whose agent makes the VMs, if `platform` is agent. It is reached by `agent.connect`."""
    platform_subnet: Annotated[str, Example('"10.213.64.0/20"')] = ""
    """The part of `network.subnet` for VMs of this node's jobs, if `platform` is agent. No controller and no other
    node may give these addresses to VMs. Each job takes 64 of them."""
    port: Annotated[int, Unit(""), Allowed("1 to 64512, with none of 1024 ports equal to vxlan.port")] = 20480
    """The first of 1024 UDP ports. The nodes of a job are connected by a VXLAN with the port that the job's number
    chooses. MTU and addresses of nodes are those of `[vxlan]`."""
    overhead: Annotated[int, Field(ge=64), Unit("MiB")] = 192
    """The part of a job's memory that QEMU takes beside the memory of the guest."""
    sriov: Annotated[tuple[str, ...], Example('["0000:3b:00.0", "ib0", "8086:154c"]')] = ()
    """The virtual functions (SR-IOV) that VMs may have: those of a device, by its PCI address or its network
    interface, or those with these vendor and device ids. Each function is of one VM at a time."""
    sriov_gres: Annotated[str, Example('"vf"')] = ""
    """The name of the GRES by which Slurm counts these functions, each with File=/dev/vfio/N in gres.conf. Jobs that
    want functions get it added. Empty: the agent chooses free functions by itself."""
    ivshmem_size: Annotated[Mebibytes, Allowed("a power of two, 1 to 256")] = 32
    """The size of each region of memory that VMs of one job share (--ivshmem)."""


@dataclass(frozen=True)
class SaveSettings:
    """Jobs whose VMs are saved to files, and that go on later."""

    enabled: bool = False
    """Whether running jobs can be saved."""
    directory: Path = Path("/var/lib/multiverse/saved")
    """The directory of saved VMs. If the hosts share it, a job can go on on any of them; otherwise only on the host
    that saved it."""
    copy: Annotated[Path | None, Example('"/shared/multiverse/saved"')] = None
    """A second directory, on other storage, to which each saved VM is copied. A job can go on on any host that
    reaches it, even if the host that saved it is lost. Not set: nothing is copied."""
    before: Annotated[float, Field(ge=60), Unit("seconds")] = 120.0
    """How long before its time limit a job is saved that asks for that (vm:save) without a time."""
    max_runs: Reloaded[Positive] = 7
    """How many runs a job may have. Its last run is not saved, and ends at its time limit."""
    sleep_after: Reloaded[Annotated[float, Field(ge=0, allow_inf_nan=False), Unit("seconds")]] = 0.0
    """The time that a job is suspended (scontrol suspend) before its VM frees the memory of its host. Hosts need
    slurmd, munge and Python for that. 0: VMs of suspended jobs keep their memory."""
    checkpoint_every: Reloaded[Annotated[float, Field(ge=1), Unit("seconds")]] = 60.0
    """The shortest time between two checkpoints of a job."""
    checkpoints: Reloaded[Positive] = 2
    """How many checkpoints of a job (vm:checkpoint) are kept. Older ones are removed."""
    user_quota: Reloaded[Mebibytes] = 0
    """The space that the saved VMs of one user may take. One that is not complete yet counts as its whole memory and
    disk. 0: no limit."""
    site_quota: Reloaded[Mebibytes] = 0
    """The space that the saved VMs of all users together may take. 0: no limit."""
    keep_days: Reloaded[Days] = 30.0
    """The time after which a saved VM is discarded whose job has not gone on. The job is held then. 0: never."""
    encrypt: Reloaded[bool] = False
    """Whether saved VMs are encrypted, with a key for each user that the controller keeps in `state_dir`."""
    no_requeue: bool = False
    """Whether jobs can be saved, too, that were submitted with --no-requeue."""


@dataclass(frozen=True)
class MoveSettings:
    """VMs that move to other hosts while their jobs run. The agents connect to each other for that."""

    enabled: bool = False
    """Whether VMs can move between hosts."""
    addresses: Annotated[tuple[tuple[str, str], ...], Example('[["n1", "10.9.0.11"], ["n2", "10.9.0.12"]]')] = ()
    """Names of hosts and their addresses in the network by which VMs move. A host that is not named here has its
    address in `vxlan.addresses`, or that of the name service."""
    port: Port = 14790
    """The TCP port on each host at which it receives VMs."""
    lease_port: Annotated[int, Field(ge=1, le=65520), Unit("")] = 14791
    """The first of 16 TCP ports on leased nodes, for other hosts and the controller: each lease of a node has one."""
    private: bool = False
    """Whether nobody else listens or sends in the network by which VMs move. Then nothing is encrypted."""
    compress: bool = False
    """Whether memory is compressed (zstd) when it is sent."""
    bandwidth: MebibytesPerSecond = 0
    """What one move may send. 0: no limit."""
    timeout: Annotated[float, Field(gt=0, le=3000), Unit("seconds")] = 600.0
    """The time after which a move is given up, because the job writes to its memory or disk faster than that is
    sent."""
    downtime: Annotated[float, Field(gt=0, le=10), Unit("seconds")] = 0.05
    """The time for which a VM may stand still at the end of its move."""
    at_once: Reloaded[Positive] = 2
    """How many VMs move from or to one host at the same time."""


@dataclass(frozen=True)
class RebalanceSettings:
    """Running jobs that leave their hosts: their VMs move, or are saved and go on later."""

    drains: Reloaded[bool] = True
    """Whether jobs leave hosts that an operator drains with --move or --save."""
    maintenance: Reloaded[bool] = True
    """Whether jobs leave hosts that a reservation of Slurm with the flag MAINT names, before it begins."""
    notice: Reloaded[Annotated[float, Field(ge=0, le=86400), Unit("seconds")]] = 900.0
    """How long before such a reservation begins jobs leave its hosts."""
    preemption: bool = True
    """Whether jobs give way to others that may preempt them by Slurm's own rules (PreemptType)."""
    leases: bool = True
    """Whether jobs leave leased hosts whose pilots are told to end, and those that other hosts could replace."""
    host_rate: Reloaded[Annotated[int, Field(ge=1), Unit("MiB/s")]] = 200
    """What one host sends or writes: so much can leave a leased host in time."""
    keeps: Reloaded[Wait] = 600.0
    """A leased host that its jobs would keep for longer is emptied, if other hosts have room for them."""
    at_once: Reloaded[Positive] = 8
    """How many jobs of the site leave their hosts at the same time."""
    bandwidth: Reloaded[MebibytesPerSecond] = 0
    """What all jobs that leave their hosts may send together. 0: no limit."""
    per_job: Reloaded[Annotated[int, Field(ge=1, le=10), Unit("")]] = 6
    """How many times one job may have to leave its host in an hour."""
    alert_after: Reloaded[Seconds] = 600.0
    """The time for which one of these limits may hold jobs back before `multiverse status` shows an alert."""


@dataclass(frozen=True)
class Settings:
    """All settings of the controller and of the agents."""

    include: Annotated[Path | None, Example('"site.toml"')] = None
    """Another file of settings, relative to this one. What it says overrides what this file says. A file that is
    included includes no further one."""
    state_dir: Path = Path("/var/lib/multiverse")
    """The directory of the controller's database and keys, and of what agents have found out about their hosts."""
    socket: Path = Path("/run/multiverse/api.sock")
    """The Unix socket at which the controller answers operators."""
    poll: Seconds = 2.0
    """The time between two observations of Slurm and of the hosts while nothing tells of a change."""
    history_days: Days = 30.0
    """How long records of ended jobs, VMs and templates are kept. 0: for ever."""
    trace: Annotated[Path | None, Example('"/var/tmp/multiverse.trace"')] = None
    """A file in which all calls to Slurm and to the hosts are recorded, to find the cause of an error. Each start of
    the controller empties it. Not set: nothing is recorded."""
    scheduler: str = "slurm"
    """The batch scheduler: the name of an entry point of the group multiverse.schedulers."""
    platforms: tuple[str, ...] = ("qemu",)
    """What runs VMs: names of entry points of the group multiverse.platforms."""
    agent: AgentSettings = field(default_factory=AgentSettings)
    fence: Reloaded[FenceSettings] = field(default_factory=FenceSettings)
    job_vms: JobVmSettings = field(default_factory=JobVmSettings)
    host: HostSettings = field(default_factory=HostSettings)
    hosts: tuple[HostClass, ...] = ()
    users: UsersSettings = field(default_factory=UsersSettings)
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    qemu: QemuSettings = field(default_factory=QemuSettings)
    network: NetworkSettings = field(default_factory=NetworkSettings)
    vxlan: VxlanSettings = field(default_factory=VxlanSettings)
    image: ImageSettings = field(default_factory=ImageSettings)
    pacing: PacingSettings = field(default_factory=PacingSettings)
    backfill: Reloaded[BackfillSettings] = field(default_factory=BackfillSettings)
    placement: Reloaded[PlacementSettings] = field(default_factory=PlacementSettings)
    web: WebSettings = field(default_factory=WebSettings)
    mounts: Reloaded[
        Annotated[tuple[Mount, ...], Example('source = "fileserver:/home"\ntarget = "/home"\noptions = "nosuid,nodev"')]
    ] = ()
    pool: Reloaded[tuple[PoolSettings, ...]] = ()
    save: SaveSettings = field(default_factory=SaveSettings)
    move: MoveSettings = field(default_factory=MoveSettings)
    rebalance: RebalanceSettings = field(default_factory=RebalanceSettings)
    lease: tuple[LeaseSettings, ...] = ()
    overflow: tuple[OverflowSettings, ...] = ()

    @property
    def preempts(self) -> bool:
        """Whether running jobs in VMs may give way to urgent ones."""
        return self.rebalance.preemption and (self.save.enabled or self.move.enabled)


class Document(NamedTuple):
    """A file of settings as it was read."""

    path: Path
    text: str
    raw: dict[str, Any]


def documents(path: Path) -> list[Document]:
    """The file, and the one that it includes. Raises `Refused` if one cannot be read, or is not TOML."""
    first = _read(path)
    include = first.raw.get("include")
    return [first, _read(path.parent / include)] if isinstance(include, str) else [first]


def merged(read: Iterable[Document]) -> dict[str, Any]:
    """The documents in one: later ones override earlier ones."""
    return reduce(_merged, (one.raw for one in read))


def load(path: Path) -> Settings:
    """Read settings from a TOML file and the file that it includes, as they are for this machine. Raises `Refused`,
    which names every wrong key."""
    read = documents(path)
    settings = parse(merged(read), " with ".join(str(one.path) for one in read))
    return on_machine(settings, socket.gethostname())


# --- reading them again ----------------------------------------------------------------------------


def reloaded(running: Settings, new: Settings) -> tuple[Settings, list[str]]:
    """The running settings with the values of `new` that can be applied at run time, and the keys whose new values need
    a restart. If the two would contradict each other together, all of them do."""
    waiting: list[str] = []
    applied: Settings = _applied(running, new, (), waiting)
    if any(_contradictions(applied)):
        return running, changed_keys(running, new)
    return applied, waiting


def changed_keys(before: Any, after: Any, prefix: tuple[str | int, ...] = ()) -> list[str]:
    """The keys that differ. An array of tables that are others is named as a whole."""
    if before == after:
        return []
    pairs = _pairs(before, after)
    if not pairs:
        return [key_text(prefix)]
    return [key for name, old, new in pairs for key in changed_keys(old, new, (*prefix, name))]


def _pairs(before: Any, after: Any) -> list[tuple[str | int, Any, Any]]:
    """The values of two tables, or the tables of two arrays that stand for the same things; empty for other values."""
    if is_dataclass(before):
        return [(one.name, getattr(before, one.name), getattr(after, one.name)) for one in fields(before)]
    if isinstance(before, tuple) and len(before) == len(after) and all(map(_are_of_one, before, after)):
        return [(i, *both) for i, both in enumerate(zip(before, after, strict=True))]
    return []


def _are_of_one(before: Any, after: Any) -> bool:
    """Whether two tables of an array stand for the same thing, which their first key names."""
    if not is_dataclass(before):
        return False
    first = fields(before)[0].name
    return bool(getattr(before, first) == getattr(after, first))


def _applied(running: Any, new: Any, prefix: tuple[str | int, ...], waiting: list[str]) -> Any:
    """What `running` becomes. Notes the keys that stay and differ."""
    if running == new:
        return running
    pairs = _pairs(running, new)
    if not pairs:
        waiting.append(key_text(prefix))
        return running
    if isinstance(running, tuple):
        return tuple(_applied(old, value, (*prefix, i), waiting) for i, old, value in pairs)
    hints = get_type_hints(type(running), include_extras=True)
    values = {
        str(name): value if has_mark(hints[str(name)], AtReload) else _applied(old, value, (*prefix, name), waiting)
        for name, old, value in pairs
    }
    return replace(running, **values)


def marks_of(hint: Any) -> Iterator[Any]:
    """What annotations say of a type, and of the type that may also be None."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        yield from marks_of(inner)
        for mark in marks:
            yield from mark.metadata if isinstance(mark, FieldInfo) else (mark,)
    elif NoneType in get_args(hint):
        for one in get_args(hint):
            yield from marks_of(one)


def has_mark(hint: Any, mark: type) -> bool:
    return any(isinstance(one, mark) for one in marks_of(hint))


# --- hosts -----------------------------------------------------------------------------------------


def host_names(settings: Settings) -> list[str]:
    """The names of the hosts that the settings name: those of `[[hosts]]`, or this machine alone."""
    return list(_classes(settings)) if settings.hosts else [settings.host.name]


def is_host(settings: Settings) -> bool:
    """Whether this machine is one of the hosts that the settings name. A controller's machine need not be one."""
    return settings.host.name in host_names(settings)


def on_machine(settings: Settings, machine: str) -> Settings:
    """The settings for the machine of that host name. With `[[hosts]]` they have its own name and the values of its
    class. A machine without a class is no host, but may be the controller's."""
    if not settings.hosts:
        return settings
    # A class gets the values of [host] that it lacks, because [host] becomes the values of this machine.
    whole = [(one, _of_class(settings, one).host) for one in settings.hosts]
    shared = {one.name for one in fields(HostSettings)} & {one.name for one in fields(HostClass)}
    hosts = tuple(replace(one, **{key: getattr(host, key) for key in shared}) for one, host in whole)
    classes = _classes(settings)
    name = settings.host.name if settings.host.name != LOCALHOST else machine.partition(".")[0]
    host = replace(settings.host, name=name)
    return _of_class(replace(settings, host=host, hosts=hosts), classes.get(name))


def host_settings(settings: Settings, name: str) -> HostSettings | None:
    """What a host offers; None if the settings do not name it."""
    if name not in host_names(settings):
        return None
    return _of_class(settings, _classes(settings).get(name)).host


def uplink_of(settings: Settings, name: str) -> str:
    """The uplink of a host; empty: none."""
    return _of_class(settings, _classes(settings).get(name)).qemu.uplink


def move_address(settings: Settings, name: str) -> str:
    """The address at which a host receives VMs that move. Raises `Refused` as `vxlan_address`."""
    own = dict(settings.move.addresses).get(name)
    return str(ipaddress.ip_address(own)) if own else vxlan_address(settings, name)


def jobs_leave_leases(settings: Settings) -> bool:
    """Whether running jobs leave leases that end."""
    return settings.rebalance.leases and (settings.save.enabled or settings.move.enabled)


def vxlan_address(settings: Settings, name: str) -> str:
    """The address of a host, or of the controller's machine, in the network of the hosts. If the settings do not have
    it, the name service is asked, for an address of the same version of IP as those in the settings. Raises `Refused`
    if neither knows an address that other machines reach."""
    addresses = dict(settings.vxlan.addresses)
    if name in addresses:
        return str(ipaddress.ip_address(addresses[name]))
    version = next((ipaddress.ip_address(one).version for one in addresses.values()), 4)
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    hint = f'give it in the settings of all hosts: [vxlan] addresses = [["{name}", "ADDRESS"]]'
    try:
        found = str(socket.getaddrinfo(name, None, family, socket.SOCK_DGRAM)[0][4][0])
    except OSError as error:
        raise Refused(f"the name service knows no IPv{version} address of {name}: {error}", hint=hint) from error
    if ipaddress.ip_address(found).is_loopback:
        raise Refused(f"the name service gives {name} the address {found}, which no other machine reaches", hint=hint)
    return found


def site_cpus(settings: Settings) -> int:
    """The CPUs that VMs may claim together on all hosts of the settings."""
    hosts = [_of_class(settings, one).host for one in _classes(settings).values()] or [settings.host]
    return sum(int(host.cores * host.cpu_overcommit) for host in hosts)


def _classes(settings: Settings) -> Mapping[str, HostClass]:
    """The class of each host, by the host's name, in the order of the settings."""
    return {name: one for one in settings.hosts for name in _names(one)}


def _names(one: HostClass) -> list[str]:
    return [str(name) for name in NodeSet(one.nodes, resolver=RESOLVER_NOGROUP)]


def names_of_hosts(nodes: str) -> list[str]:
    """The names in a node set. Raises `Refused` if it is no node set, or has a name that no host can have."""
    try:
        names = _names(HostClass(nodes))
    except NodeSetException as error:
        raise Refused(f"{nodes!r} is no node set: {error}", hint="as n[1-4,7]") from error
    if why := next(filter(None, map(wrong_host_name, names)), ""):
        raise Refused(why)
    return names


def folded(names: Iterable[str]) -> str:
    """Names as a node set, such as n[1-4,7]; empty if there are none."""
    return str(NodeSet.fromlist(names, resolver=RESOLVER_NOGROUP))


def _of_class(settings: Settings, own: HostClass | None) -> Settings:
    if own is None:
        return settings
    given = {key: value for key in (f.name for f in fields(own)) if (value := getattr(own, key)) is not None}
    host = {f.name: given[f.name] for f in fields(HostSettings) if f.name in given}
    qemu = {f.name: given[f.name] for f in fields(QemuSettings) if f.name in given}
    return replace(settings, host=replace(settings.host, **host), qemu=replace(settings.qemu, **qemu))


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both documents in one. Tables are merged key by key; other values of `above` override values of `below`."""
    both = {key: _merged(below[key], above[key]) for key in below.keys() & above.keys()
            if isinstance(below[key], dict) and isinstance(above[key], dict)}  # fmt: skip
    return {**below, **above, **both}


def _read(path: Path) -> Document:
    try:
        text = path.read_text()
        return Document(path, text, tomllib.loads(text))
    except OSError as error:
        hint = f"name another file, or write this one: multiverse config example > {path}"
        raise Refused(f"cannot read {path}: {error.strerror}", hint=hint) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{path} is not TOML: {error}", hint="correct that line") from error


class Mistake(NamedTuple):
    """What is wrong with a key. The key is a path: names of tables and keys, and indexes of arrays."""

    key: tuple[str | int, ...]
    message: str

    def __str__(self) -> str:
        return f"{key_text(self.key)}: {self.message}"


def key_text(key: Iterable[str | int]) -> str:
    """A path as operators read it: the tables of an array are counted from 1."""
    return ".".join(str(word + 1) if isinstance(word, int) else word for word in key)


def parse(raw: dict[str, Any], origin: str) -> Settings:
    """Settings from a parsed document, which error messages call `origin`. Raises `Refused`."""
    settings, found = examined(raw)
    if settings is not None and not found:
        return settings
    raise Refused(
        f"{origin}: " + "; ".join(map(str, found)),
        hint="correct these keys and start again; `multiverse config check` shows the line of each",
    )


def examined(raw: dict[str, Any]) -> tuple[Settings | None, list[Mistake]]:
    """The settings in a parsed document, and all mistakes in it. None if a value is wrong. Contradictions between keys
    are found among the values that are right by themselves."""
    unknown = unknown_keys(Settings, raw)
    known = _without(raw, [one.key for one in unknown])
    settings, wrong = validated(Settings, known)
    if settings is None:
        rest, _ = validated(Settings, _without(known, [_replaceable(one.key) for one in wrong]))
        names = {".".join(map(str, _replaceable(one.key))) for one in wrong}
        others = [one for one in _contradictions(rest or Settings()) if not any(name in one for name in names)]
        return None, unknown + wrong + list(map(_as_mistake, others))
    return settings, unknown + list(map(_as_mistake, _contradictions(settings)))


def examined_as(cls: type[T], raw: dict[str, Any]) -> tuple[T | None, list[Mistake]]:
    """A parsed document as a value of a class of tables, and each key that is unknown or wrong by itself. None if a
    value is wrong."""
    unknown = unknown_keys(cls, raw)
    value, wrong = validated(cls, _without(raw, [one.key for one in unknown]))
    return value, unknown + wrong


def validated(cls: type[T], known: dict[str, Any]) -> tuple[T | None, list[Mistake]]:
    """A document without unknown keys as a value of a class of tables; None if a value is wrong, and what is wrong."""
    try:
        value: T = _adapter(cast(Any, cls)).validate_python(known)
        return value, []
    except ValidationError as error:
        return None, [Mistake(each["loc"], _said(each["loc"], each)) for each in error.errors()]


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


_MESSAGES = {
    "missing": "must be given",
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be text in quotes",
    "path": "must be a path in quotes",
    "tuple": "must be an array",
    "dataclass": "must be a table",
}
"""By the first word of Pydantic's types of errors."""

_WORDS = {
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}
"""For what is in its other messages, in the order of replacement."""


def _said(key: tuple[str | int, ...], error: ErrorDetails) -> str:
    """An error of Pydantic in the words of a file of settings."""
    kind, given, message = error["type"], error["input"], error["msg"]
    if kind.startswith("tuple") and isinstance(given, dict):
        return f"must be an array of tables: begin each with [[{'.'.join(map(str, key))}]]"
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    said = _MESSAGES.get(kind.partition("_")[0], message)
    return said if isinstance(given, dict | list) else f"{said}, not {toml_value(given)}"


def toml_value(value: object) -> str:
    """A value as a file of settings has it."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value)
        case tuple() | list():
            return f"[{', '.join(map(toml_value, value))}]"
        case dict():
            return f"{{ {', '.join(f'{key} = {toml_value(one)}' for key, one in value.items())} }}"
    return json.dumps(str(value), ensure_ascii=False)


def _as_mistake(contradiction: str) -> Mistake:
    key, _, message = contradiction.partition(": ")
    return Mistake(tuple(int(word) if word.isdecimal() else word for word in key.split(".")), message)


def _replaceable(key: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """What can be left out of a document, for a default, if this is wrong: a key of a table, or a whole array."""
    return key[: next((i for i, word in enumerate(key) if isinstance(word, int)), len(key))]


def _without(raw: dict[str, Any], keys: Iterable[tuple[str | int, ...]]) -> dict[str, Any]:
    """A document without the values at these paths; itself, if there are none."""
    keys = list(keys)
    if not keys:
        return raw
    copied = deepcopy(raw)
    for *outer, last in keys:
        table: Any = copied
        for word in outer:  # an index, or a key that was found there before
            table = table[word]
        table.pop(last, None)
    return copied


def unknown_keys(cls: type, raw: dict[str, Any]) -> list[Mistake]:
    """Each key of a document that its class does not have, with the most similar key."""
    return [Mistake(key, message) for key, message in _unknown_keys(cls, raw, (), cls)]


def _unknown_keys(
    cls: type, raw: dict[str, Any], prefix: tuple[str | int, ...], whole: type
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """The same for a table of the document, whose class is `whole`."""
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls)]
    for key, value in raw.items():
        if key not in names:
            yield (*prefix, key), f"no such key{_suggestion(key, names, whole)}"
        else:
            for inner, table, path in _tables(hints[key], value, (*prefix, key)):
                yield from _unknown_keys(inner, table, path, whole)


def _suggestion(key: str, names: Iterable[str], whole: type) -> str:
    near = difflib.get_close_matches(key, names, n=1)
    if near:
        return f", did you mean {near[0]}?"
    classes = {name: table_class(hint) for name, hint in get_type_hints(whole).items()}
    tables = [f"[{name}]" for name, cls in classes.items() if cls and key in {f.name for f in fields(cls)}]
    return f"; it is a key of {' and '.join(tables)}" if tables else ""


def table_class(hint: Any) -> Any:
    """The class of a table, or of the tables in an array; None for other values."""
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def _tables(
    hint: Any, value: Any, path: tuple[str | int, ...]
) -> Iterator[tuple[type, dict[str, Any], tuple[str | int, ...]]]:
    """The tables in a value, which may be a table or an array of tables, each with its class and its path."""
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        yield hint, value, path
    elif get_origin(hint) is tuple and isinstance(value, list):
        for i, item in enumerate(value):
            yield from _tables(get_args(hint)[0], item, (*path, i))


def _contradictions(s: Settings) -> Iterator[str]:
    """Each value that makes no sense although its type permits it, with its key."""
    yield from _wrong_host(s)
    yield from _wrong_classes(s)
    yield from _wrong_mounts(s.mounts)
    if not re.fullmatch(r"[^\s,=#\"']+", s.slurm.partition):
        yield "slurm.partition: must be the name of one partition, without blanks, commas, quotes, '=' and '#'"
    if not all(re.fullmatch(r"[A-Za-z]+=[^\s\"'#\\]+", word) for word in s.slurm.limits.split()):
        yield "slurm.limits: must be words such as MaxTime=2-0, without quotes"
    if not any("{host}" in word for word in s.agent.connect):
        yield "agent.connect: must name the host, as {host}"
    yield from _wrong_fence(s)
    yield from _wrong_sampling(s.agent)
    yield from _wrong_network(s)
    yield from _wrong_vxlan(s)
    yield from _wrong_moves(s)
    yield from _wrong_job_vms(s)
    yield from _wrong_platform(s)
    yield from _wrong_qemu(s.qemu)
    yield from _wrong_pools(s)
    yield from _wrong_leases(s.lease)
    yield from _wrong_overflow_partitions(s)
    yield from _wrong_users(s.users)
    yield from _wrong_web(s.web)
    if not LEAST_SCRATCH <= s.image.scratch <= s.image.tmp_disk:
        yield f"image.scratch: must be at least {LEAST_SCRATCH} MiB and at most image.tmp_disk, {s.image.tmp_disk} MiB"


def _wrong_host(s: Settings) -> Iterator[str]:
    if s.host.memory < s.qemu.base_memory:
        yield f"host.memory: must be at least qemu.base_memory, {s.qemu.base_memory} MiB"


def _wrong_classes(s: Settings) -> Iterator[str]:
    named: Counter[str] = Counter()
    for i, one in enumerate(s.hosts):
        try:
            names = _names(one)
        except NodeSetException as error:
            yield f"hosts.{i}.nodes: {one.nodes!r} is no node set: {error}"
            continue
        if not names:
            yield f"hosts.{i}.nodes: names no host"
        if why := next(filter(None, map(wrong_host_name, names)), ""):
            yield f"hosts.{i}.nodes: {why}"
        named.update(names)
        of_class = _of_class(s, one)
        yield from (f"hosts.{i}: {why}" for why in (*_wrong_host(of_class), *_wrong_qemu(of_class.qemu)))
    if twice := sorted(name for name, count in named.items() if count > 1):
        yield f"hosts: {', '.join(twice)} in more than one place"


def _wrong_mounts(mounts: tuple[Mount, ...]) -> Iterator[str]:
    targets = Counter(str(Path(one.target)) for one in mounts)
    for i, one in enumerate(mounts):
        if not one.source:
            yield f"mounts.{i}.source: must not be empty; give what is mounted, such as fileserver:/home"
        if not one.target.startswith("/"):
            yield f"mounts.{i}.target: must be an absolute path, not {toml_value(one.target)}"
    for twice in sorted(target for target, count in targets.items() if count > 1):
        yield f"mounts: two file systems are mounted at {twice}; give each a directory of its own"


def wrong_host_name(name: str) -> str:
    """Why this cannot be the name of a host; empty if it can. It becomes a word of `agent.connect`, and is shown."""
    if name[:1].isalnum() and all(c.isascii() and (c.isalnum() or c in "-_.") for c in name):
        return ""
    return f"{name!r} is no name of a host: letters, digits, hyphens, dots and underscores"


def _wrong_fence(s: Settings) -> Iterator[str]:
    if s.fence.command and not any("{host}" in word for word in s.fence.command):
        yield "fence.command: must name the host, as {host}"
    if s.fence.command and s.fence.after < s.pacing.silence:
        yield f"fence.after: must be at least pacing.silence, {s.pacing.silence:g} s"
    if s.agent.self_fence and s.agent.self_fence < LEAST_SELF_FENCE:
        yield f"agent.self_fence: must be at least {LEAST_SELF_FENCE:g} s, or 0"


def _wrong_sampling(agent: AgentSettings) -> Iterator[str]:
    if agent.sample and not LEAST_SAMPLE <= agent.sample <= MOST_SAMPLE:
        yield f"agent.sample: must be from {LEAST_SAMPLE:g} to {MOST_SAMPLE:g} s, or 0"
    if agent.metrics and not agent.sample:
        yield "agent.metrics: there is nothing to read with agent.sample = 0"
    if agent.metrics and not agent.metrics.startswith("/") and listening_address(agent.metrics) is None:
        yield "agent.metrics: must be ADDRESS:PORT, as 10.0.0.7:9341 or [fd00::7]:9341, or the path of a Unix socket"


def listening_address(text: str) -> tuple[str, int] | None:
    """The address and the port in ADDRESS:PORT, with an IPv6 address in brackets; None for other text."""
    address, _, port = text.rpartition(":")
    try:
        ip = ipaddress.ip_address(address.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    if (ip.version == 6) != (address[:1] == "[") or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    return str(ip), int(port)


def _wrong_network(s: Settings) -> Iterator[str]:
    try:
        network = ipaddress.IPv4Network(s.network.subnet)
        if ipaddress.IPv4Address(s.network.gateway) not in network:
            yield f"network.gateway: {s.network.gateway} is not in network.subnet {network}"
        if not 0 < s.network.first < network.num_addresses - 2:
            yield f"network.first: must be within {network}"
    except ValueError as error:
        yield f"network: {error}"


def _wrong_vxlan(s: Settings) -> Iterator[str]:
    vxlan = s.vxlan
    versions = set()
    for name, address in vxlan.addresses:
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            yield f"vxlan.addresses: {address!r} of {name} is no address"
            continue
        versions.add(found.version)
        if found.is_link_local:
            yield f"vxlan.addresses: {address} of {name} is of one link only; give one that all machines reach"
    if len(versions) > 1:
        yield "vxlan.addresses: IPv4 and IPv6 cannot be mixed; give all machines addresses of one version"
    if vxlan.enabled and any(_of_class(s, one).qemu.uplink for one in (None, *s.hosts)):
        yield "vxlan: with qemu.uplink, frames would reach a host in two ways; set one of the two"


def _wrong_moves(s: Settings) -> Iterator[str]:
    for name, address in s.move.addresses:
        try:
            ipaddress.ip_address(address)
        except ValueError:
            yield f"move.addresses: {address!r} of {name} is no address"


def _wrong_job_vms(s: Settings) -> Iterator[str]:
    jobs = s.job_vms
    if not 1 <= len(jobs.bridge) <= 11 or "/" in jobs.bridge:
        yield "job_vms.bridge: must be a name of 1 to 11 bytes, because a number follows it"
    try:
        network = ipaddress.IPv4Network(jobs.subnet)
        if network.prefixlen > 16 or network.overlaps(ipaddress.IPv4Network(s.network.subnet)):
            yield f"job_vms.subnet: needs 65536 addresses or more, none of them in network.subnet {s.network.subnet}"
    except ValueError as error:
        yield f"job_vms.subnet: {error}"
    if jobs.only and not jobs.enabled:
        yield "job_vms.only: such an agent serves nothing unless job_vms.enabled is true"
    if not 0 < jobs.port <= 65536 - VXLAN_PORTS or s.vxlan.port in range(jobs.port, jobs.port + VXLAN_PORTS):
        yield f"job_vms.port: this and {VXLAN_PORTS - 1} ports after it, without vxlan.port, must be UDP ports"
    if jobs.ivshmem_size not in (1 << exponent for exponent in range(9)):
        yield "job_vms.ivshmem_size: must be a power of two, from 1 to 256 MiB"
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", jobs.feature) or jobs.feature.startswith("mv_"):
        yield "job_vms.feature: must be a name of letters, digits and ._- that does not begin with mv_"
    for one in jobs.sriov:
        if not re.fullmatch(
            r"([0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]|[0-9a-f]{4}:[0-9a-f]{4}|[^\s/:]{1,15}", one
        ):
            yield f"job_vms.sriov: {one!r} is no PCI address, no pair of ids like 8086:154c and no interface"
    if not re.fullmatch(r"[A-Za-z0-9_]{0,64}", jobs.sriov_gres):
        yield "job_vms.sriov_gres: must be the name of a GRES, of letters, digits and _"


def _wrong_platform(s: Settings) -> Iterator[str]:
    if s.job_vms.platform == "host":
        return
    if problem := wrong_host_name(s.job_vms.platform_host):
        yield f"job_vms.platform_host: {problem}"
    try:
        part, whole = ipaddress.IPv4Network(s.job_vms.platform_subnet), ipaddress.IPv4Network(s.network.subnet)
        if part.prefixlen > 26 or not part.subnet_of(whole) or ipaddress.IPv4Address(s.network.gateway) in part:
            yield (
                f"job_vms.platform_subnet: needs 64 addresses or more of network.subnet {whole}, without"
                " network.gateway, which no controller and no other node gives to VMs"
            )
    except ValueError as error:
        yield f"job_vms.platform_subnet: {error}"


def _wrong_qemu(qemu: QemuSettings) -> Iterator[str]:
    for key, name in (("bridge", qemu.bridge), ("uplink", qemu.uplink or "none")):
        if not 1 <= len(name) <= 15 or "/" in name or not name.isprintable() or " " in name:
            yield f"qemu.{key}: an interface name has 1 to 15 bytes, without blanks and slashes"
    if qemu.uplink.startswith("mv"):
        yield "qemu.uplink: the firewall takes interfaces whose names begin with mv for VMs; rename it"
    first, count = qemu.uids
    if (first, count) != (0, 0) and not (first > 0 and count > 1 and first + count <= 1 << 31):
        yield "qemu.uids: must be the first uid and their number, at least 2, all below 2147483648; or [0, 0]"
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", qemu.cpu):
        yield 'qemu.cpu: "host", or the name of a CPU model of QEMU, without further options'
    if qemu.tb_size != 0 and qemu.tb_size < 8:
        yield "qemu.tb_size: must be at least 8 MiB, or 0"
    if len(str(qemu.run)) + len(_LONGEST_SOCKET) > 107:
        yield f"qemu.run: {qemu.run} is too long for the sockets in it; use at most {107 - len(_LONGEST_SOCKET)} bytes"


def _wrong_users(users: UsersSettings) -> Iterator[str]:
    try:
        ipaddress.ip_address(users.listen or "127.0.0.1")
    except ValueError:
        yield f"users.listen: {users.listen!r} is no IP address of this machine; empty: nobody asks from elsewhere"


def users_socket(settings: Settings) -> Path:
    """The socket that every user may use."""
    return settings.users.socket or settings.socket.with_name("users.sock")


def web_address(listen: str) -> tuple[str, int] | None:
    """The address and port of `web.listen`; None for a path. Raises `ValueError` for other text."""
    if listen.startswith("/"):
        return None
    host, _, port = listen.rpartition(":")
    address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    if not address.is_loopback:
        raise ValueError(f"{address} can be reached from other machines, without authentication")
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"{port!r} is no port")
    return str(address), int(port)


def _wrong_web(web: WebSettings) -> Iterator[str]:
    try:
        path = bool(web.listen) and web_address(web.listen) is None
    except ValueError as error:
        yield f"web.listen: must be an absolute path, or an address of this machine itself as 127.0.0.1:8642: {error}"
        return
    if path and len(web.listen) > 107:
        yield "web.listen: the path of a socket has at most 107 bytes"
    if web.group and not path:
        yield "web.group: only a Unix socket belongs to a group; set web.listen to a path"


def _wrong_pools(s: Settings) -> Iterator[str]:
    for i, pool in enumerate(s.pool):
        if not pool.min <= (pool.max or pool.min) or not (pool.max or pool.min):
            yield f"pool.{i}: max must be at least 1, and not less than min"
    if s.pool and s.image.per_account:
        yield "pool: not possible with image.per_account, because the templates of a pool serve all accounts"
    same = [(p.image, p.depth, (p.cpus, p.memory) if p.depth is Depth.JOINED else ()) for p in s.pool]
    if len(set(same)) < len(same):
        yield "pool: two pools hold the same VMs; combine them into one"


def _wrong_leases(leases: tuple[LeaseSettings, ...]) -> Iterator[str]:
    for i, one in enumerate(leases):
        if not one.partition or "," in one.partition:
            yield f"lease.{i}.partition: must be the name of one partition"
        if not one.cpus and one.memory:
            yield f"lease.{i}.memory: a whole node has all its memory; set cpus, too, to lease a part"
    if len({one.partition for one in leases}) < len(leases):
        yield "lease: two leases of one partition; combine them into one"


def _wrong_overflow_partitions(s: Settings) -> Iterator[str]:
    for i, one in enumerate(s.overflow):
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", one.partition):  # it becomes part of a feature of nodes
            yield f"overflow.{i}.partition: must be the name of one partition, of letters, digits, '_', '.' and '-'"
        if one.partition == s.slurm.partition:
            yield f"overflow.{i}.partition: {one.partition} has no physical nodes"
        if one.constraint and not re.fullmatch(r"\w[\w.-]*", one.constraint, re.ASCII):
            yield f"overflow.{i}.constraint: must be the name of one feature"
    if len({one.partition for one in s.overflow}) < len(s.overflow):
        yield "overflow: one partition twice; combine the two into one"
    if both := {one.partition for one in s.overflow} & {one.partition for one in s.lease}:
        yield f"overflow: {', '.join(sorted(both))} is leased, too; lease from, or let overflow, another partition"
