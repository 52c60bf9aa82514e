"""What a lease has on its node: a directory, control groups, a network and a share in the node's VXLAN."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import structlog
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from multiverse.core.errors import Broken, Exhausted, MultiverseError, Refused
from multiverse.core.model.identity import site_of_lease
from multiverse.host import path_security, process
from multiverse.host.cgroups import hierarchies, remove_with_children
from multiverse.host.vxlan import Vxlan, VxlanConfig, members_owner
from multiverse.system import files
from multiverse.system.locks import is_locked, locked_directory, try_lock, try_locked_directory
from multiverse.system.processes import ProcessIdentity

log = structlog.get_logger()


_SLOTS = ".slots"
SLOTS = 16  # leases that one node can have at the same time: each has as large a part of `qemu.uids`
NODE_SHARE = SLOTS  # the part of `qemu.uids` that no lease has: it is for VMs inside jobs


@dataclass(frozen=True, slots=True)
class PilotRecord:
    """What the sweep needs to know of a pilot."""

    job: str  # the scheduler's
    pid: int  # of its first process as the node sees it, like the next two
    started: int
    boot_id: str
    groups: tuple[str, ...] = ()  # control groups that it has made

    @property
    def process(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.started, self.boot_id)


class LeaseDirectory:
    """The directory of one lease."""

    def __init__(self, root: Path) -> None:
        self.root, self.name = root, root.name
        self.socket = root / "agent.sock"  # its agent's, as the whole node sees it
        self.vms = root / "vms"  # the disks of its VMs
        self.state = root / "agent"
        self.lock = root / "lock"  # held by the processes of the pilot for as long as one of them lives
        self._record = root / "pilot.json"

    def make(self) -> None:
        """Make the directories. Users of QEMU pass through those above the VMs', and nobody else may write anywhere.
        Raises `Refused` as `path_security` does."""
        path_security.make_directory(self.root.parent, 0o711)
        for path, mode in ((self.root, 0o711), (self.vms, 0o711), (self.state, 0o700)):
            path_security.make_directory(path, mode)

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Make the directories and hold the lock, which children inherit; gives False if another pilot of this name
        holds it. From the first moment on no sweep takes the directory for a leftover."""
        path_security.make_directory(self.root.parent, 0o711)
        with locked_directory(self.root, create=True):
            self.make()
            lock = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            ours = try_lock(lock)
        try:
            yield ours
        finally:
            os.close(lock)

    @contextmanager
    def incoming(self, image: str, owner: int) -> Iterator[Path]:
        """Where sbcast(1), which writes as the user `owner`, may bring the archive of an image meanwhile."""
        directory = self.root / "incoming"
        directory.mkdir(mode=0o700, exist_ok=True)
        os.chown(directory, owner, -1)
        file = directory / f"{image}.tar"
        try:
            yield file
        finally:
            file.unlink(missing_ok=True)

    def record(self, known: PilotRecord) -> None:
        files.replace(self._record, json.dumps(asdict(known)), mode=0o600)

    def recorded(self) -> PilotRecord | None:
        """What was written down; None if nothing was, or not completely."""
        try:
            raw = json.loads(self._record.read_text())
            return PilotRecord(**(raw | {"groups": tuple(raw["groups"])}))
        except (OSError, ValueError, TypeError, KeyError):
            return None


_END = "ends"


def write_end(state: Path, at: float) -> None:
    """Tell the agent with that state directory when the scheduler kills its pilot (Unix time)."""
    files.replace(state / _END, f"{at:.3f}", mode=0o600)


def read_end(state: Path) -> float:
    """When the scheduler kills the pilot of the agent with that state directory (Unix time); 0 if nobody knows."""
    try:
        return float((state / _END).read_text())
    except (OSError, ValueError):
        return 0.0


def directory_of(leases: Path, name: str) -> LeaseDirectory:
    """The directory of a lease. Raises `Refused` if `name` is no name of a lease."""
    plain = name.replace("-", "").isalnum() and name.isascii() and not name.startswith("-")
    if not plain or len(name) > 40:
        raise Refused(f"{name!r} is no name of a lease", hint="the controller names them: lease-SITE-NUMBER")
    return LeaseDirectory(leases / name)


def lease_directories(leases: Path) -> list[LeaseDirectory]:
    """The directories of all leases that have left something on this node."""
    if not leases.is_dir():
        return []
    return [
        LeaseDirectory(path) for path in sorted(leases.iterdir()) if path.is_dir() and not path.name.startswith(".")
    ]


@contextmanager
def slot(leases: Path) -> Iterator[int]:
    """Hold a number below `SLOTS` that no other lease of this node holds. Raises `Exhausted` if there is none."""
    directory = leases / _SLOTS
    path_security.make_directory(directory, 0o700)
    for number in range(SLOTS):
        fd = os.open(directory / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if try_lock(fd):
                yield number
                return
        finally:
            os.close(fd)
    raise Exhausted(f"this node has {SLOTS} leases", hint="lease larger parts of a node: cpus under [[lease]]")


def share_of(uids: tuple[int, int], number: int) -> tuple[int, int]:
    """The users of QEMUs for this slot, or for `NODE_SHARE`, as (first, count). With a count of 0 none has its own."""
    first, count = uids
    share = count // (SLOTS + 1)
    return first + number * share, share


# --- control groups ---------------------------------------------------------------------------------
# They are inside those that the scheduler has given to the pilot's job. Slurm signals and kills the processes in a
# step's own control group, not those in groups below it or beside it. So the pilot stays in the step's group, and all
# that it starts is elsewhere: Slurm's first signal reaches the pilot alone, and its SIGKILL ends the pilot and with
# that all. The job's limits hold for all of them. In version 1 a lease's group is below the step's. In version 2 a
# group with processes has no controllers for its children (cgroups(7)), so it is beside that of the step's task.

_DAEMONS = "system"
_MEMORY = {2: "memory.max", 1: "memory.limit_in_bytes"}
_NO_LIMIT = 1 << 40  # MiB; version 1 shows nearly 2**63 bytes
_OF_A_JOB = re.compile(r"(task|step|job)_[^/]+")


@dataclass(frozen=True, slots=True)
class LeaseGroup:
    """A lease's group in one hierarchy, which is mounted at `mount`."""

    mount: Path
    path: Path
    version: int


def job_of(groups: str) -> str:
    """The job whose control group a process is in, by its /proc/PID/cgroup; empty if it is in none of Slurm's."""
    found = re.search(r"/job_(\d+)", groups)
    return found[1] if found else ""


def make_groups(
    name: str, mounts: Path = Path("/proc/mounts"), own: Path = Path("/proc/self/cgroup")
) -> list[LeaseGroup]:
    """Make the lease's groups in each hierarchy that limits VMs, or by which Slurm finds processes. Where that is not
    permitted, VMs have no limits either."""
    lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    found = []
    for hierarchy in hierarchies(mounts, controllers=("memory", "pids", "freezer")):
        mount = hierarchy.parent.parent
        where = [
            path for _, controllers, path in lines if _is_of(controllers, hierarchy.version, hierarchy.controllers)
        ]
        if not where or "/.." in where[0]:  # not below what is mounted here
            continue
        base = mount / where[0].lstrip("/")
        group = (base.parent if hierarchy.version == 2 and base != mount else base) / name
        with suppress(OSError):
            group.mkdir(exist_ok=True)
            if hierarchy.version == 2:
                with suppress(OSError):  # those that Slurm has not enabled here stay off
                    (group.parent / "cgroup.subtree_control").write_text("+memory +pids")
            (group / _DAEMONS).mkdir(exist_ok=True)
            found.append(LeaseGroup(mount, group, hierarchy.version))
    return found


def memory_limit(mounts: Path = Path("/proc/mounts"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """MiB that this process's control groups permit, those of its job among them; None if they set no limit."""
    lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    found = []
    for hierarchy in hierarchies(mounts, controllers=("memory",)):
        mount = hierarchy.parent.parent
        where = next((path for _, of, path in lines if _is_of(of, hierarchy.version, hierarchy.controllers)), "/..")
        group = mount / where.lstrip("/")
        for each in (group, *group.parents) if "/.." not in where else ():
            with suppress(OSError, ValueError):  # "max"
                found.append(int((each / _MEMORY[hierarchy.version]).read_text()) >> 20)
            if each == mount:
                break
    return min((limit for limit in found if limit < _NO_LIMIT), default=None)


def _is_of(controllers: str, version: int, wanted: Sequence[str]) -> bool:
    """Whether a line of /proc/PID/cgroup is of the hierarchy with these controllers."""
    return controllers == "" if version == 2 else bool(set(controllers.split(",")) & set(wanted))


def join_groups(groups: Sequence[LeaseGroup]) -> None:
    """Put this process, which sees each group as the whole hierarchy, among the daemons of a lease."""
    for group in groups:
        (group.mount / _DAEMONS / "cgroup.procs").write_text("0")


def remove_groups(paths: Sequence[Path]) -> list[str]:
    """Remove the groups of a lease that has ended, and the groups of its job that Slurm could not remove because of
    them. Returns those that are left. Absent is success."""
    left = remove_with_children(paths)
    for path in paths:
        above = path.parent
        with suppress(OSError):  # Slurm has removed it, or uses it still
            while _OF_A_JOB.fullmatch(above.name):
                above.rmdir()
                above = above.parent
    return list(map(str, left))


# --- network ----------------------------------------------------------------------------------------
# A bridge in a network namespace of its own, whose uplink is a port of the node's bridge. VMs' taps and their firewall
# are in that namespace: they end with the lease, and never meet those of another agent of the node.

_UPLINK = "uplink"  # not "mv…": the firewall takes such ports for VMs


def port_name(lease: str) -> str:
    """The interface of the node that belongs to a lease."""
    return f"lse{_digest(lease)[:10]}"


def connect_network(lease: str, bridge: str, pid: int) -> None:
    """Connect the network namespace of process `pid` with the node's bridge. Raises `Broken` if there is none."""
    disconnect_network(lease)
    with IPRoute() as ip:
        found = ip.link_lookup(ifname=bridge)
        if not found:
            raise Broken(
                f"this node has no bridge {bridge}, by which VMs reach their network",
                hint="install the bridge's unit on the nodes that are leased: multiverse site render --agent",
            )
        ip.link("add", ifname=port_name(lease), kind="veth", peer={"ifname": _UPLINK, "net_ns_pid": pid})
        (port,) = ip.link_lookup(ifname=port_name(lease))
        ip.link("set", index=port, master=found[0], state="up")


def disconnect_network(lease: str) -> None:
    """Remove the node's end of a lease's network, if it is there: it goes with the namespace, but not at once."""
    with IPRoute() as ip:
        for index in ip.link_lookup(ifname=port_name(lease)):
            with suppress(NetlinkError):  # the kernel is removing it
                ip.link("del", index=index)


def make_bridge(lease: str, bridge: str) -> None:
    """Make the lease's own bridge in this process's namespace, with the uplink as a port."""
    digest = _digest(lease)
    # A MAC of its own: otherwise the bridge takes the lowest one of its ports, which changes with each VM.
    address = "06:" + ":".join(digest[place : place + 2] for place in range(0, 10, 2))
    with IPRoute() as ip:
        ip.link("set", index=ip.link_lookup(ifname="lo")[0], state="up")
        ip.link("add", ifname=bridge, kind="bridge", address=address)
        (own,) = ip.link_lookup(ifname=bridge)
        ip.link("set", index=own, state="up")
        (uplink,) = ip.link_lookup(ifname=_UPLINK)
        ip.link("set", index=uplink, master=own, state="up")


def _digest(lease: str) -> str:
    return hashlib.sha256(lease.encode()).hexdigest()


# --- VXLAN ------------------------------------------------------------------------------------------
# One of the site at the node's own bridge, which all leases of the node share. It is in the node's network, as on a
# static host, because a mark of a frame does not outlive the change of a network namespace, and because a port belongs
# to one VXLAN. VMs of a lease reach it by the lease's uplink. The agent of a lease enters the node's network to change
# it. The pilot makes it, and the end of the last lease of the site on the node removes it.


def vxlan_of_node(config: VxlanConfig, leases: Path, find_address: Callable[[], str]) -> VxlanConfig:
    """The node's VXLAN for a lease of this node, whose network this thread is in. `find_address` gives the node's
    address."""
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    return replace(
        config,
        find_address=find_address,
        records=_vxlan_records(leases, config.site),
        namespace=namespace,
        is_of_others=lambda owner: _has_vm(lease_directories(leases), owner),
    )


def join_vxlan(config: VxlanConfig, gateway: str) -> None:
    """Make the VXLAN for a lease whose directory exists, unless another lease has made it. Raises `Refused` on the
    controller's machine (it has the address `gateway`), and what `Vxlan.restore` raises."""
    with IPRoute() as ip:
        own = {each.get_attr("IFA_ADDRESS") for each in ip.get_addr(family=socket.AF_INET)}
    if gateway in own:
        raise Refused(
            "this node is the controller's machine, whose VXLAN a lease cannot share",
            hint="lease other nodes: take this one out of the partition under [[lease]]",
        )
    Vxlan(config).restore(config.is_of_others)


def leave_vxlan(leases: Path, lease: LeaseDirectory) -> None:
    """Remove the VMs of a lease that has ended from the VXLAN, and all of it with the site's last lease. It can be
    repeated as long as the lease's directory exists. Absent is success."""
    site = site_of_lease(lease.name)
    records = _vxlan_records(leases, site)
    if not records.is_dir():
        return
    vxlan = Vxlan(VxlanConfig(site, 0, 0, str, 0, "", records))  # what is recorded is removed without the rest
    for owner in vxlan.owners():
        if not _has_vm(_others(leases, lease), owner):
            vxlan.drop(owner)
    vxlan.remove(unless=lambda: bool(_others(leases, lease)))


def _others(leases: Path, lease: LeaseDirectory) -> list[LeaseDirectory]:
    """The other leases of the same site on this node, also ended ones that are not removed yet."""
    site = site_of_lease(lease.name)
    return [one for one in lease_directories(leases) if one.name != lease.name and site_of_lease(one.name) == site]


def _has_vm(among: Iterable[LeaseDirectory], owner: str) -> bool:
    return any((one.vms / owner).exists() or owner == members_owner(one.name) for one in among)


def _vxlan_records(leases: Path, site: str) -> Path:
    return leases / f".vxlan-{site}"


# --- removal ----------------------------------------------------------------------------------------


def sweep(leases: Path, job: str = "") -> list[str]:
    """Remove what is left of leases whose pilots have ended, and of the lease of that job, which the scheduler has
    ended. Returns what could not be removed, for the operator."""
    left = []
    for place in lease_directories(leases):
        known = place.recorded()
        over = known is not None and bool(job) and known.job == job
        if over and known is not None and not process.kill(known.process):
            left.append(f"process {known.pid} of {place.name} does not end")
            continue
        left += remove_place(place, known, over=over)
    return left


def remove_place(place: LeaseDirectory, known: PilotRecord | None, *, over: bool = True) -> list[str]:
    """Remove all of a lease if it is known to be over, or its pilot has ended. Returns what is left."""
    with try_locked_directory(place.root) as ours:
        if not ours or (not over and is_locked(place.lock)):  # another sweep does it, or a pilot starts or lives
            return []
        left = remove_groups([Path(path) for path in known.groups]) if known is not None else []
        try:
            disconnect_network(place.name)
            leave_vxlan(place.root.parent, place)
            shutil.rmtree(place.root)
        except (OSError, MultiverseError) as error:
            left.append(str(error))
    log.info("lease removed", lease=place.name, left=left)
    return left
