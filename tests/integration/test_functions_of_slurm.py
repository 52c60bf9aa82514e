"""Virtual functions that Slurm counts as a GRES: a small Slurm of its own, with the plugin and job_submit.lua, gives
jobs device files, and an agent only remembers what it is asked."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from multiverse.agent.job_protocol import ProvideVm, parse
from multiverse.config import JobVmSettings, Settings, SlurmSettings
from multiverse_lab.lab.configure import cgroup_conf
from tests.integration.watch import until
from tests.unit.slurm_lua import install_scripts

PLUGIN = Path(__file__).parents[2] / "var/spank/multiverse.so"
GROUPS = (41, 42)
LIMIT = 60

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's control groups need root"),
    pytest.mark.skipif(not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))), reason="Slurm is not installed"),
]

_CONF = """
ClusterName=functions
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={top}/munge
CredType=cred/munge
StateSaveLocation={top}/state
SlurmdSpoolDir={top}/spool
SlurmctldPidFile={top}/slurmctld.pid
SlurmdPidFile={top}/slurmd.pid
PlugStackConfig={top}/plugstack.conf
GresTypes=nic
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ProctrackType=proctrack/linuxproc
TaskPlugin=task/cgroup
PrologFlags=Alloc
MpiDefault=none
JobSubmitPlugins=lua
ReturnToService=2
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
MailProg=/bin/true
NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=2000 Gres=nic:2 Feature=job-vms
PartitionName=other Nodes={name} Default=YES State=UP
"""


@dataclass
class RememberingAgent:
    """Refuses all VMs, when `wanted` requests for some have come."""

    path: Path
    wanted: int = 1
    asked: list[ProvideVm] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            request = parse(connection.makefile("rb").readline())
            if not isinstance(request, ProvideVm):
                connection.sendall(b"ok\n")
                return
            with self.changed:
                self.asked.append(request)
                self.changed.notify_all()
                self.changed.wait_for(lambda: len(self.asked) >= self.wanted, LIMIT)
            connection.sendall(b"error no VM was to be made\n")


@dataclass
class Cluster:
    top: Path
    name: str
    agent: RememberingAgent

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"SLURM_CONF": f"{self.top}/slurm.conf"}
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)

    def asked(self, *options: str, jobs: int = 1) -> list[ProvideVm]:
        """What the agent was asked by so many jobs with these options that run at the same time."""
        self.agent.asked, self.agent.wanted = [], jobs
        threads = [threading.Thread(target=self.run, args=("srun", "-Q", *options, "hostname")) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.agent.asked


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    assert PLUGIN.exists(), "not built; run make spank"
    name = f"mvvf{os.getpid()}"
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=name)))
        top.chmod(0o755)
        for directory in ("state", "spool", "vfio"):
            (top / directory).mkdir()
        for group in GROUPS:  # no such devices: what counts is who could open them
            os.mknod(top / "vfio" / str(group), stat.S_IFCHR | 0o600, os.makedev(241, group))
        conf = top / "slurm.conf"
        settings = Settings(
            slurm=SlurmSettings(conf=conf, inbox=top / "inbox"), job_vms=JobVmSettings(sriov_gres="nic")
        )
        install_scripts(settings)
        conf.write_text(
            _CONF.format(host=socket.gethostname(), controller=_free_port(), node=_free_port(), top=top, name=name)
        )
        (top / "gres.conf").write_text(f"Name=nic File={top}/vfio/[{GROUPS[0]}-{GROUPS[1]}]\n")
        (top / "cgroup.conf").write_text(cgroup_conf("ConstrainDevices=yes\n"))
        arguments = f"agent={top}/agent records={top}/records enter=/bin/false vfio={top}/vfio"
        (top / "plugstack.conf").write_text(f"optional {PLUGIN} {arguments}\n")
        (top / "munge.key").write_bytes(secrets.token_bytes(128))
        (top / "munge.key").chmod(0o400)
        agent = RememberingAgent(top / "agent")
        stack.callback(agent.close)
        munged = ["munged", "--foreground", "--force", f"--socket={top}/munge"]
        munged += [f"--{key}-file={top}/munge.{key}" for key in ("key", "pid", "log", "seed")]
        for argv in (munged, ["slurmctld", "-D", "-f", str(conf)], ["slurmd", "-D", "-f", str(conf)]):
            log = stack.enter_context((top / f"{argv[0]}.out").open("w"))
            process = subprocess.Popen(argv, stdout=log, stderr=log, env=os.environ | {"SLURM_CONF": str(conf)})
            stack.callback(_end, process)
            if argv is munged:
                until("munged answers", (top / "munge").exists, LIMIT)
        found = Cluster(top, name, agent)
        try:
            until("the node is idle", lambda: "idle" in found.run("sinfo", "-h", "-o", "%T").stdout, LIMIT)
        except AssertionError:
            pytest.fail("".join(path.read_text() for path in top.glob("*.out")))
        yield found
        until("no job is left", lambda: not found.run("squeue", "-h").stdout.strip(), LIMIT)
    for directory in Path("/sys/fs/cgroup").glob(f"*/slurm_{name}"):
        for path in sorted(directory.rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
        directory.rmdir()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def test_the_agent_is_told_of_the_functions_that_slurm_has_given_to_the_job(cluster: Cluster) -> None:
    (one,) = cluster.asked("--sriov")
    assert one.functions == 1 and len(one.groups) == 1 and one.groups[0] in GROUPS
    (both,) = cluster.asked("--comment=vm:sriov=2")
    assert both.functions == 2 and sorted(both.groups) == list(GROUPS)
    (several,) = cluster.asked("--sriov=1", "--vm-per-node=2")
    assert several.functions == 1 and sorted(several.groups) == list(GROUPS), "those of both VMs"
    (none,) = cluster.asked("--vm-per-node=1")
    assert none.functions == 0 and none.groups == ()


def test_two_jobs_at_the_same_time_have_different_functions_and_a_third_waits(cluster: Cluster) -> None:
    first, second = cluster.asked("--sriov", jobs=2)
    assert {*first.groups, *second.groups} == set(GROUPS) and len(first.groups) == len(second.groups) == 1
    cluster.agent.asked, cluster.agent.wanted = [], 3
    holders = [threading.Thread(target=cluster.run, args=("srun", "-Q", "--sriov", "hostname")) for _ in range(2)]
    for holder in holders:
        holder.start()
    until("both have theirs", lambda: len(cluster.agent.asked) == 2, LIMIT)
    waiting = cluster.run("srun", "-Q", "--sriov", "--immediate=2", "hostname")
    assert waiting.returncode != 0 and "Unable to allocate" in waiting.stderr
    cluster.agent.wanted = 2
    with cluster.agent.changed:
        cluster.agent.changed.notify_all()
    for holder in holders:
        holder.join()
    refused = cluster.run("srun", "--sriov=3", "hostname")
    assert refused.returncode != 0 and "Requested node configuration is not available" in refused.stderr
    assert len(cluster.agent.asked) == 2
