"""The page of measured figures: tables from the JSON of benchmarks, and the regions that are written."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from multiverse.cli.commands import build
from multiverse.core.errors import Refused
from multiverse_lab.bench.burst import PAPER, BurstSamples, ratios
from multiverse_lab.bench.burst import result as burst_result
from multiverse_lab.bench.latency import LatencySamples, beside_bare_metal
from multiverse_lab.bench.latency import result as latency_result
from multiverse_lab.bench.report import (
    BenchmarkMachine,
    BenchmarkRun,
    ChangedFigure,
    changes,
    document,
    read,
    region,
    regions,
    written,
)
from multiverse_lab.bench.throughput import ThroughputPlan, ThroughputResult, paper
from multiverse_lab.cli import report as command
from multiverse_lab.cli.move import HOW

MACHINE = BenchmarkMachine("Some CPU", 2, 24576, "22.05.8", "7.2.11", 0.25)


def _run(*words: str, result: Any, machine: BenchmarkMachine | None = MACHINE) -> BenchmarkRun:
    return BenchmarkRun(words, "2026-11-28", "0123456789abcdef+", machine, json.loads(json.dumps(result)))


def _latency() -> dict[str, Any]:
    samples = {
        "instant": LatencySamples([2.0, 2.0, 2.0], stages={"reclaim": [0.25]}, cpu_s=[0.5], uss_mib=[30.0]),
        "bare_metal": LatencySamples([0.5, 0.5, 0.5]),
    }
    return {
        "jobs": 3,
        "accelerator": "tcg",
        "kinds": {name: asdict(latency_result(one)) for name, one in samples.items()},
        "beside": [asdict(one) for one in beside_bare_metal(samples)],
    }


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def _slower(seconds: float) -> dict[str, Any]:
    """As `_latency`, but for instant clones."""
    samples = {"instant": LatencySamples([seconds] * 3), "bare_metal": LatencySamples([0.5, 0.5, 0.5])}
    return _latency() | {
        "kinds": {name: asdict(latency_result(one)) for name, one in samples.items()},
        "beside": [asdict(one) for one in beside_bare_metal(samples)],
    }


def test_a_run_is_compared_with_the_one_that_the_page_has() -> None:
    page = written("", [_run("latency", result=_latency())])
    column = "submission to first instruction, median"
    at, found = changes(page, _run("latency", result=_slower(3.0)))
    assert at == "2026-11-28"
    assert ChangedFigure("instant", column, "2.00 s (2.00 to 2.00)", "3.00 s (3.00 to 3.00)") in found
    assert {one.column for one in found} == {column, "× bare metal", "more than bare metal"}, (
        "only figures with intervals"
    )
    assert {one.row for one in found} == {"instant"}
    assert changes(page, _run("latency", result=_slower(2.1))) == ("2026-11-28", []), "a difference of 5 % is none"


def test_a_run_is_not_compared_with_another_command_or_machine() -> None:
    page, slower = written("", [_run("latency", result=_latency())]), _slower(3.0)
    assert changes(page, _run("latency", "--jobs", "3", result=slower)) == ("", [])
    assert changes(page, _run("latency", result=slower, machine=replace(MACHINE, cpus=4))) == ("", [])
    assert changes(page, _run("latency", result=slower, machine=None)) == ("", [])
    assert changes("", _run("latency", result=slower)) == ("", [])


def test_a_region_says_where_and_when_and_has_the_baseline_beside_each_figure() -> None:
    text = region(_run("latency", "--jobs", "3", result=_latency()))
    assert text.startswith(
        "`multiverse bench latency --jobs 3`, 2026-11-28, guests by tcg, commit 0123456789ab+, 2 CPUs (Some CPU), "
        "24 GiB, Slurm 22.05.8, QEMU 7.2.11, a load of 0.2 before it.\n"
    )
    heads, _, instant, bare = _rows(text)
    assert heads[:4] == ["kind", "submission to first instruction, median", "95th percentile", "× bare metal"]
    assert instant == [
        "instant", "2.00 s (2.00 to 2.00)", "2.00 s", "4.00 (4.00 to 4.00)", "1.50 s (1.50 to 1.50)", "0.50 s",
        "30.0 MiB",
    ]  # fmt: skip
    assert bare[3:] == ["1", "0", "–", "–"]
    assert "- instant, stages in ms: reclaim 250" in text


def test_a_burst_has_the_published_figures_beside_its_own_and_a_steady_one_is_another_region() -> None:
    samples = {"full_slim": BurstSamples([9.0], [10.0], {}, 10.0), "instant": BurstSamples([3.0], [4.0], {}, 4.0)}
    found = {
        "every": None,
        "kinds": {name: asdict(burst_result(one)) for name, one in samples.items()},
        "ratios": [asdict(one) for one in ratios(samples)],
        "paper": PAPER["burst"],
    }
    rows = {row[0]: row[1:] for row in _rows(region(_run("burst", "1", result=found)))}
    assert rows["full_slim"][2] == "3.0 (3.0 to 3.0)" and rows["instant"][2] == "1"
    assert rows["published: full"][:3] == ["260 s", "–", "7.2"]
    assert _run("burst", "1", result=found).name == "burst"
    assert _run("burst", "1", "--every", "10", result={**found, "every": 10.0}).name == "steady"


def test_throughput_has_bare_metal_and_what_the_published_clones_would_give() -> None:
    one = ThroughputResult(
        60.0, 30.0, 0.0625, {"task": 1.0, "free": 15.0}, 0, 0, 0.9, {"controller": 0.1}, "the stage join"
    )
    found = {
        "kinds": {"bare_metal": asdict(one), "instant": asdict(one)},
        "beside": {"instant": 0.5},
        "paper": paper(ThroughputPlan(30, 1.0, 8)),
    }
    text = region(_run("throughput", result=found))
    rows = {row[0]: row[1:] for row in _rows(text)}
    assert rows["bare_metal"][:3] == ["30.0", "100%", "6.2%"] and rows["instant"][1] == "50%"
    assert rows["instant"][-1] == "the stage join" and rows["published: instant"][0] == "13.0"
    assert "- instant, seconds of a CPU for each task: task 1.00, free 15.00" in text


def test_passes_are_beside_passes_over_all_rows() -> None:
    summary = {"n": 3, "mean": 2.0, "p50": 2.0, "p95": 3.0, "max": 4.0, "low": 1.0, "high": 3.0}
    one = {"jobs": 1000, "vms": 500, "hosts": 10} | dict.fromkeys(
        ("one_host", "unchanged", "equal", "one_ended"), summary
    )
    rows = _rows(region(_run("planner", result=[one | {"all_rows": {**summary, "p50": 20.0}}])))
    assert rows[2] == ["500", "1,000", *["2.0 ms (1.0 to 3.0)"] * 3, "20.0 ms (1.0 to 3.0)", "10.0"]


def test_a_long_queue_is_beside_bare_metal_and_the_empty_one() -> None:
    phase = {
        "name": "long",
        "start": [3.0, 1.0, 2.0],
        "bare": [0.5],
        "idle": {"controller": 0.01},
        "cycles": {"main": 500},
    }
    found = {"phases": [phase], "ratios": {"long": {"p50": {"value": 1.5, "low": 1.0, "high": 2.0}}}}
    text = region(_run("queue", result=found))
    assert _rows(text)[2] == ["long", "2.00 s", "0.50 s", "4.00", "1.0%", "–", "0.5 ms", "–"]
    assert "- long, p50 against the same without: 1.50 (1.00 to 2.00)" in text


def test_a_benchmark_without_a_table_of_its_own_has_all_its_figures() -> None:
    summary = {"n": 3, "mean": 2.0, "p50": 2.0, "p95": 3.0, "max": 4.0, "low": 1.0, "high": 3.0}
    rows = _rows(region(_run("viewers", result={"viewers": 200, "alone": {"cpu": 0.25, "pause": summary}})))
    assert rows[2:] == [["alone.cpu", "0.25", "–"], ["alone.pause.p50", "2", "1 to 3"]]


# --- the page --------------------------------------------------------------------------------------


def test_only_what_is_between_the_marks_is_written() -> None:
    page = "# Page\n\n<!-- measured: latency -->\nold\n<!-- end of measured -->\n\nProse.\n"
    found = written(page, [_run("latency", result=_latency())])
    assert found.startswith("# Page\n\n<!-- measured: latency -->\n`multiverse bench latency`")
    assert found.endswith("<!-- end of measured -->\n\nProse.\n") and "old" not in found
    assert written(found, [_run("latency", result=_latency())]) == found


def test_a_region_that_is_not_there_is_added_and_one_without_end_is_refused() -> None:
    found = written("# Page\n", [_run("latency", result=_latency())])
    assert found.startswith("# Page\n\n## Latency\n\n<!-- measured: latency -->\n") and regions(found) == ["latency"]
    with pytest.raises(Refused, match="the region of latency has no end"):
        written("<!-- measured: latency -->\n", [_run("latency", result=_latency())])


def test_a_run_that_was_kept_is_read_as_it_was() -> None:
    run = _run("latency", "--jobs", "3", result=_latency())
    assert read("any", json.loads(json.dumps(document(run))), "1970-01-01") == run
    plain = read("latency", _latency(), "2026-11-27")
    assert (plain.words, plain.at, plain.commit, plain.machine) == (("latency",), "2026-11-27", "", None)
    with pytest.raises(Refused, match="notes has no figures"):
        read("notes", {"a": "b"}, "")


# --- the command -----------------------------------------------------------------------------------


def test_files_become_regions_of_the_page(tmp_path: Path) -> None:
    page, file = tmp_path / "page.md", tmp_path / "latency.json"
    page.write_text("# Page\n\n<!-- measured: latency -->\n<!-- end of measured -->\n\nProse.\n")
    file.write_text(json.dumps(_latency()))
    done = CliRunner().invoke(build(), ["bench", "all", str(file), "--write", str(page)])
    assert done.exit_code == 0 and "page.md: latency\nlatency: not compared" in done.stdout
    assert "4.00 (4.00 to 4.00)" in page.read_text() and page.read_text().endswith("\n\nProse.\n")
    shown = CliRunner().invoke(build(), ["bench", "all", str(file)])
    assert "× bare metal" in shown.stdout
    file.write_text("no JSON")
    assert "has no JSON" in str(CliRunner().invoke(build(), ["bench", "all", str(file)]).exception)


def test_a_benchmark_is_run_and_kept_with_its_machine_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def measured(_where: str, _program: object, words: list[str], _lab: Path, _images: Path) -> dict[str, Any]:
        calls.append(words)
        return _latency()

    monkeypatch.setattr(command, "measure", measured)
    words = ["bench", "all", "--run", "latency --jobs 3", "--keep", f"{tmp_path}/kept", "--json"]
    done = CliRunner().invoke(build(), words)
    assert done.exit_code == 0 and calls == [["latency", "--jobs", "3"]]
    (one,) = json.loads(done.stdout)
    assert one == json.loads((tmp_path / "kept" / "latency.json").read_text())
    assert one["words"] == ["latency", "--jobs", "3"] and one["machine"]["cpus"] >= 1 and one["machine"]["memory"] > 0


def test_an_unknown_benchmark_is_refused_before_any_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("it has begun"))
    for unknown in ("nosuch", ""):
        done = CliRunner().invoke(build(), ["bench", "all", "--run", "burst 3", "--run", unknown])
        assert "names no benchmark" in str(done.exception)


def test_a_page_that_is_edited_while_benchmarks_run_keeps_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n")

    def measured(*_: object) -> dict[str, Any]:
        page.write_text(f"{page.read_text()}\nEdited.\n")
        return _latency()

    monkeypatch.setattr(command, "measure", measured)
    words = ["bench", "all", "--run", "latency", "--run", "latency --jobs 3", "--write", f"{page}"]
    assert CliRunner().invoke(build(), words).exit_code == 0
    assert page.read_text().count("Edited.") == 2 and "bench latency --jobs 3`" in page.read_text()
    gone = CliRunner().invoke(build(), ["bench", "all", "--run", "latency", "--write", f"{tmp_path}/none.md"])
    assert "cannot read" in str(gone.exception)


def test_the_page_has_regions_of_benchmarks_that_there_are() -> None:
    root = Path(__file__).parents[2]
    names = regions((root / "docs" / "benchmarks.md").read_text())
    known = {one.split()[0] for one in command.ALL} | {"steady", *(f"move-{how}" for how in HOW)}
    assert names and set(names) <= known and len(names) == len(set(names))


def test_moves_have_a_region_for_each_way_with_the_cpu_time_of_both_hosts() -> None:
    case = {"total": 0.5, "inside": 0.0, "outside": 0.11, "usual": 0.02, "sent": 134 << 20, "slowdown": 0.1,
            "cpu_old": 0.4, "cpu_new": 0.25, "cpu_agents": 0.125, "cpu_usual": 0.3, "samples": []}  # fmt: skip
    runs = [_run("move", "--how", how, result={"moves": 2, "how": how, "cases": {"small idle": case}})
            for how in ("private", "compressed")]  # fmt: skip
    assert regions(written("# Page", runs)) == ["move-private", "move-compressed"]
    _, _, first, *published = _rows(region(runs[0]))
    assert first == ["small idle", "0.50 s", "0.11 s", "0.02 s", "134 MiB", "10%", "0.40 + 0.25 + 0.12 s", "0.30 s"]
    assert [row[0] for row in published] == ["published: 500 MB (Sandia)", "published: idle 8 GiB (QEMU, KVM)"]


def test_saves_and_checkpoints_have_tables_of_their_own() -> None:
    seconds = {"start": 1.7, "frozen": 0.1, "requeued": 0.4, "written": 1.0, "at_disk_speed": 0.2, "resume": 2.5}
    saved = _run("save", result={"cases": {"288 MiB": {**seconds, "size_mib": 44.0}}})
    assert _rows(region(saved))[2] == ["288 MiB", "1.70 s", "0.10 s", "0.40 s", "1.00 s", "44 MiB", "0.20 s", "2.50 s"]
    case = {"total": 0.9, "pause": 0.2, "usual": 0.01, "size": 46 << 20, "slowdown": 0.34, "lost": 0.005}
    made = _run("checkpoint", result={"cases": {"small idle": case}})
    assert _rows(region(made))[2] == ["small idle", "0.90 s", "0.20 s", "0.01 s", "46 MiB", "34%", "0.5%"]


def test_sleeps_and_spreads_have_tables_of_their_own() -> None:
    case = {"asleep": 0.0, "first": 2.1, "middle": 2.5, "last": 3.0, "memory": 1400.0, "left": 1390.0}
    slept = _run("sleep", result={"jobs": 10, "cases": {"awake": case, "asleep": {**case, "asleep": 6.5, "left": 0.0}}})
    heads, _, awake, asleep = _rows(region(slept))
    assert heads[0] == "10 VMs"
    assert awake == ["awake", "–", "2.10 s", "2.50 s", "3.00 s", "1,400 MiB", "1,390 MiB"]
    assert asleep == ["asleep", "6.50 s", "2.10 s", "2.50 s", "3.00 s", "1,400 MiB", "0 MiB"]
    spread = _run("spread", result={"cases": {"2 VMs": {"frozen": 0.2, "spread": 0.05, "usual": 0.03, "resume": 2.0}}})
    assert _rows(region(spread))[2] == ["2 VMs", "0.20 s", "0.05 s", "0.03 s", "2.00 s"]
