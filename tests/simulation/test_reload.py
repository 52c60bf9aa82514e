"""Settings that are read again while jobs wait and run, in virtual time: the new ones count, and no promise breaks."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from tests.simulation.test_leases import HOST, LEASE, leases, scenario

from multiverse.config import BackfillSettings, FenceSettings, PacingSettings, PlacementSettings, PoolSettings, Settings
from multiverse.core.model.basics import Depth, Placement, Size
from multiverse.core.model.identity import Identity, Mount
from multiverse_lab.simulation.faults import ControllerCrash
from multiverse_lab.simulation.guests import Guest
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import SimulatedWorld, WorldSettings

POOL = PoolSettings(depth=Depth.PARKED, min=3)
SIZES = (Size(1, 200), Size(2, 900))
FEW = Settings(pacing=PacingSettings(provisioning=2))


def ran(outcome: Outcome, jobs: int) -> bool:
    return list(outcome.results.values()) == ["COMPLETED"] * jobs and not outcome.violations


def test_a_job_that_waits_gets_a_leased_host_once_the_settings_permit_it() -> None:
    """Two jobs of five minutes, and a host that holds one of them."""
    batch = Batch(seconds=300.0, size=Size(3, 500), limit=400.0)
    begun = scenario(lease=replace(LEASE, max=0))
    world = replace(begun.world, hosts=(replace(HOST, capacity=Size(3, 4096, 65536)),))
    without = replace(begun, world=world, arrivals=(Arrival(1.0, batch), Arrival(2.0, batch)))
    before = simulate(without)
    assert ran(before, 2) and leases(before) == 0 and before.seconds > 600.0, before.story()
    permitted = replace(without.settings, lease=(LEASE,))
    outcome = simulate(replace(without, reloads=((60.0, permitted),)))
    assert ran(outcome, 2) and leases(outcome) == 1, outcome.story()
    second = max(began for _, began, _ in outcome.runs)
    assert 60.0 < second < 120.0, "beside the first job, and not after it"


def made(outcome: Outcome) -> int:
    """How many VMs were made."""
    return sum(count for name, count in outcome.transitions.items() if name.startswith("vm: nothing - "))


@pytest.mark.parametrize("crashes", [(), (ControllerCrash(3, True, 5.0),)], ids=["", "crash"])
def test_a_pool_comes_and_goes_with_the_settings(crashes: tuple[ControllerCrash, ...]) -> None:
    arrivals = tuple(Arrival(at, Batch(seconds=5.0, size=Size(1, 200))) for at in (0.0, 60.0, 120.0))
    begun = Scenario(3, arrivals, WorldSettings(), FEW, crashes=crashes)
    assert made(simulate(begun)) == 3
    outcome = simulate(replace(begun, reloads=((20.0, replace(FEW, pool=(POOL,))),)))
    assert ran(outcome, 3), outcome.story()
    assert made(outcome) >= 6, "and none is left at the end, which is a promise"


def test_vms_that_are_made_later_have_the_new_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts: list[tuple[Mount, ...]] = []
    boot = SimulatedWorld._boot

    def noting(self: SimulatedWorld, name: str, identity: Identity) -> Guest:
        mounts.append(identity.mounts)
        return boot(self, name, identity)

    monkeypatch.setattr(SimulatedWorld, "_boot", noting)
    arrivals = tuple(Arrival(at, Batch(seconds=5.0, size=Size(1, 200))) for at in (0.0, 60.0))
    home = Mount("fileserver:/home", "/home")
    outcome = simulate(Scenario(3, arrivals, WorldSettings(), FEW, reloads=((30.0, replace(FEW, mounts=(home,))),)))
    assert ran(outcome, 2) and mounts == [(), (home,)]


@pytest.mark.parametrize("seed", range(6))
def test_promises_hold_whatever_is_changed_and_whenever(seed: int) -> None:
    rng = Random(f"{seed}/reloads")

    def other() -> Settings:
        pool = (replace(POOL, min=rng.randint(0, 3), max=rng.randint(3, 5), depth=rng.choice(list(Depth))),)
        return Settings(
            pacing=PacingSettings(
                provisioning=rng.randint(1, 9),
                instant_rate=rng.choice((0.0, 0.5, 2.0)),
                retry_limit=rng.choice((5.0, 300.0)),
                spawn_timeout=rng.choice((30.0, 60.0)),
                silence=rng.choice((10.0, 60.0)),
            ),
            backfill=BackfillSettings(rng.random() < 0.5, depth=rng.randint(1, 100), overtakes=rng.randint(0, 20)),
            placement=PlacementSettings(rng.choice(list(Placement)).value),
            fence=FenceSettings(after=90.0, quorum=rng.random()),
            pool=pool if rng.random() < 0.5 else (),
        )

    arrivals = tuple(
        Arrival(rng.uniform(0.0, 90.0), Batch(seconds=rng.uniform(1.0, 30.0), size=rng.choice(SIZES)))
        for _ in range(25)
    )
    reloads = tuple((rng.uniform(0.0, 150.0), other()) for _ in range(8))
    outcome = simulate(Scenario(seed, arrivals, WorldSettings(), FEW, reloads=reloads))
    assert ran(outcome, 25), outcome.story()
