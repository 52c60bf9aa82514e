"""The lab comes up, restarts dead services, and goes down."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from multiverse.cli.commands import INTERRUPTED
from multiverse.config import QemuSettings
from multiverse.host import process
from multiverse_lab.lab import baremetal, lifecycle
from multiverse_lab.lab.hosts import control_groups
from multiverse_lab.lab.layout import Layout, layout
from multiverse_lab.lab.plan import LabOptions, load
from multiverse_lab.lab.services import Lab
from multiverse_lab.soak import leftovers
from tests.integration.images import BUILT, IMAGES, plain, slim
from tests.integration.watch import kept_by_slurm, kill, until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_controller")]


LEFT_OUT = ("controller", "agent")
"""The services that `controller=False` leaves out."""

_BUILDS = """
import asyncio, sys
from dataclasses import replace
from pathlib import Path
from multiverse import config
from multiverse.core.model.basics import Size
from multiverse.core.model.vm import TemplateKey
from multiverse.drivers.qemu.driver import QemuHypervisor

settings = config.load(Path(sys.argv[1]))
settings = replace(settings, qemu=replace(settings.qemu, accel="tcg"))
template = TemplateKey(settings.host.name, "slim", Size(1, settings.qemu.base_memory))
asyncio.run(QemuHypervisor(settings, "dead0").build_template(template))
"""


def _makers(where: Layout) -> set[int]:
    """The QEMU processes that build a template of that lab."""
    works = where.memory.glob(f".slim@1x{QemuSettings().base_memory}.building-*")
    return {found.pid for work in works for found in process.find_by_argument(f"mem-path={work / 'memory'}")}


async def test_lab_up_starts_only_services_that_do_not_run(lab: Any) -> None:
    before, plan = lifecycle.status(lab.where), load(lab.where)
    words: dict[str, str] = {}
    await lifecycle.up(lab.where, LabOptions(), lambda name, word, _: words.__setitem__(name, word), controller=False)
    assert set(words.values()) == {"exists", "runs"}
    assert lifecycle.status(lab.where) == before

    submitted = time.time()
    job_id = lab.sbatch("true", "--hold")
    await asyncio.to_thread(kept_by_slurm, lab, submitted)
    for name in ("slurmctld", "munged"):
        kill(before[name]["pid"])
    assert not lifecycle.status(lab.where)["slurmctld"]["alive"]
    await lifecycle.up(lab.where, LabOptions(), lambda name, word, _: words.__setitem__(name, word), controller=False)
    assert (words["slurmctld"], words["munged"], words["mariadb"]) == ("started", "started", "runs")
    assert load(lab.where) == plan
    assert lab.run("squeue", "-h", "-j", job_id, "-o", "%i").stdout.strip() == job_id
    lab.run("scancel", job_id)


async def test_users_can_use_the_lab_and_read_no_secret(lab: Any) -> None:
    assert lab.run("sinfo", "-h", user=lab.user).returncode == 0
    for secret in (lab.where.munge_key, lab.where.etc / "slurmdbd.conf"):
        assert not secret.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    assert lab.run("cat", str(lab.where.munge_key), user=lab.user, check=False).returncode != 0


async def test_users_of_the_private_namespace_do_not_exist_outside(lab: Any) -> None:
    assert lab.run("getent", "passwd", lab.user.name).stdout.startswith(f"{lab.user.name}:x:{lab.user.uid}:")
    outside = subprocess.run(
        ["nsenter", "--target=1", "--mount", "getent", "passwd", lab.user.name], capture_output=True, check=False
    )
    assert outside.returncode != 0


async def test_a_plain_slurmd_runs_jobs_and_leaves_no_node(lab: Any) -> None:
    plan = load(lab.where)
    assert plan is not None
    async with baremetal.baremetal(Lab(lab.where, plan)) as node:
        done = await asyncio.to_thread(lab.run, "srun", "-p", "bare", "id", "-un", user=lab.user)
        assert done.stdout.strip() == lab.user.name
        assert node in lab.run("sinfo", "-hN", "-p", "bare", "-o", "%N").stdout
    assert node not in lab.run("sinfo", "-hN", "-o", "%N").stdout


async def test_a_plain_slurmd_is_ended_with_its_jobs_whatever_was_recorded(lab: Any) -> None:
    """As after a benchmark that was killed."""
    plan = load(lab.where)
    assert plan is not None
    own = Lab(lab.where, plan)
    await baremetal.start(own)
    job = lab.sbatch("exec sleep 1000", "-p", "bare", "--no-requeue")
    until("the job runs", lambda: lab.run("squeue", "-hj", job, "-o", "%T").stdout == "RUNNING\n", 30)
    running = baremetal.SLURMD.running(lab.where)
    assert running is not None
    baremetal.SLURMD.record(lab.where).unlink()
    await baremetal.end(lab.where)
    assert not running.alive() and not baremetal.control_groups_of(own)
    assert not list(process.find_by_argument(f"{lab.where.run}/bare/slurm.conf"))
    await baremetal.stop(own)  # slurmctld forgets the node
    await baremetal.start(own)  # nothing has its port
    await baremetal.stop(own)
    assert "bare1" not in lab.run("sinfo", "-hN", "-o", "%N").stdout


_STAGES = ("munged started", "slurmctld started", "controller started", "1 of 4", "2 of 4")


@pytest.mark.slow
@pytest.mark.parametrize("stage", _STAGES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_benchmark_leaves_nothing(number: signal.Signals, stage: str) -> None:
    """Also if it is interrupted again and again. What one that was killed leaves is ended by `lab down`."""
    plain()
    directory = Path(tempfile.mkdtemp(prefix="mvlab-"))
    directory.chmod(0o755)
    where = layout(directory / "lab")
    # A shell's background job, and its children, ignore SIGINT.
    program = "env", "--default-signal=INT", Path(sys.executable).with_name("multiverse")
    words = ["bench", "latency", "-j", "2", "--kinds", "instant,bare_metal", "--dir", where.root, "--images", BUILT]
    try:
        with subprocess.Popen(
            [*program, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as bench:
            assert bench.stdout is not None
            said = []
            while stage not in (said or [""])[-1]:
                said.append(bench.stdout.readline())
                assert said[-1], said
            for pause in (0.1, 0.2, 0.5, 1.0, 0.0):
                bench.send_signal(number)
                time.sleep(pause)
            bench.stdout.read()
        assert bench.returncode == (INTERRUPTED if number != signal.SIGKILL else -number)
        plan = load(where)
        assert plan is not None
        if number == signal.SIGKILL:
            asyncio.run(lifecycle.down(where))
        assert leftovers.of_lab(where, plan.bridge) == []
        assert control_groups.existing(where.control_group) == []
    finally:
        asyncio.run(lifecycle.down(where))
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.slow
async def test_a_second_lab_runs_beside_the_first_and_leaves_nothing(lab: Any) -> None:
    slim()
    directory = Path(tempfile.mkdtemp(prefix="mvlab-"))
    directory.chmod(0o755)
    where = layout(directory / "lab")
    umask = os.umask(0o077)
    try:
        await lifecycle.up(where, LabOptions(images=IMAGES), controller=False)
        first, second = load(lab.where), load(where)
        assert first is not None
        assert second is not None
        assert first.bridge != second.bridge
        assert first.subnet != second.subnet
        status = lifecycle.status(where)
        assert all(part["alive"] for name, part in status.items() if name not in LEFT_OUT)
        builder = subprocess.Popen([sys.executable, "-c", _BUILDS, str(where.settings)])
        while not (built := _makers(where)):
            assert builder.poll() is None
            await asyncio.sleep(0.1)
        builder.kill()
        builder.wait()
        assert _makers(where) == built, "the template's QEMU outlives the process that started it"
        await lifecycle.down(where)
        await lifecycle.down(where)
        assert not any(Path(f"/proc/{pid}/exe").exists() for pid in built)
        assert not Path("/sys/class/net", second.bridge).exists()
        assert not where.run.exists()
        assert not where.memory.exists()
        for name, part in status.items():
            if part.get("pid"):
                assert not Path(f"/proc/{part['pid']}/exe").exists(), name
        assert all(part["alive"] for name, part in lifecycle.status(lab.where).items() if name not in LEFT_OUT)
    finally:
        os.umask(umask)
        await lifecycle.down(where)
        shutil.rmtree(directory, ignore_errors=True)
