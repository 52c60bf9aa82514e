"""The trace: what it holds, what it leaves out, and that a failing trace fails no call."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from multiverse.core.errors import Gone, Refused, Stale
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.identity import GuestFile, Identity, NodeBootstrap
from multiverse.core.model.job import JobRef, Preemption
from multiverse.core.model.vm import TemplateKey, VmRef
from multiverse.ports import (
    GuestUsers,
    Hypervisor,
    Leases,
    Offers,
    Overflow,
    Parts,
    Saves,
    Saving,
    Scheduler,
    Templates,
)
from multiverse.ports.around import PortCall, around
from multiverse.trace import _WRITTEN, Trace, recording
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.world import SimulatedWorld, WorldSettings

Drive = Callable[[SimulatedWorld, Scheduler, Hypervisor], Coroutine[Any, Any, None]]


def record(path: Path, drive: Drive, settings: WorldSettings | None = None) -> None:
    async def main() -> None:
        world, trace = SimulatedWorld(0, settings), Trace(path, VirtualClock())
        await drive(world, *recording(world.scheduler(Random(0)), world.hypervisor(Random(0)), trace))
        trace.close()

    run(main(), seed=0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_call_is_a_line_with_its_arguments_and_its_result(tmp_path: Path) -> None:
    async def drive(world: SimulatedWorld, scheduler: Scheduler, hypervisor: Hypervisor) -> None:
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
    async def drive(world: SimulatedWorld, scheduler: Scheduler, hypervisor: Hypervisor) -> None:
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


def test_preemption_is_written_by_class(tmp_path: Path) -> None:
    rules = Preemption({"urgent": frozenset(["low"])}, {"low": 60.0}, {"low": "requeue", "urgent": "off"}, {"low": 5.0})

    async def drive(world: SimulatedWorld, scheduler: Scheduler, hypervisor: Hypervisor) -> None:
        world.cluster.submit(Batch(preempt_class="low"))
        await scheduler.observe()
        world.cluster.submit(Batch(preempt_class="urgent", priority=2000))
        view = await scheduler.observe()
        assert view.preemption == rules
        assert list(view.jobs) == ["2", "1"] and view.jobs["2"].rank < view.jobs["1"].rank

    record(tmp_path / "trace", drive, WorldSettings(cluster=ClusterSettings(preemption=rules)))
    first, second = lines(tmp_path / "trace")
    assert first["preemption"] == {
        "low": {"takes": [], "mode": "requeue", "exempt": 60.0, "grace": 5.0},
        "urgent": {"takes": ["low"], "mode": "off", "exempt": 0.0, "grace": 0.0},
    }
    assert first["jobs"]["1"]["preempt_class"] == "low"
    assert set(second["jobs"]) == {"2"} and "preemption" not in second


def test_an_observation_names_its_source_and_is_compared_within_it(tmp_path: Path) -> None:
    async def drive(world: SimulatedWorld, scheduler: Scheduler, hypervisor: Hypervisor) -> None:
        for source in [*hypervisor.sources] * 2:
            await source.observe()

    hosts = tuple(Host(name, Size(1, 256)) for name in ("h1", "h2"))
    record(tmp_path / "trace", drive, WorldSettings(hosts))
    found = lines(tmp_path / "trace")
    assert [(line["source"], set(line["hosts"])) for line in found] == [("h1", {"h1"}), ("h2", {"h2"})]


def test_no_secret_is_written_and_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    async def drive(world: SimulatedWorld, scheduler: Scheduler, hypervisor: Hypervisor) -> None:
        secret = NodeBootstrap((GuestFile("/etc/munge/munge.key", b"hush"),))
        identity = Identity("mvx-1", "02:00:00:00:00:01", "10.0.0.1/16", "", "0" * 32, bootstrap=secret)
        with pytest.raises(Gone):
            await hypervisor.start(VmRef("mvx-1", "h1"), Size(1, 256), identity)

    record(tmp_path / "trace", drive)
    assert "mvx-1" in (tmp_path / "trace").read_text()
    assert "hush" not in (tmp_path / "trace").read_text()
    assert (tmp_path / "trace").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_ends_the_trace_and_fails_no_call() -> None:
    async def drive(world: SimulatedWorld, scheduler: Scheduler, hypervisor: Hypervisor) -> None:
        job = world.cluster.submit(Batch())
        assert job in (await scheduler.observe()).jobs
        with pytest.raises(Stale):
            await scheduler.unpin(JobRef(job, 0, 3))

    record(Path("/dev/full"), drive)


def test_a_trace_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="set trace"):
        record(tmp_path / "absent" / "trace", None)  # type: ignore[arg-type]


def test_what_a_call_goes_through_gets_its_arguments_by_name_and_abilities_stay_the_same() -> None:
    class Users:
        async def add_user(self, vm: str, user: str, group: int = 0) -> None:
            made.append((vm, user, group))

    class Port:
        users, templates, groups = Users(), None, "as it is"

        async def destroy(self, vm: str, grace: float) -> str:
            return f"{vm} is gone"

        def declared(self, host: str) -> str:
            return host

    seen, made = list[tuple[str, dict[str, Any]]](), list[tuple[str, str, int]]()

    async def through(call: PortCall, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        seen.append((call.method, dict(call.arguments)))
        await make()
        return await make()

    async def main() -> None:
        port = around(Port(), through)
        assert await port.destroy("a", grace=1.0) == "a is gone"
        await port.users.add_user("a", "u")
        assert port.users is port.users and port.templates is None and port.groups == "as it is"
        assert port.declared("h1") == "h1"
        assert around(Port(), through, besides=("users",)).users is Port.users

    asyncio.run(main())
    assert seen == [("destroy", {"vm": "a", "grace": 1.0}), ("add_user", {"vm": "a", "user": "u", "group": 0})]
    assert made == [("a", "u", 0)] * 2


def test_every_call_of_the_ports_has_a_written_form() -> None:
    """Those of abilities that are traced with them too. A call without one would end the controller's effect."""
    ports = [Scheduler, Hypervisor, Offers, Parts, Leases, Overflow, Saving, Templates, GuestUsers, Saves]
    methods = {name for port in ports for name, one in vars(port).items() if inspect.iscoroutinefunction(one)}
    assert "prepare" in methods and methods - {"observe", "read"} <= _WRITTEN.keys()


def test_the_arguments_of_saves_are_written() -> None:
    job, vm = JobRef("7", 500), VmRef("mv1", "h1", "t")
    assert _WRITTEN["release"](job=job) == {"job": ["7", 500, 0]}
    assert _WRITTEN["release"](name="l1", pilots=["9"]) == {"lease": "l1", "pilots": ["9"]}
    assert _WRITTEN["freeze"](vm=vm, script=False) == {"vm": "mv1", "script": False}
    assert _WRITTEN["save"](vm=vm, name="mv1-1", key="a secret") == {"vm": "mv1", "saved": "mv1-1"}
    assert _WRITTEN["pin"](job=job, tag="a", nodes=(), text="", at_once=False, limit=60.0)["limit"] == 60.0
