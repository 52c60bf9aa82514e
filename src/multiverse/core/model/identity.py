"""What makes a clone itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class User:
    """A user as the guest must know him: passwd entry and every group he is in, (name, gid)."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str
    groups: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class UserSeen:
    """An answer of the name service about a uid: whether there is such a user. The look-up began at `began`; `since`
    is when it first gave this answer. Times are monotonic. A user without an answer is unknown, not absent."""

    exists: bool
    began: float
    since: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system that the guest mounts: fields as in fstab(5). `options` go to the file system."""

    source: str
    target: str
    type: str = "nfs4"
    options: str = ""


@dataclass(frozen=True, slots=True)
class GuestFile:
    """A file that the agent writes before anything starts. `owner` is a user name in the image."""

    path: str
    content: bytes
    mode: int = 0o644
    owner: str = "root"


@dataclass(frozen=True, slots=True)
class Daemon:
    """A process that the agent starts and watches. It runs in the foreground, as `user`.

    `ready_path`, when set, is a path (a socket) whose appearing says that it serves; the next
    daemon starts only then.
    """

    name: str
    argv: tuple[str, ...]
    user: str = "root"
    ready_path: str = ""


@dataclass(frozen=True, slots=True)
class NodeBootstrap:
    """What a node needs to join the scheduler: opaque to all but its driver and the agent. `users` are those
    whom the daemons have to know, beside the users of jobs."""

    files: tuple[GuestFile, ...] = ()
    directories: tuple[tuple[str, str, int], ...] = ()  # path, owner, mode
    daemons: tuple[Daemon, ...] = ()
    users: tuple[User, ...] = ()


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What a VM reaches through the VXLAN of the hosts: an address and its MAC. `machine` is where that is, by its
    address in the network of the hosts."""

    address: str
    mac: str
    machine: str


@dataclass(frozen=True, slots=True)
class TaskAccess:
    """What makes a VM one of those inside a job: its name among them, names and addresses of other machines and of the
    job's VMs, which are as many on each of the job's `nodes`, the token with which connections for tasks begin, and
    where the machine that makes these has the scheduler's commands."""

    hostname: str
    hosts: tuple[tuple[str, str], ...]
    vms: tuple[tuple[str, str], ...]
    nodes: tuple[str, ...]
    token: str
    commands: str


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a clone itself. Random bytes and the clock are added when it is sent, never kept."""

    hostname: str
    mac: str
    address: str  # with prefix length: 10.1.2.3/16
    gateway: str  # may be empty
    machine_id: str  # 32 hex digits
    users: tuple[User, ...] = ()
    mounts: tuple[Mount, ...] = ()
    peers: tuple[tuple[str, str], ...] = ()  # (host name, address)
    bootstrap: NodeBootstrap = NodeBootstrap()
    neighbours: tuple[Neighbour, ...] = ()  # for the VM's host: its guest is not told of them
    tasks: TaskAccess | None = None  # a VM inside a job, to whose guest its tasks are sent
    group: int = 0  # for the VM's host: see `core.model.reach`
