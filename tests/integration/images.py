"""The images that the tests on real guests use. `python -m tests.integration.images` builds them, once."""

from __future__ import annotations

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


if __name__ == "__main__":
    slim()
