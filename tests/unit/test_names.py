"""Names of VMs: one serial for each name, also beyond seven decimal digits, in every place that parses them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiverse.core.errors import Exhausted, Refused
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import Size, is_pin
from multiverse.core.model.identity import (
    LAST_DECIMAL,
    LAST_SERIAL,
    SERIAL,
    lease_name,
    mac_of,
    machine_id,
    serial_of,
    site_of,
    site_of_lease,
    vm_name,
    vm_prefix,
)
from multiverse.core.model.job import NodeSpec
from multiverse.core.state import State
from multiverse.drivers.slurm.reading import parse
from multiverse.drivers.slurm.submission import OfferFiles
from multiverse.host.qemu.context import HostContext
from multiverse.host.registry import UidPool, VmRegistry
from tests.unit.planner_harness import POLICY, PlannerHarness

FIRST_LETTER = LAST_DECIMAL + 1
INTERFACE_NAME = 15  # bytes: IFNAMSIZ - 1
serials = st.one_of(
    st.integers(1, LAST_SERIAL), st.integers(FIRST_LETTER - 50, FIRST_LETTER + 50), st.integers(1, 3 * LAST_DECIMAL)
)


@given(serials)
def test_a_name_gives_its_serial_and_site_back_and_names_an_interface(serial: int) -> None:
    name = vm_name("abcde", serial)
    assert serial_of(name) == serial and site_of(name) == "abcde"
    assert len(name) <= INTERFACE_NAME and re.fullmatch(r"[a-z0-9-]+", name)
    assert re.fullmatch(SERIAL, name.removeprefix(vm_prefix("abcde")))


def test_a_lease_names_its_site() -> None:
    assert site_of_lease(lease_name("abcde", 36)) == "abcde"
    assert not any(map(site_of_lease, ("lease-", "lease-abcdef-1", "lease-abcde", "mvabcde-1", "lease-../x-1")))


@given(serials, serials)
def test_no_two_serials_have_one_name(one: int, two: int) -> None:
    names = {vm_name("abcde", one), vm_name("abcde", two)}
    assert len(names) == len({one, two}) == len({machine_id(name) for name in names})


def test_decimal_names_stay_as_they_were_and_letters_follow_them() -> None:
    assert vm_name("abcde", 1) == "mvabcde-1" and vm_name("abcde", LAST_DECIMAL) == "mvabcde-9999999"
    assert vm_name("abcde", FIRST_LETTER) == "mvabcde-a000000"
    assert vm_name("abcde", FIRST_LETTER + 35) == "mvabcde-a00000z"
    assert vm_name("abcde", LAST_SERIAL) == "mvabcde-zzzzzzz"
    with pytest.raises(Exhausted):
        vm_name("abcde", LAST_SERIAL + 1)


@pytest.mark.parametrize(
    "name", ["mvab-", "mvab-a00000", "mvab-a0000000", "mvab-A000000", "mvab3", "x-3", "mvab-3.lock"]
)
def test_what_is_no_name_of_a_vm_has_no_serial(name: str) -> None:
    assert serial_of(name) == 0 and site_of(name) == ""


def test_macs_go_on_beyond_24_bits_of_the_serial() -> None:
    macs = {mac_of("abcde", serial) for serial in (1, 1 + (1 << 24), 1 + (2 << 24), 1 + (31 << 24))}
    assert len(macs) == 4 and all(mac.endswith(":00:00:01") for mac in macs)


def test_the_planner_the_host_and_slurm_take_a_name_with_letters(tmp_path: Path) -> None:
    harness = PlannerHarness(path=tmp_path / "db")
    with harness.store._begin():
        harness.store._put_meta("next_serial", str(FIRST_LETTER))
    harness.store._forget()
    harness.state = State(harness.rows, TABLES)
    harness.template()
    harness.job()
    for _ in range(3):
        harness.run()
    (vm,) = harness.all_vms()
    assert vm.name == "mvtest0-a000000" and vm.id == FIRST_LETTER
    assert harness.rows.next_serial == FIRST_LETTER + 1
    assert vm.address.endswith(f"/{POLICY.subnet.prefixlen}") and vm.mac == mac_of("test0", FIRST_LETTER)
    assert is_pin(vm.feature)
    assert parse.hosts("mvtest0-a[000000-000001]") == (vm.name, "mvtest0-a000001")
    files = OfferFiles(tmp_path, "test0", 10.0)
    files.offer(
        NodeSpec(vm.name, vm.address, Size(1, 100), (vm.feature,), vm.feature, "slim"), any_image=True, any_kind=True
    )
    assert files.observe().offers == {vm.name: False}
    assert OfferFiles(tmp_path, "test0", 10.0).observe().offers == {vm.name: False}


def test_the_host_library_takes_a_name_with_letters(tmp_path: Path) -> None:
    class Host:
        class config:
            prefix = vm_prefix("test0")

    name = vm_name("test0", LAST_SERIAL)
    HostContext.check_name(Host, name)  # type: ignore[arg-type]
    with pytest.raises(Refused):
        HostContext.check_name(Host, f"{name}0")  # type: ignore[arg-type]
    found = UidPool(1000, 10).allocate(name, VmRegistry(tmp_path))
    assert found is not None and found.uid == 1001 + LAST_SERIAL % 9
