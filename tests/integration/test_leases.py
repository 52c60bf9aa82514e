"""Hosts that are leased from the lab's Slurm: pilots on real bare-metal nodes, and what ends them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from multiverse.bundles.qemu.platform import PilotTransport
from multiverse.client import Client
from multiverse.config import LEASE_RESERVE, JobVmSettings, LeaseSettings, Settings
from multiverse.core.errors import MultiverseError, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import HypervisorView
from multiverse.core.model.identity import lease_name
from multiverse.core.model.job import LeasedHost, LeaseSpec, PilotSeen, PilotState
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.drivers.slurm.leases import PilotSteps
from multiverse.host import manifest
from multiverse.system.processes import ProcessIdentity, stat_fields
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.hosts import control_groups
from multiverse_lab.lab.layout import Layout
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.services import AGENT, CONTROLLER, SERVICES
from tests.contract.test_hypervisor_contract import Check
from tests.contract.test_lease_contract import LEASES, LeaseCheck, Lender
from tests.integration.conftest import LabUnderTest, new_lab
from tests.integration.images import slim
from tests.integration.job_nodes import job_nodes
from tests.integration.test_agent import Behind, Controller, connected
from tests.integration.test_contract_qemu import CHECKS, LONG, Real
from tests.integration.watch import accounted, ended, kill, matching, output_of, until

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")]

NODE = "mvp1"
SITE = Real.site


@pytest.fixture(scope="module")
def physical(accelerator: Path) -> Iterator[LabUnderTest]:
    """A lab with a bare-metal node of four cores, and without a controller."""
    slim()
    with new_lab(accelerator, LabOptions(cores=4, memory=6144, physical=1), controller=False) as made:
        yield made


@dataclass
class Pilots:
    """Leases of a lab without a controller."""

    lab: LabUnderTest
    settings: Settings
    scheduler: SlurmScheduler
    partition: str = "physical"

    @classmethod
    def of(cls, lab: LabUnderTest, partition: str = "physical", **lease: Any) -> Pilots:
        settings = replace(lab.settings, lease=(LeaseSettings(partition, **lease),))
        return cls(lab, settings, SlurmScheduler(settings, SITE), partition)

    @property
    def own(self) -> Layout:
        """What the node has, as this machine sees it."""
        return self.lab.where.host(NODE)

    def spec(self, **more: Any) -> LeaseSpec:
        name, token = f"lease-{SITE}-{secrets.token_hex(3)}", secrets.token_hex(8)
        return replace(LeaseSpec(name, token, self.partition, time_limit=600.0), **more)

    async def request(self, spec: LeaseSpec) -> None:
        assert self.scheduler.leases is not None
        await self.scheduler.leases.request(spec)

    async def seen(self, spec: LeaseSpec, reached: Callable[[PilotSeen], bool]) -> tuple[str, PilotSeen]:
        """The pilot of a lease, once it is seen as wanted."""
        deadline, found = time.monotonic() + 60, {}
        while time.monotonic() < deadline:
            pilots = (await self.scheduler.observe()).pilots
            found = {job: pilot for job, pilot in pilots.items() if pilot.name == spec.name}
            for job, pilot in found.items():
                if reached(pilot):
                    assert pilot.token == spec.token
                    return job, pilot
            await asyncio.sleep(0.2)
        raise AssertionError(f"{spec.name} is {found}; {self.said(spec)}")

    async def held(self, spec: LeaseSpec) -> LeasedHost:
        """The host of a lease whose pilot runs."""
        job, pilot = await self.seen(spec, lambda pilot: pilot.state is PilotState.RUNNING)
        assert pilot.node == NODE and time.time() < pilot.ends <= time.time() + spec.time_limit + 60
        return LeasedHost(spec, job, pilot.node, pilot.ends)

    async def ended(self, spec: LeaseSpec) -> PilotSeen:
        """The pilot of a lease once it has ended; nothing of it is left on the node then."""
        _, pilot = await self.seen(spec, lambda pilot: pilot.state is PilotState.ENDED)
        assert pilot.clean
        assert self.remains(spec) == []
        return pilot

    def said(self, spec: LeaseSpec) -> str:
        with contextlib.suppress(OSError):
            return (self.own.leases / ".logs" / f"{spec.name}.log").read_text()[-2000:]
        return "it has said nothing"

    def remains(self, spec: LeaseSpec) -> list[str]:
        """What is on the node that belongs to a lease: files, control groups, interfaces, processes."""
        groups = [one for one in control_groups.existing(spec.name) if self.lab.where.control_group in one.parts]
        found = [*self.own.leases.glob(spec.name), *groups]
        for pid in self.processes(spec):
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}"))
        return [str(path) for path in found]

    def processes(self, spec: LeaseSpec) -> list[int]:
        """The pilot's processes, from the outermost inwards, as this machine sees them."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = entry.read_bytes().split(b"\0")
                if (
                    b"pilot" in words
                    and spec.name.encode() in words
                    and b"srun" not in Path(words[0].decode()).name.encode()
                ):
                    found.append(int(entry.parent.name))
        return sorted(found)

    def init(self, spec: LeaseSpec) -> int:
        """The first process of a lease, as this machine sees it."""
        (found,) = (pid for pid in self.processes(spec) if _numbers(pid)[-1] == "1")
        return found

    def agent(self, spec: LeaseSpec) -> int:
        init = self.init(spec)
        (found,) = (pid for pid in self.processes(spec) if (stat_fields(pid) or "00")[1] == str(init))
        return found

    def qemus(self, name: str) -> list[int]:
        """The QEMUs of a VM."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = entry.read_bytes().split(b"\0")
                if b"qemu" in words[0] and any(name.encode() in word for word in words):
                    found.append(int(entry.parent.name))
        return found

    @contextlib.asynccontextmanager
    async def reached(self, host: LeasedHost) -> AsyncIterator[Controller]:
        """A controller that is connected with the agent of a leased host."""
        async with connected(PilotTransport(PilotSteps(self.settings), host), SITE, host.lease.name) as controller:
            yield controller


def _numbers(pid: int) -> list[str]:
    """The pids of a process in its own PID namespace and in those above, the own last."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("NSpid:")).split()[1:]


async def observed(controller: Controller) -> HypervisorView:
    deadline = time.monotonic() + 60
    while True:
        try:
            return await controller.hypervisor.sources[0].observe()
        except Unknown:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)


class RealLender(Lender):
    """The lab's Slurm. Each check has leases of numbers of its own."""

    site = SITE

    def __init__(self, pilots: Pilots, number: int) -> None:
        self.scheduler, self.base = pilots.scheduler, 1000 * (number + 1)


@pytest.mark.slow
@pytest.mark.parametrize("check", LEASES, ids=lambda check: check.__name__)
async def test_slurm_keeps_the_contract_of_leases(physical: LabUnderTest, check: LeaseCheck) -> None:
    harness = RealLender(Pilots.of(physical), LEASES.index(check))
    try:
        await check(harness)
    finally:
        await harness.clean_up()
    until("the node is free", lambda: not physical.run("squeue", "-h", "-p", "physical").stdout)


async def test_a_pilot_makes_a_node_a_host_until_it_is_released(physical: LabUnderTest) -> None:
    pilots = Pilots.of(physical)
    spec = pilots.spec()
    before = await pilots.scheduler.observe()
    assert before.leasable == {"physical": Size(4, 6144 - LEASE_RESERVE)} and not before.pilots
    for _ in range(2):  # the first reply may have been lost
        await pilots.request(spec)
    host = await pilots.held(spec)
    async with pilots.reached(host) as controller:
        view = await observed(controller)
        (own,) = view.hosts.values()
        assert (own.name, own.capacity.cpus, own.capacity.memory) == (spec.name, 4, 6144 - LEASE_RESERVE)
    assert len((await pilots.scheduler.observe()).pilots) == 1
    assert pilots.scheduler.leases is not None
    await pilots.scheduler.leases.release("lease-of-others", [host.pilot])
    assert (await pilots.held(spec)).pilot == host.pilot, "a pilot of another name is left alone"
    await pilots.scheduler.leases.release(spec.name, [])
    await pilots.ended(spec)
    await pilots.scheduler.leases.release(spec.name, [host.pilot])


# --- with VMs ------------------------------------------------------------------------------------------


class OnLease(Behind):
    """The real driver in the agent of a lease, with the lease's files as this machine sees them."""

    def __init__(self, pilots: Pilots, host: LeasedHost, controller: Controller) -> None:
        self._init = pilots.init(host.lease)
        root, qemu = Path(f"/proc/{self._init}/root"), pilots.settings.qemu
        outside = replace(qemu, vms=root / qemu.vms.relative_to("/"), run=root / qemu.run.relative_to("/"))
        super().__init__(replace(pilots.settings, qemu=outside), controller)
        self.host, self._inside = host.lease.name, qemu

    async def kill(self, name: str) -> None:
        known = manifest.read(self.settings.qemu.vms / name)
        assert known is not None
        # Who is to reap it may do so only when it looks for it.
        script = f"kill -9 {known.pid}; while grep -qs '^State:.[^ZX]' /proc/{known.pid}/status; do sleep 0.01; done"
        subprocess.run(["nsenter", f"--target={self._init}", "--pid", "--mount", "sh", "-c", script], check=True)

    def remains(self, name: str) -> list[str]:
        tap = Path(f"/proc/{self._init}/root/sys/class/net/{name}")
        inner = Behind(replace(self.settings, qemu=self._inside), self.controller)
        return [*super().remains(name), *([str(tap)] if tap.exists() else []), *Real.remains(inner, name)]


@contextlib.asynccontextmanager
async def with_a_vm(pilots: Pilots, spec: LeaseSpec) -> AsyncIterator[tuple[OnLease, LeasedHost, int]]:
    """A lease with a VM; gives the pid of its QEMU, as this machine sees it, too."""
    await pilots.request(spec)
    try:
        host = await pilots.held(spec)
        async with pilots.reached(host) as controller:
            await observed(controller)
            real = OnLease(pilots, host, controller)
            vm = real.spec(CloneKind.FULL)
            await real.hypervisor.create(vm)
            (qemu,) = await asyncio.to_thread(pilots.qemus, vm.name)
            yield real, host, qemu
    finally:
        pilots.lab.run("scancel", f"--name={spec.name}")


@pytest.mark.slow
async def test_a_job_with_a_vm_inside_it_is_on_the_node_of_a_lease(physical: LabUnderTest) -> None:
    """The node's own agent serves the plugin. Nothing that it has is the lease's, and the lease ends nothing of it."""
    pilots = Pilots.of(physical, cpus=2, memory=3000)
    spec = pilots.spec(size=Size(2, 3000))
    jobs, feature = pilots.own.controller / "vms", JobVmSettings().feature
    features = ("sinfo", "-h", "-n", NODE, "-o", "%f")
    until("the agent has tested the plugin", lambda: feature in physical.run(*features).stdout, 60)
    async with with_a_vm(pilots, spec) as (real, _, qemu):
        out, go = physical.user.home / "beside", physical.user.home / "go"
        script = f"hostname; until [ -e {go} ]; do sleep 0.2; done; echo over"
        job = physical.sbatch(script, "-p", "physical", "--mem=700", "--vm-image=slim", f"--output={out}")
        begun = partial(until, "the job's VM runs", lambda: out.exists() and output_of(out).startswith("mvjob-"), 240)
        await asyncio.to_thread(begun)  # beside the loop: an agent's connection that is not served for 20 s is lost
        (its_vm,) = jobs.glob("mvjob-*")
        (inside,) = pilots.qemus(its_vm.name)
        users = [Path(f"/proc/{pid}").stat().st_uid for pid in (qemu, inside)]
        assert users[0] != users[1] and 0 not in users
        assert list((await real.observe()).vms)
        physical.run("scancel", f"--name={spec.name}")
        await pilots.ended(spec)
        assert alive(inside) and not alive(qemu)
        go.touch()
        until("the job has ended", lambda: output_of(out).split()[1:] == ["over"])
        until("nothing is left of its VM", lambda: not [*jobs.glob("mvjob-*")] and not alive(inside))
        assert accounted(physical, job, 90) == ("COMPLETED", "0:0")


@contextlib.asynccontextmanager
async def with_settings(lab: LabUnderTest, text: str) -> AsyncIterator[None]:
    """The lab's Slurm with more in its slurm.conf."""
    site = lab.where.etc / "site.conf"
    before = site.read_text()
    site.write_text(f"{before}\n{text}\n")
    try:
        await lifecycle.up(lab.where, LabOptions(), controller=False)
        yield
    finally:
        site.write_text(before)
        await lifecycle.up(lab.where, LabOptions(), controller=False)


@pytest.fixture
async def lendable(physical: LabUnderTest) -> AsyncIterator[LabUnderTest]:
    """With a partition whose jobs give way to those of another one."""
    text = (
        "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
        f"PartitionName=lendable Nodes={NODE} PriorityTier=1 PreemptMode=CANCEL GraceTime=40 State=UP\n"
        f"PartitionName=urgent Nodes={NODE} PriorityTier=9 PreemptMode=OFF State=UP"
    )
    async with with_settings(physical, text):
        yield physical


def alive(pid: int) -> bool:
    return ProcessIdentity.of(pid).is_alive()


@pytest.mark.slow
async def test_the_end_of_an_agent_ends_no_vm_and_the_end_of_its_pilot_ends_all(physical: LabUnderTest) -> None:
    pilots = Pilots.of(physical)
    spec = pilots.spec()
    async with with_a_vm(pilots, spec) as (real, _, qemu):
        group = Path(f"/proc/{qemu}/cgroup").read_text()
        assert f"/{spec.name}/multiverse/" in group and "/job_" in group, "a control group of its own, in the job's"
        kill(pilots.agent(spec))
        deadline = time.monotonic() + 60
        while True:  # until the pilot has started another one, which finds the VM
            with contextlib.suppress(Unknown):
                if list((await real.observe()).vms):
                    break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
        assert alive(qemu)
        os.kill(pilots.init(spec), signal.SIGKILL)
        await pilots.ended(spec)
        assert not alive(qemu)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancelled", "killed", "preempted"])
async def test_nothing_is_left_of_a_lease_that_slurm_ends(lendable: LabUnderTest, how: str) -> None:
    physical, pilots = lendable, Pilots.of(lendable, "lendable")
    spec = pilots.spec()
    async with with_a_vm(pilots, spec) as (_, host, qemu):
        match how:
            case "cancelled":
                physical.run("scancel", host.pilot)
            case "killed":
                physical.run("scancel", "--signal=KILL", host.pilot)
            case "preempted":
                job = physical.sbatch("true", "-p", "urgent", "--exclusive")
                # GraceTime: Slurm shows the pilot as running, and the pilot's own word tells that it ends.
                await pilots.seen(spec, lambda pilot: pilot.state is not PilotState.RUNNING)
                until("the urgent job is over", lambda: job not in physical.run("squeue", "-h", "-o", "%A").stdout)
        pilot = await pilots.ended(spec)
        assert not alive(qemu)
        assert how != "preempted" or pilot.reason in ("preempted", "completed", "failed", "cancelled"), pilot


@pytest.mark.slow
async def test_an_outage_of_slurmctld_ends_nothing(physical: LabUnderTest) -> None:
    pilots = Pilots.of(physical)
    spec = pilots.spec()
    slurmctld = next(service for service in SERVICES if service.name == "slurmctld")
    async with with_a_vm(pilots, spec) as (real, host, qemu):
        await slurmctld.stop(physical.where)
        with pytest.raises(Unknown):
            await pilots.scheduler.observe()
        assert list((await real.observe()).vms), "a step that runs needs no slurmctld"
        await lifecycle.up(physical.where, LabOptions(), controller=False)
        assert (await pilots.held(spec)).pilot == host.pilot and alive(qemu)
        async with pilots.reached(host) as controller:  # by a new step
            assert list((await observed(controller)).vms)
    await pilots.ended(spec)


@pytest.mark.slow
async def test_a_pilot_of_an_account_becomes_root_where_slurm_runs_no_job_of_root(physical: LabUnderTest) -> None:
    become = physical.where.root.parent / "become"  # as sudo would be, on a machine without it
    shutil.copy(str(shutil.which("setpriv")), become)
    become.chmod(0o4755)
    async with with_settings(physical, "DisableRootJobs=YES"):
        words = (str(become), "--reuid=0", "--regid=0", "--clear-groups", "--")
        pilots = Pilots.of(physical, user=physical.user.name, become=words)
        with pytest.raises(MultiverseError):
            await Pilots.of(physical).request(pilots.spec())
        spec = pilots.spec(user=physical.user.name)
        async with with_a_vm(pilots, spec) as (_, host, qemu):
            assert f"job_{host.pilot}/" in Path(f"/proc/{qemu}/cgroup").read_text()
            assert physical.run("squeue", "-h", "-j", host.pilot, "-o", "%u").stdout.strip() == physical.user.name
            physical.run("scancel", host.pilot)
            await pilots.ended(spec)
            assert not alive(qemu)


# --- with the controller -------------------------------------------------------------------------------


def test_a_lease_is_taken_for_a_job_that_waits_and_given_back(physical: LabUnderTest) -> None:
    """The lab's own host is drained, so only a lease can have the job's VM."""
    (physical.where.etc / "site.toml").write_text(
        '[[lease]]\npartition = "physical"\nmin_wait = 1\nidle = 5\ntime_limit = 1200\nmax = 1\n'
    )
    asyncio.run(lifecycle.up(physical.where, LabOptions()))
    with Client(physical.settings.socket) as client:
        host = physical.settings.host.name
        until("the lab's host is observed", lambda: any(one["reachable"] for one in client.hosts()))
        client.change_hosts("drain", host)
        output = physical.user.home / "leased"
        job = physical.sbatch("hostname; id -un", "--time=5", f"--output={output}")
        until("a host is leased", lambda: any(one["name"].startswith("lease-") for one in client.hosts()))
        ended(client, job, "done")
        until("the job's output is there", lambda: output.exists() and output_of(output))
        name, user = output_of(output).split()
        assert name.startswith("mv") and user == physical.user.name
        own = physical.where.host(NODE)
        until("the lease is given back", lambda: not physical.run("squeue", "-h", "-p", "physical").stdout)
        until("nothing is left on the node", lambda: not [*own.leases.glob("lease-*")])
        assert not matching(Path("/sys/fs/cgroup"), f"*/{physical.where.control_group}/**/lease-*")
        until("the host is gone", lambda: [one["name"] for one in client.hosts()] == [host])
        client.change_hosts("resume", host)
    asyncio.run(CONTROLLER.stop(physical.where))
    asyncio.run(AGENT.stop(physical.where))


_RUNS = 'echo "$(hostname) ${{SLURM_RESTART_COUNT:-0}}" >> {0}; until [ -e {0}.ends ]; do sleep 0.2; done'
"""A job that writes a line for each run of it, and runs until the test ends it."""


@pytest.fixture
async def lending(lendable: LabUnderTest) -> AsyncIterator[Client]:
    """A controller that takes leases from the partition whose jobs give way."""
    (lendable.where.etc / "site.toml").write_text(
        '[[lease]]\npartition = "lendable"\nmin_wait = 1\nidle = 60\ntime_limit = 1200\nmax = 1\n'
    )
    await lifecycle.up(lendable.where, LabOptions())
    with Client(lendable.settings.socket) as client:
        yield client
    lendable.run("scancel", "--partition=vm", check=False)
    await CONTROLLER.stop(lendable.where)
    await AGENT.stop(lendable.where)


@dataclass
class OnALease:
    """A job that runs on a lease, because the lab's own host was drained as it was submitted. That host takes jobs
    again, so a second run is there. `qemu` is the pid of the VM's QEMU, as this machine sees it."""

    pilots: Pilots
    client: Client
    job: str
    file: Path
    lease: dict[str, Any]
    vm: dict[str, Any]
    qemu: int

    @classmethod
    def begun(cls, lab: LabUnderTest, client: Client, name: str) -> OnALease:
        own = lab.settings.host.name
        until("the lab's host is observed", lambda: any(one["reachable"] for one in client.hosts()))
        client.change_hosts("drain", own)
        file = lab.user.home / name.replace(" ", "-")
        job = lab.sbatch(_RUNS.format(file), "--time=15", f"--output={file}.out")
        until("the job runs on a lease", lambda: file.exists() and file.read_text(), 240)
        (lease,) = [one for one in client.leases() if one["state"] == "held"]
        (vm,) = [one for one in client.vms() if one["job_id"] == job]
        pilots = Pilots.of(lab, lease["partition"])
        (qemu,) = pilots.qemus(vm["name"])
        made = cls(pilots, client, job, file, lease, vm, qemu)
        assert vm["host"] == lease["name"] and made.runs() == [[vm["name"], "0"]]
        client.change_hosts("resume", own)
        return made

    @property
    def spec(self) -> LeaseSpec:
        return LeaseSpec(self.lease["name"], "", self.pilots.partition)

    def runs(self) -> list[list[str]]:
        """The node and the number of each run."""
        return [line.split() for line in self.file.read_text().splitlines()]

    def runs_again(self) -> None:
        """The job runs a second time, on the lab's own host, and ends."""
        until("the job runs again", lambda: len(self.runs()) > 1, 240)
        (again,) = [one for one in self.client.vms() if one["job_id"] == self.job]
        assert again["host"] == self.pilots.lab.settings.host.name
        assert self.runs() == [[self.vm["name"], "0"], [again["name"], "1"]]
        Path(f"{self.file}.ends").touch()
        ended(self.client, self.job, "done")
        assert len(self.runs()) == 2

    def leases(self) -> dict[str, str]:
        """The states of leases that are not over."""
        return {one["name"]: one["state"] for one in self.client.leases()}


def slurmctld_is_known(client: Client) -> bool:
    return all(one["known"] for one in client.status()["sources"] if one["name"] == "scheduler")


@contextlib.asynccontextmanager
async def slurmctld_away(lab: LabUnderTest, client: Client) -> AsyncIterator[None]:
    """slurmctld does not run, and the controller knows that."""
    slurmctld = next(service for service in SERVICES if service.name == "slurmctld")
    await slurmctld.stop(lab.where)
    try:
        until("the controller knows nothing of Slurm", lambda: not slurmctld_is_known(client))
        yield
    finally:
        await lifecycle.up(lab.where, LabOptions(), controller=False)
    until("the controller knows of Slurm", lambda: slurmctld_is_known(client))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancelled", "preempted", "out of time", "requeued", "killed while slurmctld is away"])
async def test_a_job_is_queued_again_when_its_lease_ends(lendable: LabUnderTest, lending: Client, how: str) -> None:
    physical, one = lendable, OnALease.begun(lendable, lending, how)
    pilot = one.lease["pilot"]
    match how:
        case "cancelled":
            physical.run("scancel", pilot)
        case "preempted":
            physical.sbatch("true", "-p", "urgent", "--exclusive")
        case "out of time":  # an operator shortens it: no job is placed where it could last longer than the lease
            physical.run("scontrol", "update", f"JobId={pilot}", "TimeLimit=1")
        case "requeued":  # Slurm alone never queues it again
            physical.run("scontrol", "update", f"JobId={pilot}", "Requeue=1")
            physical.run("scontrol", "requeue", pilot)
        case _:
            async with slurmctld_away(physical, lending):
                assert one.leases() == {one.lease["name"]: "held"} and alive(one.qemu)
                os.kill(one.pilots.init(one.spec), signal.SIGKILL)
                until("its VM has ended", lambda: not alive(one.qemu))
    held = ("squeue", "-h", "-t", "running,completing", "-j", pilot)
    until("Slurm reports the node as free", lambda: not physical.run(*held).stdout)
    assert not alive(one.qemu)
    assert one.pilots.remains(one.spec) == []

    one.runs_again()
    first, second = lending.timeline(one.job)
    assert (first["state"], second["state"]) == ("requeued", "done")
    if how in ("cancelled", "preempted", "out of time"):
        why = f"the scheduler requeued the job: host {one.lease['name']}: its pilot {pilot} is ending: "
        assert any(entry["reason"].startswith(why) for entry in first["entries"]), first
    until("the lease is over", lambda: not lending.leases())


@pytest.mark.slow
async def test_a_job_on_a_lease_goes_on_while_slurmctld_is_away(lendable: LabUnderTest, lending: Client) -> None:
    one = OnALease.begun(lendable, lending, "goes on")
    async with slurmctld_away(lendable, lending):
        assert one.leases() == {one.lease["name"]: "held"} and alive(one.qemu)
    assert one.leases() == {one.lease["name"]: "held"} and alive(one.qemu)
    Path(f"{one.file}.ends").touch()
    ended(lending, one.job, "done")
    assert one.runs() == [[one.vm["name"], "0"]]
    lending.change_hosts("drain", one.lease["name"])
    until("the lease is given back", lambda: not lending.leases())


@pytest.mark.slow
def test_a_job_whose_pilot_is_lost_runs_again_only_when_somebody_confirms_that_nothing_is_left(
    lendable: LabUnderTest, lending: Client
) -> None:
    """The physical node does not answer and is set DOWN: that ends the pilot in Slurm, and no VM."""
    one = OnALease.begun(lendable, lending, "lost")
    name, (node,) = one.lease["name"], job_nodes(lendable)
    daemons = node.processes("slurmd", here=True)
    for pid in (*daemons, one.pilots.agent(one.spec)):  # an agent that goes on says that the VM died, and the job runs
        os.kill(pid, signal.SIGSTOP)
    try:
        lendable.run("scontrol", "update", f"NodeName={NODE}", "State=DOWN", "Reason=test")
        until("the lease is lost", lambda: one.leases() == {name: "lost"})
        shown = ("squeue", "-h", "-a", "-j", one.job, "-o", "%T")
        assert alive(one.qemu) and lendable.run(*shown).stdout.strip() == "RUNNING", "its VM's node answers"
        (host,) = [each for each in lending.hosts() if each["name"] == name]
        assert f"multiverse repair {name} --fenced" in host["todo"] and NODE in host["todo"]
    finally:
        for pid in daemons:  # slurmd learns that the job is over
            os.kill(pid, signal.SIGCONT)
    until("the node has ended it all", lambda: not alive(one.qemu) and not one.pilots.remains(one.spec))
    until("Slurm has queued the job again", lambda: lendable.run(*shown).stdout.strip() == "PENDING", 180)
    until("it waits for its earlier run", lambda: name in lending.explain(one.job)["jobs"][0]["text"])
    assert len(one.runs()) == 1 and one.leases() == {name: "lost"}
    lending.repair(name, fenced=True)
    one.runs_again()
    until("the lease is over", lambda: not lending.leases())


@pytest.mark.slow
async def test_a_pilot_that_is_granted_after_its_lease_was_given_up_ends(
    lendable: LabUnderTest, lending: Client
) -> None:
    """No lease of the controller explains it. A job that runs is left alone."""
    own = lendable.settings.host.name
    until("the lab's host is observed", lambda: any(each["reachable"] for each in lending.hosts()))
    file = lendable.user.home / "left-alone"
    job = lendable.sbatch(_RUNS.format(file), "--time=5", f"--output={file}.out")
    until("a job runs", lambda: file.exists() and file.read_text(), 240)
    pilots = Pilots.of(lendable, "lendable")
    spec = pilots.spec(name=lease_name(lending.status()["site"], 1 << 20))
    await pilots.request(spec)
    shown = ("squeue", "-h", "-a", "-t", "all", f"--name={spec.name}", "-o", "%T")
    until("it is cancelled", lambda: lendable.run(*shown).stdout.strip() == "CANCELLED")
    until("nothing is left on the node", lambda: not pilots.remains(spec))
    assert not lending.leases() and [each["name"] for each in lending.hosts()] == [own]
    Path(f"{file}.ends").touch()
    ended(lending, job, "done")
    assert len(file.read_text().splitlines()) == 1


# --- the contract: last, because its lease keeps the only node ----------------------------------------


@pytest.fixture(scope="module")
def lease(physical: LabUnderTest) -> Iterator[tuple[Pilots, LeaseSpec]]:
    """A lease for the contract, of which each test gets a connection of its own."""
    pilots = Pilots.of(physical)
    spec = pilots.spec(time_limit=3000.0)
    asyncio.run(pilots.request(spec))
    yield pilots, spec
    physical.run("scancel", f"--name={spec.name}")
    asyncio.run(pilots.ended(spec))


@pytest.fixture
async def harness(lease: tuple[Pilots, LeaseSpec]) -> AsyncIterator[OnLease]:
    pilots, spec = lease
    host = await pilots.held(spec)
    async with pilots.reached(host) as controller:
        yield OnLease(pilots, host, controller)
    async with pilots.reached(host) as controller:  # a test may have superseded the first
        real = OnLease(pilots, host, controller)
        for name in (await real.observe()).vms:
            await real.hypervisor.destroy(real.ref(name), 0)
            assert not real.remains(name)


@pytest.mark.slow
@pytest.mark.parametrize("check", [c for c in CHECKS if c.__name__ not in LONG], ids=lambda check: check.__name__)
async def test_qemu_behind_the_agent_of_a_lease(check: Check, harness: OnLease) -> None:
    await check(harness)
