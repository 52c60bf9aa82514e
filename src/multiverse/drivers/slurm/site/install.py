"""Renders the files that a site adds beside its slurm.conf, so that its Slurm works with Multiverse."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ClusterShell.NodeSet import NodeSet
from jinja2 import Environment, PackageLoader, StrictUndefined

from multiverse.config import JobVmSettings, Settings
from multiverse.core.errors import Exhausted, Refused
from multiverse.core.model.basics import CloneKind, Placement, Size
from multiverse.drivers.slurm.site import conf, gate
from multiverse.drivers.slurm.site.conf import OURS, SiteConf
from multiverse.drivers.slurm.site.gate import GATE_NODE, NODE_SET
from multiverse.system import files, placements
from multiverse.system.files import keep_names

PLUGSTACK = "multiverse-plugstack.conf"  # its file, beside slurm.conf, which the site's plugstack.conf includes


def loads_plugin(settings: JobVmSettings) -> bool:
    return settings.enabled and settings.design == "plugin"


def plugstack(settings: JobVmSettings) -> str:
    """The file by which Slurm loads the plugin for VMs inside jobs (spank(7)). The plugin is optional: a required one
    would break each launch of each user if it is missing, or was built for another release of Slurm."""
    arguments = {
        "agent": settings.socket,
        "records": settings.records,
        "enter": settings.enter,
        "timeout": settings.timeout,
        "feature": settings.feature,
    }
    words = " ".join(f"{key}={value}" for key, value in arguments.items())
    return f"# VMs inside jobs: include this file in plugstack.conf on all nodes.\noptional {settings.plugin} {words}\n"


ADDRESSES_HEAD = """\
# Where the VMs are, for commands of users: the daemon replaces this file whenever a VM comes or goes.
# Never include it in the slurm.conf of slurmctld or of a slurmd: there these lines would declare nodes.
"""
"""Slurm's commands wait for a minute for a file that is missing, and print a warning about an empty one."""


class AddressFile:
    """`ports.Addresses`: users' commands find VMs by a file that their slurm.conf includes (decision 84), other
    programs by lines in the file `names`, as in /etc/hosts (decision 91). Both stay while no daemon runs."""

    def __init__(self, path: Path, names: Path | None = None, site: str = "") -> None:
        self._path, self._names, self._site = path, names, site

    async def tell(self, nodes: Mapping[str, str]) -> None:
        """Raises `Exhausted` if a file cannot be written."""
        try:
            await asyncio.to_thread(
                files.replace, self._path, ADDRESSES_HEAD + conf.addresses(nodes.items()), mode=0o644
            )
        except OSError as error:
            raise Exhausted(
                f"cannot write {self._path}: {error.strerror}",
                hint="check its directory, or set slurm.addresses in the settings; until then srun --jobid and salloc "
                "do not reach newer VMs after a restart of slurmctld",
            ) from error
        if self._names is not None:
            try:
                await asyncio.to_thread(keep_names, self._names, self._site, nodes)
            except OSError as error:
                raise Exhausted(
                    f"cannot write {self._names}: {error.strerror}",
                    hint="let the daemon write it, or set network.names in the settings, to another file or to none; "
                    "until then users do not find newer VMs by their names",
                ) from error


def make_address_file(path: Path) -> None:
    """Make the file if there is none. What a daemon has written stays. Raises OSError."""
    if not path.exists():
        files.replace(path, ADDRESSES_HEAD, mode=0o644)


# NodeAddr=127.0.N.[1-250]; the most nodes of a job. As many however few CPUs the hosts have: a host may be added later.
GATE_NODES = 250
# Far above any host, so that Slurm refuses no job that a VM could hold. Memory and disk in MiB: 16 TiB.
GATE_SOCKETS = 8  # the most sockets of a node
GATE_SIZE = Size(cpus=1024, memory=1 << 24, disk=1 << 24)
# 127.0.0.1 is the machine itself, and 127.0.1.1 its name on Debian: a slurmd may listen at both.
_GATE_NETWORKS = tuple(f"127.0.{number}" for number in (1, *range(77, 256)))

JOB_SUBMIT = "job_submit.lua"
HOOK = "multiverse_submit.lua"
EPILOG = "multiverse-epilog"
CLIENT = "multiverse-client.conf"
# File name to mode. All belong beside slurm.conf, readable by slurmctld.
FILES = {
    OURS: 0o644,
    "multiverse_jobs.lua": 0o644,  # before multiverse.lua, which loads it
    "multiverse.lua": 0o644,
    "multiverse_site.lua": 0o644,
    HOOK: 0o644,
    JOB_SUBMIT: 0o644,
    EPILOG: 0o755,
    CLIENT: 0o644,
}
_TEMPLATES = {EPILOG: "epilog"}
# The message for users of Multiverse's partitions after an error in multiverse.lua.
_FAILED = "Multiverse could not check this job: ask an administrator to read slurmctld's log"


@dataclass(frozen=True, slots=True)
class Site:
    """Values for the files beside the settings."""

    images: Collection[str]  # features that jobs may request
    memory_per_cpu: int  # Slurm's DefMemPerCPU in MiB
    slurm_uid: int
    default: bool = False  # ours is the default partition
    gate_network: str = _GATE_NETWORKS[0]  # the first three numbers of the gate's addresses, which nothing uses
    placements: Collection[str] = tuple(one.value for one in Placement)
    limits: str = "MaxTime=INFINITE"  # of our partition: the limits of a partition that overflows
    boost: int = 60_000  # see `gate.boost`
    licences: bool = True  # our file has the gate's licence, because the site has no licences
    power_saving: bool = True  # our file has the programs of power saving, because the site has none


def derive(settings: Settings, site: SiteConf, images: Iterable[str], slurm_uid: int, *, default: bool = False) -> Site:
    """The values, from the settings, the site's slurm.conf and the names of the images."""
    names = [settings.image.default, *(pool.image for pool in settings.pool), *sorted(images)]
    return Site(
        images=tuple(dict.fromkeys(names)),
        placements=tuple(placements.names()),
        memory_per_cpu=conf.memory_per_cpu(site.text, conf.MEMORY_PER_CPU),
        slurm_uid=slurm_uid,
        default=default,
        gate_network=_free_network(site.node_addresses()),
        limits=gate.limits_of(settings, site),
        boost=gate.boost(site.text),
        licences=not site.value("Licenses"),
        power_saving=not (site.value("SuspendProgram") or site.value("ResumeProgram")),
    )


def _free_network(used: NodeSet) -> str:
    """A network of loopback addresses that no node of the site has. Raises `Refused` if there is none."""
    for network in _GATE_NETWORKS:
        if not any(str(address).startswith(f"{network}.") for address in used):
            return network
    raise Refused("the site's nodes use all addresses that the gate could have", hint="report this slurm.conf")


def render(settings: Settings, site: Site) -> dict[str, str]:
    """File contents by name."""
    slurm = settings.slurm
    environment = Environment(
        loader=PackageLoader("multiverse.drivers.slurm"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    places = [gate.PLACE + name for name in site.placements]
    # Of jobs that were moved, and wait at the gate until they are put back.
    moved = [word for one in settings.overflow for word in (gate.MOVED_FROM + one.partition, one.constraint) if word]
    values = {
        "slurm": slurm,
        "site": site,
        "directory": slurm.conf.parent,
        "client": CLIENT,
        "addresses": slurm.addresses_file(),
        "hook": hook_lines(settings),
        "job_feature": settings.job_vms.feature,
        "sriov_gres": settings.job_vms.sriov_gres,
        "job_design": settings.job_vms.design,
        "gate_node": GATE_NODE,
        "node_set": NODE_SET,
        "gate_nodes": GATE_NODES,
        "features": [*dict.fromkeys((*site.images, *(kind.value for kind in CloneKind), *places, *moved))],
        "gate_size": GATE_SIZE,
        "gate_sockets": GATE_SOCKETS,
        "max_disk": settings.image.tmp_disk,
        "administrators": sorted({0, site.slurm_uid}),
        "save": settings.save,
        "failed": _FAILED,
    }
    return {
        name: files.signed(
            environment.get_template(_TEMPLATES.get(name, name)).render(values), "--" if name.endswith(".lua") else "#"
        )
        for name in FILES
    }


def hook_lines(settings: Settings) -> str:
    """The two lines that a site adds to the end of its own job_submit.lua, before the last `return`. If our file is
    missing or unreadable, the second line refuses jobs of our partition; all others go on."""
    slurm = settings.slurm
    return (
        f'local fine, problem = pcall(dofile, "{slurm.conf.parent}/{HOOK}")\n'
        f'if not fine then slurm.log_error("multiverse: %s", tostring(problem)); local own = slurm_job_submit; '
        f"function slurm_job_submit(job, ...) if "
        f'job.partition == "{slurm.partition}" then return slurm.ERROR end; return own(job, ...) end end\n'
    )


def write(contents: dict[str, str], directory: Path) -> None:
    for name, content in contents.items():
        files.replace(directory / name, content, mode=FILES.get(name, 0o644))


def make_inbox(inbox: Path, slurm_uid: int) -> None:
    """Create the directory for hints. Only slurmctld's user (and root) may write to it."""
    inbox.mkdir(parents=True, exist_ok=True)
    inbox.chmod(0o700)
    os.chown(inbox, slurm_uid, -1)
