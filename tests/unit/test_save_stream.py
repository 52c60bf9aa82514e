"""The files of a saved VM: what is written is read again, and what was changed or has another key is told."""

from __future__ import annotations

import hmac
import os
import select
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from multiverse.core.errors import Broken, Damaged, Exhausted
from multiverse.host.qemu.channels import Command, Monitor
from multiverse.host.qemu.saved_files import Reader, SavedFile, write
from multiverse.host.qemu.saves import write_state

ENOUGH = 8 << 20  # bytes: more than the programs and pipes hold back
KEY, OTHER_KEY = "ab" * 32, "cd" * 32


class WritingMonitor:
    """A QEMU that writes random bytes into the descriptor it gets, and fails if nobody reads them."""

    failed = False
    _writing: threading.Thread

    def __init__(self, *states: str) -> None:
        """`states`: of the guest, each told once; then it is paused."""
        self.states = list(states)

    def execute(self, name: str) -> dict[str, Any]:
        state, *self.states = self.states or ["paused"]
        return {"status": state}

    def execute_all(self, commands: Sequence[Command], fd: int) -> None:
        self._writing = threading.Thread(target=self._write, args=(os.dup(fd),))
        self._writing.start()

    def _write(self, fd: int) -> None:
        os.set_blocking(fd, False)
        left = ENOUGH
        try:
            while left > 0:
                assert select.select([], [fd], [], 30.0)[1], "the pipe is full and stays full"
                left -= os.write(fd, os.urandom(1 << 16))
        except BrokenPipeError:
            self.failed = True
        finally:
            os.close(fd)

    def wait_event(self, name: str, timeout: float, **wanted: Any) -> dict[str, Any]:
        self._writing.join()
        if self.failed:
            raise Broken("QEMU could not save the state")
        return {}


def write_from_qemu(path: Path, key: str = "") -> SavedFile:
    return write_state(cast("Monitor", WritingMonitor()), path, key)


@pytest.mark.parametrize("key", ["", KEY])
def test_a_full_disk_ends_the_stream_at_once_and_says_so(key: str) -> None:
    with pytest.raises(Exhausted, match=r"cannot write /dev/full: No space left on device"):
        write_from_qemu(Path("/dev/full"), key)


def test_the_state_is_complete_once_qemu_has_ended_its_migration(tmp_path: Path) -> None:
    """QEMU tells the end a moment earlier: then it would refuse to let the guest go on, and to write it again."""
    qemu = WritingMonitor("paused", "finish-migrate", "finish-migrate", "postmigrate")
    write_state(cast("Monitor", qemu), tmp_path / "state")
    assert qemu.states == []


@pytest.mark.parametrize("key", ["", KEY])
def test_all_that_was_written_is_in_the_file(tmp_path: Path, key: str) -> None:
    assert ENOUGH <= write_from_qemu(tmp_path / "state", key).size == (tmp_path / "state").stat().st_size


def saved(path: Path, content: bytes, key: str, *, compress: bool = True) -> SavedFile:
    source = path.with_name("source")
    source.write_bytes(content)
    return write(path, key, os.open(source, os.O_RDONLY), compress=compress)


def read(path: Path, key: str, expected: SavedFile, *, compressed: bool = True) -> bytes:
    target = path.with_name("target")
    with Reader(path, key, expected).into(os.open(target, os.O_WRONLY | os.O_CREAT), compressed=compressed) as feed:
        feed()
    return target.read_bytes()


@pytest.mark.parametrize("key", ["", KEY])
@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("size", [0, 1, 3 << 20])
def test_what_was_written_is_read_again(tmp_path: Path, key: str, compress: bool, size: int) -> None:
    content = os.urandom(size)
    found = saved(tmp_path / "file", content, key, compress=compress)
    assert read(tmp_path / "file", key, found, compressed=compress) == content


@pytest.mark.parametrize("key", ["", KEY])
@pytest.mark.parametrize("compress", [True, False])
def test_a_file_that_was_changed_or_cut_or_removed_is_damaged(tmp_path: Path, key: str, compress: bool) -> None:
    path = tmp_path / "file"
    found = saved(path, os.urandom(3 << 20), key, compress=compress)
    whole = path.read_bytes()
    for damaged in (whole[: 2 << 20], whole[:-9] + b"x" + whole[-8:], bytes(len(whole))):
        path.write_bytes(damaged)
        with pytest.raises(Damaged, match="not as it was saved"):
            read(path, key, found, compressed=compress)
    path.unlink()
    with pytest.raises(Damaged, match="is missing"):
        read(path, key, found, compressed=compress)


def test_an_encrypted_file_tells_nothing_without_its_key(tmp_path: Path) -> None:
    path, secret = tmp_path / "file", b"a secret of the job" * 1000
    found = saved(path, secret, KEY, compress=False)
    assert secret[:16] not in path.read_bytes()
    with pytest.raises(Damaged, match="or its key is not"):
        read(path, OTHER_KEY, found, compressed=False)


def test_the_same_content_is_never_encrypted_to_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        saved(tmp_path / name, bytes(1000), KEY, compress=False)
    assert (tmp_path / "one").read_bytes()[16:] != (tmp_path / "two").read_bytes()[16:]


def test_no_program_is_told_the_key_by_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    real = subprocess.Popen

    def popen(argv: list[str], **more: Any) -> subprocess.Popen[bytes]:
        told.append((argv, more["env"]))
        return real(argv, **more)

    monkeypatch.setattr(subprocess, "Popen", popen)
    saved(tmp_path / "file", b"content", KEY)
    derived = [hmac.digest(bytes.fromhex(KEY), purpose, "sha256").hex() for purpose in (b"cipher", b"digest")]
    assert len(told) == 2
    assert not any(secret in str(told) for secret in (KEY, *derived))
