"""The usual daemon or agent with crash points: `python -m tests.integration.crash_points ROLE SETTINGS RECORDS FILE`.

ROLE is `controller` or `agent`. FILE has lines `WHEN EVENT PROCESS`. WHEN is before or after. EVENT is a state
(`vm:parked`) that a commit makes a row enter, a phase of a VM's manifest (`manifest:started`) that is written, `qemu`
when a QEMU is started, `job:STEP` when the agent does that for a job with VMs inside (`JOB_STEPS`), or `scontrol:VERB`
when that command is run. PROCESS is what is killed: the `controller`, the
`agent`, every `qemu` of a VM, or a service of the lab whose record is in RECORDS. Each line is removed before its
process is killed, so that each crash happens once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from multiverse import config
from multiverse.agent.jobs import JobVmService
from multiverse.cli.daemon import daemon
from multiverse.core.transition import Move
from multiverse.drivers.qemu.job_vms import QemuJobVms
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.host import manifest
from multiverse.host.qemu import session
from multiverse.service.agent import serve as serve_agent
from multiverse.store import Store, Transaction
from multiverse.system.locks import locked_file
from multiverse_lab.lab.process import recorded

ROLES = ("controller", "agent")
JOB_STEPS = ("write", "connect_network", "write_groups", "make", "connect", "remove", "remove_network")
"""What the agent does for a job with VMs inside, in this order: `JobVmService` and `JobHost` have it."""


def pid_file(crash_points: Path, role: str) -> Path:
    """Where a process with that role writes its pid."""
    return crash_points.with_name(f"{crash_points.name}.{role}")


class CrashPoints:
    """Which process to kill at which event."""

    def __init__(self, role: str, file: Path, records: Path, vms: Path) -> None:
        self._role, self._file, self._records, self._vms = role, file, records, vms
        self._lock = threading.Lock()  # never released when this process kills itself

    def reach(self, when: str, *events: str) -> None:
        """These events happen now: kill the processes of their lines."""
        with self._lock, locked_file(self._file.with_suffix(".lock")):  # the other process uses the file, too
            lines = self._file.read_text().splitlines()
            due = [line for line in lines if line.split()[:2] in [[when, event] for event in events]]
            if not due:
                return
            # A process that several lines of the same moment name is killed once for all of them.
            self._file.write_text("".join(f"{line}\n" for line in lines if line not in due))
            for process_name in {line.split()[2] for line in due}:
                for pid in self._pids(process_name):
                    with suppress(ProcessLookupError):  # it was killed a moment ago, and has not been started again
                        os.kill(pid, signal.SIGKILL)

    def _pids(self, process_name: str) -> list[int]:
        if process_name == self._role:
            return [os.getpid()]
        if process_name in ROLES:
            return [int(pid_file(self._file, process_name).read_text())]
        if process_name == "qemu":
            known = [manifest.read(path) for path in self._vms.glob("mv*")]
            return [vm.pid for vm in known if vm and vm.pid and vm.process.is_alive()]
        running = recorded(self._records / f"{process_name}.json")
        return [running.pid] if running else []


def watch_commits(points: CrashPoints) -> None:
    entered: set[str] = set()
    transaction, apply = Store.transaction, Transaction.apply

    def apply_and_record(self: Transaction, move: Move) -> None:
        rows = self.load_active()
        for change in move.changes:
            old = rows.get(change.row.key)
            if old is None or old.state != change.row.state:
                entered.add(f"{change.row.key.kind}:{change.row.state}")
        apply(self, move)

    @contextmanager
    def watched(self: Store, *, releasing: bool = False) -> Iterator[Transaction]:
        entered.clear()
        with transaction(self, releasing=releasing) as tx:
            yield tx
            points.reach("before", *entered)
        points.reach("after", *entered)

    Store.transaction, Transaction.apply = watched, apply_and_record  # type: ignore[method-assign]


def with_crash_points(points: CrashPoints, call: Callable[..., Any], event: Callable[..., str]) -> Callable[..., Any]:
    def watched(*args: Any, **more: Any) -> Any:
        points.reach("before", event(*args))
        value = call(*args, **more)
        points.reach("after", event(*args))
        return value

    return watched


def watch_host(points: CrashPoints) -> None:
    """What the agent does on its host."""
    manifest.write = with_crash_points(points, manifest.write, lambda directory, written: f"manifest:{written.phase}")
    session._execute = with_crash_points(points, session._execute, lambda *args: "qemu")


def watch_jobs(points: CrashPoints) -> None:
    """What the agent does for jobs with VMs inside."""
    for step in JOB_STEPS:
        owner: Any = JobVmService if step.startswith("write") else QemuJobVms
        name = f"_{step}" if owner is JobVmService else step
        setattr(owner, name, with_crash_points(points, getattr(owner, name), lambda *args, step=step: f"job:{step}"))


def watch_slurm(points: CrashPoints) -> None:
    """The commands that the controller gives to Slurm."""
    run = SlurmCommands.run

    async def watched(self: SlurmCommands, program: str, *args: str, **more: Any) -> str:
        event = f"{program}:{args[0] if args else ''}"
        points.reach("before", event)
        out = await run(self, program, *args, **more)
        points.reach("after", event)
        return out

    SlurmCommands.run = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    its_role = sys.argv[1]
    settings, records, file = map(Path, sys.argv[2:])
    pid_file(file, its_role).write_text(str(os.getpid()))
    all_points = CrashPoints(its_role, file, records, config.load(settings).qemu.vms)
    if its_role == "agent":
        watch_host(all_points)
        watch_jobs(all_points)
        asyncio.run(serve_agent(config.load(settings)))
    else:
        watch_commits(all_points)
        watch_slurm(all_points)
        daemon(settings)
