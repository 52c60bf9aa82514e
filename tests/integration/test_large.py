"""A job with many times the memory of its template: nearly all of it is plugged, and none of it touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from multiverse.client import Client
from tests.integration.conftest import LabUnderTest, more_settings
from tests.integration.watch import ended, nothing_left, until, written

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def controller(lab: LabUnderTest, controller: Callable[[], int]) -> Iterator[Callable[[], int]]:
    """The host declares more than the machine has, while this module's test runs."""
    with more_settings(lab, "[host]\nmemory = 40960\n"):
        yield controller


def test_32_gib_are_plugged_into_a_template_of_256_mib(lab: LabUnderTest, client: Client) -> None:
    out = lab.user.home / "large.out"
    script = "awk '/MemTotal/{print int($2/1024)}' /proc/meminfo; until [ -e ~/seen ]; do sleep 0.2; done"
    (lab.user.home / "seen").unlink(missing_ok=True)
    job = lab.sbatch(script, f"--output={out}", "--mem=32G")
    until("the job says what it has", lambda: out.exists() and out.read_text())
    (vm,) = [vm for vm in client.vms() if vm["job_id"] == job]
    (lab.user.home / "seen").touch()
    ended(client, job, "done")
    assert int(written(out)) >= 32768
    assert vm["memory"] >= 32768 and vm["private"] < 2048, "plugged memory is anonymous, and allocated on use"
    nothing_left(lab, client)
