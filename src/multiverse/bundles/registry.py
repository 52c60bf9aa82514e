"""Finds the bundles that the settings name, by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from multiverse.bundles.contract import PlatformBundle, SchedulerBundle
from multiverse.config import Settings
from multiverse.core.errors import Refused

PLATFORMS, SCHEDULERS = "multiverse.platforms", "multiverse.schedulers"
"""The groups of entry points. The name of one is what the settings say; it leads to a bundle."""


def platform_bundles(settings: Settings) -> Mapping[str, PlatformBundle]:
    """The platforms of the site, by name, in the order of the settings. Raises `Refused` if one is not installed."""
    return {name: _load(PLATFORMS, name, "platforms") for name in settings.platforms}


def scheduler_bundle(settings: Settings) -> SchedulerBundle:
    """The scheduler of the site. Raises `Refused` if it is not installed."""
    bundle: SchedulerBundle = _load(SCHEDULERS, settings.scheduler, "scheduler")
    return bundle


def _load(group: str, name: str, key: str) -> Any:
    found = {one.name: one for one in entry_points(group=group)}
    if name not in found:
        raise Refused(
            f"{key} names {name!r}, and nothing of that name is installed",
            hint=f"set {key} in the settings to one of: {', '.join(sorted(found)) or 'none is installed'}",
        )
    return found[name].load()
