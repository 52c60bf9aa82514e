"""What VMs are made from lies where nobody writes but root and us; all else is refused, with the next step."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multiverse.config import HostSettings, QemuSettings, Settings
from multiverse.core.errors import Refused
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.vm import TemplateKey, VmSpec
from multiverse.drivers.qemu.driver import QemuHypervisor
from multiverse.host import network, path_security

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give things away")

OTHER = 61999


@pytest.fixture
def memory() -> Iterator[Path]:
    """A place that all may write to, as /dev/shm is."""
    place = Path(tempfile.mkdtemp(prefix="mvtest-"))
    place.chmod(0o1777)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def masked() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.usefixtures("masked")
def test_what_is_missing_is_made_and_others_can_go_through(memory: Path) -> None:
    place = memory / "multiverse/deep/templates"
    for _ in range(2):
        path_security.make_directory(place, 0o711)
        assert [mode(path) for path in (place.parents[1], place.parent, place)] == [0o755, 0o755, 0o711]
    place.chmod(0o700)
    path_security.make_directory(place, 0o711)
    assert mode(place) == 0o711


def _given(path: Path) -> None:
    path.mkdir()
    os.chown(path, OTHER, OTHER)


def _grouped(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)
    os.chown(path, 0, OTHER)


def _open(path: Path) -> None:
    path.mkdir()
    path.chmod(0o757)


def _linked(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to("elsewhere")
    os.chown(path, OTHER, OTHER, follow_symlinks=False)


def _linked_twice(path: Path) -> None:
    _linked(path.parent / "between")
    path.symlink_to(path.parent / "between/../between")


def _sticky(path: Path) -> None:
    path.mkdir()
    path.chmod(0o1777)


def _circular(path: Path) -> None:
    path.symlink_to(path)


_HARMS = (_given, _grouped, _open, _linked, _linked_twice, _circular)


@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize("harm", _HARMS)
def test_what_somebody_else_could_change_is_refused(memory: Path, harm: Callable[[Path], None], above: bool) -> None:
    harm(memory / "multiverse")
    place = memory / "multiverse/templates" if above else memory / "multiverse"
    with pytest.raises(Refused) as caught:
        path_security.make_directory(place, 0o711)
    assert str(memory) in caught.value.message and "under [qemu]" in caught.value.hint
    if harm is not _circular:
        assert "files of" in caught.value.message


def test_sticky_is_good_enough_above_a_place_alone(memory: Path) -> None:
    _sticky(memory / "multiverse")
    path_security.make_directory(memory / "multiverse/templates", 0o711)
    with pytest.raises(Refused, match="others may write"):
        path_security.check(memory / "multiverse")


def test_a_link_of_root_s_and_a_group_of_his_own_are_good(memory: Path) -> None:
    (memory / "data").mkdir()
    (memory / "data").chmod(0o775)
    (memory / "multiverse").symlink_to("data")
    path_security.make_directory(memory / "multiverse/templates", 0o711)
    assert mode(memory / "data/templates") == 0o711


@pytest.fixture
def host(memory: Path, tmp_path: Path) -> Iterator[QemuHypervisor]:
    """A host side whose QEMU only says its version, its places yet to be made; with an image of two files."""
    binary = tmp_path / "qemu"
    binary.write_text("#!/bin/sh\necho QEMU emulator version 8.2.0\n")
    binary.chmod(0o755)
    image = tmp_path / "images/slim"
    image.mkdir(parents=True)
    for name in ("disk.raw", "vmlinuz", "initrd.img"):
        (image / name).touch()
    (image / "image.json").write_text(
        '{"name": "slim", "flavour": "slim", "key": "k", "base": "b", "path": "", "cmdline": "", "release": "",'
        ' "suite": "", "packages": []}'
    )
    qemu = QemuSettings(str(binary), "tcg", images=image.parent, templates=memory / "multiverse/templates",
                        vms=memory / "state/vms", run=memory / "run/vms")  # fmt: skip
    made = QemuHypervisor(Settings(state_dir=tmp_path, host=HostSettings("h", 1, 256), qemu=qemu), "a")
    yield made
    made.close()


@pytest.fixture
def no_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "open_tap", lambda name, bridge: os.open("/dev/null", os.O_RDONLY))


@pytest.mark.usefixtures("masked", "no_taps")
def test_a_host_makes_its_places_or_says_whose_they_are(host: QemuHypervisor, memory: Path) -> None:
    host.check()
    assert [mode(memory / name) for name in ("multiverse", "state", "run")] == [0o755] * 3
    assert [mode(memory / name / "vms") for name in ("state", "run")] == [0o711, 0o700]
    for name in ("multiverse", "state", "run"):
        os.chown(memory / name, OTHER, 0)
        with pytest.raises(Refused, match=f"{memory / name} belongs to user {OTHER}"):
            host.check()
        os.chown(memory / name, 0, 0)
    host.check()


async def test_no_template_is_made_or_dropped_where_somebody_else_has_been_first(
    host: QemuHypervisor, memory: Path
) -> None:
    _given(memory / "multiverse")
    (memory / "multiverse/templates").mkdir()
    with pytest.raises(Refused, match="belongs to user"):
        await host.build_template(TemplateKey("h", "slim", Size(1, 256)))
    with pytest.raises(Refused, match="belongs to user"):
        await host.delete_all_templates()
    assert not list((memory / "multiverse/templates").iterdir())


@pytest.mark.parametrize("part", ["", "disk.raw", "image.json", "vmlinuz"])
async def test_an_image_that_is_somebody_else_s_is_not_used(host: QemuHypervisor, tmp_path: Path, part: str) -> None:
    kernel = tmp_path / "images/slim/vmlinuz"
    kernel.rename(tmp_path / "kernel")
    kernel.symlink_to("../../kernel")
    os.chown(tmp_path / "images/slim" / part, OTHER, OTHER)
    with pytest.raises(Refused, match=f"belongs to user {OTHER}"):
        await host.build_template(TemplateKey("h", "slim", Size(1, 256)))
    with pytest.raises(Refused, match=f"belongs to user {OTHER}"):
        await host.create(VmSpec("mva-1", "h", "slim", CloneKind.LINKED, Size(1, 256), "02:00:00:00:00:01"))
