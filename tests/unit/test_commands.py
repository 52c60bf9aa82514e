"""What operators' commands do: drop templates, fence hosts, and end quarantines and back-offs."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from multiverse.core.changes import apply_command
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import Key, Size
from multiverse.core.model.host import Drain, Host, HostState, HypervisorView, KnownHost
from multiverse.core.model.job import AttemptState
from multiverse.core.model.reason import said, text_of
from multiverse.core.model.vm import Template, TemplateState, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Row, World
from multiverse.core.planner import plan
from multiverse.core.rows import Rows
from multiverse.core.state import State
from multiverse.core.transition import Change, Command, Event
from tests.unit.planner_harness import POLICY
from tests.unit.rows import IMAGES, attempt, changes_of, rows, template, vm, world_of

A, V, T = AttemptState, VmState, TemplateState
NOW = 1000.0


def after_command(here: Rows, command: Command) -> list[Change]:
    """The changes that a command causes while all sources are unknown."""
    return changes_of(plan(State(here, TABLES, NOW), World(), [command], NOW, POLICY))


def test_a_drop_command_retires_the_templates_that_it_describes() -> None:
    some = [
        template(T.READY, id=1),
        template(T.READY, id=2, size=Size(2, 512)),
        template(T.READY, id=3, account="physics"),
        template(T.READY, id=4, image="other"),
    ]

    def dropped(**which: object) -> list[int]:
        command = Command("drop", "h1", "slim", **which)  # type: ignore[arg-type]
        return [c.row.id for c in after_command(rows(*some), command) if c.event is Event.DROPPED]

    assert dropped() == [1, 2, 3]
    assert dropped(size=Size(2, 512)) == [2]
    assert dropped(account="physics") == [3] and dropped(account="") == [1, 2]


def test_a_fence_ends_all_vms_on_that_host_and_no_others() -> None:
    here = rows(
        vm(V.LOST, id=1, reason="it was out of reach", quarantined=said("odd")),
        vm(V.LOST, id=2, host="h2"),
        vm(V.SERVING, id=3),
        vm(V.RELEASING, id=4),
        known=["h1", "h2"],
    )
    state = State(here, TABLES, NOW)
    off, *changes = changes_of(plan(state, World(), [Command("fence", "h1")], NOW, POLICY))
    assert (off.row.key, off.event, off.row.state) == (Key("host", 1), Event.FENCED, HostState.FENCED)
    assert [(c.row.id, c.event) for c in changes] == [(1, Event.FENCED), (3, Event.FENCED)]
    assert changes[0].row == replace(here.vms[1], state=V.ENDING, since=NOW, quarantined=None)
    assert state.vms[3].state is V.ENDING and "an operator" in text_of(state.vms[3].reason)
    assert state.is_fenced("h1") and not state.is_fenced("h2")


@pytest.mark.parametrize("before", [HostState.KNOWN, HostState.SILENT, HostState.FENCING, HostState.FENCED])
@pytest.mark.parametrize(
    ("verb", "event", "after"),
    [
        ("drain", Event.DRAINED, None),
        ("resume", Event.RESUMED, HostState.KNOWN),
        ("remove", Event.REMOVED, HostState.REMOVED),
    ],
)
def test_an_operator_drains_resumes_and_removes_a_host_in_any_state(
    before: HostState, verb: Literal["drain", "resume", "remove"], event: Event, after: HostState | None
) -> None:
    drain = Drain(0.0, "a fan")
    known = KnownHost("h1", "h1", before, drain=None if verb == "drain" else drain, id=1, version=1)
    held = State(replace(rows(), hosts={"h1": known}), TABLES, NOW)
    held.begin(NOW, {}, "test")
    apply_command(held, Command(verb, "h1", drain=drain if verb == "drain" else None), World(), POLICY)
    (change,) = changes_of(held.moves)
    assert (change.event, change.row.state) == (event, after or before)


def test_a_template_goes_with_the_host_that_an_operator_removes() -> None:
    states = (T.BUILDING, T.BROKEN, T.READY, T.RETIRING)
    some = [template(state, id=id_, image=f"i{id_}") for id_, state in enumerate(states, 1)]
    off = KnownHost("h1", "h1", HostState.FENCED, id=1, version=1)
    here = replace(rows(*some, known=["h1"]), hosts={"h1": off})
    changes = after_command(here, Command("remove", "h1"))
    gone = [(c.row.id, c.event, c.row.state) for c in changes if isinstance(c.row, Template)]
    assert gone == [(id_, Event.REMOVED, T.ABSENT) for id_ in (1, 2, 3, 4)]


def test_a_host_that_is_in_sight_or_unknown_cannot_be_fenced() -> None:
    here = rows(vm(V.SERVING), known=["h1"])
    view = HypervisorView(
        {"h1": Host("h1", Size(4, 4096), images=IMAGES)}, {"mvtest0-1": VmSeen("mvtest0-1", "h1", VmCondition.RUNNING)}
    )
    for world, name in ((world_of(None, view, NOW), "h1"), (World(), "h9")):
        state = State(here, TABLES, NOW)
        assert plan(state, world, [Command("fence", name)], NOW, POLICY) == []
        assert not state.is_fenced(name)


RETRIED: list[tuple[Row, dict[str, object] | None]] = [
    (attempt(A.QUEUED, not_before=NOW + 0.5), {"not_before": 0.0}),
    (attempt(A.QUEUED, not_before=NOW), None),
    (attempt(A.QUEUED), None),
    (attempt(A.SPAWNED, quarantined=said("odd")), {"quarantined": None}),
    (vm(V.JOINED, quarantined=said("odd")), {"quarantined": None}),
    (vm(V.JOINED), None),
    (template(T.READY, quarantined=said("odd")), {"quarantined": None}),
    (template(T.BROKEN, quarantined=said("odd")), {"quarantined": None}),
    (template(T.BROKEN, reason="no boot", tries=3), {"state": T.BUILDING, "since": NOW, "reason": None}),
    (template(T.READY), None),
]


@pytest.mark.parametrize(("row", "becomes"), RETRIED)
def test_a_retry_ends_a_quarantine_or_back_off_and_changes_nothing_else(
    row: Row, becomes: dict[str, object] | None
) -> None:
    changes = after_command(rows(row), Command("retry", key=row.key))
    assert [c.row for c in changes] == ([] if becomes is None else [replace(row, **becomes)])
    if becomes is not None:
        assert changes[0].event is (Event.NEEDED if "state" in becomes else Event.RETRIED)
    assert after_command(rows(row), Command("retry")) == []
