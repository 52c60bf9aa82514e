"""Reads slurm.conf and derives the slurm.conf of guests. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ClusterShell.RangeSet import RangeSet

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
    topologyplugin debugflags jobcontainertype plugindir
    statesavelocation slurmctldpidfile slurmctldlogfile accountingstoragepass jobcompparams jobcomppass
    accountingstoragehost accountingstoragebackuphost defaultstoragehost
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
TaskPlugin={task_plugins}
HealthCheckInterval=0
"""

_CGROUP = "IgnoreSystemd=yes\nCgroupPlugin=cgroup/v2\nConstrainRAMSpace=yes\n"


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


def databases(text: str) -> dict[str, str]:
    """The machine of slurmdbd and that of its backup by their keys in slurm.conf; none without slurmdbd."""
    if "slurmdbd" not in value(text, "AccountingStorageType").lower():
        return {}
    primary = value(text, "AccountingStorageHost", value(text, "DefaultStorageHost", "localhost"))
    backup = value(text, "AccountingStorageBackupHost")
    return {"AccountingStorageHost": primary} | ({"AccountingStorageBackupHost": backup} if backup else {})


def limits_memory(cgroup_conf: str) -> bool:
    """Whether a cgroup.conf makes task/cgroup limit the memory of jobs and steps."""
    return value(cgroup_conf, "ConstrainRAMSpace").lower() in ("yes", "true", "up", "1")


def cgroup_for_guest(slurm_conf: str, cgroup_conf: str) -> str:
    """A guest's cgroup.conf, derived from the site's slurm.conf and cgroup.conf: memory is always limited.

    A job cannot have more memory than its VM in any case. With the limit of task/cgroup, Slurm reports that a job has
    run out of memory, and the kernel ends nothing else. If the site limits memory on bare metal too, AllowedRAMSpace
    holds as there, up to 100. More is left out, and MinRAMSpace too: the VM does not have that memory, a guest without
    free memory hardly answers, and with cgroup v2 a job above 100 % is slowed down almost to a stop. MaxRAMPercent is
    left out because it keeps memory free for other jobs of a node; a guest has no swap space to be limited.
    """
    if "cgroup" not in value(slurm_conf, "TaskPlugin").lower() or not limits_memory(cgroup_conf):
        return _CGROUP
    allowed = value(cgroup_conf, "AllowedRAMSpace")
    return _CGROUP + (f"AllowedRAMSpace={allowed}\n" if re.fullmatch(r"\d{1,2}(\.\d*)?", allowed) else "")


def for_guest(
    text: str,
    slurmctlds: Iterable[Slurmctld],
    programs: Mapping[str, str] = MappingProxyType({}),
    *,
    databases: Mapping[str, str] = MappingProxyType({}),
    memory_limited: bool = True,
) -> str:
    """A guest's slurm.conf, derived from the site's: without machines, scripts and plugins of bare-metal nodes.

    `slurmctlds` are the primary and its backups, at addresses that guests reach. `programs` are programs in the guest
    by their keys, such as Prolog. `databases` are the addresses of each slurmdbd by their keys. `memory_limited` says
    whether the guest's cgroup.conf limits memory.
    """
    lines = "\n".join(f"SlurmctldHost={one.name}({one.address})" for one in slurmctlds)
    changed = [(key, _for_guest(key, found)) for key, found in settings(text) if key.lower() not in _DROPPED]
    kept = [f"{key}={found}" for key, found in changed if found]  # Slurm refuses a key without a value
    return (
        "\n".join(kept)
        + "\n"
        + _GUEST.format(
            controllers=lines,
            auth_info=_auth_info(value(text, "AuthInfo")),
            # task/cgroup is fatal to slurmd if cgroup.conf has CgroupPlugin=disabled (23.11 and later).
            task_plugins="task/affinity,task/cgroup" if memory_limited else "task/affinity",
        )
        + "".join(f"{key}={found}\n" for key, found in {**databases, **programs}.items())
    )


def _for_guest(key: str, found: str) -> str:
    """A value of the site's slurm.conf as it must be in a guest.

    The prolog flag X11, which Slurm refuses with proctrack/linuxproc, is replaced by Contain, which X11 implies.
    OverMemoryKill is left out, because slurmd does not start if task/cgroup limits memory too.
    """
    if key.lower() == "prologflags":
        return re.sub(r"(?i)\bx11\b", "Contain", found)
    if key.lower() == "jobacctgatherparams":
        return ",".join(word for word in found.split(",") if word.strip().lower() != "overmemorykill")
    return found


def _auth_info(text: str) -> str:
    """The site's AuthInfo with the guest's own munge socket."""
    others = [part for part in text.split(",") if part and not part.startswith("socket=")]
    return ",".join(["socket=/run/munge/munge.socket.2", *others])


def addresses(nodes: Iterable[tuple[str, str]]) -> str:
    """The lines that tell Slurm's commands and slurmd where nodes are, given by name and address. For slurmctld such
    lines would declare nodes: its slurm.conf must not have them.

    Nodes whose names and addresses differ in the last number alone share a line, because each line costs each of
    Slurm's commands 0.1 ms. Slurm assigns the addresses of a line to its names in order.
    """
    lines, together = [], dict[tuple[str, str], list[tuple[int, int]]]()
    for name, address in sorted(nodes):
        stem, place = _NUMBERED.fullmatch(name), _NUMBERED.fullmatch(address)
        if stem and place and "." in place[1]:
            together.setdefault((stem[1], place[1]), []).append((int(stem[2]), int(place[2])))
        else:
            lines.append((name, address))
    for (names, network), numbers in together.items():
        rising: list[list[tuple[int, int]]] = []
        for one in sorted(numbers):
            if not rising or one[1] <= rising[-1][-1][1]:
                rising.append([])
            rising[-1].append(one)
        lines += [(_folded(names, [n for n, _ in each]), _folded(network, [n for _, n in each])) for each in rising]
    return "".join(f"NodeName={name} NodeAddr={address}\n" for name, address in lines)


_NUMBERED = re.compile(r"(.*[^0-9])(0|[1-9][0-9]{0,8})")


def _folded(stem: str, numbers: Sequence[int]) -> str:
    """A hostlist expression of these rising numbers behind one stem."""
    return f"{stem}{numbers[0]}" if len(numbers) == 1 else f"{stem}[{RangeSet.fromlist(map(str, numbers))}]"


def node_conf(size: Size, features: Iterable[str], sockets: int = 1) -> str:
    """slurmd's --conf, which describes the node: one thread in each core, as the guest sees it. The guest itself has
    one socket: more of them are Slurm's alone, which accepts them as long as the number of cores is right."""
    return (
        f"CPUs={size.cpus} Sockets={sockets} CoresPerSocket={size.cpus // sockets} ThreadsPerCore=1"
        f" RealMemory={size.memory} TmpDisk={size.disk} Feature={','.join(dict.fromkeys(features))}"
    )


MEMORY_PER_CPU = 512  # MiB, for a site without DefMemPerCPU and a job that requests no memory
