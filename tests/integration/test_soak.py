"""Short soak tests in labs of their own: every job is judged, and nothing is left, also after an interruption."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.images import IMAGES, slim

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAM = Path(sys.executable).with_name("multiverse")


@pytest.fixture
def directory() -> Iterator[Path]:
    slim()
    made = Path(tempfile.mkdtemp(prefix="mvsoak-"))
    made.chmod(0o755)
    yield made
    subprocess.run([PROGRAM, "lab", "down", "--dir", f"{made}/lab"], check=False, capture_output=True)
    shutil.rmtree(made)


def start(directory: Path, minutes: float) -> subprocess.Popen[str]:
    words = ["soak", "--seed", "3", "--minutes", f"{minutes}", "--dir", f"{directory}/lab", "--images", f"{IMAGES}"]
    return subprocess.Popen([PROGRAM, *words, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate(timeout=1500)
    assert process.returncode == 0, out + errors
    found: dict[str, Any] = json.loads(out)
    assert found["seed"] == 3 and not found["violations"] and not found["left"]
    return found


def test_a_short_soak_test_keeps_all_promises_and_leaves_nothing(directory: Path) -> None:
    found = finish(start(directory, 3))
    assert not found["stopped"] and sum(sum(kind.values()) for kind in found["jobs"].values()) > 10
    assert found["incidents"] and all(one["count"] for one in found["incidents"].values())
    assert not (directory / "lab/run").exists() and not (directory / "lab/state.disk").exists()


def test_an_interrupted_soak_test_judges_its_jobs_and_leaves_nothing(directory: Path) -> None:
    process = start(directory, 30)
    records = directory / "lab/home/records"
    deadline = time.monotonic() + 300
    while not list(records.glob("*.record")):
        assert process.poll() is None and time.monotonic() < deadline, "no job started"
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    found = finish(process)
    assert found["stopped"] and found["jobs"]
    assert not (directory / "lab/run").exists()
