"""Virtual functions of an emulated NVMe controller, in a guest with an IOMMU: found, given to one VM each, returned."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multiverse.core.model.basics import Size
from multiverse.core.model.vm import TemplateKey
from multiverse.drivers.qemu.driver import JOB_SITE, host_config
from multiverse.host.qemu.library import QemuHost
from tests.integration import iommu_guest, vm_with_function
from tests.integration.bare_node import BUILT
from tests.integration.functions_in_guest import OWNER
from tests.integration.images import CACHE, slim

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="it shares files of root"),
]

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


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory with the template that the agent in the guest forks, and with mventer. The guest sees it at the same
    path, and users can pass through it."""
    with tempfile.TemporaryDirectory(prefix="shared-", dir=CACHE) as place:
        top = Path(place)
        top.chmod(0o755)
        site = vm_with_function.settings(iommu_guest.CONTROLLER, slim().path.parent, top / "templates")
        own = replace(site.qemu, vms=top / "vms", run=top / "run")
        host = QemuHost(host_config(replace(site, state_dir=top / "state", qemu=own), JOB_SITE))
        host.check()
        host.build_template(TemplateKey(site.host.name, "slim", Size(1, vm_with_function.BASE)))
        host.close()
        shutil.copy(BUILT / "mventer", top)
        yield top


@pytest.mark.timeout(1800)
def test_a_vm_in_a_vm_uses_a_function_that_its_job_asked_for(shared: Path, tmp_path: Path) -> None:
    """The agent's own service, its clone and the guest agent, in a guest with an IOMMU: emulation within emulation. The
    driver in the clone gets answers by DMA and interrupts of the function."""
    top, image = Path(__file__).parents[2], slim()
    command = ["env", f"PYTHONPATH={top}:{top}/src", iommu_guest.python(), "-m", "tests.integration.vm_with_function"]
    arguments = [iommu_guest.CONTROLLER, image.path.parent, shared / "templates", shared / "mventer"]
    said = iommu_guest.run(image, tmp_path, [*command, *arguments], memory=2560, limit=1700)
    (found,) = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert found["provided"] == "ok", found
    assert not found["errors"], found
    serial, data, owners, user, port, region = found["task"]
    assert (serial, data) == (iommu_guest.SERIAL, iommu_guest.DATA)
    assert owners == user == str(vm_with_function.USER.uid)
    assert (port, region) == ("0000:00:11.0", "0000:00:08.0"), "functions in the last ports, memory in the first ones"
    assert "the VM is to have 2 virtual functions, and 1 of the host's 2 are free" in found["refused"]
    during, qemu = found["during"], found["qemu"]
    assert qemu["template"], "it is a clone"
    assert sorted(during["drivers"].values()) == ["", "vfio-pci"]
    assert list(during["owners"].values()) == [qemu["uid"]] and qemu["uid"]
    assert found["stranger"] == found["stranger asks"] == DENIED
    assert qemu["limit"] >= qemu["kept"] >= qemu["total"] and qemu["own"] >= qemu["total"], "all of it stays in place"
    assert found["after"] == found["before"] and found["left"] == []
