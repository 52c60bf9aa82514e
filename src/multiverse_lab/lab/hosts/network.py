"""The network of a lab host: a bridge for its guests, whose uplink is a port of the lab's switch. Blocks briefly."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from multiverse.core.errors import Broken
from multiverse.site.rendering import bridge_mac
from multiverse_lab.lab import router
from multiverse_lab.lab.plan import LabHost, LabPlan

_UPLINK = "uplink"  # not "mv…": the firewall takes such ports for VMs


def connect(plan: LabPlan, host: LabHost, pid: int) -> None:
    """Connect the host, whose first process is `pid`, to the switch, or to the router; again if it has been connected
    before."""
    if host.router:
        router.connect(plan, host, pid)
        return
    disconnect(host)
    with IPRoute() as ip:
        peer = {"ifname": _UPLINK, "net_ns_pid": pid}
        ip.link("add", ifname=host.uplink, kind="veth", peer=peer)
        (port,) = ip.link_lookup(ifname=host.uplink)
        (switch,) = ip.link_lookup(ifname=plan.bridge)
        ip.link("set", index=port, master=switch, state="up")
    bridge = plan.bridge
    made = (
        "link set lo up",
        f"link add {bridge} address {bridge_mac(host.address)} type bridge",
        f"address add {host.address}/{plan.prefix} dev {bridge}",
        f"link set {bridge} up",
        f"route add default via {plan.gateway}",
    )
    there = Path(f"/proc/{pid}/root/sys/class/net/{bridge}").exists()
    lines = [*(() if there else made), f"link set {_UPLINK} master {bridge} up"]
    done = _run_inside(pid, ["ip", "-batch", "-"], "\n".join(lines))
    if done.returncode:
        raise Broken(f"cannot make the network of host {host.name}: {done.stderr.strip()}", hint="lab down, and again")


def masquerade(pid: int, subnet: str) -> None:
    """Let the host whose first process is `pid` send what comes from that network as its own; again is success."""
    rule = f"ip saddr {subnet} ip daddr != {subnet} masquerade"
    rules = f"table ip lab {{ chain leaving {{ type nat hook postrouting priority 100; {rule}; }}; }}"
    script = "echo 1 > /proc/sys/net/ipv4/ip_forward; exec nft -f -"
    done = _run_inside(pid, ["sh", "-ec", script], f"table ip lab\ndelete table ip lab\n{rules}\n")
    if done.returncode:
        raise Broken(f"cannot translate addresses on a host: {done.stderr.strip()}", hint="is nftables installed?")


def _run_inside(pid: int, argv: list[str], text: str) -> subprocess.CompletedProcess[str]:
    """Run a command with this input in the network namespace of a process, for 30 s at most."""
    return subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", *argv],
        input=text,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def disconnect(host: LabHost) -> bool:
    """Remove the host's port of the switch, with the uplink at its other end; True if it existed."""
    with IPRoute() as ip:
        for index in ip.link_lookup(ifname=host.uplink):
            with suppress(NetlinkError):  # the kernel is removing it with its other end
                ip.link("del", index=index)
            return True
    return False
