"""VMs inside jobs on control groups of version 2 alone: in a machine of its own, which runs this checkout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration import unified_machine

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TESTS = "child_of_the_control_groups or killed_slurmd"


@pytest.mark.timeout(1500)
def test_jobs_have_vms_in_their_control_groups_of_version_2_and_leave_nothing(_images: None, tmp_path: Path) -> None:
    command = ["pytest", "-x", "-p", "no:cacheprovider", "tests/integration/test_job_ends.py", "-k", TESTS]
    code, said = unified_machine.run(tmp_path, command, 1400)
    assert code == 0 and re.search(r"\b2 passed\b", said), said[-6000:]
