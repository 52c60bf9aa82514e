"""A lab with two slurmctlds whose user has a name and a number that no image knows: jobs go on after a failover.

The backup has a host name, an address and mounts of its own, as on another machine, and shares the directories.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse.controller.learned import SKEW
from multiverse_lab.lab import configure, lifecycle, plan
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.users import enter_private_namespace, private_users, remove_private_users
from tests.integration.conftest import LabUnderTest
from tests.integration.images import IMAGES, slim
from tests.integration.watch import ended, kill, until, written

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

UID = 61890
SAVE_MAX_WAIT = 5
"""slurmctld saves changes to its state within so many seconds (slurmctld/state_save.c)."""
# The lab starts its daemons as "slurm", which has the same number here. slurm.conf names the other.
SITE_CONF = """\
SlurmUser=ctl
SlurmctldHost=backup({address})
"""
_BACKUP = """\
set -e
hostname backup
mount --bind {conf} {slurm_conf}
ip link set lo up
until ip link set eth0 up 2> /dev/null; do sleep 0.05; done
ip addr add {address}/{prefix} dev eth0
exec setpriv --reuid={uid} --regid={uid} --clear-groups slurmctld -D >> {log} 2>&1
"""


@dataclass
class Pair:
    """The lab of the primary slurmctld, and the backup's process."""

    lab: LabUnderTest
    address: str
    backup: subprocess.Popen[bytes] | None = None

    @property
    def client(self) -> Client:
        return Client(self.lab.settings.socket)

    def primary_pid(self) -> int | None:
        found = lifecycle.status(self.lab.where)["slurmctld"]
        return int(found["pid"]) if found["alive"] else None

    def start_backup(self) -> None:
        found = plan.load(self.lab.where)
        assert found is not None
        where = self.lab.where
        log, conf, text = where.log / "backup.log", where.etc / "backup.conf", where.slurm_conf.read_text()
        log.touch()
        os.chown(log, UID, UID)
        pid_file = f"SlurmctldPidFile={where.slurmctld}/pid"  # a slurmctld that starts ends the one in this file
        assert pid_file in text
        conf.write_text(text.replace(pid_file, f"{pid_file}.backup"))
        script = _BACKUP.format(
            conf=conf, slurm_conf=where.slurm_conf, address=self.address, prefix=found.prefix, uid=UID, log=log
        )
        self.backup = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "--", "sh", "-c", script],
            env=os.environ | configure.environment(where),
            cwd="/",
        )
        until("the backup has a network", lambda: Path(f"/proc/{self.backup_pid}/ns/net").readlink() != _OWN_NETWORK)
        self.lab.run("ip", "link", "add", _LINK, "type", "veth", "peer", "name", "eth0", "netns", str(self.backup_pid))
        self.lab.run("ip", "link", "set", _LINK, "master", found.bridge, "up")
        until("the backup answers", lambda: "(backup) at backup is UP" in self.ping())

    @property
    def backup_pid(self) -> int:
        assert self.backup is not None
        return self.backup.pid

    def in_backup(self, *argv: str) -> None:
        """Run a command among the mounts of the backup."""
        subprocess.run(["nsenter", f"--mount=/proc/{self.backup_pid}/ns/mnt", *argv], check=True, cwd="/")

    def ping(self) -> str:
        return self.lab.run("scontrol", "ping", check=False).stdout

    def end_backup(self) -> None:
        if self.backup is not None:
            self.backup.kill()
            self.backup.wait()

    def hints_alert(self) -> str:
        return next((one["message"] for one in self.client.status()["alerts"] if one["kind"] == "hints"), "")


_OWN_NETWORK = Path("/proc/self/ns/net").readlink()
_LINK = f"backup{os.getpid()}"[:15]  # not "mv…": VMs do not reach links of VMs


@pytest.fixture(scope="module")
def pair(accelerator: Path) -> Iterator[Pair]:
    """The lab, its daemon, and a backup that is on standby."""
    slim()
    directory = Path(tempfile.mkdtemp(prefix="mvlab-"))
    directory.chmod(0o755)  # users go through it
    where, home = layout(directory / "lab"), directory / "home"
    enter_private_namespace()
    users = private_users(
        [("ada", 61811, home / "ada"), ("slurm", UID, directory / "slurm"), ("ctl", UID, directory / "slurm")],
    )
    found = None
    try:
        where.controller.mkdir(parents=True)
        shutil.copy(accelerator, where.controller)
        (where.controller / accelerator.name).chmod(0o600)
        options = LabOptions(cores=4, memory=8192, shares=(home,), images=IMAGES)
        asyncio.run(lifecycle.up(where, options, controller=False))
        planned = plan.load(where)
        assert planned is not None
        address = str(ipaddress.IPv4Network(planned.subnet)[2])
        (where.etc / "site.conf").write_text(SITE_CONF.format(address=address))
        settings = asyncio.run(lifecycle.up(where, LabOptions()))
        found = Pair(LabUnderTest(where, settings, users[0], users[0]), address)
        found.start_backup()
        yield found
    finally:
        if found is not None:
            found.lab.run("scancel", "--partition=vm", check=False)
            found.end_backup()
        asyncio.run(lifecycle.down(where))
        remove_private_users(users)
        shutil.rmtree(directory, ignore_errors=True)


def submit(pair: Pair, name: str, script: str = "hostname") -> tuple[str, Path]:
    """Submit a job, in another second than the last one; its id and output."""
    time.sleep(1.1)
    out = pair.lab.user.home / f"{name}.out"
    return pair.lab.sbatch(script, "--mem=100", f"--output={out}"), out


@pytest.mark.slow
def test_a_slurm_user_with_a_name_and_number_of_its_own_works(pair: Pair) -> None:
    shown = pair.lab.run("scontrol", "show", "config").stdout
    assert f"ctl({UID})" in next(line for line in shown.splitlines() if line.startswith("SlurmUser"))
    assert pair.lab.settings.slurm.inbox.stat().st_uid == UID
    job, out = submit(
        pair, "first", "hostname; getent passwd ctl; grep -i ^Slurmctldhost /etc/slurm/multiverse-slurmd.conf"
    )
    ended(pair.client, job, "done")
    text = written(out)
    assert text.startswith("mv") and f"ctl:*:{UID}:" in text
    primary, backup = (line for line in text.splitlines() if line.startswith("SlurmctldHost"))
    planned = plan.load(pair.lab.where)
    assert planned is not None
    assert primary == f"SlurmctldHost={configure.hostname()}({planned.gateway})"
    assert backup == f"SlurmctldHost=backup({pair.address})"


@pytest.mark.slow
def test_jobs_go_on_and_new_ones_start_after_a_failover(pair: Pair) -> None:
    go = pair.lab.user.home / "go"
    long, long_out = submit(pair, "long", f"hostname; until [ -e {go} ]; do sleep 0.2; done; echo over")
    written(long_out)
    time.sleep(SAVE_MAX_WAIT + 1)  # what slurmctld has not saved, the backup does not know: also a submitted job
    pid = pair.primary_pid()
    assert pid is not None
    kill(pid)
    until("the primary has ended", lambda: pair.primary_pid() is None)
    pair.lab.run("scontrol", "takeover", check=False)
    until("the backup is in control", lambda: pair.lab.run("squeue", check=False).returncode == 0)
    new, out = submit(pair, "new")
    ended(pair.client, new, "done")
    assert written(out).startswith("mv")
    go.touch()
    ended(pair.client, long, "done")
    assert long_out.read_text().splitlines()[1:] == ["over"], "it ran once, in its VM"
    assert len(pair.client.jobs(long)) == len(pair.client.jobs(new)) == 1
    assert not pair.hints_alert(), "the backup shares the inbox"


@pytest.mark.slow
def test_missing_hints_are_reported_and_cost_only_the_poll_interval(pair: Pair) -> None:
    inbox = str(pair.lab.settings.slurm.inbox)
    pair.in_backup("mount", "-t", "tmpfs", "-o", f"uid={UID},mode=700", "tmpfs", inbox)
    time.sleep(SKEW + 1)  # what is submitted sooner after a hint may be what the hint told of
    jobs = []
    for number in range(4):
        jobs.append(submit(pair, f"unhinted-{number}"))
        time.sleep(1.5)  # submissions of the same second count once
    for job, out in jobs:
        ended(pair.client, job, "done")
        assert written(out).startswith("mv")
    assert inbox in until("status says so", lambda: _remedy(pair)) and pair.hints_alert()
    pair.in_backup("umount", inbox)
    job, _ = submit(pair, "hinted")
    ended(pair.client, job, "done")
    assert not pair.hints_alert()
    log = (pair.lab.where.log / "controller.log").read_text()
    assert log.count("hints missing") == log.count("hints arrive again") == 1


def _remedy(pair: Pair) -> str:
    return next((one["remedy"] for one in pair.client.status()["alerts"] if one["kind"] == "hints"), "")
