"""Bundles are found by the settings, and several platforms of a site are one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from multiverse.bundles.composite import CompositePlatform, together
from multiverse.bundles.contract import DaemonTask, Followed, platform_bundles, scheduler_bundle
from multiverse.bundles.qemu.platform import QEMU
from multiverse.bundles.slurm.scheduler import SLURM, SlurmWords
from multiverse.config import Settings
from multiverse.core.errors import Gone, Refused
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.identity import User
from multiverse.core.model.usage import HostUsage
from multiverse.core.model.vm import TemplateKey, VmRef, VmSpec

USER = User("u", 1000, 1000, "/home/u", "/bin/sh", ())
SIZE = Size(1, 256)


class FakeSource:
    silence = None

    def __init__(self, name: str, hosts: Sequence[str], shown: Sequence[str] = ()) -> None:
        self.name, self.hosts, self._shown = name, hosts, (*hosts, *shown)

    async def observe(self) -> HypervisorView:
        return HypervisorView({name: Host(name, SIZE, frozenset(), SIZE, "") for name in self._shown})


class FakeHypervisor:
    """Notes which calls reached it. `able`: it has templates, users, groups and members."""

    def __init__(self, *sources: FakeSource, able: bool) -> None:
        self.sources, self.calls = list(sources), list[tuple[str, str]]()
        self.membership: Any = self if able else None
        self.templates: Any = self if able else None
        self.users: Any = self if able else None
        self.groups: Any = self if able else None
        self.listening = {name: "1" for source in sources for name in source.hosts} if able else {}

    async def create(self, vm: VmSpec) -> list[Any]:
        self.calls.append(("create", vm.name))
        return []

    async def start(self, vm: VmRef, size: Size, identity: Any) -> list[Any]:
        self.calls.append(("start", vm.name))
        return []

    async def destroy(self, vm: VmRef, grace: float) -> None:
        self.calls.append(("destroy", vm.name))

    async def add_user(self, vm: VmRef, user: User, group: int = 0) -> None:
        self.calls.append(("add_user", vm.name))

    async def build_template(self, template: TemplateKey) -> list[Any]:
        self.calls.append(("build", template.host))
        return []

    async def delete_template(self, template: TemplateKey) -> None:
        self.calls.append(("delete", template.host))

    async def tell(self, host: str, members: Any, gone: Any, *, whole: bool) -> None:
        self.calls.append(("tell", host))


class FakePlatform:
    """A platform with this hypervisor; with `figures` it samples, and its VMs can be asked."""

    def __init__(self, hypervisor: FakeHypervisor, name: str, *, figures: bool) -> None:
        self.hypervisor: Any = hypervisor
        self._name = name
        self.measurements: Any = self if figures else None
        self.guests: Any = self if figures else None

    async def used(self, source: str, span: float) -> Mapping[str, HostUsage]:
        return {}

    async def measure(self) -> Mapping[str, tuple[float, float, float]]:
        return {self._name: (1.0, 2.0, 3.0)}

    async def examine(self) -> Mapping[str, Mapping[str, str | int]]:
        return {self._name: {"hostname": self._name}}

    async def follow(self, controller: Followed) -> Sequence[DaemonTask]:
        async def nothing() -> None: ...

        return [DaemonTask(self._name, nothing)]

    async def programs(self) -> Counter[str]:
        return Counter({"qemu": 1})


@pytest.fixture
def own() -> FakeHypervisor:
    return FakeHypervisor(FakeSource("h1", ["h1"]), FakeSource("h2", ["h2"]), able=True)


@pytest.fixture
def cloud() -> FakeHypervisor:
    return FakeHypervisor(FakeSource("region", [], shown=["quota"]), able=False)


@pytest.fixture
def site(own: FakeHypervisor, cloud: FakeHypervisor) -> CompositePlatform:
    both = {"own": FakePlatform(own, "own", figures=True), "cloud": FakePlatform(cloud, "cloud", figures=False)}
    found = together(both)
    assert isinstance(found, CompositePlatform)
    return found


def spec(host: str, source: str) -> VmSpec:
    return VmSpec("vm", host, "slim", "full", SIZE, "", source=source)  # type: ignore[arg-type]


async def test_a_vm_is_its_sources(site: CompositePlatform, own: FakeHypervisor, cloud: FakeHypervisor) -> None:
    both = site.hypervisor
    await both.create(spec("quota", "region"))
    await both.start(VmRef("vm", "region"), SIZE, None)  # type: ignore[arg-type]
    await both.create(spec("h2", "h2"))
    await both.destroy(VmRef("other", "h2"), 0)
    await both.add_user(VmRef("other", "h1"), USER)
    assert cloud.calls == [("create", "vm"), ("start", "vm")]
    assert own.calls == [("create", "vm"), ("destroy", "other"), ("add_user", "other")]
    with pytest.raises(Gone, match="no source nowhere"):
        await both.destroy(VmRef("vm", "nowhere"), 0)
    with pytest.raises(Refused, match="VMs of region"):
        await both.add_user(VmRef("vm", "region"), USER)


async def test_a_host_belongs_to_the_source_that_shows_it(
    site: CompositePlatform, own: FakeHypervisor, cloud: FakeHypervisor
) -> None:
    both = site.hypervisor
    await both.build_template(TemplateKey("h2", "slim", SIZE))
    await both.tell("h1", [], [], whole=True)
    assert own.calls == [("build", "h2"), ("tell", "h1")]
    with pytest.raises(Gone, match="no host quota"):
        await both.delete_template(TemplateKey("quota", "slim", SIZE))
    (region,) = (source for source in both.sources if source.name == "region")
    await region.observe()
    assert both.of_host("quota").hypervisor is cloud
    with pytest.raises(Refused, match="forks no clones"):
        await both.build_template(TemplateKey("quota", "slim", SIZE))
    await both.tell("quota", [], [], whole=True)  # it does not listen, and is told nothing
    assert both.listening == {"h1": "1", "h2": "1"} and both.membership is own and cloud.calls == []


async def test_sources_stay_the_same_objects_and_come_and_go(site: CompositePlatform, own: FakeHypervisor) -> None:
    before = site.hypervisor.sources
    assert site.hypervisor.sources == before and [one.name for one in before] == ["h1", "h2", "region"]
    own.sources[1:] = [FakeSource("h3", ["h3"])]
    assert [one.name for one in site.hypervisor.sources] == ["h1", "h3", "region"]
    assert site.hypervisor.sources[0] is before[0]
    with pytest.raises(Gone):
        site.hypervisor.of_source("h2")


def test_platforms_that_do_not_go_together_are_refused(own: FakeHypervisor) -> None:
    more = FakeHypervisor(FakeSource("h9", ["h9"]), able=True)
    with pytest.raises(Refused, match="a and b both have hosts"):
        together({"a": FakePlatform(own, "a", figures=False), "b": FakePlatform(more, "b", figures=False)})
    same = FakeHypervisor(FakeSource("h1", ["h1"]), able=False)
    site = together({"a": FakePlatform(own, "a", figures=False), "b": FakePlatform(same, "b", figures=False)})
    with pytest.raises(Refused, match="source named h1"):
        _ = site.hypervisor.sources


async def test_what_one_platform_cannot_do_the_other_one_does(site: CompositePlatform) -> None:
    assert site.measurements is site and site.guests is site
    assert await site.used("h1", 60.0) == {}
    with pytest.raises(Refused, match="nothing is sampled at region"):
        await site.used("region", 60.0)
    assert await site.measure() == {"own": (1.0, 2.0, 3.0)} and await site.examine() == {"own": {"hostname": "own"}}
    tasks = await site.follow(None)  # type: ignore[arg-type]
    assert [one.name for one in tasks] == ["own", "cloud"] and await site.programs() == Counter({"qemu": 2})


def test_one_platform_is_itself(own: FakeHypervisor) -> None:
    only = FakePlatform(own, "own", figures=True)
    assert together({"own": only}) is only


def test_bundles_are_found_by_the_settings() -> None:
    assert platform_bundles(Settings()) == {"qemu": QEMU} and scheduler_bundle(Settings()) is SLURM
    several = platform_bundles(replace(Settings(), platforms=("simulated-cloud", "qemu")))
    assert list(several) == ["simulated-cloud", "qemu"]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Dependency", "it depends on jobs"),
        ("QOSMaxCpuPerUserLimit", "quality of service"),
        ("AssocGrpCpuLimit", "its account"),
        ("Licenses, x", "licences"),
        ("", ""),
        ("SomethingNew", ""),
    ],
)
def test_slurms_reasons_in_words(reason: str, said: str) -> None:
    words = SlurmWords().say(reason)
    assert said in words and bool(words) is bool(said)
