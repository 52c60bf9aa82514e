"""The virtual loop takes no real time, does not use the real world, and has one order per seed."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable

import async_solipsism
import pytest

from multiverse_lab.simulation import loop as virtual
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.loop import RealWorldAccess, run


async def _race(n: int = 8) -> list[int]:
    order: list[int] = []

    async def one(i: int) -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)
            order.append(i)

    await asyncio.gather(*(one(i) for i in range(n)))
    return order


def test_a_day_of_virtual_time_takes_no_real_time() -> None:
    async def day() -> float:
        clock = VirtualClock()
        began = clock.now()
        await asyncio.sleep(86_400.0)
        return clock.now() - began

    real = time.monotonic()
    assert run(day(), 1) == pytest.approx(86_400.0)
    assert time.monotonic() - real < 5.0


def test_the_order_of_callbacks_depends_on_the_seed() -> None:
    assert run(_race(), 7) == run(_race(), 7)
    assert len({tuple(run(_race(), seed)) for seed in range(20)}) > 10


async def _to_thread() -> None:
    await asyncio.to_thread(lambda: None)


async def _executor() -> None:
    await asyncio.get_running_loop().run_in_executor(None, lambda: None)


async def _thread() -> None:
    threading.Thread(target=lambda: None).start()


async def _process() -> None:
    subprocess.run(["true"], check=True)


async def _async_process() -> None:
    await asyncio.create_subprocess_exec("true")


async def _socket() -> None:
    socket.socket(socket.AF_UNIX)


@pytest.mark.parametrize("reach", [_to_thread, _executor, _thread, _process, _socket])
def test_access_to_the_real_world_is_refused(reach: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await reach()

    with pytest.raises(RealWorldAccess):
        run(main(), 1)


def test_async_processes_are_refused() -> None:
    with pytest.raises((RealWorldAccess, async_solipsism.SolipsismError)):
        run(_async_process(), 1)


def test_the_real_world_is_allowed_outside_a_virtual_loop() -> None:
    run(_race(2), 1)
    subprocess.run(["true"], check=True)
    socket.socket(socket.AF_UNIX).close()


def test_waiting_for_nothing_is_reported() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(async_solipsism.SleepForeverError):
        run(main(), 1)


def test_a_livelock_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "STEPS", 1000)

    async def main() -> None:
        for _ in range(2000):
            await asyncio.sleep(0)

    with pytest.raises(virtual.Livelock):
        run(main(), 1)


def test_tasks_left_behind_are_cancelled() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append("yes")

    async def main() -> None:
        task = asyncio.create_task(forever())
        await asyncio.sleep(1.0)
        assert not task.done()

    run(main(), 1)
    assert ended == ["yes"]
