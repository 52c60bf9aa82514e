"""The trace: what it holds, what it leaves out, and that a failing trace fails no call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from multiverse.core.errors import Gone, Refused, Stale
from multiverse.core.model import (
    GuestFile,
    Host,
    HypervisorView,
    Identity,
    JobRef,
    NodeBootstrap,
    Size,
    TemplateKey,
    VmRef,
)
from multiverse.trace import RecordingHypervisor, RecordingScheduler, RecordingSource, Trace
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.world import SimulatedWorld

Drive = Callable[[SimulatedWorld, RecordingScheduler, RecordingHypervisor], Coroutine[Any, Any, None]]


def record(path: Path, drive: Drive) -> None:
    async def main() -> None:
        world, trace = SimulatedWorld(0), Trace(path, VirtualClock())
        await drive(
            world,
            RecordingScheduler(world.scheduler(Random(0)), trace),
            RecordingHypervisor(world.hypervisor(Random(0)), trace),
        )
        trace.close()

    run(main(), seed=0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_call_is_a_line_with_its_arguments_and_its_result(tmp_path: Path) -> None:
    async def drive(world: SimulatedWorld, scheduler: RecordingScheduler, hypervisor: RecordingHypervisor) -> None:
        await hypervisor.templates.build_template(TemplateKey("h1", "slim", Size(1, 256)))
        with pytest.raises(Gone):
            await scheduler.unpin(JobRef("7", 5, 1))
        task = asyncio.create_task(hypervisor.destroy(VmRef("mvx-1", "h1"), 1.0))
        await asyncio.sleep(1e-4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    record(tmp_path / "trace", drive)
    prepared, unpinned, destroyed = lines(tmp_path / "trace")
    assert prepared["call"] == "hypervisor.build_template" and prepared["result"] == "ok"
    assert (prepared["host"], prepared["image"], prepared["size"]) == ("h1", "slim", [1, 256, 0])
    assert 0 <= prepared["began"] < prepared["ended"] <= unpinned["began"]
    assert (unpinned["job"], unpinned["result"]) == (["7", 5, 1], "Gone")
    assert (destroyed["vm"], destroyed["result"]) == ("mvx-1", "cancelled")


def test_an_observation_is_written_with_its_differences_only(tmp_path: Path) -> None:
    async def drive(world: SimulatedWorld, scheduler: RecordingScheduler, hypervisor: RecordingHypervisor) -> None:
        one, two = world.cluster.submit(Batch()), world.cluster.submit(Batch())
        await scheduler.observe()
        await scheduler.observe()
        world.cluster.hold(two)
        view = await scheduler.observe()
        assert view == world.cluster.view()
        del world.cluster.jobs[one]
        await scheduler.observe()

    record(tmp_path / "trace", drive)
    first, held, gone = lines(tmp_path / "trace")
    assert set(first["jobs"]) == {"1", "2"} and first["jobs"]["1"]["gated"]
    assert set(held["jobs"]) == {"2"} and held["jobs"]["2"]["held"]
    assert gone["jobs"] == {"1": None}


def test_an_observation_names_its_source_and_is_compared_within_it(tmp_path: Path) -> None:
    def host(name: str) -> HypervisorView:
        return HypervisorView({name: Host(name, Size(1, 256))})

    class OneHost:
        def __init__(self, name: str) -> None:
            self.name, self.hosts = name, (name,)

        async def observe(self) -> HypervisorView:
            return host(self.name)

    async def drive(world: SimulatedWorld, scheduler: RecordingScheduler, hypervisor: RecordingHypervisor) -> None:
        trace = hypervisor._trace
        for source in [RecordingSource(OneHost(name), trace) for name in ("h1", "h2")] * 2:
            await source.observe()

    record(tmp_path / "trace", drive)
    found = lines(tmp_path / "trace")
    assert [(line["source"], set(line["hosts"])) for line in found] == [("h1", {"h1"}), ("h2", {"h2"})]


def test_no_secret_is_written_and_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    async def drive(world: SimulatedWorld, scheduler: RecordingScheduler, hypervisor: RecordingHypervisor) -> None:
        secret = NodeBootstrap((GuestFile("/etc/munge/munge.key", b"hush"),))
        identity = Identity("mvx-1", "02:00:00:00:00:01", "10.0.0.1/16", "", "0" * 32, bootstrap=secret)
        with pytest.raises(Gone):
            await hypervisor.start(VmRef("mvx-1", "h1"), Size(1, 256), identity)

    record(tmp_path / "trace", drive)
    assert "mvx-1" in (tmp_path / "trace").read_text()
    assert "hush" not in (tmp_path / "trace").read_text()
    assert (tmp_path / "trace").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_ends_the_trace_and_fails_no_call() -> None:
    async def drive(world: SimulatedWorld, scheduler: RecordingScheduler, hypervisor: RecordingHypervisor) -> None:
        job = world.cluster.submit(Batch())
        assert job in (await scheduler.observe()).jobs
        with pytest.raises(Stale):
            await scheduler.unpin(JobRef(job, 0, 3))

    record(Path("/dev/full"), drive)


def test_a_trace_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="set trace"):
        record(tmp_path / "absent" / "trace", None)  # type: ignore[arg-type]
