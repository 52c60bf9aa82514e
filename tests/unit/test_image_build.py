"""Names, keys, manifests and kernel modules of images. The integration tests build a real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multiverse.cli.images import image_list
from multiverse.core.errors import Broken, Refused
from multiverse.guest.assemble import assemble
from multiverse.images import build as builder
from multiverse.images import catalog, initramfs
from multiverse.images.build import (
    AGENT_PATH,
    Input,
    Recipe,
    build,
    enable_unit,
    install_agent,
    kernel_release,
    mask_units,
    remove_dead_plugins,
    strip_identity,
)
from multiverse.images.catalog import Flavour, Image, list_images, load, write_manifest
from multiverse.images.description import ImageDescription


@pytest.mark.parametrize("name", ["", "../x", "A", "a/b", "-a", "x" * 41])
def test_a_name_that_cannot_be_a_directory_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(Refused):
        build(name, "slim", tmp_path)


def test_an_option_in_place_of_a_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--hook"):
        build("slim", "slim", tmp_path, packages=("--hook",))


def test_the_refusal_of_an_absent_image_lists_the_present_ones(tmp_path: Path) -> None:
    with pytest.raises(Refused) as nothing:
        load(tmp_path, "slim")
    assert "none" in nothing.value.hint
    assert list_images(tmp_path) == []
    complete(tmp_path, "stock")
    with pytest.raises(Refused) as other:
        load(tmp_path, "slim")
    assert "stock" in other.value.hint


def test_an_incomplete_image_is_refused_and_not_listed(tmp_path: Path) -> None:
    image = complete(tmp_path, "slim")
    image.initrd.unlink()
    with pytest.raises(Refused, match=r"initrd\.img"):
        load(tmp_path, "slim")
    assert list_images(tmp_path) == []
    image.initrd.touch()
    assert load(tmp_path, "slim") == image
    assert list_images(tmp_path) == [image]


def test_the_list_says_what_an_incomplete_image_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("slim", "stock", "whole"):
        complete(tmp_path, name)
    (tmp_path / "slim" / "disk.raw").unlink()
    (tmp_path / "stock" / "image.json").write_text("{")
    (tmp_path / "notes").mkdir()
    assert catalog.incomplete_images(tmp_path) == {
        "slim": "lacks disk.raw",
        "stock": "has no readable image.json",
    }
    image_list(tmp_path)
    text = " ".join(capsys.readouterr().out.split())
    assert "slim lacks disk.raw, so no VM is made of it to do: build it again" in text and "notes" not in text


def test_a_manifest_with_fields_of_a_later_release_is_read(tmp_path: Path) -> None:
    image = complete(tmp_path, "slim")
    file = image.path / "image.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"novelty": 1}))
    assert load(tmp_path, "slim") == image


def test_a_manifest_that_cannot_be_read_hides_no_other_image(tmp_path: Path) -> None:
    image = complete(tmp_path, "slim")
    (complete(tmp_path, "stock").path / "image.json").write_text("{}")
    assert list_images(tmp_path) == [image]


def complete(images: Path, name: str) -> Image:
    """An image whose files exist and are empty."""
    image = Image(name, "slim", "k", "b", images / name, "", "6", "s")
    image.path.mkdir()
    for file in (image.disk, image.kernel, image.initrd):
        file.touch()
    write_manifest(image, image.path)
    return image


def test_each_input_changes_the_key(tmp_path: Path) -> None:
    source = tmp_path / "debian.sources"
    source.write_text("Types: deb\n")
    hook = tmp_path / "10-site"
    hook.write_text("#!/bin/sh\n")

    def keys(
        packages: tuple[str, ...] = (),
        hooks: tuple[Path, ...] = (),
        flavour: Flavour = "slim",
        suite: str = "a",
        agent: str = "one",
    ) -> tuple[str, str]:
        return Recipe(flavour, suite, packages, (Input.read(source),), hooks, agent).keys()

    first = keys()
    assert keys() == first
    others = [keys(("hpcc",)), keys(hooks=(hook,)), keys(flavour="stock"), keys(suite="b")]
    hook.write_text("#!/bin/sh\ntrue\n")
    others.append(keys(hooks=(hook,)))
    source.write_text("Types: deb deb-src\n")
    others.append(keys())
    assert len({base for base, _ in [first, *others]}) == len(others) + 1
    before, other_agent = keys(), keys(agent="two")
    assert other_agent[0] == before[0] and other_agent[1] != before[1]


def test_a_change_of_the_assembled_agent_changes_the_key_of_the_image_and_not_that_of_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "debian.sources"
    source.write_text("Types: deb\n")
    monkeypatch.setattr(builder, "_suite", lambda: "bookworm")
    monkeypatch.setattr(builder, "_sources", lambda: (Input.read(source),))
    first = Recipe.of(ImageDescription())
    assert first.agent == assemble()
    monkeypatch.setattr(builder, "assemble", lambda: assemble() + "\n")
    second = Recipe.of(ImageDescription())
    assert second.keys()[0] == first.keys()[0]
    assert second.keys()[1] != first.keys()[1]


def test_an_image_keeps_no_key_and_no_name_of_its_own(tmp_path: Path) -> None:
    files = ("etc/ssh/ssh_host_ed25519_key", "etc/ssh/ssh_host_ed25519_key.pub", "etc/munge/munge.key",
             "var/lib/systemd/random-seed", "etc/machine-id", "etc/shadow", "etc/ssh/sshd_config")  # fmt: skip
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("root:secret:1::::::\n")
    strip_identity(tmp_path)
    left = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert left.pop("etc/ssh/sshd_config") and left.pop("etc/hosts") == "127.0.0.1 localhost\n"
    assert left == {"etc/machine-id": "", "etc/hostname": "", "etc/shadow": "root:!*:1::::::\n"}


def test_the_agent_is_installed_as_an_executable_with_the_given_text(tmp_path: Path) -> None:
    install_agent(tmp_path, "#!/usr/bin/python3\n")
    path = tmp_path / AGENT_PATH.lstrip("/")
    assert path.read_text() == "#!/usr/bin/python3\n"
    assert path.stat().st_mode & 0o777 == 0o755


def test_systemd_starts_the_agent_and_not_the_daemons_that_the_agent_starts(tmp_path: Path) -> None:
    units = tmp_path / "etc/systemd/system"
    (tmp_path / "etc/modules-load.d").mkdir(parents=True)
    (units / "multi-user.target.wants").mkdir(parents=True)
    (units / "multi-user.target.wants/munge.service").symlink_to("/lib/systemd/system/munge.service")
    enable_unit(tmp_path)
    assert f"ExecStart={AGENT_PATH}\n" in (units / "multiverse-agent.service").read_text()
    assert [path.name for path in (units / "multi-user.target.wants").iterdir()] == ["multiverse-agent.service"]
    for unit in ("slurmd.service", "munge.service"):
        assert (units / unit).readlink() == Path("/dev/null")


def test_a_unit_that_is_masked_is_a_link_to_nothing_whatever_was_there(tmp_path: Path) -> None:
    units = tmp_path / "etc/systemd/system"
    (units / "directory.service").mkdir(parents=True)
    (units / "file.service").write_text("[Unit]\n")
    (units / "link.service").symlink_to("/lib/systemd/system/link.service")
    names = ("directory.service", "file.service", "link.service", "absent.service")
    mask_units(tmp_path, names)
    assert {path.name: path.readlink() for path in units.iterdir()} == dict.fromkeys(names, Path("/dev/null"))


def test_the_newest_kernel_of_an_image_is_used(tmp_path: Path) -> None:
    (tmp_path / "boot").mkdir()
    with pytest.raises(Broken, match="kernel"):
        kernel_release(tmp_path)
    for release in ("6.1.0-18-amd64", "6.1.0-21-amd64"):
        (tmp_path / f"boot/vmlinuz-{release}").touch()
    assert kernel_release(tmp_path) == "6.1.0-21-amd64"


def test_modules_come_after_the_modules_that_they_need(tmp_path: Path) -> None:
    base = tmp_path / "lib/modules/6.1"
    base.mkdir(parents=True)
    (base / "modules.dep").write_text("a/net-x.ko: b/failover.ko c/core.ko\nb/failover.ko: c/core.ko\nc/core.ko:\n")
    (base / "modules.builtin").write_text("kernel/ext4.ko\n")
    assert initramfs.module_files(tmp_path, "6.1", ("net_x", "ext4")) == ["c/core.ko", "b/failover.ko", "a/net-x.ko"]
    with pytest.raises(Broken, match="absent"):
        initramfs.module_files(tmp_path, "6.1", ("absent",))


@pytest.mark.parametrize("has_library", [False, True])
def test_the_plugin_for_pmix_is_removed_where_it_cannot_be_loaded(tmp_path: Path, has_library: bool) -> None:
    plugins, library = tmp_path / "usr/lib/x86_64-linux-gnu/slurm-wlm", tmp_path / "usr/lib/x86_64-linux-gnu/pmix2/lib"
    for directory in (plugins, library):
        directory.mkdir(parents=True)
    for name in ("mpi_pmix.so", "mpi_pmix_v4.so", "mpi_pmi2.so"):
        (plugins / name).touch()
    if has_library:
        (library / "libpmix.so").touch()
    remove_dead_plugins(tmp_path)
    left = {path.name for path in plugins.iterdir()}
    assert left == {"mpi_pmi2.so", *(("mpi_pmix.so", "mpi_pmix_v4.so") if has_library else ())}
