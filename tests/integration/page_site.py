"""A simulated site in real time with the daemon's web page, for tests in a browser and for looking at it:

    python -m tests.integration.page_site PORT [--jobs N] [--hosts N] [--trouble] [--moves] [--evictions]

The controller, the publisher and the page are the daemon's own; scheduler, hosts and guests are the simulation's.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import structlog

from multiverse.config import RebalanceSettings, SaveSettings, Settings
from multiverse.controller.loop import Controller
from multiverse.core.errors import Refused
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Drain, Host, MachineKind
from multiverse.core.model.job import JobState
from multiverse.core.model.saved import Storage
from multiverse.core.model.vm import VmState
from multiverse.core.transition import Command
from multiverse.service.api import make_api
from multiverse.service.backend import Backend
from multiverse.service.publisher import Publisher
from multiverse.service.startup import bind, http_server, stop_signal
from multiverse.service.statistics import Statistics
from multiverse.service.web import make_web
from multiverse.store import Store
from multiverse_lab.bench.viewers import ViewersPlan, blocked_site
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.generate_evicting import RULES
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.world import SimulatedWorld, WorldSettings

NAMES = ("relax", "md-water", "hpl", "lammps", "fold-3", "cfd wing", "train", "<b>not bold</b>", "sweep", "qc-opt")
SIZES = (Size(1, 500), Size(2, 2000), Size(4, 8000), Size(1, 1000), Size(8, 16000))


MACHINE = MachineKind("kvm", "max", frozenset({"avx2"}), "7.2", "pc-q35-7.2")


class RealClock(VirtualClock):
    """The machine's time."""

    def wall(self) -> float:
        return time.time()


class NobodyCounts:
    async def programs(self) -> Mapping[str, int]:
        return Counter({"scontrol update": 7, "sbatch": 2})


def hosts(number: int) -> tuple[Host, ...]:
    return tuple(
        Host(f"node{n:02d}", Size((16, 32, 24)[n % 3], (65536, 131072, 98304)[n % 3], 1 << 22), ABILITIES,
             Size(32, 131072, 1 << 22), "kvm", features=frozenset({"vhost-net", "huge-pages"}), moves=MACHINE,
             storage=Storage("shared", "qemu"))
        for n in range(1, number + 1)
    )  # fmt: skip


async def submit(world: SimulatedWorld, rng: Random, waiting: int, seconds: tuple[float, float]) -> None:
    """Keep so many jobs waiting."""
    while True:
        pending = sum(job.state is JobState.PENDING for job in world.cluster.history[-4 * waiting - 400 :])
        for _ in range(min(4, waiting - pending)):
            size = SIZES[int(rng.random() ** 1.6 * len(SIZES))]
            nodes = 2 if rng.random() < 0.06 else 1
            world.cluster.submit(
                Batch(
                    rng.choice(NAMES),
                    rng.choice((1000, 1001)),
                    rng.uniform(*seconds),
                    nodes=nodes,
                    size=size,
                    limit=600,
                    preempt_class="low",
                )
            )
        await asyncio.sleep(rng.uniform(0.2, 0.8))


async def trouble(world: SimulatedWorld, scheduler: Any) -> None:
    """A job for which there is no image, a VM that dies, and a host that goes silent."""
    world.cluster.submit(Batch("viz", image="cuda-12", size=Size(2, 4000)))
    await asyncio.sleep(6)
    if name := world.vm(0.3):
        world.kill_vm(name)


async def moves(controller: Controller, rng: Random) -> None:
    """Operators who move VMs all the time."""
    while True:
        await asyncio.sleep(0.5)
        if serving := controller.state.vms_in(VmState.SERVING):
            with suppress(Refused):
                await controller.command(Command("move", job=rng.choice(sorted(vm.name for vm in serving))))


async def evictions(world: SimulatedWorld, controller: Controller) -> None:
    """A host is drained, with more jobs than may be evicted at once; urgent jobs come, which others give way to."""
    await asyncio.sleep(15)
    drain = Drain(time.time(), "a fan is to be replaced", moves=True, saves=True)
    await controller.command(Command("drain", host="node02", drain=drain))
    while True:
        world.cluster.submit(Batch("urgent", 1001, 20.0, size=SIZES[4], limit=600, preempt_class="high", priority=3000))
        await asyncio.sleep(8)


async def serve(given: argparse.Namespace) -> None:
    settings, seconds = replace(Settings(), poll=1.0), (given.seconds / 8, given.seconds)
    if given.evictions:
        settings = replace(settings, save=SaveSettings(enabled=True), rebalance=RebalanceSettings(at_once=2))
    cluster = ClusterSettings(preemption=RULES if given.evictions else None)
    world, clock = SimulatedWorld(7, WorldSettings(hosts=hosts(given.hosts), cluster=cluster)), RealClock()
    store = Store(":memory:", clock, site="aurora")
    controller = Controller(store, world.scheduler(Random(1)), world.hypervisor(Random(2)), clock, settings, Random(3))
    world.cluster.hint = controller.hint
    statistics = Statistics()
    controller.watch(statistics)
    backend = Backend(controller, store, clock, None, NobodyCounts(), statistics=statistics)  # type: ignore[arg-type]
    publisher = Publisher(backend)
    server = http_server(make_api(backend, publisher) if given.api else make_web(backend, publisher))
    work = [asyncio.create_task(controller.run()), asyncio.create_task(submit(world, Random(5), given.jobs, seconds))]
    if given.trouble:
        work.append(asyncio.create_task(trouble(world, None)))
    if given.evictions:
        work.append(asyncio.create_task(evictions(world, controller)))
    if given.moves:
        work.append(asyncio.create_task(moves(controller, Random(8))))
    sock = socket.create_server(("127.0.0.1", given.port))
    more = [bind(Path(given.socket), "socket")] if given.socket else []
    serving = asyncio.create_task(server.serve(sockets=[sock, *more]))
    print("served", flush=True)
    try:
        await stop_signal().wait()
    finally:
        server.should_exit = True
        await publisher.close()
        await serving
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def serve_blocked(port: int, jobs: int, vms: int) -> None:
    """Serve a large site, whose queue is blocked and whose jobs end one by one."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory(prefix="mvpage-") as directory, socket.create_server(("127.0.0.1", port)) as sock:
        async with blocked_site(ViewersPlan(10, jobs, vms, 0, 0), Path(directory), sock):
            print("served", flush=True)
            await stop_signal().wait()


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("port", type=int)
    words.add_argument("--jobs", type=int, default=40)
    words.add_argument("--hosts", type=int, default=6)
    words.add_argument("--trouble", action="store_true")
    words.add_argument("--moves", action="store_true")
    words.add_argument("--evictions", action="store_true")
    words.add_argument("--seconds", type=float, default=90.0, help="that a job runs at most")
    words.add_argument("--api", action="store_true", help="serve the daemon's API instead of the page")
    words.add_argument("--blocked", action="store_true")
    words.add_argument("--socket", default="", help="a path where it listens, too, for multiverse top")
    words.add_argument("--vms", type=int, default=500)
    given = words.parse_args()
    if given.blocked:
        asyncio.run(serve_blocked(given.port, given.jobs, given.vms))
        return
    asyncio.run(serve(given))


if __name__ == "__main__":
    main()
