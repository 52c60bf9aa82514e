"""The plan of a lab. It is chosen once and kept in lab.json, so that each `lab up` starts the same lab."""

from __future__ import annotations

import ipaddress
import json
import os
import random
import shutil
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from multiverse.config import HostSettings
from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.system import files
from multiverse_lab.lab.layout import Layout
from multiverse_lab.lab.spank import built_plugin


@dataclass(frozen=True, slots=True)
class LabOptions:
    """The options of `lab up`. None means as before, or the default. Memory in MiB.

    With `routed`, a router is between the hosts, and the physical nodes. `cores` and `memory` are those of each host,
    and of each of the `physical` nodes. `settings` are the controller's, by section and key; if given, they replace all
    those given before. The value "" leaves a key at its default, whatever the lab would choose.
    """

    cores: int | None = None
    memory: int | None = None
    shares: tuple[Path, ...] = ()
    image: str | None = None
    images: Path | None = None
    hosts: int | None = None
    physical: int | None = None
    routed: bool | None = None
    settings: Mapping[str, Mapping[str, Any]] | None = None


MOST_HOSTS = MOST_PHYSICAL = 4
UPLINK_RATE = 10_000
"""Mbit/s that each host of a lab has for its VMs: what the veth that is its uplink reports, whatever it carries."""
_VXLAN_PORTS = 14500
_FIRST_HOST = 10  # host 1 has the address after this one
_FIRST_PHYSICAL = 20  # and physical node 1 the one after this


@dataclass(frozen=True, slots=True)
class LabHost:
    """A host with namespaces of its own. `uplink` is its port at the lab's bridge, which is the switch. With `router`,
    the router's address in the host's network, it is the router's port.

    A `physical` one is a node of Slurm, with a slurmd in place of an sshd. It has an agent if jobs can have VMs on it.
    """

    number: int
    address: str
    uplink: str
    physical: bool = False
    router: str = ""

    @property
    def name(self) -> str:
        return f"{'mvp' if self.physical else 'mvh'}{self.number}"


@dataclass(frozen=True, slots=True)
class LabPlan:
    """What a lab consists of. Memory and disk in MiB.

    `hosts` is the number of hosts. A single one is this machine itself; of several, each has namespaces of its own, and
    `cores` and `memory` are what each of them declares. Besides, there are `physical` nodes, which users use directly.
    With `routed`, each host and node has a network of its own, and a router connects these with this machine.

    `disk` is what VMs may write: the space that was free when the lab was made. `bridge` has the first address of
    `subnet`. The ports are on this machine. `settings` override the controller's settings that the lab would choose, by
    section and key. `plugin` and `enter` are Slurm's plugin for VMs inside jobs and its program; empty if they are not
    built.
    """

    cores: int
    memory: int
    image: str
    images: str
    shares: tuple[str, ...]
    bridge: str
    subnet: str
    slurmctld_port: int
    slurmd_port: int
    slurmdbd_port: int
    nfs_port: int
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    disk: int = HostSettings.disk
    hosts: int = 1
    physical: int = 0
    routed: bool = False
    plugin: str = ""
    enter: str = ""

    @property
    def own_hosts(self) -> tuple[LabHost, ...]:
        """The hosts with namespaces of their own. Their addresses are below those of VMs (`network.first`)."""
        if self.hosts == 1:
            return ()
        addresses = ipaddress.IPv4Network(self.subnet)
        numbers = range(1, self.hosts + 1)
        if self.routed:
            return tuple(
                LabHost(one, self.underlay(one)[1], f"{self.bridge}h{one}", router=self.underlay(one)[0])
                for one in numbers
            )
        return tuple(LabHost(one, str(addresses[_FIRST_HOST + one]), f"{self.bridge}h{one}") for one in numbers)

    @property
    def physical_nodes(self) -> tuple[LabHost, ...]:
        """The bare-metal nodes of partition `physical`. Their ports have no name that the firewall takes for a VM's,
        because this machine's agent may have VMs at the same bridge."""
        addresses = ipaddress.IPv4Network(self.subnet)
        port = self.bridge.removeprefix("mv")
        if self.routed:
            networks = ((one, self.underlay(_FIRST_PHYSICAL + one)) for one in range(1, self.physical + 1))
            return tuple(
                LabHost(one, own, f"{port}p{one}", physical=True, router=router) for one, (router, own) in networks
            )
        return tuple(
            LabHost(one, str(addresses[_FIRST_PHYSICAL + one]), f"{port}p{one}", physical=True)
            for one in range(1, self.physical + 1)
        )

    def underlay(self, number: int) -> tuple[str, str]:
        """The addresses of the router, and of the host of that number, in the host's network of 256 addresses; 0 is
        this machine."""
        network = f"{self.underlays.rpartition('.0.0')[0]}.{number}"
        return f"{network}.1", f"{network}.2"

    @property
    def underlays(self) -> str:
        """What contains these networks, and belongs to no other lab (see `_free_network`)."""
        first, second, *_ = ipaddress.IPv4Network(self.subnet).network_address.packed
        return f"{first}.{(second + 50) % 200}.0.0/16"

    @property
    def vxlan_port(self) -> int:
        """The UDP port of the VXLAN. No other lab has it: their controllers share this machine's network."""
        return _VXLAN_PORTS + ipaddress.IPv4Network(self.subnet).network_address.packed[1]

    @property
    def machine_port(self) -> str:
        """The interface that connects this machine with the router."""
        return f"{self.bridge.removeprefix('mv')}r"

    @property
    def router(self) -> str:
        """The network namespace of the router."""
        return f"{self.bridge}router"

    @property
    def gateway(self) -> str:
        return str(ipaddress.IPv4Network(self.subnet)[1])

    @property
    def job_vms(self) -> bool:
        """Whether jobs can have VMs inside their allocations: with bare-metal nodes and the plugin, or as is set."""
        return bool(self.settings.get("job_vms", {}).get("enabled", self.physical and self.plugin))

    @property
    def job_bridge(self) -> str:
        """What the names of the bridges of VMs inside jobs begin with. The agents make and remove them."""
        return f"{self.bridge}j"

    @property
    def job_subnet(self) -> str:
        """The addresses of these VMs, which belong to no lab, and to no other lab's jobs (see `_free_network`)."""
        first, second, *_ = ipaddress.IPv4Network(self.subnet).network_address.packed
        return f"{first}.{(second + 100) % 200}.0.0/16"

    @property
    def prefix(self) -> int:
        return ipaddress.IPv4Network(self.subnet).prefixlen


def load(where: Layout) -> LabPlan | None:
    """The plan of an existing lab; None if there is none. `Broken` if its file is damaged."""
    try:
        raw = json.loads(where.state.read_text())
        return LabPlan(**(raw | {"shares": tuple(raw["shares"])}))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise Broken(f"the file {where.state} is damaged", hint="remove the lab's directory and start again") from error


def decide(where: Layout, options: LabOptions) -> LabPlan:
    """The existing plan, or a new one on free ports, changed by the options. Writes lab.json."""
    plan = load(where) or _new(where)
    shares = dict.fromkeys((*plan.shares, *(str(path) for path in options.shares)))
    plugin, enter = built_plugin() or ("", "")
    plan = replace(
        plan,
        cores=options.cores or plan.cores,
        memory=options.memory or plan.memory,
        image=options.image or plan.image,
        images=str(options.images) if options.images else plan.images,
        shares=tuple(shares),
        hosts=options.hosts or plan.hosts,
        physical=plan.physical if options.physical is None else options.physical,
        routed=plan.routed if options.routed is None else options.routed,
        settings=plan.settings if options.settings is None else options.settings,
        plugin=str(plugin),
        enter=str(enter),
    )
    if plan.routed and not plan.own_hosts:
        raise Refused("a router is between hosts, and this lab has one", hint="lab up --hosts 2 --routed")
    files.replace(where.state, json.dumps(asdict(plan), indent=2) + "\n", mode=0o644)
    return plan


def _new(where: Layout) -> LabPlan:
    bridge, subnet = _free_network(str(where.root))
    ctld, slurmd, dbd, nfs = _free_ports(4)
    return LabPlan(
        cores=8,
        memory=16384,
        image="slim",
        images="/var/lib/multiverse/images",
        shares=(),
        bridge=bridge,
        subnet=subnet,
        slurmctld_port=ctld,
        slurmd_port=slurmd,
        slurmdbd_port=dbd,
        nfs_port=nfs,
        disk=_free_space(where.root),
    )


def _free_space(root: Path) -> int:
    """MiB that are free where the lab's directory is, or will be."""
    there = next(path for path in (root, *root.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free >> 20


def _free_ports(count: int) -> list[int]:
    """Free ports below the kernel's ephemeral ports, so that no process takes them while the lab is down."""
    found: list[int] = []
    for port in random.sample(range(20000, 30000), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise Exhausted("no free port between 20000 and 30000", hint="stop a program that listens there")


def _free_network(seed: str) -> tuple[str, str]:
    """A bridge name and a /16 network that this machine does not use.

    The search begins at a number derived from `seed`, so that two labs that start at the same time choose differently.
    """
    with IPRoute() as ip:
        links = {link.get_attr("IFLA_IFNAME") for link in ip.get_links()}
        used = [ipaddress.IPv4Network(text, strict=False) for text in _addresses(ip)]
    first = random.Random(seed).randrange(200, 250)
    for octet in (*range(first, 250), *range(200, first)):
        bridge, subnet = f"mvlab{octet}", ipaddress.IPv4Network(f"10.{octet}.0.0/16")
        if bridge not in links and not any(subnet.overlaps(other) for other in used):
            return bridge, str(subnet)
    raise Exhausted("no free network between 10.200.0.0/16 and 10.249.0.0/16", hint="bring other labs down")


def _addresses(ip: IPRoute) -> Iterable[str]:
    for address in ip.get_addr(family=socket.AF_INET):
        yield f"{address.get_attr('IFA_ADDRESS')}/{address['prefixlen']}"
    for route in ip.get_routes(family=socket.AF_INET):
        if route.get_attr("RTA_DST"):
            yield f"{route.get_attr('RTA_DST')}/{route['dst_len']}"


def shares(requested: Iterable[Path], where: Layout) -> tuple[Path, ...]:
    """The directories that guests are to mount: the requested ones, and with the first ones of a lab /home, the user's
    home and the current directory. A later command may be called from anywhere: with another directory to mount, most
    services would start again.

    `Refused` if a requested directory does not exist or cannot be mounted. The others are left out in that case.
    """
    chosen = [Path(os.path.realpath(path)) for path in requested]
    for path in chosen:
        if not path.is_dir():
            raise Refused(f"--share {path}: no such directory", hint="create it first")
        if not sharable(path):
            raise Refused(f"--share {path}: cannot be mounted in guests", hint="share a directory of your own")
    if load(where) is not None:
        return tuple(chosen)
    user = os.environ.get("SUDO_USER")
    usual = [Path("/home"), Path(f"~{user}" if user else "~").expanduser(), Path.cwd()]
    usual = [Path(os.path.realpath(path)) for path in usual]
    return (*(path for path in usual if path.is_dir() and sharable(path)), *chosen)


def changed_settings(where: Layout, requested: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The settings that the lab was given before, with these in place of those of the same keys."""
    plan = load(where)
    before = plan.settings if plan else {}
    return {**before, **{section: {**before.get(section, {}), **keys} for section, keys in requested.items()}}


_SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr")


def sharable(path: Path) -> bool:
    """Whether guests can mount the directory: it is not `/` or a system directory, and its name can stand in
    configuration files."""
    parts = path.parts
    plain = all(c.isprintable() and c not in '";,\\ #' for c in str(path))
    return len(parts) > 1 and parts[1] not in _SYSTEM and parts[1:] not in (("tmp",), ("var",)) and plain


def outermost(paths: Iterable[str]) -> list[str]:
    """The existing directories that are in no other one of them."""
    found: list[str] = []
    for path in sorted(paths):
        if Path(path).is_dir() and not any(Path(path).is_relative_to(other) for other in found):
            found.append(path)
    return found
