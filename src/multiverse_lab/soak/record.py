"""What a job writes about itself while it runs: a line when a run begins, every two seconds, and when it ends.

Each line is appended to the job's record by opening and closing the file, so that it is on the file server even if the
VM dies a moment later. A run is known by its node, because names of nodes do not recur; slurmctld forgets the number of
restarts if it is killed at the wrong moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SCRIPT = """\
#!/bin/bash
export LC_ALL=C
id={name}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}
record={directory}/$id.record
say() {{ echo "$1 ${{2:-0}} $HOSTNAME $EPOCHREALTIME" >> $record; }}
say begin
{body}for ((beat = 0; beat < {seconds}; beat += 2)); do
    {again}
    say beat
    sleep 2
done
say end
echo "$id is whole"
{last}"""
ONCE_ONLY = '[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || break'


def script(name: str, directory: Path, seconds: int, *, body: str = "", once: bool = False, code: int = 0) -> str:
    """A job script that writes its record to `directory`, and exits with `code`. With `once` it runs for `seconds` the
    first time only."""
    again, last = ONCE_ONLY if once else ":", f"exit {code}\n"
    return SCRIPT.format(name=name, directory=directory, body=body, seconds=seconds, again=again, last=last)


def whole(name: str) -> str:
    """The last line of the output of a job that ran to its end."""
    return f"{name} is whole"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One run of a job, by its node. Unix times. `ended` says whether the script came to its end, `nodes` on how many
    nodes its step ran (0: it had none)."""

    node: str
    began: float
    last: float
    ended: bool = False
    nodes: int = 0


def parse(lines: Iterable[str]) -> tuple[tuple[RecordedRun, ...], int]:
    """The runs in a record by their beginning, and the number of lines that make no sense."""
    found: dict[str, RecordedRun] = {}
    damaged = 0
    for line in lines:
        try:
            word, number, node, time = line.split()
            at, value = float(time), int(number)
        except ValueError:
            damaged += 1
            continue
        run = found.get(node)
        if (run is None) != (word == "begin") or word not in ("begin", "beat", "tasks", "end"):
            damaged += 1
            continue
        began, nodes = (at, 0) if run is None else (run.began, run.nodes)
        found[node] = RecordedRun(node, began, at, word == "end", value if word == "tasks" else nodes)
    return tuple(sorted(found.values(), key=lambda run: run.began)), damaged
