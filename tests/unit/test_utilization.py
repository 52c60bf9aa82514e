"""What hosts and VMs use: asked of agents of this release and of the one before, kept in the database, and shown."""

from __future__ import annotations

import asyncio
import io
import random
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import httpx
import pytest
from rich.console import Console

from multiverse.api import UsagePoint, UtilizationView, decode
from multiverse.cli import render
from multiverse.cli.commands import build
from multiverse.client import Client
from multiverse.controller import history
from multiverse.controller.history import UtilizationRecorder
from multiverse.core.errors import Exhausted, Gone, MultiverseError, Refused, Unknown
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.usage import HostUsage, Load, Usage, VmUsage
from multiverse.core.model.vm import Vm
from multiverse.service.api import make_api
from multiverse.service.backend import Backend, UtilizationReader
from multiverse.store import Store
from multiverse.store.history import (
    ADDED,
    DAY,
    DELETED,
    HOUR,
    MERGED,
    MINUTE,
    UsagePruning,
    UsageRecord,
    add_usage,
    read_usage,
)
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.network import SimulatedAgent
from multiverse_lab.simulation.world import Pair, SimulatedWorld, WorldSettings
from tests.contract.agents import agents_of, controller
from tests.unit.planner_harness import ManualClock, PlannerHarness


def usage(
    cpus: float = 1.0, memory: float = 512.0, span: float = history.INTERVAL, active: float | None = None
) -> Usage:
    return Usage(span, cpus, cpus + 1, memory, memory + 100, 1.0, 2.0, 3.0, 4.0, active)


# --- agents ---------------------------------------------------------------------------------------


class Samples:
    """What an agent of the simulation samples. `asked` are the spans and prefixes that it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, str]] = []

    def load(self) -> Load | None:
        return Load(1.5, 1024)

    async def usage(self, span: float, prefix: str) -> HostUsage:
        self.asked.append((span, prefix))
        return HostUsage(
            usage(active=None), {"mvtest0-1": VmUsage(3.0, 600.0, usage(2.0)), "mvtest0-2": VmUsage(1.0, 2.0)}
        )


def agents() -> list[SimulatedAgent]:
    hosts = tuple(Host(name, Size(8, 8192, 65536), ABILITIES) for name in ("h0", "h1"))
    return agents_of(SimulatedWorld(1, WorldSettings(hosts, pair=Pair.SLURM_HOSTS)), 1)


def with_samples(one: SimulatedAgent) -> Samples:
    """Let the agent sample, until it is started again."""
    samples = Samples()
    assert one.running is not None
    one.running.samples = samples
    return samples


def test_an_agent_tells_what_was_used_and_its_load() -> None:
    async def main() -> None:
        made = agents()
        samples = with_samples(made[1])
        async with controller(made) as one:
            await one.connected()
            found = await one.hypervisor.used("h1", 15.0)
            assert samples.asked == [(15.0, "mvtest0-")]
            assert found == {"h1": await samples.usage(15.0, "mvtest0-")}
            views = [await source.observe() for source in one.hypervisor.sources]
            assert [host.load for view in views for host in view.hosts.values()] == [Load(0.0, 0), Load(1.5, 1024)]
            with pytest.raises(Refused, match="samples nothing"):
                await one.hypervisor.used("h0", 15.0)
            with pytest.raises(Gone):
                await one.hypervisor.used("h7", 15.0)
        for agent in made:
            await agent.stop()

    run(main(), 1)


# --- the history ----------------------------------------------------------------------------------


def minutes(name: str, count: int, first: int = 0, kind: Any = "vm") -> list[UsageRecord]:
    return [UsageRecord(kind, name, (first + n) * MINUTE, MINUTE, usage(float(n), span=60.0)) for n in range(count)]


def keep(store: Store, records: list[UsageRecord]) -> None:
    for first in range(0, len(records), ADDED):
        add_usage(store, records[first : first + ADDED])


def test_the_history_is_read_as_it_was_kept() -> None:
    store = Store(":memory:", ManualClock())
    records = minutes("mvt-1", 5)
    keep(store, records)
    keep(store, minutes("mvt-1", 5, kind="host"))
    assert read_usage(store, "vm", "mvt-1", 0) == records
    assert read_usage(store, "vm", "mvt-1", 3 * MINUTE) == records[3:]
    again = UsageRecord("vm", "mvt-1", 0, MINUTE, usage(9.0, active=7.0))
    keep(store, [again])
    assert read_usage(store, "vm", "mvt-1", 0) == [again, *records[1:]], "a minute that is kept twice is kept once"


def test_old_minutes_become_hours_and_old_hours_go() -> None:
    store = Store(":memory:", ManualClock())
    for name in ("mvt-1", "mvt-2"):
        keep(store, minutes(name, 4 * 60))
    now = DAY + 3 * HOUR + 100.0
    one_round = UsagePruning(store, now, before=HOUR)
    while one_round.step():
        pass
    found = read_usage(store, "vm", "mvt-1", 0)
    hours, rest = [one for one in found if one.span == HOUR], [one for one in found if one.span == MINUTE]
    assert [one.wall for one in hours] == [HOUR, 2 * HOUR] and len(rest) == 60 and rest[0].wall == 3 * HOUR
    assert hours[0].usage.cpus == pytest.approx(89.5) and hours[0].usage.cpus_peak == 120.0
    assert hours[0].usage.span == HOUR
    assert read_usage(store, "vm", "mvt-2", 0) == [
        UsageRecord("vm", "mvt-2", one.wall, one.span, one.usage) for one in found
    ]


def test_each_step_of_pruning_is_small() -> None:
    store, clock = Store(":memory:", ManualClock()), 10 * DAY
    for number in range(3 * MERGED):
        keep(store, minutes(f"mvt-{number}", 60))
    keep(store, [UsageRecord("vm", f"x-{n}", 0, HOUR, usage()) for n in range(2 * DELETED)])
    connection = cast(Any, store._connection.connection.dbapi_connection)
    one_round, more, steps = UsagePruning(store, clock, before=9 * DAY), True, 0
    while more:
        before = connection.total_changes
        more, steps = one_round.step(), steps + 1
        assert connection.total_changes - before <= max(MERGED * 61, DELETED)
    assert 6 <= steps < 12 and store._connection.exec_driver_sql("SELECT COUNT(*) FROM utilization").scalar() == 0


# --- the recorder ---------------------------------------------------------------------------------


class Hosts:
    """Hosts that answer what `answers` says; an error is raised."""

    def __init__(self, answers: dict[str, HostUsage | Exception]) -> None:
        self.answers, self.asked = answers, list[str]()

    async def used(self, source: str, span: float) -> Mapping[str, HostUsage]:
        self.asked.append(source)
        answer = self.answers[source]
        if isinstance(answer, Exception):
            raise answer
        return {source: answer}


def recorder(
    answers: dict[str, HostUsage | Exception], path: Path | str = ":memory:"
) -> tuple[UtilizationRecorder, Any]:
    clock = ManualClock(now=0.0)
    store = Store(path, clock)
    return UtilizationRecorder(store, Hosts(answers), lambda: list(answers), clock), clock


async def ask(one: UtilizationRecorder, clock: ManualClock, times: int) -> None:
    for _ in range(times):
        await one.ask()
        clock.time += history.INTERVAL


def test_a_minute_is_kept_once_it_is_over() -> None:
    answers: dict[str, HostUsage | Exception] = {"h0": HostUsage(usage(), {"mvt-1": VmUsage(1.0, 2.0, usage(3.0))})}
    one, clock = recorder(answers)
    wall = int(clock.wall()) // MINUTE * MINUTE
    clock.time = wall + MINUTE - clock.wall()  # at the beginning of a minute
    asyncio.run(ask(one, clock, int(MINUTE / history.INTERVAL)))
    assert read_usage(one.store, "host", "h0", 0) == []
    asyncio.run(ask(one, clock, 1))
    (kept,) = read_usage(one.store, "host", "h0", 0)
    assert (kept.wall, kept.usage.span, kept.usage.cpus) == (wall + MINUTE, 60.0, 1.0)
    assert [row.usage.cpus for row in read_usage(one.store, "vm", "mvt-1", 0)] == [3.0]


def test_a_host_that_does_not_answer_leaves_a_gap_and_no_old_figures() -> None:
    answers: dict[str, HostUsage | Exception] = {"h0": HostUsage(usage()), "h1": HostUsage(usage(2.0))}
    one, clock = recorder(answers)
    asyncio.run(ask(one, clock, 2))
    for error in (Unknown("it is away"), ZeroDivisionError("a defect"), TimeoutError()):
        answers["h1"] = error
        asyncio.run(ask(one, clock, 3))
    assert list(one.current()) == ["h0"]
    del answers["h0"]
    clock.time += 2 * history.STALE
    asyncio.run(ask(one, clock, 1))
    assert one.current() == {}


def test_a_full_disk_stops_the_history_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    one, clock = recorder({"h0": HostUsage(usage())})
    asyncio.run(ask(one, clock, 9))
    before = read_usage(one.store, "host", "h0", 0)

    def full(*_: object) -> None:
        raise Exhausted("the database did not take it")

    with monkeypatch.context() as patched:
        patched.setattr(history, "add_usage", full)
        asyncio.run(ask(one, clock, 9))
        assert read_usage(one.store, "host", "h0", 0) == before and one.current()
    asyncio.run(ask(one, clock, 9))
    assert len(read_usage(one.store, "host", "h0", 0)) > len(before)


def test_rows_are_added_only_while_the_reserve_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "db", ManualClock())
    asked: list[bool] = []
    prepare = store._reserve.prepare
    monkeypatch.setattr(store._reserve, "prepare", lambda *, adds: (asked.append(adds), prepare(adds=adds)))
    add_usage(store, minutes("mvt-1", 1))
    assert asked == [True]
    store.close()


# --- as operators see it --------------------------------------------------------------------------


async def _nothing() -> Any:
    return {}


class InThisThread(httpx.BaseTransport):
    """Asks the service without a socket: its database is of this thread."""

    def __init__(self, backend: Backend) -> None:
        self._api = make_api(backend)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self._api)) as client:
                return await client.request(request.method, request.url)

        answer = asyncio.run(ask())
        return httpx.Response(answer.status_code, json=answer.json())


@pytest.fixture
def served() -> tuple[Vm, int, Backend]:
    """A VM that serves a job, with what it has used in the last half hour; the time; and the service that tells."""
    harness = PlannerHarness(cpus=16, memory=32768)
    harness.to_allocated()
    (vm,) = harness.rows.vms.values()
    answers: dict[str, HostUsage | Exception] = {
        vm.host: HostUsage(usage(2.5), {vm.name: VmUsage(9.0, 700.0, usage(0.5))})
    }
    one = UtilizationRecorder(harness.store, Hosts(answers), lambda: list(answers), harness.clock)
    wall = int(harness.clock.wall())
    keep(harness.store, [UsageRecord("vm", vm.name, wall - 1800, MINUTE, usage(4.0, span=60.0))])
    keep(harness.store, [UsageRecord("vm", vm.name, wall - 120, MINUTE, usage(2.0, span=60.0))])
    keep(harness.store, [UsageRecord("host", vm.host, wall - 7200, HOUR, usage(3.5, span=3600.0))])
    asyncio.run(one.ask())
    known = {host.name: host for host in harness.rows.hosts.values()}
    fake = SimpleNamespace(
        state=harness.state,
        world=lambda: SimpleNamespace(hosts={}),
        known_hosts=lambda: known,
        observed=harness.world,
        policy=harness.policy,
    )
    reader = UtilizationReader(cast(Any, fake), one, cast(Any, None), harness.clock)
    return (
        vm,
        wall,
        Backend(cast(Any, fake), harness.store, harness.clock, None, cast(Any, None), utilization=reader),
    )


def test_hosts_and_vms_are_shown_with_what_they_use_and_have_used(served: tuple[Vm, int, Backend]) -> None:
    vm, wall, backend = served
    get = httpx.Client(transport=InThisThread(backend), base_url="http://multiverse").get
    host, shown = decode(list[UtilizationView], get("/utilization").json())
    assert (host.kind, host.name, host.now and host.now.cpus, host.hour) == ("host", vm.host, 2.5, None)
    assert (shown.kind, shown.host, shown.job_id, shown.cpus) == ("vm", vm.host, "7", vm.size.cpus)
    assert shown.now and shown.five_minutes and shown.hour
    assert (shown.now.cpus, shown.five_minutes.cpus, shown.hour.cpus) == (0.5, 2.0, 3.0)
    only = decode(list[UtilizationView], get(f"/utilization?name={vm.name}").json())
    assert only == [shown]
    points = decode(list[UsagePoint], get(f"/utilization/{vm.name}/history").json())
    assert [(point.wall, point.usage.cpus) for point in points] == [(wall - 1800, 4.0), (wall - 120, 2.0)]
    assert get("/utilization/mvt-99/history").status_code == 404
    for wrong in ({"cpus": 0, "memory": 1}, {"cpus": 1, "memory": 0}, {"cpus": 1, "memory": 1, "disk": -1}):
        (said,) = get("/utilization/compatible", params=wrong).json()["detail"]
        assert said["type"] == "greater_than_equal", "as FastAPI describes what is out of range"


def test_the_example_of_the_documentation_runs(
    served: tuple[Vm, int, Backend], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over the service, and for a host of another name."""
    vm, wall, backend = served
    page = Path(__file__).parents[2] / "docs" / "utilization.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.setattr(httpx, "HTTPTransport", lambda **_: InThisThread(backend))
    exec(example.replace('"n1"', f'"{vm.host}"'), {})
    used, chosen, point = capsys.readouterr().out.splitlines()
    assert used.startswith(f"{vm.host} 2.5 of ") and chosen == f"next: {vm.host}" and point == f"{wall - 7200} 3.5"
    with Client() as client, pytest.raises(MultiverseError, match="no-such"):
        client.compatible(cpus=1, memory=100, policy="no-such")
    with Client() as client, pytest.raises(Gone):
        client.usage_history("mvt-99")


def printed(width: int, *words: str) -> list[str]:
    """What the command prints in so many columns, of a host and a VM with long names and large figures."""
    large = asdict(usage(31.25, 151_234.0))
    views = [
        UtilizationView("host", "node01.example", "", "", 64, 262_144, None, None, None),
        UtilizationView("vm", "mvab12c-12345678", "node01.example", "12345678_1", 8, 65536, None, None, None),
    ]
    shown = [{**asdict(view), "now": large, "five_minutes": large, "hour": None} for view in views]
    room = {"cpus": 12, "memory": 65536, "disk": 1}
    documents = {
        "history": [{"wall": 1_764_000_000, "span": 3600, "usage": large}],
        "compatible": [{"name": "node01.example", "free": room, "claim": room, "holds": 3, "use": 0.123}],
        "utilization": shown,
    }
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    with (
        mock.patch.object(render, "console", console),
        mock.patch.object(Client, "_call", lambda _, __, path, **more: documents[path.rpartition("/")[2]]),
    ):
        build(["utilization"])(["utilization", *words], prog_name="multiverse", standalone_mode=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("words", [(), ("--history", "node01.example"), ("compatible", "-c", "4", "--mem", "8G")])
def test_the_command_fits_the_terminal_and_cuts_nothing(width: int, words: tuple[str, ...]) -> None:
    lines = printed(width, *words)
    assert max(map(len, lines)) <= width and not [line for line in lines if "…" in line]
    assert any("31.2" in line or "12%" in line for line in lines)
    assert ("WAITING" in lines[1]) == (width == 140 and not words)


def test_errors_are_none_of_ours() -> None:
    """Whatever a host answers, the recorder goes on: it is a task of the daemon, which ends with its tasks."""
    errors = [MultiverseError("x"), Unknown("y"), ValueError("z"), KeyError("k")]
    chance = random.Random(1)
    one, clock = recorder({f"h{n}": chance.choice(errors) for n in range(50)})
    asyncio.run(ask(one, clock, 3))
    assert one.current() == {}
