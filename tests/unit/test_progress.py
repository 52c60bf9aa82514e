"""How far long commands say that they are."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from structlog.testing import capture_logs

from multiverse.cli import progress
from multiverse.images import build
from multiverse.store import schema


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def work(expected: float | None = None) -> tuple[progress.Work, Clock]:
    clock = Clock()
    return progress.Work("image slim", expected, clock), clock


def test_what_remains_follows_from_what_is_done() -> None:
    one, clock = work()
    clock.now = 10.0
    assert one.left() is None
    one.advance(1, 5)
    assert one.left() == pytest.approx(40.0)
    clock.now = 30.0
    one.advance(3, 5)
    assert one.line() == "image slim: 3 of 5 (30 s, about 20 s left)"
    one.advance(5, 5)
    assert one.left() is None


def test_a_count_that_begins_late_is_measured_from_its_beginning() -> None:
    one, clock = work()
    clock.now = 100.0
    one.advance(10, 30)
    clock.now = 110.0
    one.advance(20, 30)
    assert one.left() == pytest.approx(10.0)
    one.advance(1, 8)
    assert one.left() is None or one.left() > 0, "another count has begun"


def test_what_is_begun_next_is_not_measured_by_what_was_before() -> None:
    one, clock = work()
    one.advance(5, 5)
    clock.now = 100.0
    one.begin("the next")
    assert one.line() == "image slim: the next (1m40s)"
    clock.now = 120.0
    one.advance(1, 5)
    assert one.left() == pytest.approx(80.0)
    one.advance(0, 4)
    clock.now = 130.0
    one.advance(1, 4)
    assert one.left() == pytest.approx(30.0), "a count that begins at 0 begins now"


def test_what_an_earlier_time_took_tells_what_remains_until_it_is_over() -> None:
    one, clock = work(60.0)
    clock.now = 20.0
    one.say("installing packages")
    assert one.line() == "image slim: installing packages (20 s, about 40 s left)"
    clock.now = 61.0
    assert one.line() == "image slim: installing packages (61 s)", "an estimate that was wrong is no estimate"


def test_lines_come_more_seldom_the_longer_the_work_takes() -> None:
    one, clock = work(7200.0)
    told = []
    for second in range(0, 7200, 5):
        clock.now = float(second)
        if one.tells():
            told.append(second)
    assert told[:10] == list(range(0, 50, 5)) and told[-1] - told[-2] == 60 and len(told) < 150


def test_without_a_terminal_lines_come_by_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.02)
    monkeypatch.setattr(progress, "errors", Console(stderr=True, width=200))
    with progress.working("a benchmark") as one:
        one.advance(2, 4)
        deadline = time.monotonic() + 30
        text = ""
        while text.count("a benchmark: 2 of 4") < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
            text += capsys.readouterr().err
    assert text.count("a benchmark: 2 of 4") >= 2
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == "", "it ends with the work"


def test_what_is_inside_tells_the_work_around_it() -> None:
    with progress.working("outer"):
        with progress.working("inner"):
            progress.present().say("x")
            assert progress.present().what == "inner"
        assert progress.present().what == "outer"
    progress.present().advance(1, 2)  # of no consequence


def test_a_step_says_what_it_does_and_how_long_it_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "console", Console(width=100))
    with progress.step("building", "built") as say:
        say("half of it")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["  building …", "    half of it"]
    assert lines[2].startswith("✓ built 0.")


@pytest.mark.parametrize("text", ["{", "[1]", '{"slim": "soon"}', "{}"])
def test_a_record_of_durations_that_makes_no_sense_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / build.DURATIONS).write_text(text)
    assert build.expected_duration(tmp_path, "slim") is None
    build.keep_duration(tmp_path, "slim", 61.25)
    assert build.expected_duration(tmp_path, "slim") == pytest.approx(61.2, abs=0.1)
    build.keep_duration(tmp_path, "stock", 5.0)
    assert build.expected_duration(tmp_path, "slim") is not None


def test_an_upgrade_that_takes_long_is_told_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "TELLS_EVERY", 0.01)
    with capture_logs() as lines, schema._told("database is being upgraded"):
        deadline = time.monotonic() + 30
        while len(lines) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert {line["event"] for line in lines} == {"database is being upgraded"}
    assert len(lines) >= 2


def test_a_benchmark_prints_json_alone_on_its_output() -> None:
    code = "from multiverse.cli.main import main; import sys; sys.argv[1:] = sys.argv[1:]; main()"
    words = ["bench", "planner", "--jobs", "5", "--vms", "8", "--repeat", "3", "--per-host", "8", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.lstrip().startswith("[")
