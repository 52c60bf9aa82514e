"""Jobs leave leased hosts: before their pilots end, in time, and to empty a lease that others can replace."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.sampled import one_in
from tests.simulation.test_evictions import moved, saved

from multiverse.config import LeaseSettings, PacingSettings, RebalanceSettings, SaveSettings, Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.saved import Storage
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.faults import ControllerCrash, Incident, IncidentKind
from multiverse_lab.simulation.generate_leaving import leaving
from multiverse_lab.simulation.generate_moving import KIND
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.pilots import PARTITION, PhysicalNodes
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import WorldSettings

K = IncidentKind
STORAGE = Storage("shared", "qemu")
ENDS = (K.PILOT_PREEMPTED, K.PILOT_CANCELLED)


def host(cpus: int = 1) -> Host:
    size = Size(cpus, 4096, 65536)
    return Host("h1", size, ABILITIES, Size(max(2, cpus), 4096, 65536), "tcg", storage=STORAGE, moves=KIND)


def scenario(
    *incidents: Incident,
    jobs: tuple[Batch, ...] = (Batch(seconds=90.0, size=Size(3, 500), limit=150.0),),
    on: Host | None = None,
    notice: float = 30.0,
    stores: bool = True,
    moves: bool = True,
    most: int = 2,
    **rebalance: float | bool,
) -> Scenario:
    """By default a job that fits on a leased host alone."""
    lease = LeaseSettings(PARTITION, max=most, time_limit=4000.0, min_wait=2.0, idle=20.0, start_timeout=20.0)
    nodes = PhysicalNodes(
        2,
        wait=(3.0, 3.0),
        notice=(notice, notice),
        drain=(1.0, 3.0),
        storage=STORAGE if stores else None,
        moves=KIND if moves else None,
    )
    return Scenario(
        7,
        tuple(Arrival(1.0 + number, batch) for number, batch in enumerate(jobs)),
        WorldSettings(
            (on or host(),), cluster=ClusterSettings(node_timeout=20.0, min_job_age=(2.0, 30.0)), physical=nodes
        ),
        Settings(
            pacing=PacingSettings(silence=10.0),
            lease=(lease,),
            save=SaveSettings(enabled=True),
            rebalance=replace(RebalanceSettings(), **rebalance),  # type: ignore[arg-type]
        ),
        incidents=incidents,
        limit=6000.0,
    )


def goes_well(one: Scenario) -> Outcome:
    outcome = simulate(one)
    assert not outcome.violations, outcome.story()
    assert set(outcome.results.values()) == {"COMPLETED"}, outcome.story()
    return outcome


def begun(outcome: Outcome) -> int:
    """How often scripts began."""
    return len(re.findall("the script of .* begins", outcome.story()))


@pytest.mark.parametrize("kind", ENDS)
def test_a_job_is_saved_before_its_lease_ends_and_goes_on_elsewhere(kind: IncidentKind) -> None:
    outcome = goes_well(scenario(Incident(40.0, kind)))
    assert (saved(outcome), begun(outcome)) == (1, 1), outcome.story()
    (line,) = (line for line in outcome.journal if "saved 1: preparing (asked" in line)
    assert "pilot 9000001 is ending" in line


def test_a_job_moves_where_another_host_has_room() -> None:
    """The first job of the own host has ended, as the pilot of the second one's is told to end."""
    jobs = (Batch(seconds=30.0, size=Size(3, 500), limit=60.0), Batch(seconds=120.0, size=Size(4, 500), limit=200.0))
    outcome = goes_well(scenario(Incident(60.0, K.PILOT_PREEMPTED), jobs=jobs, on=host(4)))
    assert (moved(outcome), saved(outcome), begun(outcome)) == (1, 0, 2), outcome.story()


def test_a_job_that_does_not_move_in_time_is_saved() -> None:
    jobs = (Batch(seconds=30.0, size=Size(3, 500), limit=60.0), Batch(seconds=120.0, size=Size(4, 500), limit=200.0))
    one = scenario(Incident(60.0, K.PILOT_PREEMPTED), jobs=jobs, on=host(4))
    outcome = goes_well(replace(one, world=replace(one.world, links_cut=0.99)))
    assert (moved(outcome), saved(outcome), begun(outcome)) == (0, 1, 2), outcome.story()


@pytest.mark.parametrize("how", [{"leases": False}, {"notice": 0.0}, {"stores": False, "moves": False}])
def test_what_does_not_leave_is_ended_in_time_and_begins_again(how: dict[str, bool]) -> None:
    outcome = goes_well(scenario(Incident(40.0, K.PILOT_PREEMPTED), **how))  # type: ignore[arg-type]
    assert (saved(outcome), moved(outcome), begun(outcome)) == (0, 0, 2), outcome.story()
    assert not [line for line in outcome.journal if "(died" in line]
    assert [line for line in outcome.journal if "reclaiming (restarted" in line and "pilot 9000001 is ending" in line]


def test_what_fits_into_the_notice_leaves_and_the_rest_begins_again() -> None:
    """3900 MiB take longer than the notice, 500 MiB do not."""
    jobs = (Batch(seconds=200.0, size=Size(2, 3900), limit=400.0), Batch(seconds=200.0, size=Size(2, 500), limit=400.0))
    outcome = goes_well(scenario(Incident(60.0, K.PILOT_PREEMPTED), jobs=jobs, moves=False, host_rate=50))
    assert saved(outcome) == 1, outcome.story()
    assert [outcome.story().count(f"the script of {job} begins") for job in (1, 2)] == [2, 1]


def test_what_loses_the_most_for_each_mib_leaves_first() -> None:
    """Either fits into the notice, but not both. The larger job has run for longer, but on one CPU."""
    jobs = (
        Batch(seconds=200.0, size=Size(1, 2000), limit=400.0),
        Batch(seconds=200.0, size=Size(4, 1000), limit=400.0),
    )
    end = Incident(60.0, K.PILOT_PREEMPTED)
    outcome = goes_well(scenario(end, jobs=jobs, on=host(0), moves=False, notice=8.0, host_rate=500))
    assert saved(outcome) == 1, outcome.story()
    assert [outcome.story().count(f"the script of {job} begins") for job in (1, 2)] == [2, 1]


LONG = Batch(seconds=300.0, size=Size(3, 500), limit=2000.0)


def given_back(outcome: Outcome) -> int:
    return outcome.transitions["lease: idle - released -> releasing"]


@pytest.mark.parametrize("keeps", [20.0, 3000.0])
def test_a_leased_host_is_emptied_if_its_jobs_would_keep_it_for_long(keeps: float) -> None:
    """The own host has room once its first job has ended."""
    jobs = (Batch(seconds=60.0, size=Size(3, 500), limit=100.0), LONG)
    outcome = goes_well(scenario(jobs=jobs, on=host(4), keeps=keeps))
    assert (moved(outcome), saved(outcome)) == (1 if keeps < 1000 else 0, 0), outcome.story()
    ended = [line for line in outcome.journal if "lease 1: held -> idle" in line]
    assert float(ended[0].split()[0]) < 1150.0 if keeps < 1000 else len(ended) == 1


def test_leases_are_emptied_into_fuller_ones_and_each_job_moves_once() -> None:
    """Two leases, of which each could take the job of the other one once the first two jobs have ended."""
    short = Batch(seconds=60.0, size=Size(4, 500), limit=100.0)
    jobs = (short, short, replace(LONG, size=Size(2, 500)), replace(LONG, size=Size(2, 400)))
    outcome = goes_well(scenario(jobs=jobs, keeps=20.0))
    assert (moved(outcome), saved(outcome)) == (1, 0), outcome.story()


def test_no_lease_is_emptied_where_a_job_has_no_room_elsewhere_and_none_is_saved_for_it() -> None:
    outcome = goes_well(scenario(jobs=(LONG,), keeps=20.0))
    assert (moved(outcome), saved(outcome)) == (0, 0), outcome.story()


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("commit", range(16, 34, 3))
def test_a_controller_that_crashes_as_a_job_leaves_ends_none_twice(commit: int, moves: bool) -> None:
    jobs = (Batch(seconds=30.0, size=Size(3, 500), limit=60.0), Batch(seconds=120.0, size=Size(4, 500), limit=200.0))
    one = scenario(Incident(60.0, K.PILOT_PREEMPTED), jobs=jobs, on=host(4), moves=moves)
    outcome = goes_well(replace(one, crashes=(ControllerCrash(commit, True, 5.0),)))
    assert outcome.crash_count == 1


@pytest.mark.parametrize("seed", one_in(2, range(12)))
def test_histories_of_jobs_that_leave_leases_keep_all_promises(seed: int) -> None:
    assert simulate(leaving(seed)).violations == []
