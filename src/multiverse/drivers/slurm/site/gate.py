"""The gate: how a job of Multiverse's partition waits without being held, and how it is let through. Pure.

A job at the gate asks for a licence that nobody can get, because a reservation holds it (`Licenses=vm:1
Flags=LICENSE_ONLY`), and for nodes with the gate's feature. Those nodes are declared in slurm.conf with State=CLOUD:
Slurm takes them for machines that it could power up, so it accepts the job, orders it and lets it age, and shows the
reason `Licenses`. The licence is the only barrier. A job that gets past it is given nodes of the gate, where it waits
for them to boot (CONFIGURING) and runs nothing.

A job that is let through is in the same partition as those that wait, and Slurm looks only at the first ones
(partition_job_depth, default_queue_depth), so that its nice value moves it before them.

`acting.gate_keeper` keeps the gate closed. Decision 82 has what was measured, and what else was tried.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from multiverse.drivers.slurm.site import conf, site_conf

GATE_NODE = "mvgate"
NODE_SET = "mvvms"
"""The set of all VMs in slurm.conf."""

_BASIC, _BOOST = 60_000, 2_000_000_000


def boost(slurm_conf: str) -> int:
    """By how much the nice value of a job is lowered that is let through.

    With priority/basic the first job has the priority 0xffff0000, and each later one a priority of one less (22.05 to
    25.11): a larger boost would overflow Slurm's 32 bits. priority/multifactor bounds the sum itself.
    """
    basic = conf.value(slurm_conf, "PriorityType", "priority/basic").lower() == "priority/basic"
    return _BASIC if basic else _BOOST


def boosted(nice: int, by: int) -> int:
    """The nice value of a job that is let through."""
    return nice if nice <= -by // 2 else nice - by


def unboosted(nice: int, by: int) -> int:
    """The nice value of the same job back at the gate: that of its user. Users cannot have a negative one."""
    return nice + by if nice <= -by // 2 else nice


def licence_words(text: str) -> tuple[str, ...]:
    """The licences in a job's list as words, such as `matlab:2`."""
    return tuple(word for word in re.split(r"[,;]", "" if text in ("(null)", "N/A") else text) if word)


def own_licences(text: str, licence: str) -> tuple[str, ...]:
    """The licences that the job's user asked for."""
    return tuple(word for word in licence_words(text) if not is_licence(word, licence))


def is_licence(word: str, licence: str) -> bool:
    """Whether a word such as `vm:1` is the gate's licence."""
    return re.split(r"[:=]", word, maxsplit=1)[0] == licence


def has_licence(text: str, licence: str) -> bool:
    """Whether a job's licences contain the gate's."""
    return any(is_licence(word, licence) for word in licence_words(text))


def on_gate(nodes: Collection[str]) -> bool:
    """Whether a job that has these nodes got past the licence: no VM is there."""
    return bool(nodes) and all(re.fullmatch(rf"{GATE_NODE}\d+", node) for node in nodes)


def is_declared(ours: str, partition: str) -> bool:
    """Whether our file, by its text, declares this gate: the nodes of the gate and all VMs are in one partition."""
    found = (one for one in site_conf.records(ours, "PartitionName") if one["partitionname"] == partition)
    return any(NODE_SET in one.get("nodes", "") for one in found)


def retired_partitions(slurm_conf: str, partition: str) -> tuple[str, ...]:
    """Partitions of VMs alone, as our file of an earlier release declares: jobs that started there end there."""
    found = (one for one in site_conf.records(slurm_conf, "PartitionName") if one.get("nodes") == NODE_SET)
    return tuple(one["partitionname"] for one in found if one["partitionname"] != partition)


MOVED_FROM = "mv_from_"
"""Before the name of the partition that a job was moved from, as a feature. The gate's nodes and all VMs have these."""

PLACE = "place-"  # before the name of a placement policy, as a feature
