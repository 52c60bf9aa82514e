"""How large the files of VMs can become, and what a manifest says of it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import DiskCost, ImageDisk
from multiverse.host import manifest
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.qemu import disks, lifecycle
from multiverse.host.qemu.context import QemuHostConfig
from multiverse.host.qemu.library import QemuHost
from multiverse.system.processes import ProcessIdentity
from tests.unit.test_host_allocation import ONE, config, qemu, record

__all__ = ["config", "qemu"]  # fixtures
GIB = 1 << 30


def test_a_disk_of_16_gib_costs_its_inodes_and_tables_beside_the_allowance() -> None:
    """256 MiB of inodes, 1 MiB of bitmaps and 2.5 MiB of tables, rounded up, and what the node itself writes."""
    assert disks.image_disk(16 * GIB) == ImageDisk(16384 + 4, 260 + disks._NODE_FILES)


def test_a_limited_vm_claims_its_allowance_and_another_one_the_whole_disk() -> None:
    disk = ImageDisk(16388, 452)
    assert [disk.cost(limited=True).of(size) for size in (0, 2048)] == [452, 2500]
    assert [disk.cost(limited=False).of(size) for size in (0, 2048, 20000)] == [16388, 16388, 20000]


@pytest.mark.parametrize("kind", ["raw", "qcow2"])
def test_the_size_that_a_guest_sees_is_read_from_the_file(tmp_path: Path, kind: str) -> None:
    subprocess.run(["qemu-img", "create", "-q", "-f", kind, tmp_path / "disk", "3G"], check=True)
    assert disks.virtual_size(tmp_path / "disk") == 3 * GIB
    assert disks.virtual_size(tmp_path / "none") == 0


def test_a_manifest_keeps_what_the_disk_costs(tmp_path: Path) -> None:
    known = Manifest("mva-1", CloneKind.LINKED, VmPhase.PARKED, "02:00:00:00:00:01", 1, 256,
                     disk_cost=DiskCost(0, 452), disk=2500)  # fmt: skip
    manifest.write(tmp_path, known)
    assert manifest.read(tmp_path) == known


def test_a_host_says_what_its_vms_can_write(config: QemuHostConfig, qemu: ProcessIdentity) -> None:
    os.truncate(config.images / "slim" / "disk.raw", GIB)
    record(config.vms, ONE, qemu, disk_cost=DiskCost(0, 452), disk=2500)
    view = QemuHost(config).observe()
    assert view.hosts["h"].disks == {"slim": disks.image_disk(GIB)}
    assert view.vms[ONE.name].disk == 2500


@pytest.mark.parametrize(("abilities", "least"), [([], 1026), (["limit_disk"], 0)])
def test_a_vm_is_limited_to_its_allowance_if_its_image_says_that_guests_keep_to_it(
    config: QemuHostConfig, abilities: list[str], least: int
) -> None:
    file = config.images / "slim" / "image.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"abilities": abilities}))
    os.truncate(config.images / "slim" / "disk.raw", GIB)
    host = QemuHost(config)
    image = host._context.image("slim")
    shown = host.observe().hosts["h"]
    for kind in (CloneKind.INSTANT, CloneKind.LINKED, CloneKind.FULL):
        assert host._context.disk_cost(image, kind) == shown.disk_cost("slim", kind), "enforced as it is claimed"
    assert shown.disk_cost("slim", CloneKind.LINKED).least == least
    assert shown.disk_cost("slim", CloneKind.FULL) == DiskCost(1026, 0)


def test_a_vm_is_limited_as_it_is_started(config: QemuHostConfig, qemu: ProcessIdentity) -> None:
    known = record(config.vms, ONE, qemu, disk_cost=DiskCost(0, 452), disk=452)
    for _ in range(2):  # a start that was interrupted is repeated
        assert lifecycle._limit_disk(known, 2048) == replace(known, disk=2500)
        assert resource.prlimit(qemu.pid, resource.RLIMIT_FSIZE) == (2500 << 20, 2500 << 20)


@pytest.mark.parametrize(
    ("kind", "asked", "told"),
    [
        (CloneKind.LINKED, 0, "multiverse.disk=100"),
        (CloneKind.LINKED, 3000, "multiverse.disk=3000"),
        (CloneKind.FULL, 0, ""),
    ],
)
def test_a_guest_that_boots_is_told_its_allowance_unless_its_disk_is_a_copy(
    config: QemuHostConfig, kind: CloneKind, asked: int, told: str
) -> None:
    file = config.images / "slim" / "image.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"abilities": ["limit_disk"]}))
    context = QemuHost(replace(config, scratch=100))._context
    image, spec = context.image("slim"), replace(ONE, kind=kind, size=Size(1, 256, asked))
    words = context.vm_machine(spec, image, None, Path("/disk.qcow2")).cmdline.split()
    assert [word for word in words if word.startswith("multiverse.disk")] == ([told] if told else [])
    template = context.template_machine(image, Size(1, 256))(Path("/disk"), Path("/memory"))
    assert "multiverse.disk=100" in template.cmdline.split(), "so another figure makes another template"
