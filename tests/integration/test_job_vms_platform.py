"""VMs inside jobs that a platform makes, behind the agent of a host: the tests of the other implementation, and what is
different."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse import config
from multiverse.core.model.identity import vm_prefix
from multiverse.host import manifest
from multiverse.service.job_vms import site_of_node
from multiverse_lab.lab import baremetal
from multiverse_lab.lab.services import AGENT
from tests.integration.bare_node import BareNode, bare_node, ensure_agent
from tests.integration.conftest import LabUnderTest
from tests.integration.test_job_vms import (  # noqa: F401 - they run here, too
    test_input_and_output_are_carried_whole_and_a_signal_ends_the_task_as_it_ended_in_the_guest,
    test_srun_runs_its_tasks_in_a_vm_as_the_user_in_the_directory_and_environment,
    test_the_tasks_of_a_step_are_divided_over_the_vms_of_the_node,
    test_the_vm_of_another_user_cannot_be_entered,
)
from tests.integration.watch import accounted, kill, until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def node(lab: LabUnderTest, _images: None) -> Iterator[BareNode]:
    """The agent of the node is the platform's, too: it connects to itself as a controller does."""
    network = ipaddress.IPv4Network(config.load(lab.where.settings).network.subnet)
    part = list(network.subnets(new_prefix=26))[-2]
    host = config.load(lab.where.settings).host.name
    lines = ('platform = "agent"', f'platform_host = "{host}"', f'platform_subnet = "{part}"')
    with bare_node(lab, *lines) as node:
        yield node


@pytest.fixture(autouse=True)
def _nothing_left(node: BareNode) -> Iterator[None]:
    yield
    node.nothing_left()


def _vms(node: BareNode) -> list[Path]:
    """The VMs that the platform has for jobs of the node."""
    prefix = vm_prefix(site_of_node(baremetal.NODE))
    return list((node.under_test.where.controller / "vms").glob(f"{prefix}*"))


def _running(node: BareNode, name: str) -> str:
    """A job that runs in its VM."""
    out = node.output(name)
    job = node.sbatch("echo runs; sleep 600", f"--output={out}")
    until("it runs", lambda: out.exists() and "runs" in out.read_text(), 180)
    return job


def test_a_job_has_all_of_its_memory_in_a_vm_beside_it_which_goes_with_the_job(node: BareNode) -> None:
    job = _running(node, "beside")
    (home,) = _vms(node)
    known = manifest.read(home)
    assert known is not None and not known.job_groups
    assert known.total_memory == 672, "700 MiB, in whole blocks: the QEMU is not in the job"
    groups = Path("/proc", str(known.pid), "cgroup").read_text()
    assert f"job_{job}" not in groups
    node.under_test.run("scancel", job)
    assert accounted(node.under_test, job, 90)[0] == "CANCELLED"


def test_a_job_of_several_nodes_is_told_that_the_platform_cannot(node: BareNode) -> None:
    wanted = f"job=999 uid={node.under_test.user.uid} cores=1 allocated=700 image=slim vms=1 nodes=n1,n2 node=n1"
    reply = _asked(config.load(node.under_test.where.settings).job_vms.socket, f"provide {wanted}")
    assert "submit the job with --nodes=1" in reply


def _asked(path: Path, line: str) -> str:
    async def ask() -> str:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(f"{line}\n".encode())
        reply = await reader.read()
        writer.close()
        return reply.decode()

    return asyncio.run(ask())


@pytest.mark.slow
def test_the_next_agent_removes_vms_of_ended_jobs_and_those_that_it_knows_nothing_of(node: BareNode) -> None:
    lab = node.under_test
    job = _running(node, "dead")
    running = AGENT.running(lab.where)
    assert running is not None
    kill(running.pid)
    lab.run("scancel", job)
    assert accounted(lab, job, 90)[0] == "CANCELLED"
    assert _vms(node)
    ensure_agent(node.lab)
    node.nothing_left()
    job = _running(node, "forgotten")
    asyncio.run(AGENT.stop(lab.where))
    for path in (lab.where.agent / "jobs" / f"{job}.json", lab.where.run / "jobs" / f"{job}.groups"):
        path.unlink()
    ensure_agent(node.lab)
    until("the platform has no VM", lambda: not _vms(node), 60)
    lab.run("scancel", job)
    accounted(lab, job, 90)


@pytest.mark.slow
def test_a_task_fails_when_its_vm_has_ended(node: BareNode) -> None:
    """Half a minute later: no packet and no descriptor tells of it."""
    job = _running(node, "ended")
    (home,) = _vms(node)
    known = manifest.read(home)
    assert known is not None
    kill(known.pid)
    assert accounted(node.under_test, job, 120)[0] == "FAILED"
    assert "closed the connection" in node.output("ended").read_text()
