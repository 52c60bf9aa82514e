"""What a guest can write to its disk: its file system says so first, and its host enforces it."""

from __future__ import annotations

import dataclasses
import os

import pytest

from multiverse.core.model.basics import CloneKind
from multiverse.core.model.vm import VmCondition
from tests.integration.conftest import SCRATCH
from tests.integration.test_qemu_driver import BASE, Lab, answers_of, lab, swept

__all__ = ["lab", "swept"]  # fixtures
pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="taps and images need root")]

AS_ANN = "setpriv --reuid=4001 --regid=4001 --clear-groups --"


async def files_of(lab: Lab, name: str) -> tuple[int, int]:
    """MiB that the file of the VM's disk takes, and may take."""
    overlay = lab.settings.qemu.vms / name / "disk.qcow2"
    seen = (await lab.hypervisor.observe()).vms[name]
    return -(-overlay.stat().st_size >> 20), seen.disk


AVAILABLE = f"{AS_ANN} df --output=avail -BM / | tail -n 1"


@pytest.mark.parametrize("kind", [CloneKind.INSTANT, pytest.param(CloneKind.LINKED, marks=pytest.mark.slow)])
@pytest.mark.parametrize("asked", [0, 1000])
async def test_a_job_has_what_it_asked_for_available_and_not_much_more(lab: Lab, kind: CloneKind, asked: int) -> None:
    spec = lab.spec(kind, dataclasses.replace(BASE, disk=asked))
    await lab.hypervisor.create(spec)
    (line,) = await answers_of(lab, spec, AVAILABLE)
    allowance = max(SCRATCH, asked)
    assert allowance <= int(line.strip().removesuffix("M")) <= allowance + 64


async def test_a_spare_gets_the_allowance_of_the_job_that_takes_it(lab: Lab) -> None:
    spare = dataclasses.replace(lab.spec(), spare=True)
    await lab.hypervisor.create(spare)
    parked = (await lab.hypervisor.observe()).vms[spare.name].disk
    (line,) = await answers_of(lab, spare, AVAILABLE, dataclasses.replace(BASE, disk=1000))
    view = await lab.hypervisor.observe()
    assert int(line.strip().removesuffix("M")) >= 1000
    assert parked == view.hosts["h"].disks["slim"].overhead
    assert view.vms[spare.name].disk == parked + 1000


@pytest.mark.slow
async def test_a_user_who_fills_the_disk_is_told_so_and_loses_no_data(lab: Lab) -> None:
    """With one large file, and then with as many small ones as there is room and there are inodes for."""
    spec = lab.spec()
    await lab.hypervisor.create(spec)
    fill = (
        f'{AS_ANN} bash -c \'cd /tmp; dd if=/dev/zero of=large bs=1M 2>&1 | grep -o "No space.*"; sync large;'
        " rm large; mkdir small; cd small; for n in $(seq 20); do mkdir $n; for m in $(seq 400); do echo $m > $n/$m;"
        ' done; done; dd if=/dev/zero of=large bs=1M 2>&1 | grep -o "No space.*"; sync large; echo ann $?\';'
        " sync; dmesg | grep -c 'I/O error'"
    )
    assert await answers_of(lab, spec, fill) == ["No space left on device", "No space left on device", "ann 0", "0"]
    taken, most = await files_of(lab, spec.name)
    assert SCRATCH <= taken < most - 100, "what the host permits is not used up"


async def test_root_in_a_guest_can_write_no_more_than_its_vm_claims(lab: Lab) -> None:
    spec = lab.spec()
    await lab.hypervisor.create(spec)
    most = (await lab.hypervisor.observe()).hosts["h"].disk_cost("slim", CloneKind.INSTANT).of(SCRATCH)
    write = (
        f"rm /.multiverse-reserve; dd if=/dev/zero of=/tmp/large bs=1M count={most + 100} conv=fsync 2>&1"
        " | grep -o 'Input/output error'; dmesg | grep -c 'I/O error' | head -c 1; echo"
    )
    said = await answers_of(lab, spec, write)
    assert said[0] == "Input/output error", said
    assert await files_of(lab, spec.name) == (most, most)
    assert await lab.condition(spec.name) is VmCondition.RUNNING
    facts = await lab.hypervisor.examine()
    assert facts[spec.name]["hostname"] == spec.name, "the guest answers"
