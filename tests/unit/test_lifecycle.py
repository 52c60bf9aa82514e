"""What each state permits, whole and exactly; and how long a failure waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.machines.tables import effect_of
from multiverse.core.model import AttemptState, Key, Offer, Row, TemplateState, VmState
from multiverse.core.transition import Effect, EffectKind
from tests.unit.planner_harness import POLICY
from tests.unit.rows import attempt, template, vm

A, V, T, E = AttemptState, VmState, TemplateState, EffectKind

EFFECTS: list[tuple[Row, E | None, str]] = [
    (attempt(A.QUEUED, stray=True, gated=False, note="wait"), E.REQUEUE, ""),
    (attempt(A.QUEUED, gated=False, note="wait"), E.GATE, ""),
    (attempt(A.QUEUED, note="wait"), E.EXPLAIN, "wait"),
    (attempt(A.QUEUED), None, ""),
    (attempt(A.CLAIMED, gated=False, stray=True, note="wait"), None, ""),
    (attempt(A.SPAWNING, gated=False, stray=True, note="wait"), None, ""),
    (attempt(A.SPAWNED, gated=False), E.PIN, ""),
    (attempt(A.ALLOCATED, gated=False), None, ""),
    (attempt(A.RECLAIMING, outcome="revoked", reason="too large", gated=False), E.REVOKE, "too large"),
    (attempt(A.RECLAIMING, outcome="failed", reason="no luck"), E.REVOKE, "no luck"),
    (attempt(A.RECLAIMING, outcome="requeued", reason="held", gated=False), E.GATE, ""),
    (attempt(A.RECLAIMING, outcome="requeued", reason="held"), None, ""),
    (attempt(A.RECLAIMING, outcome="done", gated=False), None, ""),
    (attempt(A.RECLAIMING, outcome="cancelled", gated=False), None, ""),
    (attempt(A.DONE, outcome="done"), None, ""),
    (attempt(A.CANCELLED, outcome="cancelled"), None, ""),
    (attempt(A.REQUEUED, outcome="requeued", gated=False), None, ""),
    (attempt(A.REVOKED, outcome="revoked"), None, ""),
    (attempt(A.FAILED, outcome="failed"), None, ""),
    (vm(V.PLANNED), E.CREATE, ""),
    (vm(V.PARKED), None, ""),
    (vm(V.STARTING), E.START, ""),
    (vm(V.JOINED), None, ""),
    (vm(V.JOINED, offer=Offer.CLOSED), None, ""),
    (vm(V.JOINED, offer=Offer.TAKEN), None, ""),
    (vm(V.JOINED, offer=Offer.OPEN, attempt=1), None, ""),
    (vm(V.RELEASING, offer=Offer.OPEN), E.END, ""),
    (vm(V.SERVING, failed=True), None, ""),
    (vm(V.LOST, failed=True, forget=True), None, ""),
    (vm(V.RELEASING), E.END, ""),
    (vm(V.RELEASING, forget=True), E.RELEASE, ""),
    (vm(V.RELEASING, fenced=True, failed=True), E.END, ""),
    (vm(V.RELEASING, fenced=True, forget=True), E.RELEASE, ""),
    (vm(V.GONE, forget=True), None, ""),
    (template(T.ABSENT), None, ""),
    (template(T.BUILDING), E.BUILD, ""),
    (template(T.READY), None, ""),
    (template(T.BROKEN, reason="no boot"), None, ""),
    (template(T.RETIRING), E.DROP, ""),
]


ON_OFFER: list[tuple[Row, E]] = [
    (vm(V.JOINED, offer=Offer.OPEN), E.OFFER),
    (vm(V.JOINED, offer=Offer.CLOSING), E.WITHDRAW),
    (vm(V.LOST, offer=Offer.OPEN), E.WITHDRAW),
    (vm(V.LOST, offer=Offer.CLOSING), E.WITHDRAW),
]


@pytest.mark.parametrize(("row", "kind"), ON_OFFER)
def test_what_is_on_offer_is_withdrawn_unless_all_is_well_with_it(row: Row, kind: E) -> None:
    assert effect_of(row) == Effect(kind, row.key)
    assert effect_of(replace(row, quarantined="somebody has to look at it")) == Effect(E.WITHDRAW, row.key)


@pytest.mark.parametrize(("row", "kind", "text"), EFFECTS)
def test_a_state_permits_one_effect_on_its_own_row_and_none_in_quarantine(row: Row, kind: E | None, text: str) -> None:
    assert effect_of(row) == (Effect(kind, row.key, text) if kind else None)
    assert effect_of(replace(row, quarantined="somebody has to look at it")) is None


def test_no_state_is_left_out() -> None:
    assert {row.state for row, _, _ in EFFECTS} == {*A, *V, *T}
    assert {kind for _, kind, _ in EFFECTS if kind} | {kind for _, kind in ON_OFFER} == set(E)


def test_rows_of_different_kinds_with_one_number_have_different_keys() -> None:
    keys = [attempt(A.QUEUED, id=3).key, vm(V.PLANNED, id=3).key, template(T.READY, id=3).key]
    assert keys == [Key("attempt", 3), Key("vm", 3), Key("template", 3)]


@pytest.mark.parametrize(
    ("tries", "seconds"), [(-1, 0), (0, 0), (1, 2), (2, 4), (3, 8), (8, 256), (9, 300), (100_000, 300)]
)
def test_a_back_off_doubles_up_to_its_limit(tries: int, seconds: float) -> None:
    assert replace(POLICY, retry_base=2.0, retry_limit=300.0).backoff(tries) == seconds
