"""The images that the tests on real guests use. `python -m tests.integration.images` builds them, once."""

from __future__ import annotations

import json
import os
from pathlib import Path

from multiverse.guest import image

CACHE = Path(os.environ.get("MULTIVERSE_TEST_CACHE", Path(__file__).parents[2] / "var/cache/test"))
IMAGES = CACHE / "images"


def slim() -> image.Image:
    """The default image, with a real parallel program in it."""
    return image.build("slim", "slim", IMAGES, packages=("hpcc",), progress=print)


def mpi() -> image.Image:
    """One with MPICH and Open MPI. Slurm's PMIx plugin opens libpmix.so, which Debian has in libpmix-dev only."""
    return image.build("mpi", "slim", IMAGES, packages=("mpich", "openmpi-bin", "libpmix-dev"), progress=print)


def stiff() -> image.Image:
    """The default image again, but its manifest says that it can plug nothing."""
    return again("stiff", abilities=["fork"])


def narrow() -> image.Image:
    """The default image again, but its kernel has no room for more than two CPUs, which nobody has told the host."""
    return again("narrow", cmdline=f"{slim().cmdline} possible_cpus=2")


def again(name: str, **other: object) -> image.Image:
    """The default image by another name, and with another manifest."""
    own, path = slim(), IMAGES / name
    facts = json.loads((own.path / "image.json").read_text()) | {"name": name, **other}
    path.mkdir(exist_ok=True)
    for file in (own.disk, own.kernel, own.initrd):
        beside = path / f".{file.name}.new"
        beside.hardlink_to(file)
        beside.replace(path / file.name)  # which does nothing if it is that file already
        beside.unlink(missing_ok=True)
    (path / "image.json").write_text(json.dumps(facts))
    return image.load(IMAGES, name)


if __name__ == "__main__":
    slim()
