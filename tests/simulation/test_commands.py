"""An operator's command is answered when it has been committed, not before."""

from __future__ import annotations

import asyncio
from random import Random

from multiverse.config import Settings
from multiverse.controller.loop import Controller
from multiverse.core.transition import Command
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.run import CrashingStore
from multiverse_lab.simulation.world import SimulatedWorld


def test_a_command_is_answered_once_it_is_committed() -> None:
    async def main() -> None:
        world, clock = SimulatedWorld(1), VirtualClock()
        store = CrashingStore(":memory:", clock, lambda after: None)
        ports = world.scheduler(Random(1)), world.hypervisor(Random(2))
        controller = Controller(store, *ports, clock, Settings(), Random(1))
        work = asyncio.create_task(controller.run())
        await asyncio.sleep(10.0)
        store.full = True
        gone, asked = (controller.command(Command("build", world.host(0), image)) for image in ("slim", "stock"))
        gone.cancel()  # its client has closed the connection
        await asyncio.sleep(10.0)
        assert not asked.done() and not store.rows().templates
        store.full = False
        await asked
        assert {template.image for template in store.rows().templates.values()} == {"slim", "stock"}
        work.cancel()

    run(main(), 1)
