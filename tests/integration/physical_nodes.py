"""What is on the bare-metal nodes of a lab: states and features in Slurm, and what exists of VMs inside jobs."""

from __future__ import annotations

from multiverse_lab.lab.hosts.machine import HostInit
from multiverse_lab.lab.plan import load
from multiverse_lab.lab.service import Lab
from tests.integration.conftest import LabUnderTest
from tests.integration.job_nodes import job_nodes
from tests.integration.watch import until


def lab_of(under_test: LabUnderTest) -> Lab:
    plan = load(under_test.where)
    assert plan is not None
    return Lab(under_test.where, plan)


def inside(under_test: LabUnderTest, node: int) -> list[str]:
    """What runs a command in the network of the node of this number."""
    made = lab_of(under_test)
    running = HostInit(made.plan.physical_nodes[node - 1]).service.running(made.where)
    assert running is not None
    return ["nsenter", f"--net=/proc/{running.pid}/ns/net"]


def networks(under_test: LabUnderTest) -> list[str]:
    """Interfaces and rules of jobs on all nodes."""
    plan = lab_of(under_test).plan
    found = []
    for node in plan.physical_nodes:
        there = inside(under_test, node.number)
        links = under_test.run(*there, "ls", "/proc/sys/net/ipv4/conf").stdout.split()
        tables = under_test.run(*there, "nft", "list", "tables").stdout.split()
        found += [link for link in links if link.startswith((plan.job_bridge, "mvjob-", "vx"))]
        found += [table for table in tables if table.startswith("mv")]
    return found


def nothing_left(under_test: LabUnderTest) -> None:
    """No part of a VM remains on a node, and the nodes take jobs."""
    nodes = job_nodes(under_test)
    until("nothing is left", lambda: not any(node.of_jobs() for node in nodes), 120)
    until("the nodes are idle", lambda: _states(under_test) == {"idle"}, 90)


def _states(under_test: LabUnderTest) -> set[str]:
    return set(under_test.run("sinfo", "-h", "-p", "physical", "-N", "-o", "%T").stdout.split())
