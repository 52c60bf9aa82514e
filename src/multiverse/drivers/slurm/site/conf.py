"""Reads slurm.conf and derives the slurm.conf of guests. Pure, but for `read` and `UntilChanged`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from ClusterShell.NodeSet import NodeSet, NodeSetException
from ClusterShell.RangeSet import RangeSet

from multiverse.core.errors import Broken, MultiverseError
from multiverse.core.model.basics import Size
from multiverse.core.model.job import YEAR
from multiverse.ports.site import Finding, Level

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

SPOOL = "/var/spool/slurmd"
_GUEST = """\
AuthInfo={auth_info}
{controllers}
SlurmdSpoolDir={spool}
SlurmdPidFile=/run/slurmd.pid
SlurmdLogFile=/var/log/slurmd.log
SlurmdDebug=error
StateSaveLocation=/var/spool/slurmd
ProctrackType=proctrack/{proctrack}
TaskPlugin={task_plugins}
HealthCheckInterval=0
"""

_CGROUP = "IgnoreSystemd=yes\nCgroupPlugin=cgroup/v2\nConstrainRAMSpace=yes\n"


def settings(text: str) -> Iterator[tuple[str, str]]:
    """The first key of each line and its value, without comments. Continued lines are joined without a space."""
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
    return [name for key, name in settings(text) if key.lower() == "include"]


def memory_per_cpu(text: str, default: int) -> int:
    """DefMemPerCPU in MiB."""
    found = value(text, "DefMemPerCPU")
    return int(found) if found.isdigit() and int(found) else default


def unsupported(text: str, *, preempts: bool) -> list[Finding]:
    """The settings of the site's Slurm that have no effect on jobs in VMs. `preempts`: these may give way to urgent
    ones, by the plugins of Slurm whose rules are known."""
    found = []
    kind = value(text, "PreemptType", "preempt/none")
    known = kind.lower() in ("preempt/qos", "preempt/partition_prio")
    if kind.lower() != "preempt/none" and not (preempts and known):
        message = f"preemption ({kind}) evicts no job in a VM: urgent jobs wait until hosts have capacity"
        remedy = "set enabled in [save], or in [move], and preemption in [rebalance], so that jobs give way by a save "
        found.append(_note("preemption", message, remedy + "or a move; or tell users that jobs in VMs do not"))
    if "x11" in value(text, "PrologFlags").lower().split(","):
        message = "X11 forwarding does not reach VMs: jobs in VMs have no display"
        remedy = "no action is needed: tell users to run jobs that need a display in other partitions"
        found.append(_note("x11", message, remedy))
    if value(text, "FederationParameters"):
        message = "jobs of a federation are not supported: jobs in VMs run in this cluster only"
        remedy = "tell users to submit jobs for VMs with --clusters and this cluster's name; or remove "
        found.append(
            _note("federation", message, remedy + "FederationParameters from slurm.conf and restart the daemon")
        )
    return found


def limits_are_kept(text: str) -> bool:
    """Whether slurmctld enforces the limits of associations and QOS."""
    enforced = {word.strip() for word in value(text, "AccountingStorageEnforce").lower().split(",")}
    return not enforced.isdisjoint(("limits", "safe", "all"))


class Slurmctld(NamedTuple):
    """A primary or backup slurmctld."""

    name: str
    address: str  # empty: slurm.conf has only the name


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


def spool_of(resumed: int) -> str:
    """SlurmdSpoolDir of a guest in which that restart of its job goes on; 0: it begins."""
    return f"{SPOOL}-{resumed}" if resumed else SPOOL


def for_guest(
    text: str,
    slurmctlds: Iterable[Slurmctld],
    programs: Mapping[str, str] = MappingProxyType({}),
    *,
    databases: Mapping[str, str] = MappingProxyType({}),
    memory_limited: bool = True,
    resumed: int = 0,
) -> str:
    """A guest's slurm.conf, derived from the site's: without machines, scripts and plugins of bare-metal nodes.

    `slurmctlds` are the primary and its backups, at addresses that guests reach. `programs` in the guest and addresses
    of `databases` are given by their keys. `memory_limited` says whether the guest's cgroup.conf limits memory.

    With `resumed`, the number of a restart of its job, slurmstepd appends to files of output, tracks processes by their
    control groups, and leaves the files of the earlier run alone, whose shell still reads its script. Directories of
    PMIx are named by the numbers of steps, which begin again.
    """
    spool = spool_of(resumed)
    if resumed:
        programs = {**programs, "JobFileAppend": "1", "TmpFS": f"{spool}/tmp"}
    lines = "\n".join(f"SlurmctldHost={one.name}({one.address})" for one in slurmctlds)
    changed = [(key, _for_guest(key, found)) for key, found in settings(text) if key.lower() not in _DROPPED]
    changed = [one for one in changed if one[0].lower() != "tmpfs" or not resumed]
    kept = [f"{key}={found}" for key, found in changed if found]  # Slurm refuses a key without a value
    return (
        "\n".join(kept)
        + "\n"
        + _GUEST.format(
            controllers=lines,
            spool=spool,
            proctrack="cgroup" if resumed else "linuxproc",
            auth_info=_auth_info(value(text, "AuthInfo")),
            # task/cgroup is fatal to slurmd if cgroup.conf has CgroupPlugin=disabled (23.11 and later).
            task_plugins="task/affinity,task/cgroup" if memory_limited else "task/affinity",
        )
        + "".join(f"{key}={found}\n" for key, found in {**databases, **programs}.items())
    )


def _for_guest(key: str, found: str) -> str:
    """A value of the site's slurm.conf as it must be in a guest. Slurm refuses X11 with proctrack/linuxproc: Contain,
    which it implies, replaces it. slurmd does not start with OverMemoryKill if task/cgroup limits memory too."""
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
    """The lines that tell Slurm's commands and slurmd where nodes are, given by name and address. They must not be in
    slurmctld's slurm.conf: they would declare nodes there.

    Nodes that differ only in the last number of name and address share a line, because each line costs each of Slurm's
    commands 0.1 ms. Slurm assigns the addresses of a line to its names in order.
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
    one socket. Slurm accepts more sockets as long as the number of cores is right."""
    return (
        f"CPUs={size.cpus} Sockets={sockets} CoresPerSocket={size.cpus // sockets} ThreadsPerCore=1"
        f" RealMemory={size.memory} TmpDisk={size.disk} Feature={','.join(dict.fromkeys(features))}"
    )


MEMORY_PER_CPU = 512  # MiB, for a site without DefMemPerCPU and a job that requests no memory


T = TypeVar("T")
_note = partial(Finding, Level.NOTE)

OURS = "multiverse.conf"  # the file that a site's slurm.conf includes. What it says is ours, not the site's
_PAIR = re.compile(r"([A-Za-z]+)\s*=\s*(\"[^\"]*\"|\S+)")
_DEFAULT = "default"  # NodeName=DEFAULT and PartitionName=DEFAULT hold for the lines below them


@dataclass(frozen=True, slots=True)
class SiteConf:
    """A site's slurm.conf with the files that it includes, but without our file."""

    text: str
    above: str | None = None  # the text above our file; None: slurm.conf does not include our file
    files: Mapping[Path, int] = field(default_factory=dict, compare=False)  # that were read, with their time of change
    ours: str = ""  # the text of our file, as far as it can be read

    def value(self, key: str, default: str = "") -> str:
        """The last value of a key."""
        return value(self.text, key, default)

    def words(self, key: str) -> list[str]:
        """The comma-separated words of a key's last value, in lower case."""
        return [word.strip().lower() for word in self.value(key).split(",") if word.strip()]

    def number(self, key: str) -> int | None:
        found = self.value(key)
        return int(found) if found.isdigit() else None

    def nodes(self) -> NodeSet:
        return folded(record["nodename"] for record in self.records("NodeName"))

    def node_addresses(self) -> NodeSet:
        """The addresses of nodes in slurm.conf; the name of a node without an address."""
        return folded(
            record.get("nodeaddr") or record.get("nodehostname") or record["nodename"]
            for record in self.records("NodeName")
        )

    def records(self, kind: str) -> list[dict[str, str]]:
        """The lines that begin with this key, without those named DEFAULT; see `records`."""
        return [found for found in records(self.text, kind) if found[kind.lower()].lower() != _DEFAULT]

    def defaults_above(self, kind: str) -> bool:
        """Whether a line of this kind named DEFAULT holds for our file too."""
        text = self.text if self.above is None else self.above
        return any(found[kind.lower()].lower() == _DEFAULT for found in records(text, kind))


def read(path: Path, change: Callable[[str], str] = str) -> SiteConf:
    """The slurm.conf at `path`. `Broken` if it, or a file that it includes, cannot be read. Our file may be missing.
    With `change`, it is as it would be if its text were changed so."""
    text, above, files = "", None, dict[Path, int]()
    for included, part in _parts(path, path.parent, files, change):
        if included == OURS:
            above = text
        else:
            text += part
    own = path.parent / OURS
    return SiteConf(text, above, files, own.read_text() if above is not None and own.is_file() else "")


class UntilChanged(Generic[T]):
    """Keeps a result from the slurm.conf at `path` until it, or a file that it includes, changes. To read a large file
    takes a tenth of a second, in which the daemon does nothing else. `unread` is the result while it cannot be read."""

    def __init__(self, path: Path, unread: T) -> None:
        self._path, self._unread = path, unread
        self._found = unread
        self._files: Mapping[Path, int] = {}

    def get(self, find: Callable[[SiteConf], T], *, anew: bool = False) -> T:
        """The result of `find`, which is called again if a file has changed, or `anew`."""
        if anew or self._has_changed():
            try:
                site = read(self._path)
            except Broken:
                self._found, self._files = self._unread, {}
            else:
                self._found, self._files = find(site), site.files
        return self._found

    def _has_changed(self) -> bool:
        try:
            return not self._files or any(file.stat().st_mtime_ns != at for file, at in self._files.items())
        except OSError:
            return True


def _parts(
    path: Path, directory: Path, files: dict[Path, int], change: Callable[[str], str] = str
) -> Iterator[tuple[str, str]]:
    """The text in parts, in Slurm's order. The name of a part is `OURS` for the line that includes our file, else
    empty. The files that are read are added to `files`. Names of files are relative to `directory`, as in Slurm."""
    try:
        files[path] = path.stat().st_mtime_ns
        text = change(path.read_text())
    except OSError as error:
        hint = "set slurm.conf in the settings, or give --slurm-conf"
        raise Broken(f"cannot read {path}: {error.strerror}", hint=hint) from error
    for line in re.sub(r"\\\n", "", text).splitlines(keepends=True):
        names = included(line)
        if not names:
            yield "", line
        elif Path(names[0]).name == OURS:
            yield OURS, line
        else:
            yield from _parts(directory / names[0], directory, files)


def records(text: str, kind: str) -> list[dict[str, str]]:
    """The lines of a slurm.conf that begin with the key `kind`: the values of each by keys in lower case."""
    lines = (f"{key}={rest}" for key, rest in settings(text) if key.lower() == kind.lower())
    return [{name.lower(): found.strip('"') for name, found in _PAIR.findall(line)} for line in lines]


def features_of(node: Mapping[str, str]) -> list[str]:
    """The features that a line of a node gives it."""
    return (node.get("feature") or node.get("features") or "").split(",")


def same_nodes(one: str, other: str) -> bool:
    """Whether two texts declare the same nodes. Slurm reads features and other lines again without a restart."""
    declared = [records(text, "NodeName") for text in (one, other)]
    for node in (node for nodes in declared for node in nodes):
        for key in ("feature", "state", "reason"):
            node.pop(key, None)
    return declared[0] == declared[1]


def folded(texts: Iterator[str]) -> NodeSet:
    """All names in several lists of nodes, such as `n[1-3],m7`. A list that cannot be understood is left out."""
    found = NodeSet()
    for text in texts:
        try:
            found.update(NodeSet(text))
        except NodeSetException:
            continue
    return found


def is_ours(text: str) -> bool:
    """Whether a script calls Multiverse's: a line that is no comment names one of its files."""
    return any(
        re.search(r"multiverse(_submit)?\.lua|multiverse-epilog", line) and not re.match(r"\s*(--|#)", line)
        for line in text.splitlines()
    )


def munge_socket(conf: Path) -> Path | None:
    """The socket in AuthInfo of the slurm.conf at `conf`. None is munge's own, also while the file cannot be read."""
    try:
        words = read(conf).value("AuthInfo").split(",")
    except MultiverseError:
        return None
    return next((Path(word.removeprefix("socket=")) for word in words if word.startswith("socket=")), None)


def kill_wait(conf: Path) -> float:
    """Seconds from slurmd's SIGTERM until it kills what is left of a job, by the slurm.conf at `conf`: at least five
    (_rpc_terminate_job in slurmd/req.c). 0 while the file cannot be read."""
    try:
        found = read(conf).number("KillWait")
    except MultiverseError:
        return 0.0
    return max(5.0, float(_KILL_WAIT if found is None else found))


CHECKED_EVERY = 30
"""Seconds between two looks of slurmctld at the limits of running jobs (PERIODIC_TIMEOUT in slurmctld/controller.c)."""

NEVER = 0xFFFFFFFF  # stands for the Unix time of an end that is not limited, which squeue prints as NONE
_KILL_WAIT = 30  # seconds: Slurm's default
_UNLIMITED = ("infinite", "unlimited", "-1")


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long Slurm lets a job run. slurmctld ends a job that exceeds its time limit by more than OverTimeLimit: it
    sends SIGTERM, and SIGKILL after KillWait."""

    most: float = YEAR  # seconds that the partitions allow
    beyond: float = CHECKED_EVERY + _KILL_WAIT  # seconds after its limit until slurmctld has ended a job

    def of(self, minutes: int | None) -> float:
        """The most seconds of a run with that time limit (None: unlimited)."""
        own = YEAR if minutes is None else minutes * 60
        return min(own, self.most) + self.beyond


@lru_cache(maxsize=4)
def time_limits(text: str, *partitions: str) -> TimeLimits:
    """The time limits of jobs in these partitions. A value that cannot be understood counts as unlimited."""
    most, over = float(YEAR), _over(value(text, "OverTimeLimit"))
    defaults: dict[str, str] = {}
    for record in records(text, "PartitionName"):
        if record["partitionname"].lower() == "default":
            defaults |= record
        elif record["partitionname"] in partitions:
            found = {**defaults, **record}
            most = min(most, seconds(found.get("maxtime", "")))
            over = max(over, _over(found.get("overtimelimit", "")))
    wait = value(text, "KillWait")
    return TimeLimits(most, min(YEAR, over + CHECKED_EVERY + (int(wait) if wait.isdigit() else _KILL_WAIT)))


def _over(text: str) -> float:
    return YEAR if text.lower() in _UNLIMITED else float(text) * 60 if text.isdigit() else 0.0


def seconds(text: str) -> float:
    """The seconds of a time as slurm.conf and squeue write it: minutes, minutes:seconds, hours:minutes:seconds,
    days-hours, days-hours:minutes, days-hours:minutes:seconds (slurm.conf(5), MaxTime). Any other text is unlimited."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return YEAR
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, secs = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, secs = numbers
    else:
        hours, (minutes, secs) = 0, [*numbers, 0][:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + secs


def minutes_of(text: str) -> int | None:
    """A job's time limit as squeue prints it, in whole minutes; None if it has none."""
    return int(seconds(text)) // 60 if re.match(r"\d", text) else None


def seconds_of(text: str) -> float:
    """The seconds of a span as sacct shows it: `00:01.234`, `01:02:03` or `4-01:02:03`; 0 for other text."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)", text.strip())
    if match is None:
        return 0.0
    days, hours, minutes = (int(match[place] or 0) for place in (1, 2, 3))
    return ((days * 24 + hours) * 60 + minutes) * 60 + float(match[4])
