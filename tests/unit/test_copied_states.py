"""The files of a saved VM are copied to a second directory, and what a host shows of both."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from multiverse.core.errors import Damaged, Exhausted, Gone, Refused
from multiverse.core.model.basics import CloneKind
from multiverse.host.qemu import saved_files, saves
from multiverse.host.qemu.context import HostContext
from multiverse.host.qemu.saves import SavedVm
from tests.unit.test_storage_shown import host, what_is_shown

NAME = "mvx-1-1"
KEY = "0b" * 32


@pytest.fixture
def one(tmp_path: Path) -> HostContext:
    """A host with a directory of its own and one for copies."""
    for place in ("own", "copies"):
        (tmp_path / place).mkdir(mode=0o700)
        (tmp_path / place / ".storage").write_text(f"{place}\n")
    return host(tmp_path / "own", tmp_path / "copies")


def written(place: Path, key: str, text: bytes) -> saved_files.SavedFile:
    reading, writing = os.pipe()
    os.write(writing, text)
    os.close(writing)
    return saved_files.write(place, key, reading, compress=False)


def save(one: HostContext, key: str = "") -> Path:
    place = saves.directory(one) / NAME
    place.mkdir(mode=0o700)
    state, overlay = written(place / saves.STATE, key, b"memory" * 1000), written(place / saves.OVERLAY, key, b"disk")
    for stub in saves.STUBS:
        (place / stub).write_bytes(stub.encode())
    facts = SavedVm("mvx-1", "token", CloneKind.INSTANT, "slim", "key", "7.2", "tcg", "", "", 1, 64, 1, 64, 0,
                    state, overlay, 5.0, bool(key))  # fmt: skip
    (place / saves.FILE).write_text(json.dumps(asdict(saves._sealed(facts, key))))
    return place


def copies_of(one: HostContext) -> Path:
    assert one.config.copies is not None
    return one.config.copies


def left(one: HostContext) -> list[str]:
    return [path.name for path in copies_of(one).iterdir() if path.name != ".storage"]


def test_a_state_that_an_earlier_release_has_sealed_is_whole(one: HostContext) -> None:
    """It did not record up to which size the machine could be plugged."""
    file = save(one, KEY) / saves.FILE
    facts = json.loads(file.read_text())
    del facts["most"], facts["seal"]
    sealed = saved_files.seal(KEY, json.dumps(facts | {"seal": ""}, sort_keys=True))
    file.write_text(json.dumps(facts | {"seal": sealed}))
    saves.copy(one, NAME, KEY)
    file.write_text(json.dumps(facts | {"seal": sealed, "most": {"cpus": 9, "memory": 64}}))
    with pytest.raises(Damaged):
        saves.copy(one, NAME, KEY)


@pytest.mark.parametrize("key", ["", KEY])
def test_the_files_are_copied_as_they_are(one: HostContext, key: str) -> None:
    own = save(one, key)
    for _ in range(2):
        saves.copy(one, NAME, key)
    copied = copies_of(one) / NAME
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == {
        path.name: path.read_bytes() for path in own.iterdir()
    }
    assert copied.stat().st_mode & 0o777 == 0o700 and left(one) == [NAME]
    shown = what_is_shown(one)[NAME]
    assert (shown.storage, shown.copy, shown.complete, shown.token) == ("own", "copies", True, "token")
    assert saves.directory(one, "copies") == copies_of(one) and saves.directory(one, "own") == own.parent


def test_what_an_interrupted_copy_left_is_replaced(one: HostContext) -> None:
    save(one)
    work = copies_of(one) / f".{NAME}.writing"
    work.mkdir()
    (work / saves.STATE).write_bytes(b"a half")
    assert what_is_shown(one)[NAME].copy == ""
    saves.copy(one, NAME)
    assert what_is_shown(one)[NAME].copy == "copies" and left(one) == [NAME]


@pytest.mark.parametrize("file", [saves.STATE, saves.OVERLAY])
def test_a_damaged_file_is_not_copied(one: HostContext, file: str) -> None:
    own = save(one)
    whole = (own / file).read_bytes()
    for damaged in (whole[:-1], whole[:-1] + b"?"):
        (own / file).write_bytes(damaged)
        with pytest.raises(Damaged, match="not as it was saved"):
            saves.copy(one, NAME)
        assert not left(one)


def test_encrypted_files_are_checked_by_their_key(one: HostContext) -> None:
    save(one, KEY)
    for key in ("", "0c" * 32):
        with pytest.raises(Damaged, match="key"):
            saves.copy(one, NAME, key)
    assert not left(one)


def test_files_of_another_vm_under_that_name_are_replaced(one: HostContext) -> None:
    own = save(one)
    saves.copy(one, NAME)
    facts = copies_of(one) / NAME / saves.FILE
    facts.write_text(facts.read_text().replace('"token"', '"older"'))
    assert what_is_shown(one)[NAME].copy == "", "it is no copy"
    saves.copy(one, NAME)
    assert facts.read_bytes() == (own / saves.FILE).read_bytes()


def test_a_copy_that_finds_too_little_room_is_not_begun(one: HostContext, monkeypatch: pytest.MonkeyPatch) -> None:
    save(one)
    monkeypatch.setattr(saves, "available_disk", lambda place: 6003 if place == copies_of(one) else 1 << 30)
    with pytest.raises(Exhausted, match="has room for 0 MiB"):
        saves.copy(one, NAME)
    assert not left(one)
    monkeypatch.setattr(saves, "available_disk", lambda place: 6004 if place == copies_of(one) else 0)
    saves.copy(one, NAME)
    assert left(one) == [NAME]


def test_a_copy_whose_files_are_removed_meanwhile_fails(one: HostContext, monkeypatch: pytest.MonkeyPatch) -> None:
    save(one)
    copy = saved_files.copy

    def removed_after(source: Path, *rest: object) -> None:
        copy(source, *rest)  # type: ignore[arg-type]
        saves.discard(one, NAME)

    monkeypatch.setattr(saved_files, "copy", removed_after)
    with pytest.raises(Exhausted, match="cannot copy"):
        saves.copy(one, NAME)
    assert not left(one) and not what_is_shown(one)


def test_what_is_missing_or_out_of_reach_is_told(one: HostContext) -> None:
    with pytest.raises(Damaged, match="missing"):
        saves.copy(one, NAME)
    save(one)
    (copies_of(one) / ".storage").unlink()
    assert saves.look(one, copies_of(one)) is None and saves.look(one, saves.directory(one)) is not None
    with pytest.raises(Gone, match="out of reach"):
        saves.copy(one, NAME)
    with pytest.raises(Gone, match="storage copies is out of reach"):
        saves.directory(one, "copies")
    with pytest.raises(Refused, match="copies no saved VMs"):
        saves.copy(host(saves.directory(one)), NAME)


def test_a_copy_is_shown_and_used_though_the_own_directory_is_lost(one: HostContext) -> None:
    own = save(one)
    saves.copy(one, NAME)
    (own / saves.FILE).unlink()
    shown = what_is_shown(one)[NAME]
    assert (shown.storage, shown.copy, shown.complete) == ("copies", "", True), (
        "of a part of it nothing can be restored"
    )
    (own.parent / ".storage").unlink()
    assert saves.look(one, own.parent) is None and what_is_shown(one)[NAME] == shown
    saves.discard(one, NAME)
    assert not left(one) and not own.exists()


def test_the_directory_for_copies_is_not_made(tmp_path: Path) -> None:
    """In place of a file system that is not mounted it would be on the host itself."""
    place = tmp_path / "mount" / "copies"
    assert not saves.prepare_copies(place, "mvx-") and not place.parent.exists()
    place.mkdir(parents=True)
    place.chmod(0o777)
    with pytest.raises(Refused, match="others may write"):
        saves.prepare_copies(place, "mvx-")
    place.chmod(0o755)
    assert saves.prepare_copies(place, "mvx-")
    assert place.stat().st_mode & 0o777 == 0o700
    assert saves.look(host(tmp_path, place), place) is not None


def test_a_storage_that_fails_keeps_no_files_in_the_other_one(
    one: HostContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = save(one)
    saves.copy(one, NAME)
    unlink = Path.unlink

    def failing(path: Path, missing_ok: bool = False) -> None:
        if copies_of(one) in path.parents:
            raise OSError("input/output error")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", failing)
    with pytest.raises(OSError, match="input/output"):
        saves.discard(one, NAME)
    assert not own.exists() and left(one) == [NAME]
    monkeypatch.undo()
    saves.discard(one, NAME)
    assert not left(one)
