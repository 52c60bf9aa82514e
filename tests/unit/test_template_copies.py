"""Templates that hosts share by a directory: found by key and CPU, whole or not at all. Without QEMU's machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from multiverse.core.errors import Refused
from multiverse.host.qemu.template_copies import TemplateCopies

pytestmark = pytest.mark.skipif(not shutil.which("qemu-img"), reason="needs qemu-img")
NAME = "slim@1x256"


def copies(directory: Path, cpu: str = "tcg") -> TemplateCopies:
    return TemplateCopies(directory / "shared", cpu, lambda path: None)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A template whose disk is on top of an image's."""
    made = tmp_path / NAME
    made.mkdir()
    with (made / "memory").open("wb") as file:
        file.write(b"kernel")
        file.truncate(8 << 20)
    for name in ("state", "kernel.stub", "initrd.stub"):
        (made / name).write_bytes(name.encode())
    argv = ["qemu-img", "create", "-q", "-u", "-f", "qcow2", "-b", "/there/disk.raw", "-F", "raw"]
    subprocess.run([*argv, str(made / "disk.qcow2"), "1M"], check=True)
    return made


def taken(copies: TemplateCopies, tmp_path: Path, key: str = "k") -> tuple[int | None, Path]:
    work = tmp_path / f"work{os.urandom(3).hex()}"
    work.mkdir()
    return copies.take(NAME, key, work, Path("/here/disk.raw")), work


def test_what_one_host_offers_another_one_takes_on_top_of_its_own_image(template: Path, tmp_path: Path) -> None:
    for _ in range(2):
        copies(tmp_path).offer(template, "k", 4)
    possible, work = taken(copies(tmp_path), tmp_path)
    assert possible == 4
    assert sorted(path.name for path in work.iterdir()) == sorted(path.name for path in template.iterdir())
    assert (work / "memory").read_bytes() == (template / "memory").read_bytes()
    assert (work / "memory").stat().st_blocks < 100, "a page that was never written takes none"
    shown = subprocess.run(["qemu-img", "info", "-U", str(work / "disk.qcow2")], capture_output=True, text=True)
    assert "/here/disk.raw" in shown.stdout and "/there" not in shown.stdout
    assert len(list((tmp_path / "shared").iterdir())) == 1


def test_another_key_or_another_cpu_is_not_taken(template: Path, tmp_path: Path) -> None:
    copies(tmp_path).offer(template, "k", 4)
    assert taken(copies(tmp_path), tmp_path, "other")[0] is None
    assert taken(copies(tmp_path, "another CPU"), tmp_path)[0] is None


def test_a_copy_that_is_damaged_or_not_trusted_is_not_taken(template: Path, tmp_path: Path) -> None:
    mine = copies(tmp_path)
    mine.offer(template, "k", 4)

    def refuse(path: Path) -> None:
        raise Refused(f"others may write to {path}")

    assert taken(TemplateCopies(mine.directory, mine.cpu, refuse), tmp_path)[0] is None
    (place,) = mine.directory.iterdir()
    with (place / "memory").open("r+b") as file:
        file.write(b"K")
    possible, work = taken(mine, tmp_path)
    assert possible is None and list(work.iterdir()) == []
    (place / "state").unlink()
    assert taken(mine, tmp_path)[0] is None


def test_old_copies_and_what_a_crash_left_give_way(template: Path, tmp_path: Path) -> None:
    mine = copies(tmp_path)
    mine.offer(template, "old", 4)
    (old,) = mine.directory.iterdir()
    left, other = mine.directory / f".{NAME}@new-x", mine.directory / "fat@1x256@0123456789abcdef"
    for path in (left, other):
        path.mkdir()
    for path in (old, left, other):
        os.utime(path, (1, 1))
    mine.offer(template, "k", 4)
    assert not old.exists() and not left.exists() and other.exists()
    assert taken(mine, tmp_path)[0] == 4


def test_a_host_that_cannot_write_there_offers_nothing_and_goes_on(template: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").write_text("no directory")
    copies(tmp_path).offer(template, "k", 4)
    assert taken(copies(tmp_path), tmp_path)[0] is None
