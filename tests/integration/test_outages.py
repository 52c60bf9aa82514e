"""Outages of what a VM depends on: jobs wait or go on, and end correctly after the outage."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.services import CONTROLLER
from tests.integration.conftest import LabUnderTest, more_settings
from tests.integration.restarting_daemon import counting_job
from tests.integration.watch import (
    LIMIT,
    SLURMS_DELAY,
    accounted,
    ended,
    kept_by_slurm,
    kill,
    latest,
    mend,
    nothing_left,
    qemu_of,
    until,
    written,
)

pytestmark = pytest.mark.integration
slow = pytest.mark.slow


def looks(client: Client) -> int:
    return sum(int(source["observations"]) for source in client.status()["sources"] if source["name"] != "scheduler")


@pytest.mark.parametrize("service", [pytest.param(name, marks=slow) for name in ("slurmctld", "munged", "ganesha")])
def test_a_job_survives_the_death_of_a_service(
    lab: LabUnderTest, client: Client, controller: Callable[[], int], service: str
) -> None:
    go = lab.user.home / "go"
    go.unlink(missing_ok=True)
    path, script = counting_job(lab, "under", f"until [ -e {go} ]; do sleep 0.2; done; echo end >> under.count")
    job = lab.sbatch(script, "--output=/dev/null")
    until("it runs", lambda: latest(client, job).get("state") == "allocated" and path.exists())
    if service == "slurmctld":
        changed = time.time()
        lab.run("scontrol", "update", f"JobId={job}", "Comment=kept", user=lab.user)
        kept_by_slurm(lab, changed)
    kill(int(lifecycle.status(lab.where)[service]["pid"]))
    if service != "ganesha":
        until(
            "a source is unknown",
            lambda: not all(s["known"] for s in client.status()["sources"]),
        )
    waiting = looks(client) + 3
    until("the controller has observed since", lambda: looks(client) >= waiting)
    assert latest(client, job)["state"] == "allocated", "unknown is not absent"
    mend(lab)
    go.touch()
    ended(client, job, "done")
    assert written(path) == "run 0\nend\n" and accounted(lab, job) == ("COMPLETED", "0:0")
    nothing_left(lab, client)


@pytest.mark.parametrize("state", [pytest.param("spawning", marks=slow), "allocated"])
def test_a_vm_that_is_stopped_for_a_while_goes_on(
    lab: LabUnderTest, client: Client, controller: Callable[[], int], state: str
) -> None:
    path, script = counting_job(lab, "still", "sleep 2; echo end >> still.count")
    job = lab.sbatch(script, "--output=/dev/null")
    (vm,) = until(f"it is {state}", lambda: (r := latest(client, job)).get("state") == state and r)["vms"]
    pid = qemu_of(vm)
    os.kill(pid, signal.SIGSTOP)
    since = looks(client) + 3
    until("the controller has observed it", lambda: looks(client) >= since)
    os.kill(pid, signal.SIGCONT)
    row = ended(client, job, "done")
    assert row["vms"] == [vm] and len(client.jobs(job)) == 1, "the job ran in the same VM"
    assert written(path) == "run 0\nend\n" and accounted(lab, job) == ("COMPLETED", "0:0")
    nothing_left(lab, client)


@pytest.fixture
def impatient(lab: LabUnderTest, controller: Callable[[], int]) -> Iterator[None]:
    """Slurm sets a silent node DOWN after ten seconds."""
    conf = lab.where.slurm_conf
    whole = conf.read_text()
    conf.write_text(whole.replace("SlurmdTimeout=60", "SlurmdTimeout=10"))
    lab.run("scontrol", "reconfigure")
    yield
    conf.write_text(whole)
    lab.run("scontrol", "reconfigure")


@slow
def test_the_job_of_a_vm_that_is_stopped_for_too_long_is_requeued(
    lab: LabUnderTest, client: Client, controller: Callable[[], int], impatient: None
) -> None:
    path, script = counting_job(lab, "verdict", "[ $SLURM_RESTART_COUNT ] || sleep 60; echo end >> verdict.count")
    job = lab.sbatch(script, "--requeue", "--output=/dev/null")
    row = until("it runs", lambda: (r := latest(client, job)).get("state") == "allocated" and r)
    until("the script has begun", lambda: path.exists() and path.read_text() == "run 0\n")
    (vm,) = row["vms"]
    os.kill(qemu_of(vm), signal.SIGSTOP)
    row = ended(client, job, "done", LIMIT + SLURMS_DELAY)
    assert row["vms"] != [vm] and client.jobs(job)[0]["state"] == "requeued"
    assert written(path) == "run 0\nrun 1\nend\n", "the first run did not go on"
    assert accounted(lab, job) == ("COMPLETED", "0:0")
    nothing_left(lab, client)


@pytest.fixture
def lending(lab: LabUnderTest, controller: Callable[[], int]) -> Iterator[Path]:
    """A setuid shell for jobs. For this test guests mount the homes without `nosuid`."""
    (mount,) = lab.settings.mounts
    options = ",".join(each for each in mount.options.split(",") if each != "nosuid")
    shell = lab.user.home / "rootsh"
    words = {"source": mount.source, "target": mount.target, "type": mount.type, "options": options}
    shutil.copy("/bin/bash", shell)
    shell.chmod(0o4755)
    with more_settings(lab, "[[mounts]]\n" + "".join(f'{key} = "{value}"\n' for key, value in words.items())):
        yield shell
    shell.unlink()


@slow
def test_a_slurmd_killed_in_its_guest_is_started_again(lab: LabUnderTest, client: Client, lending: Path) -> None:
    """The next one knows the job: it ends it when it is cancelled, and reports the end of one that ends by itself."""
    killing = f"{lending} -p -c 'kill -9 $(pidof slurmd)'; echo end >> $SLURM_JOB_NAME.count; "
    path, script = counting_job(lab, "short", killing)
    short = lab.sbatch(script, "--output=/dev/null", "--requeue", "--job-name=short")
    other, script = counting_job(lab, "long", killing + "sleep 600")
    long = lab.sbatch(script, "--output=/dev/null", "--requeue", "--job-name=long")
    ended(client, short, "done")
    until("the other has killed it", lambda: other.exists() and "end" in other.read_text())
    lab.run("scancel", long, user=lab.user)
    # Without slurmd it would be COMPLETING for SlurmdTimeout, a minute here.
    until("nothing waits for it", lambda: "COMPLETING" not in lab.run("squeue", "-h", "-o", "%T").stdout, 20)
    ended(client, long, "done")
    for file, job in ((path, short), (other, long)):
        assert written(file) == "run 0\nend\n" and len(client.jobs(job)) == 1, "it ran once"
    assert accounted(lab, short) == ("COMPLETED", "0:0")
    nothing_left(lab, client)


@pytest.fixture
def attentive(lab: LabUnderTest) -> Iterator[None]:
    """srun asks after some seconds whether the other end of a connection is still there."""
    conf = lab.where.slurm_conf
    whole = conf.read_text()
    usual = "keepalivetime=60,keepaliveinterval=10,keepaliveprobes=6"
    assert usual in whole
    conf.write_text(whole.replace(usual, "keepalivetime=5,keepaliveinterval=2,keepaliveprobes=3"))
    yield
    conf.write_text(whole)


@slow
def test_srun_ends_with_its_vm_although_slurmctld_cannot_tell_it(
    lab: LabUnderTest, client: Client, controller: Callable[[], int], attentive: None
) -> None:
    said = lab.user.home / "srun.said"
    argv = ("srun", "sh", "-c", "hostname; sleep 600")
    with said.open("w") as output, subprocess.Popen(
        argv, env=lab.env, cwd=lab.user.home, user=lab.user.uid, group=lab.user.uid, extra_groups=[],
        stdout=output, stderr=subprocess.STDOUT,
    ) as srun:  # fmt: skip
        vm = until("it runs", lambda: [word for word in said.read_text().split() if word.startswith("mv")])[-1]
        kill(int(lifecycle.status(lab.where)["slurmctld"]["pid"]))
        kill(qemu_of(vm))
        srun.wait(120)
    assert "io error with slurmstepd" in said.read_text()
    mend(lab)
    until("its VM is gone", lambda: not client.vms())
    nothing_left(lab, client)


@pytest.fixture
def small(lab: LabUnderTest, controller: Callable[[], int]) -> Iterator[Path]:
    """Mount a small file system at the controller's state directory."""
    asyncio.run(CONTROLLER.stop(lab.where))
    directory, site = lab.where.controller, lab.where.etc / "site.toml"
    before = site.read_text()
    site.write_text("[host]\ndisk_floor = 16\ndisk_overcommit = 1000.0\n")  # otherwise no VM would be added
    probed = (directory / "kvm.json").read_bytes()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m,mode=755", "tmpfs", directory], check=True)
    try:
        (directory / "kvm.json").write_bytes(probed)
        controller()
        yield directory
    finally:
        left = [*lab.settings.qemu.vms.glob("mv*")]
        asyncio.run((lifecycle.stop_controller if left else CONTROLLER.stop)(lab.where))
        subprocess.run(["umount", directory], check=True)
        site.write_text(before)
        controller()


def fill(path: Path) -> None:
    """Write a file until the file system is full."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


@slow  # test_full_disk covers a full disk in every run
def test_a_full_state_directory_loses_nothing(
    lab: LabUnderTest, client: Client, controller: Callable[[], int], small: Path
) -> None:
    pid, log = controller(), lab.where.log / "controller.log"
    go = lab.user.home / "go"
    go.unlink(missing_ok=True)
    path, script = counting_job(lab, "full", f"until [ -e {go} ]; do sleep 0.2; done; echo end >> full.count")
    running = lab.sbatch(script, "--output=/dev/null")
    until("it runs", lambda: latest(client, running).get("state") == "allocated" and path.exists())
    said = log.stat().st_size
    fill(small / "filler")
    later, other = counting_job(lab, "later")
    waiting = lab.sbatch(other, "--output=/dev/null")
    until("the daemon logs the error", lambda: re.search("pass not committed|No space left", log.read_text()[said:]))
    (small / "filler").unlink()
    go.touch()
    for job in (running, waiting):
        ended(client, job, "done")
        assert accounted(lab, job) == ("COMPLETED", "0:0")
    assert written(path) == "run 0\nend\n" and written(later) == "run 0\n"
    assert controller() == pid, "without a restart"
    nothing_left(lab, client)
