"""A router between the hosts of a lab, which then have no layer 2 in common with each other or with this machine.

It is a network namespace without a process. Each host shares a network with it, and so does this machine. Blocks
briefly.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from multiverse import config
from multiverse.core.errors import Broken
from multiverse.drivers.qemu.driver import vxlan_config
from multiverse.host.vxlan import Vxlan
from multiverse.site.rendering import bridge_mac
from multiverse_lab.lab.layout import Layout
from multiverse_lab.lab.plan import LabHost, LabPlan

_UNDERLAY = "underlay"  # a host's interface
_NAMESPACES = Path("/run/netns")


def up(plan: LabPlan) -> bool:
    """Create the router, and connect this machine with it; True if it did not exist."""
    if (_NAMESPACES / plan.router).exists():
        return False
    router, own = plan.underlay(0)
    _run("ip", "netns", "add", plan.router)
    lines = (
        f"link add {plan.machine_port} type veth peer name machine netns {plan.router}",
        f"address add {own}/24 dev {plan.machine_port}",
        f"link set {plan.machine_port} up",
    )
    _run("ip", "-batch", "-", text=lines)
    inside = (
        "link set lo up",
        f"address add {router}/24 dev machine",
        "link set machine up",
        f"route add {plan.gateway} via {own}",  # slurmctld's address, for the physical nodes
    )
    _run("ip", "-n", plan.router, "-batch", "-", text=inside)
    forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
    _run("nsenter", f"--net={_NAMESPACES / plan.router}", "sh", "-c", forward)
    _run("ip", "route", "add", plan.underlays, "via", router)
    return True


def down(plan: LabPlan) -> bool:
    """Delete the router with its links; True if it existed."""
    if not (_NAMESPACES / plan.router).exists():
        return False
    _run("ip", "netns", "del", plan.router)
    return True


def connect(plan: LabPlan, host: LabHost, pid: int) -> None:
    """Connect the host, whose first process is `pid`, with the router, again if it has been connected before, and give
    it a bridge that nothing connects with others."""
    if not Path(f"/proc/{pid}/root/sys/class/net/{_UNDERLAY}").exists():
        lines: tuple[str, ...] = (
            f"link add {host.uplink} type veth peer name {_UNDERLAY} netns {pid}",
            f"address add {host.router}/24 dev {host.uplink}",
            f"link set {host.uplink} up",
        )
        _run("ip", "-n", plan.router, "-batch", "-", text=lines)
        lines = (
            "link set lo up",
            f"address add {host.address}/24 dev {_UNDERLAY}",
            f"link set {_UNDERLAY} up",
            f"route add default via {host.router}",
            f"link add {plan.bridge} address {bridge_mac(host.address)} type bridge",
            f"link set {plan.bridge} up",
        )
        _run("nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-", text=lines)


def remove_vxlans(where: Layout) -> None:
    """Remove what the lab's VXLAN has on this machine, which outlives the controller."""
    for records in where.controller.glob("vxlan-*"):
        found = vxlan_config(config.load(where.settings), records.name.partition("-")[2])
        if found is not None:
            Vxlan(found).remove()


def _run(*argv: str, text: tuple[str, ...] = ()) -> None:
    done = subprocess.run(
        argv, input="\n".join(text) + "\n", capture_output=True, text=True, timeout=30, check=False, process_group=0
    )  # not among those that a terminal's Ctrl-C reaches
    if done.returncode:
        raise Broken(f"cannot make the lab's router: {done.stderr.strip()}", hint="lab down, and again")
