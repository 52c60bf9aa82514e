"""A lab goes up, is looked at, and goes down. Every step can be repeated."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from multiverse.config import Settings
from multiverse.core.errors import MultiverseError, Refused
from multiverse.lab import bridge, vms
from multiverse.lab.configure import configure
from multiverse.lab.layout import Layout
from multiverse.lab.plan import LabOptions, decide, load
from multiverse.lab.services import CONTROLLER, SERVICES, Lab, Service

Progress = Callable[[str, str, float], None]
"""Called with a service's name, what became of it, and the seconds it took."""


@contextmanager
def _alone(where: Layout) -> Iterator[None]:
    """One `up` or `down` of a lab at a time."""
    descriptor = os.open(where.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise Refused(f"another command is at work on {where.root}", hint="wait until it has ended") from error
    finally:
        os.close(descriptor)


async def up(
    where: Layout,
    options: LabOptions,
    progress: Progress = lambda name, word, seconds: None,
    *,
    controller: bool = True,
) -> Settings:
    """Bring up what does not run. `controller=False` leaves that one service out. `Broken` names the service that does
    not come up; what came up before it stays, for the next `up` or for `down`."""
    if os.geteuid() != 0:
        raise Refused("a lab needs root: it makes links and starts daemons as their own users", hint="use sudo")
    where.make()
    with _alone(where):
        plan = await asyncio.to_thread(decide, where, options)
        settings = await asyncio.to_thread(configure, where, plan)
        lab = Lab(where, plan)
        began = time.monotonic()
        made = await asyncio.to_thread(bridge.up, plan)
        progress("bridge", "made" if made else "is up", time.monotonic() - began)
        for service in _wanted(controller):
            began = time.monotonic()
            started = await service.ensure(lab)
            progress(service.name, "started" if started else "runs", time.monotonic() - began)
        return settings


def _wanted(controller: bool) -> Iterator[Service]:
    return (service for service in SERVICES if controller or service is not CONTROLLER)


async def stop_controller(where: Layout) -> int:
    """End the controller, then every VM that is left; how many there were."""
    await CONTROLLER.stop(where)
    return await vms.destroy_all(where)


async def down(where: Layout, progress: Progress = lambda name, word, seconds: None) -> None:
    """End everything, in reverse order, VMs of a controller that is dead too. What stays is inside the directory:
    logs, keys, the database and caches. The first error is raised after everything else has been tried."""
    if not where.root.exists():
        return
    failed: list[MultiverseError] = []
    with _alone(where):
        plan = load(where)
        for service in reversed(SERVICES):
            async with _step(service.name, progress, failed) as word:
                word.append("ended" if await service.stop(where) else "was not running")
            if service is CONTROLLER and plan is not None:
                async with _step("VMs", progress, failed) as word:
                    word.append(f"{await vms.destroy_all(where)} ended")
        if plan is not None:
            async with _step("bridge", progress, failed) as word:
                word.append("removed" if await asyncio.to_thread(bridge.down, plan) else "was not there")
        if failed:
            raise failed[0]
        for path in (where.run, where.memory):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.asynccontextmanager
async def _step(name: str, progress: Progress, failed: list[MultiverseError]) -> AsyncIterator[list[str]]:
    began = time.monotonic()
    word: list[str] = []
    try:
        yield word
    except MultiverseError as error:
        failed.append(error)
        word.append(f"failed: {error.message}")
    progress(name, word[-1], time.monotonic() - began)


def status(where: Layout) -> dict[str, dict[str, Any]]:
    """Each service with its pid, whether it is alive, and since when (Unix time). Reads /proc only."""
    found: dict[str, dict[str, Any]] = {}
    for service in reversed(SERVICES):
        running = service.running(where)
        found[service.name] = {
            "pid": running.pid if running else None,
            "alive": running is not None,
            "since": running.since if running else None,
        }
    plan = load(where)
    there = bridge.is_up(plan) if plan else False
    found["bridge"] = {
        "name": plan.bridge if plan else None,
        "address": f"{plan.gateway}/{plan.prefix}" if plan else None,
        "alive": there,
    }
    return found
