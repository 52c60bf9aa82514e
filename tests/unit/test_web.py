"""The snapshot that viewers share, and the web page's application."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from multiverse.api import Alert, Delta, Snapshot
from multiverse.config import Settings, WebSettings, parse
from multiverse.controller.loop import Controller
from multiverse.core.errors import Exhausted, Refused
from multiverse.core.model.basics import Size
from multiverse.core.model.eviction import Method, Step
from multiverse.core.model.job import AttemptState
from multiverse.core.model.reason import Why
from multiverse.core.model.vm import VmState
from multiverse.service import publisher as publishing
from multiverse.service.alerts import command_of
from multiverse.service.backend import Backend
from multiverse.service.publisher import Publisher
from multiverse.service.startup import Processes, bind_web
from multiverse.service.statistics import Statistics
from multiverse.service.web import HEADERS, make_web
from multiverse.store import Store
from multiverse.web import files
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.world import SimulatedWorld
from tests.unit.rows import attempt, vm

EVIL = '"><script>alert(1)</script>'


async def _no_processes() -> Counter[str]:
    return Counter()


class Site:
    """A controller with a simulated world, and what serves its viewers."""

    def __init__(self, most: int = 500) -> None:
        self.world, self.clock = SimulatedWorld(1), VirtualClock()
        store = Store(":memory:", self.clock, site="shown")
        self.controller = Controller(
            store, self.world.scheduler(Random(1)), self.world.hypervisor(Random(2)), self.clock, Settings(), Random(3)
        )
        self.world.cluster.hint = self.controller.hint
        statistics = Statistics()
        self.controller.watch(statistics)
        counter = Processes(SimpleNamespace(programs=Counter()), _no_processes)  # type: ignore[arg-type]
        self.backend = Backend(self.controller, store, self.clock, None, counter, statistics=statistics)
        self.publisher = Publisher(self.backend, most)
        self.web = make_web(self.backend, self.publisher)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.web), base_url="http://page")


@asynccontextmanager
async def site(**more: Any) -> AsyncIterator[Site]:
    made = Site(**more)
    work = asyncio.create_task(made.controller.run())
    try:
        yield made
    finally:
        await made.publisher.close()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def parsed(event: bytes) -> tuple[str, str, Any]:
    """Name, id and data of a server-sent event."""
    lines = dict(line.split(": ", 1) for line in event.decode().strip("\n").split("\n"))
    return lines["event"], lines["id"], json.loads(lines["data"])


class Viewer:
    """Applies what a viewer gets, as the page does."""

    def __init__(self) -> None:
        self.number, self.names = 0, {"hosts": "name", "vms": "name", "jobs": "attempt"}
        self.shown: dict[str, dict[str, Any]] = {kind: {} for kind in self.names}
        self.events: list[str] = []

    def take(self, event: bytes) -> None:
        name, _, data = parsed(event)
        self.events.append(name)
        TypeAdapter(Snapshot if name == "snapshot" else Delta).validate_python(data)
        if name == "delta":
            assert data["number"] == self.number + 1
        self.number = data["number"]
        for kind, key in self.names.items():
            if name == "snapshot":
                self.shown[kind] = {}
            for gone in data.get("gone", {}).get(kind, []):
                del self.shown[kind][gone]
            self.shown[kind].update({str(one[key]): one for one in data[kind]})


def test_deltas_lead_to_what_a_new_snapshot_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing.time, "monotonic", lambda: asyncio.get_running_loop().time())

    async def watch() -> None:
        async with site() as shown:
            viewer = Viewer()
            await asyncio.sleep(5)
            events = shown.publisher.events()
            viewer.take(bytes(await anext(events)))
            for seconds in (3.0, 8.0, 2.0):
                shown.world.cluster.submit(Batch("job", seconds=seconds))
            async with asyncio.timeout(60), aclosing(events):
                async for event in events:
                    if bytes(event) != b": \n\n":
                        viewer.take(bytes(event))
                    whole = json.loads(await shown.publisher.snapshot())
                    if whole["number"] == viewer.number:
                        assert viewer.shown["jobs"] == {str(one["attempt"]): one for one in whole["jobs"]}
                        assert viewer.shown["vms"] == {one["name"]: one for one in whole["vms"]}
                    if not shown.world.unfinished() and not viewer.shown["vms"] and not viewer.shown["jobs"]:
                        break
            assert viewer.events.count("snapshot") == 1
            assert viewer.events.count("delta") > 5

    run(watch(), 1)


def test_viewers_are_shown_what_a_limit_holds_back_until_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing.time, "monotonic", lambda: asyncio.get_running_loop().time())
    limit, why = Why.EVICTIONS_AT_ONCE(limit=2), Why.HOST_DRAINED(host="h1")
    step = Step(Method.DRAIN, attempt(AttemptState.ALLOCATED), vm(VmState.SERVING), "h2", why, 256, limit, 5.0)

    async def watch() -> None:
        shown = Site()
        viewer, events = Viewer(), shown.publisher.events()
        viewer.names["evictions"] = "vm"
        shown.controller.state.held_back = {"drain": [step]}
        viewer.take(bytes(await anext(events)))
        (one,) = viewer.shown["evictions"].values()
        assert (one["job_id"], one["target"], one["reason"]) == ("7", "h2", "host h1 is drained")
        assert "rebalance.at_once" in one["held"]
        shown.controller.state.held_back = {}
        _, _, delta = parsed(bytes(await anext(events)))
        assert delta["gone"]["evictions"] == ["drain mvtest0-1"] and delta["evictions"] == []
        await shown.publisher.close()

    run(watch(), 1)


def test_nothing_is_computed_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing.time, "monotonic", lambda: asyncio.get_running_loop().time())
    refreshed = []

    async def watch() -> tuple[int, int, int]:
        async with site() as shown:
            refresh = shown.publisher._refresh
            monkeypatch.setattr(shown.publisher, "_refresh", lambda: (refreshed.append(1), refresh()))
            await asyncio.sleep(60)
            before = len(refreshed)
            streams = [shown.publisher.events() for _ in range(20)]
            for stream in streams:
                await anext(stream)
            await asyncio.sleep(10)
            during = len(refreshed)
            for stream in streams:
                await stream.aclose()
            await asyncio.sleep(60)
            return before, during, len(refreshed) - during

    before, during, after = run(watch(), 1)
    assert before == 0
    assert 5 <= during <= 12, "once a second for all of them"
    assert after <= 1


def test_a_viewer_that_comes_back_gets_only_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing.time, "monotonic", lambda: asyncio.get_running_loop().time())

    async def watch() -> None:
        async with site() as shown:
            async with aclosing(shown.publisher.events()) as stream:
                _, last, _ = parsed(bytes(await anext(stream)))
            await asyncio.sleep(3)
            shown.world.cluster.submit(Batch("job", seconds=60))
            await asyncio.sleep(3)
            async with aclosing(shown.publisher.events(last)) as stream:
                assert parsed(bytes(await anext(stream)))[0] == "delta"
            for stale in ("", "other-1", f"{last.partition('-')[0]}-99999", f"{last.partition('-')[0]}-x"):
                async with aclosing(shown.publisher.events(stale)) as stream:
                    assert parsed(bytes(await anext(stream)))[0] == "snapshot"

    run(watch(), 1)


def test_viewers_are_limited_and_counted() -> None:
    async def watch() -> None:
        async with site(most=2) as shown:
            streams = [shown.publisher.events() for _ in range(2)]
            for stream in streams:
                await anext(stream)
            with pytest.raises(Exhausted):
                await anext(shown.publisher.events())
            async with shown.client() as client:
                answer = await client.get("/events")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
            await streams[0].aclose()
            assert shown.publisher.viewers == 1

    run(watch(), 1)


def test_the_daemon_can_stop_while_viewers_look() -> None:
    async def watch() -> list[bytes]:
        async with site() as shown:
            stream = shown.publisher.events()
            await anext(stream)
            await shown.publisher.close()
            return [bytes(event) async for event in stream]

    assert run(watch(), 1) == []


def test_names_that_users_choose_are_data() -> None:
    async def watch() -> tuple[bytes, Any]:
        async with site() as shown:
            shown.world.cluster.submit(Batch(EVIL + "\u2028\n\nevent: x", seconds=60))
            await asyncio.sleep(5)
            stream = shown.publisher.events()
            event = bytes(await anext(stream))
            return event, parsed(event)[2]

    event, data = run(watch(), 1)
    assert data["jobs"][0]["name"] == EVIL + "\u2028\n\nevent: x"
    assert event.count(b"\n\n") == 1, "a name ends no event"


def test_every_answer_has_the_headers_that_protect_the_page() -> None:
    async def ask() -> None:
        async with site() as shown, shown.client() as client:
            await asyncio.sleep(3)
            for path in (
                "/",
                "/main.js",
                "/page.css",
                "/icon.svg",
                "/snapshot",
                "/timeline/77",
                "/no/such",
                "/openapi.json",
            ):
                answer = await client.get(path)
                assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, path
                assert "cache-control" in answer.headers
            assert (await client.get("/main.js")).headers["content-type"].startswith("text/javascript")

    run(ask(), 1)


NOT_THERE = ("jobs", "vms", "hosts", "status", "templates", "docs", "openapi.json", "..%2fconfig.py",
             "%2e%2e/config.py", "__init__.py")  # fmt: skip


@pytest.mark.parametrize("path", NOT_THERE)
def test_nothing_else_of_the_api_is_behind_the_page(path: str) -> None:
    async def ask() -> int:
        async with site() as shown, shown.client() as client:
            return (await client.get(f"/{path}")).status_code

    assert run(ask(), 1) == 404


def test_the_page_changes_nothing() -> None:
    async def ask() -> list[int]:
        async with site() as shown, shown.client() as client:
            paths = ("/", "/snapshot", "/events", "/timeline/1", "/repair", "/hosts/drain", "/prune", "/templates/drop")
            return [
                (await client.request(method, path, json={})).status_code
                for method in ("POST", "PUT", "PATCH", "DELETE")
                for path in paths
            ]

    assert set(run(ask(), 1)) <= {404, 405}


def test_files_are_sent_again_only_if_they_have_changed() -> None:
    async def ask() -> tuple[int, int]:
        async with site() as shown, shown.client() as client:
            first = await client.get("/page.css")
            again = await client.get("/page.css", headers={"if-none-match": first.headers["etag"]})
            return first.status_code, again.status_code

    assert run(ask(), 1) == (200, 304)


def test_a_timeline_is_read_from_the_store_once_for_all_who_look(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        async with site() as shown, shown.client() as client:
            job = shown.world.cluster.submit(Batch("job", seconds=500))
            await asyncio.sleep(20)
            asked = []
            timelines = Backend.timelines
            monkeypatch.setattr(Backend, "timelines", lambda self, job: asked.append(job) or timelines(self, job))
            answers = [(await client.get(f"/timeline/{job}")).json() for _ in range(50)]
            assert all(answer == answers[0] for answer in answers)
            assert answers[0][0]["job_id"] == job
            assert asked == [job]
            assert (await client.get("/timeline/" + "9" * 65)).status_code == 404
            assert asked == [job], "no such id exists"

    run(ask(), 1)


def test_prometheus_gets_metrics_that_are_counted_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> tuple[int, str]:
        async with site() as shown, shown.client() as client:
            await asyncio.sleep(3)
            counted, counts = [], Backend.metrics
            monkeypatch.setattr(Backend, "metrics", lambda self: counted.append(1) or counts(self))
            answers = await asyncio.gather(*(client.get("/metrics") for _ in range(20)))
            return len(counted), answers[-1].text

    times, text = run(ask(), 1)
    assert times == 1
    assert 'multiverse_host_usable{host="h1",resource="cpus"} 8.0' in text


def test_a_job_that_waits_is_explained_as_to_an_operator_once_for_all_who_look() -> None:
    async def ask() -> None:
        async with site() as shown, shown.client() as client:
            shown.world.cluster.submit(Batch("big", seconds=500, size=Size(8, 4000)))
            waits = shown.world.cluster.submit(Batch("waits", seconds=500, size=Size(8, 4000)))
            await asyncio.sleep(20)
            answers = await asyncio.gather(*(client.get(f"/explain/{waits}") for _ in range(5)))
            (job,) = answers[0].json()["jobs"]
            assert all(answer.text == answers[0].text for answer in answers)
            assert "h1" in job["hosts"][0]["hosts"]
            assert (await client.get("/explain/" + "9" * 65)).status_code == 404
            assert (await client.get("/explain/none")).status_code == 404

    run(ask(), 1)


def test_the_page_names_no_other_place() -> None:
    for name, content in files().items():
        text = content.decode().replace("http://www.w3.org/", "")
        assert "//" not in text.replace("://", "⁂").replace("// ", "").replace(" //", "") or name.endswith(".js"), name
        assert "⁂" not in text.replace("://", "⁂"), name
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", 'style="'):
            assert word not in text, (name, word)


def test_the_command_to_copy_is_the_repair_or_what_the_remedy_names() -> None:
    def alert(remedy: str, repair: str = "", **more: Any) -> Alert:
        return Alert("image", "image-x", "no image", remedy, repair, **more)

    assert command_of(alert("build it: multiverse image build slim --name x (or stock); or wait")) == (
        "multiverse image build slim --name x"
    )
    assert command_of(alert("see the log", "builds it again")) == "multiverse repair image-x"
    assert command_of(alert("see the log", "fences it", needs_fenced=True)) == "multiverse repair image-x --fenced"
    assert command_of(alert("look at systemctl status multiverse-agent")) == ""


# --- where it listens ------------------------------------------------------------------------------


def web(**values: Any) -> WebSettings:
    return parse({"web": values}, "test").web


def test_there_is_no_page_unless_the_settings_want_one() -> None:
    assert bind_web(Settings().web) is None


@pytest.mark.parametrize(
    ("values", "problem"),
    [({"listen": "0.0.0.0:8642"}, "can be reached from other machines"), ({"listen": "10.0.0.1:80"}, "other machines"),
     ({"listen": "[::]:80"}, "other machines"), ({"listen": "127.0.0.1"}, "web.listen"),
     ({"listen": "127.0.0.1:0"}, "no port"), ({"listen": "web.sock"}, "web.listen"),
     ({"listen": "127.0.0.1:80", "group": "www-data"}, "web.group"), ({"viewers": 0}, "web.viewers"),
     ({"listen": "/" + "x" * 200}, "107 bytes")],
)  # fmt: skip
def test_a_page_that_others_could_reach_without_the_proxy_is_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(Refused, match=problem.replace(".", r"\.")):
        web(**values)


def test_the_unix_socket_is_for_its_group_only(tmp_path: Path) -> None:
    path = tmp_path / "web.sock"
    with bind_web(web(listen=str(path))) as sock:  # type: ignore[union-attr]
        assert sock.family == socket.AF_UNIX
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    group = __import__("grp").getgrgid(os.getgid()).gr_name
    with bind_web(web(listen=str(path), group=group)):  # type: ignore[union-attr]
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with pytest.raises(Refused, match="no group"):
        bind_web(web(listen=str(path), group="no-such-group-here"))


def test_a_tcp_page_listens_on_this_machine_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"localhost:{port}"):
        with bind_web(web(listen=address)) as sock:  # type: ignore[union-attr]
            assert sock.getsockname()[0] == "127.0.0.1"
