"""Which running jobs leave drained hosts, by a move or by a save, within which limits, and what is remembered of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.context import Context
from multiverse.core.explanation import explain
from multiverse.core.model.eviction import Step
from multiverse.core.model.host import Drain
from multiverse.core.model.job import Attempt, Eviction
from multiverse.core.model.reason import Why
from multiverse.core.model.saved import SavedState, Storage
from multiverse.core.model.vm import VmCondition, VmState
from multiverse.core.rebalance.plan import proposals
from multiverse.core.transition import Command
from tests.unit.test_moving import TwoJobs, ready
from tests.unit.test_places import Site

V = VmState
STORAGE = Storage("shared", "qemu")
BOTH = Drain(moves=True, saves=True)


def storing(site: Site) -> Site:
    """The hosts of the site have a storage for saved jobs."""
    site.hosts = {name: replace(host, storage=STORAGE) for name, host in site.hosts.items()}
    site.run()
    return site


def drain(site: Site, how: Drain) -> None:
    site.run(Command("drain", "h1", drain=how))


def attempt(site: Site) -> Attempt:
    return site.rows.attempts[1]


def proposed(site: Site) -> list[Step]:
    return proposals(Context(site.state, site.world, site.policy))


def ways(site: Site) -> list[str]:
    return [one.way for one in attempt(site).evictions]


@pytest.mark.parametrize("how", [Drain(saves=True), BOTH])
def test_a_job_that_no_other_host_takes_is_saved_if_the_operator_says_so(how: Drain) -> None:
    site = storing(ready(moves=None))
    drain(site, how)
    (saved,) = site.rows.saved.values()
    assert (saved.state, saved.asked.kind) == (SavedState.PREPARING, Why.HOST_DRAINED)
    assert ways(site) == ["save"] and saved.evictions == attempt(site).evictions


def test_it_moves_if_another_host_takes_it_and_is_waited_for_if_that_is_asked() -> None:
    site = storing(ready())
    drain(site, BOTH)
    assert site.vm.state is V.MOVING and not site.rows.saved and ways(site) == ["move"]
    waiting = storing(ready(moves=None))
    drain(waiting, Drain(moves=True))
    assert waiting.vm.state is V.SERVING and not waiting.rows.saved


def test_a_vm_that_waits_for_other_moves_alone_is_not_saved() -> None:
    site = TwoJobs()
    storing(site)
    drain(site, BOTH)
    site.run()
    assert site.states == [V.MOVING, V.SERVING] and not site.rows.saved


def test_only_so_many_jobs_are_evicted_at_once() -> None:
    site = TwoJobs()
    site.policy = replace(site.policy, moves_at_once=2, evict_at_once=1)
    drain(site, Drain(moves=True))
    assert site.states == [V.MOVING, V.SERVING]
    (step,) = proposed(site)
    assert step.vm.id == 2 and step.held == Why.EVICTIONS_AT_ONCE(limit=1)
    site.end_move()
    site.run()
    assert site.states == [V.SERVING, V.MOVING]


def test_evictions_send_only_so_much_in_a_minute() -> None:
    site = TwoJobs()
    memory = site.vm.size.memory
    site.policy = replace(site.policy, moves_at_once=2, evict_rate=memory // 60)
    drain(site, Drain(moves=True))
    assert site.states == [V.MOVING, V.SERVING]
    (step,) = proposed(site)
    assert step.held == Why.EVICTION_RATE(sent=memory, rate=memory // 60)
    site.pass_time(61)
    site.run()
    assert site.states == [V.MOVING, V.MOVING]


def test_a_job_is_evicted_only_so_often_in_an_hour() -> None:
    site = ready()
    site.policy = replace(site.policy, evict_per_job=1)
    drain(site, Drain(moves=True))
    site.there = {"h1": VmCondition.RUNNING}
    site.act()
    site.run()
    site.pass_time(site.policy.move_again + 1)
    site.run()
    assert site.vm.state is V.SERVING
    (step,) = proposed(site)
    assert step.held == Why.EVICTED_OFTEN(times=1)
    site.pass_time(3600)
    site.run()
    assert site.vm.state is V.MOVING


def test_the_method_can_be_switched_off() -> None:
    site = ready()
    site.policy = replace(site.policy, evict_drains=False)
    drain(site, Drain(moves=True))
    assert site.vm.state is V.SERVING and not proposed(site)


def test_nothing_changes_while_it_is_shown_what_would_be_done() -> None:
    site = storing(ready())
    site.policy = replace(site.policy, evict_drains=False)
    drain(site, Drain(moves=True))
    site.policy = replace(site.policy, evict_drains=True)
    number, moves = site.state.numbers.next_saved, len(site.state.moves)
    (step,) = proposed(site)
    assert (step.to, step.held) == ("h2", None)
    assert (site.state.numbers.next_saved, len(site.state.moves), site.vm.state) == (number, moves, V.SERVING)


def test_what_an_eviction_took_is_remembered_and_explained() -> None:
    site = ready()
    drain(site, Drain(moves=True))
    (begun,) = attempt(site).evictions
    assert (begun.way, begun.host, begun.why.kind, begun.took) == ("move", "h1", Why.HOST_DRAINED, None)
    site.pass_time(4)
    site.there = {"h2": VmCondition.RUNNING}
    site.act()
    site.run()
    (ended,) = attempt(site).evictions
    assert ended.took is not None and ended.took >= 4
    told = explain(Context(site.state, site.world, site.policy), attempt(site), site.clock.time)
    assert "It left h1" in (said := " ".join(map(str, told.sentences))) and "because host h1 is drained" in said


def test_the_latest_evictions_of_a_job_are_kept() -> None:
    site = ready()
    one = attempt(site)
    for number in range(15):
        one = one.with_eviction(Eviction(float(number), "move", "h1", Why.OPERATOR(), 100))
    assert [eviction.at for eviction in one.evictions] == list(map(float, range(5, 15)))
