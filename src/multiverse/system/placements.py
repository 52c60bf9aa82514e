"""The placement policies of a site: functions that installed packages register as entry points.

A package registers a policy by its name, in its pyproject.toml:

    [project.entry-points."multiverse.placement"]
    rack-first = "my_package:rack_first"

What the function is given and returns is in `core.capacity.placement_policies.PlacementPolicy`. Users name the policy
with `--constraint=place-rack-first`, and `placement.policy` in the settings makes it that of all other jobs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

from multiverse.core.errors import Broken, Refused
from multiverse.core.model.basics import Placement

GROUP = "multiverse.placement"

_NAME = re.compile(r"[a-z][a-z0-9-]*")  # it becomes a feature of nodes in the scheduler

Policy = Callable[..., Sequence[str]]


def names() -> list[str]:
    """The names of all policies, the built-in ones first."""
    return [*(one.value for one in Placement), *sorted(_registered())]


def load() -> dict[str, Policy]:
    """The registered policies, by name. One that cannot be loaded raises why when it is asked: the others work."""
    return {name: _load(one) for name, one in _registered().items()}


def check(name: str) -> None:
    """Raise `Refused` if there is no policy of that name."""
    if name not in names():
        raise Refused(
            f"placement.policy: there is no placement policy {name}",
            hint=f"choose one of {', '.join(names())}, or install the package that registers it",
        )


def _registered() -> Mapping[str, EntryPoint]:
    """Names that cannot be, or are those of built-in policies, are left out."""
    built_in = {one.value for one in Placement}
    found = sorted(entry_points(group=GROUP), key=lambda one: (one.name, one.value))
    return {one.name: one for one in reversed(found) if _NAME.fullmatch(one.name) and one.name not in built_in}


def _load(entry: EntryPoint) -> Policy:
    def refuse(*_: object) -> Sequence[str]:
        raise Broken(reason)

    try:
        policy: Policy = entry.load()
        reason = "" if callable(policy) else f"{entry.value} is no function"
    except Exception as error:  # whatever a package of the site raises as it is imported
        reason = f"{entry.value} cannot be loaded: {error!r:.200}"
    return refuse if reason else policy
