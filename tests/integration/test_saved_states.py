"""The states of saved jobs: encrypted, damaged, in a full storage, of other kinds of clones, and on another host."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.core.errors import Damaged, Gone
from multiverse.core.model.basics import CloneKind
from multiverse.host import manifest
from multiverse.host.qemu.library import QemuHost
from tests.integration.conftest import LabUnderTest
from tests.integration.saved_jobs import SavedJob, Saver
from tests.integration.small_disk import small_disk
from tests.integration.test_saving import TICKS, go, goes_on, saver

__all__ = ["saver"]  # a fixture
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_controller")]

KEY, OTHER_KEY = "ab" * 32, "cd" * 32
SECRET = "a secret that only this job knows"
SCRIPT = f"secret='{SECRET}'; echo \"$secret\" >/tmp/kept; {TICKS}; cat /tmp/kept; exit 7"


def saved(saver: Saver, kind: CloneKind = CloneKind.INSTANT) -> SavedJob:
    job = saver.run(SCRIPT, kind=kind)
    saver.says("tick")
    saver.save(job)
    return job


def ends_well(saver: Saver, job: SavedJob) -> None:
    goes_on(saver)
    go(saver)
    assert saver.end(job) == ("FAILED", "7:0")
    ticks = [line for line in saver.output().splitlines() if line.startswith("tick")]
    assert len(ticks) == len(set(ticks)), "each line was written once"
    assert saver.output().splitlines()[-1] == SECRET, "its files on the disk are as they were"


def fails_to_restore(saver: Saver, job: SavedJob, error: type[Exception], match: str) -> None:
    runs, key = job.runs, saver.key
    with pytest.raises(error, match=match):
        saver.restore(job)
    saver.host.destroy(job.vm, 0.0, job.spec.token)
    job.runs, saver.key = runs, key


def test_an_encrypted_state_tells_nothing_and_goes_on_with_its_key_alone(saver: Saver) -> None:
    saver.key = KEY
    job = saved(saver)
    for file in ("state.zst", "disk.qcow2"):
        content = (saver.place(job) / file).read_bytes()
        assert content.startswith(b"Salted__") and SECRET.encode() not in content
    for key in ("", OTHER_KEY):
        saver.key = key
        fails_to_restore(saver, job, Damaged, "key")
    saver.key = KEY
    facts = saver.place(job) / "save.json"
    whole = facts.read_text()
    facts.write_text(whole.replace('"total_cpus": 1', '"total_cpus": 2'))
    fails_to_restore(saver, job, Damaged, "not as it was saved")
    facts.write_text(whole)
    saver.restore(job)
    ends_well(saver, job)


def test_damage_is_told_before_anything_goes_on_and_what_is_mended_goes_on(saver: Saver) -> None:
    job = saved(saver)
    for file in ("state.zst", "disk.qcow2"):
        path = saver.place(job) / file
        whole = path.read_bytes()
        middle = len(whole) // 2
        for damaged in (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], whole[:middle], b""):
            path.write_bytes(damaged)
            fails_to_restore(saver, job, Damaged, "not as it was saved")
        path.write_bytes(whole)
    away = saver.place(job).with_name("away")
    saver.place(job).rename(away)
    fails_to_restore(saver, job, Damaged, "is missing")
    away.rename(saver.place(job))
    directory = saver.settings.save.directory
    directory.rename(directory.with_name(f"{directory.name}-away"))
    fails_to_restore(saver, job, Gone, "out of reach")
    directory.with_name(f"{directory.name}-away").rename(directory)
    saver.restore(job)
    ends_well(saver, job)


@pytest.fixture
def full(lab: LabUnderTest, saver: Saver) -> Iterator[Saver]:
    """A storage that has room for a part of a state."""
    directory = saver.settings.save.directory
    with small_disk(directory.with_name(f"{directory.name}-full"), "tmpfs", 8) as place:
        place.chmod(0o700)
        made = Saver(lab, place)
        try:
            yield made
        finally:
            made.close()


def test_what_cannot_be_written_goes_on_in_place(full: Saver) -> None:
    job = full.run(SCRIPT)
    full.says("tick")
    full.save(job, keep=True)
    assert not list(full.settings.save.directory.glob("*mv*")), "nothing is left of what was tried"
    view = full.host.observe()
    shown = view.saved[f"{job.vm}-{job.runs}"]
    assert shown.kept and shown.token == job.spec.token and job.vm not in view.vms
    full.restore(job)
    assert job.vm in full.host.observe().vms
    ends_well(full, job)


@pytest.mark.slow
def test_what_is_kept_in_memory_is_discarded_as_a_whole(full: Saver) -> None:
    job = full.run(SCRIPT)
    full.says("tick")
    full.save(job, keep=True)
    known = manifest.read(full.settings.qemu.vms / job.vm)
    assert known is not None and known.process.is_alive()
    full.host.discard(f"{job.vm}-{job.runs}")
    view = full.host.observe()
    assert not view.saved and job.vm not in view.vms and not known.process.is_alive()
    assert not (full.settings.qemu.vms / job.vm).exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CloneKind.FULL, CloneKind.LINKED])
def test_a_clone_that_booted_is_saved_with_its_disk(saver: Saver, kind: CloneKind) -> None:
    job = saved(saver, kind)
    image = saver.host._context.image("slim").disk
    assert (saver.place(job) / "disk.qcow2").stat().st_size < image.stat().st_size / 4, "only what differs"
    saver.restore(job)
    goes_on(saver)
    saver.cycle(job)
    ends_well(saver, job)


@pytest.mark.slow
def test_a_job_goes_on_on_a_host_whose_images_are_elsewhere(saver: Saver, lab: LabUnderTest) -> None:
    job = saved(saver)
    with tempfile.TemporaryDirectory(prefix="mvh-", dir="/var/tmp") as place:
        root = Path(place)
        root.chmod(0o711)
        copy = ["cp", "-rL", "--sparse=always", str(saver.settings.qemu.images / "slim"), str(root / "images")]
        (root / "images").mkdir(mode=0o755)
        subprocess.run(copy, check=True)
        qemu = replace(
            saver.settings.qemu,
            images=root / "images",
            vms=root / "vms",
            run=root / "run",
            templates=root / "templates",
        )
        other = Saver(lab, saver.settings.save.directory)
        other.host.close()
        other.settings = replace(other.settings, qemu=qemu)
        other.host = QemuHost(replace(other.host.config, images=qemu.images, vms=qemu.vms, run=qemu.run,
                                      templates=qemu.templates))  # fmt: skip
        other.host.check()
        try:
            assert other.host._context.image("slim").disk != saver.host._context.image("slim").disk
            other.adopt(job)
            other.restore(job)
            ends_well(other, job)
        finally:
            other.close()


def test_nobody_but_root_reads_or_writes_a_state(saver: Saver, lab: LabUnderTest) -> None:
    job = saved(saver)
    place = saver.place(job)
    files = [place, *place.iterdir()]
    assert len(files) == 6 and all(path.stat().st_uid == 0 for path in files)
    assert saver.settings.save.directory.stat().st_mode & 0o777 == 0o700
    for path in files:
        for test in ("-r", "-w", "-x", "-e"):
            assert lab.run("test", test, str(path), user=lab.user, check=False).returncode != 0, (test, path)
    assert os.geteuid() == 0 and (place / "save.json").exists(), "root does"
