"""The images that the tests with real guests use. `python -m tests.integration.images` builds the default one."""

from __future__ import annotations

import json
import os
from pathlib import Path

from multiverse.images.build import build
from multiverse.images.catalog import Image, load

CACHE = Path(os.environ.get("MULTIVERSE_TEST_CACHE", Path(__file__).parents[2] / "var/cache/test"))
IMAGES = CACHE / "images"
BUILT = CACHE / "bench"
"""Those of benchmarks, which build them as they are delivered."""


def slim() -> Image:
    """The default image, with a real parallel program in it."""
    return build("slim", "slim", IMAGES, packages=("hpcc",), progress=print)


def plain() -> Image:
    """The default image as benchmarks build it."""
    return build("slim", "slim", BUILT, progress=print)


def mpi() -> Image:
    """An image with MPICH and Open MPI. Slurm's PMIx plugin opens libpmix.so, which only Debian's libpmix-dev has."""
    return build("mpi", "slim", IMAGES, packages=("mpich", "openmpi-bin", "libpmix-dev"), progress=print)


def stiff() -> Image:
    """The default image with a manifest that says that nothing can be plugged into it."""
    return copy_of_slim("stiff", abilities=["fork"])


def narrow() -> Image:
    """The default image with a kernel that supports two CPUs at most. The manifest does not say so."""
    return copy_of_slim("narrow", cmdline=f"{slim().cmdline} possible_cpus=2")


def copy_of_slim(name: str, **fields: object) -> Image:
    """The default image under another name. `fields` replace those of its manifest."""
    own, path = slim(), IMAGES / name
    manifest = json.loads((own.path / "image.json").read_text()) | {"name": name, **fields}
    path.mkdir(exist_ok=True)
    for file in (own.disk, own.kernel, own.initrd):
        beside = path / f".{file.name}.new"
        beside.hardlink_to(file)
        beside.replace(path / file.name)  # rename(2) does nothing if both names are links to one file
        beside.unlink(missing_ok=True)
    (path / "image.json").write_text(json.dumps(manifest))
    return load(IMAGES, name)


if __name__ == "__main__":
    slim()
