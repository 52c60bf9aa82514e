"""Running jobs give way to urgent ones, and leave hosts that are drained: by moves and by saves, and all go on."""

from __future__ import annotations

from dataclasses import replace

from multiverse.config import PacingSettings, RebalanceSettings, SaveSettings, Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.saved import Storage
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.generate_evicting import RULES
from multiverse_lab.simulation.generate_moving import KIND
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import WorldSettings

RUNS_SAVED = "saved: stored - runs -> thawing"
MOVED = "vm: moving - moved -> settling"


def host(name: str, cpus: int = 2, *, moves: bool = False) -> Host:
    capacity = Size(cpus, 4096, 65536)
    storage = Storage("shared", "qemu")
    return Host(name, capacity, ABILITIES, capacity, "tcg", storage=storage, moves=KIND if moves else None)


def scenario(*arrivals: Arrival, hosts: tuple[Host, ...], **rebalance: object) -> Scenario:
    cluster = ClusterSettings(node_timeout=20.0, min_job_age=(2.0, 3.0), preemption=RULES)
    settings = Settings(
        pacing=PacingSettings(silence=5.0),
        save=SaveSettings(enabled=True),
        rebalance=RebalanceSettings(**rebalance),  # type: ignore[arg-type]
    )
    return Scenario(3, arrivals, WorldSettings(hosts, cluster=cluster), settings, limit=2000.0)


def low(at: float, seconds: float = 60.0, **more: object) -> Arrival:
    return Arrival(at, Batch(seconds=seconds, preempt_class="low", **more))  # type: ignore[arg-type]


def high(at: float, seconds: float = 20.0, **more: object) -> Arrival:
    batch = Batch(seconds=seconds, preempt_class="high", priority=3000, **more)  # type: ignore[arg-type]
    return Arrival(at, batch)


def goes_well(one: Scenario) -> Outcome:
    outcome = simulate(one)
    assert not outcome.violations, outcome.story()
    assert set(outcome.results.values()) == {"COMPLETED"}, outcome.story()
    return outcome


def test_a_job_is_saved_for_an_urgent_one_and_goes_on_after_it() -> None:
    outcome = goes_well(scenario(low(0.5), low(1.0), high(20.0), hosts=(host("h0"),)))
    assert outcome.transitions[RUNS_SAVED] == 1, outcome.story()
    ended = {job: end for job, _, end in outcome.runs_by_job()}
    assert ended["3"] < 60.0, outcome.story()


def test_nobody_is_evicted_for_a_job_of_the_same_class() -> None:
    outcome = goes_well(scenario(low(0.5), low(1.0), low(20.0, priority=3000), hosts=(host("h0"),)))
    assert not outcome.transitions[RUNS_SAVED]


def test_without_the_method_an_urgent_job_waits() -> None:
    outcome = goes_well(scenario(low(0.5), low(1.0), high(20.0), hosts=(host("h0"),), preemption=False))
    assert not outcome.transitions[RUNS_SAVED]


def test_a_job_moves_where_that_is_enough() -> None:
    """Each host has room for one CPU more, and the urgent job needs two on one host."""
    hosts = (host("h0", 3, moves=True), host("h1", 3, moves=True))
    jobs = (low(0.5, size=Size(2, 64)), low(1.0, size=Size(2, 64)), high(20.0, size=Size(1, 64)), )
    outcome = goes_well(scenario(*jobs, high(22.0, size=Size(2, 64)), hosts=hosts))
    assert outcome.transitions[RUNS_SAVED] + outcome.transitions[MOVED] >= 1, outcome.story()
