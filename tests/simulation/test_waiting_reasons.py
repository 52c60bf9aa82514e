"""What users are told while their jobs wait, in whole simulations."""

from __future__ import annotations

from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.job import JobRef
from multiverse.core.queue import BEHIND
from multiverse_lab.simulation.faults import CALL_IDS, Incident, IncidentKind
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario, UserAction
from multiverse_lab.simulation.world import WorldSettings

EXPLAIN = CALL_IDS["scheduler", "explain"]


def test_a_long_queue_costs_few_texts_and_a_restart_none() -> None:
    """One job fills the host for 300 s; 30 jobs and an array of 40 tasks wait behind it until they are cancelled."""
    host = Host("h1", Size(1, 8192, 65536), ABILITIES)
    waiting = [
        Arrival(20.0 + n / 10, Batch(), tasks=40 * (n == 30), actions=(UserAction(250.0 - n / 10, "cancel"),))
        for n in range(31)
    ]
    arrivals = (Arrival(1.0, Batch(seconds=300.0)), *waiting)
    crash = Incident(150.0, IncidentKind.CONTROLLER_CRASH, 2.0)
    outcomes = [simulate(Scenario(3, arrivals, WorldSettings((host,)), incidents=some)) for some in ((), (crash,))]
    for outcome in outcomes:
        assert not outcome.violations, outcome.story()
        behind = [text for text in outcome.told if text == str(BEHIND)]
        assert len(behind) == 20 + 40, "each job behind the first ten once, and each task with its array"
        full = [text for text in outcome.told if "the hosts are full" in text]
        assert len(full) == 10
    quiet, restarted = ([call for call in outcome.calls if call.id == EXPLAIN] for outcome in outcomes)
    jobs = [job for call in quiet for job in call.arguments if isinstance(job, JobRef)]
    assert len(quiet) <= 20 and len(jobs) == len(set(jobs)), "no job is named by a second call"
    assert len(restarted) > len(quiet), "the driver compares what is told again"
