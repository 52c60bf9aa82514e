"""What `multiverse explain` and `multiverse capacity` print, at 80 columns and at 140."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from pydantic import TypeAdapter

from multiverse.api import (
    CapacityUsageView,
    CapacityView,
    ExplanationsView,
    ExplanationView,
    HostGroupView,
    JobEvictionView,
    SizeView,
    StartableView,
    TimelineEntry,
    TimelineView,
    TrialView,
)
from multiverse.cli import jobs, render
from multiverse.cli.commands import build
from multiverse.core.errors import Gone

GROUPS = (
    HostGroupView("n[1-9000]", 9000, False, "full: 4 CPUs needed, 0 to 3 free"),
    HostGroupView("n[" + ",".join(map(str, range(9001, 9400, 2))) + "]", 200, True, "has room for 1 of its VMs"),
    *(HostGroupView(f"m{n}", 1, False, f"drained (reason {n})") for n in range(10)),
)
WAITING = ExplanationView(
    "12_1", "a name", 1000, 7, "queued", 5.0, "waiting behind earlier jobs",
    "It has waited for 2 min: waiting behind earlier jobs. 4 jobs are ahead of it; job 2 keeps them waiting.",
    "wait, or ask for less", 4, "2", 1_700_000_000.0, GROUPS,
)  # fmt: skip
RUNNING = replace(
    WAITING, job_id="12_9", state="allocated", short="", text="It has run for 3 s.", todo="", expected=None, hosts=()
)
NOTHING = SizeView(0, 0, 0)
CAPACITY = CapacityView(
    "slim",
    CapacityUsageView(
        3, 1, SizeView(12, 9000, 90000), SizeView(4, 900, 9000), NOTHING, NOTHING, SizeView(4, 4000, 40000),
        SizeView(4, 4100, 41000),
    ),
    (StartableView(1, 512, 0, 4, 0), StartableView(2, 1024, 2048, 0, 3)), 5, True, "2",
)  # fmt: skip
TRIAL = TrialView(False, False, "waiting for capacity: the hosts are full", "", 3, "2", None, 1_700_000_000.0, GROUPS)


def printed(*words: str, width: int = 80, **answers: Any) -> str:
    """What a command prints for documents made of these values, by question."""

    def document(value: Any) -> Any:
        return lambda *_, **__: TypeAdapter(type(value)).dump_python(value, mode="json")

    client = SimpleNamespace(**{name: document(value) for name, value in answers.items()})
    out = io.StringIO()
    with (
        mock.patch.object(jobs, "asker", lambda _: contextlib.nullcontext(client)),
        mock.patch.object(render.console, "_width", width),
        contextlib.redirect_stdout(out),
    ):
        build()([*words], prog_name="multiverse", standalone_mode=False)
    assert max(map(len, out.getvalue().splitlines())) <= width
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_a_job_is_explained_with_the_first_groups_of_hosts(width: int) -> None:
    text = printed("explain", "12_1", width=width, explain=ExplanationsView((WAITING,)))
    flat = " ".join(text.split())
    assert "It has waited for 2 min" in flat and "to do: wait, or ask for less" in flat
    assert "By the time limits it starts by 2023-11-14 22:14 UTC at the latest." in flat
    assert "n[1-9000]" in text and "drained (reason 5)" in text and "drained (reason 6)" not in text
    assert "4 more groups of hosts: --hosts shows all" in text and "…" in text


def test_a_user_sees_when_and_why_their_job_was_evicted_and_what_that_cost() -> None:
    saved = JobEvictionView(1_700_000_000.0, "save", "", "another job (high) takes its place", 12288, 340.5)
    moves = JobEvictionView(1_700_003_600.0, "move", "n7", "host n7 is drained", 700, None, under_way=True)
    text = printed(
        "explain", "12_9", explain=ExplanationsView((replace(RUNNING, evictions=(saved, moves)),)), width=120
    )
    first, second = [line.split() for line in text.splitlines() if "2023-11-1" in line]
    assert "Job 12_9 was evicted 2 times:" in text
    assert " ".join(first[2:]) == "a host save 12.0 GiB 5m40s another job (high) takes its place"
    assert " ".join(second[2:]) == "n7 move 700 MiB not yet host n7 is drained"


def test_all_hosts_are_shown_where_they_are_asked_for() -> None:
    text = printed("explain", "12_1", "--hosts", explain=ExplanationsView((WAITING,)))
    assert "drained (reason 9)" in text and "more groups" not in text and "9399" in "".join(text.split())


def test_tasks_that_wait_for_the_same_are_told_together() -> None:
    others = [replace(WAITING, job_id=f"12_{n}", ahead=n, hosts=()) for n in (2, 3)]
    text = printed("explain", "12", explain=ExplanationsView((WAITING, *others, RUNNING), more=7))
    assert text.count("It has waited") == 1 and "The same is true of 12_2, 12_3." in text
    assert "It has run for 3 s." in text and "7 more tasks of this array" in text


def test_names_of_jobs_are_shown_as_they_are() -> None:
    hostile = replace(WAITING, name="[red]\x1b[31mx", text="[bold]It waits.\x1b[2J", hosts=())
    text = printed("explain", "12_1", explain=ExplanationsView((hostile,)))
    assert "[red] [31mx" in text and "[bold]It waits. [2J" in text and "\x1b" not in text


def test_an_error_is_the_daemons() -> None:
    def gone(_: str) -> Any:
        raise Gone("no job 9 is known")

    client = contextlib.nullcontext(SimpleNamespace(explain=gone))
    with mock.patch.object(jobs, "asker", lambda _: client), pytest.raises(Gone):
        build()(["explain", "9"], prog_name="multiverse", standalone_mode=False)


@pytest.mark.parametrize(("state", "shown"), [("requeued", True), ("allocated", False)])
def test_a_timeline_says_why_an_attempt_has_ended(state: str, shown: bool) -> None:
    entries = (
        TimelineEntry(1.0, "attempt 3", "restarted", "reclaiming", "its QEMU has ended"),
        TimelineEntry(2.0, "attempt 3", "reclaimed", state, "its QEMU has ended"),
        TimelineEntry(3.0, "vm 4", "absent", "gone", ""),
    )
    text = printed("timeline", "7", timeline=[TimelineView("7", 3, state, 0.0, (), entries)])
    assert ("its QEMU has ended" in text) is shown


@pytest.mark.parametrize("width", [80, 140])
def test_capacity_shows_what_is_used_and_what_would_start(width: int) -> None:
    text = printed("capacity", width=width, capacity=CAPACITY)
    assert "3 hosts in sight, 1 of them takes no new VM" in text and "on closed hosts" in text
    assert "Job 2 waits for capacity and comes first" in text and "+ 3" in text
    quiet = replace(CAPACITY, blocked=False, blocked_by="", waiting=0)
    assert "comes first" not in printed("capacity", width=width, capacity=quiet)
    unnamed = replace(CAPACITY, blocked_by="")
    assert "A job waits for capacity" in printed("capacity", width=width, capacity=unnamed)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (TRIAL, ("It would wait.", "3 jobs would be ahead of it, and job 2", "Without other jobs that wait")),
        (replace(TRIAL, ahead=0, behind="", alone=None), ("Nobody can tell when",)),
        (replace(TRIAL, expected=1_700_000_000.0), ("It would start by 2023-11-1", "by the time limits")),
        (replace(TRIAL, never=True, why="fits on no host"), ("It would be refused.", "fits on no host")),
        (replace(TRIAL, starts=True, why="instant on n1", hosts="n1", groups=()), ("It would start at once.", "on n1")),
    ],
)
def test_one_request_is_answered(found: TrialView, said: tuple[str, ...]) -> None:
    flat = " ".join(printed("capacity", "--for", "-c 2 --mem 1G", trial=found).split())
    assert all(part in flat for part in said)
    assert ("Nobody can tell" in flat) == (found.expected is None and found.alone is None and not found.starts)
