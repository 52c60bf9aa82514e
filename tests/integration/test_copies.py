"""A full clone's disk on a file system that can share blocks between files."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse.host.qemu import disks

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")]


@pytest.fixture
def reflinks(tmp_path: Path) -> Iterator[Path]:
    """A file system that can share blocks between files."""
    if not Path("/dev/loop-control").exists() or "btrfs" not in Path("/proc/filesystems").read_text():
        pytest.skip("this kernel mounts no file system that shares blocks")
    image, place = tmp_path / "btrfs", tmp_path / "mounted"
    with image.open("wb") as file:
        file.truncate(256 << 20)
    place.mkdir()
    subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_the_disk_of_a_full_clone_shares_unwritten_blocks(reflinks: Path) -> None:
    disk, copy = reflinks / "disk.raw", reflinks / "copy.raw"
    disk.write_bytes(os.urandom(32 << 20))
    os.sync()
    before = shutil.disk_usage(reflinks).used
    assert disks.copy_disk(disk, copy) == "reflink"
    os.sync()
    assert shutil.disk_usage(reflinks).used - before < 4 << 20
    assert filecmp.cmp(disk, copy, shallow=False)
    with copy.open("r+b") as file:
        file.write(b"mine")
    assert disk.read_bytes()[:4] != b"mine" == copy.read_bytes()[:4]
