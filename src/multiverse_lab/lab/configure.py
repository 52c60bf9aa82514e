"""Writes a lab's configuration files. The same plan gives the same files."""

from __future__ import annotations

import json
import pwd
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from multiverse import config
from multiverse.config import Settings
from multiverse.drivers.slurm.site import conf, install
from multiverse.drivers.slurm.site.install import loads_plugin, plugstack
from multiverse.images.catalog import list_images
from multiverse.system import files
from multiverse_lab.lab import spank
from multiverse_lab.lab.hosts import ssh
from multiverse_lab.lab.layout import Layout
from multiverse_lab.lab.own_etc import ETC, has_own_etc
from multiverse_lab.lab.plan import MOST_HOSTS, MOST_PHYSICAL, UPLINK_RATE, LabPlan, outermost
from multiverse_lab.lab.program import multiverse

CLUSTER = "multiverse"
MEMORY_PER_CPU = 150  # MiB: Slurm's DefMemPerCPU
MAX_NODES = 4096
BARE_PARTITION = BARE_FEATURE = "bare"
BARE_NODE = "bare1"
SLURM_USER = "slurm"


def hostname() -> str:
    return socket.gethostname().partition(".")[0]


def configure(where: Layout, plan: LabPlan) -> Settings:
    """Write all files in etc/, and return the controller's settings as read from there."""
    environment = Environment(
        loader=PackageLoader("multiverse_lab.lab"), undefined=StrictUndefined, keep_trailing_newline=True
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
        "host_classes": [{"nodes": f"mvh[1-{plan.hosts}]", "images": str(where.images)}] if plan.own_hosts else [],
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
    _write(where.etc / "cgroup.conf", "CgroupAutomount=no\n")
    _write(where.etc / "mail", f"#!/bin/sh\n{{ echo \"$@\"; cat; }} >> '{where.slurmctld}/mail'\n", 0o755)
    own = where.etc / "site.conf"
    if not own.exists() or not own.stat().st_size:  # Slurm's commands print a warning for an empty file
        _write(own, "# Your own settings for this lab's Slurm. `multiverse lab up` does not change this file.\n")
    (where.etc / "site.toml").touch()
    _configure_hosts(where, plan, environment, values)
    _configure_nodes(where, plan, environment, values)
    if plan.plugin:
        for each in (where, *(where.host(node.name) for node in plan.physical_nodes)):
            spank.install(each, plan.plugin, plan.enter)
    settings = config.load(where.settings)
    _write(where.etc / "plugstack.conf", plugstack(settings.job_vms) if loads_plugin(settings.job_vms) else "")
    images = (image.name for image in list_images(settings.qemu.images))
    site = install.derive(settings, conf.read(where.slurm_conf), images, slurm.pw_uid, default=True)
    install.write(install.render(settings, site), where.etc)
    install.make_address_file(settings.slurm.addresses_file())
    return settings


def _configure_hosts(where: Layout, plan: LabPlan, environment: Environment, values: Mapping[str, Any]) -> None:
    """Write the files that each host with namespaces of its own sees in etc."""
    hosts = plan.own_hosts
    for host in hosts:
        own = where.host(host.name)
        own.make()
        sections = _share_of_uids(_sections(where, plan), host.number)
        sections["job_vms"] = {**sections["job_vms"], "enabled": False}  # no slurmd is there
        _write_settings(own, where, environment, values, sections)
        # sshd admits no account whose password is locked, and root's usually is.
        _write(own.etc / "shadow", "".join(f"{user.pw_name}:*:::::::\n" for user in pwd.getpwall()), 0o600)
    if hosts:
        ssh.write(where, hosts)


def _share_of_uids(sections: dict[str, dict[str, Any]], number: int) -> dict[str, dict[str, Any]]:
    """The sections with users of QEMUs that no other host of the lab has. Hosts come first, then nodes."""
    first, count = sections["qemu"]["uids"]
    share = count // (MOST_HOSTS + MOST_PHYSICAL)
    return {**sections, "qemu": {**sections["qemu"], "uids": [first + share * (number - 1), share]}}


def _write_settings(
    own: Layout, where: Layout, environment: Environment, values: Mapping[str, Any], sections: Mapping[str, Any]
) -> None:
    """Write the settings of a host or node, and those of the site that override them."""
    text = environment.get_template("multiverse.toml").render({**values, "sections": sections})
    # The agent of a lease reads them as an unprivileged user before it becomes root.
    _write(own.settings, text, 0o600)
    _write(own.etc / "site.toml", (where.etc / "site.toml").read_text(), 0o600)


_NODE_SETTINGS = {"ProctrackType": "proctrack/cgroup", "TaskPlugin": "task/cgroup", "DebugFlags": "NO_CONF_HASH"}
"""Of a bare-metal node: as on most sites, Slurm ends the processes in a job's control groups, and limits their memory.
The lab's other settings fit a machine without control groups of its own, so slurmctld's file differs."""


_EPILOG = """#!/bin/sh
# Only a job with a lease leaves something here.
for lease in '{leases}'/*/; do [ -d "$lease" ] && exec {sweep} --job "$SLURM_JOB_ID"; done
exit 0
"""


def _configure_nodes(where: Layout, plan: LabPlan, environment: Environment, values: Mapping[str, Any]) -> None:
    """Write the files that each bare-metal node sees in etc. slurmd copies the others as it starts."""
    for node in plan.physical_nodes:
        own = where.host(node.name)
        own.make()
        sections = _share_of_uids(_sections(where, plan), MOST_HOSTS + node.number)
        sections["qemu"]["images"] = str(where.images)
        if plan.settings.get("image", {}).get("source") is None:
            sections["image"] = {**sections["image"], "source": plan.images}
        # The node can be leased, too, if the agent serves no controller.
        sections["job_vms"] = {**sections["job_vms"], "node": node.name, "only": plan.job_vms}
        sections.setdefault("vxlan", {"addresses": [[one.name, one.address] for one in plan.physical_nodes]})
        _write_settings(own, where, environment, values, sections)
        changes = _NODE_SETTINGS | {"Epilog": str(where.etc / "epilog")}
        _write(own.etc / "slurm.conf", changed_conf(where.slurm_conf.read_text(), changes))
        sweep = shlex.join(multiverse("agent", "--config", str(where.settings), "sweep"))
        _write(own.etc / "epilog", _EPILOG.format(leases=where.leases, sweep=sweep), 0o755)
        _write(own.etc / "cgroup.conf", cgroup_conf("ConstrainRAMSpace=yes\n"))


def changed_conf(text: str, changes: Mapping[str, str]) -> str:
    """A slurm.conf with other values for these keys."""
    kept = (line for line in text.splitlines() if line.partition("=")[0] not in changes)
    return "\n".join([*kept, *(f"{key}={value}" for key, value in changes.items())]) + "\n"


def cgroup_conf(more: str = "", mounted: Path = Path("/sys/fs/cgroup")) -> str:
    """A cgroup.conf that works on any machine without systemd, with the hierarchies below `mounted`."""
    version = "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1"
    return f"CgroupPlugin=cgroup/{version}\nCgroupMountpoint={mounted}\nIgnoreSystemd=yes\n{more}"


def _sections(where: Layout, plan: LabPlan) -> dict[str, dict[str, Any]]:
    """The controller's settings by section: the lab's own, overridden by those of `lab up --set`."""
    name = hostname()
    sections: dict[str, dict[str, Any]] = {
        "host": {"name": name, "cores": plan.cores, "memory": plan.memory, "disk": plan.disk // plan.hosts},
        "agent": {
            "socket": str(where.agent_socket),
            "state_dir": str(where.agent),
            "leases": str(where.leases),
            "program": multiverse("agent", "--config", str(where.settings)),
        },
        "slurm": {"conf": str(where.slurm_conf), "inbox": str(where.inbox), "munge_key": str(where.munge_key)},
        "qemu": {
            "images": plan.images,
            "templates": str(where.memory),
            "vms": str(where.controller / "vms"),
            "run": str(where.run / "vms"),
            "bridge": plan.bridge,
            "uids": list(where.uids),
        },
        "save": {"enabled": True, "directory": str(where.root / "saved")},
        "network": {
            "subnet": plan.subnet,
            "gateway": plan.gateway,
            "hosts": [[name, plan.gateway]],
            # This machine's file is changed by nobody but its administrator.
            "names": str(ETC / "hosts") if has_own_etc() else str(where.etc / "hosts"),
        },
        "image": {"default": plan.image},
        "job_vms": {
            "socket": str(where.jobs_socket),
            "records": str(where.run / "jobs"),
            "node": BARE_NODE,
            "check": 2.0,
            "bridge": plan.job_bridge,
            "subnet": plan.job_subnet,
        },
    }
    if plan.job_vms:
        sections["job_vms"]["enabled"] = True
    if plan.plugin:
        sections["job_vms"] |= {
            "plugin": spank.installed(where, plan.plugin),
            "enter": spank.installed(where, plan.enter),
        }
    if plan.own_hosts:
        # The same on each host, which has a directory of its own in place of the lab's. A host's name is its own.
        del sections["host"]["name"]
        sections["host"]["net"] = UPLINK_RATE
        remote = multiverse("agent", "--config", str(where.settings), "dial-stdio")
        sections["image"]["source"] = plan.images
        sections["move"] = {
            "enabled": True,
            "addresses": [[host.name, host.address] for host in plan.own_hosts],
        }
        if plan.routed:
            hosts = (*plan.own_hosts, *plan.physical_nodes)
            machines = [(name, plan.underlay(0)[1]), *((host.name, host.address) for host in hosts)]
            sections["vxlan"] = {
                "enabled": True,
                "addresses": [list(each) for each in machines],
                "port": plan.vxlan_port,
            }
        sections["agent"]["connect"] = ssh.connect_command(where, remote)
    for section, requested in plan.settings.items():
        values = {**sections.get(section, {}), **requested}
        sections[section] = {key: value for key, value in values.items() if value != ""}  # "": not as the lab would
    return sections


def _write(path: Path, content: str, mode: int = 0o644, owner: int = 0) -> None:
    files.replace(path, content, mode=mode, uid=owner)


def users_environment(where: Layout) -> dict[str, Any]:
    """As `environment`, for users, whose commands have to find VMs after a restart of slurmctld, too. None of Slurm's
    daemons may have it."""
    return environment(where) | {"SLURM_CONF": str(where.etc / install.CLIENT)}


def environment(where: Layout) -> dict[str, Any]:
    """The variables by which Slurm's commands, `multiverse` and `multiverse-vm` find the lab."""
    return {
        "MULTIVERSE_JOBS_SOCKET": str(where.jobs_socket),
        "SLURM_CONF": str(where.slurm_conf),
        "MULTIVERSE_SOCKET": str(where.socket),
        "MULTIVERSE_CONFIG": str(where.settings),
    }
