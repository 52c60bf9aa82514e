"""Reads which jobs may preempt which, by the site's settings: of slurmctld, and of slurmdbd for QOS.

The rules are those of preempt_qos.c and preempt_partition_prio.c, the same in 22.05 and 24.11. Two of Slurm's rules
depend on the priority of a running job, which nobody knows of a job that was let through the gate with another nice
value: jobs of one QOS never preempt each other here (PreemptMode=WITHIN), and none preempts another where jobs of some
priority are exempt (PreemptParameters=min_exempt_priority).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf

import structlog
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from multiverse.core.errors import MultiverseError, Unknown
from multiverse.core.model.job import Preemption
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.site import conf

BY_QOS, BY_PARTITION = "preempt/qos", "preempt/partition_prio"
_TERM = 60.0  # seconds for which an answer holds
_NO_TERM = 10.0  # the same of one without rules: slurmctld may not have read slurm.conf again yet
_MODES = frozenset(("off", "cancel", "requeue", "suspend", "gang", "within"))
_NO_TIME = ("", "none", "unlimited")
_COLUMNS = "Name|Preempt|PreemptMode|PreemptExemptTime|GraceTime|Flags"

log = structlog.get_logger()


def preempt_type(slurm_conf: str) -> str:
    """The plugin that says which jobs preempt which; empty if none do."""
    found = conf.value(slurm_conf, "PreemptType")
    return found if found in (BY_QOS, BY_PARTITION) else ""


@dataclass(frozen=True, slots=True)
class ClusterRules:
    """What slurmctld says of preemption in the whole cluster."""

    kind: str
    mode: frozenset[str]
    exempt: float | None  # seconds; None: no value
    by_priority: bool  # jobs of some priority are exempt


@dataclass(frozen=True, slots=True)
class QosRules:
    takes: frozenset[str]
    mode: frozenset[str]  # empty: the cluster's
    exempt: float | None
    grace: float
    over_partition: bool  # its values go before those of the partition's QOS


@dataclass(frozen=True, slots=True)
class PartitionRules:
    tier: int
    mode: frozenset[str]
    grace: float
    nodes: NodeSet
    qos: str  # that limits the partition; empty if none does


def cluster_rules(config: str) -> ClusterRules:
    """Read the output of `scontrol show config`. Raises `Unknown` for any other text."""
    found = dict(re.findall(r"^(Preempt\w+)\s*=[ \t]*(.*?)[ \t]*$", config, re.MULTILINE))
    if not {"PreemptType", "PreemptMode", "PreemptExemptTime"} <= found.keys():
        raise Unknown("slurmctld does not say which jobs may be preempted", hint="see scontrol show config")
    return ClusterRules(
        found["PreemptType"],
        _mode(found["PreemptMode"]),
        _seconds(found["PreemptExemptTime"]),
        "min_exempt_priority=" in found.get("PreemptParameters", ""),
    )


def qos_rules(text: str) -> dict[str, QosRules]:
    """Read the output of `sacctmgr --parsable2 show qos` with `_COLUMNS`. Raises `Unknown` for any other text."""
    title, *rows = text.splitlines() or [""]
    cells = [row.split("|") for row in rows]
    if title != _COLUMNS or any(len(row) != len(title.split("|")) for row in cells):
        raise Unknown("cannot understand sacctmgr's table of QOS", hint="see sacctmgr show qos")
    return {
        name: QosRules(
            takes=frozenset(filter(None, takes.split(","))),
            mode=frozenset() if mode in ("", "cluster") else _mode(mode),
            exempt=_seconds(exempt),
            grace=_seconds(grace) or 0.0,
            over_partition="overpartqos" in flags.lower().split(","),
        )
        for name, takes, mode, exempt, grace, flags in cells
    }


def partition_rules(text: str) -> dict[str, PartitionRules]:
    """Read the output of `scontrol show partition --oneliner`. Raises `Unknown` for any other text."""
    found = {}
    for line in text.splitlines() or [""]:
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        tier, grace = fields.get("PriorityTier", ""), fields.get("GraceTime", "")
        if not (line.startswith("PartitionName=") and tier.isdecimal() and grace.isdecimal() and "Nodes" in fields):
            raise Unknown("cannot understand Slurm's partitions", hint="see scontrol show partition")
        mode, nodes, qos = _mode(fields.get("PreemptMode", "")), _nodes(fields["Nodes"]), fields.get("QoS", "N/A")
        found[fields["PartitionName"]] = PartitionRules(
            int(tier), mode, float(grace), nodes, "" if qos == "N/A" else qos
        )
    return found


def _nodes(text: str) -> NodeSet:
    try:
        return NodeSet("" if text == "(null)" else text, resolver=RESOLVER_NOGROUP)
    except NodeSetException as error:
        raise Unknown(f"cannot understand the nodes {text!r}", hint="see scontrol show partition") from error


def _mode(text: str) -> frozenset[str]:
    words = frozenset(text.lower().split(","))
    if not words <= _MODES:
        raise Unknown(f"cannot understand Slurm's PreemptMode {text!r}", hint="see scontrol show config")
    return words


def _seconds(text: str) -> float | None:
    """A time as secs2time_str writes it; None if there is none."""
    if text.lower() in _NO_TIME:
        return None
    if not re.fullmatch(r"(?:\d+-)?\d\d:\d\d:\d\d", text):
        raise Unknown(f"cannot understand the time {text!r} in Slurm's settings", hint="see scontrol show config")
    return float(conf.seconds(text))


@dataclass(slots=True)
class _Classes:
    """The classes, as they are collected."""

    cluster: ClusterRules
    takes: dict[str, frozenset[str]] = field(default_factory=dict)
    exempt: dict[str, float] = field(default_factory=dict)
    modes: dict[str, str] = field(default_factory=dict)
    grace: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, mode: frozenset[str], grace: float, *exempt: float | None) -> None:
        """Add a class. Of the exempt times the first counts that has a value, and otherwise the cluster's
        (acct_policy_get_preemptable_time)."""
        self.modes[name] = self._applied(mode)
        if seconds := next((one for one in exempt if one is not None), self.cluster.exempt):
            self.exempt[name] = seconds
        if grace:
            self.grace[name] = grace

    def _applied(self, mode: frozenset[str]) -> str:
        """What slurmctld does to a job (_preempt_jobs in node_scheduler.c): what it can neither suspend nor queue again
        it kills, and a job without a mode is left alone."""
        own = mode - {"gang"}
        if own <= {"off"}:
            return "off"
        if own == {"suspend"}:
            return "suspend" if "gang" in self.cluster.mode else "cancel"
        return "requeue" if own == {"requeue"} else "cancel"

    def rules(self) -> Preemption:
        on = {name for name, mode in self.modes.items() if mode != "off"}
        takes = {name: (found & on) - {name} for name, found in self.takes.items()}
        return Preemption({name: found for name, found in takes.items() if found}, self.exempt, self.modes, self.grace)


def by_qos(cluster: ClusterRules, qos: Mapping[str, QosRules], limiting: str) -> Preemption:
    """The rules of preempt/qos for jobs in a partition that the QOS `limiting` limits; empty: none does."""
    classes = _Classes(cluster)
    of_partition = qos[limiting].exempt if limiting in qos else None
    for name, one in qos.items():
        exempt = (one.exempt, of_partition) if one.over_partition else (of_partition, one.exempt)
        classes.add(name, (one.mode or cluster.mode) - {"within"}, one.grace, *exempt)
        classes.takes[name] = one.takes
    return classes.rules()


def by_partition(
    cluster: ClusterRules, partitions: Mapping[str, PartitionRules], qos: Mapping[str, QosRules]
) -> Preemption:
    """The rules of preempt/partition_prio. A job preempts jobs on nodes of its own partition only (_add_preemptable_job
    in preempt.c), so that jobs of our partition, which has the tier 0 and no physical nodes, are apart from jobs that
    were moved from others. The exempt time of a job's own QOS does not count here, because it is not the same for all
    jobs of a partition."""
    classes = _Classes(cluster)
    for name, one in partitions.items():
        classes.add(name, one.mode, one.grace, qos[one.qos].exempt if one.qos in qos else None)
        classes.takes[name] = frozenset(
            other for other, its in partitions.items() if its.tier < one.tier and its.nodes & one.nodes
        )
    return classes.rules()


class PreemptionReader:
    """Asks Slurm which jobs may preempt which, and remembers the answer for a while."""

    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands
        self._kind = ""
        self._known: Preemption | None = None
        self._asked = -inf

    async def read(self, kind: str, partitions: Collection[str]) -> Preemption | None:
        """The rules for jobs of these partitions, of which the first is that of VMs. `kind` is `preempt_type` of
        slurm.conf. Without a plugin there, nothing is asked, and the answer is None. While slurmdbd does not answer,
        the answer is the one before; None if there is none."""
        if kind != self._kind:
            self._kind, self._known, self._asked = kind, None, -inf
        now = time.monotonic()
        if kind and now - self._asked > (_TERM if self._known is not None else _NO_TERM):
            self._known = await self._ask(partitions)
            self._asked = now
        return self._known

    async def _ask(self, partitions: Collection[str]) -> Preemption | None:
        config, shown = await asyncio.gather(
            self._commands.run("scontrol", "show", "config"),
            self._commands.run("scontrol", "show", "partition", "--all", "--oneliner"),
        )
        cluster, found = cluster_rules(config), partition_rules(shown)
        if cluster.kind != self._kind or cluster.by_priority:  # the former until slurmctld has read slurm.conf again
            return None
        ours = {name: found[name] for name in partitions if name in found}
        qos: dict[str, QosRules] = {}
        if self._kind == BY_QOS or any(one.qos for one in ours.values()):
            asked = ("sacctmgr", "--parsable2", "show", "qos", f"format={_COLUMNS.replace('|', ',')}")
            try:
                text = await self._commands.run(*asked)
            except MultiverseError as error:
                log.warning("cannot read the preemption of QOS", reason=str(error), hint="see sacctmgr show qos")
                return self._known
            qos = qos_rules(text)
        if self._kind == BY_PARTITION:
            return by_partition(cluster, ours, qos)
        return by_qos(cluster, qos, next((one.qos for one in ours.values()), ""))
