"""The daemon's warning about an inbox to which slurmctld's user cannot write."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from multiverse.bundles.slurm.scheduler import warn_of_closed_inbox
from multiverse.config import Settings, SlurmSettings
from multiverse.drivers.slurm.submission import hints

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def settings() -> Iterator[Settings]:
    top = Path(tempfile.mkdtemp())  # pytest's own directories are closed to other users
    top.chmod(0o755)
    (top / "slurm.conf").write_text("SlurmUser=games\n")
    (top / "inbox").mkdir(mode=0o755)
    yield Settings(poll=0.01, slurm=SlurmSettings(conf=top / "slurm.conf", inbox=top / "inbox"))
    shutil.rmtree(top)


async def test_each_change_of_the_access_is_logged_once(settings: Settings) -> None:
    def events() -> list[str]:
        return [line["event"] for line in logs]

    async def until(count: int) -> None:
        while len(logs) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    with capture_logs() as logs:
        task = asyncio.create_task(warn_of_closed_inbox(settings, interval=0.01))
        await asyncio.wait_for(until(1), 30)
        assert events() == ["inbox not writable"] and "games" in logs[0]["reason"]
        await asyncio.sleep(0.1)
        assert len(logs) == 1, "the same reason is logged once"
        os.chown(settings.slurm.inbox, 5, -1)
        await asyncio.wait_for(until(2), 30)
        settings.slurm.conf.write_text("SlurmUser=nobody-at-all\n")
        await asyncio.wait_for(until(3), 30)
        task.cancel()
    assert events() == ["inbox not writable", "inbox writable again", "inbox not writable"]
    assert "nobody-at-all" in logs[2]["reason"]


async def test_a_file_server_that_gives_no_directory_away_does_not_end_the_daemon(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    (settings.slurm.inbox / "submit.7").touch()
    found = hints(settings.slurm.inbox, owner=5)
    assert (await asyncio.wait_for(anext(found), 30)).kind == "submit"
    await found.aclose()
