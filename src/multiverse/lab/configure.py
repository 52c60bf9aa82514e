"""Writes a lab's configuration files. The same plan gives the same files."""

from __future__ import annotations

import json
import pwd
import socket
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from multiverse import config
from multiverse.config import Settings
from multiverse.drivers.slurm import install, site_conf
from multiverse.images.catalog import list_images
from multiverse.lab.layout import Layout
from multiverse.lab.plan import LabPlan, outermost
from multiverse.system import files

CLUSTER = "multiverse"
MEMORY_PER_CPU = 150  # MiB: Slurm's DefMemPerCPU
MAX_NODES = 4096
BARE_PARTITION = BARE_FEATURE = "bare"
SLURM_USER = "slurm"


def hostname() -> str:
    return socket.gethostname().partition(".")[0]


def configure(where: Layout, plan: LabPlan) -> Settings:
    """Write all files in etc/, and return the controller's settings as read from there."""
    environment = Environment(
        loader=PackageLoader("multiverse.lab"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["toml"] = lambda value: json.dumps(str(value), ensure_ascii=False)
    environment.filters["value"] = lambda value: json.dumps(
        value, ensure_ascii=False
    )  # of JSON's, TOML lacks null only
    values = {
        "where": where,
        "plan": plan,
        "cluster": CLUSTER,
        "hostname": hostname(),
        "sections": _sections(where, plan),
        "exports": outermost(plan.shares),
        "memory_per_cpu": MEMORY_PER_CPU,
        "max_node_count": MAX_NODES,
        "bare_partition": BARE_PARTITION,
        "bare_feature": BARE_FEATURE,
        "bare_set": "barenodes",
    }
    slurm = pwd.getpwnam(SLURM_USER)
    for name in ("slurm.conf", "ganesha.conf", "multiverse.toml"):
        _write(where.etc / name, environment.get_template(name).render(values))
    _write(where.etc / "slurmdbd.conf", environment.get_template("slurmdbd.conf").render(values), 0o600, slurm.pw_uid)
    _write(where.etc / "plugstack.conf", "")
    _write(where.etc / "cgroup.conf", "CgroupAutomount=no\n")
    _write(where.etc / "mail", f"#!/bin/sh\n{{ echo \"$@\"; cat; }} >> '{where.slurmctld}/mail'\n", 0o755)
    own = where.etc / "site.conf"
    if not own.exists() or not own.stat().st_size:  # Slurm's commands print a warning for an empty file
        _write(own, "# Your own settings for this lab's Slurm. `multiverse lab up` does not change this file.\n")
    (where.etc / "site.toml").touch()
    settings = config.load(where.settings)
    images = (image.name for image in list_images(settings.qemu.images))
    site = install.derive(settings, site_conf.read(where.slurm_conf), images, slurm.pw_uid, default=True)
    install.write(install.render(settings, site), where.etc)
    return settings


def _sections(where: Layout, plan: LabPlan) -> dict[str, dict[str, Any]]:
    """The controller's settings by section: the lab's own, overridden by those of `lab up --set`."""
    name = hostname()
    sections: dict[str, dict[str, Any]] = {
        "host": {"name": name, "cores": plan.cores, "memory": plan.memory, "disk": plan.disk},
        "agent": {"socket": str(where.agent_socket), "state_dir": str(where.agent)},
        "slurm": {"conf": str(where.slurm_conf), "inbox": str(where.inbox), "munge_key": str(where.munge_key)},
        "qemu": {
            "images": plan.images,
            "templates": str(where.memory),
            "vms": str(where.controller / "vms"),
            "run": str(where.run / "vms"),
            "bridge": plan.bridge,
            "uids": list(where.uids),
        },
        "network": {"subnet": plan.subnet, "gateway": plan.gateway, "hosts": [[name, plan.gateway]]},
        "image": {"default": plan.image},
    }
    for section, requested in plan.settings.items():
        sections[section] = {**sections.get(section, {}), **requested}
    return sections


def _write(path: Path, content: str, mode: int = 0o644, owner: int = 0) -> None:
    files.replace(path, content, mode=mode, uid=owner)


def environment(where: Layout) -> dict[str, Any]:
    """The variables by which Slurm's commands and `multiverse` find the lab."""
    return {
        "SLURM_CONF": str(where.slurm_conf),
        "MULTIVERSE_SOCKET": str(where.socket),
        "MULTIVERSE_CONFIG": str(where.settings),
    }
