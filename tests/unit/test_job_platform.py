"""VMs inside jobs over a hypervisor that knows no jobs, and is only asked through its port."""

from __future__ import annotations

import asyncio
import pathlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from multiverse.agent.jobs import JobVm
from multiverse.config import JobVmSettings, NetworkSettings, Settings, parse
from multiverse.core.errors import Broken, Gone, MultiverseError, Refused, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.identity import Identity, User, is_site
from multiverse.core.model.vm import Stage, TemplateKey, VmCondition, VmRef, VmSeen, VmSpec
from multiverse.service.job_vms import PlatformJobVms, site_of_node
from multiverse.system.kernel import SharedMemory

NONE = SharedMemory((), 0)
ADA = User("ada", 1000, 1000, "/home/ada", "/bin/sh")
SITE = site_of_node("n1")
SETTINGS = Settings(
    network=NetworkSettings(subnet="10.213.0.0/16", gateway="10.213.0.1", hosts=(("files", "10.213.0.1"),)),
    job_vms=JobVmSettings(platform="agent", platform_host="vmhost", platform_subnet="10.213.8.0/25"),
)
ABLE = frozenset({"fork", "plug_cpus", "plug_memory"})


@dataclass
class Platform:
    """Remembers what it was asked for: `ports.Hypervisor` with itself as the only source."""

    host: Host = Host("vmhost", Size(8, 8192), frozenset({"instant", "linked"}), images={"slim": ABLE})
    templates: set[TemplateKey] = field(default_factory=set)
    vms: dict[str, VmSeen] = field(default_factory=dict)
    created: list[VmSpec] = field(default_factory=list)
    started: list[tuple[Size, Identity]] = field(default_factory=list)
    destroyed: list[tuple[VmRef, float]] = field(default_factory=list)
    failure: MultiverseError | None = None

    @property
    def sources(self) -> Sequence[Platform]:
        return (self,)

    async def observe(self) -> HypervisorView:
        return HypervisorView({"vmhost": self.host}, dict(self.vms), {})

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        if vm.template is not None and vm.template not in self.templates:
            raise Gone("there is no such template")
        self.created.append(vm)
        self.vms[vm.name] = VmSeen(vm.name, vm.host, VmCondition.PARKED, token=vm.token)
        return []

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> Sequence[Stage]:
        if self.failure is not None:
            raise self.failure
        self.started.append((size, identity))
        self.vms[vm.name] = replace(self.vms[vm.name], condition=VmCondition.RUNNING)
        return []

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        self.templates.add(template)
        return []

    async def destroy(self, vm: VmRef, grace: float) -> None:
        self.destroyed.append((vm, grace))
        self.vms.pop(vm.name, None)


def vm_of(number: int = 0, index: int = 0, vms: int = 1, nodes: tuple[str, ...] = ("n1",)) -> JobVm:
    return JobVm(
        12, 3 + index, 0, 1000, number, "slim", 2, 1000, 0, f"token{index}", "secret", ("/groups",), index, vms, nodes
    )


@pytest.fixture
def platform() -> Platform:
    return Platform()


def over(platform: Platform, settings: Settings = SETTINGS) -> PlatformJobVms:
    return PlatformJobVms(settings, SITE, platform, asyncio.get_running_loop())  # type: ignore[arg-type]


async def test_a_vm_is_made_from_a_template_that_is_built_and_its_guest_is_told_of_the_job(platform: Platform) -> None:
    host, (first, second) = over(platform), (vm_of(index=index, vms=2) for index in (0, 1))
    await asyncio.to_thread(host.make, second, (first, second), ADA, NONE)
    assert host.control_groups(second) == []
    (spec,) = platform.created
    assert (spec.kind, spec.template, spec.token) == (
        CloneKind.INSTANT, TemplateKey("vmhost", "slim", Size(1, 288)), "token1"
    )  # fmt: skip
    assert spec.address == "10.213.8.1/16" and spec.name.startswith(f"mv{SITE}-")
    ((size, identity),) = platform.started
    assert size == Size(2, 928), "whole blocks of memory, and not more than the job has"
    assert (identity.hostname, identity.mac, identity.gateway) == (spec.name, spec.mac, "10.213.0.1")
    assert identity.users == (ADA,) and identity.tasks is not None
    assert (identity.tasks.hostname, identity.tasks.token) == ("mvjob-12-1", "secret")
    assert identity.tasks.vms == (("mvjob-12-0", "10.213.8.0"), ("mvjob-12-1", "10.213.8.1"))
    assert (identity.tasks.hosts, identity.tasks.nodes) == ((("files", "10.213.0.1"),), ("n1",))
    (peer,) = [peer for peer in identity.peers if peer[0].startswith("mv")]
    assert peer[1] == "10.213.8.0", "the platform's firewall lets it reach the job's other VM"
    assert host.known_as(second) == ("mvjob-12-1", "10.213.8.1")


async def test_an_image_that_cannot_be_forked_boots(platform: Platform) -> None:
    platform.host = replace(platform.host, images={"slim": frozenset()})
    host, vm = over(platform), vm_of()
    await asyncio.to_thread(host.make, vm, (vm,), ADA, NONE)
    assert platform.created[0].kind is CloneKind.LINKED and platform.created[0].template is None


async def test_a_vm_lives_until_the_platform_shows_another_or_none(platform: Platform) -> None:
    host, vm = over(platform), vm_of()
    assert not await asyncio.to_thread(host.is_alive, vm)
    await asyncio.to_thread(host.make, vm, (vm,), ADA, NONE)
    assert await asyncio.to_thread(host.is_alive, vm)
    assert not await asyncio.to_thread(host.is_alive, replace(vm, token="another"))
    await asyncio.to_thread(host.remove, vm)
    assert not await asyncio.to_thread(host.is_alive, vm)
    ((ref, grace),) = platform.destroyed
    assert (ref.source, ref.token, grace) == ("vmhost", "token0", SETTINGS.pacing.reclaim_grace)


async def test_an_error_of_the_platform_reaches_the_job(platform: Platform) -> None:
    platform.failure = Broken("its guest did not answer")
    vm = vm_of()
    with pytest.raises(Broken, match="did not answer"):
        await asyncio.to_thread(over(platform).make, vm, (vm,), ADA, NONE)


async def test_jobs_have_addresses_of_their_own_as_long_as_there_are_some(platform: Platform) -> None:
    host = over(platform)
    assert [host.known_as(vm_of(number))[1] for number in (0, 1)] == ["10.213.8.0", "10.213.8.64"]
    with pytest.raises(Refused, match="platform_subnet"):
        host.connect_network((vm_of(2),))


async def test_a_job_of_several_nodes_is_refused(platform: Platform) -> None:
    with pytest.raises(Refused, match="--nodes=1"):
        over(platform).connect_network((vm_of(nodes=("n1", "n2")),))


@pytest.mark.parametrize("asked", [{"functions": 1}, {"regions": ("id",)}])
async def test_a_job_that_wants_devices_of_its_node_is_refused(platform: Platform, asked: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="without --sriov and --ivshmem"):
        over(platform).connect_network((replace(vm_of(), **asked),))


async def test_vms_that_no_job_explains_are_removed_and_those_of_others_are_not(platform: Platform) -> None:
    host, vm = over(platform), vm_of()
    await asyncio.to_thread(host.make, vm, (vm,), ADA, NONE)
    for name in (f"mv{SITE}-zzz", "mvother-1"):
        platform.vms[name] = VmSeen(name, "vmhost", VmCondition.RUNNING, token="t")
    # Of a node whose name has the same digest.
    platform.vms[f"mv{SITE}-1"] = VmSeen(f"mv{SITE}-1", "vmhost", VmCondition.RUNNING, token="t", address="10.9.9.9")
    await host.remove_unknown(lambda: [(vm,)])
    assert [ref.name for ref, _ in platform.destroyed] == [f"mv{SITE}-zzz"]


async def test_a_connection_that_stays_without_an_answer_breaks(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as guest:
        monkeypatch.setattr("multiverse.service.job_vms.TASKS_PORT", guest.getsockname()[1])
        jobs = replace(SETTINGS.job_vms, platform_subnet="127.0.0.0/25")
        host = over(platform, replace(SETTINGS, job_vms=jobs))
        connection, process = host.connect(replace(vm_of(), index=1))
        with connection, pathlib.os.fdopen(process, "rb", buffering=0):
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 0
    with pytest.raises(Unknown, match="does not answer"):
        host.connect(replace(vm_of(), index=1))


def test_each_node_is_a_site_of_its_own() -> None:
    sites = {site_of_node(f"n{number}") for number in range(500)}
    assert len(sites) == 500 and all(is_site(site) for site in sites)


@pytest.mark.parametrize("subnet", ["10.213.8.0/27", "10.214.0.0/24", "10.213.0.0/24", "x", ""])
def test_addresses_of_a_platform_are_a_part_of_its_network(subnet: str) -> None:
    jobs = {"platform": "agent", "platform_host": "vmhost", "platform_subnet": subnet}
    with pytest.raises(Refused, match="platform_subnet"):
        parse({"job_vms": jobs}, "test")
    assert parse({"job_vms": jobs | {"platform_subnet": "10.213.8.0/26"}}, "test").job_vms.platform == "agent"
    with pytest.raises(Refused, match="platform_host"):
        parse({"job_vms": jobs | {"platform_host": "", "platform_subnet": "10.213.8.0/26"}}, "test")
