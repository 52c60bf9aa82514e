"""How long images took to build on this machine, so that the next build can say how long it will take."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from multiverse.system import files

FILE = ".durations.json"


def expected(images: Path, flavour: str) -> float | None:
    """Seconds that the last image of this flavour took; None if that is not known."""
    found = _read(images).get(flavour)
    return float(found) if isinstance(found, int | float) else None


def keep(images: Path, flavour: str, seconds: float) -> None:
    """Remember how long one took. That nothing could be remembered is no error."""
    with suppress(OSError):
        files.replace(images / FILE, json.dumps(_read(images) | {flavour: round(seconds, 1)}), mode=0o644)


def _read(images: Path) -> dict[str, object]:
    try:
        found = json.loads((images / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
