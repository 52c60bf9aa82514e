"""The benchmark of backfill: traces, the model that makes them, and the ideal scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from multiverse.cli.commands import build
from multiverse.config import BackfillSettings
from multiverse.core.errors import Refused
from multiverse_lab.bench import easy, lublin, swf
from multiverse_lab.bench.backfill import TOGETHER, bounded_slowdown, compare, figures, scenario_of
from multiverse_lab.bench.easy import Stay
from multiverse_lab.bench.swf import TraceJob


def job(number: int, submitted: float, runs: float, processors: int, limit: float | None = None) -> TraceJob:
    return TraceJob(number, submitted, runs, processors, runs if limit is None else limit)


# --- traces ------------------------------------------------------------------------------------------


def test_a_trace_that_is_written_is_read_again(tmp_path: Path) -> None:
    jobs = lublin.generate(30, seed=3)
    swf.write([*jobs], tmp_path / "t.swf", ["MaxJobs: 30"])
    assert (tmp_path / "t.swf").read_text().startswith("; Version: 2.2\n; MaxJobs: 30\n1 0 -1 ")
    read = swf.read(tmp_path / "t.swf")
    assert [(one.number, one.runs, one.processors, one.limit) for one in read] == [
        (one.number, one.runs, one.processors, one.limit) for one in jobs
    ]
    assert all(abs(a.submitted - b.submitted) <= 0.5 for a, b in zip(read, jobs, strict=True))


def test_what_a_trace_leaves_out_is_filled_in_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.swf"
    path.write_text(
        "; a comment\n\n"
        "2 50 -1 30 4 -1 -1 -1 -1 -1 1 -1 -1 -1 -1 -1 -1 -1 ; asks for none\n"
        "1 10 -1 20 2 -1 -1 8 60 -1 1 -1 -1 -1 -1 -1 -1 -1\n"
        "3 60 -1 -1 2 -1 -1 8 60 -1 5 -1 -1 -1 -1 -1 -1 -1\n"
    )
    assert swf.read(path) == [TraceJob(1, 10.0, 20.0, 8, 60.0), TraceJob(2, 50.0, 30.0, 4, 30.0)]


@pytest.mark.parametrize("text", [
    "1 2 3\n",
    "1 2 x -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1\n",
    "1 2 -1 inf 4 -1 -1 4 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1\n",
    "1 2 -1 9 4 -1 -1 4 -1 -1 -1 nan -1 -1 -1 -1 -1 -1\n",
])  # fmt: skip
def test_a_line_that_is_no_job_is_refused_with_its_number(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.swf").write_text("; x\n" + text)
    with pytest.raises(Refused, match="line 2"):
        swf.read(tmp_path / "t.swf")


@pytest.mark.parametrize("text", ["", "; comments\n", "1 2 -1 -1 4 -1 -1 4 60 -1 5 -1 -1 -1 -1 -1 -1 -1\n"])
def test_a_trace_without_a_job_that_ran_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.swf").write_text(text)
    with pytest.raises(Refused, match="no job that ran"):
        swf.read(tmp_path / "t.swf")


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot read"):
        swf.read(tmp_path / "none")


# --- the model ---------------------------------------------------------------------------------------


def test_a_seed_always_gives_the_same_workload() -> None:
    assert lublin.generate(50, seed=1) == lublin.generate(50, seed=1) != lublin.generate(50, seed=2)


def test_the_workload_is_that_of_the_model() -> None:
    """The paper's shares of serial jobs and of powers of two, more jobs by day than by night, and wide jobs that run
    longer."""
    model = lublin.Model(processors=128)
    jobs = lublin.generate(6000, 1, model)
    serial = [one for one in jobs if one.processors == 1]
    assert abs(len(serial) / len(jobs) - model.serial) < 0.03
    powers = [one for one in jobs if one.processors > 1 and one.processors.bit_count() == 1]
    assert len(powers) / len(jobs) > model.power2 - 0.03 and max(one.processors for one in jobs) <= 128
    wide = [one for one in jobs if one.processors > 32]
    assert fmean(one.runs for one in wide) > fmean(one.runs for one in serial)
    assert all(one.runs <= one.limit <= 5 * one.runs + 60 and one.limit % 60 == 0 for one in jobs)
    assert [one.submitted for one in jobs] == sorted(one.submitted for one in jobs)
    at_night, by_day = (sum(low <= one.submitted % 86400 < low + 6 * 3600 for one in jobs) for low in (0, 10 * 3600))
    assert by_day != at_night, "the day has a cycle"


@pytest.mark.parametrize("load", [0.5, 1.0])
def test_gaps_are_stretched_to_the_load(load: float) -> None:
    jobs = lublin.generate(200, 1, lublin.Model(processors=64), load)
    work = sum(one.runs * one.processors for one in jobs)
    assert work / (64 * jobs[-1].submitted) == pytest.approx(load, rel=0.01)


# --- the ideal scheduler -----------------------------------------------------------------------------


def starts(stays: list[Stay]) -> dict[int, float]:
    return {one.job.number: one.started for one in stays}


def test_easy_lets_jobs_ahead_that_end_in_time_or_fit_beside() -> None:
    jobs = [job(1, 0, 100, 6), job(2, 1, 50, 8), job(3, 2, 50, 2), job(4, 3, 500, 2), job(5, 4, 99, 2)]
    assert starts(easy.schedule(jobs, 10)) == {1: 0, 2: 100, 3: 2, 4: 3, 5: 150}
    assert starts(easy.schedule(jobs, 10, backfill=False)) == {1: 0, 2: 100, 3: 100, 4: 150, 5: 150}


def test_easy_uses_the_limits_and_not_the_run_times() -> None:
    jobs = [job(1, 0, 10, 6, limit=100), job(2, 1, 50, 8), job(3, 2, 5, 4, limit=200)]
    assert starts(easy.schedule(jobs, 10)) == {1: 0, 2: 10, 3: 60}


def test_a_job_is_ended_by_its_limit() -> None:
    (stay,) = easy.schedule([job(1, 5, 100, 1, limit=60)], 1)
    assert (stay.started, stay.ended, stay.waited) == (5, 65, 0)


jobs_ = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 60), st.integers(1, 8), st.floats(1.0, 4.0)), min_size=1, max_size=25
)


@given(jobs_)
def test_easy_runs_each_job_once_on_free_processors(drawn: list[tuple[int, int, int, float]]) -> None:
    jobs = [job(n, at, runs, width, limit=runs * more) for n, (at, runs, width, more) in enumerate(drawn)]
    stays = easy.schedule(jobs, 8)
    assert sorted(one.job.number for one in stays) == [one.number for one in jobs]
    for now in {one.started for one in stays}:
        assert sum(one.job.processors for one in stays if one.started <= now < one.ended) <= 8
    assert all(one.started >= one.job.submitted for one in stays)


# --- the comparison ----------------------------------------------------------------------------------


def test_figures_of_a_trace() -> None:
    one, two, three = job(1, 10, 100, 2), job(2, 20, 1, 1), job(3, 30, 50, 1)
    found = figures([Stay(one, 10, 110), Stay(two, 118, 119), Stay(three, 60, 110)], 4)
    assert found.utilization == (200 + 1 + 50) / (4 * 109)
    assert (found.mean_wait, found.longest_wait, found.seconds, found.ahead) == ((98 + 30) / 3, 98, 109, 1)
    assert found.bounded_slowdown == pytest.approx((1 + 9.9 + 1.6) / 3)
    assert bounded_slowdown(Stay(two, 21, 22)) == 1.0


def test_all_processors_are_on_hosts() -> None:
    hosts = scenario_of([job(1, 0, 1, 1)], 40, 1, BackfillSettings()).world.hosts
    assert [host.capacity.cpus for host in hosts] == [16, 16, 8]


def test_a_trace_is_run_three_times_and_backfill_is_between_none_and_the_ideal() -> None:
    jobs = [
        job(1, 0, 200, 3, 240),
        job(2, 10, 60, 4, 120),
        *(job(n, 15 + n, 30, 1, 60) for n in range(3, 9)),
        job(9, 40, 1, 99),
    ]
    found = compare(jobs, 4)
    assert found.jobs == 8 and found.without.ahead == 0 and found.backfill.ahead >= 2
    assert found.ideal.mean_wait <= found.backfill.mean_wait + TOGETHER < found.without.mean_wait


def test_the_command_prints_a_table_and_writes_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "made.swf"
    small = ["bench", "backfill", "--jobs", "6", "--processors", "4", "--longest", "1", "--load", "1"]
    result = CliRunner().invoke(build(), [*small, "--write", str(path)])
    assert result.exit_code == 0, result.output
    for text in ("NONE", "BACKFILL", "IDEAL EASY", "utilization", "mean bounded slowdown"):
        assert text in result.output
    again = CliRunner().invoke(build(), ["bench", "backfill", "--processors", "4", "--trace", str(path), "--json"])
    assert again.exit_code == 0 and json.loads(again.stdout)["jobs"] == 6
