"""Running jobs give way to urgent ones, and leave hosts that are drained: by moves and by saves, and all go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.config import BackfillSettings, PacingSettings, RebalanceSettings, SaveSettings, Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.job import Maintenance
from multiverse.core.model.saved import Storage
from multiverse.core.rebalance import plan, preemption
from multiverse_lab.bench.evictions import simulate_week
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.faults import Incident, IncidentKind
from multiverse_lab.simulation.generate_evicting import RULES
from multiverse_lab.simulation.generate_moving import KIND
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario, UserAction
from multiverse_lab.simulation.world import WorldSettings

SMALL, LARGE = Size(1, 64), Size(2, 64)


def host(name: str, cpus: int = 2, *, moves: bool = False, stores: bool = True) -> Host:
    capacity = Size(cpus, 4096, 65536)
    storage = Storage("shared", "qemu") if stores else None
    return Host(name, capacity, ABILITIES, capacity, "tcg", storage=storage, moves=KIND if moves else None)


def scenario(hosts: tuple[Host, ...], *arrivals: Arrival, **rebalance: int | bool) -> Scenario:
    cluster = ClusterSettings(node_timeout=20.0, min_job_age=(2.0, 3.0), preemption=RULES)
    settings = Settings(
        pacing=PacingSettings(silence=5.0),
        save=SaveSettings(enabled=True),
        rebalance=replace(RebalanceSettings(), **rebalance),
    )
    return Scenario(3, arrivals, WorldSettings(hosts, cluster=cluster), settings, limit=4000.0)


def job(at: float, urgency: str, seconds: float = 60.0, size: Size = SMALL, nodes: int = 1) -> Arrival:
    priority = {"low": 1000, "normal": 2000, "high": 3000}[urgency]
    batch = Batch(urgency, seconds=seconds, preempt_class=urgency, priority=priority, size=size, nodes=nodes)
    return Arrival(at, batch)


def goes_well(one: Scenario) -> Outcome:
    outcome = simulate(one)
    assert not outcome.violations, outcome.story()
    assert set(outcome.results.values()) == {"COMPLETED"}, outcome.story()
    return outcome


def saved(outcome: Outcome) -> int:
    """How often a job went on from its state."""
    return outcome.transitions["saved: stored - runs -> thawing"]


def moved(outcome: Outcome) -> int:
    return sum(count for what, count in outcome.transitions.items() if what.startswith("vm: moving - moved"))


def began(outcome: Outcome, urgency: str = "high") -> float:
    """When the first job of that class began."""
    return next(begin for name, begin, _ in outcome.runs if name == urgency)


def test_a_job_is_saved_for_an_urgent_one_and_goes_on_after_it() -> None:
    outcome = goes_well(scenario((host("h0"),), job(0.5, "low"), job(1.0, "low"), job(20.0, "high", 20.0)))
    assert saved(outcome) == 1 and began(outcome) < 40.0, outcome.story()
    assert "job 3 (high) takes its place" in outcome.story()


def test_nobody_is_evicted_for_a_job_that_may_not_preempt_them() -> None:
    outcome = goes_well(scenario((host("h0"),), job(0.5, "normal"), job(1.0, "low"), job(20.0, "low")))
    assert not saved(outcome)


def test_each_method_can_be_switched_off() -> None:
    jobs = (job(0.5, "low"), job(1.0, "low"), job(20.0, "high"))
    outcome = goes_well(scenario((host("h0"),), *jobs, preemption=False))
    assert not saved(outcome) and began(outcome) > 60.0


def test_a_job_moves_where_that_is_enough() -> None:
    """Each of two hosts has a CPU free, as the first job has ended, and the urgent one needs two on one host."""
    hosts = (host("h0", 3, moves=True), host("h1", 3, moves=True))
    others = (job(0.5, "low", 10.0), *(job(at, "low", 100.0) for at in (1.5, 2.5)), job(3.5, "low", 100.0, LARGE))
    outcome = goes_well(scenario(hosts, *others, job(30.0, "high", 20.0, LARGE)))
    assert (moved(outcome), saved(outcome)) == (1, 0), outcome.story()
    assert began(outcome) < 60.0


def test_nobody_is_evicted_for_a_job_that_could_not_start_even_then() -> None:
    """A job of another class holds a CPU of the only host that is large enough."""
    hosts = (host("h0", 3), host("h1", 1))
    outcome = goes_well(
        scenario(hosts, job(0.5, "high", size=LARGE), job(1.0, "low"), job(1.5, "low"), job(20.0, "high", 10.0, LARGE))
    )
    assert not saved(outcome), outcome.story()


def test_the_cheapest_set_is_evicted_and_of_equals_the_one_that_came_last() -> None:
    jobs = (job(0.5, "low", 100.0, Size(1, 900)), job(2.0, "low", 100.0), job(4.0, "low", 100.0))
    outcome = goes_well(scenario((host("h0", 3),), *jobs, job(30.0, "high", 20.0)))
    assert saved(outcome) == 1
    assert [line for line in outcome.story().splitlines() if "vm 3 of attempt 3: serving -> releasing" in line]


def test_a_job_of_several_vms_gives_way_whole_and_room_is_made_on_several_hosts() -> None:
    hosts = (host("h0"), host("h1"))
    outcome = goes_well(scenario(hosts, job(0.5, "low", nodes=4), job(20.0, "high", 20.0, nodes=4)))
    assert saved(outcome) == 1 and began(outcome) < 60.0, outcome.story()


def test_room_that_is_being_made_is_not_given_to_jobs_that_go_ahead() -> None:
    """While a job moves for the urgent one, a short one comes, for which there is room beside it."""
    hosts = (host("h0", 3, moves=True), host("h1", 3, moves=True))
    short = Arrival(30.3, Batch("short", seconds=60.0, limit=70.0, priority=1000, size=SMALL))
    low = (job(0.5, "low", 10.0), *(job(at, "low", 300.0) for at in (1.5, 2.5)), job(3.5, "low", 300.0, LARGE))
    limited = (replace(one, batch=replace(one.batch, limit=400.0)) for one in low)
    one = scenario(hosts, *limited, job(30.0, "high", 20.0, LARGE), short)
    outcome = goes_well(replace(one, settings=replace(one.settings, backfill=BackfillSettings(True))))
    assert (moved(outcome), saved(outcome)) == (1, 0), outcome.story()
    assert began(outcome) < began(outcome, "short"), outcome.story()


def stuck(mode: str, grace: float = 0.0, **batch: bool) -> Scenario:
    """An urgent job comes to a host that two jobs fill. They can neither move nor be saved."""
    low = [replace(one, batch=replace(one.batch, **batch)) for one in (job(0.5, "low"), job(1.0, "low"))]
    one = scenario((host("h0", stores=False),), *low, job(20.0, "high", 20.0))
    rules = replace(RULES, modes={"low": mode}, grace={"low": grace} if grace else {})
    return replace(one, world=replace(one.world, cluster=replace(one.world.cluster, preemption=rules)))


def test_a_job_that_can_neither_move_nor_be_saved_is_queued_again_as_the_scheduler_would() -> None:
    outcome = goes_well(stuck("requeue"))
    assert began(outcome) < 40.0, outcome.story()
    runs = [begin for name, begin, _ in outcome.runs if name == "low"]
    assert len(runs) == 3 and max(runs) > began(outcome), "one of them began anew, and after the urgent job"
    (left,) = (one for of_job in outcome.evictions.values() for one in of_job)
    assert left.way == "requeue" and left.took is not None and left.took > 20.0
    told = "job 3 (high) takes its place; it is queued again, as PreemptMode=REQUEUE of low says"
    assert told in outcome.told and any(text.startswith("queued again 20") for text in outcome.told)


@pytest.mark.parametrize(
    ("mode", "requeue", "why"),
    [
        ("cancel", True, "it is cancelled, as PreemptMode=CANCEL of low says"),
        ("requeue", False, "it is cancelled, as PreemptMode=REQUEUE of low says, and it cannot be queued again"),
    ],
)
def test_it_is_cancelled_where_the_scheduler_would_cancel_it(mode: str, requeue: bool, why: str) -> None:
    outcome = simulate(stuck(mode, requeue=requeue))
    assert not outcome.violations and began(outcome) < 40.0, outcome.story()
    assert sorted(outcome.results.values()) == ["CANCELLED", "COMPLETED", "COMPLETED"], outcome.story()
    assert f"job 3 (high) takes its place; {why}" in outcome.told


def test_it_has_its_grace_time_to_end_by_itself() -> None:
    outcome = goes_well(stuck("requeue", grace=15.0))
    assert 35.0 < began(outcome) < 50.0, outcome.story()
    assert any("it is queued again 20" in text for text in outcome.told), outcome.told


def test_a_job_that_its_user_queues_again_in_its_grace_time_waits_for_slurms_delay() -> None:
    one = stuck("requeue", grace=15.0)
    first, last, urgent = one.arrivals
    last = replace(last, actions=(UserAction(24.0, "requeue"),))
    outcome = goes_well(replace(one, arrivals=(first, last, urgent)))
    again = [begin for name, begin, _ in outcome.runs if name == "low"][-1]
    assert began(outcome) < 35.0 and again > 25.0 + 120.0, outcome.story()


@pytest.mark.parametrize("one", [stuck("suspend"), stuck("cancel", interactive=True, requeue=False)])
def test_it_is_left_alone_where_the_scheduler_would_suspend_it_and_if_it_is_interactive(one: Scenario) -> None:
    outcome = goes_well(one)
    assert began(outcome) > 60.0


def test_of_many_jobs_all_are_looked_at_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job that was submitted first is the only one that can leave, and the last one that is looked at."""
    monkeypatch.setattr(plan, "CONSIDERED", 1)
    monkeypatch.setattr(preemption, "CONSIDERED", 1)
    hosts = (host("h0", 1), host("h1", 1, stores=False), host("h2", 1, stores=False))
    low = (job(at, "low", 100.0) for at in (0.5, 8.0, 16.0))
    one = scenario(hosts, *low, job(30.0, "high", 20.0))
    rules = replace(RULES, modes={"low": "suspend"})
    outcome = goes_well(replace(one, world=replace(one.world, cluster=replace(one.world.cluster, preemption=rules))))
    assert saved(outcome) == 1 and began(outcome) < 60.0, outcome.story()


def test_a_save_is_cheaper_than_the_end_of_a_run_however_short() -> None:
    """Of two hosts one has a storage. Its job is larger, and has run for longer."""
    hosts = (host("h0", 1), host("h1", 1, stores=False))
    jobs = (job(0.5, "low", 100.0, Size(1, 900)), job(5.0, "low", 100.0), job(20.0, "high", 20.0))
    outcome = goes_well(scenario(hosts, *jobs))
    assert saved(outcome) == 1 and began(outcome) < 60.0, outcome.story()
    assert [one.way for of_job in outcome.evictions.values() for one in of_job] == ["save"], outcome.story()


def test_a_job_is_left_alone_for_its_exempt_time() -> None:
    outcome = goes_well(scenario((host("h0", 1),), job(0.5, "normal", 60.0), job(8.0, "high", 10.0)))
    assert saved(outcome) == 1 and began(outcome) > 20.0, "20 s after it began"


def test_a_job_is_evicted_no_more_often_than_the_limit_says() -> None:
    urgent = [job(20.0 + 40 * number, "high", 5.0) for number in range(6)]
    outcome = goes_well(scenario((host("h0", 1),), job(0.5, "low", 150.0), *urgent, per_job=2))
    assert saved(outcome) == 2, outcome.story()


def test_jobs_that_cannot_move_off_a_drained_host_are_saved_if_that_is_asked() -> None:
    """An operator drains the first host for a minute with --move and --save; the other one is full."""
    hosts = (host("h0", 1, moves=True), host("h1", 1, moves=True))
    drained = Incident(20.0, IncidentKind.HOST_DRAINED, 60.0, 0.05)
    one = scenario(hosts, job(0.5, "low", 40.0), job(1.0, "low", 40.0))
    outcome = goes_well(replace(one, incidents=(drained,)))
    assert saved(outcome) + moved(outcome) >= 1, outcome.story()


def test_jobs_that_were_evicted_do_not_take_their_places_back_before_the_urgent_one() -> None:
    """In Slurm's order they are ahead of it."""
    low = (replace(one, batch=replace(one.batch, priority=5000)) for one in (job(0.5, "low"), job(1.0, "low")))
    outcome = goes_well(scenario((host("h0"),), *low, job(20.0, "high", 20.0, LARGE), at_once=1))
    assert saved(outcome) == 2 and began(outcome) < 60.0, outcome.story()


@pytest.mark.parametrize("evicts", [True, False])
def test_hosts_are_emptied_before_the_scheduler_reserves_their_machines(evicts: bool) -> None:
    """A host that jobs cannot leave takes none that may not have ended by then."""
    hosts = (host("h0", 2, moves=evicts, stores=evicts), host("h1", 1, moves=evicts, stores=evicts))
    jobs = (job(0.5, "low", 200.0), job(1.0, "low", 200.0))
    one = scenario(hosts, *jobs, notice=30)
    reserved = (Maintenance("fans", 80.0, 150.0, ("h0", "other")), Maintenance("all", 10.0, 61.0, ("other",)))
    cluster = replace(one.world.cluster, maintenance=reserved)
    outcome = goes_well(replace(one, world=replace(one.world, cluster=cluster)))
    story = outcome.story().splitlines()
    begun, ended = (line for line in story if "host 1: known (drained" in line)
    assert "reservation fans for maintenance" in begun and "reservation fans is over" in ended
    assert 150.0 <= float(ended.split()[0]) < 160.0
    assert [50.0 <= float(begun.split()[0]) < 60.0, saved(outcome) + moved(outcome) > 0] == [evicts, evicts]
    on_it = [line for line in story if "instant on h0" in line and float(line.split()[0]) < 150.0]
    assert bool(on_it) is evicts, outcome.story()


@pytest.mark.slow
def test_urgent_jobs_are_served_sooner_and_jobs_that_are_not_evicted_are_not_slower() -> None:
    """The benchmark, for half a day."""
    found = simulate_week(0.5)
    none, preempted = found.figures["none"], found.figures["preemption"]
    assert (none.moves, none.saves) == (0, 0)
    assert preempted.moves + preempted.saves > 0 and preempted.high.mean < none.high.mean
    assert preempted.untouched <= 1.1 * preempted.untouched_without
