"""What is wrong in a file of settings, with its line, and where each value comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multiverse.config import LeaseSettings, Settings, load
from multiverse.core.errors import Refused
from multiverse.images.catalog import FILES, Image, write_manifest
from multiverse.site.setting_files import COMPUTED, DEFAULT, FileLine, mistakes_in, values_in

WRONG = """\
include = "site.toml"
slurm.partiton = "vm"
cores = 4
[host]
cores = "many"
memory = 100
overcommit = 0.5
[[hosts]]
nodes = "n[1-"
[[hosts]]
nodes = "n3"
core = 4
[lease]
partition = "batch"
[network]
gateway = "10.1.0.1"
reach = "all"
[image]
tmp_disk = 10
[[pool]]
min = 4
max = 2
"""
INCLUDED = """\
qemu = { accel = "xen", bridge = "a-name-that-is-too-long" }
[[mounts]]
sourse = "a:/b"
"""


def write(directory: Path, text: str, included: str = "") -> Path:
    (directory / "m.toml").write_text(text)
    (directory / "site.toml").write_text(included)
    return directory / "m.toml"


def put_image(images: Path, name: str) -> None:
    made = Image(name, "slim", "k", "b", images / name, "", "6.1", "bookworm")
    made.path.mkdir()
    for file in FILES:
        (made.path / file).touch()
    write_manifest(made, made.path)


def test_every_mistake_is_found_at_once_each_with_its_line(tmp_path: Path) -> None:
    found = [
        (one.line and (one.line.file.name, one.line.number), str(one.mistake))
        for one in mistakes_in(write(tmp_path, WRONG, INCLUDED))
    ]
    assert found == [
        (("m.toml", 2), "slurm.partiton: no such key, did you mean partition?"),
        (("m.toml", 3), "cores: no such key; it is a key of [host] and [hosts]"),
        (("m.toml", 5), 'host.cores: must be a whole number, not "many"'),
        (("m.toml", 6), "host.memory: must be at least qemu.base_memory, 288 MiB"),
        (("m.toml", 7), "host.overcommit: must be at least 1, not 0.5"),
        (("m.toml", 9), "hosts.1.nodes: 'n[1-' is no node set: missing bracket: \"n[1-\""),
        (("m.toml", 10), "hosts.2: host.memory: must be at least qemu.base_memory, 288 MiB"),
        (("m.toml", 10), "hosts.2: qemu.bridge: an interface name has 1 to 15 bytes, without blanks and slashes"),
        (("m.toml", 12), "hosts.2.core: no such key, did you mean cores?"),
        (("m.toml", 13), "lease: must be an array of tables: begin each with [[lease]]"),
        (("m.toml", 16), "network.gateway: 10.1.0.1 is not in network.subnet 10.213.0.0/16"),
        (("m.toml", 17), "network.reach: must be 'job', 'user' or 'site', not \"all\""),
        (("m.toml", 19), "image.scratch: must be at least 64 MiB and at most image.tmp_disk, 10 MiB"),
        (("m.toml", 20), "pool.1: max must be at least 1, and not less than min"),
        (("site.toml", 1), "qemu.accel: must be 'auto', 'kvm' or 'tcg', not \"xen\""),
        (("site.toml", 1), "qemu.bridge: an interface name has 1 to 15 bytes, without blanks and slashes"),
        (("site.toml", 2), "mounts.1.source: must be given"),
        (("site.toml", 2), "mounts.1.target: must be given"),
        (("site.toml", 3), "mounts.1.sourse: no such key, did you mean source?"),
    ]  # fmt: skip


def test_a_wrong_value_is_not_reported_as_a_contradiction_too(tmp_path: Path) -> None:
    # With the default of host.memory, base_memory would contradict it.
    path = write(tmp_path, '[host]\nmemory = "much"\n[qemu]\nbase_memory = 8192\n')
    assert [str(one.mistake) for one in mistakes_in(path)] == ['host.memory: must be a whole number, not "much"']


def test_a_contradiction_with_a_default_has_the_line_of_the_key_that_is_there(tmp_path: Path) -> None:
    (wrong,) = mistakes_in(write(tmp_path, "\n[qemu]\nbase_memory = 8192\n"))
    assert wrong.mistake.key == ("host", "memory") and wrong.line == FileLine(tmp_path / "m.toml", 3)


def test_what_an_included_file_overrides_is_no_mistake(tmp_path: Path) -> None:
    assert not mistakes_in(write(tmp_path, 'include = "site.toml"\n[host]\ncores = "many"\n', "[host]\ncores = 2\n"))


def test_errors_of_syntax_tell_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"m.toml is not TOML: .*line 2, column 5"):
        mistakes_in(write(tmp_path, "a = 1\nb = = 2\n"))
    with pytest.raises(Refused, match=r"site.toml is not TOML"):
        mistakes_in(write(tmp_path, 'include = "site.toml"\n', "[["))


def wrong_images(file: Path) -> list[tuple[str, int | None]]:
    return [(str(one.mistake), one.line and one.line.number) for one in mistakes_in(file, images=True)]


def test_an_image_that_no_directory_of_images_has_is_a_mistake(tmp_path: Path) -> None:
    mine, shared = tmp_path / "images", tmp_path / "shared"
    text = (
        f'qemu.images = "{mine}"\nimage.source = "{shared}"\nimage.default = "slim"\n'
        '[[pool]]\nimage = "big"\n[[pool]]\nimage = "slm"\n'
    )
    file = write(tmp_path, text)
    mine.mkdir()
    put_image(mine, "slim")
    assert not wrong_images(file), "the other directory is not there: it may be of another machine"
    shared.mkdir()
    put_image(shared, "big")
    said = f"pool.2.image: there is no image 'slm' in {mine}, {shared}: build it, or name one of big, slim"
    assert wrong_images(file) == [(said, 7)]
    assert not mistakes_in(file), "a daemon reads its settings again also while an image is being replaced"


def test_before_any_image_is_made_none_is_missing(tmp_path: Path) -> None:
    file = write(tmp_path, f'qemu.images = "{tmp_path}"\nimage.default = "slm"\n')
    assert not wrong_images(file)
    put_image(tmp_path, "slim")
    assert wrong_images(file) == [
        (f"image.default: there is no image 'slm' in {tmp_path}: build it, or name one of slim", 2)
    ]


def by_key(path: Path, machine: str = "n2.example.org") -> dict[str, tuple[Any, Any]]:
    return {
        one.key: (one.value, one.source.number if isinstance(one.source, FileLine) else one.source)
        for one in values_in(path, machine)
    }


def test_each_value_says_where_it_comes_from(tmp_path: Path) -> None:
    text = (
        'include = "site.toml"\npoll = 3\n[host]\ncores = 4\nmemory = 8192\n[[hosts]]\nnodes = "n[1-3]"\nmemory = 512\n'
    )
    got = by_key(write(tmp_path, text, "\n\npoll = 4.0\n[[pool]]\nmin = 3\n"))
    assert got["poll"] == (4.0, 3) and got["history_days"] == (30.0, DEFAULT)
    assert got["host.name"] == ("n2", COMPUTED) and got["host.cores"] == (4, 4) and got["host.memory"] == (512, 8)
    assert got["hosts.1.memory"] == (512, 8) and "hosts.1.cores" not in got, "as in [host]"
    assert got["pool.1.min"] == (3, 5) and got["pool.1.max"] == (0, DEFAULT)
    assert got["users.socket"] == (Path("/run/multiverse/users.sock"), COMPUTED)
    assert by_key(tmp_path / "m.toml", "head")["host.memory"] == (8192, 5), "which is of no class"


def test_an_array_that_is_overridden_has_the_lines_of_the_other_file(tmp_path: Path) -> None:
    text = 'include = "site.toml"\n[[lease]]\npartition = "a"\nmax = 3\n[vxlan]\naddresses = [["a", "192.0.2.1"]]\n'
    path = write(tmp_path, text, '[[lease]]\npartition = "b"\n[vxlan]\nport = 5\n')
    got = by_key(path)
    assert load(path).lease == (LeaseSettings("b"),)
    assert got["lease.1.partition"] == ("b", 2) and got["lease.1.max"] == (1, DEFAULT)
    assert got["vxlan.addresses"][1] == 6 and got["vxlan.port"] == (5, 4)


def test_all_keys_are_shown_and_an_empty_file_has_defaults_alone(tmp_path: Path) -> None:
    got = by_key(write(tmp_path, ""))
    assert {source for _, source in got.values()} == {DEFAULT, COMPUTED}
    assert got["host.cores"] == (Settings().host.cores, DEFAULT) and got["hosts"] == ((), DEFAULT)


def test_passwords_in_commands_are_hidden(tmp_path: Path) -> None:
    command = '["fence", "-a", "{host}", "-p", "secret1", "--password=secret2", "--passwd", "secret3", "-o", "off"]'
    shown = by_key(write(tmp_path, f"[fence]\ncommand = {command}\n"))["fence.command"][0]
    hidden = "(hidden)"
    assert shown == ("fence", "-a", "{host}", "-p", hidden, f"--password={hidden}", "--passwd", hidden, "-o", "off")
