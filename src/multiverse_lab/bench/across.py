"""Parallel programs across hosts: HPCC with two ranks, in two VMs of two hosts, in two of one host, and on two plain
nodes, in turns.

HPCC measures MPI's latency and bandwidth between two ranks, both alone (ping-pong) and while both send (ring), and HPL.
The plain nodes are those of the lab: namespaces of this machine, with the network of its switch between them. They run
the programs that are in the guests' image, on its disk, which is mounted for that, with the same MPI and over TCP, too.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from multiverse.api import JobView, VmView, decode
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.bench.arrivals import until_nothing_is_left
from multiverse_lab.bench.hpcc import HPCC_INPUT, hpcc_figures
from multiverse_lab.lab.hosts.physical import physical_services
from multiverse_lab.lab.session import LabSession

LIMIT = 900.0
"""Seconds that a run may take: on an emulated CPU it takes about one minute."""

TWO_HOSTS, ONE_HOST, PLAIN = "two VMs, two hosts", "two VMs, one host", "two plain nodes"

_OPTIONS = {
    TWO_HOSTS: ("--comment=vm:per-host=1", "--constraint=place-spread"),
    ONE_HOST: ("--constraint=place-pack",),
}
# A rank that waits does not keep the CPU from the other one, or from the rest of this machine.
_MPI = "--mca btl tcp,self --mca btl_tcp_if_exclude lo --mca mpi_yield_when_idle 1 -np 2"
_JOB = """#!/bin/sh
mkdir -p {directory} && cd {directory} && rm -f hpccoutf.txt
cat > hpccinf.txt <<'END'
{text}END
mpirun {mpi} hpcc
"""

# The second node's daemon of Open MPI is started in that one's network. mpirun gives the host, and a command.
_AGENT = """#!/bin/sh
shift
exec nsenter --net={network} sh -c "$*"
"""

# All mounts end with this shell, which has a mount namespace of its own.
_PLAIN = """set -e
mount -o loop,ro,noload {disk} {root}
mount --rbind /proc {root}/proc
mount --rbind /dev {root}/dev
mount -t tmpfs tmpfs {root}/tmp
cp {files}/* {root}/tmp
exec chroot {root} sh -c 'cd /tmp && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 &&
mpirun --mca plm rsh --mca plm_rsh_agent /tmp/agent --host {hosts} {mpi} hpcc > /tmp/said 2>&1 || cat /tmp/said >&2
cat hpccoutf.txt'
"""


@dataclass(frozen=True, slots=True)
class AcrossSample:
    """The figures of one run: microseconds, MB/s and GFlop/s. `latency` and `bandwidth` are those of the ping-pong,
    `ring_latency` that of two ranks that both send."""

    latency: float
    ring_latency: float
    bandwidth: float
    hpl: float


Progress = Callable[[str, int, int, float], None]
"""Called with a kind, the number of runs that are done, the number of all, and the seconds it took."""


def run(lab: LabSession, client: Client, repeat: int, disk: Path, progress: Progress) -> dict[str, list[AcrossSample]]:
    """Run each kind `repeat` times, in turns. `disk` is that of the guests' image. Raises `Broken` if a run fails, or
    if VMs are not where they are to be."""
    found: dict[str, list[AcrossSample]] = {kind: [] for kind in (TWO_HOSTS, ONE_HOST, PLAIN)}
    done = 0
    for _ in range(repeat):
        for kind, samples in found.items():
            began = time.monotonic()
            samples.append(_plain(lab, disk) if kind == PLAIN else _in_vms(lab, client, kind))
            done += 1
            progress(kind, done, repeat * len(found), time.monotonic() - began)
    return found


def _in_vms(lab: LabSession, client: Client, kind: str) -> AcrossSample:
    directory = lab.user.home / kind.replace(", ", "-").replace(" ", "-")
    script = _JOB.format(directory=directory, text=HPCC_INPUT, mpi=_MPI)
    out = directory.with_suffix(".out")
    job = lab.submit(script, "-N2", "--ntasks-per-node=1", "--mem=700", f"--output={out}", *_OPTIONS[kind])
    hosts = _hosts_until_over(client, job)
    if len(hosts) != (2 if kind == TWO_HOSTS else 1):
        raise Broken(f"the VMs of job {job} were on {len(hosts)} hosts", hint="see the lab's log/controller.log")
    until_nothing_is_left(client, LIMIT)
    return sample_of(_text(directory / "hpccoutf.txt"), f"job {job} in {kind}: {_text(out)[-500:]}")


def _hosts_until_over(client: Client, job: str) -> set[str]:
    """Wait until the job is over; the hosts that its VMs were on."""
    hosts: set[str] = set()
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        hosts |= {vm.host for vm in decode(list[VmView], client.vms()) if vm.job_id == job}
        row = next(iter(decode(list[JobView], client.jobs(job))[-1:]), None)
        if row is not None and row.state in ("done", "failed", "cancelled", "revoked"):
            return hosts
        time.sleep(0.5)
    raise Broken(f"job {job} did not end within {LIMIT:g} s", hint="see the lab's log/controller.log")


def _plain(lab: LabSession, disk: Path) -> AcrossSample:
    where, nodes = lab.where, lab.lab.plan.physical_nodes[:2]
    running = [physical_services(node)[0].running(where) for node in nodes]
    first, second = (f"/proc/{one.pid}/ns/net" for one in running if one is not None)
    files, root = where.run / "across", where.run / "across-root"
    for path in (files, root):
        path.mkdir(exist_ok=True)
    (files / "hpccinf.txt").write_text(HPCC_INPUT)
    (files / "agent").write_text(_AGENT.format(network=second))
    (files / "agent").chmod(0o755)
    script = _PLAIN.format(
        disk=shlex.quote(str(disk)),
        root=shlex.quote(str(root)),
        files=shlex.quote(str(files)),
        hosts=",".join(node.address for node in nodes),
        mpi=_MPI,
    )
    argv = ["nsenter", f"--net={first}", "unshare", "--mount", "--propagation=private", "sh", "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, check=False)
    return sample_of(done.stdout, f"the plain nodes: {done.stderr[-500:]}")


def sample_of(summary: str, what: str) -> AcrossSample:
    """The figures in the text of hpccoutf.txt. Raises `Broken`, with `what`, if HPCC failed."""
    found = hpcc_figures(summary)
    if not found:
        raise Broken(f"HPCC failed: {what}", hint="see whether the image has the package hpcc")
    return AcrossSample(
        latency=float(found["AvgPingPongLatency_usec"]),
        ring_latency=float(found["NaturallyOrderedRingLatency_usec"]),
        bandwidth=float(found["AvgPingPongBandwidth_GBytes"]) * 1000,
        hpl=float(found["HPL_Tflops"]) * 1000,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
