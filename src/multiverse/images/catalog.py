"""The images in a directory of this machine: what is known about each, which are complete, and how one gets there.

An image is a directory that holds `disk.raw` (ext4 without a partition table, sparse), `vmlinuz`, `initrd.img` and
the manifest `image.json`. `multiverse.images.build` and `multiverse.images.transfer` make it in a directory beside its
place, so that it appears there as a whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from multiverse.core.errors import Broken, Refused
from multiverse.system import files, kernel
from multiverse.system.locks import locked_file

Flavour = Literal["slim", "stock"]

# The abilities of images that we build. `fork`: a template can be frozen at the guest agent's fork point. `plug_cpus`
# and `plug_memory`: the guest takes CPUs and memory that are plugged while it runs. `limit_disk`: the guest agent keeps
# users to an allowance of the disk.
ABILITIES = ("fork", "plug_cpus", "plug_memory", "limit_disk")

_MANIFEST = "image.json"


@dataclass(frozen=True)
class Image:
    """An image on disk."""

    name: str
    flavour: Flavour
    key: str  # a hash of everything that the image was made of
    base: str  # the same without the guest agent
    path: Path
    cmdline: str  # of the kernel
    release: str  # of the kernel
    suite: str  # Debian's release
    packages: tuple[str, ...] = ()
    abilities: tuple[str, ...] = ABILITIES
    made_from: tuple[str, ...] = ()  # everything that it was made of, a short line each; the first says it in all

    @property
    def disk(self) -> Path:
        return self.path / "disk.raw"

    @property
    def kernel(self) -> Path:
        return self.path / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.path / "initrd.img"


def load(images: Path, name: str) -> Image:
    """The image `name` of the directory `images`. Raises `Refused` if it is absent or incomplete."""
    try:
        image = _read(images / name)
    except (OSError, ValueError, TypeError, KeyError) as error:
        known = ", ".join(i.name for i in list_images(images)) or "none"
        raise Refused(
            f"there is no image {name!r} in {images}",
            hint=f"images present: {known}; build one with `multiverse image build`",
        ) from error
    if missing := _missing(image):
        raise Refused(f"image {name} lacks {', '.join(missing)}", hint="build it again with `multiverse image build`")
    return image


def list_images(images: Path) -> list[Image]:
    """The complete images of the directory `images`, sorted by name."""
    found = []
    for path in sorted(images.glob(f"*/{_MANIFEST}")):
        if not path.parent.name.startswith("."):
            try:
                image = _read(path.parent)
            except (OSError, ValueError, TypeError, KeyError):
                continue
            if not _missing(image):
                found.append(image)
    return found


def incomplete_images(images: Path) -> dict[str, str]:
    """Why directories with some of an image's files are no image, by name."""
    complete = {image.name for image in list_images(images)}
    names = dict.fromkeys(path.parent.name for file in FILES for path in sorted(images.glob(f"*/{file}")))
    return {name: _why_incomplete(images / name) for name in names if name not in complete and name[0] != "."}


def _why_incomplete(path: Path) -> str:
    missing = [file for file in FILES if not (path / file).is_file()]
    return f"lacks {', '.join(missing)}" if missing else f"has no readable {_MANIFEST}"


def same(one: Image, other: Image) -> bool:
    """Whether two images were made of the same. They may be in different directories."""
    return replace(one, path=other.path) == other


def write_manifest(image: Image, directory: Path) -> None:
    """Write the manifest of `image` into `directory`, which will become `image.path`."""
    raw = {k: v for k, v in asdict(image).items() if k != "path"}
    (directory / _MANIFEST).write_text(json.dumps(raw, indent=1) + "\n")


def _missing(image: Image) -> list[str]:
    return [file.name for file in (image.disk, image.kernel, image.initrd) if not file.is_file()]


def _read(path: Path) -> Image:
    known = {field.name for field in fields(Image)}  # a later release may have added some
    raw: dict[str, Any] = json.loads((path / _MANIFEST).read_text())
    found: dict[str, Any] = {key: tuple(it) if isinstance(it, list) else it for key, it in raw.items() if key in known}
    return Image(**found | {"path": path})


FILES = ("image.json", "vmlinuz", "initrd.img", "disk.raw")  # the files of an image
_DIGEST = "image.sha256"  # not in the manifest, which is one of the files
_BLOCK = 64 << 10
_ZEROS = bytes(_BLOCK)


def digest_of(directory: Path) -> str:
    """The digest of the image in a directory, by which a copy is verified. Raises `Broken` if a file cannot be read."""
    try:
        return digest_of_files(directory, FILES)
    except OSError as error:
        raise Broken(f"cannot read the image in {directory}: {error}", hint="copy or build it again") from error


def digest_of_files(directory: Path, names: Sequence[str]) -> str:
    """The digest of these files in a directory: SHA-256 over the name and size of each, and the offset and content of
    its blocks of 64 KiB that are not all zero. So it does not depend on the holes of sparse files, and holes are not
    read. Raises `OSError`."""
    found = hashlib.sha256()
    for name in names:
        with (directory / name).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            found.update(f"{name}\0{size}\0".encode())
            for offset, block in _blocks(file.fileno(), size):
                found.update(f"{offset}\0".encode())
                found.update(block)
    return found.hexdigest()


def recorded_digest(directory: Path) -> str:
    """The digest that was recorded beside the image; empty if none was."""
    try:
        return (directory / _DIGEST).read_text().strip()
    except OSError:
        return ""


def record_digest(directory: Path, digest: str) -> None:
    files.replace(directory / _DIGEST, f"{digest}\n", mode=0o644)


def _blocks(fd: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Each block that is not all zero, with its offset."""
    offset = 0
    while offset < size:
        try:
            data = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole follows
            return
        offset, end = data // _BLOCK * _BLOCK, os.lseek(fd, data, os.SEEK_HOLE)
        while offset < end:
            block = os.pread(fd, _BLOCK, offset)
            if not block:
                return
            if block != _ZEROS[: len(block)]:
                yield offset, block
            offset += _BLOCK


_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")


def check_name(name: str) -> None:
    """Raise `Refused` if this cannot be the name of an image and its directory."""
    if not _NAME.fullmatch(name):
        raise Refused(
            f"{name!r} is not a valid name of an image",
            hint="use at most 40 lower-case letters, digits, dots and dashes",
        )


def locked(images: Path, name: str) -> AbstractContextManager[object]:
    """Hold the lock under which the image of that name is made or replaced."""
    return locked_file(images / f".{name}.lock")


@contextmanager
def beside(images: Path, name: str) -> Iterator[Path]:
    """A new directory beside the place of the image, whose lock is held. It is removed after an error. Remains of
    interrupted attempts are removed first; an image that was moved aside and not replaced goes back to its place. No
    other file here has an @ in its name."""
    for remains in (*images.glob(f".{name}@old-*"), *images.glob(f".{name}@new-*")):
        if "@old-" in remains.name and not (images / name).exists():
            remains.rename(images / name)
        else:
            shutil.rmtree(remains)
    work = Path(tempfile.mkdtemp(prefix=f".{name}@new-", dir=images))
    try:
        work.chmod(0o755)
        yield work
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def put_in_place(work: Path, images: Path, name: str) -> None:
    """Replace the image of that name by the complete one in `work`. VMs that use the old one keep its files. One of the
    two is in its place at each moment, if the file system can exchange them."""
    place, old = images / name, work
    os.sync()
    if not place.exists():
        work.rename(place)
        return
    try:
        kernel.exchange(work, place)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        old = work.with_name(work.name.replace("@new-", "@old-"))  # what `beside` puts back after a crash
        place.rename(old)
        work.rename(place)
    shutil.rmtree(old, ignore_errors=True)


_STATUS = "/var/lib/dpkg/status"
_TIMEOUT = 30.0  # seconds


def package_version(disk: Path, package: str) -> str | None:
    """The version of a Debian package in an image, read from its disk without booting it. None if it is no image of
    Debian or lacks the package, or e2fsprogs is not installed here."""
    try:
        done = subprocess.run(
            ["debugfs", "-R", f"cat {_STATUS}", str(disk)], stdin=subprocess.DEVNULL, capture_output=True,
            timeout=_TIMEOUT, check=False, env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.decode(errors="replace")
    found = re.search(rf"^Package: {re.escape(package)}\n(?:\S.*\n| .*\n)*?Version: (\S+)", text, re.MULTILINE)
    return found[1] if found else None
