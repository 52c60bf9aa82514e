"""The network of a lease: a bridge in a network namespace of its own, whose uplink is a port of the node's bridge.

VMs' taps and their firewall are in that namespace. So they end with the lease, and never meet those of another agent of
the node. Blocks briefly.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from multiverse.core.errors import Broken

_UPLINK = "uplink"  # not "mv…": the firewall takes such ports for VMs


def port_name(lease: str) -> str:
    """The interface of the node that belongs to a lease."""
    return f"lse{_digest(lease)[:10]}"


def plug(lease: str, bridge: str, pid: int) -> None:
    """Connect the network namespace of process `pid` with the node's bridge. Raises `Broken` if there is none."""
    unplug(lease)
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


def unplug(lease: str) -> None:
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
