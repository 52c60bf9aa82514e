"""Saved jobs whose states are encrypted, unwritable or damaged: the whole way, with controller and agent."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse.core.model.saved import SavedState
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.services import AGENT
from tests.integration.conftest import LabUnderTest, StartDaemon, more_settings
from tests.integration.restarting_daemon import attempt_is
from tests.integration.test_save_command import BESIDE_THE_WAY, COUNTS, running, stored, went_on
from tests.integration.watch import accounted, ended, nothing_left, until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def _encrypted(lab: LabUnderTest, client: Client) -> Iterator[None]:
    with more_settings(lab, "[save]\nenabled = true\nencrypt = true\n"):
        yield


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    """Nothing can be written to a directory, also by root, while the context lasts."""
    subprocess.run(["mount", "--bind", str(place), str(place)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def saved(lab: LabUnderTest, client: Client, comment: str = "") -> tuple[str, Path]:
    """A job that is saved and held, and its output."""
    job, output = running(lab, client, comment=comment)
    client.save(job, hold=True)
    until("it is saved", lambda: stored(client, job))
    until("its VM is gone", lambda: not client.vms())
    return job, output


def test_a_job_whose_state_cannot_be_written_goes_on_in_place(lab: LabUnderTest, client: Client) -> None:
    with read_only(lab.where.root / "saved"):
        job, output = saved(lab, client)
        (shown,) = client.saved()
        assert shown["in_memory"] and shown["bytes"] == 0
        assert "is in the memory of" in json.dumps(client.explain(job))
    asyncio.run(AGENT.stop(lab.where))
    asyncio.run(lifecycle.up(lab.where, LabOptions()))
    assert stored(client, job)
    client.resume(job)
    went_on(lab, client, job, output)
    nothing_left(lab, client)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_it_goes_on_in_place_once_though_the_controller_is_killed_at_each_step(
    lab: LabUnderTest, start_daemon: StartDaemon, when: str
) -> None:
    steps = [state for state in SavedState if state is SavedState.KEEPING or state not in BESIDE_THE_WAY]
    daemon = start_daemon(())
    until("the daemon answers", lambda: daemon.call(lambda client: client.status()))
    job, output = running(lab, daemon.client, COUNTS.replace("0.5", "3"))
    daemon.set_crash_points([f"{when} saved:{state} controller" for state in steps])
    saving = lambda: daemon.call(lambda client: client.saved())  # noqa: E731
    with read_only(lab.where.root / "saved"):
        until("it is being saved", lambda: saving() or daemon.call(lambda client: client.save(job)))
        until(f"job {job} is over", lambda: attempt_is(daemon, job), 240)
    until("each step was reached", lambda: daemon.ensure_up() and not daemon.crash_points_left(), 60)
    went_on(lab, daemon.client, job, output)
    nothing_left(lab, daemon.client)


def held_by_damage(lab: LabUnderTest, client: Client, job: str) -> str:
    """Let the job go on, whose state is damaged, and wait until it is held. Why it is."""
    client.resume(job)

    def reason() -> str:
        (shown,) = [one for one in client.saved() if one["job_id"] == job]
        return str(shown["reason"]) if shown["held"] and "cannot go on" in shown["reason"] else ""

    until("it is held", lambda: reason() and stored(client, job))
    assert lab.run("squeue", "-hj", job, "-o", "%r").stdout.strip() == "JobHeldUser"
    until("its VM is gone", lambda: not client.vms())
    until("that is explained", lambda: reason() in json.dumps(client.explain(job)), 20)
    return reason()


@pytest.mark.slow
def test_a_job_whose_state_is_damaged_is_held_until_that_is_mended(lab: LabUnderTest, client: Client) -> None:
    job, output = saved(lab, client)
    (state,) = (lab.where.root / "saved").glob("*/state.zst")
    whole = state.read_bytes()
    assert whole.startswith(b"Salted__"), "it is encrypted"
    state.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "not as it was saved" in held_by_damage(lab, client, job)
    state.write_bytes(whole)
    (key,) = lab.where.root.rglob(f"saved-keys/{lab.user.uid}")
    key.rename(key.with_name("away"))
    assert "the key of user" in held_by_damage(lab, client, job)
    key.with_name("away").rename(key)
    client.resume(job)
    went_on(lab, client, job, output)
    nothing_left(lab, client)


def test_a_job_begins_anew_without_its_state_only_if_somebody_says_so(lab: LabUnderTest, client: Client) -> None:
    job, output = saved(lab, client)
    shutil.rmtree(next((lab.where.root / "saved").glob("[!.]*")))
    assert "is missing" in held_by_damage(lab, client, job)
    output.write_text("")
    client.resume(job, anew=True)
    ended(client, job, "done")
    assert output.read_text().splitlines()[:8] == [f"count {number}" for number in range(1, 9)]
    assert accounted(lab, job) == ("FAILED", "5:0") and client.saved() == []
    nothing_left(lab, client)


@pytest.mark.slow
def test_a_job_whose_user_agreed_begins_anew_by_itself(lab: LabUnderTest, client: Client) -> None:
    job, output = saved(lab, client, "vm:save,restart")
    shutil.rmtree(next((lab.where.root / "saved").glob("[!.]*")))
    output.write_text("")
    client.resume(job)
    ended(client, job, "done")
    assert output.read_text().splitlines()[:8] == [f"count {number}" for number in range(1, 9)]
    assert accounted(lab, job) == ("FAILED", "5:0") and client.saved() == []
    nothing_left(lab, client)
