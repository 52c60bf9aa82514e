"""A VM at two places, as one that moves is: either is lost, and its claim there is released when that is safe."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from multiverse.core.machines.host import is_given_up
from multiverse.core.machines.tables import effect_of
from multiverse.core.machines.vm import move_vm
from multiverse.core.model.basics import ClaimKey, Size
from multiverse.core.model.host import Claim, HypervisorView
from multiverse.core.model.job import JobState, NodeState
from multiverse.core.model.reason import Why, said, text_of
from multiverse.core.model.vm import Place, TemplateKey, Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Observation, Seen, World
from multiverse.core.transition import Change, Command, EffectKind, Event, Move
from tests.unit.planner_harness import PlannerHarness
from tests.unit.rows import vm as vm_row

V = VmState
RUNNING, MAKING, PAUSED, DEAD = VmCondition.RUNNING, VmCondition.CREATING, VmCondition.PAUSED, VmCondition.DEAD
MOVES = (V.MOVING, V.SETTLING)
CLAIM = Size(1, 300)


class Site(PlannerHarness):
    """Two hosts, each a source of its own, and a job that runs in a VM on h1. `there` says on which hosts the VM really
    is, and how."""

    def __init__(self) -> None:
        super().__init__()
        self.there: dict[str, VmCondition] = {}
        self.away: dict[str, float] = {}  # hosts out of reach, and since when
        self.to_allocated()
        self.second_host()
        self.vms.clear()
        self.there["h1"] = RUNNING
        self.run()

    @property
    def vm(self) -> Vm:
        return self.rows.vms[1] if 1 in self.rows.vms else self.all_vms()[0]

    def observe(self) -> None:
        super().observe()
        if self.there:
            name, token = self.vm.name, self.vm.token
            vms = {host: {name: VmSeen(name, host, how, token=token)} for host, how in self.there.items()}
        else:
            vms = {"h1": self.vms}
        sources = {}
        for host, value in self.hosts.items():
            templates = {which: seen for which, seen in self.templates.items() if which.host == host}
            view = HypervisorView({host: value}, dict(vms.get(host, {})), templates)
            known = host not in self.away
            latest = Seen(view, self.clock.time) if known else None
            sources[host] = Observation(latest, 0.0 if known else self.away[host])
        self.world = replace(self.world, sources=sources)

    def commit(self, *messages: object) -> list[Move]:
        """A claim is held at each place, and nowhere else: neither twice nor left behind."""
        moves = super().commit(*messages)  # type: ignore[arg-type]
        places = {ClaimKey(vm.key, place.host) for vm in self.rows.vms.values() for place in vm.places}
        held = {claim.key for claim in self.rows.claims if claim.owner.kind == "vm"}
        assert held == places - {key for key in places if self.rows.vms[key.owner.id].state is V.DELETING}
        return moves

    def begin_move(self, condition: VmCondition | None = MAKING) -> None:
        """The VM gets its second place, and comes into being there."""
        row, which = self.vm, TemplateKey("h2", "slim", self.policy.base)
        self.state.begin(self.clock.time, {})
        change = move_vm(row, Place("h2", "h2", which), Why.OPERATOR())
        self.state.move(change, make=[Claim(row.key, "h2", CLAIM)])
        with self.store.transaction() as tx:
            for move in self.state.moves:
                tx.apply(move)
        if condition is not None:
            self.there["h2"] = condition

    def lose(self, host: str) -> None:
        """The host is out of reach, and long enough for that to count."""
        self.away[host] = self.clock.time
        self.pass_time(self.policy.silence + 1)
        self.run()

    def fence(self, host: str) -> None:
        """The host is off, as an operator says."""
        self.there.pop(host, None)
        self.run(Command("fence", host=host))

    def end_job(self) -> None:
        self.jobs["7"] = self.jobs["7"]._replace(state=JobState.ENDED, result="COMPLETED", nodes=())
        self.run()

    def act(self) -> None:
        """What the row permits is done where that is possible."""
        effect = effect_of(self.vm)
        if effect is None or self.vm.state in (V.GONE, V.SERVING):
            return
        in_reach = {place.host for place in self.vm.places} - self.away.keys()
        if self.vm.state in MOVES:
            goes_on = {host for host, how in self.there.items() if how in (RUNNING, PAUSED)}
            for host in in_reach - goes_on if effect.kind is EffectKind.SETTLE and goes_on else ():
                self.there.pop(host, None)
            self.ended(self.vm.key)
            return
        for host in in_reach:
            self.there.pop(host, None)
        if effect.kind is not EffectKind.END:
            self.nodes.pop(self.vm.name, None)
        self.ended(self.vm.key)

    def settle(self) -> None:
        for _ in range(5):
            self.act()
            self.run()

    @property
    def held(self) -> list[str]:
        return sorted(claim.domain for claim in self.rows.claims if claim.owner == self.vm.key)

    def moved_by(self, *events: Event) -> list[str]:
        return [entry.event for entry in self.store.journal() if entry.kind == "vm" and entry.event in events]


def other(host: str) -> str:
    return {"h1": "h2", "h2": "h1"}[host]


@pytest.mark.parametrize("lost", ["h1", "h2"])
@pytest.mark.parametrize("condition", [RUNNING, PAUSED])
def test_the_vm_goes_on_at_one_place_while_the_other_is_out_of_reach_and_is_claimed_for_at_both(
    lost: str, condition: VmCondition
) -> None:
    site = Site()
    site.begin_move()
    site.there = {lost: MAKING, other(lost): condition}
    site.act()
    site.lose(lost)
    assert (site.vm.state, site.held) == (V.MOVING if lost == "h2" else V.SETTLING, ["h1", "h2"])
    site.fence(lost)
    assert (site.vm.state, site.held, site.vm.host) == (V.SERVING, [other(lost)], other(lost))
    assert site.moved_by(Event.STAYED, Event.MOVED, Event.LOST) == [Event.STAYED if lost == "h2" else Event.MOVED]
    site.end_job()
    site.settle()
    assert (site.vm.state, site.held, site.there) == (V.GONE, [], {})


@pytest.mark.parametrize("lost", ["h1", "h2"])
def test_the_vm_is_lost_with_the_place_where_it_ran_and_ends_once_that_is_fenced(lost: str) -> None:
    site = Site()
    site.begin_move()
    site.there = {lost: RUNNING, other(lost): MAKING}
    site.act()
    site.lose(lost)
    assert (site.vm.state, site.held) == (V.LOST, ["h1", "h2"]), "it may go on where nobody looks"
    site.fence(lost)
    assert (site.vm.state, site.held) == (V.ENDING, [other(lost)]), "its copy never went on"
    site.jobs["7"] = site.jobs["7"]._replace(state=JobState.ENDED, result="NODE_FAIL", nodes=())
    site.settle()
    assert (site.vm.state, site.held, site.there) == (V.GONE, [], {})


@pytest.mark.parametrize("lost", ["h1", "h2"])
def test_a_vm_whose_place_comes_back_into_reach_goes_on_there(lost: str) -> None:
    site = Site()
    site.begin_move()
    site.there = {lost: RUNNING, other(lost): MAKING}
    site.act()
    site.lose(lost)
    del site.away[lost]
    site.run()
    assert (site.vm.state, site.held, site.vm.host) == (V.SETTLING, ["h1", "h2"], lost)
    site.act()
    site.run()
    assert (site.vm.state, site.held, site.vm.host) == (V.SERVING, [lost], lost)


def test_a_vm_that_is_lost_at_both_places_is_found_at_the_one_that_is_left() -> None:
    site = Site()
    site.begin_move()
    site.there = {"h2": RUNNING}
    site.act()
    site.away["h1"] = site.clock.time
    site.lose("h2")
    assert (site.vm.state, site.held) == (V.LOST, ["h1", "h2"])
    site.fence("h1")
    assert (site.vm.state, site.held) == (V.LOST, ["h2"]), "nothing is known of it there"
    del site.away["h2"]
    site.run()
    assert (site.vm.state, site.vm.host) == (V.SERVING, "h2")


@pytest.mark.parametrize("state", [V.MOVING, V.LOST])
def test_a_vm_whose_hosts_are_both_off_at_once_ends(state: VmState) -> None:
    site = Site()
    site.begin_move()
    if state is V.LOST:
        site.act()
    site.lose("h1")
    site.lose("h2")
    assert site.vm.state is state
    site.there.clear()
    site.run(Command("fence", host="h1"), Command("fence", host="h2"))
    assert (site.vm.state, len(site.held), text_of(site.vm.reason)) == (V.ENDING, 1, "host h2 is off")
    site.jobs["7"] = site.jobs["7"]._replace(state=JobState.ENDED, result="NODE_FAIL", nodes=())
    site.settle()
    assert (site.vm.state, site.held) == (V.GONE, [])


def test_its_absence_at_a_place_counts_only_after_the_effect_that_may_have_brought_it_there() -> None:
    site = Site()
    site.begin_move(condition=None)
    site.effect_ended_at[site.vm.key] = float("inf")
    site.run()
    assert site.held == ["h1", "h2"], "it may come yet"
    site.ended(site.vm.key)
    site.commit()
    assert site.held == ["h1", "h2"], "the observation is older"
    site.run()
    assert (site.vm.state, site.held, site.vm.host) == (V.SERVING, ["h1"], "h1")


@pytest.mark.parametrize("left", ["dead", "gone", "off"])
def test_a_vm_that_goes_on_nowhere_ends_with_what_became_of_it(left: str) -> None:
    """Its host was in reach all the while."""
    site = Site()
    site.begin_move()
    if left == "off":
        site.lose("h1")
        site.fence("h1")
        assert text_of(site.vm.reason) == "host h1 is off"
        return
    site.there["h1"] = DEAD
    site.act()
    del site.there["h2"]
    if left == "gone":
        del site.there["h1"]
    for _ in range(2):
        site.run()
    place = "h1" if left == "dead" else "h2"
    why = "the VM died" if left == "dead" else f"it is not on host {place} any more"
    assert (site.vm.state, text_of(site.vm.reason)) == (V.ENDING, why)


def test_a_vm_that_is_gone_from_both_places_dies_and_nothing_is_left() -> None:
    site = Site()
    site.begin_move()
    site.there.clear()
    site.act()
    site.run()
    assert site.vm.state is V.LOST, "it may have gone on at its other place after that was observed"
    site.run()
    assert site.vm.state is V.ENDING
    site.jobs["7"] = site.jobs["7"]._replace(state=JobState.ENDED, result="NODE_FAIL", nodes=())
    site.settle()
    assert (site.vm.state, site.held) == (V.GONE, [])


@pytest.mark.parametrize("lost", ["h1", "h2"])
def test_a_job_that_ends_meanwhile_leaves_nothing_at_either_place(lost: str) -> None:
    site = Site()
    site.begin_move()
    site.away[lost] = site.clock.time
    site.end_job()
    site.settle()
    assert site.held == [lost] and site.vm.state is not V.GONE, "one place is clear, and nobody knows of the other"
    del site.away[lost]
    site.settle()
    assert (site.vm.state, site.held, site.there) == (V.GONE, [], {})


def test_after_a_restart_a_vm_that_is_to_end_leaves_no_place_before_it_was_destroyed_there() -> None:
    site = Site()
    site.begin_move()
    site.end_job()
    site.run()
    del site.there["h2"]
    site.effect_ended_at.clear()
    site.run()
    assert (site.vm.state, site.held) == (V.RELEASING, ["h1", "h2"])
    site.settle()
    assert (site.vm.state, site.held) == (V.GONE, [])


def test_both_places_are_found_by_host_source_and_template() -> None:
    site = Site()
    site.begin_move()
    state, row = site.state, site.vm
    for place in row.places:
        assert state.vms_on(place.host) == [row] and state.has_vms_at(place.source)
        assert place.template is not None and state.serves_from(place.template)
    site.there["h1"] = RUNNING
    site.observe()
    seen = [site.world.at(row, place) for place in row.places]
    assert [one and (one.host, one.condition) for one in seen] == [("h1", RUNNING), ("h2", MAKING)]
    assert site.world.vm(row) == seen[0]
    site.there.update(h1=MAKING, h2=RUNNING)
    site.observe()
    shown = site.world.vm(row)
    assert shown is not None and shown.host == "h2", "where it goes on"


def test_the_node_of_a_vm_at_two_places_does_not_show_that_a_host_is_given_up() -> None:
    site = Site()
    site.node(site.vm.name, NodeState.DOWN)
    site.jobs["7"] = site.jobs["7"]._replace(
        ref=replace(site.jobs["7"].ref, restarts=1), state=JobState.PENDING, nodes=()
    )
    site.lose("h1")
    h1 = site.state.hosts["h1"]
    assert is_given_up(site.state, h1, site.world)
    site.state.move(
        Change(replace(site.vm, places=(*site.vm.places, Place("h2", "h2"))), Event.PLACE_LEFT, said("as if"))
    )
    assert not is_given_up(site.state, h1, site.world)


def test_a_vm_that_one_source_shows_at_another_host_is_not_at_its_place() -> None:
    place, elsewhere = Place("h1", "region"), Place("h2", "region")
    row = replace(vm_row(V.SERVING), places=(place, elsewhere))
    view = HypervisorView({}, {row.name: VmSeen(row.name, "h2", RUNNING)})
    world = World(sources={"region": Observation(Seen(view, 1.0))})
    assert world.at(row, place) is None and world.at(row, elsewhere) == world.vm(row) == view.vms[row.name]


@pytest.mark.parametrize("seed", range(150))
def test_whatever_is_lost_nothing_is_released_that_may_be_used_and_nothing_is_left(seed: int) -> None:
    """Random losses, returns and ends at two places. What is really there is claimed for at each commit."""
    rng, site = Random(seed), Site()
    site.begin_move()
    off: set[str] = set()
    for _ in range(rng.randint(3, 25)):
        host = rng.choice(["h1", "h2"])
        match rng.randrange(8):
            case 0 | 1:
                site.away.setdefault(host, site.clock.time)
            case 2 if host not in off:
                site.away.pop(host, None)
            case 3:
                site.there.pop(host, None)
            case 4 if RUNNING in site.there.values() and len(site.there) == 2:  # it has moved, or back
                site.there = {one: RUNNING if there is MAKING else MAKING for one, there in site.there.items()}
            case 5 if host in site.away and rng.random() < 0.3:
                site.fence(host)
                off.add(host)
            case 6 if rng.random() < 0.3 and site.jobs["7"].state is JobState.RUNNING:
                site.end_job()
            case _:
                site.pass_time(rng.choice([0.5, site.policy.silence + 1]))
        if rng.random() < 0.5:
            site.act()
        site.run()
        assert set(site.held) >= set(site.there), "what is there is claimed for"
    for host in list(site.away):
        if host in off:
            continue
        del site.away[host]
    if site.vm.state is not V.GONE and site.jobs["7"].state is JobState.RUNNING:
        site.end_job()
    site.settle()
    site.settle()
    assert (site.vm.state, site.held, site.there) == (V.GONE, [], {})
