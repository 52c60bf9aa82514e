"""`multiverse status` and `multiverse repair` on the real lab: an alert is shown, repaired, and gone."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from multiverse.client import Client
from multiverse_lab.lab.services import CONTROLLER
from tests.integration.conftest import LabUnderTest
from tests.integration.test_jobs import accounted, ended, latest, nothing_left, until

pytestmark = pytest.mark.integration


def multiverse(lab: LabUnderTest, *words: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("multiverse"))
    return subprocess.run([program, *words], env=lab.env, capture_output=True, text=True, timeout=300)


def shown_alerts(lab: LabUnderTest) -> list[dict[str, Any]]:
    done = multiverse(lab, "status", "--json")
    found: list[dict[str, Any]] = json.loads(done.stdout)["alerts"]
    assert done.returncode == (1 if found else 0), done.stderr
    return found


@pytest.fixture
def dud(lab: LabUnderTest) -> Iterator[Path]:
    """An image whose kernel does not boot."""
    images = lab.settings.qemu.images
    path = images / f"dud{os.getpid()}"
    path.mkdir()
    try:
        about = json.loads((images / "slim" / "image.json").read_text())
        (path / "image.json").write_text(json.dumps(about | {"name": path.name}))
        (path / "disk.raw").symlink_to(images / "slim" / "disk.raw")
        shutil.copy(images / "slim" / "initrd.img", path)
        (path / "vmlinuz").write_bytes(b"no kernel" * 1000)
        yield path
    finally:
        shutil.rmtree(path)


@pytest.mark.slow
def test_a_broken_template_is_shown_and_repaired(lab: LabUnderTest, controller: Callable[[], int], dud: Path) -> None:
    controller()
    client = Client(lab.settings.socket)
    until("both sources have been observed", lambda: all(s["known"] for s in client.status()["sources"]))
    assert shown_alerts(lab) == []
    assert multiverse(lab, "template", "build", dud.name).returncode == 1
    (one,) = shown_alerts(lab)
    assert one["kind"] == "template" and dud.name in one["message"]

    again = multiverse(lab, "repair", one["name"], "--yes")
    assert again.returncode == 1 and "not repaired" in again.stdout, again
    shutil.copy(lab.settings.qemu.images / "slim" / "vmlinuz", dud)
    repaired = multiverse(lab, "repair", one["name"], "--yes")
    assert repaired.returncode == 0 and "is repaired" in repaired.stdout, repaired
    assert shown_alerts(lab) == []
    assert multiverse(lab, "template", "drop", dud.name).returncode == 0


def test_a_quarantined_record_is_shown_and_repaired(lab: LabUnderTest, controller: Callable[[], int]) -> None:
    controller()
    client = Client(lab.settings.socket)
    go = lab.user.home / "go-on"
    job = lab.sbatch(f"until [ -e {go} ]; do sleep 0.2; done", "--output=/dev/null")
    until("it runs", lambda: latest(client, job).get("state") == "allocated")
    asyncio.run(CONTROLLER.stop(lab.where))
    with closing(sqlite3.connect(lab.settings.state_dir / "multiverse.db")) as database, database:
        database.execute(
            "UPDATE attempts SET body = json_set(body, '$.quarantined', json(?)) WHERE live = 1 AND job_id = ?",
            ('{"kind": "said", "figures": [["text", "for the test"]]}', job),
        )
    controller()
    (one,) = until("it is shown", lambda: shown_alerts(lab))
    assert one["jobs"] == [job] and "for the test" in one["message"]
    assert multiverse(lab, "repair", "--dry-run").returncode == 0 and shown_alerts(lab) == [one]
    repaired = multiverse(lab, "repair", "--yes")
    assert repaired.returncode == 0 and "is repaired" in repaired.stdout, repaired
    assert shown_alerts(lab) == [] and latest(client, job)["state"] == "allocated"
    go.touch()
    ended(client, job, "done")
    assert accounted(lab, job) == ("COMPLETED", "0:0") and len(client.jobs(job)) == 1
    nothing_left(lab, client)
