"""What a site installs so that its Slurm works with Multiverse: rendered here, written by whoever asks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from multiverse.config import Settings
from multiverse.core.errors import Refused
from multiverse.core.model import CloneKind, Size

GATE_NODE = "mvgate"
NODE_SET = "mvvms"
MAX_GATE_NODES = 250  # NodeAddr=127.0.1.[1-N]

# File name to mode. All belong beside slurm.conf, readable by slurmctld.
FILES = {
    "multiverse.conf": 0o644,
    "multiverse.lua": 0o644,
    "multiverse_site.lua": 0o644,
    "job_submit.lua": 0o644,
    "multiverse-epilog": 0o755,
}
_TEMPLATES = {"multiverse-epilog": "epilog"}
# What users of our partitions are told when our Lua cannot tell what their jobs ask for.
_FAILED = "Multiverse cannot look at this job, so it is refused: tell an administrator, whom slurmctld's log tells why"


@dataclass(frozen=True, slots=True)
class Site:
    """What is rendered beside the settings. `images` may be asked for as features; `gate_nodes` is the most
    nodes that a job may ask for; `memory_per_cpu` is Slurm's DefMemPerCPU in MiB; `default` makes the gate
    the default partition."""

    images: Sequence[str]
    gate_nodes: int
    largest: Size
    memory_per_cpu: int
    slurm_uid: int
    default: bool = True
    max_node_count: int = 4096


def largest(settings: Settings) -> Size:
    """The largest request of one node that a host can serve, with the template it is forked from beside it."""
    host, qemu = settings.host, settings.qemu
    memory = min(host.memory - qemu.base_memory, qemu.max_memory) - settings.image.guest_reserve
    return Size(min(host.cores, qemu.max_cpus), max(memory, 1), min(host.disk, settings.image.tmp_disk))


def render(settings: Settings, site: Site) -> dict[str, str]:
    """File names and contents. `Refused` for a number of gate nodes that cannot be had."""
    if not 1 <= site.gate_nodes <= MAX_GATE_NODES:
        raise Refused(f"{site.gate_nodes} gate nodes", hint=f"choose 1 to {MAX_GATE_NODES}")
    slurm = settings.slurm
    environment = Environment(
        loader=PackageLoader("multiverse.drivers.slurm"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    values = {
        "directory": slurm.conf.parent,
        "inbox": slurm.inbox,
        "gate_partition": slurm.gate_partition,
        "run_partition": slurm.run_partition,
        "gate_feature": slurm.gate_feature,
        "node_feature": slurm.node_feature,
        "gate_node": GATE_NODE,
        "node_set": NODE_SET,
        "gate_nodes": site.gate_nodes,
        "features": [*dict.fromkeys((*site.images, *(kind.value for kind in CloneKind)))],
        "max_cpus": site.largest.cpus,
        "max_memory": site.largest.memory,
        "max_disk": site.largest.disk,
        "total_cpus": settings.host.cores,
        "total_memory": settings.host.memory - settings.qemu.base_memory,
        "reserve": settings.image.guest_reserve,
        "memory_per_cpu": site.memory_per_cpu,
        "administrators": sorted({0, site.slurm_uid}),
        "max_node_count": site.max_node_count,
        "default": site.default,
        "failed": _FAILED,
    }
    return {name: environment.get_template(_TEMPLATES.get(name, name)).render(values) for name in FILES}


def write(files: dict[str, str], directory: Path) -> None:
    """Write rendered files, each whole or not at all."""
    for name, content in files.items():
        beside = directory / f".{name}.new"
        beside.write_text(content)
        beside.chmod(FILES.get(name, 0o644))
        beside.replace(directory / name)


def make_inbox(inbox: Path, slurm_uid: int) -> None:
    """The directory for hints: slurmctld's user writes to it, nobody else."""
    inbox.mkdir(parents=True, exist_ok=True)
    inbox.chmod(0o700)
    os.chown(inbox, slurm_uid, -1)
