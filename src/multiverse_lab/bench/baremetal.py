"""The cost of a job step on bare metal: the figures of its slurmstepd and all descendants, from /proc."""

from __future__ import annotations

from pathlib import Path

from multiverse.system.processes import cpu_seconds_with_children, stat_fields


def cost(job: str, node: str = "") -> tuple[float, float, float] | None:
    """CPU seconds, unique MiB and proportional MiB of the job's slurmstepd and its descendants; None if there is no
    such process. slurmd's own part (one fork) is not counted, so the baseline is a little too small, not too large.

    `node` is the control group of a node with control groups of its own, by which only what runs there counts. What a
    job there has detached, as podman does, is in the control groups of the job.
    """
    processes = {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()}
    parents = {pid: parent for pid in processes if (parent := _parent(pid)) is not None}
    found = {pid for pid in parents if _is_of_job(pid, job, node)}
    if not found:
        return None
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    costs = [one for pid in sorted(found) if (one := _cost(pid)) is not None]
    return (sum(c[0] for c in costs), sum(c[1] for c in costs), sum(c[2] for c in costs)) if costs else None


def _parent(pid: int) -> int | None:
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def _is_of_job(pid: int, job: str, node: str) -> bool:
    """Whether a process is a slurmstepd of the job, or in a control group of the job."""
    is_stepd = _command(pid).startswith(f"slurmstepd: [{job}.")
    if not node:
        return is_stepd
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False
    return f"/{node}/" in groups and (is_stepd or f"/job_{job}/" in groups)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _cost(pid: int) -> tuple[float, float, float] | None:
    """utime and stime of proc(5), with those of waited-for children; Private_* and Pss of smaps_rollup."""
    cpu = cpu_seconds_with_children(pid)
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    if cpu is None:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:] if line.endswith("kB")}
    private = sum(size for name, size in sizes.items() if name.startswith("Private_"))
    return cpu, private / 1024, sizes.get("Pss", 0) / 1024
