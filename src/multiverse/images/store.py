"""The images of a host: those in its directory, and those that it copies from a directory of the site when needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from multiverse.core.errors import Refused
from multiverse.images import catalog, transfer
from multiverse.images.catalog import Image

log = structlog.get_logger()

_PATIENCE = 0.1  # seconds that a listing waits for a look at the source, which takes milliseconds unless it hangs
_PATIENCE_OF_JOBS = 2.0  # seconds that the first VM of a job waits for it: an old copy may not fit this release


class ImageStore:
    """The images in `local`. With a `source`, also those there: they are the same images or newer ones. `check` is
    called with each directory before an image is copied from there; its errors are those of `fetch`.

    The source may be on a file system of the site that hangs. So it is looked at in a thread, begun by `listed`, and
    all but the copying itself goes by what the last look has shown.
    """

    def __init__(self, local: Path, source: Path | None, check: Callable[[Path], None] = lambda path: None) -> None:
        self._local, self._source, self._check = local, source, check
        self._offered: Mapping[str, tuple[Image, int]] = {}
        self._lock = threading.Lock()
        self._looking: threading.Thread | None = None
        self._waited_until = 0.0  # when nobody waits for the look any more

    def listed(self) -> list[Image]:
        """All images, sorted by name. One that is to be copied first is described as it is at the source."""
        self._look(_PATIENCE)
        names = {image.name for image in catalog.list_images(self._local)} | self._offered.keys()
        return [self.described(name) for name in sorted(names)]

    def described(self, name: str) -> Image:
        """The image of that name, as it is here or would be copied. Raises `Refused` if there is none."""
        offered, _ = self._offered.get(name, (None, 0))
        if offered is None:
            return catalog.load(self._local, name)
        here = self._here(name)
        return here if here is not None and catalog.same(here, offered) else offered

    def found(self, name: str) -> Image:
        """The same, after a look at the source, which nobody else may take: an agent that makes VMs inside jobs alone
        lists no images. If the look takes longer, an image that is nowhere but at the source is waited for."""
        self._look(_PATIENCE_OF_JOBS)
        try:
            return self.described(name)
        except Refused:
            if self._source is None:
                raise
            return catalog.load(self._source, name)

    def disk_size(self, image: Image) -> int | None:
        """The size of the disk of an image that is not here yet, in bytes; None if it is here."""
        offered, size = self._offered.get(image.name, (None, 0))
        return size if offered is not None and image.path == offered.path else None

    def fetch(self, name: str) -> Image:
        """The image of that name, copied first if it is not here or a newer one is known. Raises `Refused` if there is
        none, `Broken` if the copy is not like the original, and `Exhausted` if there is no room."""
        offered, _ = self._offered.get(name, (None, 0))
        here = self._here(name)
        if here is None and offered is None and self._source is not None:
            offered = catalog.load(self._source, name)  # nobody has looked there yet
        if offered is None or (here is not None and catalog.same(here, offered)):
            return catalog.load(self._local, name)
        self._check(offered.path)
        if not self._local.exists():
            self._local.mkdir(parents=True)
            self._local.chmod(0o755)  # whatever the umask: the users of QEMU pass through it
        transfer.copy(offered, self._local)
        return catalog.load(self._local, name)

    def _here(self, name: str) -> Image | None:
        try:
            return catalog.load(self._local, name)
        except Refused:
            return None

    def _look(self, patience: float) -> None:
        """Begin a look, or wait for the one that another thread has begun."""
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
