"""Images: their names, their keys, their modules. Building one for real is the integration tests' business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multiverse.core.errors import Broken, Refused
from multiverse.guest import image, initramfs


@pytest.mark.parametrize("name", ["", "../x", "A", "a/b", "-a", "x" * 41])
def test_a_name_that_cannot_be_a_directory_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(Refused):
        image.build(name, "slim", tmp_path)


def test_a_package_name_is_no_option(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--hook"):
        image.build("slim", "slim", tmp_path, packages=("--hook",))


def test_an_absent_image_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="none"):
        image.load(tmp_path, "slim")
    assert image.list_images(tmp_path) == []


def test_half_an_image_is_none(tmp_path: Path) -> None:
    (tmp_path / "slim").mkdir()
    facts = {
        "name": "slim",
        "flavour": "slim",
        "key": "k",
        "base": "b",
        "cmdline": "",
        "release": "6",
        "suite": "s",
        "packages": [],
    }
    (tmp_path / "slim/image.json").write_text(json.dumps(facts))
    with pytest.raises(Refused, match="lacks"):
        image.load(tmp_path, "slim")
    assert image.list_images(tmp_path) == [], "it may be being copied"
    for name in ("disk.raw", "vmlinuz", "initrd.img"):
        (tmp_path / "slim" / name).touch()
    assert image.load(tmp_path, "slim").key == "k"
    assert [i.name for i in image.list_images(tmp_path)] == ["slim"]


def test_the_key_tells_every_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "debian.sources"
    source.write_text("Types: deb\n")
    hook = tmp_path / "10-site"
    hook.write_text("#!/bin/sh\n")
    agent_file = tmp_path / "agent.py"
    agent_file.write_text("one")
    monkeypatch.setattr(image.agent, "__file__", str(agent_file))

    def keys(
        packages: tuple[str, ...] = (), hooks: tuple[Path, ...] = (), flavour: image.Flavour = "slim", suite: str = "a"
    ) -> tuple[str, str]:
        return image._Recipe(flavour, suite, packages, (source,), hooks).keys()

    first = keys()
    assert keys() == first
    others = [keys(("hpcc",)), keys(hooks=(hook,)), keys(flavour="stock"), keys(suite="b")]
    hook.write_text("#!/bin/sh\ntrue\n")
    others.append(keys(hooks=(hook,)))
    source.write_text("Types: deb deb-src\n")
    others.append(keys())
    assert len({base for base, _ in [first, *others]}) == len(others) + 1
    before = keys()
    agent_file.write_text("two")
    assert keys()[0] == before[0] and keys()[1] != before[1]


def test_an_image_keeps_no_key_and_no_name_of_its_own(tmp_path: Path) -> None:
    files = ("etc/ssh/ssh_host_ed25519_key", "etc/ssh/ssh_host_ed25519_key.pub", "etc/munge/munge.key",
             "var/lib/systemd/random-seed", "etc/machine-id", "etc/shadow", "etc/ssh/sshd_config")  # fmt: skip
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("root:secret:1::::::\n")
    image._strip_identity(tmp_path)
    left = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert left.pop("etc/ssh/sshd_config") and left.pop("etc/hosts") == "127.0.0.1 localhost\n"
    assert left == {"etc/machine-id": "", "etc/hostname": "", "etc/shadow": "root:!*:1::::::\n"}


def test_modules_come_after_what_they_need(tmp_path: Path) -> None:
    base = tmp_path / "lib/modules/6.1"
    base.mkdir(parents=True)
    (base / "modules.dep").write_text("a/net-x.ko: b/failover.ko c/core.ko\nb/failover.ko: c/core.ko\nc/core.ko:\n")
    (base / "modules.builtin").write_text("kernel/ext4.ko\n")
    assert initramfs.module_files(tmp_path, "6.1", ("net_x", "ext4")) == ["c/core.ko", "b/failover.ko", "a/net-x.ko"]
    with pytest.raises(Broken, match="absent"):
        initramfs.module_files(tmp_path, "6.1", ("absent",))
