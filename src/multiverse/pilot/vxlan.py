"""The VXLAN of a leased node: one of the site at the node's own bridge, which all leases of the node share.

It is where a static host has it, in the node's network, because a mark of a frame does not outlive the change of a
network namespace, and because a port belongs to one VXLAN. VMs of a lease reach it by the lease's uplink. The agent of
a lease enters the node's network to change it. The pilot makes it, and the end of the last lease of the site on the
node removes it. Blocks briefly.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from pyroute2 import IPRoute

from multiverse.core.errors import Refused
from multiverse.core.model.identity import site_of_lease
from multiverse.host.vxlan import Vxlan, VxlanConfig, members_owner
from multiverse.pilot.lease_directory import LeaseDirectory, lease_directories


def on_node(config: VxlanConfig, leases: Path, find_address: Callable[[], str]) -> VxlanConfig:
    """The VXLAN of a host as it is for a lease of this node, whose network this thread is in. `find_address` gives
    the node's own address."""
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    return replace(
        config,
        find_address=find_address,
        records=_records(leases, config.site),
        namespace=namespace,
        is_of_others=lambda owner: _has_vm(lease_directories(leases), owner),
    )


def join(config: VxlanConfig, gateway: str) -> None:
    """Make the VXLAN for a lease whose directory exists, unless another lease has made it. Raises `Refused` on the
    controller's machine, which has the address `gateway` and a VXLAN already, and what `Vxlan.restore` raises."""
    with IPRoute() as ip:
        own = {each.get_attr("IFA_ADDRESS") for each in ip.get_addr(family=socket.AF_INET)}
    if gateway in own:
        raise Refused(
            "this node is the controller's machine, whose VXLAN a lease cannot share",
            hint="lease other nodes: take this one out of the partition under [[lease]]",
        )
    Vxlan(config).restore(config.is_of_others)


def leave(leases: Path, lease: LeaseDirectory) -> None:
    """Remove what VMs of a lease that has ended have in the VXLAN, and all of it with the last lease of the site.
    The lease's directory still exists, so that this is repeated if it is interrupted. Absent is success."""
    site = site_of_lease(lease.name)
    records = _records(leases, site)
    if not records.is_dir():
        return
    vxlan = Vxlan(VxlanConfig(site, 0, 0, str, 0, "", records))  # what is recorded is removed without the rest
    for owner in vxlan.owners():
        if not _has_vm(_others(leases, lease), owner):
            vxlan.drop(owner)
    vxlan.remove(unless=lambda: bool(_others(leases, lease)))


def _others(leases: Path, lease: LeaseDirectory) -> list[LeaseDirectory]:
    """The other leases of the same site on this node, those that have ended and are not removed yet among them."""
    site = site_of_lease(lease.name)
    return [one for one in lease_directories(leases) if one.name != lease.name and site_of_lease(one.name) == site]


def _has_vm(among: Iterable[LeaseDirectory], owner: str) -> bool:
    return any((one.vms / owner).exists() or owner == members_owner(one.name) for one in among)


def _records(leases: Path, site: str) -> Path:
    return leases / f".vxlan-{site}"
