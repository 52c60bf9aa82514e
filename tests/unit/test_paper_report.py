"""The report of `multiverse bench paper`, from a recorded run and from what other benchmarks have printed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from multiverse.api import decode
from multiverse.cli import render
from multiverse.cli.commands import build
from multiverse.core.errors import Refused
from multiverse_lab.bench.injob import StartSamples
from multiverse_lab.bench.launches import PARTS, WAYS
from multiverse_lab.bench.paper.document import report_of
from multiverse_lab.bench.paper.figures import summary
from multiverse_lab.bench.paper.page import ReportSection, csv_files, page
from multiverse_lab.bench.paper.records import PaperRunTimes
from multiverse_lab.bench.paper.sections import RATES, choices, of_benchmark, of_choices, of_simulation
from multiverse_lab.bench.paper_cluster import jobs_of
from multiverse_lab.cli.injob import start_document

RECORDED = Path(__file__).with_name("paper_run.json")
"""What `multiverse bench paper --quick --json` printed on two cores with emulated guests."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return dict(json.loads(RECORDED.read_text()))


def _jobs(found: dict[str, Any], workload: str, kind: str) -> list[dict[str, Any]]:
    (one,) = [run for run in found["runs"] if (run["workload"], run["kind"]) == (workload, kind)]
    return list(one["jobs"])


def test_the_figures_of_a_recorded_run_are_what_its_times_say(found: dict[str, Any]) -> None:
    values = summary(report_of(found).figures)

    def ours(name: str) -> float:
        one = values[name]
        assert isinstance(one, dict)
        return float(one["ours"]["value"])

    def provisioning(workload: str, kind: str) -> float:
        overheads = [(job["clone"], job["overheads"]) for job in _jobs(found, workload, kind)]
        return fmean(clone + sum(parts.values()) - parts["get_host"] for clone, parts in overheads)

    def makespan(kind: str) -> float:
        return max(float(job["ended"]) for job in _jobs(found, "workload-2", kind))

    for workload, key in (("workload-1", "completion-1"), ("steady", "completion-steady")):
        full, instant = (provisioning(workload, kind) for kind in ("full", "instant"))
        assert ours(f"{key}, provisioning, full, mean") == pytest.approx(full)
        assert ours(f"{key}, provisioning, full / instant") == pytest.approx(full / instant)
        assert full > 2 * instant, "of this record: emulated guests, two cores"
    assert ours("makespan, workload-2, full / instant") == pytest.approx(makespan("full") / makespan("instant"))
    assert ours("throughput, workload-2, instant / full") == pytest.approx(makespan("full") / makespan("instant"))
    assert ours("overheads-2, slurm_restart, full, mean") == 0.0
    for job in (job for run in found["runs"] for job in run["jobs"]):
        before = job["clone"] + sum(job["overheads"].values())
        assert before == pytest.approx(job["began"] - job["submitted"], abs=0.2), "no time is lost or counted twice"


def test_utilization_of_a_recorded_run_is_the_cpu_time_of_its_jobs(found: dict[str, Any]) -> None:
    for one in decode(list[PaperRunTimes], found["runs"]):
        used = sum(one.utilization) * one.step * one.cpus
        assert used == pytest.approx(sum(job.cpus * job.running for job in one.jobs)) and max(one.utilization) <= 1.0


def test_the_report_says_how_it_was_made_and_what_it_does_not_say(found: dict[str, Any]) -> None:
    report = report_of(found)
    assert report.facts["command"].startswith("multiverse bench paper --quick") and report.facts["seeds"] == "1"
    assert "the paper's: 2.82" in report.facts["time"] and "published: 87 s" in report.facts["full clone alone"]
    said = " ".join(report.warnings)
    assert "emulated" in said and "quick run" in said and "were not compared with its captions" in said
    slow = report_of({**found, "quick": False, "accelerator": "kvm"})
    assert "quick" not in " ".join(slow.warnings) and "A boot" not in " ".join(slow.warnings)
    assert report.sections == []


def test_the_command_makes_the_page_of_a_recorded_run_again(found: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "move.json").write_text(json.dumps(_MOVES))
    argv = ["bench", "paper", "--from", f"{RECORDED}", "--with", f"{tmp_path}/move.json"]
    argv += ["--html", f"{tmp_path}/paper.html", "--csv", f"{tmp_path}/data"]
    with mock.patch.object(render.console, "_width", 140):
        done = CliRunner().invoke(build(), argv, catch_exceptions=False)
    assert done.exit_code == 0 and f"The report is in {tmp_path}/paper.html." in done.stdout
    page = (tmp_path / "paper.html").read_text()
    assert 'id="move"' in page and "provisioning, full / instant" in page and "7.2 ×" in page
    rows = {cells[0]: cells[-1] for line in done.stdout.splitlines() if len(cells := line.strip().split("   ")) > 2}
    assert rows["overheads-1, slurm_restart, full, mean"].strip() == "0 s", "zero is a value"
    assert {path.name for path in (tmp_path / "data").iterdir()} == {
        *csv_files(report_of(found)), "move.csv",
    }  # fmt: skip


def test_what_is_printed_as_json_becomes_a_table_of_the_page_of_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(build(), ["bench", "paper", "--from", f"{RECORDED}", "--json"], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == [], "no page was asked for"
    (tmp_path / "paper.json").write_text(done.stdout)
    shown = CliRunner().invoke(build(), ["bench", "all", "paper.json"], catch_exceptions=False).stdout
    rows = {cells[0]: cells[1:] for line in shown.splitlines() if len(cells := line.strip("| ").split(" | ")) == 4}
    published, here, in_paper = rows["completion-1, provisioning, full, mean"]
    assert published == "260 s" and " to " in here and in_paper.endswith(" s")
    assert rows["makespan, workload-2, full / instant"][0] == "1.5 ×" and "A second of the paper is" in shown


@pytest.mark.parametrize("text", [
    "{}",
    "no JSON",
    '{"kinds": {}}',
    '{"runs": [], "scale": {}, "full_provisioning": []}',
    '{"start": {}, "repeat": 1}',
])  # fmt: skip
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    for option in ("--from", "--with"):
        done = CliRunner().invoke(build(), ["bench", "paper", option, f"{tmp_path}/other.json"])
        assert done.exit_code != 0 and "other.json" in str(done.exception)


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiverse_lab.cli.paper.build_image", lambda *words, **more: pytest.fail("it began to run"))
    (tmp_path / "file").touch()
    for words in (("--html", f"{tmp_path}"), ("--html", f"{tmp_path}/none/x.html"), ("--csv", f"{tmp_path}/file")):
        done = CliRunner().invoke(build(), ["bench", "paper", *words])
        assert isinstance(done.exception, Refused) and str(tmp_path) in str(done.exception) and done.exception.hint


# --- parts of other benchmarks ----------------------------------------------------------------------------

_MOVES = {
    "moves": 2, "how": "private", "accelerator": "tcg",
    "cases": {"idle": {
        "total": 0.4, "outside": 0.05, "sent": 20 << 20, "slowdown": 0.1,
        "samples": [{"total": 0.3, "outside": 0.04}, {"total": 0.5, "outside": 0.06}],
    }},
}  # fmt: skip


def _of(section: ReportSection) -> str:
    found = report_of(json.loads(RECORDED.read_text()))
    return page(type(found)(found.title, found.lead, found.facts, found.warnings, found.figures, [section]))


def test_moves_have_a_part_with_the_published_time() -> None:
    section = of_benchmark({"benchmark": "move", "at": "2026-11-30", "result": _MOVES})
    assert section.command == "multiverse bench move --moves 2 --how private"
    assert section.data[1][0][:2] == ("idle", 0.4) and section.data[1][0][7:] == (20, "10 %")
    assert "10 to 13" in _of(section)


def test_the_start_of_vms_inside_jobs_is_drawn_in_its_parts() -> None:
    samples = StartSamples()
    for way in WAYS:
        samples.parts[way] = {part: [1.0, 2.0] for part in ("submission", *PARTS)}
    samples.parts["by Slurm"] = {"whole": [3.0, 4.0]}
    result = {"repeat": 2, "seed": 1, "accelerator": "tcg", "start": start_document(samples),
              "many": {"vms": 8, "nodes": 4, "one_by_one": 80.0, "at_once": 20.0}}  # fmt: skip
    section = of_benchmark({"benchmark": "injob", "at": "2026-11-30", "result": result})
    (chart,) = section.charts
    assert [bar.parts for bar in chart.panels[0].bars] == [(1.5,) * 7] * 4  # type: ignore[union-attr]
    assert "published 260.11 and 34.88 s" in section.notes[1] and "2.64" in section.notes[0]
    assert section.data[1][7][:3] == ("copy", "in all", 10.5)
    assert "Slurm-V" in _of(section)


def test_kinds_are_compared_on_the_same_jobs_at_each_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiverse_lab.bench.paper.sections.RATES", RATES[:1])
    monkeypatch.setattr("multiverse_lab.bench.paper.sections.jobs_of", lambda *of: list(jobs_of(*of))[:20])
    ended = list[int]()
    found = choices([1], lambda: ended.append(1))
    assert [one["kind"] for one in found] == ["full", "instant", "auto"] and len(ended) == 3
    full, instant, _ = (one["provisioning"]["value"] for one in found)
    assert full > instant > 0
    section = of_choices(found, [1])
    assert [line.points for line in section.charts[0].lines][1] == ((2.0, instant),)  # type: ignore[union-attr]
    assert "--simulate 1 --seed 1" in section.command


def test_simulated_figures_are_shown_beside_the_published_ones_with_the_reason_where_they_differ() -> None:
    def one(name: str, why: str = "") -> dict[str, Any]:
        value = {"value": 1.0, "low": 0.5, "high": 1.5}
        how = {"fitted": False, "within": not why, "why": why, "unit": "s"}
        return {"figure": name, "published": "1 s", "simulated": value, **how}

    found = {"summary": "1 of 2.", "reproduced": [one("a"), one("b", "because")]}
    section = of_simulation(found, [1, 2])
    assert [row[2] for row in section.data[1]] == ["1 s (0.5 to 1.5)"] * 2
    assert section.notes == ("1 of 2.", "b: because.") and [row[3] for row in section.data[1]] == [
        "within 10 %",
        "differs",
    ]
    assert section.command == "multiverse simulate cluster --cluster paper --seeds 2 --seed 1"


def test_a_run_that_is_read_is_the_run_that_was_recorded(found: dict[str, Any]) -> None:
    again = [asdict(one) for one in decode(list[PaperRunTimes], found["runs"])]
    assert json.loads(json.dumps(again)) == found["runs"]
