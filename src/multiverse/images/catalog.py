"""The images in a directory of this machine: what is known about each, and which of them are complete.

An image is a directory that holds `disk.raw` (ext4 without a partition table, sparse), `vmlinuz`, `initrd.img` and
the manifest `image.json`. The builder (`multiverse.images.build`) writes it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from multiverse.core.errors import Refused

Flavour = Literal["slim", "stock"]

ABILITIES = ("fork", "plug_cpus", "plug_memory", "limit_disk")
"""What an image that we build can do. `fork`: a template can be frozen at the guest agent's fork point. `plug_cpus` and
`plug_memory`: the guest takes CPUs and memory that are plugged while it runs. `limit_disk`: the guest agent keeps users
to an allowance of the disk."""

_MANIFEST = "image.json"


@dataclass(frozen=True)
class Image:
    """An image on disk.

    `key` is a hash of everything that the image was made of, `base` the same without the guest agent. `cmdline` is the
    kernel's command line, `release` the kernel's release, `suite` Debian's. `abilities` are some of ABILITIES.
    """

    name: str
    flavour: Flavour
    key: str
    base: str
    path: Path
    cmdline: str
    release: str
    suite: str
    packages: tuple[str, ...] = ()
    abilities: tuple[str, ...] = ABILITIES

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
    """The complete images of the directory `images`, sorted by name. One that is still being copied is left out."""
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


def same(one: Image, other: Image) -> bool:
    """Whether two images, which may be in different directories, were made of the same."""
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
