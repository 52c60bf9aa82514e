"""Strikes the components of a lab, one after the other, and mends them."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

from multiverse.api import VmView, decode
from multiverse.client import Client
from multiverse.core.errors import Broken, MultiverseError
from multiverse.system.processes import ProcessIdentity
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.services import SERVICES
from multiverse_lab.lab.session import LabSession
from multiverse_lab.lab.users import PrivateUser
from multiverse_lab.soak import disk, hog
from multiverse_lab.soak.judge import HappenedIncident
from multiverse_lab.soak.kinds import CONTROLLER_KILLED, NEWCOMER
from multiverse_lab.soak.plan import PlannedIncident, Submission
from multiverse_lab.soak.workload import Workload

NSSWITCH, PASSWD = Path("/etc/nsswitch.conf"), Path("/etc/passwd")
SAVED = 15.0
"""Seconds to wait for slurmctld to save its jobs. It saves them some seconds late and forgets the rest if killed."""

FIRST = 4_294_960_000
"""A priority above those of all other jobs, which Slurm counts down from 4,294,901,759."""

MEND_TRIES = 3
_SERVICES = {
    "slurmctld killed": "slurmctld",
    "slurmdbd killed": "slurmdbd",
    "mariadb killed": "mariadb",
    "munged killed": "munged",
    "NFS killed": "ganesha",
    "controller killed": "controller",
}

Progress = Callable[[str], None]


class Incidents:
    """The incidents of a test. `happened` lists those that are over, `died` the components that ended by themselves.
    `newcomers` are users whom nobody knows yet. `floor` is the memory in MiB below which the controller starts no VM.
    """

    def __init__(
        self, lab: LabSession, workload: Workload, newcomers: list[PrivateUser], floor: int, progress: Progress
    ) -> None:
        self._lab, self._workload, self._newcomers, self._floor = lab, workload, newcomers, floor
        self._progress = progress
        self._came = 0  # newcomers so far
        self.happened: list[HappenedIncident] = []
        self.died: list[str] = []
        self._strikes: Mapping[str, Callable[[PlannedIncident], Awaitable[str | None]]] = {
            **dict.fromkeys(_SERVICES, self._kill_service),
            "QEMU killed": self._kill_qemu,
            "slurmctld stopped": self._stop_slurmctld,
            "disk full": self._fill_disk,
            "names lost": self._lose_names,
            "memory short": self._take_memory,
        }

    async def strike_all(self, planned: tuple[PlannedIncident, ...], seconds: float, stop: asyncio.Event) -> None:
        """Let the planned incidents happen in their order. Ends after `seconds`, or when stopped, with all mended."""
        end = time.monotonic() + seconds
        for one in planned:
            if await _stopped(stop, min(one.after, end - time.monotonic())) or time.monotonic() >= end:
                return
            self.note_deaths()
            await self.strike(one)

    def note_deaths(self) -> None:
        """Note which services do not run, although all of them should."""
        for service in SERVICES:
            if service.running(self._lab.where) is None:
                self.died.append(f"{service.name} ended by itself before {time.strftime('%H:%M:%S')}")

    async def strike(self, one: PlannedIncident) -> None:
        """Let one incident happen, and mend what it broke, however this ends."""
        began = time.time()
        vm: str | None = ""
        await mend(self._lab)
        try:
            vm, _ = await asyncio.gather(self._strikes[one.kind.name](one), self._kill_controller_meanwhile(one))
        finally:
            await mend(self._lab)
            kinds = [one.kind] * (vm is not None) + [CONTROLLER_KILLED] * one.twofold
            for kind in kinds:
                hit = vm or "" if kind is one.kind else ""
                self.happened.append(HappenedIncident(kind, began, time.time(), hit))
            words = " and ".join(kind.name for kind in kinds) + (f", {vm}" if vm else "")
            if kinds:
                self._progress(f"{words}: mended after {time.time() - began:.0f} s")

    async def _kill_controller_meanwhile(self, one: PlannedIncident) -> None:
        if one.twofold:
            await asyncio.sleep(one.pause / 2)
            await asyncio.to_thread(kill, self._service("controller"))

    async def _kill_service(self, one: PlannedIncident) -> str:
        name = _SERVICES[one.kind.name]
        if name == "slurmctld":
            async with self._workload.quiet:
                await self._until_saved()
                await asyncio.to_thread(kill, self._service(name))
        else:
            await asyncio.to_thread(kill, self._service(name))
        await asyncio.sleep(one.pause)
        return ""

    def _service(self, name: str) -> ProcessIdentity:
        (service,) = (service for service in SERVICES if service.name == name)
        running = service.running(self._lab.where)
        if running is None:
            raise Broken(f"{name} does not run", hint=f"see {self._lab.where.log}")
        return running.identity

    async def _until_saved(self) -> None:
        """Wait until slurmctld has saved its jobs since it was last asked something."""
        file, deadline = self._lab.where.slurmctld / "job_state", time.monotonic() + SAVED
        while time.monotonic() < deadline:
            if file.exists() and file.stat().st_mtime > self._workload.changed:
                return
            await asyncio.sleep(0.2)

    async def _kill_qemu(self, one: PlannedIncident) -> str | None:
        """Kill the QEMU of any VM. None if there was none."""
        with Client(self._lab.settings.socket) as client:
            try:
                vms = sorted(vm.name for vm in decode(list[VmView], await asyncio.to_thread(client.vms)))
            except MultiverseError:
                return None
        if not vms:
            return None
        vm = vms[int(one.pick * len(vms))]
        qemu = await asyncio.to_thread(qemu_of, vm)
        if qemu is None:
            return None
        await asyncio.to_thread(kill, qemu)
        return vm

    async def _stop_slurmctld(self, one: PlannedIncident) -> str:
        slurmctld = self._service("slurmctld")
        os.kill(slurmctld.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(one.pause)
        finally:
            os.kill(slurmctld.pid, signal.SIGCONT)
        return ""

    async def _fill_disk(self, one: PlannedIncident) -> str:
        filler = self._lab.where.controller / "filler"
        try:
            await asyncio.to_thread(disk.fill, filler)
            await asyncio.sleep(one.pause)
        finally:
            filler.unlink(missing_ok=True)
        return ""

    async def _lose_names(self, one: PlannedIncident) -> str:
        """Make /etc/passwd forget users whom nobody has looked up yet, and nsswitch.conf name a service that does not
        answer. Meanwhile such a user submits a job, and root moves it to the front of the queue, where the controller
        needs to know who the user is. The user of the other jobs stays known: slurmctld itself ends a step whose user
        it cannot name ("Error generating job credential")."""
        directory = self._lab.where.root / "users"
        directory.mkdir(exist_ok=True)
        without, remote = directory / "passwd.without", directory / "nsswitch.remote"
        ours = {user.name for user in self._newcomers}
        known = [line for line in PASSWD.read_text().splitlines() if line.partition(":")[0] not in ours]
        without.write_text("\n".join(known) + "\n")
        remote.write_text("passwd: files sss\ngroup: files\n")
        disk.bind(remote, NSSWITCH)
        disk.bind(without, PASSWD)
        try:
            newcomer = self._newcomers[self._came % len(self._newcomers)]
            self._came += 1
            job = await self._workload.submit(Submission(0.0, f"newcomer-{self._came}", NEWCOMER, 4), newcomer)
            root = replace(self._lab, user=PrivateUser("root", 0, Path("/")))
            await asyncio.to_thread(root.run, "scontrol", "update", f"JobId={job.job_id}", f"Priority={FIRST}")
            await asyncio.sleep(one.pause)
        finally:
            disk.unbind(PASSWD)
            disk.unbind(NSSWITCH)
        return ""

    async def _take_memory(self, one: PlannedIncident) -> str:
        """Take so much memory that less than the controller's floor is available."""
        argv = [sys.executable, "-m", "multiverse_lab.soak.hog", str(self._floor - 512)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
            try:
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline and process.poll() is None:
                    if hog.available() <= self._floor:
                        break
                    await asyncio.sleep(0.2)
                await asyncio.sleep(one.pause)
            finally:
                if process.stdin is not None:
                    process.stdin.close()
        return ""


async def mend(lab: LabSession) -> None:
    """Start what has died. A service may need the one that was just started, so it is tried more than once."""
    for left in reversed(range(MEND_TRIES)):
        try:
            await lifecycle.up(lab.where, LabOptions())
            return
        except MultiverseError:
            if not left:
                raise
            await asyncio.sleep(1.0)


def kill(process: ProcessIdentity) -> None:
    """Kill a process and wait for its end: until then it counts as running, and nothing would start it again."""
    handle = process.open()
    if handle is None:
        return
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [], 10.0)
    finally:
        os.close(handle)


def qemu_of(vm: str) -> ProcessIdentity | None:
    """The QEMU of the VM."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].rpartition(b"/")[2].startswith(b"qemu-system") and vm.encode() in words:
            return ProcessIdentity.of(int(process.name))
    return None


async def _stopped(stop: asyncio.Event, seconds: float) -> bool:
    """Wait so long. Whether the test was stopped meanwhile."""
    try:
        await asyncio.wait_for(stop.wait(), max(seconds, 0.0))
    except TimeoutError:
        return False
    return True
