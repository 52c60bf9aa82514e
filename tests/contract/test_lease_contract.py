"""The contract of `ports.Leases`: one suite for the simulated Slurm and for a real one (`LEASES`).

A real one needs a partition of physical nodes of which one is free, and pilots that run on without an agent.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC
from collections.abc import Awaitable, Callable
from dataclasses import replace
from math import inf
from random import Random

import pytest

from multiverse.core.errors import Refused
from multiverse.core.model.basics import Size
from multiverse.core.model.identity import lease_name
from multiverse.core.model.job import LeaseSpec, PilotSeen, PilotState, SchedulerView
from multiverse.ports import Leases, Scheduler
from multiverse_lab.simulation.clock import EPOCH
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.pilots import PARTITION, PhysicalNodes
from multiverse_lab.simulation.world import SimulatedWorld, WorldSettings


class Lender(ABC):
    """What the suite needs beside the port. `base` is the first number of its leases; each check uses others, and what
    it leaves is released by `clean_up`."""

    scheduler: Scheduler
    partition = PARTITION
    account = ""
    user = ""
    site = "test0"
    base = 1
    patience = 60.0  # seconds that a condition may take
    used = 0

    def now(self) -> float:
        """Now, in Unix time."""
        return time.time()

    @property
    def leases(self) -> Leases:
        assert self.scheduler.leases is not None
        return self.scheduler.leases

    def spec(self, **more: object) -> LeaseSpec:
        """Of a lease that there has not been."""
        self.used += 1
        name = lease_name(self.site, self.base + self.used)
        made = LeaseSpec(name, f"{self.used:032x}", self.partition, time_limit=600.0)
        return replace(made, account=self.account, user=self.user, **more)  # type: ignore[arg-type]

    async def view(self, met: Callable[[SchedulerView], bool]) -> SchedulerView:
        """The first observation that meets a condition."""
        for _ in range(int(self.patience / 0.2)):
            view = await self.scheduler.observe()
            if met(view):
                return view
            await asyncio.sleep(0.2)
        raise AssertionError(f"the condition was never met; last seen: {view.pilots}")

    async def pilot(self, lease: LeaseSpec, met: Callable[[PilotSeen], bool] = lambda _: True) -> tuple[str, PilotSeen]:
        """The only pilot of a lease, once it meets a condition, with the scheduler's id."""

        def mine(view: SchedulerView) -> list[tuple[str, PilotSeen]]:
            return [(id_, one) for id_, one in view.pilots.items() if one.name == lease.name]

        view = await self.view(lambda view: any(met(one) for _, one in mine(view)))
        (found,) = mine(view)
        return found

    async def gone(self, lease: LeaseSpec) -> None:
        """No pilot of a lease waits or runs any more."""
        over = (PilotState.ENDED,)
        await self.view(lambda view: all(one.state in over for one in view.pilots.values() if one.name == lease.name))

    async def clean_up(self) -> None:
        """Release all that the checks have asked for."""
        view = await self.scheduler.observe()
        for name in {one.name for one in view.pilots.values() if one.name.startswith(f"lease-{self.site}-")}:
            await self.leases.release(name, ())


LeaseCheck = Callable[[Lender], Awaitable[None]]


def runs(pilot: PilotSeen) -> bool:
    return pilot.state is PilotState.RUNNING


async def what_can_be_leased_is_shown(h: Lender) -> None:
    size = (await h.view(lambda view: h.partition in view.leasable)).leasable[h.partition]
    assert size.cpus >= 1 and size.memory > 0


async def a_pilot_is_shown_with_its_name_token_node_and_end(h: Lender) -> None:
    lease = h.spec()
    before = h.now()
    await h.leases.request(lease)
    _, pilot = await h.pilot(lease, runs)
    assert (pilot.name, pilot.token, pilot.restarts) == (lease.name, lease.token, 0) and pilot.node
    assert before + 500.0 < pilot.ends < before + 800.0, "its time limit, and what Slurm adds until it has ended it"
    await h.leases.release(lease.name, ())
    await h.gone(lease)


async def a_request_that_is_repeated_submits_no_second_pilot(h: Lender) -> None:
    lease = h.spec()
    await h.leases.request(lease)
    await h.pilot(lease)
    await h.leases.request(lease)
    id_, _ = await h.pilot(lease)
    await h.leases.request(lease)
    assert (await h.pilot(lease))[0] == id_
    await h.leases.release(lease.name, ())
    await h.gone(lease)


async def a_released_pilot_ends_and_nothing_of_it_is_left(h: Lender) -> None:
    lease = h.spec()
    await h.leases.request(lease)
    await h.pilot(lease, runs)
    await h.leases.release(lease.name, ())
    await h.leases.release(lease.name, ())
    await h.gone(lease)
    shown = [one for one in (await h.scheduler.observe()).pilots.values() if one.name == lease.name]
    assert all(one.clean for one in shown), "its node answered until it had ended"
    await h.leases.release(lease.name, ())


async def a_release_names_pilots_and_leaves_others_alone(h: Lender) -> None:
    lease, other = h.spec(), h.spec()
    await h.leases.request(lease)
    id_, _ = await h.pilot(lease)
    await h.leases.release(other.name, (id_,))
    await h.leases.release(lease.name, ("99999999",))
    await asyncio.sleep(1.0)
    assert (await h.pilot(lease))[1].state in (PilotState.PENDING, PilotState.RUNNING)
    await h.leases.release(lease.name, (id_,))
    await h.gone(lease)


async def releasing_what_was_never_requested_succeeds(h: Lender) -> None:
    await h.leases.release(h.spec().name, ())


async def a_lease_that_will_never_be_taken_is_refused(h: Lender) -> None:
    with pytest.raises(Refused):
        await h.leases.request(h.spec(partition="no-such-partition"))
    with pytest.raises(Refused):
        await h.leases.request(h.spec(size=Size(100_000, 1024)))


LEASES: tuple[LeaseCheck, ...] = (
    what_can_be_leased_is_shown,
    a_pilot_is_shown_with_its_name_token_node_and_end,
    a_request_that_is_repeated_submits_no_second_pilot,
    a_released_pilot_ends_and_nothing_of_it_is_left,
    a_release_names_pilots_and_leaves_others_alone,
    releasing_what_was_never_requested_succeeds,
    a_lease_that_will_never_be_taken_is_refused,
)


class SimulatedLender(Lender):
    def __init__(self, seed: int) -> None:
        self.world = SimulatedWorld(seed, WorldSettings(physical=PhysicalNodes(2)))
        self.scheduler = self.world.scheduler(Random(seed))
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        return EPOCH + self._loop.time()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("check", LEASES, ids=lambda check: check.__name__)
def test_simulated_leases(check: LeaseCheck, seed: int) -> None:
    async def main() -> None:
        harness = SimulatedLender(seed)
        await check(harness)
        await harness.clean_up()

    run(main(), seed)


def test_a_pilot_that_never_ran_is_clean_and_one_whose_node_is_down_is_not() -> None:
    async def main() -> None:
        harness = SimulatedLender(1)
        first, second = harness.spec(), harness.spec()
        await harness.leases.request(first)
        await harness.leases.release(first.name, ())
        assert (await harness.pilot(first, lambda one: one.state is PilotState.ENDED))[1].clean
        await harness.leases.request(second)
        id_, seen = await harness.pilot(second, runs)
        assert seen.ends < inf
        harness.world.pilots.fail_node(harness.world.pilots.pilots[id_])
        seen = (await harness.scheduler.observe()).pilots[id_]
        assert seen.state is PilotState.ENDED and not seen.clean

    run(main(), 1)
