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


if __name__ == "__main__":
    slim()
