"""What is on the bare-metal nodes of a lab: states and features in Slurm, and what exists of VMs inside jobs."""

from __future__ import annotations

from pathlib import Path

from multiverse.lab.hosts.machine import HostInit
from multiverse.lab.plan import load
from multiverse.lab.service import Lab
from tests.integration.conftest import LabUnderTest
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
    until("nothing is left", lambda: not _left(under_test), 120)
    until("the nodes are idle", lambda: _states(under_test) == {"idle"}, 90)


def _left(under_test: LabUnderTest) -> list[Path]:
    owns = [under_test.where.host(node.name) for node in lab_of(under_test).plan.physical_nodes]
    places = [place for own in owns for place in (own.controller / "vms", own.run / "vms", own.agent / "jobs")]
    records = [path for own in owns if (own.run / "jobs").exists() for path in (own.run / "jobs").iterdir()]
    vms = [path for place in places if place.exists() for path in place.glob("mvjob-*")]
    overlays = [path for own in owns for path in (own.agent / "job-overlays").glob("*")]
    files = [path for place in places if place.name == "jobs" for path in place.glob("*")]
    return [*vms, *records, *files, *overlays, *map(Path, networks(under_test))]


def _states(under_test: LabUnderTest) -> set[str]:
    return set(under_test.run("sinfo", "-h", "-p", "physical", "-N", "-o", "%T").stdout.split())
