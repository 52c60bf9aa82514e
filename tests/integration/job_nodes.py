"""A lab whose bare-metal nodes take jobs with VMs inside, and all that can be left on such a node."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from multiverse.config import JobVmSettings
from multiverse_lab.lab.hosts.machine import HostInit
from multiverse_lab.lab.hosts.physical import physical_services
from multiverse_lab.lab.plan import LabHost, load
from multiverse_lab.lab.process import DaemonCommand, RunningDaemon
from multiverse_lab.lab.service import Lab, Service
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import accounted, below, kill, matching, until, written


def job_nodes(under_test: LabUnderTest) -> list[JobNode]:
    plan = load(under_test.where)
    assert plan is not None
    return [JobNode(under_test, Lab(under_test.where, plan), host) for host in plan.physical_nodes]


class JobNode:
    """A bare-metal node in namespaces of its own: what exists there belongs to it alone."""

    def __init__(self, under_test: LabUnderTest, lab: Lab, host: LabHost) -> None:
        self.under_test, self.lab, self.name = under_test, lab, host.name
        self.own = lab.where.host(host.name)
        self._services = {service.name: service for service in physical_services(host)}
        self._init = HostInit(host)
        self._known: frozenset[str] = frozenset()

    # --- its daemons ----------------------------------------------------------------------------------

    def service(self, name: str) -> Service:
        """`agent`, `slurmd` or `munged`."""
        return self._services[f"{self.name}-{name}"]

    def running(self, name: str) -> RunningDaemon:
        found = self.service(name).running(self.lab.where)
        assert found is not None, f"{name} of {self.name} does not run"
        return found

    def kill(self, name: str) -> None:
        kill(self.running(name).pid)

    def ensure(self, name: str) -> None:
        asyncio.run(self.service(name).ensure(self.lab))

    @property
    def first_pid(self) -> int:
        """The first process of the node, as this machine sees it."""
        running = self._init.service.running(self.lab.where)
        assert running is not None, f"{self.name} has ended"
        return running.pid

    @property
    def inside(self) -> list[str]:
        """What runs a command on the node."""
        return ["nsenter", f"--target={self.first_pid}", "--mount", "--net", "--pid", "--uts", "--ipc", "--cgroup"]

    def processes(self, program: str, *, here: bool = False) -> list[int]:
        """The processes of the node with this word in their command, by the pids that the node knows, or those of this
        machine."""
        found = [pid for pid in self._pids() if program in _command(pid).split()]
        if here:
            return found
        outer = len(_nspid(self.first_pid)) - 1
        return [_nspid(pid)[outer] for pid in found]

    def reset(self) -> None:
        """What a power failure does: all processes of the node end at once, and with them its network, its mounts and
        what it had in memory. Then it boots."""
        kill(self.first_pid)
        for service in self._services.values():
            asyncio.run((_rebooted(service) if service.name.endswith("-slurmd") else service).ensure(self.lab))

    def crashing_agent(self, point: str) -> Service:
        """The agent, which kills itself at this crash point (`tests.integration.crash_points`)."""
        where, usual = self.lab.where, self.service("agent")
        (self.own.root / "crash_points").write_text(f"{point}\n")
        seen = where.root / "crash_points"  # by the node
        argv = [sys.executable, "-m", "tests.integration.crash_points", "agent", where.settings, where.run, seen]
        words = ["env", f"PYTHONPATH={Path(__file__).parents[2]}", *map(str, argv)]
        return replace(usual, command=lambda lab: self._init.inside(lab, words, "crashing.log"))

    # --- jobs -----------------------------------------------------------------------------------------

    @property
    def _where(self) -> tuple[str, ...]:
        return ("--partition=physical", f"--nodelist={self.name}", "--vm-image=slim")

    def srun(self, *argv: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Run a step in a job of its own, as the user, in a VM."""
        memory = () if any(word.startswith("--mem=") for word in argv) else ("--mem=700",)
        run = self.under_test.run
        return run(
            "srun", "--quiet", *self._where, *memory, *argv, user=self.under_test.user, check=False, timeout=timeout
        )

    def sbatch(self, script: str, *options: str) -> str:
        memory = () if any(word.startswith("--mem=") for word in options) else ("--mem=700",)
        return self.under_test.sbatch(script, *self._where, *memory, *options)

    def begun(self, script: str, *options: str) -> tuple[str, Path]:
        """A job whose script has begun in its VM, and its output."""
        out = self.under_test.user.home / f"out-{os.urandom(4).hex()}"
        job = self.sbatch(f"hostname; {script}", f"--output={out}", *options)
        try:
            until("the script has begun", lambda: out.exists() and out.read_text().startswith("mvjob-"), 180)
        except AssertionError as error:
            raise AssertionError(f"{error}; {out.read_text() if out.exists() else 'no output'}") from error
        return job, out

    def ran_in_vm(self) -> None:
        """The node runs a job in a VM, as ever."""
        out = self.under_test.user.home / f"as-ever-{os.urandom(4).hex()}"
        job = self.sbatch("hostname", f"--output={out}")
        assert accounted(self.under_test, job, 240) == ("COMPLETED", "0:0"), out.read_text() if out.exists() else job
        assert written(out).startswith("mvjob-")

    def takes_jobs(self) -> bool:
        shown = self.under_test.run("sinfo", "-h", "-n", self.name, "-o", "%f").stdout.strip()
        return JobVmSettings().feature in shown.split(",")

    def state(self) -> str:
        return self.under_test.run("sinfo", "-h", "-n", self.name, "-o", "%T").stdout.strip()

    def groups_of(self, job: str) -> list[Path]:
        """The control groups of a job, one in each hierarchy."""
        return [one for own in self._control_groups() for one in matching(own, f"**/job_{job}")]

    def stepds(self, job: str) -> dict[str, int]:
        """The pids of the slurmstepds of a job, by the names of their steps."""
        found = {}
        for pid in self._pids():
            if known := re.fullmatch(rf"slurmstepd: \[{job}\.(\w+)\]", _command(pid)):
                found[known[1]] = pid
        return found

    # --- what is there --------------------------------------------------------------------------------

    def begin(self) -> None:
        """The node runs a job in a VM, so that the template is there, and remembers what exists then."""
        until("the agent has tested the plugin", self.takes_jobs, 60)
        self.ran_in_vm()
        until(f"{self.name} is idle", lambda: self.state() == "idle", 90)
        self.remember()

    def remember(self) -> None:
        """What exists now, with no job here, is no remains of a job."""
        self._known = self.everything()

    def remains(self) -> list[str]:
        """What exists beside what did when `remember` was called."""
        return sorted(self.everything() - self._known)

    def of_jobs(self) -> list[str]:
        """What exists that is recognizably of a job, whatever existed before."""
        names = rf"mvjob|{self.lab.plan.job_bridge}\.|vxjob|/job_\d|slurmstepd: \[|process \d+ .*mventer"
        files = r"run/jobs/\d|agent/jobs/\d|job-vxlans/"
        return sorted(one for one in self.everything() if re.search(f"{names}|{files}", one))

    def remains_of_vms(self, job: str) -> list[str]:
        """The same, without what Slurm itself leaves of a job whose slurmstepd was killed, with or without a VM: the
        control groups of its steps, and the sockets and files that slurmstepd has in slurmd's directory."""
        steps = re.compile(rf"group \S+/slurm_{self.name}/uid_\d+(/job_{job}(/step_[^/]+(/task_\w+)?)?)?")
        files = re.compile(rf"file {str(self.own.run)[1:]}/slurmd/(\w+_{job}\.\d+(\.xml)?|job0*{job}(/\w+)?)")
        return [one for one in self.remains() if not steps.fullmatch(one) and not files.fullmatch(one)]

    def nothing_left(self, limit: float = 120, *, killed: str = "") -> None:
        """Nothing remains of any job, and the node takes jobs. `killed` is a job whose slurmstepd was killed."""
        look = partial(self.remains_of_vms, killed) if killed else self.remains
        try:
            until("nothing remains", lambda: not look(), limit)
        except AssertionError as error:
            raise AssertionError(f"{error}, but {look()}") from error
        until(f"{self.name} is idle", lambda: self.state() == "idle", 90)
        if killed:  # a node gets rid of these with its next boot, and other tests share this one
            for group in self.groups_of(killed):
                for path in sorted(matching(group, "**/"), reverse=True):
                    path.rmdir()
            self.remember()

    def everything(self) -> frozenset[str]:
        """All that a job could leave on the node: processes that are no daemons, interfaces, routes, firewall rules,
        mounts, control groups, files in its directories and in its memory."""
        init = self.first_pid
        found = {f"process {pid} {_command(pid)}" for pid in self._pids() if not self._is_of_a_daemon(pid)}
        found |= {f"link {line.split(':')[0].strip()}" for line in _lines(f"/proc/{init}/net/dev") if ":" in line}
        found |= {f"route {line.split()[:3]}" for line in _lines(f"/proc/{init}/net/route")}
        rules = self.under_test.run("nsenter", f"--net=/proc/{init}/ns/net", "nft", "list", "ruleset").stdout
        found |= {f"rule {' '.join(line.split())}" for line in rules.splitlines()}
        for daemon in (init, *self._daemons()):
            found |= {f"mount {line.split()[4]}" for line in _lines(f"/proc/{daemon}/mountinfo")}
        groups = {path for own in self._control_groups() for path in matching(own, "**/")}
        found |= {f"group {path}" for path in groups if not self._is_of_a_step(path)}
        found |= {f"file {path}" for path in _below(self.own.root) if not self._is_of_slurmd(path)}
        root = Path(f"/proc/{init}/root")
        found |= {f"file {name}/{path}" for name in ("dev/shm", "run") for path in _below(root / name, root / name)}
        return frozenset(found)

    def _control_groups(self) -> list[Path]:
        own, top = f"{self.lab.where.control_group}/{self.name}", Path("/sys/fs/cgroup")
        return [*top.glob(f"*/{own}"), *top.glob(own)]  # of version 1, and of version 2

    def _daemons(self) -> list[int]:
        known = (service.running(self.lab.where) for service in self._services.values())
        return [one.pid for one in known if one]

    def _pids(self) -> list[int]:
        """The processes of the node, as this machine sees them: all descend from its first one, also a QEMU, which has
        a PID namespace of its own."""
        known = {self.first_pid}
        parents = {int(each.name): _parent(int(each.name)) for each in Path("/proc").iterdir() if each.name.isdecimal()}
        while more := {pid for pid, parent in parents.items() if parent in known} - known:
            known |= more
        return sorted(known)

    def _is_of_a_daemon(self, pid: int) -> bool:
        """A daemon, or a command that the agent runs for its test of the plugin."""
        agent = self.service("agent").running(self.lab.where)
        tests = agent is not None and _parent(pid) == agent.pid and "qemu" not in _command(pid)
        return pid in self._daemons() or tests

    def _is_of_a_step(self, group: Path) -> bool:
        """Whether Slurm leaves that group of version 2, of jobs with or without a VM: slurmstepd moves itself to the
        root of all groups before it removes its own, and that of a node in namespaces is none."""
        step = r"job_\d+(/step_\w+(/slurm|/user(/task_\w+)?)?)?"
        return re.search(rf"/{self.name}_slurmstepd\.scope/{step}$", str(group)) is not None

    def _is_of_slurmd(self, path: Path) -> bool:
        """Whether slurmd alone makes it, as often as it likes."""
        return Path("/", path).parent == self.own.run / "slurmd" and path.name.startswith("cred_state")


def _rebooted(slurmd: Service) -> Service:
    """The same, which tells slurmctld that the node has just booted: it is the same machine for it."""

    def command(lab: Lab) -> DaemonCommand:
        found = slurmd.command(lab)
        return replace(found, argv=[*found.argv, "-b"])

    return replace(slurmd, command=command)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _nspid(pid: int) -> list[int]:
    """A process's pids in all PID namespaces that it is in, from this machine's on (proc(5))."""
    (line,) = (line for line in _lines(f"/proc/{pid}/status") if line.startswith("NSpid:"))
    return [int(word) for word in line.split()[1:]]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _below(place: Path, relative_to: Path = Path("/")) -> Iterator[Path]:
    return (path.relative_to(relative_to) for path in below(place))
