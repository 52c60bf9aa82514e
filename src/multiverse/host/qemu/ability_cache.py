"""What guests of an image were found to be unable to do on this host, kept across restarts.

An image's manifest says what its guests can have plugged. Whether their kernel accepts it depends on the accelerator
and QEMU too. Linux since November 2025 (6.18, and Debian's 6.12) counts the CPUs that ACPI shows as disabled only under
a hypervisor that it knows. QEMU's emulation is not one of these: such a guest boots with "0 hotplug CPUs".
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Collection
from pathlib import Path

import structlog

from multiverse.core.errors import Refused
from multiverse.host import path_security
from multiverse.images.catalog import Image
from multiverse.system import files

log = structlog.get_logger()


def save(file: Path, facts: object) -> None:
    """Write a cache of `facts` as JSON. A file that cannot be written is logged: the facts are found out again."""
    try:
        if not file.parent.exists():
            path_security.make_directory(file.parent, 0o711)  # users of QEMU and of a lab's daemons pass through it
        files.replace(file, json.dumps(facts))
    except (OSError, Refused) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        log.warning("cache not written", path=str(file), reason=reason)


class AbilityCache:
    """Abilities that an image's guests lack. An image that is built again, another QEMU and another accelerator
    (`environment` names both) start without entries. A file that cannot be read counts as empty: the next template
    finds out what it held."""

    def __init__(self, file: Path, environment: str) -> None:
        self._file = file
        self._environment = environment
        self._lock = threading.Lock()
        self._lacking = self._read()

    def abilities(self, image: Image) -> frozenset[str]:
        """What the guests of the image can do here, as far as is known."""
        return frozenset(image.abilities) - self._lacking.get(self._key(image), frozenset())

    def record_lacking(self, image: Image, ability: str, reason: str, known: Collection[Image]) -> None:
        """Record that guests of the image lack an ability. Entries of images that are not in `known` are removed."""
        with self._lock:
            key = self._key(image)
            if ability not in image.abilities or ability in self._lacking.get(key, frozenset()):
                return
            log.warning("guests lack an ability", image=image.name, ability=ability, reason=reason)
            keys = {self._key(one) for one in known}
            kept = {one: what for one, what in self._lacking.items() if one in keys}
            self._lacking = kept | {key: kept.get(key, frozenset()) | {ability}}
            save(self._file, {one: sorted(what) for one, what in self._lacking.items()})

    def _key(self, image: Image) -> str:
        return f"{self._environment} {image.name} {image.key} {zlib.crc32(image.cmdline.encode()):x}"

    def _read(self) -> dict[str, frozenset[str]]:
        try:
            return {str(key): frozenset(map(str, what)) for key, what in json.loads(self._file.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
