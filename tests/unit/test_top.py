"""`multiverse top`, on its screen and through a pipe, at 80 and at 140 columns."""

from __future__ import annotations

import asyncio
import html
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from rich.console import Console
from textual.widgets import DataTable, Input

from multiverse.api import Alert, HostView, JobView, Quantiles, RatesView, SizeView, Snapshot, SummaryView, VmView
from multiverse.cli import render, top, top_lines
from multiverse.cli.top_screen import TopScreen
from multiverse.core.errors import Unknown

NOTHING = Quantiles(0, 0.0, 0.0)
PHASES = ("queued", "clone", "join", "launch", "start", "provision", "run", "reclaim")
EVIL = "\x1b[31m[bold]red"


NO_SIZE = SizeView(0, 0, 0)


def host(name: str, **more: Any) -> HostView:
    size = {"usable": SizeView(8, 16384, 1000), "claimed": SizeView(3, 4096, 10), **more}
    return HostView(
        name=name, reachable="away_since" not in more, declared=NO_SIZE, machine=None, accelerator="kvm", abilities=(),
        images={"slim": ()}, vms=0, available=0, private=0.0, shared=0.0, templates=0.0, template_copies=1,
        overcommit=1.0, floor=0, **size,
    )  # fmt: skip


def vm(name: str, on: str, state: str = "serving", cpus: int = 1) -> VmView:
    return VmView(name, state, on, "slim", "instant", cpus, 500, "10.0.0.1", 1, "1", 900.0, 0.0, 20.0, 0.0, 0.0, "", "")


def job(number: int, stage: str, **more: Any) -> JobView:
    values: dict[str, Any] = {"name": "relax", "waiting": "", "vms": (), "since": 990.0, "nodes": 1, **more}
    return JobView(attempt=number, job_id=str(number), uid=1000, user="alice", state=stage, stage=stage, cpus=2,
                   memory=700, image="slim", kind="instant", order=number, reason="", restarts=0, quarantined="",
                   **values)  # fmt: skip


RATES = RatesView(15.0, {name: tuple(range(60)) for name in ("submitted", "started", "ended", "vms", "failures")},
                  dict.fromkeys(PHASES, NOTHING) | {"start": Quantiles(12, 1.6, 2.4)})  # fmt: skip
STAGES = {"waiting": 1, "provisioning": 1, "running": 1, "ending": 0}
SNAPSHOT = Snapshot(
    number=1,
    summary=SummaryView("aurora", "1", 1000.0, 1.0, STAGES, {}, {"scheduler": ""}, RATES),
    hosts=(host("n2"), host("n1"), host("n3", state="away", away_since=5.0, why="no route to host")),
    vms=(vm("v1", "n1"), vm("v2", "n1", "starting", 2)),
    jobs=(
        job(3, "waiting", waiting="waiting for capacity: the hosts are full"),
        job(1, "running", vms=("v1",)),
        job(2, "provisioning", name=EVIL, vms=("v2",)),
    ),
    alerts=(Alert("image", "i", "no host has image x", "build it"),),
)  # fmt: skip


def document(snapshot: Snapshot = SNAPSHOT) -> Any:
    return TypeAdapter(Snapshot).dump_python(snapshot, mode="json")


def printed(monkeypatch: pytest.MonkeyPatch, width: int, snapshot: Snapshot = SNAPSHOT) -> str:
    console = Console(width=width, highlight=False, force_terminal=False)
    monkeypatch.setattr(top, "console", console)
    with console.capture() as captured:
        top.show(snapshot)
    return captured.get()


@pytest.mark.parametrize("width", [80, 140])
def test_what_is_printed_fits_and_says_all(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    text = printed(monkeypatch, width)
    assert max(len(line) for line in text.splitlines()) <= width
    for words in (
        "aurora",
        "1 waiting",
        "10 of 16 CPUs",
        "no host has image x",
        "n3",
        "no route to host",
        "capacity: the",
    ):
        assert words in text
    assert "1.60 s median" in text
    assert ("alice" in text) == (width == 140)
    assert [line.split()[0] for line in text.splitlines() if line.startswith("n")] == ["n1", "n2", "n3"]
    assert "\x1b" not in text
    assert "[31m[bol" in text, "a name is no markup"


LONG = "waiting for capacity: the hosts are full; expected to start by 2026-11-30 02:10 UTC; and a word of an operator"
AWAY = "its agent did not answer within 10 s, and the connection to it was closed by the other side"
CROWDED = replace(
    SNAPSHOT,
    jobs=(job(3, "waiting", waiting=LONG), job(4, "waiting", waiting="held"), *SNAPSHOT.jobs[1:]),
    hosts=(host("n3", state="away", away_since=5.0, why=AWAY),),
    alerts=(replace(SNAPSHOT.alerts[0], message=LONG.replace("waiting", "alerting")),),
)


def said_in(text: str) -> str:
    """The text without what its lines begin and end with on a screen."""
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 140])
def test_no_reason_is_cut(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    text = printed(monkeypatch, width, CROWDED)
    assert max(len(line) for line in text.splitlines()) <= width
    for words in (LONG, LONG.replace("waiting", "alerting"), AWAY):
        assert words in said_in(text)
    (line,) = (line for line in text.splitlines() if line.startswith("4 "))
    assert line.endswith("held"), "a short reason stands beside its job"


def test_a_site_at_rest_is_shown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = RatesView(15.0, dict.fromkeys(RATES.series, (0,) * 60), dict.fromkeys(PHASES, NOTHING))
    text = printed(
        monkeypatch,
        80,
        replace(SNAPSHOT, summary=replace(SNAPSHOT.summary, rates=rates), hosts=(), vms=(), jobs=(), alerts=()),
    )
    assert "No job waits or runs." in text
    assert "no job has started" in text


def test_cells_of_a_large_host_are_in_proportion() -> None:
    large = host("n1", usable=SizeView(1000, 16384, 1), claimed=SizeView(500, 4096, 1))
    vms = tuple(vm(f"v{n}", "n1", cpus=50) for n in range(10))
    line = top_lines.host_lines(replace(SNAPSHOT, hosts=(large,), vms=vms), 80)[0].plain
    assert len(line) <= 80
    assert abs(line.count("■") - line.count("·")) <= 1


def test_a_vm_that_moves_takes_cpus_at_both_hosts() -> None:
    moves = replace(vm("v1", "n1", "moving", 2), other_host="n2")
    snapshot = replace(SNAPSHOT, hosts=(host("n1"), host("n2")), vms=(moves,))
    assert [line.plain.count("■") for line in top_lines.host_lines(snapshot, 80)] == [2, 2]
    running = job(1, "running", vms=("v1",))
    assert top_lines.job_cells(running, {"v1": moves}, 1000.0, 80)[-1].plain == "on n1 → n2"


def test_a_spark_is_as_high_as_the_most() -> None:
    assert top_lines.spark((0, 1, 8)) == " ▁█"
    assert top_lines.spark((0, 0)) == "  "


def on_screen(app: TopScreen) -> str:
    text = re.sub(r"<[^>]*>", "\n", app.export_screenshot())
    return html.unescape(text).replace("\xa0", " ")


def run(size: tuple[int, int], act: Any, ask: Any = document) -> None:
    async def pilot() -> None:
        app = TopScreen(ask)
        async with app.run_test(size=size) as at:
            while not app.query_one(DataTable).row_count:
                await at.pause(0.05)
            await act(app, at)

    asyncio.run(asyncio.wait_for(pilot(), 60))


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
def test_the_screen_shows_hosts_jobs_and_rates(size: tuple[int, int]) -> None:
    async def look(app: TopScreen, at: Any) -> None:
        await at.pause(0.5)
        text = on_screen(app)
        for words in (
            "aurora",
            "1 waiting",
            "n1",
            "no route to host",
            "waiting for capacity",
            "preparing",
            "3 of 3 jobs",
        ):
            assert words in text
        (heading,) = [str(column.label) for column in app.query_one(DataTable).ordered_columns]
        assert ("USER" in heading) == (size[0] == 140)

    run(size, look)


@pytest.mark.parametrize("size", [(80, 30), (140, 30)])
def test_the_screen_cuts_no_reason(size: tuple[int, int]) -> None:
    async def look(app: TopScreen, at: Any) -> None:
        await at.pause(0.5)
        for words in (LONG, LONG.replace("waiting", "alerting"), AWAY):
            assert words in said_in(on_screen(app))

    run(size, look, lambda: document(CROWDED))


def test_keys_choose_a_stage_and_filter_and_end() -> None:
    async def act(app: TopScreen, at: Any) -> None:
        table = app.query_one(DataTable)
        await at.press("s")
        assert [str(table.get_row_at(i)[0])[:1] for i in range(table.row_count)] == ["2"]
        await at.press("s")
        assert [str(table.get_row_at(i)[0])[:1] for i in range(table.row_count)] == ["3"]
        await at.press("s", "s", "s", "slash", *"capacity", "enter")
        assert [str(table.get_row_at(i)[0])[:1] for i in range(table.row_count)] == ["3"]
        assert not app.query_one(Input).has_class("open")
        await at.press("slash", "escape")
        assert table.row_count == 3, "escape ends the filter"
        await at.press("q")
        assert app.return_code == 0

    run((80, 24), act)


def test_a_daemon_that_does_not_answer_is_said_and_the_screen_stays() -> None:
    answers = [document()]

    def ask() -> Any:
        if answers:
            return answers.pop()
        raise Unknown("the daemon did not answer")

    async def look(app: TopScreen, at: Any) -> None:
        while "not connected" not in on_screen(app):
            await at.pause(0.2)
        assert app.query_one(DataTable).row_count == 3

    run((80, 24), look, ask)


def test_no_other_command_loads_textual() -> None:
    code = "import sys, multiverse.cli.commands as c; c.build(['jobs', 'top']); assert 'textual' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_memory_is_as_elsewhere() -> None:
    assert render.memory(700) in top_lines.job_cells(SNAPSHOT.jobs[0], {}, 1000.0, 80)[4].plain
