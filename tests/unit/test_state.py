"""The live rows in memory: their indexes, and what a rollback restores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiverse.core.changes import mark_changes
from multiverse.core.errors import Broken
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import ClaimKey, CloneKind, Depth, Key, RowKind, Size
from multiverse.core.model.host import Claim, Host, HostState, HypervisorView, KnownHost
from multiverse.core.model.job import Attempt, AttemptState, Job, JobRef, JobState
from multiverse.core.model.reason import said, text_of
from multiverse.core.model.vm import Offer, OfferState, Template, TemplateKey, TemplateState, Vm, VmState
from multiverse.core.model.world import Row
from multiverse.core.rows import Rows, VmsMissing
from multiverse.core.state import State, quarantine_on_error
from multiverse.core.transition import TERMINAL, Change, Event, Tables, Transition, transitions, unchanged
from tests.unit.planner_harness import POLICY
from tests.unit.rows import SOURCE, attempt, indexes_of, offer, on_host, state, template, vm, world_of

A, V, T, O = AttemptState, VmState, TemplateState, OfferState  # noqa: E741
MAKERS: dict[RowKind, Callable[..., Row]] = {"attempt": attempt, "vm": vm, "template": template, "offer": offer}
HOSTS = ("h1", "h2", "h3")


def everything(held: State) -> tuple[object, ...]:
    """All that a pass can change and the next one reads."""
    owners = [Key(kind, id_) for kind in MAKERS for id_ in range(12)]
    claims = {owner: held.claims.of(owner) for owner in owners}
    return held.rows(), indexes_of(held), dict(held.addresses), claims, held.numbers.next_serial


def assert_consistent(held: State) -> None:
    """What is kept is what a state made anew of the same rows has."""
    assert everything(held) == everything(State(held.rows(), TABLES))


# --- random moves -----------------------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """What a pass does, in order: (what, to which, how, how much)."""
    what = st.sampled_from(["new", "move", "move", "move", "same", "claim", "free", "host", "number", "illegal"])
    number = st.integers(0, 30)
    return draw(st.lists(st.tuples(what, number, number, number), max_size=25))


def rows_of(held: State) -> list[Row]:
    return [*held.attempts.values(), *held.vms.values(), *held.templates.values(), *held.offers.values()]


def new_row(held: State, which: int, how: int) -> None:
    """Make a row by a transition that its table has."""
    kind = list(MAKERS)[which % len(MAKERS)]
    row = MAKERS[kind](A.QUEUED, id=how % 12)
    if held.get(row.key) is not None:
        return
    births = [t for t in TABLES[kind] if t.source is None]
    born = births[how % len(births)]
    fresh = replace(row, state=born.target, version=0)  # type: ignore[arg-type]
    held.move(Change(fresh, born.event), make=[Claim(row.key, HOSTS[how % 3], Size(1, 100))] if which % 2 else [])


def change_row(row: Row, how: int) -> Row:
    """The row, with something else in it that an index may be kept by."""
    match row:
        case Attempt():
            return replace(row, job=JobRef(str(how % 4), 500, how % 2))
        case Vm():
            address = f"10.9.1.{how % 6}/16" if how % 4 else ""
            places = [on_host(row, host).place for host in HOSTS[how % 3 :][: 1 + how % 2]]
            return replace(row, places=tuple(places), attempt=how % 5 or None, address=address)
        case Template():
            return replace(row, host=HOSTS[how % 3], account=("", "physics")[how % 2])
        case Offer():
            return replace(row, reason=str(how))


def act(held: State, what: str, which: int, how: int, much: int) -> None:
    existing = rows_of(held)
    match what:
        case "new":
            new_row(held, which, how)
        case "move" | "same" if existing:
            row = existing[which % len(existing)]
            table = TABLES[row.key.kind]
            fitting = [t for t in table if t.source is row.state and (t.target is row.state) is (what == "same")]
            if fitting:
                taken = fitting[how % len(fitting)]
                changed = replace(change_row(row, much), state=taken.target)  # type: ignore[arg-type]
                free = held.claims.of(row.key) if taken.target in TERMINAL else []
                held.move(Change(changed, taken.event), free=free)
        case "claim" if existing:
            row = existing[which % len(existing)]
            held.move(make=[Claim(row.key, HOSTS[how % 3], Size(1, much))])
        case "free" if existing:
            held.move(free=held.claims.of(existing[which % len(existing)].key)[: 1 + how % 2])
        case "host":
            name = HOSTS[which % 3]
            held.know_host(KnownHost(name, f"agent {how % 2}", list(HostState)[much % 2]))
        case "number":
            held.numbers.new_serial()
            held.numbers.new_attempt_id()
            held.numbers.new_template_id()
        case "illegal" if existing:
            row = existing[which % len(existing)]
            good = Change(row, Event.QUARANTINED)
            with pytest.raises(Broken):
                more = [Claim(row.key, "h9", Size(1, 1))]
                held.move(good, Change(row, Event.EXISTS), make=more, free=held.claims.of(row.key))
        case _:
            pass


@settings(max_examples=300)
@given(steps(), steps(), steps())
def test_a_rollback_restores_all_and_the_indexes_stay_those_of_the_rows(
    kept: list[tuple[str, int, int, int]],
    undone: list[tuple[str, int, int, int]],
    after: list[tuple[str, int, int, int]],
) -> None:
    held = State(Rows("test0"), TABLES)
    held.begin(1.0, {})
    for step in kept:
        act(held, *step)
        assert_consistent(held)
    before = everything(held)
    held.begin(2.0, {})
    for step in undone:
        act(held, *step)
    held.rollback()
    assert everything(held) == before
    assert (held.moves, held.missing, held.learned) == ([], [], {})
    held.rollback()
    assert everything(held) == before, "a second rollback undoes nothing more"
    held.begin(3.0, {})
    for step in after:
        act(held, *step)
    assert_consistent(held)


def test_before_its_first_pass_a_state_has_the_rows_alone() -> None:
    held = State(Rows("test0"), TABLES)
    assert (held.now, held.entropy, held.moves, held.missing, held.learned) == (0.0, "", [], [], {})
    assert (held.paced, dict(held.waiting), held.wanted, held.reasons, held.lacking) == ({}, {}, None, {}, set())
    assert set(indexes_of(held)) == {
        "asking_to_be_saved",
        "by_job",
        "by_state",
        "evicted",
        "kept_by",
        "saved_by",
        "vms_by_attempt",
        "vms_by_host",
        "vms_by_job",
        "vms_by_saved",
        "vms_by_source",
        "vms_by_template",
        "templates_by_key",
    }
    later = State(Rows("test0"), TABLES, 7.0)
    later.move(Change(vm(V.PLANNED), Event.PLANNED))
    assert later.vms[1].since == 7.0 and len(later.moves) == 1
    later.rollback()
    assert later.vms == {} and later.moves == []
    later.begin(8.0, {("h1", "slim", CloneKind.INSTANT): 9.0})
    assert (later.now, later.entropy) == (8.0, "") and list(later.paced.values()) == [9.0]


def test_what_is_used_of_a_domain_is_the_sum_of_its_claims() -> None:
    first, other, away = (
        Claim(Key("vm", 1), "h1", Size(1, 100, 5)),
        Claim(Key("template", 1), "h1", Size(0, 256)),
        Claim(Key("vm", 2), "h2", Size(2, 200, 7)),
    )
    held = state(vm(V.PLANNED), vm(V.PLANNED, id=2), template(T.READY), claims=[first, away])
    assert (held.claims.used["h1"], held.claims.used["h2"], held.claims.used["h9"]) == (
        first.size,
        away.size,
        Size(0, 0, 0),
    )
    held.move(make=[other])
    assert held.claims.used["h1"] == Size(1, 356, 5)
    held.move(make=[replace(first, size=Size(3, 300, 9))])
    assert held.claims.used["h1"] == Size(3, 556, 9), "a claim takes the place of the one with its key"
    held.move(free=[first.key])
    assert (held.claims.used["h1"], held.claims.used["h2"]) == (other.size, away.size)
    held.rollback()
    assert (held.claims.used["h1"], held.claims.used["h2"]) == (first.size, away.size)


def test_a_new_pass_keeps_what_the_pass_before_changed() -> None:
    held = state(vm(V.PLANNED), claims=[Claim(Key("vm", 1), "h1", Size(1, 100))])
    held.move(Change(vm(V.PARKED), Event.EXISTS))
    held.missing.append(VmsMissing(1, 1, "it failed"))
    held.know_host(KnownHost("h2", "agent"))
    kept = everything(held)
    held.begin(5.0, {})
    assert (held.moves, held.missing, held.learned, held.now) == ([], [], {}, 5.0)
    held.rollback()
    assert everything(held) == kept


def test_a_row_gets_the_time_of_a_state_that_it_enters_and_keeps_it_in_the_same_state() -> None:
    held = state(vm(V.JOINED, since=3.0), now=9.0)
    held.move(Change(replace(held.vms[1], quarantined=said("x")), Event.QUARANTINED))
    assert (held.vms[1].since, held.vms[1].version) == (3.0, 2)
    held.move(Change(replace(held.vms[1], state=V.SERVING), Event.RUNS))
    assert (held.vms[1].since, held.vms[1].version) == (9.0, 3)
    assert [change.row.version for move in held.moves for change in move.changes] == [1, 2], "those that are replaced"


def test_a_move_of_several_rows_of_which_one_may_not_change_changes_none() -> None:
    held = state(attempt(A.CLAIMED), vm(V.PLANNED))
    before = everything(held)
    with pytest.raises(Broken):
        held.move(
            Change(attempt(A.SPAWNING), Event.CREATED),
            Change(vm(V.SERVING), Event.RUNS),
            make=[Claim(Key("vm", 1), "h1", Size(1, 1))],
        )
    assert everything(held) == before and held.moves == []


def test_a_rollback_restores_hosts_which_are_then_learned_again() -> None:
    held = state()
    before = held.rows().hosts
    fresh = {name: Host(name, Size(4, 4096)) for name in ("h1", "h2")}
    for now in (1.0, 2.0):
        held.begin(now, {})
        mark_changes(held, world_of(None, HypervisorView(fresh), now), POLICY)
        assert set(held.learned) == set(fresh) and {n: one.value for n, one in held.learned.items()} == fresh
        held.rollback()
        assert held.rows().hosts == before == {"h1": KnownHost("h1", SOURCE, id=1)}


def test_a_rollback_takes_a_new_attempt_out_of_the_queue() -> None:
    held = state()
    row = attempt(A.QUEUED)
    held.queue.jobs = {"7": Job(row.job, row.job_name, row.uid, JobState.PENDING, row.request)}
    held.begin(1.0, {})
    held.move(Change(replace(row, version=0), Event.SUBMITTED))
    assert list(held.queue.candidates) == [1] and held.queue.wants(1)
    held.rollback()
    assert list(held.queue.candidates) == [] and not held.queue.wants(1)


# --- what is to be looked at ------------------------------------------------------------------------


def marked(held: State, *changes: Change) -> tuple[set[int], set[int]]:
    """The attempts and the VMs that are to be looked at after these changes."""
    held.dirty.attempts.clear()
    held.dirty.vms.clear()
    held.move(*changes)
    return held.dirty.attempts, held.dirty.vms


def test_a_change_marks_the_rows_whose_steps_depend_on_it() -> None:
    one, other = attempt(A.SPAWNING), attempt(A.SPAWNING, id=2, job="8")
    serving, spare = vm(V.STARTING, attempt=1), vm(V.PARKED, id=2)
    rows = (one, other, serving, spare, offer(O.OPEN, id=2), template(T.READY))
    assert marked(state(*rows), Change(replace(one, replaced=1), Event.REPLACED)) == ({1}, {1})
    assert marked(state(*rows), Change(replace(serving, state=V.JOINED), Event.REGISTERED)) == ({1}, {1})
    assert marked(state(*rows), Change(replace(spare, attempt=2), Event.TAKEN)) == ({2}, {2})
    assert marked(state(*rows), Change(offer(O.CLOSING, id=2), Event.WITHDRAWN)) == (set(), {2})
    assert marked(state(*rows), Change(template(T.RETIRING), Event.DROPPED)) == (set(), set())
    leaving = replace(serving, state=V.RELEASING)
    held = state(one, leaving)
    assert marked(held, Change(replace(leaving, state=V.GONE), Event.ABSENT))[0] == {1}, "its attempt goes on"
    over = attempt(A.RECLAIMING, outcome="done")
    assert marked(state(over, spare), Change(replace(over, state=A.DONE), Event.RECLAIMED))[0] == {1}


# --- faults -----------------------------------------------------------------------------------------


def test_a_fault_quarantines_the_one_record_that_it_is_about() -> None:
    held = state(vm(V.PLANNED), vm(V.PLANNED, id=2))
    with quarantine_on_error(held, Key("vm", 1)):
        raise KeyError("x")
    why = "a fault of Multiverse, please report it: KeyError('x')"
    (move,) = held.moves
    assert [(change.event, text_of(change.reason), text_of(change.row.quarantined)) for change in move.changes] == [
        (Event.QUARANTINED, why, why)
    ]
    assert text_of(held.vms[1].quarantined) == why and held.vms[2] == vm(V.PLANNED, id=2)
    with quarantine_on_error(held, Key("vm", 1)):
        raise KeyError("y")
    assert held.moves == [move], "it is in quarantine already"
    with pytest.raises(KeyError), quarantine_on_error(held, Key("vm", 3)):
        raise KeyError("z")
    with quarantine_on_error(held, Key("vm", 2)):
        pass
    assert held.moves == [move]


# --- questions --------------------------------------------------------------------------------------


def test_attempts_are_found_by_job_by_run_and_by_state() -> None:
    first = attempt(A.RECLAIMING, id=4)
    second = attempt(A.QUEUED, id=2, restarts=1)
    other = attempt(A.UNGATED, id=3, job="8")
    held = state(first, second, other)
    assert held.attempts_of_job("7") == [second, first], "in the order of their numbers"
    assert held.attempts_of_job(first.job) == [first]
    assert held.attempts_of_job("70") == [] and not held.serves_job(JobRef("7", 500, 2))
    assert held.serves_job(second.job) and held.serves_job(other.job)
    assert held.attempts_in(A.QUEUED, A.UNGATED) == [second, other] and held.attempts_in(A.CLAIMED) == []
    held.move(Change(replace(first, state=A.DONE), Event.RECLAIMED))
    assert held.attempts_of_job("7") == [second] and not held.serves_job(first.job)


def test_vms_are_found_by_attempt_by_host_and_by_state() -> None:
    one, two = vm(V.SERVING, id=3, attempt=1), vm(V.PLANNED, id=1, attempt=1, host="h2")
    lost, gone, dead = (vm(state_, id=id_, attempt=1) for state_, id_ in ((V.LOST, 4), (V.REMOVING, 5), (V.DEAD, 6)))
    spare = vm(V.PARKED, id=2)
    served = attempt(A.SPAWNING)
    held = state(served, one, two, lost, gone, dead, spare)
    assert held.vms_of(served) == [two, one, lost, gone, dead]
    assert held.serving_vms_of(served) == [two, one, dead], "neither lost nor being destroyed"
    assert held.vms_on("h1") == [spare, one, lost, gone, dead] and held.vms_on("h2") == [two]
    assert held.vms_in(V.PARKED, V.PLANNED) == [two, spare]
    assert held.attempt_of(one) == served and held.attempt_of(spare) is None
    held.move(Change(replace(spare, attempt=1), Event.TAKEN), Change(replace(gone, state=V.GONE), Event.ABSENT))
    assert [v.id for v in held.vms_of(served)] == [1, 2, 3, 4, 6]
    assert [v.id for v in held.vms_in(V.REMOVING)] == []


def test_templates_offers_claims_and_hosts_are_found_by_their_keys() -> None:
    frozen, mine = template(T.READY), template(T.BUILDING, id=2, account="physics")
    both = [Claim(Key("vm", 1), domain, Size(1, 100)) for domain in ("h2", "h1")]
    held = state(frozen, mine, vm(V.JOINED), offer(O.OPEN), claims=both)
    assert held.template_for(TemplateKey("h1", "slim", Size(1, 256))) == frozen
    assert held.template_for(mine.which) == mine
    assert held.template_for(TemplateKey("h2", "slim", Size(1, 256))) is None
    assert held.offer_of(vm(V.JOINED)) is O.OPEN and held.offer_of(vm(V.JOINED, id=2)) is None
    assert held.claims.of(Key("vm", 1)) == [ClaimKey(Key("vm", 1), "h1"), ClaimKey(Key("vm", 1), "h2")]
    assert held.claims.of(Key("template", 1)) == []
    held.move(free=[ClaimKey(Key("vm", 1), "h2"), ClaimKey(Key("vm", 1), "h9")])
    assert list(held.claims) == [ClaimKey(Key("vm", 1), "h1")], "the other one is still held"
    assert held.moves[0].free == (ClaimKey(Key("vm", 1), "h2"),), "and what is not held is not released"
    assert held.source_of("h1") == "hosts" and held.source_of("h9") == "" and not held.is_fenced("h9")
    held.know_host(KnownHost("h1", "hosts", HostState.FENCED))
    assert held.is_fenced("h1") and set(held.learned) == {"h1"}
    held.learned.clear()
    held.know_host(KnownHost("h1", "hosts", HostState.FENCED))
    assert held.learned == {}, "nothing new is known"


def test_vms_are_found_by_the_template_that_they_were_forked_from() -> None:
    which = TemplateKey("h1", "slim", Size(1, 256))
    serving, spare = vm(V.SERVING, attempt=1, template_id=4), vm(V.PARKED, id=2, pool=Depth.PARKED, template_id=4)
    booted = vm(V.SERVING, id=3, attempt=1, kind=CloneKind.FULL)
    held = state(serving, spare, booted, vm(V.SERVING, id=5, attempt=2, template_id=6, account="physics"))
    assert held.serves_from(which) and held.serves_from(which._replace(account="physics"))
    assert not held.serves_from(which._replace(host="h2"))
    assert not state(spare, booted).serves_from(which), "spares go with their template"


def test_the_sources_of_live_vms_are_known() -> None:
    away = vm(V.REMOVING, id=2, source="agent of h2")
    held = state(vm(V.PARKED), away)
    assert held.sources() == {SOURCE, "agent of h2"}
    held.move(Change(replace(away, state=V.GONE), Event.ABSENT))
    assert held.sources() == {SOURCE}


def test_a_serial_is_counted_once() -> None:
    numbers = state().numbers
    assert [numbers.next_serial, numbers.new_serial(), numbers.new_serial(), numbers.next_serial] == [
        100,
        100,
        101,
        102,
    ]


def test_an_address_is_in_use_until_the_last_vm_that_has_it_is_gone() -> None:
    one, two = vm(V.REMOVING), replace(vm(V.PARKED, id=2), address="10.9.1.1/16")
    held = state(one, two, replace(vm(V.PARKED, id=3), address=""))
    assert held.addresses == {"10.9.1.1/16": 2}
    held.move(Change(replace(one, state=V.GONE), Event.ABSENT))
    assert held.addresses == {"10.9.1.1/16": 1}
    held.move(Change(replace(two, state=V.RELEASING), Event.RELEASED))
    held.move(Change(replace(held.vms[2], state=V.GONE), Event.ABSENT))
    assert held.addresses == {}


# --- tables -----------------------------------------------------------------------------------------


def test_a_table_allows_the_transitions_that_are_in_it_and_no_others() -> None:
    some = (
        *transitions([None, V.PLANNED], Event.EXISTS, V.PARKED, V.STARTING),
        *unchanged([V.PARKED, V.LOST], Event.QUARANTINED, Event.RETRIED),
    )
    assert some == (
        Transition(None, Event.EXISTS, V.PARKED),
        Transition(None, Event.EXISTS, V.STARTING),
        Transition(V.PLANNED, Event.EXISTS, V.PARKED),
        Transition(V.PLANNED, Event.EXISTS, V.STARTING),
        Transition(V.PARKED, Event.QUARANTINED, V.PARKED),
        Transition(V.PARKED, Event.RETRIED, V.PARKED),
        Transition(V.LOST, Event.QUARANTINED, V.LOST),
        Transition(V.LOST, Event.RETRIED, V.LOST),
    )
    tables = Tables({"vm": some, "template": ()})
    assert dict(tables) == {"vm": some, "template": ()}
    assert tables.allowed("vm", None, Event.EXISTS, V.PARKED)
    assert not tables.allowed("vm", V.PARKED, Event.EXISTS, V.PARKED)
    assert not tables.allowed("template", None, Event.EXISTS, V.PARKED)
