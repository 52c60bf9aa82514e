"""Traces of the real lab replay against the fakes, and one that was tampered with does not.

`five_jobs`: one job ends well, one with 3, one is cancelled as it runs, one is held and released, one loses its VM,
is requeued, and is cancelled then (tests/integration/test_trace.py records it). `five_jobs_busy` is of a busy machine:
jobs were observed when they were pinned and not yet started, and a node while it was being set DOWN.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multiverse_lab.simulation.replay import replay

TRACES = sorted((Path(__file__).parent / "traces").glob("*.jsonl"))
LINES = [json.loads(line) for line in TRACES[0].read_text().splitlines()]


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)
def test_the_fakes_do_what_the_real_ones_did(trace: Path) -> None:
    assert replay(trace.read_text().splitlines()) == []


def call(name: str, result: str) -> Callable[[dict[str, Any]], bool]:
    return lambda line: line["call"] == name and line["result"] == result


def shows(kind: str, name: str, **fields: Any) -> Callable[[dict[str, Any]], bool]:
    def found(line: dict[str, Any]) -> bool:
        seen = line.get(kind, {}).get(name)
        return seen is not None and all(seen[field] == value for field, value in fields.items())

    return found


def change_job(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda line: line["jobs"][name].update(fields)


def change(kind: str, to: str) -> Callable[[dict[str, Any]], None]:
    return lambda line: line[kind].update(dict.fromkeys(line[kind], to))


@pytest.mark.parametrize(
    ("which", "doctor", "said"),
    [
        (call("scheduler.unpin", "Stale"), lambda line: line.update(result="ok"), "says ok, the fake Stale"),
        (call("scheduler.pin", "ok"), lambda line: line.update(result="Refused"), "says Refused, the fake ok"),
        (call("hypervisor.create", "ok"), lambda line: line.update(result="Gone"), "says Gone, the fake ok"),
        (call("hypervisor.destroy", "ok"), lambda line: line.update(result="Broken"), "says Broken, the fake ok"),
        (shows("jobs", "1", state="pending"), change_job("1", state="running"), "jobs 1: the trace shows running"),
        (shows("jobs", "3", state="running"), change_job("3", pinned="mv_99"), "jobs 3: the trace shows running mv_99"),
        (
            shows("jobs", "5", restarts=1),
            change_job("5", gated=True, pinned=None),
            "jobs 5: the trace shows pending True",
        ),
        (lambda line: "parked" in line.get("vms", {}).values(), change("vms", "running"), "the trace shows running"),
        (lambda line: "idle" in line.get("nodes", {}).values(), change("nodes", "down"), "the trace shows down"),
        (lambda line: "idle" in line.get("nodes", {}).values(), change("nodes", "drained"), "the trace shows drained"),
        (
            shows("jobs", "1", state="running"),
            change_job("1", state="pending", pinned="mv_99"),
            "jobs 1: the trace shows pending False mv_99",
        ),
    ],
)
def test_a_doctored_trace_is_found_out(
    which: Callable[[dict[str, Any]], bool], doctor: Callable[[dict[str, Any]], None], said: str
) -> None:
    lines = json.loads(json.dumps(LINES))
    doctor(next(line for line in lines if which(line)))
    assert any(said in difference for difference in replay(map(json.dumps, lines)))


def test_a_fake_that_runs_ahead_is_found_out() -> None:
    """The node of the last job was deleted: a trace that does not show it gone ends otherwise than the fake."""
    last = next(line for line in reversed(LINES) if "nodes" in line)
    lines = [line for line in LINES if line is not last]
    assert any(said.startswith("at the end: nodes") for said in replay(map(json.dumps, lines)))


@pytest.mark.parametrize("result", ["COMPLETED", "NODE_FAIL", "CANCELLED", "TIMEOUT"])
def test_jobs_that_were_over_before_the_trace_began_are_no_difference(result: str) -> None:
    lines = json.loads(json.dumps(LINES))
    over = next(seen for line in reversed(lines) for seen in line.get("jobs", {}).values() if seen)
    first = next(line for line in lines if line["call"] == "scheduler.observe")
    first.setdefault("jobs", {})["99"] = {**over, "state": "ended", "result": result}
    assert replay(map(json.dumps, lines)) == []
