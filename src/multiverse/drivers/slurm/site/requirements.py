"""Compares a site's slurm.conf with the needs of Multiverse, and finds settings that would catch VMs. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from ClusterShell.NodeSet import NodeSet, NodeSetException

from multiverse.config import Settings, SlurmSettings, site_cpus
from multiverse.core.errors import Unknown
from multiverse.drivers.slurm.site import conf, gate, install
from multiverse.drivers.slurm.site.conf import OURS, SiteConf, features_of, folded, records
from multiverse.ports.site import Finding, Level

TREE_WIDTH = 65533  # Slurm's largest: before 23.11 no slurmd can pass messages on to dynamic nodes

BF_YIELD_INTERVAL = 2_000_000  # microseconds for which backfill keeps slurmctld's locks by default (slurm.conf(5))
LONGEST_YIELD_INTERVAL = 100_000  # up to this one, a long queue does not delay the start of VMs (decision 45)
# Jobs of each partition that the main scheduler looks at in a turn, so that jobs of VMs start in time (decision 82).
PARTITION_JOB_DEPTH = 50
SLURMD_TIMEOUT = 300  # seconds after which Slurm gives up a silent node, if slurm.conf does not say (slurm.conf(5))
BF_INTERVAL_OF_A_BACKUP = 5  # seconds between two cycles of backfill that suffice where only backfill starts jobs
_OLDEST, _NEWEST = (22, 5), (25, 99)
_BACKUP_SCHEDULES_AT_ONCE = (23, 2, 4)
_KEEPS_ADDRESSES = (23, 11, 4)
_VMS_BEFORE_THEY_ARE_DELETED = 2  # times the CPUs that may be claimed: as many VMs start as are being removed
_ROUND = 256  # a new MaxNodeCount is a multiple of it, so that it need not be raised for each new node


_problem, _note = partial(Finding, Level.PROBLEM), partial(Finding, Level.NOTE)


class Version(NamedTuple):
    """Slurm's release, such as 22.05, and which maintenance release of it."""

    year: int
    month: int
    micro: int = 0

    def __str__(self) -> str:
        return f"{self.year}.{self.month:02d}"


def version(text: str) -> Version:
    """From the output of `scontrol --version`. Raises `Unknown` for any other text."""
    match = re.search(r"slurm\S* (\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise Unknown(f"cannot understand Slurm's version: {text.strip()[:80]!r}", hint="run scontrol --version")
    return Version(int(match[1]), int(match[2]), int(match[3] or 0))


def forgets_addresses(release: Version) -> bool:
    """Whether a slurmctld that was restarted does not tell where the nodes of running jobs are. It makes that list when
    it allocates a job, and does not keep it (alias_list in Slurm's sources)."""
    return release < _KEEPS_ADDRESSES


def examine(settings: Settings, site: SiteConf, release: Version) -> Iterator[Finding]:
    """All findings in a slurm.conf. slurmctld may not have read it since it was changed."""
    yield from _release(release)
    yield from _include(site)
    yield from _nodes(settings, site, release)
    yield from _names(settings, site)
    yield from _gate(settings, site)
    yield from _scripts(settings, site)
    yield from _communication(settings, site)
    yield from _scheduling(site)
    yield from _backups(site, release)
    yield from _job_vms(settings, site)
    yield from lease_sources(settings, site)
    yield from gate.examine_overflow(settings, site)
    yield from conf.unsupported(site.text, preempts=settings.preempts)


def lease_sources(settings: Settings, site: SiteConf) -> Iterator[Finding]:
    """The problems of partitions that hosts are leased from. Each makes leases impossible."""
    partitions = {p["partitionname"]: p for p in site.records("PartitionName")}
    unrooted = site.value("DisableRootJobs", "no").lower() in ("yes", "up", "true", "1")
    for lease in settings.lease:
        name = f"PartitionName={lease.partition}"
        partition = partitions.get(lease.partition)
        if partition is None:
            yield _problem(name, "hosts are leased from it, but there is no such partition", "correct [[lease]]")
            continue
        modes = {word.lower() for mode in _preemptions(partition, site) for word in mode.split(",")}
        if suspending := modes & {"suspend", "gang"}:
            yield _problem(
                name,
                f"hosts are leased from partition {lease.partition}, and its jobs may be suspended "
                f"({', '.join(sorted(suspending))}): VMs would stand still, and their nodes and jobs be lost",
                "lease from a partition with PreemptMode=REQUEUE, CANCEL or OFF",
            )
        root = lease.user in ("", "root")
        if unrooted and root:
            yield _problem(
                "DisableRootJobs",
                "Slurm runs no jobs of root here, but pilots would be root's",
                'set user and become under [[lease]], as user = "multiverse", become = ["sudo", "-n"]',
            )
        elif not root and not lease.become:
            yield _problem(
                name,
                f"the pilots of {lease.user} cannot become root on the nodes of partition {lease.partition}",
                'set become under [[lease]], as become = ["sudo", "-n"]',
            )


def _preemptions(partition: dict[str, str], site: SiteConf) -> list[str]:
    """The modes in which jobs of a partition may be preempted. The cluster's mode holds for partitions without a mode
    of their own, but GANG for all (slurm.conf(5))."""
    general = site.value("PreemptMode", "off")
    gang = ["gang"] if "gang" in general.lower().split(",") else []
    above = [p for p in records(site.text, "PartitionName") if p["partitionname"].lower() == "default"]
    usual = next((p["preemptmode"] for p in reversed(above) if "preemptmode" in p), general)
    return [partition.get("preemptmode", usual), *gang]


def _release(release: Version) -> Iterator[Finding]:
    if release < _OLDEST:
        yield _problem("Slurm", f"Slurm {release} has no dynamic nodes", "upgrade Slurm to 22.05 or later")
    elif release > _NEWEST:
        yield _note("Slurm", f"Multiverse was not tried with Slurm {release}", "try it on a test cluster first")


def _job_vms(settings: Settings, site: SiteConf) -> Iterator[Finding]:
    flags = conf.value(site.text, "PrologFlags").lower().split(",")
    if settings.job_vms.enabled and settings.job_vms.design == "tasks":
        yield from _job_vms_by_tasks(site)
    elif settings.job_vms.enabled and not {"alloc", "contain", "x11"} & set(flags):
        yield _problem(
            "PrologFlags",
            "a step whose environment lacks the options of its job would not run in the job's VM",
            "add Alloc to PrologFlags, then restart slurmctld and all slurmds",
            "PrologFlags=Alloc",
        )
    gres = settings.job_vms.sriov_gres
    if gres and gres not in conf.value(site.text, "GresTypes").split(","):
        yield _problem(
            "GresTypes",
            f"Slurm knows no GRES {gres}, by which it is to count virtual functions (job_vms.sriov_gres)",
            f"add {gres} to GresTypes, and to gres.conf and the nodes: see docs/job-vms.md",
            f"GresTypes={gres}",
        )
    feature = settings.job_vms.feature
    for node in site.records("NodeName"):
        if feature in features_of(node):
            yield _problem(
                f"NodeName={node['nodename']}",
                f"the node has the feature {feature} also where the plugin for VMs inside jobs does not work",
                f"remove {feature} from slurm.conf, where slurmctld finds it at each start: the node's agent sets it",
            )


def _job_vms_by_tasks(site: SiteConf) -> Iterator[Finding]:
    """If steps launch VMs, the agent knows their jobs by control groups."""
    tracking = conf.value(site.text, "ProctrackType").lower() or "proctrack/cgroup"
    if tracking != "proctrack/cgroup" and "task/cgroup" not in conf.value(site.text, "TaskPlugin").lower():
        yield _problem(
            "ProctrackType",
            "no step can launch a VM, because jobs have no control groups by which the agent knows them",
            "set ProctrackType=proctrack/cgroup and TaskPlugin=task/cgroup",
        )


def _include(site: SiteConf) -> Iterator[Finding]:
    if site.above is None:
        yield _problem(
            "slurm.conf",
            f"slurm.conf does not include {OURS}",
            f"add the line: Include {OURS} (above any line NodeName=DEFAULT), then restart slurmctld",
            f"Include {OURS}",
        )
    elif site.defaults_above("NodeName"):
        yield _problem(
            "NodeName=DEFAULT",
            f"a line NodeName=DEFAULT above the line Include {OURS} holds for the gate's nodes, too",
            f"move the line Include {OURS} above it, then restart slurmctld",
        )
    if site.above is not None and site.defaults_above("PartitionName"):
        yield _note(
            "PartitionName=DEFAULT",
            f"a line PartitionName=DEFAULT above the line Include {OURS} holds for our partitions, too",
            f"no action is needed if these limits are meant for jobs in VMs; or else move the line Include {OURS} up",
        )


def nodes_needed(cpus: int, site: SiteConf) -> int:
    """The least MaxNodeCount if VMs may claim so many CPUs: nodes of the site and the gate, and VMs at a time."""
    return len(site.nodes()) + install.GATE_NODES + _VMS_BEFORE_THEY_ARE_DELETED * cpus


def lack_of_nodes(cpus: int, site: SiteConf) -> Finding | None:
    """The problem, if not all VMs that can exist at a time can be nodes."""
    needed, count = nodes_needed(cpus, site), site.number("MaxNodeCount") or 0
    if count >= needed:
        return None
    line = f"MaxNodeCount={math.ceil(needed / _ROUND) * _ROUND}"
    return _problem(
        "MaxNodeCount",
        f"MaxNodeCount is {count or 'not set'}, but {needed} nodes can exist, VMs included",
        f"set {line} or more and restart slurmctld (scontrol reconfigure would end it)",
        line,
    )


def _nodes(settings: Settings, site: SiteConf, release: Version) -> Iterator[Finding]:
    """The needs of dynamic nodes (Slurm's page on dynamic nodes, and its versions from 22.05 on)."""
    default = "select/linear" if release < (23, 11) else "select/cons_tres"
    select = site.value("SelectType", default)
    if select.lower() != "select/cons_tres":
        yield _problem(
            "SelectType",
            f"SelectType is {select}, but dynamic nodes need select/cons_tres",
            "set SelectType=select/cons_tres and restart slurmctld; see in slurm.conf(5) what becomes of running jobs",
            "SelectType=select/cons_tres",
        )
    if lack := lack_of_nodes(site_cpus(settings), site):
        yield lack
    if release < (23, 11) and (site.number("TreeWidth") or 0) < TREE_WIDTH:
        yield _problem(
            "TreeWidth",
            f"Slurm {release} passes messages on through nodes, which dynamic nodes cannot do",
            f"set TreeWidth={TREE_WIDTH} and run scontrol reconfigure",
            f"TreeWidth={TREE_WIDTH}",
        )
    topology = site.value("TopologyPlugin", "topology/none").lower()
    if release < (23, 2) and topology not in ("topology/none", "topology/default"):
        yield _problem(
            "TopologyPlugin", f"Slurm {release} has no dynamic nodes with {topology}", "remove TopologyPlugin"
        )
    if release < (24, 5) and site.value("RoutePlugin").lower() == "route/topology":
        yield _problem("RoutePlugin", f"Slurm {release} has no dynamic nodes with route/topology", "remove RoutePlugin")
    everywhere = (p for p in site.records("PartitionName") if "all" in p.get("nodes", "").lower().split(","))
    for name in (p["partitionname"] for p in everywhere):
        yield _problem(
            f"PartitionName={name}",
            f"partition {name} has Nodes=ALL, so that VMs and the gate's nodes are in it, too",
            f"list the nodes of partition {name} by name: Nodes={site.nodes() or '…'}",
        )


def _names(settings: Settings, site: SiteConf) -> Iterator[Finding]:
    """Names that both the site and Multiverse use."""
    slurm = settings.slurm
    if any(p["partitionname"] == slurm.partition for p in site.records("PartitionName")):
        yield _problem(
            f"PartitionName={slurm.partition}",
            f"the site has a partition {slurm.partition} of its own",
            "set another slurm.partition in the settings, then run multiverse site render again",
        )
    if any(record["nodeset"] == gate.NODE_SET for record in site.records("NodeSet")):
        yield _problem(f"NodeSet={gate.NODE_SET}", "the site has a node set of this name", "rename the site's")
    gates = folded(iter([f"{gate.GATE_NODE}[1-{install.GATE_NODES}]"]))
    if site.nodes() & gates:
        yield _problem(
            f"NodeName={gate.GATE_NODE}",
            "a node of the site has a name of the gate's, such as mvgate1",
            "rename the site's nodes",
        )
    reserved = {slurm.node_feature: "node_feature", slurm.gate_feature: "gate_feature"}
    for node in site.records("NodeName"):
        for feature in {*features_of(node)} & reserved.keys():
            yield _problem(
                f"NodeName={node['nodename']}",
                f"a node of the site has the feature {feature}, and would belong to Multiverse's partitions",
                f"set another slurm.{reserved[feature]} in the settings, then run multiverse site render again",
            )


def _gate(settings: Settings, site: SiteConf) -> Iterator[Finding]:
    """Licences and programs of power saving, which the gate needs. Slurm takes only the last line of each key."""
    wanted, licences = f"{settings.slurm.licence}:1", site.value("Licenses")
    if licences and wanted not in gate.licence_words(licences):
        yield _problem(
            "Licenses",
            f"slurm.conf has licences, but not {wanted}, for which jobs wait at the gate",
            f"set Licenses={licences},{wanted} and run scontrol reconfigure",
        )
    programs = {key: site.value(key) for key in ("SuspendProgram", "ResumeProgram")}
    if any(programs.values()) and not all(programs.values()):
        missing = next(key for key, program in programs.items() if not program)
        yield _problem(
            missing,
            f"{missing} is missing beside the other program of power saving, so that Slurm powers no node up or down",
            f"set {missing}, for example to /bin/true, and run scontrol reconfigure",
            f"{missing}=/bin/true",
        )


def _scripts(settings: Settings, site: SiteConf) -> Iterator[Finding]:
    plugins = site.words("JobSubmitPlugins")
    if not {"lua", "job_submit/lua"} & {*plugins}:
        yield _problem(
            "JobSubmitPlugins",
            "JobSubmitPlugins does not have lua, so jobs are not sent to the gate",
            f"set JobSubmitPlugins={','.join([*plugins, 'lua'])} and run scontrol reconfigure",
            "JobSubmitPlugins=lua",
        )
    if not epilogs(site):
        yield _note(
            "EpilogSlurmctld",
            "slurmctld does not tell when a job in a VM ends, so its VM is removed up to a poll interval later",
            f"set EpilogSlurmctld={settings.slurm.conf.parent}/{install.EPILOG} and restart slurmctld",
            f"EpilogSlurmctld={settings.slurm.conf.parent}/{install.EPILOG}",
        )


def epilogs(site: SiteConf) -> list[str]:
    """The programs that slurmctld runs at the end of a job."""
    return [value.strip('"') for key, value in conf.settings(site.text) if key.lower() == "epilogslurmctld" and value]


def _communication(settings: Settings, site: SiteConf) -> Iterator[Finding]:
    authentication = site.value("AuthType", "auth/munge")
    if authentication.lower() != "auth/munge":
        yield _problem(
            "AuthType", f"AuthType is {authentication}, but nodes in VMs have munge", "set AuthType=auth/munge"
        )
    slurmctlds = conf.controllers(site.text)
    address = settings.slurm.controller_address or settings.network.gateway
    if "noctldinaddrany" in site.words("CommunicationParameters") and all(address != one.address for one in slurmctlds):
        yield _problem(
            "CommunicationParameters",
            f"with NoCtldInAddrAny slurmctld does not listen at {address}, where guests look for it",
            f"remove NoCtldInAddrAny, or give SlurmctldHost the address {address}",
        )
    if not any(word.startswith("keepalivetime=") for word in site.words("CommunicationParameters")):
        silence = site.number("SlurmdTimeout") or SLURMD_TIMEOUT
        words = f"keepalivetime={silence},keepaliveinterval=10,keepaliveprobes=6"
        yield _note(
            "CommunicationParameters",
            "a VM that is gone closes no connection, so an srun that slurmctld cannot tell of it waits for ever",
            f"add {words} to CommunicationParameters, then run scontrol reconfigure",
            f"CommunicationParameters={words}",
        )
    names = [one.name for one in slurmctlds]
    if len(names) > 1:
        yield _note(
            "SlurmctldHost",
            f"there are several slurmctlds ({', '.join(names)}), and each reads the files beside its slurm.conf",
            f"install the same files on each; let all of them mount {settings.slurm.inbox}, or hints are lost after a "
            "failover, which costs a poll interval for each job",
        )


def _scheduler_parameters(site: SiteConf) -> dict[str, str]:
    return {key: value for key, _, value in (word.partition("=") for word in site.words("SchedulerParameters"))}


def _backups(site: SiteConf, release: Version) -> Iterator[Finding]:
    """Before 23.02.4 a backup slurmctld that takes over runs no main scheduler: its thread ended with the standby's own
    shutdown, and nothing starts another (slurm_sched_init in Slurm's sources)."""
    interval = _scheduler_parameters(site).get("bf_interval", "")
    often = interval.isdecimal() and int(interval) <= BF_INTERVAL_OF_A_BACKUP
    if len(conf.controllers(site.text)) > 1 and release < _BACKUP_SCHEDULES_AT_ONCE and not often:
        yield _note(
            "SlurmctldHost",
            f"a backup slurmctld of Slurm {release} starts jobs only by backfill after it has taken over, so each job "
            "in a VM waits for up to bf_interval seconds (30 if slurm.conf does not say)",
            f"upgrade to Slurm 23.02.4 or later, or add bf_interval={BF_INTERVAL_OF_A_BACKUP} to SchedulerParameters, "
            "or restart the primary soon after a failover",
        )


def _scheduling(site: SiteConf) -> Iterator[Finding]:
    backfill = site.value("SchedulerType", "sched/backfill").lower() == "sched/backfill"
    parameters = _scheduler_parameters(site)
    if backfill and "bf_continue" not in parameters:
        yield _note(
            "SchedulerParameters",
            "without bf_continue each start of a VM ends Slurm's backfill cycle, so waiting jobs may be overlooked",
            "add bf_continue to SchedulerParameters and run scontrol reconfigure",
            "SchedulerParameters=bf_continue",
        )
    held = parameters.get("bf_yield_interval", "")
    if backfill and (int(held) if held.isdecimal() else BF_YIELD_INTERVAL) > LONGEST_YIELD_INTERVAL:
        yield _note(
            "SchedulerParameters",
            f"slurmctld may answer nothing for {held or BF_YIELD_INTERVAL} µs at a time (bf_yield_interval) "
            "while it plans the backfill of a long queue, which delays the start and the end of VMs",
            f"add bf_yield_interval={LONGEST_YIELD_INTERVAL} to SchedulerParameters and run scontrol reconfigure",
            f"SchedulerParameters=bf_yield_interval={LONGEST_YIELD_INTERVAL}",
        )
    if "partition_job_depth" not in parameters:
        yield _note(
            "SchedulerParameters",
            "a job whose VM is ready may wait for jobs of other partitions, which use up Slurm's default_queue_depth",
            f"add partition_job_depth={PARTITION_JOB_DEPTH} to SchedulerParameters and run scontrol reconfigure",
            f"SchedulerParameters=partition_job_depth={PARTITION_JOB_DEPTH}",
        )
    for key in ("PriorityWeightTRES", "PriorityWeightJobSize"):
        if site.value(key, "0") != "0":
            yield _note(
                key,
                f"{key} has no effect on jobs at the gate, because it is a fraction of the gate's declared size",
                "no action is needed if age, fair share and QOS suffice for jobs in VMs",
            )


RELEASES = ((20, 2), (20, 11), (21, 8), (22, 5), (23, 2), (23, 11), (24, 5), (24, 11), (25, 5), (25, 11))
"""Slurm's major releases, in order."""


def node_sets(slurm: SlurmSettings, site: SiteConf) -> Iterator[Finding]:
    """Node sets of the site that contain VMs or gate nodes by a feature: partitions of these sets would have them."""
    ours = {slurm.node_feature, slurm.gate_feature}
    for record in site.records("NodeSet"):
        features = {word.strip() for word in record.get("feature", "").split(",")}
        if features & ours and record["nodeset"] != gate.NODE_SET:
            yield _problem(
                f"NodeSet={record['nodeset']}",
                f"the node set has all nodes with the feature {', '.join(sorted(features & ours))}: VMs would be in it",
                "give the site's nodes another feature, or set slurm.node_feature and slurm.gate_feature differently",
            )


def reservations(slurm: SlurmSettings, shown: str) -> Iterator[Finding]:
    """Reservations of gate nodes or of our partition, in what `scontrol show reservation --oneliner` prints. A job at
    the gate would wait for their end, whatever is free."""
    gates = folded(iter([f"{gate.GATE_NODE}[1-{install.GATE_NODES}]"]))
    for line in shown.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        name = fields.get("ReservationName")
        if not name:
            continue
        try:
            nodes = NodeSet(fields.get("Nodes", "").replace("(null)", ""))
        except NodeSetException:
            continue
        of_ours = fields.get("PartitionName") == slurm.partition
        if nodes & gates or of_ours:
            what = f"the partition {fields['PartitionName']}" if of_ours else "nodes of the gate"
            until = f" from {fields.get('StartTime', '?')} to {fields.get('EndTime', '?')}"
            yield _problem(
                f"ReservationName={name}",
                f"the reservation holds {what}{until}, so jobs at the gate wait for its end",
                f"name the site's own nodes in it: scontrol update ReservationName={name} Nodes=…",
            )


def guests(release: Version, slurmds: Mapping[str, str | None]) -> Iterator[Finding]:
    """Whether slurmctld of a release accepts the slurmd of each image, given by its version. slurmctld must not be
    older. It accepts the two releases before its own, from 24.11 on three (Slurm's page on upgrades)."""
    for image, text in sorted(slurmds.items()):
        found = re.match(r"(?:\d+:)?(\d+)\.(\d+)", text or "")
        if found is None:
            yield _note(
                f"image {image}",
                "nobody can tell which release of slurmd is in the image: it has no package of that name",
                f"compare slurmd -V in a job with the site's Slurm {release}",
            )
            continue
        slurmd, own = (int(found[1]), int(found[2])), (release.year, release.month)
        name = f"{slurmd[0]}.{slurmd[1]:02d}"
        remedy = f"build the image with a slurmd of {release}: multiverse image build --name {image}"
        if slurmd > own:
            message = f"slurmd in the image is {name}, newer than slurmctld {release}, which refuses it"
            yield _problem(f"image {image}", message, remedy)
        elif own in RELEASES and slurmd in RELEASES:
            behind, most = RELEASES.index(own) - RELEASES.index(slurmd), 3 if own >= (24, 11) else 2
            if behind > most:
                message = (
                    f"slurmd in the image is {name}, {behind} releases behind slurmctld {release}, of {most} at most"
                )
                yield _problem(f"image {image}", message, remedy)
        elif slurmd not in RELEASES and slurmd != own:
            message = f"slurmd in the image is {name}, and slurmctld {release}: nobody has tried these together"
            yield _note(f"image {image}", message, remedy)
