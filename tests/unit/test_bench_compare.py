"""What `multiverse bench compare` finds in the JSON of benchmarks, and when it says that a figure has changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from multiverse.cli.commands import build
from multiverse.core.errors import Broken, Refused
from multiverse_lab.bench import checkouts, figures
from multiverse_lab.bench.checkouts import Checkout
from multiverse_lab.bench.figures import Figure, better, compare, flatten, only_in
from multiverse_lab.cli import compare as command

SUMMARY = {"n": 3, "mean": 2.0, "p50": 1.5, "p95": 3.0, "max": 4.0, "low": 1.0, "high": 2.0}
LATENCY = {
    "jobs": 3,
    "seed": 1,
    "machine": {"cpus": 2},
    "note": "words",
    "kinds": {
        "instant": {"submit_to_start": SUMMARY, "stages": {"reclaim": 0.25, "join.plug": 0.5}, "cpu_s": None},
    },
    "beside": [{"kind": "instant", "ratio": {"value": 2.0, "low": 1.0, "high": 3.0}}],
    "plugging": {"plug": {"value": 0.1, "low": 0.0, "high": 0.2}},
}


def test_a_figure_is_named_by_its_path_and_what_was_asked_for_is_none() -> None:
    assert flatten("latency", LATENCY) == {
        "latency.instant.submit_to_start.p50": Figure(1.5, 1.0, 2.0),
        "latency.instant.stages.reclaim": Figure(0.25, 0.25, 0.25),
        "latency.instant.stages.join_plug": Figure(0.5, 0.5, 0.5),
    }


def test_of_samples_there_is_the_median_and_phases_are_known_by_their_names() -> None:
    phases = [{"name": "empty again", "start": [1.0, 3.0, 2.0], "idle": {"controller": 0.01}, "bare": []}]
    assert {name: one.value for name, one in flatten("queue", {"waiting": 5, "phases": phases}).items()} == {
        "queue.empty_again.start.p50": 2.0,
        "queue.empty_again.idle.controller": 0.01,
    }


def test_several_without_a_name_are_known_by_what_was_counted() -> None:
    rows = [{"jobs": jobs, "vms": 10, "hosts": 1, "equal": SUMMARY} for jobs in (100, 200)]
    assert list(flatten("planner", rows)) == [
        "planner.1_hosts_100_jobs_10_vms.equal.p50",
        "planner.1_hosts_200_jobs_10_vms.equal.p50",
    ]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("latency.instant.submit_to_start.p50", "less"),
        ("latency.instant.uss_mib", "less"),
        ("throughput.instant.tasks_per_minute", "more"),
        ("throughput.instant.computing", "more"),
        ("throughput.instant.stages.join", "less"),
        ("throughput.instant.daemons.controller", "neither"),
        ("queue.empty.idle.controller", "less"),
        ("density.6_vms.available", "more"),
        ("density.6_vms.shared", "neither"),
    ],
)
def test_which_way_a_figure_is_better(name: str, wanted: str) -> None:
    assert better(name) == wanted


def _turns(name: str, *values: float, by: float = 0.0) -> list[dict[str, Figure]]:
    return [{name: Figure(value, value - by, value + by)} for value in values]


def _verdict(name: str, old: tuple[float, ...], new: tuple[float, ...], by: float = 0.0) -> str:
    (one,) = compare(_turns(name, *old, by=by), _turns(name, *new, by=by))
    return one.verdict


def test_a_figure_has_changed_when_its_turns_do_not_overlap_and_it_differs_enough() -> None:
    assert _verdict("a.seconds", (1.0, 1.1, 1.2), (1.5, 1.6, 1.7)) == "worse"
    assert _verdict("a.seconds", (1.5, 1.6, 1.7), (1.0, 1.1, 1.2)) == "better"
    assert _verdict("a.tasks_per_minute", (1.0, 1.1, 1.2), (1.5, 1.6, 1.7)) == "better"
    assert _verdict("a.shared", (1.0, 1.1, 1.2), (1.5, 1.6, 1.7)) == "changed"
    assert _verdict("a.seconds", (1.0, 1.1, 1.55), (1.5, 1.6, 1.7)) == "", "the turns overlap"
    assert _verdict("a.seconds", (1.0, 1.01, 1.02), (1.05, 1.06, 1.07)) == "", "less than the threshold"


def test_the_intervals_of_a_benchmark_count_too() -> None:
    assert _verdict("a.seconds", (1.0, 1.1), (1.5, 1.6), by=0.1) == "worse"
    assert _verdict("a.seconds", (1.0, 1.1), (1.5, 1.6), by=0.3) == ""


def test_one_turn_tells_nothing_even_with_an_interval() -> None:
    assert _verdict("a.seconds", (1.0,), (9.0,)) == ""
    assert _verdict("a.seconds", (1.0,), (9.0,), by=0.5) == ""
    assert _verdict("a.seconds", (1.0, 1.0), (9.0,), by=0.5) == ""


def test_a_number_that_never_differs_is_no_figure_and_zero_has_no_ratio() -> None:
    assert compare(_turns("a.again", 0.0, 0.0), _turns("a.again", 0.0, 0.0)) == []
    (one,) = compare(_turns("a.again", 0.0, 0.0), _turns("a.again", 2.0, 3.0))
    assert one.ratio is None and one.verdict == "worse"


def test_figures_of_one_side_alone_are_named() -> None:
    old, new = _turns("a", 1.0), [{"a": Figure(1.0, 1.0, 1.0), "b": Figure(1.0, 1.0, 1.0)}]
    assert only_in(new, old) == ["b"] and only_in(old, new) == []


# --- checkouts -------------------------------------------------------------------------------------


def test_the_other_environment_has_the_other_code_and_the_packages_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "src" / "multiverse" / "cli").mkdir(parents=True)
    for package in ("multiverse", "multiverse/cli"):
        (tmp_path / "src" / package / "__init__.py").touch()
    (tmp_path / "src" / "multiverse" / "cli" / "main.py").write_text(
        "import sys, typer\ndef main():\n    print(__file__, sys.executable, typer.__name__)\n"
    )
    (program,) = checkouts.environment(tmp_path / "src", tmp_path / "venv")
    done = subprocess.run([program], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=True)
    assert done.stdout.split() == [
        f"{tmp_path}/src/multiverse/cli/main.py", f"{tmp_path}/venv/bin/python", "typer",
    ]  # fmt: skip


def test_code_that_is_in_no_checkout_is_refused_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkouts.multiverse, "__file__", f"{tmp_path}/src/multiverse/__init__.py")
    with pytest.raises(Refused, match="belongs to no git checkout") as refused:
        checkouts.root()
    assert refused.value.hint and "git clone" in refused.value.hint


def test_only_the_images_that_were_used_last_are_kept(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"commit{number}").mkdir()
        time = 1000 + number
        subprocess.run(["touch", "-d", f"@{time}", tmp_path / f"commit{number}"], check=True)
    checkouts._forget_others(tmp_path, tmp_path / "commit0")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["commit0", "commit3", "commit4"]


def test_the_images_of_this_checkout_are_copied_once(tmp_path: Path) -> None:
    like, own = tmp_path / "like", tmp_path / "own"
    for name in ("slim", "stock"):
        (like / name).mkdir(parents=True)
        (like / name / "image.json").write_text("first")
    own.mkdir()
    checkouts._copy_images(like, own)
    assert [one.name for one in own.iterdir()] == ["slim"], "no short benchmark uses the other"
    (like / "slim" / "image.json").write_text("second")
    checkouts._copy_images(like, own)
    assert (own / "slim" / "image.json").read_text() == "first", "it is the other checkout's by now"


def _program(path: Path, text: str) -> Checkout:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return Checkout("abc", "abc", (str(path),), path, path)


def test_a_benchmark_or_an_option_that_a_checkout_has_not_yet_is_named(tmp_path: Path) -> None:
    one = _program(tmp_path / "one", "import sys\nprint('--tasks')\nsys.exit(sys.argv[2] != 'throughput')\n")
    assert checkouts.knows(one, ["throughput", "--tasks", "5"]) == ""
    assert checkouts.knows(one, ["throughput", "--tasks", "5", "--kinds", "x"]) == "abc has no --kinds there"
    assert checkouts.knows(one, ["burst", "8"]) == "abc has no such benchmark"


def test_a_benchmark_that_fails_is_named_with_what_it_said(tmp_path: Path) -> None:
    text = (
        "import sys\nif '--help' in sys.argv:\n    sys.exit()\n"
        "print('  bench x (5 s)', file=sys.stderr)\nsys.exit('multiverse: no lab')\n"
    )
    with pytest.raises(Broken, match=r"bench planner of abc failed: multiverse: no lab \(run it alone"):
        command._measure(_program(tmp_path / "one", text), "planner")


# --- the command -----------------------------------------------------------------------------------


def test_benchmarks_that_are_not_short_are_refused() -> None:
    assert command.chosen("planner, burst") == ["planner", "burst"]
    with pytest.raises(Refused, match="no short benchmark: injob"):
        command.chosen("planner,injob")


def test_a_revision_that_there_is_not_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    done = CliRunner().invoke(build(), ["bench", "compare", "no-such-revision", "--dir", str(tmp_path / "d")])
    assert "no commit 'no-such-revision' here" in str(done.exception) and not (tmp_path / "d").exists()


@pytest.mark.parametrize(("verdict", "status"), [("worse", 1), ("better", 0), ("", 0)])
def test_with_fail_something_worse_ends_with_status_1(
    verdict: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = {"name": "a.b", "old": [1.0], "new": [2.0], "ratio": 2.0, "verdict": verdict}
    found: dict[str, Any] = {
        "rev": "abc", "old": "abc", "new": "def", "turns": 1, "threshold": figures.THRESHOLD,
        "left_out": {"queue": "abc has no such benchmark"}, "figures": [figure], "only_old": [], "only_new": ["a.c"],
    }  # fmt: skip
    monkeypatch.setattr(command, "_compare", lambda *_: found)
    monkeypatch.setattr(checkouts, "commit_of", lambda revision: revision)
    words = ["bench", "compare", "abc", "--only", "planner"]
    done = CliRunner().invoke(build(), [*words, "--fail"])
    assert done.exit_code == status
    assert "queue is left out: abc has no such benchmark" in done.stdout and "only in this checkout: a.c" in done.stdout
    printed = CliRunner().invoke(build(), [*words, "--json"])
    assert printed.exit_code == 0 and json.loads(printed.stdout)["figures"] == [figure]
