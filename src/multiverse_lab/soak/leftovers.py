"""Looks for what remains of jobs and VMs while the lab runs, and of the lab after its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from multiverse.api import HostView, StatusView, TemplateView, decode
from multiverse.client import Client
from multiverse.core.errors import MultiverseError
from multiverse.system.files import matching
from multiverse_lab.lab.layout import Layout
from multiverse_lab.lab.session import LabSession

LINKS, CGROUPS, MOUNTS = Path("/sys/class/net"), Path("/sys/fs/cgroup"), Path("/proc/self/mountinfo")


def of_jobs(lab: LabSession, client: Client) -> list[str]:
    """What remains of jobs and VMs: rows, claims, nodes, jobs in Slurm, directories, sockets, taps, cgroups, QEMUs.
    Templates may remain, because the lab goes on."""
    try:
        return [*_known_to_the_controller(client), *_known_to_slurm(lab), *_on_the_host(lab, client)]
    except MultiverseError as error:
        return [f"the controller does not answer: {error.message}"]


def _known_to_the_controller(client: Client) -> Iterator[str]:
    yield from (f"job {job['job_id']} is {job['state']}" for job in client.jobs())
    yield from (f"VM {vm['name']} is {vm['state']}: {vm['reason']}" for vm in client.vms())
    for host in decode(list[HostView], client.hosts()):
        templates = decode(list[TemplateView], client.templates())
        frozen = sum(one.memory for one in templates if one.state != "absent") * host.template_copies
        if (host.claimed.cpus, host.claimed.memory) != (0, frozen):
            yield f"{host.claimed.cpus} CPUs and {host.claimed.memory - frozen} MiB are claimed on {host.name}"
    for alert in decode(StatusView, client.status()).alerts:
        yield f"alert {alert.name}: {alert.message}"


def _known_to_slurm(lab: LabSession) -> Iterator[str]:
    nodes = lab.run("sinfo", "-h", "-N", "-o", "%N").stdout.split()
    yield from (f"node {node} in Slurm" for node in sorted(set(nodes)) if node.startswith("mv") and "-" in node)
    for line in lab.run("squeue", "-h", "-a", "-o", "%i %T %r").stdout.splitlines():
        yield f"job in Slurm: {line}"


def _on_the_host(lab: LabSession, client: Client) -> Iterator[str]:
    qemu, site = lab.settings.qemu, decode(StatusView, client.status()).site
    for path in (*qemu.vms.glob("mv*"), *qemu.run.glob("*"), *qemu.templates.glob(".*.building-*")):
        yield f"file {path}"
    yield from (f"interface {path.name}" for path in LINKS.glob(f"mv{site}*"))
    yield from (f"cgroup {path}" for path in matching(CGROUPS, f"**/multiverse/mv{site}*"))
    for pid, words in _processes():
        if words[0].rpartition("/")[2].startswith("qemu-system") and any(str(qemu.vms) in word for word in words):
            yield f"process {pid}: {words[0]}"


def of_lab(where: Layout, bridge: str) -> list[str]:
    """What remains of a lab that was brought down: processes, mounts, the bridge, sockets, memory."""
    first, count = where.uids
    found = [f"process {pid}: {' '.join(words)[:60]}" for pid, words in _processes() if _is_of(where, pid, words)]
    found += [f"process {pid} of uid {uid}" for pid, uid in _owners() if first <= uid < first + count]
    found += [f"mount {point}" for point in _mounts() if Path(point).is_relative_to(where.root)]
    found += [f"interface {bridge}"] if (LINKS / bridge).exists() else []
    found += [f"directory {path}" for path in (where.run, where.memory) if path.exists()]
    return found


def _is_of(where: Layout, pid: int, words: list[str]) -> bool:
    """Whether a process other than this one and its parents names the lab's directory."""
    return pid not in _ancestors() and any(str(where.root) + "/" in word for word in words)


def _ancestors() -> set[int]:
    found, pid = set[int](), os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            break
        pid = int(fields[1])
    return found


def _processes() -> Iterator[tuple[int, list[str]]]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if line:
            yield int(process.name), line.decode(errors="replace").rstrip("\0").split("\0")


def _owners() -> Iterator[tuple[int, int]]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            yield int(process.name), process.stat().st_uid
        except OSError:
            continue


def _mounts() -> list[str]:
    """The mount points in this process's mount namespace."""
    return [line.split()[4] for line in MOUNTS.read_text().splitlines()]
