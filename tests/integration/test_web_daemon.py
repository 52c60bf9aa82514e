"""The web page of a real daemon: what it shows of a job, who reaches it, what views cost, and how the daemon stops."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from multiverse.client import Client
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.services import CONTROLLER
from tests.integration.conftest import LabUnderTest, more_settings
from tests.integration.test_jobs import latest, until

pytestmark = pytest.mark.integration

VIEWERS = 30
WATCHED = 8.0
"""Seconds for which processes are counted."""


@pytest.fixture(scope="module")
def web(lab: LabUnderTest, _images: None) -> Iterator[Path]:
    """The socket of the web page of the lab's controller."""
    path = lab.where.run / "web.sock"
    with more_settings(lab, f'[web]\nlisten = "{path}"\n'):
        yield path


def viewer(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://page", timeout=60)


def test_a_job_is_shown_with_its_host_and_its_timeline(lab: LabUnderTest, web: Path) -> None:
    client, name = Client(lab.settings.socket), "<i>x</i> & y"
    job = lab.sbatch("sleep 600", f"--job-name={name}", "--output=/dev/null")
    until("it runs", lambda: latest(client, job).get("state") == "allocated")
    with viewer(web) as page:
        assert "<mv-jobs" in page.get("/").text

        def shown() -> dict[str, object]:
            return {one["job_id"]: one for one in page.get("/snapshot").json()["jobs"]}.get(job, {})

        until("the page shows it", lambda: shown().get("stage") == "running")
        assert (shown()["name"], shown()["user"]) == (name, lab.user.name)
        everything = page.get("/snapshot").json()
        assert [vm["host"] for vm in everything["vms"] if vm["job_id"] == job] == [everything["hosts"][0]["name"]]
        assert everything["hosts"][0]["claimed"]["cpus"] >= 1
        assert everything["summary"]["rates"]["latencies"]["start"]["count"] >= 1
        phases = [phase["name"] for phase in page.get(f"/timeline/{job}").json()[0]["phases"]]
        assert phases == ["queued", "clone", "join", "launch", "run"]
        assert page.get(f"/explain/{job}").json()["jobs"][0]["state"] == "allocated"
        assert "multiverse_phase_seconds_count" in page.get("/metrics").text
    lab.run("scancel", job)
    log = (lab.where.log / "controller.log").read_text()
    moves = [line for line in log.splitlines() if "'moved'" in line and f"job='{job}'" in line]
    entered = [line.partition("new='")[2].partition("'")[0] for line in moves if "row='attempt" in line]
    assert entered[:5] == ["queued", "claimed", "spawning", "spawned", "allocated"]


@pytest.mark.parametrize("who", ["other", "nobody"])
def test_nobody_but_root_and_the_group_reaches_the_page(lab: LabUnderTest, web: Path, who: str) -> None:
    uid = lab.other.uid if who == "other" else 65534
    code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    python = shutil.which("python3", path="/usr/bin")  # that of this environment may be where users cannot go
    assert python is not None
    done = subprocess.run(
        [python, "-c", code, str(web)], user=uid, group=uid, extra_groups=[], capture_output=True, text=True,
        check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode != 0
    assert "Permission" in done.stderr


@pytest.mark.slow
def test_views_run_no_command_of_slurm(lab: LabUnderTest, web: Path) -> None:
    client = Client(lab.settings.socket)

    def squeues() -> float:
        lines = client.metrics().splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith('multiverse_processes_total{program="squeue')
        )

    def counted() -> float:
        before = squeues()
        time.sleep(WATCHED)
        return squeues() - before

    idle = counted()
    over, threads = threading.Event(), []

    def look() -> None:
        with viewer(web) as page:
            while not over.is_set():
                page.get("/snapshot")
                page.get("/")
                page.get("/timeline/1")
                over.wait(0.3)

    for _ in range(VIEWERS):
        threads.append(threading.Thread(target=look))
        threads[-1].start()
    viewed = counted()
    over.set()
    for thread in threads:
        thread.join()
    assert viewed <= idle + 3, "as often as without any viewer"


def test_the_daemon_stops_while_somebody_looks(lab: LabUnderTest, web: Path) -> None:
    with viewer(web) as page, page.stream("GET", "/events") as events:
        lines = events.iter_lines()
        assert next(lines) == "event: snapshot"
        next(lines)
        assert json.loads(next(lines).removeprefix("data: "))["summary"]["site"]
        asyncio.run(CONTROLLER.stop(lab.where))
        for _ in lines:
            pass
    assert not web.exists()
    asyncio.run(lifecycle.up(lab.where, LabOptions()))
    with viewer(web) as page:
        assert page.get("/snapshot").json()["number"] >= 1
