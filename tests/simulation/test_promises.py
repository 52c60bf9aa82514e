"""Nothing lost, nothing left: the real controller and store in the simulated world, seed by seed.

After any scenario each job ran exactly once or ended with a reason, no host was ever oversubscribed, no VM
served two jobs, and no VM, node, claim or attempt remains. A failure prints its seed and its story; run it
again with `simulate(troubled(SEED)).story()`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiverse.config import PacingSettings, Settings
from multiverse.core.model import Host, Size
from multiverse.simulation.faults import Fault, Odds, What, every
from multiverse.simulation.jobs import Batch
from multiverse.simulation.machines import ABILITIES
from multiverse.simulation.run import Arrival, Deed, Outcome, Scenario, simulate
from multiverse.simulation.scenarios import IMPOSSIBLE, calm, troubled
from multiverse.simulation.world import WorldSettings

BLOCK = 10  # seeds for each test case


def keeps_its_promises(scenario: Scenario) -> Outcome:
    outcome = simulate(scenario)
    assert not outcome.wrongs, outcome.story()
    return outcome


@pytest.mark.parametrize("first", range(0, 60, BLOCK))
def test_calm(first: int) -> None:
    for seed in range(first, first + BLOCK):
        keeps_its_promises(calm(seed))


@pytest.mark.parametrize("first", range(0, 80, BLOCK))
def test_troubled(first: int) -> None:
    for seed in range(first, first + BLOCK):
        keeps_its_promises(troubled(seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_troubled_at_length(first: int) -> None:
    for seed in range(first, first + 100):
        keeps_its_promises(troubled(seed))


# --- outcomes of single jobs -----------------------------------------------------------------------


def one(batch: Batch, *deeds: Deed, **changes: object) -> str:
    scenario = Scenario(7, (Arrival(1.0, batch, deeds=deeds),), **changes)  # type: ignore[arg-type]
    (result,) = keeps_its_promises(scenario).results.values()
    return result


def test_a_job_ends_as_its_script_does() -> None:
    assert one(Batch()) == "COMPLETED"
    assert one(Batch(exit_code=3)) == "FAILED"


def test_a_gang_runs() -> None:
    assert one(Batch(nodes=4)) == "COMPLETED"


@pytest.mark.parametrize("after", [0.1, 2.0, 4.5, 5.0, 6.0, 8.0])
def test_a_job_is_cancelled_at_any_moment(after: float) -> None:
    assert one(Batch(seconds=60), Deed(after, "cancel")) == "CANCELLED"


@pytest.mark.parametrize("after", [0.1, 4.5, 5.5])
def test_a_job_is_held_and_released(after: float) -> None:
    assert one(Batch(), Deed(after, "hold"), Deed(after + 30, "release")) == "COMPLETED"


@pytest.mark.parametrize("after", [0.1, 4.5, 5.5])
def test_a_job_changes_while_it_waits(after: float) -> None:
    assert one(Batch(), Deed(after, "change", Size(2, 700), 2)) == "COMPLETED"


def test_a_job_is_requeued_by_its_user() -> None:
    assert one(Batch(seconds=20), Deed(12.0, "requeue")) == "COMPLETED"


def test_a_job_too_large_for_any_host_is_revoked_with_a_reason() -> None:
    large = WorldSettings(cluster=replace(WorldSettings().cluster, flavor=Size(64, 2_000_000)))
    outcome = keeps_its_promises(Scenario(7, (Arrival(1.0, Batch(size=IMPOSSIBLE)),), large))
    assert list(outcome.results.values()) == ["CANCELLED"]
    assert any("fits on no host" in line for line in outcome.journal)


def test_a_job_of_an_unbootable_image_ends_or_waits_with_a_reason() -> None:
    scenario = Scenario(7, (Arrival(1.0, Batch(image="dud"), deeds=(Deed(900.0, "cancel"),)), Arrival(2.0, Batch())))
    outcome = keeps_its_promises(scenario)
    assert sorted(outcome.results.values()) == ["CANCELLED", "COMPLETED"]
    assert any("broken" in line for line in outcome.journal)


def test_a_gang_that_needs_two_uneven_hosts_gets_a_template_on_both() -> None:
    hosts = (Host("big", Size(2, 16384, 65536), ABILITIES), Host("wide", Size(8, 4096, 65536), ABILITIES))
    assert one(Batch(nodes=2, size=Size(2, 900)), world=WorldSettings(hosts)) == "COMPLETED"


# --- single troubles -------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", Fault)
def test_one_kind_of_fault_all_the_time(fault: Fault) -> None:
    arrivals = tuple(Arrival(float(n), Batch(seconds=5.0, nodes=1 + n % 2)) for n in range(4))
    odds = Odds({fault: 0.3}, until=200.0)
    keeps_its_promises(Scenario(11, arrivals, scheduler_odds=odds, hypervisor_odds=odds))


@pytest.mark.parametrize("seed", range(6))
def test_the_controller_dies_again_and_again(seed: int, tmp_path: Path) -> None:
    arrivals = tuple(Arrival(float(n), Batch(seconds=3.0, nodes=1 + n % 2)) for n in range(4))
    scenario = Scenario(
        seed,
        arrivals,
        mishaps=every(1.0, What.CRASH, Random(seed), 60.0),
        database=tmp_path / "multiverse.db",
    )
    outcome = keeps_its_promises(scenario)
    assert outcome.crashes > 3
    assert set(outcome.results.values()) == {"COMPLETED"}


@pytest.mark.parametrize("seed", range(4))
def test_vms_die_like_flies(seed: int) -> None:
    arrivals = tuple(Arrival(float(n), Batch(seconds=5.0)) for n in range(4))
    keeps_its_promises(Scenario(seed, arrivals, mishaps=every(4.0, What.VM_DIES, Random(seed), 120.0)))


# --- capacity --------------------------------------------------------------------------------------

sizes = st.builds(Size, st.integers(1, 6), st.integers(16, 3000))
batches = st.builds(Batch, seconds=st.sampled_from((0.0, 2.0, 20.0)), nodes=st.integers(1, 3), size=sizes)
machines = st.lists(st.builds(Size, st.integers(1, 8), st.integers(1024, 6000), st.just(65536)), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    capacities=machines,
    jobs=st.lists(st.tuples(st.floats(0.5, 10.0), batches), min_size=1, max_size=8),
    provisioning=st.integers(1, 16),
)
def test_no_host_is_ever_oversubscribed(
    seed: int, capacities: list[Size], jobs: list[tuple[float, Batch]], provisioning: int
) -> None:
    hosts = tuple(Host(f"h{n}", capacity, ABILITIES) for n, capacity in enumerate(capacities))
    arrivals = tuple(Arrival(at, batch) for at, batch in jobs)
    keeps_its_promises(
        Scenario(seed, arrivals, WorldSettings(hosts), Settings(pacing=PacingSettings(provisioning=provisioning)))
    )


# --- determinism -----------------------------------------------------------------------------------

_TELL = """
import logging, structlog
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
from multiverse.simulation.run import simulate
from multiverse.simulation.scenarios import troubled
for seed in (3, 4):
    print("\\n".join(simulate(troubled(seed)).journal))
"""


def test_a_seed_tells_the_same_story_every_time() -> None:
    def tell(hash_seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", _TELL], env=env, capture_output=True, text=True, check=True)
        return done.stdout

    first, second = tell("1"), tell("2")
    assert len(first) > 1000
    assert first == second


def test_seeds_differ() -> None:
    assert simulate(calm(1)).journal != simulate(calm(2)).journal
