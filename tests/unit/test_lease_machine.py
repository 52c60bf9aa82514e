"""The state machine of leases: what is concluded from their pilots, their agents and the VMs on their hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from multiverse.core.machines.lease import (
    TOLD_WITHIN,
    may_leave,
    pilots_of,
    release_lease,
    step_lease,
    unexplained_pilots,
)
from multiverse.core.model.basics import Key, Size
from multiverse.core.model.host import Claim, Host, HostState, HypervisorView, KnownHost
from multiverse.core.model.job import Lease, LeaseState, PilotSeen, PilotState, SchedulerView
from multiverse.core.model.machine import MachineKind
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.model.saved import SavedState, Storage
from multiverse.core.model.vm import VmState
from multiverse.core.model.world import Observation, Row, Seen, World
from multiverse.core.policy import Policy
from multiverse.core.state import State
from multiverse.core.transition import Change, Event
from tests.unit.lease_harness import LEASING, PHYSICAL
from tests.unit.rows import changes_of, lease, saved, state, vm

H, L, P, V = HostState, LeaseState, PilotState, VmState
NOW, EPOCH, BEGAN = 1000.0, 1_700_000_000.0, 999.0
SINCE = 900.0
NAME = "lease-test0-1"
SHOWN = Host(NAME, Size(8, 8192, 65536))
STORAGE = Storage("shared", "qemu")
KIND = MachineKind("kvm", "Haswell", frozenset(), "7.2", "pc-q35-7.2")


def of(in_state: LeaseState, **more: Any) -> Lease:
    return lease(in_state, **{"since": SINCE, **more})


def pilot(in_state: PilotState, **more: Any) -> PilotSeen:
    return PilotSeen(NAME, "token", in_state, **{"node": "p1", **more})


def host(in_state: HostState = H.KNOWN) -> KnownHost:
    return KnownHost(NAME, NAME, in_state, id=-1, version=1)


def on_it(in_state: VmState = V.SERVING, **more: Any) -> Row:
    return vm(in_state, **{"host": NAME, "source": NAME, **more})


class Stepped:
    """One step of lease 1, whose last effect ended at `ended`."""

    def __init__(
        self,
        *some: Row,
        pilots: Mapping[str, PilotSeen] | PilotSeen | None = None,
        shown: Host | None = SHOWN,
        ended: float = SINCE,
        began: float = BEGAN,
        known: bool = True,
        policy: Policy = LEASING,
    ) -> None:
        seen = {"50": pilots} if isinstance(pilots, PilotSeen) else pilots or {}
        claims = [Claim(row.key, NAME, Size(1, 256)) for row in some if row.key.kind == "vm"]
        self.state: State = state(*some, now=NOW, claims=claims)
        scheduler = Seen(SchedulerView(pilots=seen), began) if known else None
        sources = {NAME: Observation(Seen(HypervisorView({NAME: shown} if shown else {}), BEGAN), 0.0)}
        world = World(scheduler, sources, effect_ended_at={Key("lease", 1): ended}, epoch=EPOCH)
        step_lease(self.state, 1, world, policy)

    @property
    def changes(self) -> list[Change]:
        return changes_of(self.state.moves)

    @property
    def events(self) -> list[tuple[Event, object]]:
        """What changed, by which event, and to which state."""
        return [(change.event, change.row.state) for change in self.changes]

    @property
    def last(self) -> tuple[Event, object, object, object]:
        """Event and new state of the last change, the reason for it, and that which its row keeps."""
        change = self.changes[-1]
        assert not isinstance(change.row, str)
        return change.event, change.row.state, _kind(change.reason), _kind(getattr(change.row, "reason", None))

    @property
    def lease(self) -> Lease:
        return self.state.leases[1]


def _kind(reason: Reason | None) -> object:
    return None if reason is None else reason.kind


# --- while nothing may be concluded --------------------------------------------------------------------


def test_nothing_is_concluded_of_a_quarantined_lease_or_while_the_scheduler_is_unknown() -> None:
    ended = pilot(P.ENDED)
    assert Stepped(of(L.IDLE), pilots=ended).events
    assert Stepped(of(L.IDLE, quarantined="it is odd"), pilots=ended).events == []
    assert Stepped(of(L.IDLE), pilots=ended, known=False).events == []
    assert Stepped(of(L.IDLE, id=2), pilots=ended).events == [], "a lease that is gone"


def test_a_lease_that_is_given_back_is_quarantined_no_more() -> None:
    """Its pilot is cancelled whatever was wrong with it."""
    change = release_lease(of(L.WAITING, quarantined="it is odd"), Event.FAILED, Why.AGENT_SILENT())
    assert isinstance(change.row, Lease) and change.row.quarantined is None
    assert change.row.reason == change.reason == Why.AGENT_SILENT()


# --- before its pilot runs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "ended", "began", "gone"),
    [
        (L.PLANNED, SINCE, BEGAN, False),  # it is submitted again
        (L.WAITING, SINCE, BEGAN, True),
        (L.WAITING, SINCE, SINCE, False),  # it may have been submitted since
        (L.WAITING, BEGAN, BEGAN, False),
        (L.WAITING, BEGAN - 1.0, BEGAN, True),
        (L.WAITING, inf, BEGAN, False),
    ],
)
def test_a_pilot_that_waited_is_gone_once_it_is_not_shown_after_its_submission(
    before: LeaseState, ended: float, began: float, gone: bool
) -> None:
    stepped = Stepped(of(before), ended=ended, began=began)
    assert stepped.events == ([(Event.VANISHED, L.RELEASING)] if gone else [])
    assert not gone or stepped.last[2:] == (Why.PILOT_GONE, Why.PILOT_GONE)


@pytest.mark.parametrize("before", [L.PLANNED, L.WAITING])
@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (pilot(P.ENDED, reason="CANCELLED"), Why.PILOT_ENDED),
        (pilot(P.ENDING, reason="PREEMPTED"), Why.PILOT_ENDED),
        (pilot(P.PENDING, restarts=1), Why.PILOT_QUEUED),
        (pilot(P.RUNNING, restarts=1), Why.PILOT_QUEUED),
    ],
)
def test_a_pilot_that_ended_or_was_queued_again_before_it_was_seen_running_is_given_up(
    before: LeaseState, seen: PilotSeen, why: Why
) -> None:
    stepped = Stepped(of(before, pilot=""), pilots=seen)
    assert stepped.last == (Event.FAILED, L.RELEASING, why, why)
    assert stepped.lease.pilot == "50", "it is the one that is cancelled"


@pytest.mark.parametrize(("ends", "kept"), [(NOW + EPOCH, NOW + EPOCH), (inf, None)])
@pytest.mark.parametrize("before", [L.PLANNED, L.WAITING])
def test_a_pilot_that_runs_makes_its_host_known(before: LeaseState, ends: float, kept: float | None) -> None:
    stepped = Stepped(of(before, pilot="", node=""), pilots=pilot(P.RUNNING, ends=ends))
    assert stepped.last[:3] == (Event.GRANTED, L.STARTING, Why.PILOT_RUNS)
    assert (stepped.lease.pilot, stepped.lease.node, stepped.lease.ends) == ("50", "p1", kept)
    known = stepped.state.hosts[NAME]
    assert (known.id, known.source, known.state) == (-1, NAME, H.KNOWN)


def test_why_a_pilot_waits_is_kept_and_a_change_of_it_is_noted_once() -> None:
    waits = pilot(P.PENDING, reason="Priority")
    first = Stepped(of(L.PLANNED, pilot=""), pilots=waits)
    assert first.events == [(Event.EXISTS, L.WAITING)]
    assert (first.lease.pilot, first.lease.reason) == ("50", said("Priority"))
    known = of(L.WAITING, reason="Priority")
    assert Stepped(known, pilots=waits).events == []
    other = Stepped(known, pilots=pilot(P.PENDING, reason="Resources"))
    assert other.events == [(Event.NOTED, L.WAITING)] and other.changes[0].reason == said("Resources")
    assert other.lease.reason == said("Resources")
    again = Stepped(known, pilots={"51": waits})
    assert again.events == [(Event.NOTED, L.WAITING)] and again.lease.pilot == "51"


@pytest.mark.parametrize(
    ("pilots", "counts"),
    [
        ({"9": P.PENDING, "10": P.RUNNING}, "10"),
        ({"9": P.ENDED, "8": P.ENDING, "10": P.PENDING}, "10"),
        ({"8": P.ENDED, "9": P.ENDING}, "9"),
        ({"10": P.PENDING, "9": P.PENDING}, "9"),  # the first that was submitted
        ({"12": P.PENDING, "11": P.PENDING}, "11"),
    ],
)
def test_of_several_pilots_the_farthest_counts_and_of_equal_ones_the_first(
    pilots: dict[str, PilotState], counts: str
) -> None:
    stepped = Stepped(of(L.WAITING, pilot=""), pilots={id_: pilot(one) for id_, one in pilots.items()})
    assert stepped.lease.pilot == counts


def test_a_pilot_of_another_name_or_token_is_anothers() -> None:
    own, other = pilot(P.RUNNING), replace(pilot(P.RUNNING), token="another")
    elsewhere = replace(pilot(P.RUNNING), name="lease-test0-9")
    assert pilots_of(of(L.WAITING), SchedulerView(pilots={"50": own, "51": other, "52": elsewhere})) == {"50": own}
    for strange in (other, elsewhere):
        assert Stepped(of(L.IDLE), pilots=strange).events == [(Event.VANISHED, L.RELEASING)]


# --- while its pilot runs ------------------------------------------------------------------------------


RUNS = [L.STARTING, L.IDLE, L.HELD]


@pytest.mark.parametrize("before", RUNS)
@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (None, Why.PILOT_GONE),
        (pilot(P.RUNNING, restarts=1), Why.PILOT_QUEUED),
        (pilot(P.PENDING), Why.PILOT_ENDED),
        (pilot(P.ENDED), Why.PILOT_ENDED),
    ],
)
def test_a_lease_without_vms_is_over_with_its_pilot_and_its_vms_may_go_on(
    before: LeaseState, seen: PilotSeen | None, why: Why
) -> None:
    empty = Stepped(of(before), host(), pilots=seen)
    assert empty.last == (Event.VANISHED, L.RELEASING, why, why)
    used = Stepped(of(before), host(), on_it(), pilots=seen)
    assert used.last == (Event.LOST, L.LOST, Why.MAY_GO_ON, Why.MAY_GO_ON) and len(used.events) == 1


@pytest.mark.parametrize("before", [*RUNS, L.ENDING])
def test_the_vms_of_a_lease_end_with_a_pilot_that_left_its_node_clean(before: LeaseState) -> None:
    clean = pilot(P.ENDED, clean=True)
    stepped = Stepped(of(before), host(), on_it(), pilots=clean)
    assert stepped.events == [
        (Event.FENCED, H.FENCED),
        (Event.FENCED, V.ENDING),
        (Event.VANISHED, L.RELEASING),
    ]
    assert _kind(stepped.changes[0].reason) is Why.OF_HOST
    off = Stepped(of(before), host(H.FENCED), on_it(V.ENDING), pilots=clean)
    assert off.events == [(Event.VANISHED, L.RELEASING)], "it was fenced before"
    assert Stepped(of(before), pilots=clean).events == [(Event.VANISHED, L.RELEASING)], "its host has no row"
    runs = Stepped(of(before), host(), on_it(), pilots=pilot(P.RUNNING, clean=True, restarts=1))
    assert (Event.FENCED, H.FENCED) not in runs.events, "only what has ended can be clean"


@pytest.mark.parametrize("before", RUNS)
@pytest.mark.parametrize(
    ("seen", "shown", "why"),
    [
        (pilot(P.ENDING, reason="PREEMPTED"), SHOWN, Why.PILOT_ENDS(said("PREEMPTED"), pilot="50")),
        (pilot(P.ENDING), None, Why.PILOT_ENDS(said("no reason given"), pilot="50")),
        (
            pilot(P.RUNNING),
            replace(SHOWN, refuses="it ends"),
            Why.PILOT_ENDS(Why.AGENT_SAYS(said("it ends")), pilot="50"),
        ),
    ],
)
def test_a_pilot_is_ending_when_the_scheduler_or_its_agent_says_so(
    before: LeaseState, seen: PilotSeen, shown: Host | None, why: Reason
) -> None:
    """Its VMs end at once if nothing can leave its host."""
    policy = replace(LEASING, evict_leases=False)
    stepped = Stepped(of(before), host(), on_it(), pilots=seen, shown=shown, policy=policy)
    assert stepped.events == [(Event.ENDED, L.ENDING), (Event.RELEASED, V.ENDING)]
    assert (stepped.changes[0].reason, stepped.lease.reason) == (why, why)
    assert stepped.changes[1].reason == Why.OF_HOST(why, host=NAME)


@pytest.mark.parametrize("before", RUNS)
@pytest.mark.parametrize("silent", [H.SILENT, H.FENCING])
def test_a_lease_whose_agent_is_silent_is_given_up(before: LeaseState, silent: HostState) -> None:
    stepped = Stepped(of(before), host(silent), on_it(), pilots=pilot(P.RUNNING))
    assert stepped.last == (Event.FAILED, L.RELEASING, Why.AGENT_SILENT, Why.AGENT_SILENT)


def test_an_agent_has_the_time_that_the_site_gives_it_to_answer() -> None:
    answers = Stepped(of(L.STARTING), host(), pilots=pilot(P.RUNNING))
    assert answers.last[:3] == (Event.FOUND, L.IDLE, Why.AGENT_ANSWERS)
    since = BEGAN - PHYSICAL.start_timeout
    assert Stepped(of(L.STARTING, since=since), host(), pilots=pilot(P.RUNNING), shown=None).events == []
    late = Stepped(of(L.STARTING, since=since - 0.1), host(), pilots=pilot(P.RUNNING), shown=None)
    assert late.last == (Event.FAILED, L.RELEASING, Why.AGENT_LATE, Why.AGENT_LATE)


def test_a_lease_is_held_while_vms_are_on_its_host_and_counts_how_often_it_was_used() -> None:
    taken = Stepped(of(L.IDLE, used=1), host(), on_it(), pilots=pilot(P.RUNNING))
    assert taken.last[:3] == (Event.TAKEN, L.HELD, Why.FOR_VM) and taken.lease.used == 2
    emptied = Stepped(of(L.HELD, used=2), host(), pilots=pilot(P.RUNNING))
    assert emptied.last[:3] == (Event.EMPTIED, L.IDLE, Why.NO_VM_LEFT) and emptied.lease.used == 2
    assert Stepped(of(L.HELD), host(), on_it(), pilots=pilot(P.RUNNING)).events == []
    assert Stepped(of(L.IDLE), host(), pilots=pilot(P.RUNNING)).events == []


@pytest.mark.parametrize(
    ("before", "ends", "after"), [(None, 9000.0, 9000.0), (9000.0, inf, None), (9000.0, 9000.0, 9000.0)]
)
@pytest.mark.parametrize("held", [True, False])
def test_a_changed_time_limit_of_its_pilot_is_noted(
    held: bool, before: float | None, ends: float, after: float | None
) -> None:
    one, others = of(L.HELD if held else L.IDLE, ends=before), [on_it()] if held else []
    stepped = Stepped(one, host(), *others, pilots=pilot(P.RUNNING, ends=ends))
    assert stepped.lease.ends == after and bool(stepped.changes) is (before != after)
    assert not stepped.changes or stepped.last[:3] == (Event.NOTED, one.state, Why.LIMIT_CHANGED)


# --- while its pilot ends ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "since", "may"),
    [
        (None, 0.0, True),  # nobody knows
        (replace(SHOWN, storage=STORAGE), NOW - TOLD_WITHIN + 0.1, True),
        (replace(SHOWN, moves=KIND), NOW - TOLD_WITHIN + 0.1, True),
        (replace(SHOWN, storage=STORAGE), NOW - TOLD_WITHIN, False),
        (SHOWN, NOW, False),  # nothing can leave
        (replace(SHOWN, storage=STORAGE, refuses="ends", holds_until=NOW + EPOCH + 0.1), 0.0, True),
        (replace(SHOWN, storage=STORAGE, refuses="ends", holds_until=NOW + EPOCH), NOW, False),
    ],
)
def test_vms_may_leave_while_the_agent_holds_them_or_may_still_say_so(
    shown: Host | None, since: float, may: bool
) -> None:
    one = of(L.ENDING, since=since)
    view = HypervisorView({NAME: shown} if shown else {})
    world = World(sources={NAME: Observation(Seen(view, BEGAN), 0.0)}, epoch=EPOCH)
    here = state(one, now=NOW)
    assert may_leave(here, one, world, LEASING) is may
    assert may_leave(here, one, world, replace(LEASING, evict_leases=False)) is False


def test_of_an_ending_lease_only_vms_whose_jobs_can_leave_are_left_and_what_is_being_saved() -> None:
    """The nodes of the others go DOWN, so that the scheduler queues their jobs again."""
    states = [V.SERVING, V.ASLEEP, V.STARTING, V.MOVING, V.LOST, V.RELEASING, V.DEAD]
    vms = [on_it(one, id=id_) for id_, one in enumerate(states, 1)]
    writing = saved(SavedState.WRITING, vm=8, vm_name="mvtest0-8", source=NAME)
    held = on_it(V.DEAD, id=8)
    seen, holds = pilot(P.ENDING), replace(SHOWN, storage=STORAGE, refuses="ends", holds_until=NOW + EPOCH + 60.0)
    stepped = Stepped(of(L.ENDING, reason="it ends"), host(), *vms, held, writing, pilots=seen, shown=holds)
    assert [(change.row.key.id, change.event) for change in stepped.changes] == [
        (id_, Event.RELEASED) for id_ in (3, 4, 7)
    ]
    over = Stepped(of(L.ENDING, reason="it ends"), host(), *vms, held, writing, pilots=seen, shown=SHOWN)
    assert [change.row.key.id for change in over.changes] == [1, 2, 3, 4, 7]
    assert {_kind(change.reason) for change in over.changes} == {Why.OF_HOST}


def test_an_ending_lease_is_given_back_once_its_host_is_empty() -> None:
    for seen in (pilot(P.ENDING), pilot(P.RUNNING)):
        stepped = Stepped(of(L.ENDING, reason=Why.JOBS_WAIT()), host(), pilots=seen)
        assert stepped.last == (Event.RELEASED, L.RELEASING, Why.JOBS_WAIT, Why.JOBS_WAIT)
    for over in (pilot(P.ENDED), None):
        assert Stepped(of(L.ENDING), host(), pilots=over).events == [(Event.VANISHED, L.RELEASING)]


# --- when its pilot is over ----------------------------------------------------------------------------


def test_a_lost_lease_waits_until_nothing_goes_on_on_its_host() -> None:
    assert Stepped(of(L.LOST), host(), on_it()).events == []
    fenced = (Event.FENCED, L.RELEASING)
    assert Stepped(of(L.LOST), host(H.FENCED), on_it()).events == [fenced]
    gone = Stepped(of(L.LOST), host())
    assert gone.last == (*fenced, Why.NOTHING_GOES_ON, Why.NOTHING_GOES_ON)
    clean = Stepped(of(L.LOST), host(), on_it(), pilots=pilot(P.ENDED, clean=True))
    assert clean.events == [(Event.FENCED, H.FENCED), (Event.FENCED, V.ENDING), fenced]
    assert _kind(clean.changes[0].reason) is Why.NODE_CLEAN
    for not_over in (pilot(P.ENDED), pilot(P.RUNNING, clean=True)):
        assert Stepped(of(L.LOST), host(), on_it(), pilots=not_over).events == []


@pytest.mark.parametrize(
    ("ended", "since", "seen"),
    [
        (inf, SINCE, None),  # a cancellation runs
        (BEGAN, SINCE, None),
        (SINCE, BEGAN, None),
        (SINCE, SINCE, pilot(P.RUNNING)),
        (SINCE, SINCE, pilot(P.ENDING)),
        (SINCE, SINCE, pilot(P.PENDING)),
    ],
)
def test_a_lease_is_not_gone_while_a_pilot_may_be_left(ended: float, since: float, seen: PilotSeen | None) -> None:
    assert Stepped(of(L.RELEASING, since=since), host(), pilots=seen, ended=ended).events == []


def test_a_lease_is_gone_with_its_host_and_the_templates_there_once_nothing_is_on_it() -> None:
    one = of(L.RELEASING, reason=Why.WAS_IDLE(limit=60.0))
    gone = Stepped(one, host())
    assert gone.events == [(Event.ABSENT, L.GONE), (Event.GIVEN_BACK, H.RETURNED)]
    assert [_kind(change.reason) for change in gone.changes] == [Why.WAS_IDLE] * 2
    assert Stepped(one).events == [(Event.ABSENT, L.GONE)], "its pilot never ran"
    used = Stepped(one, host(), on_it())
    assert used.last == (Event.LOST, L.LOST, Why.MAY_GO_ON, Why.MAY_GO_ON)
    assert Stepped(one, host(H.FENCED), on_it(V.ENDING)).events == [], "what is claimed there is freed first"
    clean = Stepped(one, host(), on_it(), pilots=pilot(P.ENDED, clean=True))
    assert clean.events == [(Event.FENCED, H.FENCED), (Event.FENCED, V.ENDING)]
    assert _kind(clean.changes[0].reason) is Why.PILOT_OVER
    other = Stepped(one, host(), on_it(), pilots={"51": pilot(P.ENDED, clean=True)})
    assert other.events == [(Event.LOST, L.LOST)], "that was another pilot, which it asked for twice"


@pytest.mark.parametrize(
    ("row", "name", "token", "seen", "unexplained"),
    [
        (None, NAME, "token", P.RUNNING, True),
        (None, NAME, "token", P.PENDING, True),
        (None, NAME, "token", P.ENDING, False),
        (None, NAME, "token", P.ENDED, False),
        (of(L.IDLE), NAME, "token", P.RUNNING, False),
        (of(L.WAITING, pilot=""), NAME, "token", P.RUNNING, False),
        (of(L.IDLE, pilot="49"), NAME, "token", P.RUNNING, True),
        (of(L.IDLE), NAME, "another", P.RUNNING, True),
        (of(L.IDLE), "lease-test0-9", "token", P.RUNNING, True),
        (of(L.RELEASING, pilot="49"), NAME, "another", P.RUNNING, False),  # it cancels all of its name
        (of(L.LOST, pilot="49"), NAME, "token", P.PENDING, False),
    ],
)
def test_a_pilot_is_unexplained_unless_a_lease_has_it_or_cancels_it(
    row: Lease | None, name: str, token: str, seen: PilotState, unexplained: bool
) -> None:
    leases = {1: row} if row else {}
    found = unexplained_pilots(leases, SchedulerView(pilots={"50": PilotSeen(name, token, seen)}))
    assert found == ([(name, "50")] if unexplained else [])
