"""Who is told of which VM in a VXLAN, what settings it takes, and what the host library does with it."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from multiverse import config
from multiverse.agent.hypervisor import VxlanDirectory
from multiverse.bundles.qemu import platform as service
from multiverse.bundles.qemu.platform import MachineVxlan
from multiverse.config import HostSettings, NetworkSettings, QemuSettings, Settings, VxlanSettings, vxlan_address
from multiverse.core.errors import Gone, Refused, Unknown
from multiverse.core.model.identity import Identity, Neighbour, network_id_of
from multiverse.core.model.vm import Vm, VmRef, VmState
from multiverse.drivers.qemu.driver import JOB_SITE, host_config
from multiverse.host.qemu import templates
from multiverse.host.vxlan import Vxlan, VxlanConfig, is_of_machine, machine_owner
from tests.unit import rows
from tests.unit.test_qemu_host import machine

GATEWAY = Neighbour("10.213.0.1", "02:4d:0a:d5:00:01", "192.0.2.1")
ADDRESSES = (
    ("ctl", "192.0.2.1"),
    ("h1", "192.0.2.11"),
    ("h2", "198.51.100.12"),
    ("h3", "203.0.113.13"),
    ("h4", "192.0.2.11"),
)
SETTINGS = Settings(host=HostSettings(name="ctl"), vxlan=VxlanSettings(enabled=True, addresses=ADDRESSES))


class Machines:
    """The controller's machine is ctl, which is no host unless `own` says so."""

    def __init__(self, own: str = "ctl") -> None:
        self.own = own
        self.reached: dict[str, Neighbour] = {}

    async def address_of(self, host: str) -> str:
        return vxlan_address(SETTINGS, host)

    async def gateway(self) -> Neighbour:
        return GATEWAY

    async def reach(self, vm: str, neighbour: Neighbour) -> None:
        self.reached[vm] = neighbour


def placed(serial: int, host: str, state: VmState = VmState.STARTING) -> Vm:
    mac, address = f"02:00:00:00:00:{serial:02x}", f"10.213.1.{serial}/16"
    vm = rows.vm(state, id=serial, host=host, source=host, token=f"t{serial}")
    return replace(vm, mac=mac, address=address)


def neighbour(vm: Vm) -> Neighbour:
    return Neighbour(vm.address.partition("/")[0], vm.mac, dict(ADDRESSES)[vm.host])


def identity(vm: Vm, *peers: Vm) -> Identity:
    named = (("ctl", "10.213.0.1"), *((peer.name, peer.address.partition("/")[0]) for peer in peers))
    return Identity(vm.name, vm.mac, vm.address, "10.213.0.1", "0" * 32, peers=named)


class Told:
    """The agents of the hosts: which VMs were told of whom. `errors` are raised for some of them."""

    def __init__(self, **errors: Exception) -> None:
        self.of: dict[str, tuple[Neighbour, ...]] = {}
        self.errors = errors

    async def connect(self, vm: VmRef, neighbours: tuple[Neighbour, ...]) -> None:
        assert vm.token
        if error := self.errors.get(vm.source):
            raise error
        self.of[vm.name] = neighbours


def directory(machines: Machines, told: Told, *vms: Vm) -> VxlanDirectory:
    by_name = {vm.name: vm for vm in vms}
    return VxlanDirectory(machines, by_name.get, told.connect)


async def test_a_vm_and_its_peers_on_other_hosts_learn_of_each_other() -> None:
    """Those on its own host need no VXLAN, and those that are not started yet learn of it at their own start."""
    one, beside, other, later = (
        placed(1, "h1"),
        placed(2, "h1"),
        placed(3, "h2", VmState.JOINED),
        placed(4, "h3", VmState.PARKED),
    )
    machines, told = Machines(), Told()
    found = await directory(machines, told, one, beside, other, later).introduce(
        one.ref, identity(one, beside, other, later)
    )
    assert found == (neighbour(other), neighbour(later), GATEWAY)
    assert told.of == {other.name: (neighbour(one),)}
    assert machines.reached == {one.name: neighbour(one)}


async def test_a_vm_on_the_controllers_machine_needs_no_way_to_it() -> None:
    one, other = placed(1, "h1"), placed(2, "h2")
    machines, told = Machines(own="h1"), Told()
    assert await directory(machines, told, one, other).introduce(one.ref, identity(one, other)) == (neighbour(other),)
    assert machines.reached == {} and told.of == {other.name: (neighbour(one),)}


async def test_vms_on_two_leases_of_one_node_need_no_vxlan_between_them() -> None:
    """h1 and h4 are on the same machine."""
    one, beside, other = placed(1, "h1"), placed(2, "h4"), placed(3, "h2")
    machines, told = Machines(), Told()
    found = await directory(machines, told, one, beside, other).introduce(one.ref, identity(one, beside, other))
    assert found == (neighbour(other), GATEWAY)
    assert told.of == {other.name: (neighbour(one),)}


async def test_a_peer_that_is_gone_hinders_nobody_but_one_that_does_not_answer_does() -> None:
    """The latter could not answer the VM, whose start is then repeated."""
    one, other = placed(1, "h1"), placed(2, "h2")
    for error, raises in ((Gone("no such VM"), False), (Unknown("no answer"), True)):
        asked = directory(Machines(), Told(h2=error), one, other).introduce(one.ref, identity(one, other))
        if raises:
            with pytest.raises(Unknown):
                await asked
        else:
            assert neighbour(other) in await asked


# --- the controller's machine -----------------------------------------------------------------------


class Entries:
    """`host.vxlan.Vxlan` without a kernel."""

    def __init__(self, _: object) -> None:
        self.of: dict[str, list[Neighbour]] = {"mvtest0-9": []}

    def restore(self) -> None:
        assert "restored" not in vars(self)
        vars(self)["restored"] = True

    def owners(self) -> frozenset[str]:
        return frozenset(self.of)

    def add(self, owner: str, neighbours: Iterable[Neighbour]) -> None:
        self.of[owner] = [*neighbours]

    def drop(self, owner: str) -> None:
        del self.of[owner]


async def test_the_controllers_machine_follows_the_rows() -> None:
    """It forgets VMs without a row, reaches those that run, and leaves the entries of its own VMs to its agent."""
    qemu = VxlanConfig("test0", 1, 14789, lambda: "192.0.2.1", 1450, "mvbr0", Path("/none"))
    with mock.patch.object(service, "Vxlan", Entries):
        vxlan = MachineVxlan(SETTINGS, qemu)
    entries = vxlan._vxlan
    assert isinstance(entries, Entries)
    gone, running, planned, own = placed(1, "h1"), placed(2, "h2"), placed(3, "h1", VmState.PLANNED), placed(4, "ctl")
    await vxlan.reach(gone.name, neighbour(gone))
    live = {vm.id: vm for vm in (running, planned, own)}
    for _ in range(2):
        await vxlan.follow(lambda: live)
        assert entries.of == {"mvtest0-9": [], machine_owner(running.name): [neighbour(running)]}
    moved = replace(running, places=(replace(running.place, host="h1"),))
    live[running.id] = moved
    await vxlan.follow(lambda: live)
    assert entries.of == {"mvtest0-9": [], machine_owner(running.name): [neighbour(moved)]}
    await vxlan.reach(planned.name, neighbour(planned))
    await vxlan.follow(lambda: live)
    assert machine_owner(planned.name) in entries.of, "a VM that is about to be started is not forgotten"
    assert is_of_machine(machine_owner("mvtest0-1")) and not is_of_machine("mvtest0-1")


async def test_a_leased_host_is_where_its_node_is() -> None:
    qemu = VxlanConfig("test0", 1, 14789, lambda: "192.0.2.1", 1450, "mvbr0", Path("/none"))
    with mock.patch.object(service, "Vxlan", Entries):
        vxlan = MachineVxlan(SETTINGS, qemu, {"lease-test0-1": "h2", "h1": "h1"}.__getitem__)
    assert await vxlan.address_of("lease-test0-1") == "198.51.100.12"
    assert await vxlan.address_of("h1") == "192.0.2.11"


# --- settings ----------------------------------------------------------------------------------------


def test_an_address_is_given_or_known_to_the_name_service(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vxlan_address(SETTINGS, "h2") == "198.51.100.12"
    answers = {"h7": "192.0.2.77", "h8": "127.0.1.1"}

    def lookup(name: str, *_: object) -> list[tuple[object, ...]]:
        if name not in answers:
            raise socket.gaierror("unknown name")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (answers[name], 0))]

    monkeypatch.setattr(config.socket, "getaddrinfo", lookup)
    assert vxlan_address(SETTINGS, "h7") == "192.0.2.77"
    for name, said in (("h8", "127.0.1.1, which no other machine reaches"), ("h9", "knows no IPv4 address of h9")):
        with pytest.raises(Refused, match=said) as caught:
            vxlan_address(SETTINGS, name)
        assert f'["{name}", "ADDRESS"]' in caught.value.hint


def test_a_name_is_looked_up_for_the_version_of_ip_of_the_given_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(vxlan=VxlanSettings(enabled=True, addresses=(("h1", "FD00:0::1"),)))

    def lookup(_: str, __: None, family: int, *___: object) -> list[tuple[object, ...]]:
        assert family == socket.AF_INET6
        return [(family, socket.SOCK_DGRAM, 17, "", ("::1", 0, 0, 0))]

    monkeypatch.setattr(config.socket, "getaddrinfo", lookup)
    assert vxlan_address(settings, "h1") == "fd00::1", "as the kernel writes it"
    with pytest.raises(Refused, match="::1, which no other machine reaches"):
        vxlan_address(settings, "h2")


def test_each_site_has_an_id_and_an_interface_of_its_own() -> None:
    own = host_config(replace(SETTINGS, qemu=QemuSettings(vms=Path("/v"))), "test0").vxlan
    assert (
        own is not None
        and own.find_address() == "192.0.2.1"
        and own.device == "vxtest0"
        and not own.device.startswith("mv")
    )
    assert own.network == network_id_of("test0") and 0 < own.network < 1 << 24
    assert network_id_of("test0") != network_id_of("test1")
    chosen = replace(SETTINGS, vxlan=replace(SETTINGS.vxlan, network=77))
    given = host_config(chosen, "test0").vxlan
    assert given is not None and given.network == 77
    assert host_config(SETTINGS, JOB_SITE).vxlan is None, "no network connects VMs inside jobs"
    assert host_config(SETTINGS, JOB_SITE).mtu == 1450, "they are forked from the same templates"
    assert host_config(Settings(network=NetworkSettings()), "test0").vxlan is None
    assert host_config(Settings(), "test0").mtu == 0


def test_a_machine_whose_address_nobody_knows_makes_no_vxlan_but_removes_what_it_has(tmp_path: Path) -> None:
    """An agent observes its VMs and ends them also while the name service is away."""
    settings = replace(SETTINGS, state_dir=tmp_path, host=HostSettings(name="nowhere.invalid"))
    own = host_config(settings, "test0").vxlan
    assert own is not None
    with pytest.raises(Refused, match="nowhere"):
        own.find_address()
    with mock.patch("multiverse.host.vxlan.Nft"):
        Vxlan(own).drop("mvtest0-1")


def test_guests_are_told_of_the_mtu_by_their_interface() -> None:
    """So a template of another MTU is another template."""
    image = mock.Mock(key="key")
    small, plain = machine(mtu=1450), machine()
    wiring = mock.Mock(tap=5, vhost=None)
    assert ",host_mtu=1450" in " ".join(small.network_argv(wiring))
    assert "host_mtu" not in " ".join(plain.network_argv(wiring))
    assert templates.key_of(image, small, "7.2") != templates.key_of(image, plain, "7.2")
