"""Settings that are read again: what is applied, what waits for a restart, and what a file with mistakes changes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from multiverse.client import Client
from multiverse.config import (
    FenceSettings,
    LeaseSettings,
    PacingSettings,
    PoolSettings,
    QemuSettings,
    Settings,
    SlurmSettings,
    changed_keys,
    load,
    parse,
    reloaded,
)
from multiverse.core.errors import Refused, Unreachable
from multiverse.service.reload import SettingsReload
from multiverse.system.interrupts import hold_reloads, reload_signal

RUNNING = Settings(lease=(LeaseSettings("a"), LeaseSettings("b", max=2)))


def test_keys_that_reload_applies_are_applied_and_others_are_named() -> None:
    new = replace(
        RUNNING,
        pacing=PacingSettings(spawn_timeout=7.0, reclaim_grace=9.0),
        fence=FenceSettings(command=("off", "{host}")),
        pool=(PoolSettings(min=4),),
        slurm=SlurmSettings(conf=Path("/x")),
        qemu=QemuSettings(vms=Path("/y")),
    )
    applied, waiting = reloaded(RUNNING, new)
    assert waiting == ["slurm.conf", "qemu.vms", "pacing.reclaim_grace"]
    assert applied == replace(RUNNING, pacing=PacingSettings(spawn_timeout=7.0), fence=new.fence, pool=new.pool)
    assert changed_keys(RUNNING, applied) == ["fence.command", "pacing.spawn_timeout", "pool"]
    assert reloaded(applied, RUNNING) == (RUNNING, []), "back to the file as it was: nothing waits"


def test_tables_of_an_array_are_compared_one_by_one_if_they_stand_for_the_same() -> None:
    new = replace(RUNNING, lease=(LeaseSettings("a", max=5), LeaseSettings("b", max=2, user="x")))
    applied, waiting = reloaded(RUNNING, new)
    assert [one.max for one in applied.lease] == [5, 2] and waiting == ["lease.2.user"]
    for other in ((LeaseSettings("a"),), (LeaseSettings("b", max=2), LeaseSettings("a", max=9))):
        assert reloaded(RUNNING, replace(RUNNING, lease=other)) == (RUNNING, ["lease"])


def test_what_would_contradict_the_running_settings_waits_as_a_whole() -> None:
    running = parse({"image": {"per_account": True}}, "x")
    new = parse({"pool": [{}], "pacing": {"attempts": 3}}, "x")
    assert reloaded(running, new) == (running, ["image.per_account", "pacing.attempts", "pool"])


class Applied:
    """Takes what is applied, unless it refuses that."""

    def __init__(self) -> None:
        self.settings: list[Settings] = []
        self.refuses = False
        self.once = asyncio.Event()

    def __call__(self, settings: Settings) -> None:
        if self.refuses:
            raise Refused("there is no such policy")
        self.settings.append(settings)
        self.once.set()


async def test_a_file_with_mistakes_changes_nothing_and_is_logged_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text("")
    reload, applied = SettingsReload(file, load(file)), Applied()
    reload.apply = applied
    for text, said in (("\n[pacing]\nattempts = 0\n", f"{file}:3: pacing.attempts: must be"), ("[[", "is not TOML")):
        file.write_text(text)
        with capture_logs() as logs:
            await reload.read()
        assert [line["log_level"] for line in logs] == ["info", "error"] and said in logs[1]["reason"]
        assert said in reload.mistakes and not applied.settings and reload.running == Settings()
    applied.refuses = True
    file.write_text("[pacing]\nattempts = 7\n")
    await reload.read()
    assert reload.mistakes == "there is no such policy" and reload.running == Settings()
    applied.refuses = False
    await reload.read()
    assert not reload.mistakes and applied.settings[-1].pacing.attempts == reload.running.pacing.attempts == 7


async def test_the_signal_lets_the_file_be_read_and_names_what_waits(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text("")
    reload, applied = SettingsReload(file, load(file)), Applied()
    reload.apply = applied
    task = asyncio.create_task(reload.run())
    file.write_text('[slurm]\nconf = "/x"\n[pacing]\nattempts = 7\n')
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.wait_for(applied.once.wait(), 30)
    assert reload.waiting == ("slurm.conf",) and reload.running.slurm == Settings().slurm
    task.cancel()


async def test_a_signal_is_kept_that_comes_while_a_process_starts() -> None:
    hold_reloads()
    signal.raise_signal(signal.SIGHUP)  # to this thread: others of the process may not hold it
    asked = reload_signal()
    await asyncio.wait_for(asked.wait(), 30)


# --- the daemon, with a simulated site ---------------------------------------------------------------

BASE = """\
state_dir = "{0}/state"
socket = "{0}/api.sock"
poll = 0.2
scheduler = "simulated-slurm"
platforms = ["simulated-hosts"]
"""


def eventually(look: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, look
        time.sleep(0.1)
    return found


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "m.toml").write_text(BASE.format(tmp_path))
    command = [Path(sys.executable).with_name("multiverse"), "daemon", "-c", tmp_path / "m.toml"]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stderr=log, text=True) as process:
        yield process
        process.kill()


def test_the_daemon_reads_its_settings_again(tmp_path: Path, daemon: subprocess.Popen[str]) -> None:
    file, before = tmp_path / "m.toml", BASE.format(tmp_path)

    def status() -> dict[str, Any]:
        try:
            with Client(tmp_path / "api.sock") as client:
                return client.status()
        except Unreachable:
            return {}

    def messages() -> list[str]:
        return [one["message"] for one in status()["alerts"] if one["kind"] == "settings"]

    eventually(status)
    file.write_text(before + "[[pool]]\nmin = 0\n")
    daemon.send_signal(signal.SIGHUP)
    (wrong,) = eventually(messages)
    assert f"{file}:6: pool.1: max must be at least 1" in wrong and not status()["pools"]

    file.write_text(before + '[[pool]]\nmin = 2\n[slurm]\nconf = "/x"\n[qemu]\nvms = "/y"\n')
    daemon.send_signal(signal.SIGHUP)
    eventually(lambda: status()["pools"])
    eventually(lambda: status()["vms"])
    assert messages() == ["settings changed that need a restart: slurm.conf, qemu.vms"]

    file.write_text(before + "[[pool]]\nmin = 2\n")
    daemon.send_signal(signal.SIGHUP)
    eventually(lambda: not messages())
    assert status()["pools"]
    daemon.terminate()
    assert daemon.wait(30) == 0
    assert "keys='slurm.conf, qemu.vms'" in (tmp_path / "log").read_text()
