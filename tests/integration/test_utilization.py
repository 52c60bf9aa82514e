"""What a job uses is seen from outside of its VM, while it runs and afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from multiverse.client import Client
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import ended, latest, nothing_left, until

pytestmark = pytest.mark.integration

MIB = 300

BURN = f"""exec python3 -c "
import os
held = b'x' * ({MIB} << 20)
while not os.path.exists('burnt'):
    pass
" """


def test_a_job_that_burns_cpu_and_memory_shows_in_the_figures(lab: LabUnderTest, client: Client) -> None:
    job = lab.sbatch(BURN, "--mem=400", "--output=/dev/null")
    until("the job runs", lambda: latest(client, job).get("state") == "allocated")

    def used() -> dict[str, Any] | None:
        """What its VM uses now, once that includes the job's memory."""
        found = next((one for one in client.utilization() if one["job_id"] == job), None)
        now = found and found["now"]
        return found if now and now["memory"] > MIB and now["cpus"] > 0.3 else None

    try:
        shown = until("its VM is seen to burn", used)
    finally:
        (lab.user.home / "burnt").touch()
    assert shown["host"] == client.hosts()[0]["name"]
    host = client.utilization([shown["host"]])[0]
    assert host["kind"] == "host" and host["now"]["cpus"] > 0.3 and host["now"]["memory"] > MIB
    assert f'multiverse_vm_memory_used_bytes{{host="{shown["host"]}",vm="{shown["name"]}"}}' in client.metrics()
    ended(client, job, "done")
    nothing_left(lab, client)
