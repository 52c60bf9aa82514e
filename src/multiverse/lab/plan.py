"""What a lab is: chosen once, kept in its lab.json, so that every `up` brings back the same one."""

from __future__ import annotations

import ipaddress
import json
import os
import random
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.lab.layout import Layout


@dataclass(frozen=True, slots=True)
class LabOptions:
    """What `lab up` was asked for; None: as before, or the default. Memory in MiB. `settings` are the controller's,
    by section and key; given, they replace those given before."""

    cores: int | None = None
    memory: int | None = None
    shares: tuple[Path, ...] = ()
    image: str | None = None
    images: Path | None = None
    settings: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class LabPlan:
    """Ports are this machine's; `bridge` has the first address of `subnet`. Memory in MiB. `settings` are those of the
    controller's that a lab does not choose by itself, by section and key."""

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

    @property
    def gateway(self) -> str:
        return str(ipaddress.IPv4Network(self.subnet)[1])

    @property
    def prefix(self) -> int:
        return ipaddress.IPv4Network(self.subnet).prefixlen


def load(where: Layout) -> LabPlan | None:
    """The plan of an existing lab. `Broken` if its file cannot be understood."""
    try:
        raw = json.loads(where.state.read_text())
        return LabPlan(**(raw | {"shares": tuple(raw["shares"])}))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise Broken(f"cannot understand {where.state}", hint="remove the lab's directory and start anew") from error


def decide(where: Layout, options: LabOptions) -> LabPlan:
    """The existing lab's plan, or a new one on free ports, with the options in it; written to lab.json."""
    plan = load(where) or _new(where)
    shares = dict.fromkeys((*plan.shares, *(str(path) for path in options.shares)))
    plan = replace(
        plan,
        cores=options.cores or plan.cores,
        memory=options.memory or plan.memory,
        image=options.image or plan.image,
        images=str(options.images) if options.images else plan.images,
        shares=tuple(shares),
        settings=plan.settings if options.settings is None else options.settings,
    )
    beside = where.state.with_suffix(".new")
    beside.write_text(json.dumps(asdict(plan), indent=2) + "\n")
    beside.chmod(0o644)
    beside.replace(where.state)
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
    )


def _free_ports(count: int) -> list[int]:
    """Ports below the range that the kernel hands out, so that nothing takes them while the lab is down."""
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
    raise Exhausted("no free ports between 20000 and 30000")


def _free_network(seed: str) -> tuple[str, str]:
    """A bridge name and a /16 that nobody uses here. Where to begin comes from the directory: two labs that start
    at the same moment, neither up yet, do not choose the same."""
    with IPRoute() as ip:
        links = {link.get_attr("IFLA_IFNAME") for link in ip.get_links()}
        used = [ipaddress.IPv4Network(text, strict=False) for text in _addresses(ip)]
    first = random.Random(seed).randrange(200, 250)
    for octet in (*range(first, 250), *range(200, first)):
        bridge, subnet = f"mvlab{octet}", ipaddress.IPv4Network(f"10.{octet}.0.0/16")
        if bridge not in links and not any(subnet.overlaps(other) for other in used):
            return bridge, str(subnet)
    raise Exhausted("no free network between 10.200.0.0/16 and 10.249.0.0/16")


def _addresses(ip: IPRoute) -> Iterable[str]:
    for address in ip.get_addr(family=socket.AF_INET):
        yield f"{address.get_attr('IFA_ADDRESS')}/{address['prefixlen']}"
    for route in ip.get_routes(family=socket.AF_INET):
        if route.get_attr("RTA_DST"):
            yield f"{route.get_attr('RTA_DST')}/{route['dst_len']}"


def shares(requested: Iterable[Path]) -> tuple[Path, ...]:
    """What the guests mount: /home, the user's home, the current directory, and what was asked for. `Refused`
    if a wish does not exist or is `/`; the others are left out then."""
    asked = [Path(os.path.realpath(path)) for path in requested]
    for path in asked:
        if not path.is_dir():
            raise Refused(f"--share {path}: no such directory", hint="make it first")
        if not sharable(path):
            raise Refused(f"--share {path}: cannot be mounted in guests", hint="share a directory of your own")
    user = os.environ.get("SUDO_USER")
    usual = [Path("/home"), Path(f"~{user}" if user else "~").expanduser(), Path.cwd()]
    usual = [Path(os.path.realpath(path)) for path in usual]
    return (*(path for path in usual if path.is_dir() and sharable(path)), *asked)


_SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr")


def sharable(path: Path) -> bool:
    """Not `/`, nothing that a guest has of its own, and a name that configuration files can hold."""
    parts = path.parts
    plain = all(c.isprintable() and c not in '";,\\ #' for c in str(path))
    return len(parts) > 1 and parts[1] not in _SYSTEM and parts[1:] not in (("tmp",), ("var",)) and plain


def outermost(paths: Iterable[str]) -> list[str]:
    """Without those that lie below another, and without those that do not exist any more."""
    found: list[str] = []
    for path in sorted(paths):
        if Path(path).is_dir() and not any(Path(path).is_relative_to(other) for other in found):
            found.append(path)
    return found
