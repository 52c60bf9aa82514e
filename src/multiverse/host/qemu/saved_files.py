"""The files of a saved VM. Each is written, and read, in one pass, in which it is compressed, encrypted and measured.

With a key a file is encrypted by `openssl enc` (AES-256 in counter mode, with a random salt), and its digest is an
HMAC: whoever has no key can neither read it nor change it unnoticed. Keys are told to openssl by a pipe, never as
arguments.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from multiverse.core.errors import Damaged, Exhausted

_CHUNK = 1 << 20
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
_CIPHER = ("openssl", "enc", "-aes-256-ctr", "-pbkdf2", "-iter", "1")  # the key is random: it needs no stretching
COMPRESS, DECOMPRESS = ("zstd", "-q", "-c", "-T0", "-1"), ("zstd", "-q", "-c", "-d")


@dataclass(frozen=True)
class SavedFile:
    size: int  # bytes
    digest: str  # SHA-256, or HMAC with SHA-256 if it is encrypted; hexadecimal


_End = int | IO[bytes] | None  # of a program


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def _digest(key: str) -> _Digest:
    return hmac.new(_derived(key, b"digest"), digestmod="sha256") if key else hashlib.sha256()


def _derived(key: str, purpose: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(key), purpose, "sha256")


def seal(key: str, text: str) -> str:
    """What shows that a text was written by somebody who has the key."""
    return hmac.digest(_derived(key, b"seal"), text.encode(), "sha256").hex()


class _Programs:
    """Programs, each of which reads what the one before it writes. `source` and `target` are descriptors; None: a pipe
    to this process. Descriptors that are given are closed here, so that a program that ends early is noticed."""

    def __init__(self, argvs: Sequence[Sequence[str]], key: str, source: int | None, target: int | None) -> None:
        self.running: list[tuple[str, subprocess.Popen[bytes]]] = []
        given = [fd for fd in (source, target) if fd is not None]
        try:
            for number, argv in enumerate(argvs):
                before: _End = subprocess.PIPE if source is None else source
                before = self.running[-1][1].stdout if self.running else before
                after = target if number == len(argvs) - 1 and target is not None else subprocess.PIPE
                self.running.append((argv[0], _started(argv, key, before, after)))
                if number:
                    _close(self.running[-2][1].stdout)
        except BaseException:
            self.kill()
            raise
        finally:
            for fd in given:
                os.close(fd)

    def kill(self) -> None:
        for _, program in self.running:
            program.kill()  # changes nothing if it has ended by itself
            _close(program.stdin)
            _close(program.stdout)
            program.wait()

    def failure(self) -> str:
        """Wait for their ends. Which of them failed first, and how; empty if none did."""
        for _, program in self.running:
            _close(program.stdin)
        failed = [f"{name} ended with {code}" for name, one in self.running if (code := one.wait())]
        return failed[-1] if failed else ""  # those before it lost their reader


def _started(argv: Sequence[str], key: str, source: _End, target: _End) -> subprocess.Popen[bytes]:
    if argv[0] != "openssl":
        return subprocess.Popen(argv, stdin=source, stdout=target, env=_ENVIRONMENT, pipesize=_CHUNK)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        os.write(writing, _derived(key, b"cipher").hex().encode() + b"\n")
        os.close(writing)
        argv = [*argv, "-pass", f"fd:{reading}"]
        return subprocess.Popen(
            argv, stdin=source, stdout=target, env=_ENVIRONMENT, pass_fds=(reading,), pipesize=_CHUNK
        )
    finally:
        os.close(reading)


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with suppress(OSError):
            pipe.close()


def write(path: Path, key: str, source: int, *, compress: bool) -> SavedFile:
    """Write what comes from a descriptor, which is closed here, to a new file, and to the disk. Raises `Exhausted` if
    that fails: then whoever writes into the descriptor is refused."""
    argvs = [COMPRESS] * compress + [(*_CIPHER, "-e")] * bool(key)
    digest, size = _digest(key), 0
    with ExitStack() as stack:
        if argvs:
            programs = _Programs(argvs, key, source, None)
            stack.callback(programs.kill)
            output = programs.running[-1][1].stdout
            assert output is not None
            reading = output.fileno()
        else:
            programs, reading = None, source
            stack.callback(os.close, source)
        try:
            with path.open("wb", buffering=0) as file:
                while chunk := os.read(reading, _CHUNK):
                    digest.update(chunk)
                    size += len(chunk)
                    _write_all(file.fileno(), chunk)
                os.fdatasync(file.fileno())
        except OSError as error:
            raise Exhausted(f"cannot write {path}: {error.strerror}", hint="is there room left?") from error
        if programs is not None and (failure := programs.failure()):
            raise Exhausted(f"cannot write {path}: {failure}", hint="is there room left?")
    return SavedFile(size, digest.hexdigest())


def copy(source: Path, target: Path, key: str, expected: SavedFile) -> None:
    """Copy a file that was written by `write`, as it is, to a new file, and to the disk. Raises `Damaged` if it is not
    as it was written, and `OSError`."""
    digest, size = _digest(key), 0
    with source.open("rb", buffering=0) as reading, target.open("xb", buffering=0) as writing:
        while chunk := reading.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            _write_all(writing.fileno(), chunk)
        os.fdatasync(writing.fileno())
    _check(source, key, expected, SavedFile(size, digest.hexdigest()))


def _check(path: Path, key: str, expected: SavedFile, found: SavedFile) -> None:
    if not hmac.compare_digest(found.digest, expected.digest) or found.size != expected.size:
        why = "is not as it was saved, or its key is not" if key else "is not as it was saved"
        raise Damaged(f"{path} {why}", hint="is it in a backup?")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Reader:
    """Reads a file that was written by `write`."""

    def __init__(self, path: Path, key: str, expected: SavedFile) -> None:
        self._path, self._key, self._expected = path, key, expected

    @contextmanager
    def into(self, target: int, *, compressed: bool) -> Iterator[Callable[[], None]]:
        """Write the content into a descriptor, which is closed here. The function that this gives does so, once. It
        raises `Damaged` if the file is not as it was written: what was read is of no use then."""
        argvs = [(*_CIPHER, "-d")] * bool(self._key) + [DECOMPRESS] * compressed
        if not argvs:
            try:
                yield lambda: self._feed(target)
            finally:
                os.close(target)
            return
        programs = _Programs(argvs, self._key, None, target)
        pipe = programs.running[0][1].stdin
        assert pipe is not None

        def feed() -> None:
            self._feed(pipe.fileno())
            if failure := programs.failure():
                raise BrokenPipeError(failure)

        try:
            yield feed
        finally:
            programs.kill()

    def _feed(self, fd: int) -> None:
        """The file is read to its end even if its reader is gone: perhaps that is so because the file is damaged."""
        digest, size, taken = _digest(self._key), 0, True
        try:
            with self._path.open("rb", buffering=0) as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    size += len(chunk)
                    taken = taken and _was_taken(fd, chunk)
        except FileNotFoundError as error:
            raise Damaged(f"{self._path} is missing", hint="is it in a backup?") from error
        _check(self._path, self._key, self._expected, SavedFile(size, digest.hexdigest()))
        if not taken:
            raise BrokenPipeError(f"the reader of {self._path} has ended")


def _was_taken(fd: int, data: bytes) -> bool:
    try:
        _write_all(fd, data)
    except BrokenPipeError:
        return False
    return True
