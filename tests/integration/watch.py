"""Conditions that the tests of the real lab wait for or check."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiverse.client import Client
from multiverse.system import files as system_files
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.service import patience

if TYPE_CHECKING:
    from tests.integration.conftest import LabUnderTest

SLURMS_DELAY = 121.0  # seconds for which Slurm keeps a job that it queues again itself
LIMIT = 120.0
_UNSEEN_CHANGE = re.compile(
    r"^slurmstepd\S*: error: Timeout waiting for \S+/cgroup\.events to become empty\.\n", re.MULTILINE
)


def kill(pid: int) -> None:
    """Kill a process and wait for its end: until then, it counts as running, and nothing would start it again."""
    handle = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([handle], [], [], 10)[0], f"process {pid} does not end"
    finally:
        os.close(handle)


def until(what: str, ask: Callable[[], Any], limit: float = LIMIT) -> Any:
    """Ask until the answer is true, and return it. Fails after `limit` seconds with the words of `what`. On an emulated
    machine it fails later, and asks less often: each question takes time from what it waits for."""
    factor = patience()
    limit *= factor
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if answer := ask():
            return answer
        time.sleep(0.1 * factor)
    raise AssertionError(f"not within {limit:g} s: {what}")


def latest(client: Client, job: str) -> dict[str, Any]:
    found = client.jobs(job)
    return found[-1] if found else {}


def ended(client: Client, job: str, state: str, limit: float = LIMIT) -> dict[str, Any]:
    over = ("done", "cancelled", "revoked", "failed")
    try:
        row = until(f"job {job} is over", lambda: (r := latest(client, job)) and r["state"] in over and r, limit)
    except AssertionError as error:
        raise AssertionError(f"{error}; it is {latest(client, job)}, and the VMs are {client.vms()}") from error
    assert row["state"] == state, row
    return dict(row)


def accounted(lab: LabUnderTest, job: str, limit: float = 30.0) -> tuple[str, str]:
    """The job's state and exit code in Slurm's accounting, once slurmdbd knows its end.

    slurmctld may report the start of a job only after the end of the job, and then with the state that the job has now.
    Until slurmdbd has the report of the end too, such a job has a final state, but the exit code 0:0 and no end.
    """

    def ask() -> tuple[str, str] | None:
        line = lab.run("sacct", "-X", "-n", "-P", "-o", "State,ExitCode,End", "-j", job).stdout.strip()
        state, code, end = (*line.split("|"), "", "", "")[:3]
        return (state.split()[0], code) if state and end != "Unknown" else None

    return until(f"sacct of {job}", ask, limit)


def release(text: str) -> tuple[int, ...]:
    """`slurm-wlm 24.11.5` and `24.11` as numbers."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def output_of(path: Path) -> str:
    """What a job wrote into its output, without a line that slurmstepd adds to it now and then.

    slurmstepd of 22.05 to 25.11 reads whether its control group of version 2 is empty, and only then asks to be told of
    changes (`_wait_cgroup_empty` of cgroup/v2). If the last process leaves in between, slurmstepd waits a second for a
    change that has happened, and reports that in the job's standard error. It happens on busy machines.
    """
    return _UNSEEN_CHANGE.sub("", path.read_text())


def written(path: Path) -> str:
    return str(until(f"{path.name} is written", lambda: path.exists() and output_of(path), 20))


def below(top: Path) -> Iterator[Path]:
    """All files and directories below one. Unlike Path.rglob, bears that one vanishes meanwhile."""
    for directory, directories, files in os.walk(top):
        yield from (Path(directory, name) for name in (*directories, *files))


def matching(top: Path, pattern: str) -> list[Path]:
    """All paths below `top` that match, also while some vanish."""
    return list(system_files.matching(top, pattern))


def qemu_of(vm: str) -> int:
    """The pid of the VM's QEMU."""
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"qemu-system-x86_64") and vm.encode() in words:
            return int(process.name)
    raise AssertionError(f"{vm} has no QEMU")


def nothing_left(lab: LabUnderTest, client: Client) -> None:
    """No VM, claim but the template's, live row, node, tap, process, directory or socket remains."""
    until("no VM is left", lambda: not client.vms() and not client.jobs(), 60)
    assert not [n for n in lab.run("sinfo", "-h", "-N", "-o", "%N").stdout.split() if n.startswith("mv") and "-" in n]
    qemu = lab.settings.qemu
    assert not [*qemu.vms.glob("mv*"), *qemu.run.glob("*")]
    assert not [*qemu.templates.glob(".*.building-*"), *qemu.templates.glob(".*.dropped-*")]
    site = client.status()["site"]
    assert not list(Path("/sys/class/net").glob(f"mv{site}*"))
    assert not [line for line in emulators() if str(qemu.vms) in line or str(qemu.templates) in line]
    (host,) = client.hosts()
    frozen = sum(one["memory"] for one in client.templates() if one["state"] != "absent") * host["template_copies"]
    assert (host["claimed"]["cpus"], host["claimed"]["memory"]) == (0, frozen)
    assert not matching(Path("/sys/fs/cgroup"), f"**/multiverse/mv{site}*")


def emulators() -> list[str]:
    """The command lines of all QEMUs."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if b"qemu-system-x86_64" in line.split(b"\0")[0]:
            found.append(line.replace(b"\0", b" ").decode())
    return found


def mend(lab: LabUnderTest) -> None:
    """Start what has died of the lab, as `multiverse lab up` does, except the controller, which the tests start."""
    asyncio.run(lifecycle.up(lab.where, LabOptions(), controller=False))


def kept_by_slurm(lab: LabUnderTest, since: float) -> None:
    """Wait until slurmctld has saved its jobs. It saves them some seconds late and forgets them if killed before."""
    kept = lab.where.slurmctld / "job_state"
    until("slurmctld has saved its jobs", lambda: kept.exists() and kept.stat().st_mtime > since, 30)
