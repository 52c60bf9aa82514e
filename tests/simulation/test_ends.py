"""What happens between a job's last instruction and the end of its VM."""

from __future__ import annotations

import pytest

from multiverse.config import Settings
from multiverse.core.transition import Event
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import WorldSettings

EPILOG = 0.15  # seconds for which the job is COMPLETING


@pytest.mark.parametrize("seed", range(5))
def test_a_job_that_is_seen_completing_is_seen_gone_before_the_next_poll(seed: int) -> None:
    """The hint of its end is used up by the observation of COMPLETING, with which the wait for its end begins."""
    settings, cluster = Settings(), ClusterSettings(epilog=(EPILOG, EPILOG))
    outcome = simulate(
        Scenario(seed, (Arrival(5.0, Batch(seconds=7.3)),), WorldSettings(cluster=cluster), settings, hints=1.0)
    )
    assert not outcome.violations, outcome.story()
    at = {entry.event: entry.mono for entry in outcome.entries}
    assert at[Event.RELEASED] - at[Event.ENDED] < EPILOG + 0.2 < settings.poll
