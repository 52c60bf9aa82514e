"""Files that describe images: what is read, what is refused and where, and what changes an image."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from multiverse.core.errors import Refused
from multiverse.images import build as builder
from multiverse.images.build import Input, Recipe
from multiverse.images.description import ImageDescription, ImageDistribution, read_description
from multiverse.images.sources import of_suite, suites
from multiverse.site.setting_keys import tables_of

EXAMPLES = Path(__file__).parents[2] / "docs/examples/images"
SOURCES = """\
# of this machine
Types: deb
URIs: http://mirror/debian
Suites: bookworm bookworm-updates trixie
 trixie-updates
Components: main

Types: deb
URIs: http://mirror/security
Suites: bookworm-security
Components: main
"""


def write(directory: Path, text: str) -> Path:
    (directory / "science.toml").write_text(text)
    (directory / "motd").write_text("hello\n")
    (directory / "hook.sh").write_text("#!/bin/sh\n")
    return directory / "science.toml"


def test_paths_are_relative_to_the_file_whose_name_is_the_images_unless_it_has_one(tmp_path: Path) -> None:
    text = '[[files]]\nsource = "motd"\ntarget = "/etc/motd"\n[[hooks]]\nprogram = "hook.sh"\n'
    found = read_description(write(tmp_path, text))
    assert (found.name, found.flavour, found.distribution.release) == ("science", "slim", None)
    assert [(one.source, one.mode, one.owner) for one in found.files] == [(tmp_path / "motd", "0644", "root:root")]
    assert [(one.program, one.at) for one in found.hooks] == [(tmp_path / "hook.sh", "files")]
    assert read_description(write(tmp_path, f'name = "other"\n{text}')).name == "other"


def test_every_mistake_is_named_with_its_key_and_its_line(tmp_path: Path) -> None:
    text = """\
name = "Science"
flavor = "slim"
packages = ["hpcc",
  "--hook"]
kernel_arguments = ["a b"]
[distribution]
sources = "absent.sources"
[[files]]
source = "motd"
target = "etc/../motd"
[[hooks]]
program = "absent.sh"
"""
    with pytest.raises(Refused) as raised:
        read_description(write(tmp_path, text))
    said = raised.value.message.replace(f"{tmp_path}/", "").split("; ")
    assert [one.split(": ")[:2] for one in said] == [
        ["science.toml:1", "name"],
        ["science.toml:2", "flavor"],
        ["science.toml:4", "packages.2"],
        ["science.toml:5", "kernel_arguments.1"],
        ["science.toml:7", "distribution.sources"],
        ["science.toml:10", "files.1.target"],
        ["science.toml:12", "hooks.1.program"],
    ]
    assert "did you mean flavour" in said[1]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[distribution]\nrelease = 11\n", "science.toml:2: distribution.release"),
        ("size = 100\n", "science.toml:1: size"),
        ('[[files]]\nsource = "motd"\n', "science.toml:1: files.1.target: must be given"),
        ('[[files]]\nsource = "motd"\ntarget = "/a"\nmode = "rwx"\n', "science.toml:4: files.1.mode"),
        ('[[files]]\nsource = "motd"\ntarget = "/a"\nowner = "a b"\n', "science.toml:4: files.1.owner"),
        ('[[hooks]]\nprogram = "hook.sh"\nat = "boot"\n', "science.toml:3: hooks.1.at"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(Refused) as raised:
        read_description(write(tmp_path, text))
    assert key in raised.value.message


def test_a_file_that_is_absent_or_no_toml_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", write(tmp_path, "x = \n")):
        with pytest.raises(Refused, match=path.name):
            read_description(path)


def test_the_examples_are_right() -> None:
    paths = sorted(EXAMPLES.glob("*.toml"))
    assert paths
    for path in paths:
        assert read_description(path).name == path.stem


def test_every_key_has_a_meaning_and_a_kind() -> None:
    keys = [key for table in tables_of(ImageDescription) for key in table.keys]
    assert {key.name for key in keys} >= {"packages", "release", "target", "program", "size"}
    for key in keys:
        assert key.meaning and key.kind, key.name


# --- apt sources -------------------------------------------------------------------------------------


def test_the_sources_of_a_release_are_taken_out_of_a_file() -> None:
    assert suites("a.sources", SOURCES) == ["bookworm", "bookworm-updates", "trixie", "trixie-updates",
                                            "bookworm-security"]  # fmt: skip
    expected = "Types: deb\nURIs: http://mirror/debian\nSuites: trixie trixie-updates\nComponents: main\n\n"
    assert of_suite("a.sources", SOURCES, "trixie") == expected
    assert of_suite("a.sources", SOURCES, "bullseye") == ""
    lines = "deb [arch=amd64] http://m/debian trixie main\n# deb http://m bookworm main\ndeb http://m bookworm main\n"
    assert of_suite("a.list", lines, "bookworm") == "deb http://m bookworm main\n"
    assert suites("a.list", lines) == ["trixie", "bookworm"]


def test_a_release_without_sources_is_refused_with_the_ones_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    only = SOURCES.replace("trixie", "bookworm-backports")
    monkeypatch.setattr(builder, "_suite", lambda: "bookworm")
    monkeypatch.setattr(builder, "_sources", lambda: (Input("debian.sources", only.encode()),))
    with pytest.raises(Refused, match=r"no trixie \(Debian 13\), but bookworm") as raised:
        Recipe.of(ImageDescription(distribution=ImageDistribution(release=13)))
    assert "distribution.sources" in raised.value.hint
    assert Recipe.of(ImageDescription(distribution=ImageDistribution(release=12))).suite == "bookworm"


def test_sources_of_its_own_must_be_of_the_release(tmp_path: Path) -> None:
    own = tmp_path / "own.sources"
    own.write_text(SOURCES.replace("trixie", "sid"))
    with pytest.raises(Refused, match="no sources of trixie"):
        Recipe.of(ImageDescription(distribution=ImageDistribution(release=13, sources=own)))
    found = Recipe.of(ImageDescription(distribution=ImageDistribution(release=12, sources=own)))
    assert [each.content for each in found.sources] == [own.read_bytes()]


# --- what an image is made of ------------------------------------------------------------------------


def recipe(tmp_path: Path, text: str) -> Recipe:
    own = tmp_path / "own.sources"
    own.write_text(SOURCES)
    head, brace, tables = text.partition("[[")
    distribution = '[distribution]\nrelease = 12\nsources = "own.sources"\n'
    return Recipe.of(read_description(write(tmp_path, f"{head}{distribution}{brace}{tables}")))


def test_each_key_of_the_file_changes_the_image_and_the_same_file_does_not(tmp_path: Path) -> None:
    file = '[[files]]\nsource = "motd"\ntarget = "/etc/motd"\n'
    hook = '[[hooks]]\nprogram = "hook.sh"\n'
    texts = ["", 'packages = ["hpcc"]\n', 'kernel_arguments = ["x"]\n', "size = 8192\n", 'flavour = "stock"\n', file,
             f'{file}mode = "0600"\n', f'{file}owner = "munge"\n', hook, f'{hook}at = "packages"\n']  # fmt: skip
    keys = [recipe(tmp_path, text).keys()[0] for text in texts]
    assert len({*keys}) == len(texts)
    assert [recipe(tmp_path, text).keys()[0] for text in texts[-2:]] == keys[-2:]
    before = recipe(tmp_path, file)
    (tmp_path / "motd").write_text("hello\n")
    changed = Recipe.of(read_description(tmp_path / "science.toml"))
    assert changed.keys() == before.keys()
    (tmp_path / "motd").write_text("other\n")
    changed = Recipe.of(read_description(tmp_path / "science.toml"))
    assert changed.keys() != before.keys()
    assert [one.split()[:2] for one in {*before.inputs} ^ {*changed.inputs}] == [["file", "/etc/motd"]] * 2
    assert before.inputs[0] == "Debian 12 (bookworm)"


def test_files_and_hooks_change_the_root_in_their_order(tmp_path: Path) -> None:
    """With a chroot that only notes what it is told."""
    text = """\
[[files]]
source = "motd"
target = "/etc/a b"
mode = "0600"
owner = "munge:adm"
[[hooks]]
program = "hook.sh"
[[hooks]]
program = "hook.sh"
at = "packages"
"""
    commands = builder._changes(recipe(tmp_path, text), tmp_path)
    root, tools = tmp_path / "root", tmp_path / "tools"
    root.mkdir()
    tools.mkdir()
    (tools / "chroot").write_text('#!/bin/sh\nstat -c %a "$1/.multiverse-input" >> "$1/log"\necho "$@" >> "$1/log"\n')
    (tools / "chroot").chmod(0o755)
    for command in commands:
        subprocess.run(("sh", "-euc", command, "sh", root), check=True, env={"PATH": f"{tools}:/usr/bin:/bin"})
    assert (root / "log").read_text().splitlines() == [
        "755", f"{root} /.multiverse-input",
        "644", f"{root} install -D -m 0600 -o munge -g adm /.multiverse-input /etc/a b",
        "755", f"{root} /.multiverse-input",
    ]  # fmt: skip
    assert [path.name for path in root.iterdir()] == ["log"]
