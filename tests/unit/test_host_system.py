"""Atomic file replacement, locks and process identity."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.system import files
from multiverse.system.locks import is_locked, locked_directory, locked_file, try_locked_directory, try_locked_file
from multiverse.system.processes import ProcessIdentity


@pytest.mark.parametrize("content", ["text", b"\x00bytes"])
def test_a_file_is_replaced_with_its_mode_whatever_the_umask(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    reader = path.open("rb")
    before = os.umask(0o077)
    try:
        files.replace(path, content, mode=0o644)
    finally:
        os.umask(before)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert path.stat().st_mode & 0o777 == 0o644
    with reader:
        assert reader.read() == b"old", "who has opened the old file reads it to its end"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_replacement_that_fails_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    (tmp_path / "directory/below").mkdir(parents=True)
    with pytest.raises(OSError):
        files.replace(tmp_path / "directory", "a directory is no file")
    with pytest.raises(FileNotFoundError):
        files.replace(tmp_path / "missing/file", "x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["directory"]


def test_concurrent_replacements_leave_one_whole_content(tmp_path: Path) -> None:
    path, contents = tmp_path / "file", [letter * 100_000 for letter in "abcd"]

    def write(content: str) -> None:
        for _ in range(20):
            files.replace(path, content)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert path.read_text() in contents
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_lock_holds_against_another_process_and_keeps_the_content(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("kept")
    code = (
        "import sys; from pathlib import Path; from multiverse.system.locks import try_locked_file\n"
        "with try_locked_file(Path(sys.argv[1])) as ours: print(ours)"
    )
    argv = [sys.executable, "-c", code, str(path)]
    with locked_file(path):
        assert is_locked(path)
        assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "False\n"
    assert not is_locked(path) and not is_locked(tmp_path / "missing")
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "True\n"
    assert path.read_text() == "kept"


def test_who_waits_for_a_lock_may_end_its_holder(tmp_path: Path) -> None:
    path, release, held = tmp_path / "lock", threading.Event(), threading.Event()

    def hold() -> None:
        with locked_file(path):
            held.set()
            release.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    with locked_file(path, while_waiting=release.set):
        assert release.is_set()
    holder.join()


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path: Path) -> None:
    path, waiting, got = tmp_path / "lock", threading.Event(), threading.Event()

    def wait() -> None:
        with locked_file(path, while_waiting=waiting.set):
            assert path.exists()
            got.set()

    with locked_file(path):
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert waiting.wait(10)
        path.unlink()
    waiter.join(10)
    assert got.is_set()


def test_a_directory_lock_is_not_had_without_the_directory(tmp_path: Path) -> None:
    with locked_directory(tmp_path / "none", create=False) as there:
        assert not there
    with locked_directory(tmp_path / "a/b", create=True) as there:
        assert there and (tmp_path / "a/b").is_dir()
        with try_locked_directory(tmp_path / "a/b") as ours:
            assert not ours
    with try_locked_directory(tmp_path / "a/b") as ours:
        assert ours
    with locked_directory(tmp_path / "a/b", create=True), try_locked_file(tmp_path / "lock") as ours:
        assert ours


def test_a_process_is_identified_by_pid_start_time_and_boot() -> None:
    own = ProcessIdentity.of(os.getpid())
    assert own.is_alive() and own == ProcessIdentity.of(os.getpid())
    handle = own.open()
    assert handle is not None
    os.close(handle)
    for other in (replace(own, started=own.started + 1), replace(own, boot_id="another"), replace(own, pid=0)):
        assert not other.is_alive() and other.open() is None
    with subprocess.Popen(["true"]) as child:
        ended = ProcessIdentity.of(child.pid)
        child.wait()
    assert not ended.is_alive() and ended.open() is None
