"""The lab's bridge: connects guests to this machine, and has the first address of their network. Blocks briefly."""

from __future__ import annotations

import socket

from pyroute2 import IPRoute

from multiverse.drivers.qemu import job_vms
from multiverse.site.rendering import bridge_mac
from multiverse_lab.lab.plan import LabPlan


def is_up(plan: LabPlan) -> bool:
    """Whether the bridge exists. Costs one system call."""
    try:
        return socket.if_nametoindex(plan.bridge) > 0
    except OSError:
        return False


def _index(ip: IPRoute, name: str) -> int | None:
    found = ip.link_lookup(ifname=name)
    return int(found[0]) if found else None


def up(plan: LabPlan) -> bool:
    """Create the bridge with its address; True if it did not exist."""
    with IPRoute() as ip:
        there = _index(ip, plan.bridge)
        if there is None:
            ip.link("add", ifname=plan.bridge, kind="bridge", address=bridge_mac(plan.gateway))
        bridge = _index(ip, plan.bridge)
        addresses = ip.get_addr(family=socket.AF_INET, index=bridge)
        if plan.gateway not in {address.get_attr("IFA_ADDRESS") for address in addresses}:
            ip.addr("add", index=bridge, address=plan.gateway, prefixlen=plan.prefix)
        ip.link("set", index=bridge, state="up")
        return there is None


def _is_of_a_job(name: str, plan: LabPlan) -> bool:
    return name.startswith(f"{plan.job_bridge}.")


def down(plan: LabPlan) -> bool:
    """Delete the bridge; True if it existed. The taps on it belong to VMs and are deleted with them. So are the bridges
    of jobs whose agents have died."""
    with IPRoute() as ip:
        there = _index(ip, plan.bridge)
        names = [str(link.get_attr("IFLA_IFNAME")) for link in ip.get_links()]
        if there is not None:
            ip.link("del", index=there)
    for name in names:
        if _is_of_a_job(name, plan):
            job_vms.remove_bridge(name)
    return there is not None
