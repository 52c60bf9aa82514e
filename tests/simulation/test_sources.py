"""Each source of a hypervisor is observed by itself: a slow or silent one delays nothing that does not depend on it."""

from __future__ import annotations

import pytest

from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse_lab.simulation.faults import FOREVER, Incident, IncidentKind
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import WorldSettings

FIVE = tuple(Host(f"h{n}", Size(4, 4096, 65536), ABILITIES) for n in range(5))
WHOLE_HOST = Batch(seconds=300.0, size=Size(4, 1000))


def passes_until_start(outcome: Outcome) -> list[int]:
    """For each attempt, in how many passes rows changed between its submission and the start of its job."""
    changed = sorted({entry.mono for entry in outcome.entries if entry.target})
    found = []
    for attempt in sorted({entry.id for entry in outcome.entries if entry.kind == "attempt"}):
        at = {entry.target: entry.mono for entry in outcome.entries if (entry.kind, entry.id) == ("attempt", attempt)}
        queued = min(e.mono for e in outcome.entries if (e.kind, e.id, e.target) == ("attempt", attempt, "queued"))
        found.append(sum(queued <= mono <= at["allocated"] for mono in changed))
    return found


def four_jobs_on_five_hosts(slow: dict[str, float]) -> Outcome:
    arrivals = tuple(Arrival(10.0 + 20.0 * n, WHOLE_HOST) for n in range(4))
    outcome = simulate(Scenario(7, arrivals, WorldSettings(FIVE, slow_sources=slow)))
    assert not outcome.violations, outcome.story()
    assert list(outcome.results.values()) == ["COMPLETED"] * 4
    return outcome


@pytest.mark.parametrize("seconds", [600.0, FOREVER], ids=["after ten minutes", "never"])
def test_jobs_start_after_as_many_passes_beside_a_host_that_answers_late_or_never(seconds: float) -> None:
    healthy = passes_until_start(four_jobs_on_five_hosts({}))
    outcome = four_jobs_on_five_hosts({"h4": seconds})
    assert len(healthy) == 4 and passes_until_start(outcome) == healthy
    assert not any("h4" in line for line in outcome.journal), "nothing is concluded about the silent host"


def test_a_job_goes_on_although_its_host_does_not_answer_for_ten_minutes() -> None:
    """Its VM is out of sight and then found again. It keeps its claim, and its job runs once."""
    slow = Incident(30.0, IncidentKind.SOURCE_SLOW, 200.0)
    hosts = (*FIVE[:1],)
    job = Arrival(10.0, WHOLE_HOST)
    outcome = simulate(Scenario(7, (job,), WorldSettings(hosts), incidents=(slow,)))
    assert not outcome.violations, outcome.story()
    assert list(outcome.results.values()) == ["COMPLETED"]
    assert outcome.transitions["vm: serving - lost -> lost"] == outcome.transitions["vm: lost - found -> serving"] == 1
    assert outcome.transitions["attempt: allocated - ended -> reclaiming"] == 1


def test_a_job_that_only_the_silent_host_can_hold_waits_for_it() -> None:
    hosts = (Host("h0", Size(1, 4096, 65536), ABILITIES), FIVE[1])
    slow = Incident(0.0, IncidentKind.SOURCE_SLOW, 300.0, pick=0.9)
    jobs = (Arrival(10.0, WHOLE_HOST), Arrival(11.0, Batch(seconds=5.0)))
    outcome = simulate(Scenario(7, jobs, WorldSettings(hosts), incidents=(slow,)))
    assert not outcome.violations, outcome.story()
    assert set(outcome.results.values()) == {"COMPLETED"}
    begins = [at for at, text in outcome.events if text.endswith("begins")]
    assert begins[0] < 60.0 < 300.0 < begins[1]
