"""The effect that each state of each row permits, and how long the planner waits after failures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.machines.offer import step_offer
from multiverse.core.machines.tables import effect_of
from multiverse.core.model.basics import Depth, Key
from multiverse.core.model.host import HostState
from multiverse.core.model.job import AttemptState, LeaseState
from multiverse.core.model.reason import said, text_of
from multiverse.core.model.saved import SavedState
from multiverse.core.model.vm import OfferState, TemplateState, VmState
from multiverse.core.model.world import Row, World
from multiverse.core.transition import Effect, EffectKind
from tests.unit.planner_harness import POLICY
from tests.unit.rows import attempt, effects_of, known_host, lease, offer, rows, saved, state, template, vm

A, V, T, O, E, H = AttemptState, VmState, TemplateState, OfferState, EffectKind, HostState  # noqa: E741
L, S = LeaseState, SavedState

# Of each state of each kind of row: the effect, and its text.
EFFECTS: list[tuple[Row, E | None, str]] = [
    (attempt(A.QUEUED, note=said("wait")), None, ""),
    (attempt(A.QUEUED), None, ""),
    (attempt(A.UNGATED, note=said("wait")), E.GATE, ""),
    (attempt(A.STRAY, note=said("wait")), E.REQUEUE, ""),
    (attempt(A.RESTORING, origin="batch"), E.RESTORE, ""),
    (attempt(A.HOLDING, note=said("its last 10 runs ended")), E.HOLD, "its last 10 runs ended"),
    (attempt(A.CLAIMED, note=said("wait")), None, ""),
    (attempt(A.SPAWNING, note=said("wait")), None, ""),
    (attempt(A.SPAWNED, choice=said("instant on h1")), E.PIN, "instant on h1"),
    (attempt(A.ADDING_USER, choice=said("instant on h1")), E.PIN, "instant on h1"),
    (attempt(A.ALLOCATED), None, ""),
    (attempt(A.WARNED, reason="job 12 takes its place"), E.WARN, "job 12 takes its place"),
    (attempt(A.PREEMPTING, reason="job 12 takes its place"), E.PREEMPT, "job 12 takes its place"),
    (attempt(A.RETURNING, outcome="requeued", reason="held"), E.GATE, ""),
    (attempt(A.REVOKING, outcome="revoked", reason="too large"), E.REVOKE, "too large"),
    (attempt(A.REVOKING, outcome="failed", reason="no luck"), E.REVOKE, "no luck"),
    *((attempt(A.RECLAIMING, outcome=o, reason="x"), None, "") for o in ("done", "cancelled", "requeued", "revoked")),
    (attempt(A.DONE, outcome="done"), None, ""),
    (attempt(A.CANCELLED, outcome="cancelled"), None, ""),
    (attempt(A.REQUEUED, outcome="requeued"), None, ""),
    (attempt(A.REVOKED, outcome="revoked"), None, ""),
    (attempt(A.FAILED, outcome="failed"), None, ""),
    (vm(V.PLANNED), E.CREATE, ""),
    (vm(V.PARKED), None, ""),
    (vm(V.STARTING), E.START, ""),
    (vm(V.JOINED), None, ""),
    (vm(V.SERVING), None, ""),
    (vm(V.MOVING), E.MOVE, ""),
    (vm(V.SETTLING), E.SETTLE, ""),
    (vm(V.FALLING_ASLEEP), E.SLEEP, ""),
    (vm(V.ASLEEP), None, ""),
    (vm(V.DELAYED), E.DELAY, ""),
    (vm(V.WAKING), E.WAKE, ""),
    (vm(V.RETIRING), None, ""),
    (vm(V.ORPHAN, job_id="7"), None, ""),
    (vm(V.DEAD), None, ""),
    (vm(V.LOST), None, ""),
    (vm(V.ENDING), E.END, ""),
    (vm(V.REMOVING), E.REMOVE, ""),
    (vm(V.DELETING), E.DELETE, ""),
    (vm(V.RELEASING), E.RELEASE, ""),
    (vm(V.GONE), None, ""),
    (template(T.ABSENT), None, ""),
    (template(T.BUILDING), E.BUILD, ""),
    (template(T.READY), None, ""),
    (template(T.BROKEN, reason="no boot"), None, ""),
    (template(T.RETIRING), E.DROP, ""),
    *((known_host(state), E.FENCE if state is H.FENCING else None, "h1" * (state is H.FENCING)) for state in H),
    (lease(L.PLANNED), E.REQUEST, ""),
    (lease(L.WAITING), None, ""),
    (lease(L.STARTING), None, ""),
    (lease(L.IDLE), None, ""),
    (lease(L.HELD), None, ""),
    (lease(L.ENDING), None, ""),
    (lease(L.LOST), E.GIVE_BACK, ""),
    (lease(L.RELEASING), E.GIVE_BACK, ""),
    (lease(L.GONE), None, ""),
    (saved(S.PREPARING), E.PREPARE, ""),
    (saved(S.FREEZING), E.FREEZE, ""),
    (saved(S.CUTTING), E.CUT, "saved since 1970-01-01 00:00:00 UTC: an operator asked for it"),
    (saved(S.WRITING), E.SAVE, ""),
    (saved(S.KEEPING), E.KEEP, ""),
    (saved(S.HOLDING, reason="it cannot go on"), E.HOLD, "it cannot go on"),
    (saved(S.STORED), None, ""),
    (saved(S.CAPTURING), E.CAPTURE, ""),
    (saved(S.COPYING), E.COPY, ""),
    (saved(S.RESUMING), E.RESUME, ""),
    (saved(S.QUEUEING), E.QUEUE, "saved since 1970-01-01 00:00:00 UTC: an operator asked for it"),
    (saved(S.THAWING), E.THAW, ""),
    (saved(S.UNDOING), E.UNDO, ""),
    (saved(S.DISCARDING), E.DISCARD, ""),
    (saved(S.GONE), None, ""),
]

OFFERS: list[tuple[O, E | None]] = [
    (O.OPEN, E.OFFER),
    (O.TAKEN, None),
    (O.CLOSING, E.WITHDRAW),
    (O.CLOSED, None),
    (O.ENDED, None),
]


@pytest.mark.parametrize(("row", "kind", "text"), EFFECTS)
def test_a_state_permits_one_effect_on_its_own_row_and_none_in_quarantine(row: Row, kind: E | None, text: str) -> None:
    assert effect_of(row) == (Effect(kind, row.key, text) if kind else None)
    assert effect_of(replace(row, quarantined=said("an operator has to end it"))) is None


@pytest.mark.parametrize(("state", "kind"), OFFERS)
def test_an_offer_permits_its_effect_under_the_key_of_its_vm(state: O, kind: E | None) -> None:
    assert effect_of(offer(state, id=3)) == (Effect(kind, Key("vm", 3)) if kind else None)
    assert effect_of(replace(offer(state, id=3), quarantined=said("an operator has to end it"))) is None


def test_the_effect_of_a_vm_replaces_that_of_its_offer() -> None:
    """At most one effect runs under each key: a VM that is being destroyed is not offered at the same time."""
    open_, ending = offer(O.OPEN, id=1), offer(O.CLOSING, id=2)
    found = effects_of(
        rows(vm(V.JOINED, id=1), open_, vm(V.ENDING, id=2), ending, attempt(A.UNGATED), template(T.BUILDING))
    )
    assert {effect.key: effect.kind for _, effect in found} == {
        Key("vm", 1): E.OFFER,
        Key("vm", 2): E.END,
        Key("attempt", 1): E.GATE,
        Key("template", 1): E.BUILD,
    }


@pytest.mark.parametrize("trouble", [{"state": V.LOST}, {"quarantined": "an operator has to end it"}])
def test_the_offer_of_a_vm_that_can_serve_no_job_is_withdrawn(trouble: dict[str, object]) -> None:
    spare = replace(vm(V.JOINED, pool=Depth.JOINED), **trouble)  # type: ignore[arg-type]
    held = state(spare, offer(O.OPEN))
    step_offer(held, 1, World())
    (row,) = held.offers.values()
    assert row.state is O.CLOSING and "no job" in text_of(row.reason)
    effects = {effect.kind for _, effect in effects_of(held)}
    assert effects == {E.WITHDRAW}


def test_every_state_and_every_effect_of_a_row_is_in_this_file() -> None:
    assert {row.state for row, _, _ in EFFECTS} | {state for state, _ in OFFERS} == {*A, *V, *T, *O, *H, *L, *S}
    # An orphan has no row: SWEEP and CANCEL are the controller's. What jobs wait for is in no row either.
    without_rows = {E.SWEEP, E.CANCEL}
    assert {kind for _, kind, _ in EFFECTS if kind} | {kind for _, kind in OFFERS if kind} == {*E} - without_rows


def test_rows_of_different_kinds_with_one_number_have_different_keys() -> None:
    keys = [attempt(A.QUEUED, id=3).key, vm(V.PLANNED, id=3).key, template(T.READY, id=3).key, offer(O.OPEN, id=3).key]
    assert keys == [Key("attempt", 3), Key("vm", 3), Key("template", 3), Key("offer", 3)]


@pytest.mark.parametrize(
    ("tries", "seconds"), [(-1, 0), (0, 0), (1, 2), (2, 4), (3, 8), (8, 256), (9, 300), (100_000, 300)]
)
def test_a_back_off_doubles_up_to_its_limit(tries: int, seconds: float) -> None:
    assert replace(POLICY, retry_base=2.0, retry_limit=300.0).backoff(tries) == seconds
