"""The time from `sbatch` to the script's first instruction: clones, full boots and bare metal, in one run.

Every job goes through Slurm from submission to end, one at a time. The order is shuffled by a seed, and a random gap of
0 to 1 s precedes each job, because slurmctld's loop runs once a second and no kind may always meet the same part of it.
The script's first instruction connects to a listener of this process, so one clock measures both moments. The job then
waits until it is released; meanwhile the CPU time and memory of its VM are measured, which contain no workload yet.
"""

from __future__ import annotations

import random
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from multiverse.api import StatusView, TimelineView, VmView, decode
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.bench.stats import Estimate, Summary, excess, percentile, ratio, summary
from multiverse_lab.lab.session import LabSession

T = TypeVar("T")
JOB_LIMIT = 300.0
"""Seconds within which a job must start, and within which it must be reclaimed after its end."""

LOG_HINT = "see the lab's log/controller.log"

SCRIPT = """#!/bin/bash
exec 3<>/dev/tcp/{host}/{port}
echo "$SLURM_JOB_ID" >&3
read -r _ <&3
"""


@dataclass(frozen=True, slots=True)
class JobKind:
    """A way to start a job, as options of sbatch. With `vm` False the job runs on bare metal. `script` connects to
    {host} and {port}, and waits there."""

    name: str
    options: tuple[str, ...]
    vm: bool = True
    script: str = SCRIPT


WARM = "warm"
"""The name of a second copy of the default image, for which there are warm pools. The VMs of all other images are
created for their jobs."""

POOLS = f"""\
[[pool]]
image = "{WARM}"
depth = "parked"
min = 1

[[pool]]
image = "{WARM}"
depth = "joined"
min = 1
cpus = 1
memory = 150
"""

KINDS = (
    JobKind("instant", ("--constraint=slim&instant",)),
    JobKind("parked", (f"--constraint={WARM}&instant", "--mem=160")),  # more than the joined one has
    JobKind("joined", (f"--constraint={WARM}&instant", "--mem=150")),
    JobKind("plugged", ("--constraint=slim&instant", "--cpus-per-task=2", "--mem=1G")),
    JobKind("full_same", ("--constraint=slim&full",)),
    JobKind("full_stock", ("--constraint=stock&full",)),
    JobKind("bare_metal", ("--partition=bare",), vm=False),
)


@dataclass
class LatencySamples:
    """The samples of one kind, one value for each job, in seconds and MiB."""

    submit_to_start: list[float] = field(default_factory=list)
    first_byte: list[float] = field(default_factory=list)
    node_idle: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: list[float] = field(default_factory=list)
    uss_mib: list[float] = field(default_factory=list)
    pss_mib: list[float] = field(default_factory=list)


Progress = Callable[[str, int, int, float], None]
"""Called after each job with its kind, the number of jobs done, the number of all jobs, and the job's seconds."""

BareCost = Callable[[str], tuple[float, float, float] | None]
"""CPU seconds, unique MiB and proportional MiB of a job's processes on bare metal; None if there are none."""


class StartListener:
    """The listener to which a script reports its first instruction. Guests and this machine reach it on the bridge."""

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0))
        self.host, self.port = host, self._socket.getsockname()[1]

    def __enter__(self) -> StartListener:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def wait(self, job: str, timeout: float, alive: Callable[[], bool]) -> tuple[float, socket.socket]:
        """The monotonic time of the job's report, and the connection on which the job waits. Reports of other jobs are
        ignored. Raises `Broken` if the report does not come in time, or once `alive()` is false, because then nothing
        can start the job any more."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._socket], [], [], min(left, 1.0))[0]:
                if not alive():
                    raise Broken(f"the lab went down before job {job} started", hint=LOG_HINT)
                continue
            arrived = time.monotonic()
            connection, _ = self._socket.accept()
            connection.settimeout(5.0)
            word = connection.recv(64).decode(errors="replace").strip()
            if word == job:
                return arrived, connection
            connection.close()
        raise Broken(f"job {job} did not start within {timeout:g} s", hint=LOG_HINT)


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """`jobs` of each kind. `seed` determines their order and the gaps between them."""

    jobs: int
    seed: int
    kinds: Sequence[JobKind]


def run(
    lab: LabSession, client: Client, plan: LatencyPlan, bare_cost: BareCost, progress: Progress
) -> dict[str, LatencySamples]:
    """Measure the jobs of the plan. Returns the samples by the kind's name."""
    chance = random.Random(plan.seed)
    order = [kind for kind in plan.kinds for _ in range(plan.jobs)]
    chance.shuffle(order)
    found = {kind.name: LatencySamples() for kind in plan.kinds}
    with StartListener(lab.settings.network.gateway) as listener:
        for number, kind in enumerate(order, 1):
            _until_pools_are_full(client)
            time.sleep(chance.random())
            took = run_job(lab, client, listener, kind, found[kind.name], bare_cost)
            progress(kind.name, number, len(order), took)
    return found


def run_job(
    lab: LabSession,
    client: Client,
    listener: StartListener,
    kind: JobKind,
    samples: LatencySamples,
    bare_cost: BareCost,
) -> float:
    """Run one job and add its samples. Returns the seconds from submission to its first instruction."""
    script = kind.script.format(host=listener.host, port=listener.port)
    began = time.monotonic()
    job = lab.submit(script, "--output=/dev/null", *kind.options)
    submitted = time.monotonic()
    arrived, connection = listener.wait(job, JOB_LIMIT, lab.settings.socket.exists)
    with connection:
        samples.submit_to_start.append(arrived - began)
        cost = _vm_cost(client, job) if kind.vm else bare_cost(job)
        if cost is not None:
            for values, value in zip((samples.cpu_s, samples.uss_mib, samples.pss_mib), cost, strict=True):
                values.append(value)
        connection.sendall(b"go\n")
    samples.stages.setdefault("sbatch", []).append(submitted - began)
    if kind.vm:
        one = _until_reclaimed(client, job)
        add_timeline(samples, one)
        add_both_ends(samples, one, began, arrived)
    else:
        until_ended(lab, job)
    return arrived - began


def _vm_cost(client: Client, job: str) -> tuple[float, float, float] | None:
    """CPU seconds, unique MiB and proportional MiB of the job's VM; None if there is none."""
    for vm in decode(list[VmView], client.vms(exact=True)):
        if vm.job_id == job and vm.private:
            return vm.cpu_s, vm.private, vm.pss
    return None


def until(met: Callable[[], T | None], otherwise: str, hint: str = LOG_HINT, pause: float = 0.05) -> T:
    """Wait until something is so, or is there, and ask every `pause` seconds. Raises `Broken` with these words if it is
    not in time."""
    deadline = time.monotonic() + JOB_LIMIT
    while not (found := met()):
        if time.monotonic() > deadline:
            raise Broken(f"{otherwise} within {JOB_LIMIT:g} s", hint=hint)
        time.sleep(pause)
    return found


def _until_reclaimed(client: Client, job: str) -> TimelineView:
    """Wait until nothing is left of the job's VM, so that the next job is not measured during this reclaim. Returns the
    timeline of the job's last attempt."""
    deadline = time.monotonic() + JOB_LIMIT
    while time.monotonic() < deadline:
        one = decode(list[TimelineView], client.timeline(job))[-1]
        if one.state == "done":
            return one
        time.sleep(0.05)
    raise Broken(f"job {job} was not reclaimed within {JOB_LIMIT:g} s", hint=LOG_HINT)


def _until_pools_are_full(client: Client) -> None:
    """Wait until the pools are full, so that no job is measured while spares are created."""
    full = lambda: all(pool.ready >= pool.wanted for pool in decode(StatusView, client.status()).pools)  # noqa: E731
    until(full, "the pools were not full")


def until_ended(lab: LabSession, job: str) -> None:
    """Wait until Slurm has ended the job."""
    shown = ("squeue", "-h", "-j", job, "-t", "PD,R,CG")
    until(lambda: not lab.run(*shown).stdout.strip(), f"job {job} did not end", "see the lab's log/slurmctld.log")


def add_timeline(samples: LatencySamples, one: TimelineView) -> None:
    """Add the phases and stages of one attempt. The time to the guest agent's first byte is the sum of the effects'
    stages up to it; the time to the idle node is that between the commits of the claim and of the registration."""
    first = 0.0
    counting = True
    for phase in one.phases:
        if phase.name != "run":
            samples.stages.setdefault(phase.name, []).append(phase.seconds)
        for name, seconds in phase.stages:
            samples.stages.setdefault(f"{phase.name}.{name}", []).append(seconds)
            first += seconds if counting else 0.0
            counting = counting and name != "first_byte"
    if not counting:
        samples.first_byte.append(first)
    ready = [phase.seconds for phase in one.phases if phase.name in ("clone", "join")]
    if len(ready) == 2:
        samples.node_idle.append(sum(ready))


def add_both_ends(samples: LatencySamples, one: TimelineView, began: float, arrived: float) -> None:
    """Add the stages before and after the phases of an attempt, which began and whose script reported at these
    monotonic times: `seen`, from the call of sbatch to the commit of the attempt, and `start`, from the commit that all
    its VMs are nodes to the script's first instruction. The phase `launch` ends later, when a running job is seen."""
    moments = {phase.name: phase.began for phase in one.phases}
    if "queued" in moments and "launch" in moments:
        samples.stages.setdefault("seen", []).append(moments["queued"] - began)
        samples.stages.setdefault("start", []).append(arrived - moments["launch"])


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """The figures of one kind, as `--json` prints them. `stages` (in seconds and in their order), `cpu_s`, `uss_mib`
    and `pss_mib` are medians; a figure that a kind does not have is None."""

    submit_to_start: Summary | None
    first_byte: Summary | None
    node_idle: Summary | None
    stages: dict[str, float]
    cpu_s: float | None
    uss_mib: float | None
    pss_mib: float | None


def result(samples: LatencySamples) -> LatencyResult:
    return LatencyResult(
        submit_to_start=summary(samples.submit_to_start),
        first_byte=summary(samples.first_byte),
        node_idle=summary(samples.node_idle),
        stages={name: percentile(values, 0.5) for name, values in samples.stages.items()},
        cpu_s=_median(samples.cpu_s),
        uss_mib=_median(samples.uss_mib),
        pss_mib=_median(samples.pss_mib),
    )


def plugging(found: Mapping[str, LatencySamples]) -> dict[str, Estimate | None]:
    """The seconds that plugging a second CPU and memory into a clone adds: to the stage `plug`, to the time to the
    guest agent's first byte, and to the time to the idle node. Empty unless both kinds were measured."""
    if "plugged" not in found or "instant" not in found:
        return {}
    more, less = found["plugged"], found["instant"]
    return {
        "plug": excess(more.stages.get("join.plug", ()), less.stages.get("join.plug", ())),
        "first_byte": excess(more.first_byte, less.first_byte),
        "node_idle": excess(more.node_idle, less.node_idle),
    }


@dataclass(frozen=True, slots=True)
class BareMetalComparison:
    """A kind's median from submission to start compared with that of bare metal: their ratio, and their difference in
    seconds."""

    kind: str
    ratio: Estimate | None
    excess: Estimate | None


def beside_bare_metal(found: Mapping[str, LatencySamples], base: str = "bare_metal") -> list[BareMetalComparison]:
    """Each kind compared with the kind `base`; empty unless that was measured."""
    if base not in found:
        return []
    less = found[base].submit_to_start
    return [
        BareMetalComparison(name, ratio(one.submit_to_start, less), excess(one.submit_to_start, less))
        for name, one in found.items()
        if name != base
    ]


def _median(samples: Sequence[float]) -> float | None:
    return percentile(samples, 0.5) if samples else None
