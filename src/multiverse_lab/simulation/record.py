"""Histories as plain lines, so that `scripts/compare` can show that moves and renames change nothing.

A line is a row's transition (time, row, source state, target state, event), a call of a port (time, method, arguments)
or a job's outcome. Texts for people are left out. `scripts/compare` runs this module in two checkouts.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from multiverse_lab.simulation.fuzz import silence_logs
from multiverse_lab.simulation.generate import with_faults
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate

TEXTS = frozenset({"choice", "note", "problem", "quarantined", "reason", "text", "unwanted"})
"""Fields of values that hold texts for people."""

_WORD = re.compile(r"[A-Za-z_]+")


def lines(outcome: Outcome) -> Iterator[str]:
    """Everything that two checkouts must agree on for one history."""
    events = [(e.mono, f"{e.kind} {e.id}: {e.source} -> {e.target} by {e.event}") for e in outcome.entries if e.target]
    for mono, text in events:
        yield f"{mono:.6f} {text}"
    for call in outcome.calls:
        yield f"{call.at:.6f} {call.id} {json.dumps([plain(one) for one in call.arguments])}"
    for job, result in sorted(outcome.results.items()):
        yield f"job {job}: {result}"
    yield f"{len(outcome.violations)} promises broken, {outcome.commits} commits"


def plain(value: Any) -> Any:
    """A value as JSON can hold it, without its texts."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value) if one.name not in TEXTS}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list | frozenset | set):
        return [plain(one) for one in (sorted(value) if isinstance(value, frozenset | set) else value)]
    return value.hex() if isinstance(value, bytes) else value if isinstance(value, int | float | None) else str(value)


def renamed(line: str, renames: Mapping[str, str]) -> str:
    """The line with the names of the newer checkout."""
    return _WORD.sub(lambda word: renames.get(word[0], word[0]), line) if renames else line


def main(arguments: list[str]) -> None:
    """FIRST COUNT [RENAMES] prints a digest for each seed; `--lines SEED [RENAMES]` prints one seed's lines."""
    silence_logs()
    whole = arguments[0] == "--lines"
    if whole:
        arguments = [arguments[1], "1", *arguments[2:]]
    first, count = int(arguments[0]), int(arguments[1])
    renames: dict[str, str] = json.loads(Path(arguments[2]).read_text()) if len(arguments) > 2 else {}
    if len(set(renames.values())) < len(renames):
        raise SystemExit("the map of names is not one to one")
    for seed in range(first, first + count):
        found = [renamed(line, renames) for line in lines(simulate(with_faults(seed)))]
        if whole:
            print("\n".join(found))
        else:
            digest = hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]
            print(f"{seed} {digest}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
