"""Short soak tests in labs of their own: every job is judged, and nothing is left, also after an interruption. The
small disk of such a lab."""

from __future__ import annotations

import errno
import json
import os
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

from multiverse_lab.soak.disk import fill, small_disk
from tests.integration.images import CACHE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
slow = pytest.mark.slow

IMAGES = CACHE / "plain"
"""The images as the command builds them. Those of the other tests have more packages."""

PROGRAM = Path(sys.executable).with_name("multiverse")


@pytest.fixture
def directory() -> Iterator[Path]:
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


@slow
def test_a_short_soak_test_keeps_all_promises_and_leaves_nothing(directory: Path) -> None:
    found = finish(start(directory, 3))
    assert not found["stopped"] and sum(sum(kind.values()) for kind in found["jobs"].values()) > 10
    assert found["incidents"] and all(one["count"] for one in found["incidents"].values())
    assert not (directory / "lab/run").exists() and not (directory / "lab/state.disk").exists()


@slow
def test_an_interrupted_soak_test_judges_its_jobs_and_leaves_nothing(directory: Path) -> None:
    process = start(directory, 30)
    records = directory / "lab/home/records"
    deadline = time.monotonic() + 900
    while not list(records.glob("*.record")):
        assert process.poll() is None and time.monotonic() < deadline, "no job started"
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    found = finish(process)
    assert found["stopped"] and found["jobs"]
    assert not (directory / "lab/run").exists()


def test_a_small_disk_gets_full_and_is_taken_away(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    with small_disk(directory):
        fill(directory / "filler")
        with pytest.raises(OSError) as caught:
            (directory / "more").write_bytes(bytes(1 << 20))
        assert caught.value.errno == errno.ENOSPC
        (directory / "filler").unlink()
        (directory / "more").write_bytes(bytes(1 << 20))
    assert not os.path.ismount(directory) and list(tmp_path.iterdir()) == [directory]


IN_A_NAMESPACE = """\
import os, sys
from pathlib import Path
from multiverse_lab.lab.users import enter_private_namespace
from multiverse_lab.soak.disk import small_disk
with small_disk(Path(sys.argv[1])):
    enter_private_namespace()
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("ending", ["normal", "killed"])
def test_a_small_disk_is_mounted_outside_of_the_private_namespace_too(tmp_path: Path, ending: str) -> None:
    directory = tmp_path / "state"
    done = subprocess.run([sys.executable, "-c", IN_A_NAMESPACE, directory, ending], check=False)
    assert (done.returncode, os.path.ismount(directory)) == ((0, False) if ending == "normal" else (-9, True))
    with small_disk(directory):
        assert os.path.ismount(directory)
    assert not os.path.ismount(directory), "what the killed one left is taken away, too"
