"""A file that describes an image: what it is installed from, and what is put into it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field

from multiverse.config import Allowed, Example, Mistake, Unit, examined_as
from multiverse.core.errors import MultiverseError, Refused
from multiverse.images import catalog
from multiverse.images.catalog import Flavour
from multiverse.system.toml_positions import positions

SUITES = {12: "bookworm", 13: "trixie"}
"""Debian's releases that images are built of."""
DISK_MIB = 16384  # size of the disk that the guest sees; the file is sparse, so only what is written takes space

# The string below each key is its meaning: docs/image-files.md is made of these strings and of the types.


@dataclass(frozen=True)
class ImageDistribution:
    """What the image is installed from."""

    name: Literal["debian"] = "debian"
    """The distribution."""
    release: Literal[12, 13] | None = None
    """The release of Debian, and so of Slurm: 12 has Slurm 22.05, and 13 has 24.11. Not set: that of this machine."""
    sources: Annotated[Path | None, Example('"trixie.sources"')] = None
    """A file of apt sources (sources.list(5)) whose name ends with .sources or .list. Not set: this machine's own; if
    the release is not this machine's, those of them that are of that release."""


@dataclass(frozen=True)
class ImageFile:
    """A file that is put into the image once the packages are installed. A file of that name is replaced."""

    source: Annotated[Path, Example('"files/motd"')]
    """The file to copy."""
    target: Annotated[str, Allowed("an absolute path without .."), Example('"/etc/motd"')]
    """Its path in the image. Missing directories are made."""
    mode: Annotated[str, Field(pattern=r"^0?[0-7]{3,4}$"), Allowed("three or four octal digits")] = "0644"
    """Its mode."""
    owner: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9_][\w.-]*(:[A-Za-z0-9_][\w.-]*)?$"), Allowed("USER or USER:GROUP")
    ] = "root:root"
    """Its owner: a user of the image by name or number, and perhaps a group."""


@dataclass(frozen=True)
class ImageHook:
    """A program that changes the image. It runs in the image, which is its root directory, as root, and with the
    network of this machine. Hooks run in the order of the file. If one fails, no image is made."""

    program: Annotated[Path, Example('"hooks/modules.sh"')]
    """The program: a script with its interpreter in the first line, which the image must have."""
    at: Literal["packages", "files"] = "files"
    """When it runs: as soon as the packages are installed, or after the files are put in place."""


@dataclass(frozen=True)
class ImageDescription:
    """An image."""

    name: Annotated[
        str | None, Allowed("at most 40 lower-case letters, digits, dots and dashes"), Example('"science"')
    ] = None
    """The name of the image, which jobs ask for. Not set: the name of the file without .toml."""
    flavour: Flavour = "slim"
    """slim has no service manager: the guest agent is the first process, and the guest boots in seconds. stock boots
    systemd, for programs that need its services."""
    packages: Annotated[tuple[str, ...], Example('["hpcc", "openmpi-bin"]')] = ()
    """Packages to install beside those that every image has."""
    kernel_arguments: Annotated[
        tuple[str, ...], Allowed("words without blanks or quotes"), Example('["hugepages=64"]')
    ] = ()
    """Words for the kernel's command line, after our own."""
    size: Annotated[int, Field(ge=4096, le=1 << 20), Unit("MiB")] = DISK_MIB
    """The size of the disk that the guest sees. Only what is written takes space."""
    distribution: ImageDistribution = ImageDistribution()
    files: tuple[ImageFile, ...] = ()
    hooks: tuple[ImageHook, ...] = ()


def read_description(path: Path) -> ImageDescription:
    """The description in a file, with its name filled in, and with paths as seen from here. Raises `Refused`, which
    names every wrong key with its line."""
    try:
        text = path.read_text()
        raw = tomllib.loads(text)
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}", hint="docs/image-files.md shows an example") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{path} is not TOML: {error}", hint="correct that line") from error
    described, found = examined_as(ImageDescription, raw)
    if described is not None:
        described = _resolved(described, path)
        found += _mistakes(described)
    if described is None or found:
        lines = positions(text)
        wrong = sorted((_line_of(one.key, lines), str(one)) for one in found)
        raise Refused(
            "; ".join(f"{path}:{line}: {said}" for line, said in wrong),
            hint="correct these keys; docs/image-files.md explains each",
        )
    return described


def _line_of(key: tuple[str | int, ...], lines: Any) -> int:
    """The line of a key, or of what it is missing in."""
    return next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), 1)


def _resolved(described: ImageDescription, path: Path) -> ImageDescription:
    beside, distribution = path.parent, described.distribution
    return replace(
        described,
        name=described.name or path.stem,
        distribution=replace(distribution, sources=distribution.sources and beside / distribution.sources),
        files=tuple(replace(one, source=beside / one.source) for one in described.files),
        hooks=tuple(replace(one, program=beside / one.program) for one in described.hooks),
    )


_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.:-]*")
_ARGUMENT = re.compile(r"""[^\s"']+""")


def wrong_packages(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not _PACKAGE.fullmatch(name)]


def _mistakes(described: ImageDescription) -> Iterator[Mistake]:
    """What is wrong with values whose types are right."""
    try:
        catalog.check_name(described.name or "")
    except MultiverseError as error:
        yield Mistake(("name",), f"{error.message}: {error.hint}")
    for i, name in enumerate(described.packages):
        if wrong_packages((name,)):
            yield Mistake(("packages", i), f"{name!r} is not the name of a package")
    for i, word in enumerate(described.kernel_arguments):
        if not _ARGUMENT.fullmatch(word):
            yield Mistake(("kernel_arguments", i), f"{word!r} is not one word without quotes")
    sources = described.distribution.sources
    if sources is not None:
        if sources.suffix not in (".sources", ".list"):
            yield Mistake(("distribution", "sources"), f"the name of {sources} must end with .sources or .list")
        yield from _absent(("distribution", "sources"), sources)
    for i, file in enumerate(described.files):
        yield from _absent(("files", i, "source"), file.source)
        target = PurePosixPath(file.target)
        if not target.is_absolute() or ".." in target.parts or not target.name:
            yield Mistake(("files", i, "target"), f"{file.target!r} is not an absolute path without ..")
    for i, hook in enumerate(described.hooks):
        yield from _absent(("hooks", i, "program"), hook.program)


def _absent(key: tuple[str | int, ...], path: Path) -> Iterator[Mistake]:
    if not path.is_file():
        yield Mistake(key, f"there is no file {path}")
