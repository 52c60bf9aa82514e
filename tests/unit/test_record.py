"""Texts that are overwritten in place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from multiverse.system.files import RECORD_SIZE, Record


def test_a_text_is_kept_in_the_same_blocks(tmp_path: Path) -> None:
    path = tmp_path / "record"
    record = Record(path)
    assert record.text == "" == Record(path).text
    before = path.stat()
    assert before.st_size == 2 * RECORD_SIZE and before.st_mode & 0o777 == 0o600
    for number in range(5):
        record.write(f"text {number} ")
        assert Record(path).text == record.text == f"text {number} "
        after = path.stat()
        assert (after.st_ino, after.st_size, after.st_blocks) == (before.st_ino, before.st_size, before.st_blocks)
    assert list(tmp_path.iterdir()) == [path], "nothing is created beside it"


@pytest.mark.parametrize("writes", [1, 2])
@pytest.mark.parametrize("reached", [0, 1, 8, 9, 12, 20, RECORD_SIZE - 1])
def test_after_a_write_that_was_interrupted_the_text_before_counts(
    tmp_path: Path, writes: int, reached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record"
    record = Record(path)
    for number in range(writes):
        record.write(f"text {number}")
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:reached], offset))
    with pytest.raises(OSError, match="No space left"):
        record.write("another text")
    monkeypatch.undo()
    assert record.text == f"text {writes - 1}"
    # What has reached the disk is whole only from the end of the text on.
    assert Record(path).text == (f"text {writes - 1}" if reached < RECORD_SIZE - 1 else "another text")
    record.write("the next")
    assert Record(path).text == "the next"


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_copy_is_left_out(tmp_path: Path, damaged: int) -> None:
    path = tmp_path / "record"
    record = Record(path)
    record.write("one")  # the second copy
    record.write("two")  # the first
    with path.open("r+b") as file:
        file.seek(damaged * RECORD_SIZE + 11)
        file.write(b"X")
    assert Record(path).text == ("one" if damaged == 0 else "two")
    with path.open("r+b") as file:
        file.seek((1 - damaged) * RECORD_SIZE)
        file.write(bytes(RECORD_SIZE))
    with pytest.raises(ValueError, match="neither"):
        Record(path)


@pytest.mark.parametrize("content", [b"", bytes(2 * RECORD_SIZE), b"{}", b"\xff" * 2 * RECORD_SIZE])
def test_a_file_without_a_whole_copy_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "record").write_bytes(content)
    with pytest.raises(ValueError, match="neither"):
        Record(tmp_path / "record")


def test_what_was_left_of_an_allocation_that_was_interrupted_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / ".record.new").write_bytes(b"a part")
    Record(tmp_path / "record").write("text")
    assert [path.name for path in tmp_path.iterdir()] == ["record"]


def test_a_text_that_is_too_long_changes_nothing(tmp_path: Path) -> None:
    record = Record(tmp_path / "record")
    record.write("text")
    with pytest.raises(ValueError, match="does not fit"):
        record.write("x" * RECORD_SIZE)
    record.write("x" * (RECORD_SIZE - 12))
    assert Record(tmp_path / "record").text == record.text == "x" * (RECORD_SIZE - 12)
