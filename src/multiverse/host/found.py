"""What guests' kernels were found to be unable to do here, kept across restarts.

An image's manifest says what it can plug; whether its kernel does it depends on the accelerator and QEMU too. Linux of
November 2025 and later (6.18, Debian's 6.12) counts the CPUs that ACPI shows as disabled only under a hypervisor it
knows, and QEMU's emulator is none of those: such a guest boots with "0 hotplug CPUs".
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Collection
from pathlib import Path

import structlog

from multiverse.images.catalog import Image

log = structlog.get_logger()


def remember(file: Path, facts: object, what: str) -> None:
    """Keep what was found out for the next start: the file is replaced whole. What cannot be kept is said."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(facts))
        fresh.rename(file)
    except OSError as error:
        log.warning(f"cannot remember {what}", path=str(file), reason=error.strerror)


class Found:
    """Lacking abilities, by image as it is built now. `around` tells QEMU and accelerator: with others all is open
    again. A file that cannot be read or written costs what it tells: the next template finds it out."""

    def __init__(self, file: Path, around: str) -> None:
        self._file = file
        self._around = around
        self._lock = threading.Lock()
        self._lacking = self._read()

    def abilities(self, image: Image) -> frozenset[str]:
        """What the image can do here, as far as is known."""
        return frozenset(image.abilities) - self._lacking.get(self._key(image), frozenset())

    def lacks(self, image: Image, ability: str, reason: str, known: Collection[Image]) -> None:
        """From now on the image cannot do that. What is kept of images other than `known` is forgotten."""
        with self._lock:
            key = self._key(image)
            if ability not in image.abilities or ability in self._lacking.get(key, frozenset()):
                return
            log.warning("guests of an image lack an ability here: templates of their size are made",
                        image=image.name, ability=ability, reason=reason)  # fmt: skip
            keys = {self._key(one) for one in known}
            kept = {one: what for one, what in self._lacking.items() if one in keys}
            self._lacking = kept | {key: kept.get(key, frozenset()) | {ability}}
            remember(self._file, {one: sorted(what) for one, what in self._lacking.items()}, "what guests can do")

    def _key(self, image: Image) -> str:
        return f"{self._around} {image.name} {image.key} {zlib.crc32(image.cmdline.encode()):x}"

    def _read(self) -> dict[str, frozenset[str]]:
        try:
            return {str(key): frozenset(map(str, what)) for key, what in json.loads(self._file.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
