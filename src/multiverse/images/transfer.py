"""Copies images to hosts: through a stream to another host, or from a directory that hosts share.

A copy is verified by the image's digest before it appears. It travels as a sparse archive of tar(1): rsync reads the
holes of a disk too, and sends their zeros.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import structlog

from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.images import catalog
from multiverse.images.catalog import Image

# The receiver's answers: first whether it needs the image, and last that the image is in its place.
_SEND, _HAVE, _DONE = b"send\n", b"have\n", b"done\n"

_BROUGHT = b"brought\n"  # the sender's word to a receiver whose archive another program has brought
Bring = Callable[[Path], None]  # brings a file to the place where the receiver expects it. Raises `MultiverseError`


def send(image: Image, command: Sequence[str], bring: Bring | None = None) -> bool:
    """Send the image to a `command` that runs `receive` on another host. False if that host has this very image.
    With `bring` the archive is written to a file, which `bring` takes there, and does not go through the stream.

    Raises `Broken` with the words of the command if it fails, and the errors of `bring`.
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
    """Write the image's files to `target`. Returns the complaint of tar."""
    argv = ["tar", "--create", "--sparse", "--file=-", f"--directory={image.path}", *catalog.FILES]
    return _run(argv, stdin=subprocess.DEVNULL, stdout=target)[1]


def _brought(image: Image, target: IO[bytes], bring: Bring) -> str:
    """Have an archive of the image brought, and say so. Returns the complaint of tar."""
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
    archive comes by `source`, or is the file `brought`, once the sender says that it is there.

    Raises `Broken` if another image arrives, and `Exhausted` if there is no room; nothing of it is left then.
    """
    catalog.check_name(name)
    with catalog.locked(images, name):
        if catalog.recorded_digest(images / name) == expected and _loaded(images, name) is not None:
            _say(answers, _HAVE)
            return
        _say(answers, _SEND)
        with catalog.beside(images, name) as work, _archive_of(source, brought) as archive:
            argv = ["tar", "--extract", "--file=-", "--no-same-owner", f"--directory={work}", *catalog.FILES]
            status, complaint = _run(argv, stdin=archive, stdout=subprocess.DEVNULL)
            if status:
                raise Exhausted(f"image {name} did not arrive whole: {complaint}", hint=f"is there room in {images}?")
            _accept(work, images, name, expected)
    _say(answers, _DONE)


@contextmanager
def _archive_of(source: IO[bytes], brought: Path | None) -> Iterator[IO[bytes]]:
    if brought is None:
        yield source
        return
    if source.readline() != _BROUGHT:
        raise Broken("the image was not brought", hint="the sender says why, and tries again")
    with brought.open("rb") as file:
        yield file


def copy(image: Image, images: Path) -> bool:
    """Copy an image into the directory `images`, which exists. False if that has it already. Raises `Broken` if the
    copy is not the image, and `Exhausted` if there is no room; nothing of it is left then."""
    with catalog.locked(images, image.name):
        expected = catalog.recorded_digest(image.path)
        if _is_same(image, images, expected):
            return False
        with catalog.beside(images, image.name) as work:
            files = [str(image.path / file) for file in catalog.FILES]
            argv = ["cp", "--reflink=auto", "--sparse=always", "--dereference", "--", *files, str(work)]
            status, complaint = _run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            if status:
                raise Exhausted(f"cannot copy image {image.name}: {complaint}", hint=f"is there room in {images}?")
            _accept(work, images, image.name, expected or catalog.digest_of(image.path))
    return True


def stated_digest(image: Image) -> str:
    """The recorded digest of the image; without a record it is computed, which takes seconds."""
    return catalog.recorded_digest(image.path) or catalog.digest_of(image.path)


def _accept(work: Path, images: Path, name: str, expected: str) -> None:
    """Put the image in `work` in its place, if it has that digest."""
    found = catalog.digest_of(work)
    if found != expected:
        text = f"the copy of image {name} has the digest {found[:12]}, and not {expected[:12]}"
        raise Broken(text, hint="was the image changed meanwhile? copy it again")
    for file in catalog.FILES:
        (work / file).chmod(0o644)  # whatever the umask: the users of QEMU read them
    catalog.record_digest(work, found)
    catalog.put_in_place(work, images, name)


def _is_same(image: Image, images: Path, expected: str) -> bool:
    """Whether `images` has that image already, by its digest or, without one, by its manifest."""
    here = _loaded(images, image.name)
    if here is None:
        return False
    return catalog.recorded_digest(here.path) == expected if expected else catalog.same(here, image)


def _loaded(images: Path, name: str) -> Image | None:
    """The image of that name; None if it is absent or incomplete."""
    try:
        return catalog.load(images, name)
    except Refused:
        return None


def _say(answers: IO[bytes], word: bytes) -> None:
    answers.write(word)
    answers.flush()


def _run(argv: Sequence[str], stdin: int | IO[bytes], stdout: int | IO[bytes]) -> tuple[int, str]:
    """The exit status of a program, and its complaint."""
    with _start(argv, stdin, stdout) as process:
        assert process.stderr is not None
        complaint = process.stderr.read().decode(errors="replace").strip()
    return process.returncode, complaint


def _start(argv: Sequence[str], stdin: int | IO[bytes], stdout: int | IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE)
    except OSError as error:
        raise Broken(f"cannot run {argv[0]}: {error.strerror}", hint="is it installed?") from error


log = structlog.get_logger()

_PATIENCE = 0.1  # seconds that a listing waits for a look at the source, which takes milliseconds unless it hangs
_PATIENCE_OF_JOBS = 2.0  # seconds that the first VM of a job waits for it: an old copy may not fit this release


class ImageStore:
    """The images of a host: in the directory `local`, and at a `source` of the site, which has the same images or newer
    ones. `fetch` copies an image from there; first it calls `check` with its directory, and raises its errors.

    The source may be on a file system that hangs. So a thread looks at it, and everything but the copying itself uses
    the result of the last look.
    """

    def __init__(self, local: Path, source: Path | None, check: Callable[[Path], None] = lambda path: None) -> None:
        self._local, self._source, self._check = local, source, check
        self._offered: Mapping[str, tuple[Image, int]] = {}
        self._lock = threading.Lock()
        self._looking: threading.Thread | None = None
        self._waited_until = 0.0  # when nobody waits for the look any more

    def listed(self) -> list[Image]:
        """All images, sorted by name. An image that is to be copied first is described as at the source."""
        self._look(_PATIENCE)
        names = {image.name for image in catalog.list_images(self._local)} | self._offered.keys()
        return [self.described(name) for name in sorted(names)]

    def described(self, name: str) -> Image:
        """The image of that name, as it is here or would be copied. Raises `Refused` if there is none."""
        offered, _ = self._offered.get(name, (None, 0))
        if offered is None:
            return catalog.load(self._local, name)
        here = _loaded(self._local, name)
        return here if here is not None and catalog.same(here, offered) else offered

    def found(self, name: str) -> Image:
        """`described` after a look at the source: an agent that only makes VMs inside jobs lists no images. If the look
        takes longer, this waits for an image that is only at the source."""
        self._look(_PATIENCE_OF_JOBS)
        try:
            return self.described(name)
        except Refused:
            if self._source is None:
                raise
            return catalog.load(self._source, name)

    def disk_size(self, image: Image) -> int | None:
        """The bytes of the disk of an image that is not here yet; None if it is here."""
        offered, size = self._offered.get(image.name, (None, 0))
        return size if offered is not None and image.path == offered.path else None

    def fetch(self, name: str) -> Image:
        """The image of that name. It is copied first if it is not here, or a newer one is known. Raises `Refused` if
        there is none, `Broken` if the copy is not like the original, and `Exhausted` if there is no room."""
        offered, _ = self._offered.get(name, (None, 0))
        here = _loaded(self._local, name)
        if here is None and offered is None and self._source is not None:
            offered = catalog.load(self._source, name)  # nobody has looked there yet
        if offered is None or (here is not None and catalog.same(here, offered)):
            return catalog.load(self._local, name)
        self._check(offered.path)
        if not self._local.exists():
            self._local.mkdir(parents=True)
            self._local.chmod(0o755)  # whatever the umask: the users of QEMU pass through it
        copy(offered, self._local)
        return catalog.load(self._local, name)

    def _look(self, patience: float) -> None:
        """Begin a look, or wait for a look that has begun."""
        if self._source is None:
            return
        with self._lock:
            looking = self._looking
            if looking is None or not looking.is_alive():
                looking = threading.Thread(target=self._read, args=(self._source,), name="images", daemon=True)
                looking.start()
                self._looking, self._waited_until = looking, time.monotonic() + patience
            left = self._waited_until - time.monotonic()
        if left > 0:
            looking.join(left)

    def _read(self, source: Path) -> None:
        found = {}
        try:
            for image in catalog.list_images(source):
                found[image.name] = (image, image.disk.stat().st_size)
        except OSError as error:  # what the look before has shown stays
            log.warning("the site's images cannot be read", path=str(source), reason=error.strerror)
        else:
            self._offered = found
