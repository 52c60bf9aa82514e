"""Renders and writes the files that a site installs so that its Slurm works with Multiverse."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from multiverse.config import Settings
from multiverse.core.errors import Refused
from multiverse.core.model import CloneKind, Size
from multiverse.system import files

GATE_NODE = "mvgate"
NODE_SET = "mvvms"
MAX_GATE_NODES = 250  # NodeAddr=127.0.1.[1-N]
# Far above any host, so that Slurm refuses no job that a VM could hold. Memory and disk in MiB: 16 TiB.
GATE_SIZE = Size(cpus=1024, memory=1 << 24, disk=1 << 24)

# File name to mode. All belong beside slurm.conf, readable by slurmctld.
FILES = {
    "multiverse.conf": 0o644,
    "multiverse.lua": 0o644,
    "multiverse_site.lua": 0o644,
    "job_submit.lua": 0o644,
    "multiverse-epilog": 0o755,
}
_TEMPLATES = {"multiverse-epilog": "epilog"}
# The message for users of Multiverse's partitions after an error in multiverse.lua.
_FAILED = "Multiverse could not check this job: ask an administrator to read slurmctld's log"


@dataclass(frozen=True, slots=True)
class Site:
    """What the files need to know beside the settings.

    `images` are the features that jobs may request. `gate_nodes` is the largest number of nodes of one job.
    `memory_per_cpu` is Slurm's DefMemPerCPU in MiB. `default` makes the gate the default partition.
    """

    images: Sequence[str]
    gate_nodes: int
    memory_per_cpu: int
    slurm_uid: int
    default: bool = True
    max_node_count: int = 4096


def render(settings: Settings, site: Site) -> dict[str, str]:
    """File contents by name. Raises `Refused` for a wrong number of gate nodes."""
    if not 1 <= site.gate_nodes <= MAX_GATE_NODES:
        raise Refused(f"cannot declare {site.gate_nodes} gate nodes", hint=f"choose 1 to {MAX_GATE_NODES}")
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
        "gate_size": GATE_SIZE,
        "max_disk": settings.image.tmp_disk,
        "memory_per_cpu": site.memory_per_cpu,
        "administrators": sorted({0, site.slurm_uid}),
        "max_node_count": site.max_node_count,
        "default": site.default,
        "failed": _FAILED,
    }
    return {name: environment.get_template(_TEMPLATES.get(name, name)).render(values) for name in FILES}


def write(rendered: dict[str, str], directory: Path) -> None:
    """Write rendered files. Each file is replaced as a whole."""
    for name, content in rendered.items():
        files.replace(directory / name, content, mode=FILES.get(name, 0o644))


def make_inbox(inbox: Path, slurm_uid: int) -> None:
    """Create the directory for hints. Only slurmctld's user (and root) may write to it."""
    inbox.mkdir(parents=True, exist_ok=True)
    inbox.chmod(0o700)
    os.chown(inbox, slurm_uid, -1)
