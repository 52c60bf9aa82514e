"""What connects the bridges of a job of several nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from multiverse.agent.jobs import JobVm
from multiverse.config import AgentSettings, Settings, VxlanSettings
from multiverse.core.errors import Refused
from multiverse.core.model.identity import Neighbour
from multiverse.drivers.qemu import job_vms
from multiverse.drivers.qemu.job_vms import JobAddresses, JobVxlan, guest_mac
from multiverse.host.vxlan import VxlanConfig

VM = JobVm(7, 0, 0, 1000, 3, "slim", 1, 256, 0, "t", "s", (), vms=2, nodes=("a", "b"))
KNOWN = VxlanSettings(addresses=(("a", "192.0.2.1"), ("b", "192.0.2.2")))


@dataclass
class Made:
    """The VXLANs of this host, as they were asked for."""

    configs: list[VxlanConfig] = field(default_factory=list)
    entries: list[Neighbour] = field(default_factory=list)
    removed: int = 0
    refuses: bool = False
    occupied: bool = False

    def __call__(self, config: VxlanConfig) -> Made:
        if self.refuses:
            raise Refused("there is no nftables")
        self.configs.append(config)
        return self

    def restore(self) -> None:
        if self.occupied:
            raise Refused("another VXLAN of this host has the port", hint="give it another one")

    def add(self, owner: str, neighbours: Iterable[Neighbour]) -> None:
        self.entries = list(neighbours)

    def remove(self) -> None:
        self.removed += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    found = Made()
    monkeypatch.setattr(job_vms, "Vxlan", found)
    return found


def vxlan(state: Path, vm: JobVm, known: VxlanSettings = KNOWN) -> JobVxlan:
    settings = Settings(agent=AgentSettings(state_dir=state), vxlan=known)
    return JobVxlan(settings, JobAddresses(IPv4Network(settings.job_vms.subnet)), vm, "mvjobs.3")


def test_each_node_has_an_entry_for_each_vm_of_the_others_and_all_agree_on_the_network(
    tmp_path: Path, made: Made
) -> None:
    found = {}
    for node in (0, 1):
        vxlan(tmp_path, replace(VM, node=node, number=node)).make()
        found[node] = [(one.address, one.mac, one.machine) for one in made.entries]
    assert found[0] == [("10.214.128.3", guest_mac(7, 2), "192.0.2.2"), ("10.214.128.4", guest_mac(7, 3), "192.0.2.2")]
    assert found[1] == [("10.214.128.1", guest_mac(7, 0), "192.0.2.1"), ("10.214.128.2", guest_mac(7, 1), "192.0.2.1")]
    one, two = made.configs
    assert (one.network, one.port) == (two.network, two.port) and one.site != two.site
    assert (one.find_address(), two.find_address()) == ("192.0.2.1", "192.0.2.2")


def test_a_job_of_one_node_needs_none(tmp_path: Path, made: Made) -> None:
    alone = vxlan(tmp_path, replace(VM, nodes=("elsewhere",)))
    alone.make()
    alone.remove()
    assert not made.configs and alone.mtu == 0
    assert vxlan(tmp_path, VM).mtu == KNOWN.mtu


def test_what_could_not_be_made_is_removed_all_the_same(tmp_path: Path, made: Made) -> None:
    found = vxlan(tmp_path, VM)
    made.refuses = True
    with pytest.raises(Refused):
        found.make()
    found.remove()
    made.refuses = False
    (tmp_path / "job-vxlans" / "3").mkdir(parents=True)
    found.remove()
    assert made.removed == 1 and not list((tmp_path / "job-vxlans").iterdir())


def test_a_job_whose_port_another_job_has_is_told_what_to_do(tmp_path: Path, made: Made) -> None:
    made.occupied = True
    with pytest.raises(Refused, match="another VXLAN") as refused:
        vxlan(tmp_path, VM).make()
    assert "give it another one" in refused.value.hint and "submit this job again" in refused.value.hint


def test_a_node_whose_address_nobody_knows_fails_the_job_with_the_next_step(tmp_path: Path, made: Made) -> None:
    unknown = replace(VM, nodes=("a", "no-such-node.invalid"))
    with pytest.raises(Refused, match=r"no-such-node\.invalid"):
        vxlan(tmp_path, unknown).make()
    assert not made.configs
