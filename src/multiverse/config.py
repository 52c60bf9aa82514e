"""Settings: one TOML file, read into frozen values. An error message names each wrong key."""

from __future__ import annotations

import difflib
import ipaddress
import re
import shutil
import socket
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
from pydantic import Field, TypeAdapter, ValidationError

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

Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Wait = Annotated[float, Field(ge=0)]
"""Seconds, perhaps none."""
Rate = Annotated[float, Field(ge=0)]
Factor = Annotated[float, Field(ge=1)]
"""How many times the present amount may be claimed."""
Port = Annotated[int, Field(ge=1, le=65535)]
Mtu = Annotated[int, Field(ge=576, le=9000)]
NetworkId = Annotated[int, Field(ge=0, lt=1 << 24)]

LOCALHOST = "localhost"
"""The name of this machine as a host, where it is the only one."""


@dataclass(frozen=True)
class HostSettings:
    """What this machine offers to VMs: all it has, or less. Memory and disk in MiB. With `[[hosts]]`: the values of
    hosts whose class has no other value."""

    name: str = LOCALHOST  # with [[hosts]], by default the machine's short host name
    cores: Positive = 2
    memory: int = 4096
    disk: int = 65536
    # VMs may claim this many times `cores` together. One VM has no more than `cores` CPUs all the same.
    cpu_overcommit: Factor = 1.0
    # VMs may claim this many times `memory`. Above 1, a VM that has run for a while counts with the memory it uses.
    overcommit: Factor = 1.0
    floor: Natural = 1024  # MiB that stay available on the machine: with less, no VM starts (if overcommit is above 1)
    # VMs may claim this many times `disk`. Above 1, a VM that finds no room for what it writes waits for room.
    disk_overcommit: Factor = 1.0
    disk_floor: Natural = 1024  # with less MiB available on the file system of qemu.vms, no VM is added
    # Mbit/s that VMs may claim of the network. 0: what qemu.uplink reports, and nothing if there is no uplink.
    net: Natural = 0

    @property
    def overcommitment(self) -> Overcommitment:
        return Overcommitment(self.cpu_overcommit, self.overcommit, self.disk_overcommit, self.floor, self.disk_floor)


@dataclass(frozen=True)
class SlurmSettings:
    """Where the site's Slurm is, and the names of Multiverse's partition, features and licence there."""

    conf: Path = Path("/etc/slurm/slurm.conf")
    bin_dir: Path | None = None  # the directory of Slurm's commands; None: found on PATH
    partition: str = "vm"  # users submit to it; jobs wait and run in it
    gate_feature: str = "mvgate"  # of the nodes that waiting jobs ask for
    licence: str = "vm"  # what keeps jobs waiting: a reservation of the same name as the gate's feature holds it
    node_feature: str = "vm"  # of every VM; the partition has all nodes with it
    inbox: Path = Path("/run/multiverse/inbox")  # where job_submit.lua and the epilog leave hints
    munge_key: Path = Path("/etc/munge/munge.key")
    # slurmctld's address as guests reach it; with backups several, separated by commas, in the order of SlurmctldHost.
    # Empty: network.gateway for the slurmctld of this machine, or for the only one, and for others that of slurm.conf.
    controller_address: str = ""
    guest_conf: Path | None = None  # a directory of files that replace the derived ones in guests
    # The file by which users' commands find VMs (multiverse-client.conf includes it); None: beside slurm.conf. Every
    # machine on which users work must see it at this path.
    addresses: Path | None = None
    command_timeout: float = 20.0  # seconds
    commands: Annotated[int, Field(ge=2)] = 16  # of Slurm's commands that run at the same time, at most

    def addresses_file(self) -> Path:
        """The file by which users' commands find VMs."""
        return self.addresses or self.conf.with_name("multiverse-addresses.conf")

    def directory(self) -> Path:
        """Where Slurm's commands are on this machine."""
        return self.bin_dir or Path(shutil.which("srun") or "/usr/bin/srun").parent


@dataclass(frozen=True)
class QemuSettings:
    """QEMU and its directories. Memory in MiB."""

    binary: str = "qemu-system-x86_64"
    accel: Literal["auto", "kvm", "tcg"] = "auto"
    # The CPU of guests that run on KVM: "host", with all that the host's CPU has, or one of QEMU's CPU models. VMs move
    # between hosts that run the same model, and with "host" between hosts with equal CPUs alone. `multiverse doctor`
    # names the newest model that all hosts run. On a host whose CPU lacks something of the model, guests have its own.
    cpu: str = "host"
    images: Path = Path("/var/lib/multiverse/images")
    templates: Path = Path("/dev/shm/multiverse/templates")  # their memory: must be a file system in memory
    vms: Path = Path("/var/lib/multiverse/vms")
    run: Path = Path("/run/multiverse/vms")  # sockets, whose paths may have 107 bytes: keep it short
    bridge: str = "mvbr0"
    # An interface of the host that connects the bridge with those of the other hosts, without an address of the host's
    # own: the bridge takes it over. Empty: the site connects them by itself, or there is one host.
    uplink: str = ""
    # The first uid of the QEMU processes, and how many there are. Each VM has its own; nothing else may use them. The
    # default range is unused according to systemd's UIDS-GIDS. [0, 0]: all QEMU processes have the daemon's uid.
    uids: tuple[int, int] = (0x7000_0000, 65536)
    base_cpus: int = 1  # of a template
    base_memory: int = 288  # of a template: a job of 165 MiB needs no more
    max_cpus: int = 64  # the most CPUs that can be plugged into a VM
    max_memory: int = 262144  # the most memory that a VM can have
    # Memory for the translated code of an emulated guest. Code beyond it is translated again, which costs CPU time.
    # 0: no limit, about 60 MiB for a VM with a job.
    tb_size: int = 0
    # Features of VMs, if their host has them: "off" does without, "on" uses also those that make most VMs slower.
    vhost_net: Literal["auto", "off"] = "auto"  # the kernel moves the frames of guests that run on KVM
    huge_pages: Literal["auto", "off"] = "auto"  # of 2 MiB, for the memory that a VM gets beside its template's
    native_aio: Literal["auto", "on", "off"] = "auto"  # for the disks of full clones; auto: not used
    iothread: Literal["auto", "on", "off"] = "auto"  # for disks; auto: of guests that run on KVM


@dataclass(frozen=True)
class NetworkSettings:
    """The guests' network. A VM's address is computed from its serial number; there is no DHCP."""

    subnet: str = "10.213.0.0/16"
    gateway: str = "10.213.0.1"  # this host's address on the bridge
    first: int = 256  # the first address of a VM, counted from the address of the subnet
    hosts: tuple[tuple[str, str], ...] = ()  # (name, address) pairs for each guest's /etc/hosts
    # Which other VMs a VM reaches, and finds by their names: those of its "job", those of its "user", or all of the
    # "site". Only the controller's settings count.
    reach: Reach = Reach.USER
    # A file of hosts(5), mostly /etc/hosts of the controller's machine, in which the daemon keeps the names of VMs
    # between two lines of its own. Empty: it keeps none, and changes no file that is not its own.
    names: str = ""


@dataclass(frozen=True)
class VxlanSettings:
    """A VXLAN between the hosts and the controller's machine, where no layer 2 connects their bridges. All of them have
    the same settings."""

    enabled: bool = False
    # (name, address) of hosts, of nodes that are leased, as Slurm calls them, and of the controller's machine: the
    # address at which the others reach it, of all of them by IPv4, or of all by IPv6. Where it is not given, it is what
    # the name service says of the name.
    addresses: tuple[tuple[str, str], ...] = ()
    port: Port = 14789  # UDP, to be used for nothing else on these machines
    mtu: Mtu = 1450  # of VMs: 50 bytes less than every packet between hosts may have, or 70 with IPv6
    network: NetworkId = 0  # the 24-bit id of the virtual network; 0: derived from the site


@dataclass(frozen=True)
class ImageSettings:
    """The default image and kind of clone, and what images have in common."""

    default: str = "slim"
    # A directory on a file system that the hosts share. A host copies images from it that it lacks, or that are newer.
    source: Path | None = None
    # Another one, in which hosts put the templates that they have built. A host of the same kind copies one from there
    # instead of booting its own. Whoever is root on one of the hosts can then change the VMs of all.
    templates: Path | None = None
    kind: CloneKind = CloneKind.INSTANT  # of jobs that request none
    guest_reserve: int = 120  # MiB of a VM's memory for its kernel and daemons
    per_account: bool = False  # each Slurm account has templates of its own: no other one shares their memory layout
    scratch: int = 2048  # MiB that each job may write to its VM's disk; with --tmp, at least as much as that says
    tmp_disk: int = 12288  # the largest --tmp of a job in MiB; every image must have as much free space


@dataclass(frozen=True)
class PacingSettings:
    """Timeouts, retries and rates. Times in seconds."""

    provisioning: int = 4  # VMs that are created or started at the same time
    silence: float = 60.0  # a source that is unknown for longer: its VMs no longer count for their jobs
    spawn_timeout: float = 60.0  # from the start of a VM until its node has registered
    pin_timeout: float = 60.0  # from the pin until the job runs
    reclaim_grace: float = 5.0  # for a guest to write back and unmount its file systems
    complete_timeout: float = 120.0  # for a job to leave COMPLETING
    retry_base: float = 2.0  # before the first retry after a failed attempt; doubled for each further one
    retry_limit: float = 300.0  # before a retry, at most
    replacements: int = 2  # VMs that are replaced within one attempt
    # Clones per second from one template, or of one image on one host. 0: no limit.
    instant_rate: Rate = 0.0
    linked_rate: Rate = 0.0
    full_rate: Rate = 0.0
    attempts: int = 12  # failed attempts in a row until the job is cancelled; with the retry delays, half an hour


@dataclass(frozen=True)
class BackfillSettings:
    """Jobs that start ahead of the first one that waits for room, because by the time limits they do not delay it."""

    enabled: bool = True
    depth: Positive = 100  # jobs behind the first one that are considered at a time
    overtakes: Natural = 20  # times that the first one may be overtaken while nobody can tell when it will start


@dataclass(frozen=True)
class PlacementSettings:
    """On which hosts the VMs of a job are made."""

    # Of jobs that name none with --constraint=place-NAME: worst-fit, best-fit, first-fit, random-fit, pack, spread,
    # least-loaded, or one that a package of the site registers.
    policy: str = Placement.WORST_FIT.value


@dataclass(frozen=True)
class WebSettings:
    """The web page. It shows everything to whoever reaches it, and changes nothing: the reverse proxy says who may."""

    # A path of a Unix socket, or an address of this machine itself with a port, such as 127.0.0.1:8642, which every
    # user of this machine reaches. Empty: there is no web page.
    listen: str = ""
    group: str = ""  # the group, beside root, that may use the Unix socket: the reverse proxy's
    viewers: Positive = 500  # at the same time, at most


@dataclass(frozen=True)
class PoolSettings:
    """A warm pool: VMs that exist before a job requests one. Their number is between `min` and `max`, by demand."""

    image: str = "slim"
    depth: Depth = Depth.PARKED
    min: Natural = 1
    max: Natural = 0  # 0: as many as `min`
    cpus: Positive = 1  # of joined VMs: the size of their nodes (a parked VM can get any size)
    memory: Positive = 512  # of joined VMs, in MiB
    max_age: Seconds = 3600.0  # seconds until a spare is replaced by a new one
    offer: bool = True  # of joined VMs: a job may take one as it is submitted, without waiting at the gate


@dataclass(frozen=True)
class HostClass:
    """Hosts that are alike, by name. What is not given is as in [host] and [qemu]. Memory and disk in MiB."""

    nodes: str  # the hosts' names, as a ClusterShell node set: n[1-32,40]
    cores: Positive | None = None
    memory: int | None = None
    disk: int | None = None
    cpu_overcommit: Factor | None = None
    overcommit: Factor | None = None
    floor: Natural | None = None
    disk_overcommit: Factor | None = None
    disk_floor: Natural | None = None
    net: Natural | None = None
    images: Path | None = None
    templates: Path | None = None
    vms: Path | None = None
    run: Path | None = None
    bridge: str | None = None
    uplink: str | None = None


@dataclass(frozen=True)
class AgentSettings:
    """The agent of each host, and how the controller reaches it."""

    socket: Path = Path("/run/multiverse/agent.sock")
    state_dir: Path = Path("/var/lib/multiverse/agent")
    leases: Path = Path("/var/lib/multiverse/leases")  # on leased nodes: what leases have in the file system
    # How `multiverse agent` is run on leased nodes.
    program: tuple[str, ...] = ("multiverse", "agent")
    # Seconds without any contact to the controller and to slurmctld after which the agent ends its VMs, so that their
    # jobs may run elsewhere. 0: never. Slurm's commands must work on the host. An outage of both then ends jobs.
    # A longer time counts once the controller has observed it.
    self_fence: float = 0.0
    sample: float = 1.0  # seconds between samples of what the host and its VMs use; 0: nothing is sampled
    # Where Prometheus can read the samples: ADDRESS:PORT, or the path of a Unix socket. Empty: nowhere. Whoever reaches
    # it reads figures and names of VMs, and can do nothing else.
    metrics: str = ""
    # The command that connects its input and output with the agent of a host other than the controller's own; {host} is
    # replaced by the host's name. Users, ports, keys and jump hosts are what root's ssh_config says.
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
        "--",
        "{host}",
        "multiverse",
        "agent",
        "dial-stdio",
    )


@dataclass(frozen=True)
class FenceSettings:
    """How the controller makes sure that a host is off whose jobs Slurm queues again."""

    # A command that switches a host off: exit status 0 means that the host is surely off. {host} is replaced by the
    # host's name. Without one, an operator's word is waited for.
    command: tuple[str, ...] = ()
    after: float = 60.0  # seconds without any sign of the host
    timeout: Seconds = 120.0  # seconds that the command may take; then it is killed, and repeated later
    # The share of the other hosts, beside the controller's own, that must be in sight: or else it is likelier that the
    # controller is cut off. 0: none, for a site with a single other host.
    quorum: Annotated[float, Field(ge=0, le=1)] = 0.5


@dataclass(frozen=True)
class LeaseSettings:
    """Hosts that are borrowed from a partition of physical nodes while jobs wait for room, each by a pilot job. CPUs
    and memory (MiB) are those of the pilot."""

    partition: str  # one lease per partition: whole nodes, or parts of one size
    account: str = ""  # that the pilots are charged to; empty: the default account of `user`
    user: str = ""  # whose jobs the pilots are; empty: the controller's own user, mostly root
    cpus: Natural = 0  # 0: a whole node, which no other job shares
    memory: Natural = 0  # 0: what the partition gives to a job by default; of a whole node, all
    time_limit: Seconds = 14400.0  # seconds; no job is placed there whose time limit exceeds what is left of it
    max: Natural = 1  # leases at a time; 0: none is added, and those that there are end when they are idle
    min_wait: Wait = 10.0  # seconds that a job has waited for room before a lease is requested for it
    idle: Seconds = 120.0  # seconds without a VM until it is given back
    start_timeout: Seconds = 120.0  # seconds from the pilot's start until its agent answers
    # Whether jobs that Slurm cannot queue again (srun, salloc, --no-requeue) or that have no time limit may use it,
    # though its pilot may be preempted or cancelled at any time. Set it where nothing preempts the pilots.
    preemptable_ok: bool = False
    # Whether fence.command may switch off a physical node on which something of a pilot may be left; {host} is the
    # node's name. Other jobs may be on it by then. Without it, an operator's word or the node's reboot is waited for.
    fence: bool = False
    # The command by which the pilot becomes root, put in front of its own, where Slurm runs no job of root
    # (DisableRootJobs=YES): ("sudo", "-n"). Not needed with `user` empty or "root".
    become: tuple[str, ...] = ()


@dataclass(frozen=True)
class OverflowSettings:
    """A partition of physical nodes whose jobs run in VMs while it is full, without their users' doing."""

    partition: str
    constraint: str = ""  # only jobs that ask for this feature of the physical nodes; empty: all
    accounts: tuple[str, ...] = ()  # only jobs of these accounts; empty: of all
    min_wait: Wait = 30.0  # seconds that a job has waited for nodes before a VM is made for it


@dataclass(frozen=True)
class UsersSettings:
    """How users ask about their own jobs, without being operators."""

    enabled: bool = True
    socket: Path | None = None  # which every user of this machine may use; None: users.sock beside `socket`
    # The IP address at which users of other machines ask, with a munge credential. Empty: they cannot.
    listen: str = ""
    port: Port = 6821


VXLAN_PORTS = 1024
"""Different ports of the networks of jobs. Two jobs with the same one have no VMs on the same host."""


@dataclass(frozen=True)
class JobVmSettings:
    """VMs inside the allocations of jobs, which the agent of a node provides to Slurm's plugin. Memory in MiB."""

    enabled: bool = False
    # Whether the agent serves these VMs alone, and no controller. A node with such an agent can be leased, too.
    only: bool = False
    # Who asks for the VMs of a job: Slurm's plugin, for jobs with its options; or tasks, steps of the batch file that
    # call multiverse-vm, for sites that may not load a plugin. The same on all nodes.
    design: Literal["plugin", "tasks"] = "plugin"
    socket: Path = Path("/run/multiverse/jobs.sock")  # the plugin and the tasks of users connect to it
    records: Path = Path("/run/multiverse/jobs")  # where the plugin records which jobs have a VM
    plugin: Path = Path("/usr/local/lib/slurm/multiverse.so")
    enter: Path = Path("/usr/local/libexec/multiverse/mventer")  # runs a task's command in the job's VM
    timeout: Positive = 300  # seconds that a task waits for its VM: its template may have to be built
    # The feature of nodes that take jobs with VMs inside. The agent gives it to its node as long as the plugin passes a
    # test there, each `check` seconds. `node` is what Slurm calls this host; empty: host.name.
    feature: str = "job-vms"
    node: str = ""
    check: Annotated[float, Field(ge=1)] = 15.0
    # Each job has a bridge on its hosts as long as it has VMs there, named so and by a number. No bridges of different
    # jobs are connected, so all jobs have the same addresses. The same on each host.
    bridge: str = "mvjobs"
    subnet: str = "10.214.0.0/16"
    # What makes the VMs: this host, in the control groups of the job; or a platform behind the agent of another host,
    # which is reached by agent.connect. Its VMs have addresses in `platform_subnet`: a part of network.subnet, which is
    # that of the platform, for the jobs of this node alone. Each job takes 64 of its addresses.
    platform: Literal["host", "agent"] = "host"
    platform_host: str = ""
    platform_subnet: str = ""
    # UDP, the first of 1024: the nodes of a job are connected by a VXLAN with the port that its id chooses. Its MTU and
    # the addresses of nodes are those of [vxlan].
    port: int = 20480
    overhead: Annotated[int, Field(ge=64)] = 192  # of a job's memory, what its VM's QEMU takes beside the guest's own
    # Which virtual functions (SR-IOV) VMs may have: of a device, by its PCI address (0000:3b:00.0) or its network
    # interface, or with these ids (8086:154c). Each is of one VM at a time.
    sriov: tuple[str, ...] = ()
    # The GRES that Slurm counts these functions by, each with File=/dev/vfio/N in gres.conf: jobs get it added, and the
    # functions that Slurm has chosen. Empty: the agent chooses free ones.
    sriov_gres: str = ""
    ivshmem_size: int = 32  # of each region that the VMs of a job share (--ivshmem); a power of two, at most 256


@dataclass(frozen=True)
class SaveSettings:
    """VMs of jobs that are saved, and resumed later."""

    enabled: bool = False  # running jobs can be saved
    # Where the states are: a directory that the hosts share, so that a job can be resumed on any of them, or one of a
    # host's own.
    directory: Path = Path("/var/lib/multiverse/saved")
    # Another directory, elsewhere, to which each state is copied once it is complete. So a job goes on on any host that
    # reaches it, though the host that saved the job is lost, or its disk. None: states are not copied.
    copy: Path | None = None
    # A job that asks to be saved at its time limit (vm:save) is saved so many seconds before, unless it says when.
    before: Annotated[float, Field(ge=60)] = 120.0
    max_runs: Annotated[int, Field(ge=1)] = 7  # runs of a job: the last one is not saved, and ends at its time limit
    # Seconds that a job is suspended (scontrol suspend) before its VM frees the memory of its host. Hosts need slurmd,
    # munge and Python for that. 0: VMs of suspended jobs keep their memory.
    sleep_after: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    checkpoint_every: Annotated[float, Field(ge=1)] = 60.0  # seconds between two checkpoints of a job at the least
    checkpoints: Annotated[int, Field(ge=1)] = 2  # of a job (vm:checkpoint) that are kept: the newest ones
    # MiB that the states of one user, and of all users, may take together. 0: any. Until a state is complete it counts
    # as the memory and disk of its VM.
    user_quota: Natural = 0
    site_quota: Natural = 0
    # Days after which a state is discarded whose job has not gone on; the job is held then. 0: never.
    keep_days: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    encrypt: bool = False  # states are encrypted, with a key for each user that the controller keeps in state_dir
    no_requeue: bool = False  # jobs that were submitted with --no-requeue can be saved, too


@dataclass(frozen=True)
class MoveSettings:
    """VMs that move to other hosts while their jobs run. The agents connect to each other for that."""

    enabled: bool = False
    # (name, address) of hosts in the network by which VMs move. Of others it is that in vxlan.addresses, or else what
    # the name service says of the name.
    addresses: tuple[tuple[str, str], ...] = ()
    port: Port = 14790  # TCP, on each host, for other hosts
    private: bool = False  # nobody else listens or sends in that network: nothing is encrypted
    compress: bool = False  # memory is compressed with zstd
    bandwidth: Natural = 0  # MiB/s that one move may take; 0: any
    # Seconds until a move is given up, because the job writes to its memory or disk faster than that is sent.
    timeout: Annotated[float, Field(gt=0, le=3000)] = 600.0
    downtime: Annotated[float, Field(gt=0, le=10)] = 0.05  # seconds for which the VM may stand still, at its last step
    at_once: Positive = 2  # moves from and to one host


@dataclass(frozen=True)
class RebalanceSettings:
    """Running jobs leave their hosts: their VMs move, or are saved and go on later."""

    drains: bool = True  # off hosts that are drained with --move or --save
    maintenance: bool = True  # off hosts that a reservation of Slurm with the flag MAINT names, before it begins
    notice: Annotated[float, Field(ge=0, le=86400)] = 900.0  # seconds before that
    preemption: bool = True  # for jobs that may preempt them by Slurm's own rules (PreemptType)
    at_once: Positive = 8  # jobs of the site
    bandwidth: Natural = 0  # MiB/s that all of them may send; 0: any
    per_job: Annotated[int, Field(ge=1, le=10)] = 6  # evictions of one job in an hour
    alert_after: Seconds = 600.0  # for which a limit holds evictions back until that is an alert


@dataclass(frozen=True)
class Settings:
    """All settings of the daemon and of the agents."""

    include: Path | None = None  # another file of settings, which override those in this file
    state_dir: Path = Path("/var/lib/multiverse")
    socket: Path = Path("/run/multiverse/api.sock")
    poll: float = 2.0  # seconds between observations without a hint
    # Days that records of ended jobs, VMs and templates are kept, with their journal. 0: for ever.
    history_days: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    # A file in which all calls to Slurm and to the hypervisor are recorded; emptied at each start of the daemon.
    trace: Path | None = None
    scheduler: str = "slurm"  # the batch scheduler: the name of an entry point of the group multiverse.schedulers
    # What runs VMs: names of entry points of the group multiverse.platforms.
    platforms: tuple[str, ...] = ("qemu",)
    agent: AgentSettings = field(default_factory=AgentSettings)
    fence: FenceSettings = field(default_factory=FenceSettings)
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
    backfill: BackfillSettings = field(default_factory=BackfillSettings)
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    web: WebSettings = field(default_factory=WebSettings)
    mounts: tuple[Mount, ...] = ()
    pool: tuple[PoolSettings, ...] = ()
    save: SaveSettings = field(default_factory=SaveSettings)
    move: MoveSettings = field(default_factory=MoveSettings)
    rebalance: RebalanceSettings = field(default_factory=RebalanceSettings)
    lease: tuple[LeaseSettings, ...] = ()
    overflow: tuple[OverflowSettings, ...] = ()

    @property
    def preempts(self) -> bool:
        """Whether running jobs in VMs may give way to urgent ones."""
        return self.rebalance.preemption and (self.save.enabled or self.move.enabled)


def load(path: Path) -> Settings:
    """Read settings from a TOML file and the file that it includes, as they are for this machine. Raises `Refused`,
    which names every wrong key."""
    raw = _read(path)
    include = raw.get("include")
    if isinstance(include, str):
        other = path.parent / include
        settings = parse(_merged(raw, _read(other)), f"{path} with {other}")
    else:
        settings = parse(raw, str(path))
    return on_machine(settings, socket.gethostname())


# --- hosts -----------------------------------------------------------------------------------------


def host_names(settings: Settings) -> list[str]:
    """The names of the hosts that the settings name: those of `[[hosts]]`, or this machine alone."""
    return list(_classes(settings)) if settings.hosts else [settings.host.name]


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


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}", hint="give the file with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{path} is not TOML: {error}", hint="correct that line") from error


def parse(raw: dict[str, Any], origin: str) -> Settings:
    """Settings from a parsed document, which error messages call `origin`. Raises `Refused`."""
    problems = list(unknown_keys(Settings, raw, ""))
    if not problems:
        try:
            settings = TypeAdapter(Settings).validate_python(raw)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors()]
        else:
            problems = list(_contradictions(settings))
            if not problems:
                return settings
    raise Refused(f"{origin}: " + "; ".join(problems), hint="correct these keys and start again")


def unknown_keys(cls: type, raw: dict[str, Any], prefix: str) -> Iterator[str]:
    """Each key that `cls` does not have, also in nested tables, with the most similar key."""
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls)]
    for key, value in raw.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            yield f"{prefix}{key}: no such key" + (f", did you mean {near[0]}?" if near else "")
        else:
            for inner, table, path in _tables(hints[key], value, key):
                yield from unknown_keys(inner, table, f"{prefix}{path}.")


def _tables(hint: Any, value: Any, path: str) -> Iterator[tuple[type, dict[str, Any], str]]:
    """The tables in a value, which may be a table or an array of tables, each with its class and its path."""
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        yield hint, value, path
    elif get_origin(hint) is tuple and isinstance(value, list):
        for i, item in enumerate(value):
            yield from _tables(get_args(hint)[0], item, f"{path}.{i}")


def _contradictions(s: Settings) -> Iterator[str]:
    """Each value that makes no sense although its type permits it, with its key."""
    yield from _wrong_host(s)
    yield from _wrong_classes(s)
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
