"""What it costs an agent to sample its host and its VMs each second.

An agent runs on this machine with as many VMs as the plan says: processes that sleep, each with control groups, a tap
and a manifest of its own, as a VM's QEMU has them. It is run with sampling and without, in turn. No controller is
connected, so an agent without sampling does nothing: what remains is the baseline.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from multiverse.core.errors import Broken
from multiverse.core.model.basics import CloneKind
from multiverse.host import manifest, path_security
from multiverse.host.cgroups import Hierarchy, hierarchies
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.network import open_tap
from multiverse.system.processes import ProcessIdentity

SITE = "bench"
"""The site of the VMs: nobody's."""

STARTED = 60.0
"""Seconds that an agent has to start, on a busy machine."""

SETTLED = 3.0
"""Seconds after which an agent does nothing but what it does each second."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """`vms` VMs, and `rounds` of so many seconds with sampling and without."""

    vms: int
    seconds: float
    rounds: int


@dataclass(frozen=True, slots=True)
class SamplingCost:
    """CPU seconds per second, which are shares of a core, one for each round: of an agent that samples, and of one that
    does not."""

    sampling: list[float]
    without: list[float]


def run(directory: Path, plan: SamplingPlan, progress: Callable[[str], None]) -> SamplingCost:
    """Measure. Raises `Broken` if an agent does not start, and what taps and control groups raise without root."""
    found = SamplingCost([], [])
    with _vms(directory, plan.vms):
        for number in range(plan.rounds):
            for interval, shares in ((1.0, found.sampling), (0.0, found.without)):
                shares.append(_share(directory, interval, plan.seconds))
                progress(f"round {number + 1}: {'sampling' if interval else 'without'}, {shares[-1]:.3%} of a core")
    return found


def _share(directory: Path, interval: float, seconds: float) -> float:
    with _agent(directory, interval) as agent:
        time.sleep(SETTLED)
        began, before = time.monotonic(), _cpu(agent.pid)
        time.sleep(seconds)
        return (_cpu(agent.pid) - before) / (time.monotonic() - began)


def _cpu(pid: int) -> float:
    """CPU seconds of all threads of a process, to the nanosecond: the kernel's ticks are too coarse for this."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextlib.contextmanager
def _agent(directory: Path, interval: float) -> Iterator[subprocess.Popen[bytes]]:
    socket, config = directory / "agent.sock", directory / "multiverse.toml"
    config.write_text(
        f"""state_dir = "{directory}/state"
[agent]
socket = "{socket}"
state_dir = "{directory}/agent"
sample = {interval}
[qemu]
accel = "tcg"
images = "{directory}/images"
templates = "{directory}/templates"
vms = "{directory}/vms"
run = "{directory}/run"
"""
    )
    argv = [sys.executable, "-c", "from multiverse.cli.main import main; main()", "agent", "--config", str(config)]
    with (directory / "agent.log").open("wb") as log:
        agent = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        until = time.monotonic() + STARTED
        while not socket.exists():
            if agent.poll() is not None or time.monotonic() > until:
                raise Broken("the agent does not start", hint=f"see {directory}/agent.log")
            time.sleep(0.1)
        yield agent
    finally:
        agent.terminate()
        agent.wait()


@contextlib.contextmanager
def _vms(directory: Path, count: int) -> Iterator[None]:
    """Processes that look like VMs to an agent."""
    groups = hierarchies()
    with contextlib.ExitStack() as stack:
        for place in ("vms", "run", "state", "agent", "images", "templates"):
            path_security.make_directory(directory / place, 0o711)
        for number in range(1, count + 1):
            _add_vm(stack, directory / "vms", f"mv{SITE}-{number}", groups)
        yield


def _add_vm(stack: contextlib.ExitStack, vms: Path, name: str, groups: list[Hierarchy]) -> None:
    process = subprocess.Popen(["sleep", "infinity"])
    for group in groups:
        made = group.create(name)
        stack.callback(_remove_group, made)
        (made / "cgroup.procs").write_text(str(process.pid))
    stack.callback(process.wait)
    stack.callback(process.kill)
    stack.callback(os.close, open_tap(name, None))
    home = vms / name
    home.mkdir(exist_ok=True)
    who = ProcessIdentity.of(process.pid)
    manifest.write(
        home, Manifest(name, CloneKind.INSTANT, VmPhase.STARTED, "", 1, 256, who.pid, who.started, who.boot_id)
    )
    stack.callback(home.rmdir)
    stack.callback((home / manifest.FILE).unlink)


def _remove_group(group: Path) -> None:
    with contextlib.suppress(OSError):
        group.rmdir()
        group.parent.rmdir()  # the last one
