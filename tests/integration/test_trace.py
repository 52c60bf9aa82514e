"""A trace of real Slurm and real QEMU, replayed against the fakes: these give the same answers and show the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse_lab.lab.services import CONTROLLER
from multiverse_lab.simulation.replay import replay
from tests.integration.conftest import LabUnderTest, more_settings
from tests.integration.watch import ended, kill, latest, nothing_left, qemu_of, until

pytestmark = pytest.mark.integration


@pytest.fixture
def trace(lab: LabUnderTest, controller: Callable[[], int]) -> Iterator[Path]:
    """The path of the trace of the lab's controller, which is restarted with `trace` in its settings."""
    path = lab.where.log / "trace"
    with more_settings(lab, f'trace = "{path}"\n'):
        yield path


@pytest.mark.slow
def test_a_trace_of_real_jobs_replays_against_the_fakes(lab: LabUnderTest, trace: Path) -> None:
    client = Client(lab.settings.socket)
    runs = lab.sbatch("true", "--output=/dev/null")
    fails = lab.sbatch("exit 3", "--output=/dev/null")
    ended(client, runs, "done")
    ended(client, fails, "done")
    cancelled = lab.sbatch("sleep 600", "--output=/dev/null")
    until("it runs", lambda: latest(client, cancelled).get("state") == "allocated")
    lab.run("scancel", cancelled, user=lab.user)
    ended(client, cancelled, "done")
    held = lab.sbatch("true", "--output=/dev/null", "--hold")
    until("it is seen held", lambda: any(f'"{held}":' in line and '"held":true' in line for line in lines(trace)))
    lab.run("scontrol", "release", held, user=lab.user)
    ended(client, held, "done")
    killed = lab.sbatch("sleep 600", "--output=/dev/null", "--requeue")
    row = until("it runs", lambda: (r := latest(client, killed)).get("state") == "allocated" and r)
    kill(qemu_of(row["vms"][0]))
    until("its attempt is over", lambda: client.jobs(killed)[0]["state"] == "requeued", 60)
    until("it runs again", lambda: latest(client, killed).get("state") == "allocated")
    lab.run("scancel", killed, user=lab.user)
    ended(client, killed, "done")
    nothing_left(lab, client)
    asyncio.run(CONTROLLER.stop(lab.where))
    assert replay(lines(trace)) == []


def lines(trace: Path) -> list[str]:
    return trace.read_text().splitlines()
