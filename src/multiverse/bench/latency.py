"""How long from `sbatch` to the script's first instruction: clones, full boots and bare metal, in one run.

All kinds go whole through Slurm, submission to end, one job at a time, in an order shuffled by a seed and
after a random gap of 0 to 1 s: Slurm's loop has a beat of one second, and no kind may always meet the same
part of it. The script's first instruction connects to a listener of this process, so both moments are
taken on one clock. The job then waits for its release, and in that moment its VM's CPU time and memory are
measured: what it took to get there, with nothing of a workload in it.
"""

from __future__ import annotations

import random
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multiverse.bench.stats import Estimate, Summary, excess, percentile, ratio, summary
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse.lab.session import LabSession

JOB_LIMIT = 300.0

SCRIPT = """#!/bin/bash
exec 3<>/dev/tcp/{host}/{port}
echo "$SLURM_JOB_ID" >&3
read -r _ <&3
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to start a job, as options of sbatch. `vm` False: it runs on the machine itself."""

    name: str
    options: tuple[str, ...]
    vm: bool = True


WARM = "warm"
"""The default image again, under a name of its own: its VMs are kept in pools, those of the others are made anew."""

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
    Kind("instant", ("--constraint=slim&instant",)),
    Kind("parked", (f"--constraint={WARM}&instant", "--mem=160")),  # more than the joined one has
    Kind("joined", (f"--constraint={WARM}&instant", "--mem=150")),
    Kind("plugged", ("--constraint=slim&instant", "--cpus-per-task=2", "--mem=1G")),
    Kind("full_same", ("--constraint=slim&full",)),
    Kind("full_stock", ("--constraint=stock&full",)),
    Kind("bare_metal", ("--partition=bare",), vm=False),
)


@dataclass
class Samples:
    """What was measured of one kind, a value for each job. Seconds and MiB."""

    submit_to_start: list[float] = field(default_factory=list)
    first_byte: list[float] = field(default_factory=list)
    node_idle: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: list[float] = field(default_factory=list)
    uss_mib: list[float] = field(default_factory=list)
    pss_mib: list[float] = field(default_factory=list)


Progress = Callable[[str, int, int, float], None]
"""Called after each job with its kind, how many are done, of how many, and its seconds."""

BareCost = Callable[[str], tuple[float, float, float] | None]
"""CPU seconds, unique and proportional MiB of what runs a job on the machine itself; None if not found."""


class Listener:
    """Where scripts report their first instruction. Guests and this machine reach it on the bridge."""

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0))
        self.host, self.port = host, self._socket.getsockname()[1]

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def wait(self, job: str, timeout: float, alive: Callable[[], bool]) -> tuple[float, socket.socket]:
        """When the job's script said its first word, and the connection that holds it. Words of other jobs
        are let go. `Broken` if it does not come in time, or nothing is `alive` any more that could start it."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._socket], [], [], min(left, 1.0))[0]:
                if not alive():
                    raise Broken(f"the lab went down while job {job} was awaited")
                continue
            arrived = time.monotonic()
            connection, _ = self._socket.accept()
            connection.settimeout(5.0)
            word = connection.recv(64).decode(errors="replace").strip()
            if word == job:
                return arrived, connection
            connection.close()
        raise Broken(f"job {job} did not start within {timeout:g} s", hint="see the lab's log/controller.log")


def run(
    lab: LabSession,
    client: Client,
    jobs: int,
    seed: int,
    kinds: Sequence[Kind],
    bare_cost: BareCost,
    progress: Progress,
) -> dict[str, Samples]:
    """`jobs` of each kind; their samples by the kind's name."""
    chance = random.Random(seed)
    order = [kind for kind in kinds for _ in range(jobs)]
    chance.shuffle(order)
    found = {kind.name: Samples() for kind in kinds}
    with Listener(lab.settings.network.gateway) as listener:
        for number, kind in enumerate(order, 1):
            _until_pools_are_full(client)
            time.sleep(chance.random())
            took = _one(lab, client, listener, kind, found[kind.name], bare_cost)
            progress(kind.name, number, len(order), took)
    return found


def _one(
    lab: LabSession, client: Client, listener: Listener, kind: Kind, samples: Samples, bare_cost: BareCost
) -> float:
    script = SCRIPT.format(host=listener.host, port=listener.port)
    began = time.monotonic()
    job = lab.submit(script, "--output=/dev/null", *kind.options)
    arrived, connection = listener.wait(job, JOB_LIMIT, lab.settings.socket.exists)
    with connection:
        samples.submit_to_start.append(arrived - began)
        cost = _vm_cost(client, job) if kind.vm else bare_cost(job)
        if cost is not None:
            for values, value in zip((samples.cpu_s, samples.uss_mib, samples.pss_mib), cost, strict=True):
                values.append(value)
        connection.sendall(b"go\n")
    if kind.vm:
        _stages(samples, _until_over(client, job))
    else:
        _until_ended(lab, job)
    return arrived - began


def _vm_cost(client: Client, job: str) -> tuple[float, float, float] | None:
    for vm in client.vms(exact=True):
        if vm["job_id"] == job and vm["private"]:
            return vm["cpu_s"], vm["private"], vm["pss"]
    return None


def _until_over(client: Client, job: str) -> dict[str, Any]:
    """The job's timeline once nothing is left of its VM: the next job must not pay for this one's end."""
    deadline = time.monotonic() + JOB_LIMIT
    while time.monotonic() < deadline:
        one = client.timeline(job)[-1]
        if one["state"] == "done":
            return one
        time.sleep(0.05)
    raise Broken(f"job {job} was not reclaimed within {JOB_LIMIT:g} s", hint="see the lab's log/controller.log")


def _until_pools_are_full(client: Client) -> None:
    """Nor must it pay for what is made for those after it."""
    deadline = time.monotonic() + JOB_LIMIT
    while any(pool["ready"] < pool["wanted"] for pool in client.status()["pools"]):
        if time.monotonic() > deadline:
            raise Broken(f"the pools were not full within {JOB_LIMIT:g} s", hint="see the lab's log/controller.log")
        time.sleep(0.05)


def _until_ended(lab: LabSession, job: str) -> None:
    deadline = time.monotonic() + JOB_LIMIT
    while time.monotonic() < deadline:
        if not lab.run("squeue", "-h", "-j", job, "-t", "PD,R,CG").stdout.strip():
            return
        time.sleep(0.05)
    raise Broken(f"job {job} did not end within {JOB_LIMIT:g} s")


def _stages(samples: Samples, one: dict[str, Any]) -> None:
    """Phases and stages of one attempt. From the clone's start to the agent's first byte is counted over
    the effects' own stages; to the idle node, between the commits of the claim and of the registration."""
    first = 0.0
    counting = True
    for phase in one["phases"]:
        if phase["name"] in ("queued", "clone", "join", "launch", "reclaim"):
            samples.stages.setdefault(phase["name"], []).append(phase["seconds"])
        for name, seconds in phase["stages"]:
            samples.stages.setdefault(f"{phase['name']}.{name}", []).append(seconds)
            first += seconds if counting else 0.0
            counting = counting and name != "first_byte"
    if not counting:
        samples.first_byte.append(first)
    ready = [phase["seconds"] for phase in one["phases"] if phase["name"] in ("clone", "join")]
    if len(ready) == 2:
        samples.node_idle.append(sum(ready))


@dataclass(frozen=True, slots=True)
class Result:
    """One kind's figures, as `--json` prints them. `stages` (seconds, in the order of their happening), `cpu_s`,
    `uss_mib` and `pss_mib` are medians; None where a kind has no such thing."""

    submit_to_start: Summary | None
    first_byte: Summary | None
    node_idle: Summary | None
    stages: dict[str, float]
    cpu_s: float | None
    uss_mib: float | None
    pss_mib: float | None


def result(samples: Samples) -> Result:
    return Result(
        submit_to_start=summary(samples.submit_to_start),
        first_byte=summary(samples.first_byte),
        node_idle=summary(samples.node_idle),
        stages={name: percentile(values, 0.5) for name, values in samples.stages.items()},
        cpu_s=_median(samples.cpu_s),
        uss_mib=_median(samples.uss_mib),
        pss_mib=_median(samples.pss_mib),
    )


def plugging(found: Mapping[str, Samples]) -> dict[str, Estimate | None]:
    """What it adds to plug a second CPU and memory into a clone, in seconds: to the stage of that name, up to the
    agent's first byte, up to an idle node. Nothing unless both were measured."""
    if "plugged" not in found or "instant" not in found:
        return {}
    more, less = found["plugged"], found["instant"]
    return {
        "plug": excess(more.stages.get("join.plug", ()), less.stages.get("join.plug", ())),
        "first_byte": excess(more.first_byte, less.first_byte),
        "node_idle": excess(more.node_idle, less.node_idle),
    }


@dataclass(frozen=True, slots=True)
class Beside:
    """How a kind's median from submission to start compares with that of bare metal: times as long, seconds more."""

    kind: str
    ratio: Estimate | None
    excess: Estimate | None


def beside(found: Mapping[str, Samples], base: str = "bare_metal") -> list[Beside]:
    """Each kind beside the machine itself; nothing unless that was measured."""
    if base not in found:
        return []
    less = found[base].submit_to_start
    return [
        Beside(name, ratio(one.submit_to_start, less), excess(one.submit_to_start, less))
        for name, one in found.items()
        if name != base
    ]


def _median(samples: Sequence[float]) -> float | None:
    return percentile(samples, 0.5) if samples else None
