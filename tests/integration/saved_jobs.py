"""Jobs of the lab in real VMs that are saved and resumed without a controller, by the calls that it makes."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import pwd
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from multiverse.config import Settings
from multiverse.core.errors import Exhausted
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.identity import Identity, User
from multiverse.core.model.job import JobState, NodeSpec
from multiverse.core.model.vm import Stage, TemplateKey
from multiverse.core.policy import PAUSE_BASE
from multiverse.drivers.qemu.driver import host_config
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.guest import protocol
from multiverse.host.manifest import Specification
from multiverse.host.qemu.library import QemuHost
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import until

SITE = f"s{os.getpid() % 46656:04x}"[:5]
EXTRA = 20  # MiB that a node has beside its job's memory
_ANSWER = 60.0  # seconds for a guest's answer
_FIRST = 900  # the place of the first VM's address in the lab's network


@dataclass
class SavedJob:
    """A job of the lab and its VMs: the script runs in the first one."""

    id: str
    node: Size
    specs: list[Specification]
    runs: int = 1
    sleeps: int = 1  # the number of its VM's latest sleep
    seconds: dict[str, float] = field(default_factory=dict)  # that each step took last

    @property
    def spec(self) -> Specification:
        return self.specs[0]

    @property
    def vm(self) -> str:
        return self.spec.name

    @property
    def vms(self) -> list[str]:
        return [spec.name for spec in self.specs]


class Saver:
    """Runs, saves and resumes jobs."""

    def __init__(self, lab: LabUnderTest, directory: Path) -> None:
        self.lab = lab
        self.settings = replace(lab.settings, save=replace(lab.settings.save, enabled=True, directory=directory))
        self.host = self._host(self.settings)
        self.scheduler = SlurmScheduler(self.settings, SITE)
        self.key = ""  # by which states are encrypted
        self._serial = int(time.monotonic()) % 100
        self._jobs: list[SavedJob] = []

    def run(
        self, script: str, *options: str, memory: int = 100, cpus: int = 1, kind: CloneKind = CloneKind.INSTANT,
        vms: int = 1, image: str = "slim",
    ) -> SavedJob:  # fmt: skip
        """Submit a script of bash, and run it in VMs of its own."""
        wanted = (
            f"--nodes={vms}",
            f"--mem={memory}",
            f"--cpus-per-task={cpus}",
            "--requeue",
            "-o",
            "out.txt",
            *options,
        )
        path = self.lab.user.home / f"script-{time.monotonic_ns()}"
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
        (self.lab.user.home / "out.txt").unlink(missing_ok=True)
        done = self.lab.run("sbatch", "--parsable", *wanted, str(path), user=self.lab.user, check=False)
        assert done.returncode == 0, done.stderr
        network = ipaddress.IPv4Network(self.settings.network.subnet)
        base = self.settings.qemu.base_memory
        needed = base + (0 if memory + EXTRA <= base - 100 else -(-(memory + 128) // 128) * 128)
        template = TemplateKey(self.settings.host.name, image, Size(1, base)) if kind is CloneKind.INSTANT else None
        if template is not None:
            self.host.build_template(template, lambda: False)
        specs = []
        for _ in range(vms):
            self._serial += 1
            specs.append(Specification(
                name=f"mv{SITE}-{self._serial}", host=self.settings.host.name, image=image, kind=kind,
                size=Size(cpus, needed), mac=f"02:00:5e:01:{os.getpid() % 256:02x}:{self._serial:02x}",
                template=template, token=f"t{self._serial}", bridge=self.settings.qemu.bridge,
                address=f"{network[_FIRST + self._serial]}/{network.prefixlen}",
            ))  # fmt: skip
        job = SavedJob(done.stdout.strip(), Size(cpus, memory + EXTRA), specs)
        self._jobs.append(job)
        for spec in specs:
            self.host.create(spec)
        self._join(job)
        return job

    def _host(self, settings: Settings) -> QemuHost:
        made = QemuHost(host_config(settings, SITE))
        made.check()
        return made

    def move_to_host(self, cores: int, memory: int) -> None:
        """What was saved goes on on a host of another size."""
        self.host.close()
        self.settings = replace(self.settings, host=replace(self.settings.host, cores=cores, memory=memory))
        self.host = self._host(self.settings)

    def save(self, job: SavedJob, behind: float = 0.0, *, keep: bool = False) -> None:
        """Save the job's VM, and destroy it. The job is frozen when the guest's clock is `behind` seconds late. `keep`:
        it cannot be written, and is kept in memory."""
        began = time.monotonic()

        def step(name: str) -> None:
            job.seconds[name] = time.monotonic() - began

        self._node(job, "State=DRAIN", "Reason=saving")
        if behind:
            self._set_clock(job, -behind)
        self._each(job, self.freeze)
        if behind:
            self._set_clock(job, 0.0)
        step("frozen")
        self._each(job, lambda spec: self.ask(spec.name, protocol.CUT, "cut"))
        step("cut")
        self.lab.run("scontrol", "requeue", "Incomplete", job.id)
        until(f"job {job.id} is requeued", lambda: self.state(job) == "PENDING", 30)
        step("requeued")
        self._each(job, partial(self._keep if keep else self._write, job))
        step("saved")
        self._each(job, lambda spec: self.host.destroy(spec.name, 0.0, spec.token))
        self._delete(job)

    def freeze(self, spec: Specification) -> None:
        """Freeze the processes of a VM's job."""
        script = any(job.spec is spec for job in self._jobs)
        self.ask(spec.name, protocol.freeze_message(20.0, script=script), "frozen")

    def thaw(self, job: SavedJob) -> None:
        self._each(job, lambda spec: self.host.thaw(spec.name, spec.token))

    def _each(self, job: SavedJob, do: Callable[[Specification], object]) -> None:
        """Do something with all VMs of a job at the same time."""
        with ThreadPoolExecutor(len(job.specs)) as pool:
            list(pool.map(do, job.specs))

    def _write(self, job: SavedJob, spec: Specification) -> None:
        self.host.save(spec.name, spec.token, self._name(job, spec), self.key)

    def _keep(self, job: SavedJob, spec: Specification) -> None:
        for _ in range(2):
            with pytest.raises(Exhausted):
                self._write(job, spec)
        self.host.keep(spec.name, spec.token, self._name(job, spec))

    def checkpoint(self, job: SavedJob, *, shared_files: bool = False) -> list[Stage]:
        """Write the state of the job, which goes on."""
        token = job.spec.token
        return self.host.checkpoint(job.vm, token, self._name(job), self.key, shared_files=shared_files)

    def lose(self, job: SavedJob) -> None:
        """End the job's VM as if its host had failed, and let Slurm queue the job again. Return when slurmctld has
        given up telling the VM to end the job: its successor would obey."""
        self._each(job, lambda spec: self.host.destroy(spec.name, 0.0, spec.token))
        self._node(job, "State=DOWN", "Reason=lost")
        until(f"job {job.id} is requeued", lambda: self.state(job) == "PENDING", 30)
        given_up = time.monotonic() + PAUSE_BASE
        self._delete(job)
        time.sleep(max(0.0, given_up - time.monotonic()))

    def restore(self, job: SavedJob) -> list[Stage]:
        """Restore the job's VM and its node, and let the job's next run attach to it."""
        began = time.monotonic()
        saved = [replace(one, template=None, saved=self._name(job, one), key=self.key) for one in job.specs]
        job.runs += 1
        with ThreadPoolExecutor(len(saved)) as pool:
            stages = next(iter(pool.map(self.host.create, saved)))
        job.seconds["restored"] = time.monotonic() - began
        stages += self._join(job, began)
        self.thaw(job)
        job.seconds["attached"] = time.monotonic() - began
        return stages

    def adopt(self, job: SavedJob) -> None:
        """Take over a job that another one has saved."""
        self._jobs.append(job)

    def cycle(self, job: SavedJob) -> None:
        self.save(job)
        self.restore(job)

    def state(self, job: SavedJob) -> str:
        return self.lab.run("squeue", "-ha", "-j", job.id, "-o", "%T", check=False).stdout.strip()

    def output(self) -> str:
        path = self.lab.user.home / "out.txt"
        return path.read_text() if path.exists() else ""

    def says(self, text: str, limit: float = 60) -> str:
        """Wait until the job has written that text; what it has written."""
        return str(until(f"the job says {text}", lambda: text in (said := self.output()) and said, limit))

    def end(self, job: SavedJob, limit: float = 60) -> tuple[str, str]:
        """Wait for the end of the job. Its state and exit code in accounting, of its last run."""
        until(f"job {job.id} ends", lambda: self.state(job) in ("", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT",
                                                              "OUT_OF_MEMORY"), limit)  # fmt: skip
        last = until("accounting knows the end", lambda: self._ended(job), 30)
        return last["State"].split()[0], last["ExitCode"]

    def _ended(self, job: SavedJob) -> dict[str, str] | None:
        last = [row for row in self.records(job) if row["JobID"] == job.id][-1]
        return last if last["End"] != "Unknown" else None

    def records(self, job: SavedJob) -> list[dict[str, str]]:
        """The records of the job's runs and of their steps in accounting."""
        keys = ("JobID", "State", "ExitCode", "End", "TotalCPU", "MaxRSS", "Elapsed")
        lines = self.lab.run("sacct", "-nPD", "-j", job.id, "-o", ",".join(keys)).stdout.splitlines()
        return [dict(zip(keys, line.split("|"), strict=True)) for line in lines]

    def ask(self, vm: str, line: bytes, answer: str) -> protocol.Report:
        report = self.host._context.connections.started_channel(vm).ask(line, answer, _ANSWER, or_else="refused")
        assert report.type == answer, report
        return report

    def close(self) -> None:
        for job in self._jobs:
            self.lab.run("scancel", job.id, check=False)
        for job in self._jobs:
            for vm in job.vms:
                for runs in range(1, job.runs + 1):
                    self.host.discard(f"{vm}-{runs}")
                self.host.destroy(vm, 0.0)
            self._delete(job)
        self.host.close()

    def place(self, job: SavedJob) -> Path:
        """Where the files of the job's state are."""
        return self.settings.save.directory / self._name(job)

    def _name(self, job: SavedJob, spec: Specification | None = None) -> str:
        return f"{(spec or job.spec).name}-{job.runs}"

    def _join(self, job: SavedJob, began: float = 0.0) -> list[Stage]:
        """Start the VMs, and give their nodes the job. The one with the script joins before the others: the script of
        a job runs on the node that Slurm has known for longest."""
        tag = f"mv_{job.vm.rpartition('-')[2]}{job.runs}"
        stages = []
        for specs in ([job.spec], job.specs[1:]) if job.runs > 1 else [job.specs]:
            with ThreadPoolExecutor(len(job.specs)) as pool:
                for each in pool.map(partial(self._start, job, tag), specs):
                    stages += each
            names = [spec.name for spec in specs]
            until("the nodes are idle", lambda: {self._node_state(vm) for vm in names} <= {"idle"}, 60)  # noqa: B023
        job.seconds["joined"] = time.monotonic() - began
        asyncio.run(self._pin(job, tag))
        until(f"job {job.id} runs", lambda: self.state(job) == "RUNNING", 60)
        first = self.lab.run("squeue", "-ha", "-j", job.id, "-O", "BatchHost:99").stdout.strip()
        assert job.runs == 1 or first == job.vm
        job.specs.sort(key=lambda spec: spec.name != first)
        job.seconds["running"] = time.monotonic() - began
        return stages

    def _start(self, job: SavedJob, tag: str, spec: Specification) -> list[Stage]:
        features = (spec.image, "instant", tag)
        peers = tuple((one.name, one.address.partition("/")[0]) for one in job.specs if one is not spec)
        node = NodeSpec(spec.name, spec.address, job.node, features, tag, spec.image, peers=peers, resumed=job.runs - 1)
        identity = Identity(
            hostname=spec.name, mac=spec.mac, address=spec.address, gateway=self.settings.network.gateway,
            machine_id=f"{int(spec.name.rpartition('-')[2]):032x}", users=(self._own_user(),),
            mounts=self.settings.mounts, peers=(*self.settings.network.hosts, *peers),
            bootstrap=asyncio.run(self.scheduler.bootstrap(node)),
        )  # fmt: skip
        return self.host.start(spec.name, spec.size, identity, spec.token)

    async def _pin(self, job: SavedJob, tag: str) -> None:
        found = (await self.scheduler.observe()).jobs[job.id]
        assert found.state is JobState.PENDING, found
        await self.scheduler.pin(found.ref, tag, (), at_once=job.runs > 1)

    def _set_clock(self, job: SavedJob, more: float) -> None:
        message = json.loads(protocol.add_user_message(self._own_user()))
        message["time"] += more
        line = json.dumps(message).encode() + b"\n"
        self._each(job, lambda spec: self.ask(spec.name, line, "user_added"))

    def _own_user(self) -> User:
        entry = pwd.getpwuid(self.lab.user.uid)
        return User(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir, "/bin/bash",
                    ((entry.pw_name, entry.pw_gid),))  # fmt: skip

    def _node(self, job: SavedJob, *values: str) -> None:
        self.lab.run("scontrol", "update", f"NodeName={','.join(job.vms)}", *values, check=False)

    def _node_state(self, vm: str) -> str:
        return self.lab.run("sinfo", "-haN", "-n", vm, "-o", "%t").stdout.split("\n")[0].strip()

    def _delete(self, job: SavedJob) -> None:
        def delete() -> bool:
            self._node(job, "State=DOWN", "Reason=gone")
            self.lab.run("scontrol", "delete", f"nodename={','.join(job.vms)}", check=False)
            return not any(map(self._node_state, job.vms))

        until(f"the nodes of job {job.id} are deleted", delete, 60)


@pytest.fixture
def saver(lab: LabUnderTest, _images: None) -> Iterator[Saver]:
    with tempfile.TemporaryDirectory(prefix="mvsaved-") as place:
        made = Saver(lab, Path(place))
        for path in lab.user.home.iterdir():
            if path.is_file():
                path.unlink()
        try:
            yield made
        finally:
            made.close()
