"""The lab's bridge: the guests' link to this machine, with the first address of their network. Blocks briefly."""

from __future__ import annotations

import socket

from pyroute2 import IPRoute

from multiverse.lab.plan import LabPlan


def is_up(plan: LabPlan) -> bool:
    """Is it there? Costs one system call, and may be asked anywhere."""
    try:
        return socket.if_nametoindex(plan.bridge) > 0
    except OSError:
        return False


def _index(ip: IPRoute, name: str) -> int | None:
    found = ip.link_lookup(ifname=name)
    return int(found[0]) if found else None


def up(plan: LabPlan) -> bool:
    """Make it, with its address; True if it was not there."""
    with IPRoute() as ip:
        there = _index(ip, plan.bridge)
        if there is None:
            # A MAC of its own: else it would take the lowest of its ports', and change it under the guests.
            octets = bytes(map(int, plan.gateway.split(".")))
            ip.link("add", ifname=plan.bridge, kind="bridge", address=f"02:4d:{octets.hex(':')}")
        bridge = _index(ip, plan.bridge)
        addresses = ip.get_addr(family=socket.AF_INET, index=bridge)
        if plan.gateway not in {address.get_attr("IFA_ADDRESS") for address in addresses}:
            ip.addr("add", index=bridge, address=plan.gateway, prefixlen=plan.prefix)
        ip.link("set", index=bridge, state="up")
        return there is None


def down(plan: LabPlan) -> bool:
    """Remove it; True if it was there. Taps on it belong to VMs and go with them."""
    with IPRoute() as ip:
        there = _index(ip, plan.bridge)
        if there is not None:
            ip.link("del", index=there)
        return there is not None
