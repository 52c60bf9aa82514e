"""Atomic file replacement, locks and process identity."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.host import process
from multiverse.host.registry import ProcessUser
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


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to])
def test_a_replacement_writes_to_no_file_in_its_way(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    secret, shared = tmp_path / "secret", tmp_path / "shared"
    secret.write_text("unchanged")
    shared.mkdir()
    for name in (f".list.{os.getpid()}-{threading.get_native_id()}.new", "list"):
        plant(shared / name, secret)
    files.replace(shared / "list", "new", mode=0o644)
    assert secret.read_text() == "unchanged"
    assert (shared / "list").read_text() == "new" and not (shared / "list").is_symlink()
    assert [entry.name for entry in shared.iterdir()] == ["list"]


def test_a_file_of_an_open_directory_is_replaced_even_after_the_directory_was_renamed(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    fd = os.open(tmp_path / "one", os.O_RDONLY | os.O_DIRECTORY)
    try:
        (tmp_path / "one").rename(tmp_path / "other")
        files.replace(Path("file"), "new", dir_fd=fd)
        (tmp_path / "other/directory").mkdir()
        with pytest.raises(OSError):
            files.replace(Path("directory"), "a directory is no file", dir_fd=fd)
    finally:
        os.close(fd)
    assert (tmp_path / "other/file").read_text() == "new"
    assert sorted(entry.name for entry in (tmp_path / "other").iterdir()) == ["directory", "file"]


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


def test_a_directory_lock_that_is_taken_is_not_waited_for(tmp_path: Path) -> None:
    with try_locked_directory(tmp_path) as first, try_locked_directory(tmp_path) as second:
        assert (first, second) == (True, False)
    with try_locked_directory(tmp_path) as third:
        assert third
    with pytest.raises(FileNotFoundError), try_locked_directory(tmp_path / "none"):
        pass


# No Python, which ignores SIGXFSZ by itself: dd does if the one that started it did.
WRITER = ("/bin/sh", "-c", """
cd "$1"
until [ -e limited ]; do sleep 0.01; done
dd if=/dev/zero of=file bs=64k 2>&1 | grep -o "File too large"
ulimit -f unlimited 2>/dev/null || echo "not raised"
""", "sh")  # fmt: skip


@pytest.mark.parametrize("uid", [0, pytest.param(54321, marks=pytest.mark.skipif(os.geteuid() != 0, reason="root"))])
def test_a_process_can_write_no_more_than_its_limit_and_survives_the_attempt(tmp_path: Path, uid: int) -> None:
    """Also if its user is another one: a program in place of a QEMU, started by the same call."""
    place = Path(tempfile.mkdtemp())
    try:
        place.chmod(0o777)
        prefix = ProcessUser(uid, uid).command_prefix() if uid else ["setpriv", "--bounding-set=-sys_resource",
                                                                     "--inh-caps=-all", "--"]  # fmt: skip
        started = process.spawn([*prefix, *WRITER, str(place)], (), tmp_path / "log", {"PATH": os.environ["PATH"]})
        wait_for_arguments(started.pid, WRITER[0])
        process.limit_files(started, uid, 1 << 20)
        (place / "limited").touch()
        assert os.waitpid(started.pid, 0)[1] == 0, (tmp_path / "log").read_text()
        assert (tmp_path / "log").read_text().splitlines() == ["File too large", "not raised"]
        assert (place / "file").stat().st_size == 1 << 20
        process.limit_files(started, uid, 1 << 20)  # it has ended: no error
    finally:
        shutil.rmtree(place)


def wait_for_arguments(pid: int, program: str) -> None:
    """Wait until the process runs that program, as its user, or has ended."""
    while (line := Path(f"/proc/{pid}/cmdline").read_bytes()) and not line.startswith(program.encode()):
        time.sleep(0.005)


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
