"""Copies images to hosts: through a stream to another host, or from a directory that hosts share.

A copy is verified by the image's digest before it appears. It travels as a sparse archive of tar(1): rsync reads the
holes of a disk too, and sends what it reads there.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from multiverse.core.errors import Broken, Exhausted, MultiverseError
from multiverse.images import catalog, digest, install
from multiverse.images.catalog import Image

_SEND, _HAVE, _DONE = b"send\n", b"have\n", b"done\n"
"""What the receiver says: first whether it needs the image, and last that the image is at its place."""

_BROUGHT = b"brought\n"
"""What the sender says to a receiver whose archive another program has brought."""

Bring = Callable[[Path], None]
"""Brings a file to the receiver's host, where the receiver expects it. Raises `MultiverseError`."""


def send(image: Image, command: Sequence[str], bring: Bring | None = None) -> bool:
    """Send the image to a `command` that runs `receive` on another host. False if that has this very image already.
    With `bring` the archive does not go through the stream, but is written to a file, which that brings there.

    Raises `Broken` with what the command says if it fails, and what `bring` raises.
    """
    receiver = _start([*command, image.name, stated_digest(image)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with receiver:
        assert receiver.stdin is not None and receiver.stdout is not None and receiver.stderr is not None
        answer = receiver.stdout.readline()
        sent = ""
        if answer == _SEND:
            try:
                sent = _archive(image, receiver.stdin) if bring is None else _brought(image, receiver.stdin, bring)
            finally:
                receiver.stdin.close()
            answer = receiver.stdout.readline()
        else:
            receiver.stdin.close()
        said = receiver.stderr.read().decode(errors="replace").split("\n")
    if answer not in (_HAVE, _DONE):
        hint = "a copy that was interrupted can be repeated"
        if not answer and not receiver.returncode:
            hint = "does the key's command in authorized_keys, if it has one, permit `receive-image`?"
        why = " ".join(line for line in said if line) or sent or f"{command[0]} ended with {receiver.returncode}"
        raise Broken(f"image {image.name} was not copied: {why}", hint=hint)
    return answer == _DONE


def _archive(image: Image, target: IO[bytes]) -> str:
    """Write the image's files to `target`. Returns what tar complains of."""
    argv = ["tar", "--create", "--sparse", "--file=-", f"--directory={image.path}", *digest.FILES]
    with _start(argv, stdin=subprocess.DEVNULL, stdout=target) as tar:
        assert tar.stderr is not None
        return tar.stderr.read().decode(errors="replace").strip()


def _brought(image: Image, target: IO[bytes], bring: Bring) -> str:
    """Have an archive of the image brought, and say so. Returns what tar complains of."""
    with tempfile.NamedTemporaryFile(prefix="multiverse-image-", dir="/var/tmp") as file:
        complaint = _archive(image, file.file)
        if not complaint:
            bring(Path(file.name))
            target.write(_BROUGHT)
    return complaint


def receive(
    images: Path, name: str, expected: str, source: IO[bytes], answers: IO[bytes], brought: Path | None = None
) -> None:
    """Receive the image of that name and digest from `send`, and put it into the directory `images`, which exists. The
    archive is the file `brought`, once the sender says that it is there, or else comes by `source`.

    Raises `Broken` if what arrives is not that image, and `Exhausted` if there is no room; nothing of it is left then.
    """
    install.check_name(name)
    with install.locked(images, name):
        if digest.recorded(images / name) == expected and _is_complete(images, name):
            _say(answers, _HAVE)
            return
        _say(answers, _SEND)
        with install.beside(images, name) as work, _archive_of(source, brought) as archive:
            argv = ["tar", "--extract", "--file=-", "--no-same-owner", f"--directory={work}", *digest.FILES]
            with _start(argv, stdin=archive, stdout=subprocess.DEVNULL) as tar:
                assert tar.stderr is not None
                complaint = tar.stderr.read().decode(errors="replace").strip()
            if tar.returncode:
                raise Exhausted(f"image {name} did not arrive whole: {complaint}", hint=f"is there room in {images}?")
            _accept(work, images, name, expected)
    _say(answers, _DONE)


@contextmanager
def _archive_of(source: IO[bytes], brought: Path | None) -> Iterator[IO[bytes]]:
    """The archive that `source` gives, or that is brought."""
    if brought is None:
        yield source
        return
    if source.readline() != _BROUGHT:
        raise Broken("the image was not brought", hint="the sender says why, and tries again")
    with brought.open("rb") as file:
        yield file


def copy(image: Image, images: Path) -> bool:
    """Copy an image from the directory where it is into `images`, which exists. False if that had it already.

    Raises `Broken` if the copy is not the image, and `Exhausted` if there is no room; nothing of it is left then.
    """
    with install.locked(images, image.name):
        expected = digest.recorded(image.path)
        if _is_same(image, images, expected):
            return False
        with install.beside(images, image.name) as work:
            files = [str(image.path / file) for file in digest.FILES]
            argv = ["cp", "--reflink=auto", "--sparse=always", "--dereference", "--", *files, str(work)]
            with _start(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as cp:
                assert cp.stderr is not None
                complaint = cp.stderr.read().decode(errors="replace").strip()
            if cp.returncode:
                raise Exhausted(f"cannot copy image {image.name}: {complaint}", hint=f"is there room in {images}?")
            _accept(work, images, image.name, expected or digest.digest_of(image.path))
    return True


def stated_digest(image: Image) -> str:
    """The digest that is recorded of the image; computed if none is, which takes seconds."""
    return digest.recorded(image.path) or digest.digest_of(image.path)


def _accept(work: Path, images: Path, name: str, expected: str) -> None:
    """Put what arrived in `work` in its place, if it is the image of that digest."""
    found = digest.digest_of(work)
    if found != expected:
        text = f"the copy of image {name} has the digest {found[:12]}, and not {expected[:12]}"
        raise Broken(text, hint="was the image changed meanwhile? copy it again")
    for file in digest.FILES:
        (work / file).chmod(0o644)  # whatever the umask: the users of QEMU read them
    digest.record(work, found)
    install.put(work, images, name)


def _is_same(image: Image, images: Path, expected: str) -> bool:
    """Whether `images` has that image already, as far as its digest or, without one, its manifest tells."""
    if expected:
        return digest.recorded(images / image.name) == expected and _is_complete(images, image.name)
    try:
        return catalog.same(catalog.load(images, image.name), image)
    except MultiverseError:
        return False


def _is_complete(images: Path, name: str) -> bool:
    try:
        catalog.load(images, name)
    except MultiverseError:
        return False
    return True


def _say(answers: IO[bytes], word: bytes) -> None:
    answers.write(word)
    answers.flush()


def _start(argv: Sequence[str], stdin: int | IO[bytes], stdout: int | IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE)
    except OSError as error:
        raise Broken(f"cannot run {argv[0]}: {error.strerror}", hint="is it installed?") from error
