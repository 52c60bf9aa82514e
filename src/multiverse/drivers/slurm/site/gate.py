"""The gate: how a job of Multiverse's partition waits without being held, and how it is let through. Pure.

A job at the gate asks for a licence that nobody can get, because a reservation holds it (`Licenses=vm:1
Flags=LICENSE_ONLY`), and for nodes with the gate's feature. Those nodes are declared in slurm.conf with State=CLOUD:
Slurm takes them for machines that it could power up, so it accepts the job, orders it and lets it age, and shows the
reason `Licenses`. The licence is the only barrier. A job that gets past it is given nodes of the gate, where it waits
for them to boot (CONFIGURING) and runs nothing.

A job that is let through is in the same partition as those that wait, and Slurm looks only at the first ones
(partition_job_depth, default_queue_depth), so that its nice value moves it before them.

`acting.gate_keeper` keeps the gate closed. Decision 82 has what was measured, and what else was tried.

Overflow: jobs of partitions of physical nodes may run in VMs. A job that is moved must be limited, charged and ranked
as before. So our partition gets the limits of the partition that overflows when our file is rendered, and what
slurmctld has is compared at the start.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from types import MappingProxyType

from ClusterShell.NodeSet import NodeSet

from multiverse.config import OverflowSettings, Settings
from multiverse.core.errors import Refused
from multiverse.drivers.slurm.site import conf
from multiverse.drivers.slurm.site.conf import SiteConf, features_of, folded, records, seconds
from multiverse.ports.site import Finding, Level

GATE_NODE = "mvgate"
MOVED_FROM = "mv_from_"
"""With the name of a partition, the feature of jobs that were moved from there, of the gate's nodes and of all VMs."""
PLACE = "place-"  # before the name of a placement policy, as a feature
NODE_SET = "mvvms"  # the set of all VMs in slurm.conf

_BASIC, _BOOST = 60_000, 2_000_000_000


def boost(slurm_conf: str) -> int:
    """By how much the nice value of a job is lowered when it is let through. With priority/basic the first job has the
    priority 0xffff0000, and each later job one less: a larger boost would overflow Slurm's 32 bits.
    priority/multifactor bounds the sum itself."""
    basic = conf.value(slurm_conf, "PriorityType", "priority/basic").lower() == "priority/basic"
    return _BASIC if basic else _BOOST


def boosted(nice: int, by: int) -> int:
    return nice if nice <= -by // 2 else nice - by


def unboosted(nice: int, by: int) -> int:
    """The nice value of the same job back at the gate. Users cannot set a negative one."""
    return nice + by if nice <= -by // 2 else nice


def licence_words(text: str) -> tuple[str, ...]:
    """The licences in a job's list as words, such as `matlab:2`."""
    return tuple(word for word in re.split(r"[,;]", "" if text in ("(null)", "N/A") else text) if word)


def own_licences(text: str, licence: str) -> tuple[str, ...]:
    return tuple(word for word in licence_words(text) if not is_licence(word, licence))


def is_licence(word: str, licence: str) -> bool:
    return re.split(r"[:=]", word, maxsplit=1)[0] == licence


def has_licence(text: str, licence: str) -> bool:
    return any(is_licence(word, licence) for word in licence_words(text))


def on_gate(nodes: Collection[str]) -> bool:
    """Whether a job that has these nodes got past the licence: no VM is there."""
    return bool(nodes) and all(re.fullmatch(rf"{GATE_NODE}\d+", node) for node in nodes)


EQUAL = (
    "AllocNodes", "AllowAccounts", "AllowGroups", "AllowQos", "DefMemPerCPU", "DefMemPerNode", "DefaultTime",
    "DenyAccounts", "DenyQos", "DisableRootJobs", "ExclusiveUser", "JobDefaults", "MaxCPUsPerNode",
    "MaxCPUsPerSocket", "MaxMemPerCPU", "MaxMemPerNode", "MaxNodes", "MaxTime", "MinNodes", "OverTimeLimit",
    "PriorityJobFactor", "QOS", "ReqResv", "RootOnly", "TRESBillingWeights",
)  # fmt: skip
"""The keys that both partitions have to share: who may use them, how much, how long, at what price and priority."""

_problem = partial(Finding, Level.PROBLEM)
_TIMES = ("MaxTime", "DefaultTime")
_NOTHING = ("", "all", "unlimited", "infinite", "none", "n/a", "no", "0", "-1")  # as if the key were not set
_MOVED = re.compile(r"\[multiverse: moved from partition ([A-Za-z0-9_.-]+), ")


# --- what users are told ---------------------------------------------------------------------------


def moved_text(origin: str, text: str) -> str:
    """The text for the user of a job that was moved from a partition. `told_origin` reads it."""
    return f"moved from partition {origin}, which was full{f': {text}' if text else ''}"


def told_origin(comment: str) -> str:
    """The partition that a job was moved from, by its AdminComment; empty if it was not."""
    match = _MOVED.search(comment)
    return match[1] if match else ""


# --- what slurm.conf says --------------------------------------------------------------------------


def examine_overflow(settings: Settings, site: SiteConf) -> Iterator[Finding]:
    """The problems of partitions that overflow into VMs. Each makes overflow impossible."""
    partitions = {one["partitionname"]: one for one in _partitions(site.text)}
    leased = {one.partition: _nodes(site, partitions.get(one.partition, {})) for one in settings.lease}
    for one in settings.overflow:
        name = f"PartitionName={one.partition}"
        mine = partitions.get(one.partition)
        if mine is None:
            yield _problem(name, "it overflows into VMs, but there is no such partition", "correct [[overflow]]")
            continue
        for other, nodes in leased.items():
            if shared := nodes & _nodes(site, mine):
                yield _problem(
                    name,
                    f"partition {one.partition} overflows, and shares {shared} with partition {other}, from which "
                    "hosts are leased: its jobs would take the nodes that their VMs need",
                    "lease from, or let overflow, a partition with other nodes",
                )
        if "exclusive" in mine.get("oversubscribe", "").lower():
            yield _problem(
                name,
                f"each job of partition {one.partition} gets whole nodes (OverSubscribe=EXCLUSIVE), which VMs are not",
                "remove it from [[overflow]]",
            )
        yield from _differences(settings, site, mine)
        yield from _unmarked(site, one)


def _differences(settings: Settings, site: SiteConf, mine: Mapping[str, str]) -> Iterator[Finding]:
    """The limits of our installed partition that differ. Without our file something else is reported."""
    ours = {one["partitionname"]: one for one in _partitions(site.above or "", site.ours)} if site.ours else {}
    name = settings.slurm.partition
    other = ours.get(name)
    differing = [key for key in EQUAL if other is not None and _value(mine, key) != _value(other, key)]
    if differing:
        yield _problem(
            f"PartitionName={name}",
            f"jobs of partition {mine['partitionname']} would have other limits or prices in VMs: "
            f"{', '.join(differing)} of partition {name} differ{'s' if len(differing) == 1 else ''}",
            "run multiverse site render again, install its files and run scontrol reconfigure; or remove [[overflow]]",
        )


def _unmarked(site: SiteConf, one: OverflowSettings) -> Iterator[Finding]:
    """Slurm would fail a job that is put back at a gate whose nodes lack one of its features."""
    gate = next((node for node in records(site.ours, "NodeName")), None)
    known = (gate or {}).get("feature", "").split(",")
    lacking = [word for word in (MOVED_FROM + one.partition, one.constraint) if word and word not in known]
    if gate is not None and lacking:
        yield _problem(
            f"NodeName={gate['nodename']}",
            f"the gate's nodes lack the feature {' and '.join(lacking)}, which jobs of partition {one.partition} have",
            "run multiverse site render again, install its files and run scontrol reconfigure; or remove [[overflow]]",
        )


def limits_of(settings: Settings, site: SiteConf) -> str:
    """The part of our partition's line in slurm.conf that gives it its limits: those of the settings, or those of a
    partition that overflows. Raises `Refused` if the settings have a key that is no limit."""
    given = dict(word.split("=", 1) for word in settings.slurm.limits.split())
    if wrong := [key for key in given if key.lower() not in {one.lower() for one in EQUAL}]:
        hint = f"give only: {', '.join(EQUAL)}"
        raise Refused(f"slurm.limits: {', '.join(wrong)} is no limit of a partition", hint=hint)
    own = {key.lower(): value for key, value in given.items()}
    return limits_like(settings.overflow[0].partition if settings.overflow else "", site, own)


def limits_like(partition: str, site: SiteConf, own: Mapping[str, str] = MappingProxyType({})) -> str:
    """The part of a line of slurm.conf that gives a partition the limits of another; if that is unknown, its `own`, by
    keys in small letters. MaxTime is always among them."""
    found = next((one for one in _partitions(site.text) if one["partitionname"] == partition), own)
    values = {"MaxTime": "INFINITE"} | {key: found[key.lower()] for key in EQUAL if key.lower() in found}
    return " ".join(f'{key}="{value}"' if " " in value else f"{key}={value}" for key, value in values.items())


def _partitions(*texts: str) -> Iterator[dict[str, str]]:
    """The partitions in the last of several texts, each with the values of lines named DEFAULT above it."""
    defaults: dict[str, str] = {}
    for text in texts:
        for record in records(text, "PartitionName"):
            if record["partitionname"].lower() == "default":
                defaults |= record
            elif text is texts[-1]:
                yield {**defaults, **record}


def _value(partition: Mapping[str, str], key: str) -> object:
    text = partition.get(key.lower(), "").lower()
    if key == "PriorityJobFactor" and text == "1":
        return ""
    if text in _NOTHING:
        return ""
    return seconds(text) if key in _TIMES else ",".join(sorted(text.split(",")))


def leased_nodes(settings: Settings, site: SiteConf) -> list[str]:
    """The nodes of all partitions that hosts are leased from."""
    wanted = {one.partition for one in settings.lease}
    found = [_nodes(site, one) for one in _partitions(site.text) if one["partitionname"] in wanted]
    return [str(name) for nodes in found for name in nodes]


def _nodes(site: SiteConf, partition: Mapping[str, str]) -> NodeSet:
    sets = {one["nodeset"]: one for one in site.records("NodeSet")}
    found = NodeSet()
    # A comma within brackets separates no names.
    for word in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", partition.get("nodes", "")):
        if word.lower() == "all":
            found.update(site.nodes())
        elif word in sets:
            found.update(folded(iter([sets[word].get("nodes", "")])))
            feature = sets[word].get("feature", "")
            having = (one for one in site.records("NodeName") if feature and feature in features_of(one))
            found.update(folded(one["nodename"] for one in having))
        else:
            found.update(folded(iter([word])))
    return found
