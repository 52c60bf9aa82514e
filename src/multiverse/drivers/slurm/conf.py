"""Reads slurm.conf and derives the slurm.conf of guests. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from multiverse.core.model import Size

# Keys that a guest does not need: other machines, slurmctld's settings, and scripts and plugins of bare-metal nodes,
# which are not in the image.
_DROPPED = frozenset(
    """
    nodename downnodes nodeset partitionname frontendname include
    slurmctldhost controlmachine controladdr backupcontroller backupaddr
    authinfo slurmdspooldir slurmdpidfile slurmdlogfile slurmdsyslogdebug slurmddebug slurmschedlogfile
    prolog epilog prologslurmctld epilogslurmctld taskprolog taskepilog srunprolog srunepilog
    healthcheckprogram healthcheckinterval healthchecknodestate resumeprogram suspendprogram rebootprogram
    unkillablestepprogram proctracktype taskplugin taskpluginparam plugstackconfig jobsubmitplugins clifilterplugins
    grestypes acctgatherenergytype acctgatherfilesystemtype acctgatherinterconnecttype acctgatherprofiletype
    topologyplugin debugflags jobcontainertype mpidefault plugindir launchparameters
    statesavelocation slurmctldpidfile slurmctldlogfile accountingstoragepass jobcompparams jobcomppass
    """.lower().split()
)

_GUEST = """\
AuthInfo={auth_info}
{controllers}
SlurmdSpoolDir=/var/spool/slurmd
SlurmdPidFile=/run/slurmd.pid
SlurmdLogFile=/var/log/slurmd.log
SlurmdDebug=error
StateSaveLocation=/var/spool/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
DebugFlags=NO_CONF_HASH
HealthCheckInterval=0
"""

CGROUP = "IgnoreSystemd=yes\nCgroupPlugin=cgroup/v2\n"


def settings(text: str) -> Iterator[tuple[str, str]]:
    """Each line's first key and its value, without comments. Continued lines are joined without a space."""
    for line in re.sub(r"\\\n", "", text).splitlines():
        bare = re.sub(r"(?<!\\)#.*", "", line).strip()
        key, equals, value = bare.partition("=")
        if equals:
            yield key.strip(), value.strip()
        elif bare.lower().startswith("include"):
            yield "include", bare[7:].strip()


def value(text: str, key: str, default: str = "") -> str:
    """The last value of a key."""
    return next((v for k, v in reversed(list(settings(text))) if k.lower() == key.lower()), default)


def included(text: str) -> list[str]:
    """The included files."""
    return [name for key, name in settings(text) if key.lower() == "include"]


def memory_per_cpu(text: str, default: int) -> int:
    """DefMemPerCPU in MiB."""
    found = value(text, "DefMemPerCPU")
    return int(found) if found.isdigit() and int(found) else default


class UnsupportedSetting(NamedTuple):
    """A setting of the site's Slurm that has no effect on jobs in VMs, with the remedy for an operator."""

    name: str
    message: str
    remedy: str


def unsupported(text: str) -> list[UnsupportedSetting]:
    """The settings in a slurm.conf that have no effect on jobs in VMs."""
    found = []
    kind = value(text, "PreemptType", "preempt/none")
    if kind.lower() != "preempt/none":
        found.append(
            UnsupportedSetting(
                "preemption",
                f"preemption ({kind}) has no effect on jobs at the gate: they wait until hosts have capacity",
                "no action is needed: tell users that a job in a VM neither preempts jobs nor is preempted; or set "
                "PreemptType=preempt/none and restart the daemon",
            )
        )
    if "x11" in value(text, "PrologFlags").lower().split(","):
        found.append(
            UnsupportedSetting(
                "x11",
                "X11 forwarding does not reach VMs: jobs in VMs have no display",
                "no action is needed: tell users to run jobs that need a display in other partitions",
            )
        )
    if value(text, "FederationParameters"):
        found.append(
            UnsupportedSetting(
                "federation",
                "jobs of a federation are not supported: jobs in VMs run in this cluster only",
                "tell users to submit jobs for VMs with --clusters and this cluster's name; or remove "
                "FederationParameters from slurm.conf and restart the daemon",
            )
        )
    return found


def limits_are_kept(text: str) -> bool:
    """Whether slurmctld enforces the limits of associations and QOS."""
    enforced = {word.strip() for word in value(text, "AccountingStorageEnforce").lower().split(",")}
    return not enforced.isdisjoint(("limits", "safe", "all"))


class Slurmctld(NamedTuple):
    """A primary or backup slurmctld. The address is empty if slurm.conf has none beside the name."""

    name: str
    address: str


def controllers(text: str) -> list[Slurmctld]:
    """Every slurmctld, the primary first. Slurm ignores the old keys (BackupController and others) beside the new."""
    hosts = [found for key, found in settings(text) if key.lower() == "slurmctldhost"]
    if not hosts:
        old = (("ControlMachine", "ControlAddr"), ("BackupController", "BackupAddr"))
        found = (Slurmctld(value(text, name), value(text, address)) for name, address in old)
        return [one for one in found if one.name]
    pairs = [host.partition("(") for host in hosts]
    return [Slurmctld(name.strip(), address.strip(") ")) for name, _, address in pairs]


def for_guest(text: str, slurmctlds: Iterable[Slurmctld], prolog: str = "") -> str:
    """A guest's slurm.conf, derived from the site's: without machines, scripts and plugins of bare-metal nodes.

    `slurmctlds` are the primary and its backups, at addresses that guests reach. `prolog` is a program in the guest
    that runs before the job.
    """
    lines = "\n".join(f"SlurmctldHost={one.name}({one.address})" for one in slurmctlds)
    kept = [f"{key}={_for_guest(key, found)}" for key, found in settings(text) if key.lower() not in _DROPPED]
    return (
        "\n".join(kept)
        + "\n"
        + _GUEST.format(controllers=lines, auth_info=_auth_info(value(text, "AuthInfo")))
        + (f"Prolog={prolog}\n" if prolog else "")
    )


def _for_guest(key: str, found: str) -> str:
    """Replace the prolog flag X11, which Slurm refuses with proctrack/linuxproc, by Contain, which X11 implies."""
    return re.sub(r"(?i)\bx11\b", "Contain", found) if key.lower() == "prologflags" else found


def _auth_info(text: str) -> str:
    """The site's AuthInfo with the guest's own munge socket."""
    others = [part for part in text.split(",") if part and not part.startswith("socket=")]
    return ",".join(["socket=/run/munge/munge.socket.2", *others])


def node_conf(size: Size, features: Iterable[str]) -> str:
    """slurmd's --conf, which describes the node: one socket, one thread in each core, as the guest sees it."""
    return (
        f"CPUs={size.cpus} Sockets=1 CoresPerSocket={size.cpus} ThreadsPerCore=1 RealMemory={size.memory}"
        f" TmpDisk={size.disk} Feature={','.join(dict.fromkeys(features))}"
    )
