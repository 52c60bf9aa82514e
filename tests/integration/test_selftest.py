"""`multiverse selftest` on the real lab: nothing is wrong, and nothing is left; and what is wrong is told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from multiverse.site.selftest import JOBS
from tests.integration.conftest import LabUnderTest

pytestmark = pytest.mark.integration


def selftest(lab: LabUnderTest, *words: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("multiverse"))
    argv = [program, "selftest", "--config", str(lab.where.settings), "--user", lab.user.name, *words]
    return subprocess.run(argv, env=lab.env | {"COLUMNS": "80"}, capture_output=True, text=True, timeout=600)


def test_five_jobs_end_as_they_should_and_leave_nothing(lab: LabUnderTest, controller: Callable[[], int]) -> None:
    done = selftest(lab)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line[2:] for line in done.stdout.splitlines() if line.startswith("✓")][-4:] == [
        f"{what} that are left" for what in ("jobs", "VMs", "nodes", "files")
    ]
    assert done.stdout.count("✓") == len(JOBS) + 4 and "0 wrong." in done.stdout
    assert "The web page" in done.stdout and max(map(len, done.stdout.splitlines())) <= 80


def test_a_job_that_does_not_end_in_time_is_named_and_ended(lab: LabUnderTest, controller: Callable[[], int]) -> None:
    done = selftest(lab, "--limit", "1", "--json")
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert done.returncode == 1 and not found["batch"]["fine"] and "see multiverse explain" in found["batch"]["said"]
    assert found["jobs that are left"]["fine"] and found["VMs that are left"]["fine"], found
