"""`multiverse bench compare` runs two checkouts in turns, each with its own code, and leaves nothing of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse_lab.bench import checkouts
from tests.integration.images import BUILT

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROGRAM = Path(sys.executable).with_name("multiverse")


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mvc-") as made:
        Path(made).chmod(0o755)
        yield Path(made)
        assert {one.name for one in Path(made).iterdir()} <= {"images", "lock"}
        assert made not in checkouts.git("worktree", "list")


def _compare(directory: Path, *words: str) -> list[str]:
    return [str(PROGRAM), "bench", "compare", "HEAD", "--dir", f"{directory}", "--images", f"{BUILT}", "--json", *words]


def test_a_checkout_beside_itself_has_the_same_figures(directory: Path) -> None:
    done = subprocess.run(
        _compare(directory, "--only", "planner,burst", "--turns", "1"), capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["left_out"] == {} and found["old"] == found["new"].rstrip("+")
    names = {one["name"] for one in found["figures"]}
    assert "burst.instant.provisioning.p50" in names and "burst.instant.stages.reclaim" in names
    assert any(name.startswith("planner.") and name.endswith(".one_ended.p50") for name in names)
    for one in found["figures"]:
        assert len(one["old"]) == len(one["new"]) == 1


def test_a_lab_of_the_other_checkout_runs_the_other_code(directory: Path) -> None:
    work = directory / "t-test"
    work.mkdir()
    try:
        with checkouts.checked_out("HEAD", work, directory / "images", directory) as other:
            (program,) = other.program
            python = Path(program).with_name("python")
            code = "import multiverse_lab.lab.program as p; print(p.__file__, p.multiverse('daemon')[0])"
            done = subprocess.run([python, "-c", code], env={}, capture_output=True, text=True, check=True)
            assert done.stdout.split() == [f"{work}/tree/src/multiverse_lab/lab/program.py", program]
        assert not (work / "tree").exists()
    finally:
        subprocess.run(["rm", "-r", work], check=True)


def test_an_interrupted_comparison_leaves_nothing(directory: Path) -> None:
    running = subprocess.Popen(_compare(directory, "--only", "planner"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not list(directory.glob("t-*/venv/bin/multiverse")) and time.monotonic() < deadline:
        assert running.poll() is None
        time.sleep(0.1)
    time.sleep(1.0)  # asks whether both have the benchmark, or runs it
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode == 130
