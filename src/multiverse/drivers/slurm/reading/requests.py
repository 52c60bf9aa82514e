"""What a job asks for by its comment, because Slurm has no option for it: words such as `vm:net=1G,per-host=2`.

multiverse.lua reads the same (`wishes` there), and refuses at submission what cannot be understood. The keys:

- `net`: bandwidth of each VM in bits a second (`M`, the default, or `G`).
- `per-host`: how many VMs of the job may be on one host.
- `mem-per-task`: the memory of each task (`M`, the default, `G` or `T`). multiverse.lua makes the job's memory per node
  of it, so that Slurm counts and limits it, and nothing here depends on it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MIB = {"": 1, "M": 1, "G": 1024, "T": 1 << 20}
_MBIT = {"": 1, "M": 1, "G": 1000}
_UNITS = {"mem-per-task": _MIB, "net": _MBIT, "per-host": {"": 1}}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a comment asks for: Mbit/s and VMs on a host; 0 where it asks for nothing. `problem`: why it cannot be
    understood."""

    net: int = 0
    per_host: int = 0
    problem: str = ""


_NONE = Wishes()
_SPACES = re.compile(r"[ \t\n\v\f\r]+")
"""What separates words for Lua: Python alone would also part them at a no-break space."""


def read(comment: str) -> Wishes:
    """What a job with this comment asks for."""
    if "vm:" not in comment:
        return _NONE
    found: dict[str, int] = {}
    for word in _SPACES.split(comment):
        for wish in word.removeprefix("vm:").split(",") if word.startswith("vm:") else ():
            key, _, text = wish.partition("=")
            value = _quantity(text, _UNITS.get(key, {}))
            if wish and (value is None or key in found):
                return Wishes(problem=f"vm:{wish} in --comment cannot be understood: submit the job again without it")
            found[key] = value or 0
    return Wishes(found.get("net", 0), found.get("per-host", 0))


def _quantity(text: str, units: dict[str, int]) -> int | None:
    match = re.fullmatch(r"(\d{1,9})([A-Za-z]?)", text, re.ASCII)
    times = units.get(match[2].upper()) if match else None
    return (int(match[1]) * times or None) if match and times else None
