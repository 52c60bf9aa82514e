"""An array that fills the disk on which the controller's state and all VMs are: no other job sees an error."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from multiverse.client import Client
from multiverse.core.errors import Refused
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.vm import VmCondition
from multiverse.host import manifest
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.qemu import observation
from multiverse.host.qemu.context import QemuHostConfig
from multiverse.host.qemu.library import QemuHost
from multiverse.service.startup import locked
from multiverse.system.processes import ProcessIdentity
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.services import CONTROLLER
from tests.integration.conftest import LabUnderTest
from tests.integration.small_disk import available, fill, small_disk
from tests.integration.watch import accounted, ended, nothing_left, until, written
from tests.unit.test_full_disk import FakeQemu

pytestmark = pytest.mark.integration

DISK = 640  # MiB
FLOOR = 48  # MiB
HOGS = 4
FEW = 10
"""Writes of the neighbour that are enough to tell. It goes on as long as the disk is full."""

HOG = "head -c 1500M /dev/zero > /var/tmp/fill; echo $? > {out}-$SLURM_ARRAY_TASK_ID"
"""Writes more than the disk of the host holds, and says whether that succeeded."""

NEIGHBOUR = """exec 2> {out}.errors
i=0; until [ -e {out}.enough ]; do i=$((i + 1))
  dd if=/dev/urandom of=/var/tmp/some-$i bs=64k count=4 conv=fsync || echo "write $i failed" >&2
  sleep 0.5
done; sync; echo $i $(cat /var/tmp/some-* | wc -c) > {out}"""


@pytest.fixture(scope="module")
def small(lab: LabUnderTest, _images: None) -> Iterator[Client]:
    """The lab's controller with an empty state on a small disk, where its VMs are too."""
    asyncio.run(lifecycle.stop_controller(lab.where))
    state = lab.where.controller
    probe = state / "kvm.json"
    known = probe.read_bytes() if probe.exists() else b""
    site = {"host": {"disk_overcommit": 1000.0, "disk_floor": FLOOR}}
    with small_disk(state, "ext4", DISK):
        if known:
            probe.write_bytes(known)
            probe.chmod(0o600)
        try:
            asyncio.run(lifecycle.up(lab.where, LabOptions(settings=site)))
            yield Client(lab.settings.socket)
        finally:
            lab.run("scancel", "--partition=vm", check=False)
            asyncio.run(lifecycle.stop_controller(lab.where))
    asyncio.run(lifecycle.up(lab.where, LabOptions(settings={}), controller=False))


def test_a_vm_is_found_paused_and_destroyed_without_its_guest_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observation, "_MEASURED_FOR", 0.0)
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(tmp_path / "small", "ext4", 256))
        home, run = disk / "mva-1", tmp_path / "run" / "mva-1"
        home.mkdir()
        run.mkdir(parents=True)
        program = subprocess.Popen(["sleep", "1000"])
        stack.callback(program.wait)
        stack.callback(program.kill)
        one = ProcessIdentity.of(program.pid)
        facts = Manifest(home.name, CloneKind.FULL, VmPhase.STARTED, "02:00:00:00:00:01", 1, 256, one.pid, one.started,
                         one.boot_id)  # fmt: skip
        manifest.write(home, facts)
        (home / "disk.raw").write_bytes(bytes(1 << 20))
        qemu = stack.enter_context(closing(FakeQemu(run / "qmp")))
        agent = stack.enter_context(socket.socket(socket.AF_UNIX))
        agent.bind(str(run / "agent"))
        agent.listen()
        agent.setblocking(False)
        config = QemuHostConfig("h", "mva-", Size(1, 256), disk, disk, disk, run.parent, tmp_path / "cache",
                                accelerator="tcg")  # fmt: skip
        host = stack.enter_context(closing(QemuHost(config)))
        filler = fill(disk)
        qemu.status = "io-error"

        def seen() -> VmCondition:
            host.resume_paused()
            return host.observe().vms[home.name].condition

        until("it is found", lambda: seen() is VmCondition.PAUSED)
        assert host.observe().hosts["h"].available_disk == 0
        filler.unlink()
        assert seen() is VmCondition.RUNNING and qemu.status == "running"
        fill(disk)
        qemu.status = "io-error"
        until("it is found again", lambda: seen() is VmCondition.PAUSED)
        host.destroy(home.name, 30.0)
        assert host.observe().vms == {} and not home.exists() and not one.is_alive()
        with pytest.raises(BlockingIOError):
            agent.accept()  # nobody has asked the guest to write back


def test_a_daemon_takes_the_lock_of_its_directory_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "ext4", 64) as disk:
        (disk / "lock").touch()
        fill(disk)
        with (
            locked(disk / "lock", "daemon"),
            pytest.raises(Refused, match="another daemon"),
            locked(disk / "lock", "daemon"),
        ):
            raise AssertionError("two daemons have the lock")


def alert(client: Client) -> dict[str, Any] | None:
    """The alert of VMs that are paused."""
    found = [one for one in client.status()["alerts"] if one["kind"] == "disk" and "paused" in one["message"]]
    return found[0] if found else None


def states(lab: LabUnderTest, job: str) -> list[str]:
    return lab.run("squeue", "-h", "-r", "-o", "%T", "-j", job, check=False).stdout.split()


@pytest.mark.slow
def test_an_array_that_fills_the_disk_harms_no_other_job_and_is_released(lab: LabUnderTest, small: Client) -> None:
    home = lab.user.home
    out, fill = home / "neighbour", home / "fill"
    neighbour = lab.sbatch(NEIGHBOUR.format(out=out), "--output=/dev/null")
    until("the neighbour runs", lambda: states(lab, neighbour) == ["RUNNING"])
    array = lab.sbatch(HOG.format(out=fill), f"--array=1-{HOGS}", "--output=/dev/null")
    found = until("VMs are paused", lambda: alert(small))
    assert "MiB are available" in found["message"] and "scancel" in found["remedy"] and found["jobs"]
    waiting = lab.sbatch("true", "--output=/dev/null")
    until("a new job waits", lambda: "waiting for disk" in (small.jobs(waiting) or [{}])[0].get("waiting", ""))
    assert available(lab.where.controller) < FLOOR << 20
    assert not list(home.glob("fill-*")), "no task of the array has seen an error, nor ended"
    asyncio.run(CONTROLLER.stop(lab.where))
    asyncio.run(lifecycle.up(lab.where, LabOptions()))
    until("a daemon that was started on the full disk finds them paused", lambda: alert(small))
    lab.run("scancel", array)
    until("the array's VMs are gone", lambda: not [row for row in small.jobs() if row["job_id"].startswith(array)], 60)
    assert not list(home.glob("fill-*"))
    ended(small, waiting, "done")
    Path(f"{out}.enough").touch()
    ended(small, neighbour, "done")
    assert accounted(lab, neighbour) == ("COMPLETED", "0:0")
    writes, size = map(int, written(out).split())
    assert writes >= FEW and size == writes * (256 << 10), "all that it wrote is there"
    errors = Path(f"{out}.errors").read_text()
    assert "failed" not in errors and "rror" not in errors and errors.count("records out") == writes
    until("the alert has ended", lambda: not alert(small))
    again = [lab.sbatch("true", "--output=/dev/null") for _ in range(3)]
    for job in again:
        ended(small, job, "done")
    nothing_left(lab, small)
