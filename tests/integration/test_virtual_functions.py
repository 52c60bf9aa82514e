"""Virtual functions of an emulated NVMe controller, in a guest with an IOMMU: found, given to one VM each, returned."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.integration import iommu_guest, vm_with_function
from tests.integration.functions_in_guest import OWNER
from tests.integration.images import CACHE, slim

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="it shares files of root")]

DENIED = "Permission denied"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of the trials in the guest, by their names."""
    top = Path(__file__).parents[2]
    command = ["env", f"PYTHONPATH={top}:{top}/src", iommu_guest.python(), "-m", "tests.integration.functions_in_guest"]
    said = iommu_guest.run(slim(), tmp_path_factory.mktemp("guest"), [*command, iommu_guest.CONTROLLER])
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {one["name"]: one["result"] for one in found}


def test_the_functions_of_a_device_are_found_by_its_address_and_by_their_ids(results: dict[str, Any]) -> None:
    addresses = results["left"]["addresses"]
    found = results["found"]
    assert len(addresses) == iommu_guest.FUNCTIONS
    assert found["listed"] == {
        iommu_guest.CONTROLLER: addresses,
        iommu_guest.CONTROLLER.removeprefix("0000:"): addresses,
        "1b36:0010": addresses,
        "1af4:1041": [],
    }
    assert len(set(found["groups"])) == len(addresses)
    assert found["problems"] == [""] * len(addresses)


def test_a_vm_has_its_functions_until_they_are_released_and_then_they_are_as_before(results: dict[str, Any]) -> None:
    addresses, trial = results["left"]["addresses"], results["one VM"]
    before, during = trial["before"], trial["during"]
    assert list(before["drivers"].values()) == ["nvme", "pci-stub", "", ""]
    assert trial["held"] == trial["again"] == addresses[:2]
    assert list(during["drivers"].values()) == ["vfio-pci", "vfio-pci", "", ""]
    assert during["records"] == dict.fromkeys(addresses[:2], "mvjob-a")
    assert trial["other released"], "the end of another VM changes nothing"
    assert trial["after"] == before and not before["records"]
    assert results["left"]["override"] == "pci-stub"


def test_only_the_user_of_a_vms_qemu_opens_its_functions_and_nobody_else_reads_the_records(
    results: dict[str, Any],
) -> None:
    trial = results["one VM"]
    assert set(trial["during"]["owners"].values()) == {OWNER}
    assert trial["trials"].pop("owner") == ""
    assert trial["trials"] and set(trial["trials"].values()) == {DENIED}, trial["trials"]


def test_what_cannot_be_had_is_refused_with_the_next_step(results: dict[str, Any]) -> None:
    said = results["too many"]
    assert "4 of the host's 4 are free" in said["more than there are"] and "fewer" in said["more than there are"]
    assert "0 of the host's 4 are free" in said["of other groups"] and "GRES" in said["of other groups"]
    assert "sriov_numvfs" in said["where none is"] and said["where none is"].startswith("Refused")
    assert said["records"] == "{}"


def test_two_processes_never_have_the_same_function(results: dict[str, Any]) -> None:
    trial = results["at once"]
    assert trial["exits"] == [0] * 7
    assert trial["after"]["records"] == {}
    assert list(trial["after"]["drivers"].values()) == ["", "pci-stub", "", ""]


@pytest.mark.parametrize(("name", "steps"), [("killed while claiming", 10), ("killed while returning", 10)])
def test_whatever_step_a_process_is_killed_at_the_next_one_goes_on_or_returns_all(
    results: dict[str, Any], name: str, steps: int
) -> None:
    trials = results[name]
    assert [trial["ended"] for trial in trials[:-1]] == [-9] * (len(trials) - 1)
    assert trials[-1]["ended"] == 0 and len(trials) > steps
    for trial in trials:
        assert trial["as before"], trial
        if name == "killed while claiming":
            assert not trial["shared"], trial
            assert trial["bound"] == trial["kept"] == trial["all"] == results["left"]["addresses"], trial


_INNER = f"""#!/bin/busybox sh
bb=/bin/busybox
$bb mount -t devtmpfs dev /dev
$bb mount -t proc proc /proc
$bb mkdir /sys
$bb mount -t sysfs sys /sys
echo {vm_with_function.RUNNING}
until [ -e /sys/bus/pci/devices/0000:01:00.0 ]; do $bb sleep 1; done
for module in $($bb cat /modules); do $bb insmod /lib/$module; done
until [ "$($bb cat /sys/class/nvme/nvme0/state)" = live ]; do $bb sleep 1; done
$bb cat /sys/class/nvme/nvme0/serial
$bb poweroff -f
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_vm_in_a_vm_uses_a_function(tmp_path: Path) -> None:
    """Emulation within emulation: the driver in the inner guest gets answers by DMA and interrupts of the function."""
    top, image, inner = Path(__file__).parents[2], slim(), tmp_path / "inner"
    inner.mkdir()
    with tempfile.TemporaryDirectory(dir=CACHE) as shared:  # the guest sees it at the same path
        ramdisk = shutil.copy(iommu_guest.make_ramdisk(image, inner, _INNER, ("nvme",)), shared)
        Path(shared).chmod(0o755)
        command = [
            "env",
            f"PYTHONPATH={top}:{top}/src",
            iommu_guest.python(),
            "-m",
            "tests.integration.vm_with_function",
        ]
        arguments = [iommu_guest.CONTROLLER, image.kernel, ramdisk]
        said = iommu_guest.run(image, tmp_path, [*command, *arguments], memory=1536, limit=800)
    (found,) = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert found["exit"] == 0 and iommu_guest.SERIAL in [line.strip() for line in found["guest"]], found
    assert "0 of the host's 1 are free" in found["refused"]
    assert found["own"] >= vm_with_function.MEMORY, "it shares nothing with the file that its memory was mapped from"
    assert found["after"] == found["before"]
