"""How large the files of VMs can become, and what a manifest says of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from multiverse.core.model import CloneKind, DiskCost, ImageDisk
from multiverse.host import disks, manifest
from multiverse.host.manifest import Manifest, VmPhase

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
    raw = json.loads((tmp_path / manifest.FILE).read_text())
    for field in ("disk_cost", "disk"):
        del raw[field]
    (tmp_path / manifest.FILE).write_text(json.dumps(raw))
    earlier = manifest.read(tmp_path)
    assert earlier is not None and (earlier.disk_cost, earlier.disk) == (None, 0), "of an earlier release"
