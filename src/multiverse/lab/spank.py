"""Where Slurm's plugin for VMs inside jobs is on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from multiverse.config import JobVmSettings

_CHECKOUT = Path(__file__).parents[3] / "var" / "spank"  # where `make spank` puts both
_PLACES = (
    (_CHECKOUT / "multiverse.so", _CHECKOUT / "mventer"),
    (JobVmSettings.plugin, JobVmSettings.enter),  # `make -C spank install`
)


def built_plugin(places: Sequence[tuple[Path, Path]] = _PLACES) -> tuple[Path, Path] | None:
    """The plugin and the program that enters a VM: of this checkout, or installed. None if they were not built."""
    return next((both for both in places if all(path.exists() for path in both)), None)
