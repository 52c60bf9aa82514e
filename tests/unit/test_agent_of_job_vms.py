"""An agent for VMs inside jobs alone: what it holds and does not hold, so that its node can be leased."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from multiverse import config
from multiverse.config import AgentSettings, JobVmSettings, QemuSettings, Settings
from multiverse.core.errors import Refused
from multiverse.drivers.qemu.driver import QemuHypervisor
from multiverse.pilot.lease import NODE_SHARE, share_of
from multiverse.service import agent
from multiverse.system.locks import is_locked


async def test_it_is_no_agent_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []
    applied: list[Settings] = []
    began = asyncio.Event()

    @contextlib.asynccontextmanager
    async def serve_jobs(settings: Settings) -> AsyncIterator[Callable[[Settings], None]]:
        served.append(settings)
        began.set()
        yield applied.append

    monkeypatch.setattr(agent, "serve_jobs", serve_jobs)
    monkeypatch.setattr(QemuHypervisor, "check", lambda self: None)
    settings = Settings(
        agent=AgentSettings(state_dir=tmp_path / "agent", socket=tmp_path / "agent.sock", sample=0),
        qemu=QemuSettings(uids=(5000, 1700), vms=tmp_path / "vms", run=tmp_path / "run", templates=tmp_path / "t"),
        job_vms=JobVmSettings(enabled=True, only=True),
    )
    (tmp_path / "m.toml").write_text('poll = 1.0\n[[mounts]]\nsource = "a:/b"\ntarget = "/b"\n')
    serving = asyncio.create_task(agent.serve(settings, tmp_path / "m.toml"))
    await asyncio.wait_for(began.wait(), 30)
    assert not is_locked(tmp_path / "agent" / "lock"), "a pilot refuses a node on which it is held"
    assert is_locked(tmp_path / "agent" / "jobs.lock") and not settings.agent.socket.exists()
    assert served[0].qemu.uids == share_of((5000, 1700), NODE_SHARE) == (6600, 100)
    with pytest.raises(Refused, match="another agent"):
        await agent.serve(settings)
    with capture_logs() as logs:
        os.kill(os.getpid(), signal.SIGHUP)
        while not any("restart" in line["event"] for line in logs):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert logs[1]["applied"] == "mounts" and "poll" in logs[2]["keys"], "and it goes on"
    assert [one.mounts[0].target for one in applied] == ["/b"]
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 30)
    assert not is_locked(tmp_path / "agent" / "jobs.lock")


def test_it_needs_something_to_serve(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"job_vms\.only"):
        config.parse({"job_vms": {"only": True}}, "test")
    assert config.parse({"job_vms": {"only": True, "enabled": True}}, "test").job_vms.only
