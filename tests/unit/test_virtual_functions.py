"""Virtual functions on a tree like that of sysfs. What the kernel does is tried in a guest that has real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.host import virtual_functions
from multiverse.host.virtual_functions import FunctionRecord, VirtualFunctions

PARENT = "0000:3b:00.0"


class Tree:
    """A device with the interface `ens1` and functions that are bound to vfio-pci, as a site prepares them for GRES."""

    def __init__(self, top: Path) -> None:
        self.sysfs, self.devices, self.records = top / "sys", top / "dev", top / "records"
        self.bus = self.sysfs / "bus/pci"
        (self.bus / "devices").mkdir(parents=True)
        self.driver = self.bus / "drivers/vfio-pci"
        self.driver.mkdir(parents=True)
        (self.driver / "unbind").touch()
        self.devices.mkdir()
        self._device(PARENT)
        (self.of(PARENT) / "net/ens1").mkdir(parents=True)

    def of(self, address: str) -> Path:
        return self.sysfs / "devices/pci0000:3a" / address

    def add(self, number: int, driver: str = "vfio-pci", group: int | None = None) -> str:
        address, group = f"0000:3b:02.{number}", 10 + number if group is None else group
        device = self._device(address)
        (device / "physfn").symlink_to(self.of(PARENT))
        groups = self.sysfs / "kernel/iommu_groups" / str(group)
        (groups / "devices").mkdir(parents=True, exist_ok=True)
        (groups / "devices" / address).symlink_to(device)
        (device / "iommu_group").symlink_to(groups)
        (device / "reset").touch()
        (device / "driver_override").write_text("(null)\n")
        if driver:
            (self.bus / "drivers" / driver).mkdir(exist_ok=True)
            (device / "driver").symlink_to(self.bus / "drivers" / driver)
        (self.devices / str(group)).touch()
        return address

    def _device(self, address: str) -> Path:
        device = self.of(address)
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x8086\n")
        (device / "device").write_text("0x154c\n")
        (self.bus / "devices" / address).symlink_to(device)
        return device

    def functions(self, *offered: str) -> VirtualFunctions:
        return VirtualFunctions(offered or ("ens1",), self.records, self.sysfs, self.devices)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_functions_are_offered_by_address_interface_or_ids(tree: Tree) -> None:
    addresses = [tree.add(number) for number in (1, 0)]
    for offered in (PARENT, PARENT[5:], "ens1", "8086:154c"):
        assert [one.address for one in tree.functions(offered).listed()] == sorted(addresses)
    assert tree.functions("ens2", "8086:1520").listed() == []
    first = tree.functions().listed()[0]
    assert (first.ids, first.parent, first.group, first.driver, first.problem) == (
        "8086:154c",
        PARENT,
        10,
        "vfio-pci",
        "",
    )
    assert first.directory == tree.of(first.address).resolve()


def _no_group(tree: Tree, device: Path) -> None:
    (device / "iommu_group").unlink()


def _shared_group(tree: Tree, device: Path) -> None:
    (device / "iommu_group/devices" / PARENT).symlink_to(tree.of(PARENT))


def _no_reset(tree: Tree, device: Path) -> None:
    (device / "reset").unlink()


def _interface(tree: Tree, device: Path) -> None:
    (device / "net/ens1v0").mkdir(parents=True)
    (device / "net/ens1v0/flags").write_text("0x1003\n")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_no_group, "intel_iommu=on"),
        (_shared_group, f"{PARENT} is in its IOMMU group"),
        (_no_reset, "it cannot be reset"),
        (_interface, "this host uses it as ens1v0"),
    ],
)
def test_a_function_that_no_vm_can_have_is_not_chosen_and_says_why(
    tree: Tree, spoil: Callable[[Tree, Path], None], words: str
) -> None:
    bad, good = tree.add(0), tree.add(1)
    functions = tree.functions()
    spoil(tree, tree.of(bad))
    assert [words in one.problem for one in functions.listed()] == [True, False]
    assert [one.address for one in functions.claim("a", 1)] == [good]
    with pytest.raises(Exhausted, match="0 of the host's 2 are free") as error:
        functions.claim("b", 1)
    assert words in error.value.hint


def test_an_interface_that_is_down_is_no_use_of_it(tree: Tree) -> None:
    _interface(tree, tree.of(tree.add(0)))
    (tree.of("0000:3b:02.0") / "net/ens1v0/flags").write_text("0x1002\n")
    assert tree.functions().listed()[0].problem == ""


def test_a_function_of_another_programs_user_is_not_chosen(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.add(0)
    functions, stat = tree.functions(), Path.stat

    def of_others(path: Path, **more: bool) -> object:
        found = stat(path, **more)
        return type("Stat", (), {"st_uid": 64055}) if path == tree.devices / "10" else found

    monkeypatch.setattr(Path, "stat", of_others)
    assert "user 64055 has" in functions.listed()[0].problem


def test_with_groups_only_their_functions_are_chosen(tree: Tree) -> None:
    addresses = [tree.add(number) for number in range(4)]
    functions = tree.functions()
    assert [one.address for one in functions.claim("a", 2, (12, 13))] == addresses[2:]
    with pytest.raises(Exhausted, match="has it the GRES"):
        functions.claim("b", 1, (12, 13))
    with pytest.raises(Exhausted, match="only Slurm's plugin finds"):  # launched by a task
        functions.claim("b", 1, ())
    assert functions.records() == {address: FunctionRecord("a", "vfio-pci") for address in addresses[2:]}


def test_a_function_that_was_bound_before_stays_so_and_is_reset(tree: Tree) -> None:
    address = tree.add(0)
    functions = tree.functions()
    functions.claim("a", 1)
    functions.release("a")
    assert (tree.of(address) / "reset").read_text() == "1"
    assert (tree.of(address) / "driver_override").read_text() == "(null)\n"
    assert functions.records() == {}


def test_a_function_that_cannot_be_reset_is_given_to_nobody_until_it_can(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = tree.add(0)
    functions, write = tree.functions(), virtual_functions._write

    def fail(path: Path, text: str) -> None:
        raise OSError(5, "Input/output error", str(path))

    functions.claim("a", 1)
    monkeypatch.setattr(virtual_functions, "_write", fail)
    functions.release("a")
    record = functions.records()[address]
    assert record.vm == "" and "Input/output error" in record.problem
    with pytest.raises(Exhausted):
        functions.claim("b", 1)
    monkeypatch.setattr(virtual_functions, "_write", write)
    functions.release_unclaimed(lambda name: True)
    assert functions.records() == {} and functions.claim("b", 1)


def test_what_no_vm_has_is_returned_also_if_its_record_is_damaged_or_the_function_is_gone(tree: Tree) -> None:
    addresses = [tree.add(number) for number in range(3)]
    functions = tree.functions()
    for name in "abc":
        functions.claim(name, 1)
    (tree.records / addresses[1]).write_text("{")
    (tree.bus / "devices" / addresses[2]).unlink()
    functions.release_unclaimed({"a"}.__contains__)
    assert functions.records() == {addresses[0]: FunctionRecord("a", "vfio-pci")}
    assert (tree.driver / "unbind").read_text() == addresses[1], "what it had before is unknown"


def test_a_function_that_is_not_bound_though_asked_for_fails_with_the_next_step(tree: Tree) -> None:
    address = tree.add(0, driver="iavf")
    (tree.bus / "drivers/iavf/unbind").touch()
    (tree.bus / "drivers_probe").touch()
    functions = tree.functions()
    with pytest.raises(Broken, match="modprobe vfio-pci"):
        functions.claim("a", 1)
    assert (tree.bus / "drivers/iavf/unbind").read_text() == address
    assert json.loads((tree.records / address).read_text())["driver"] == "iavf"
    functions.release("a")
    assert functions.records() == {}


def test_without_any_function_the_next_step_is_to_make_some(tree: Tree) -> None:
    with pytest.raises(Refused, match="sriov_numvfs"):
        tree.functions().claim("a", 1)
