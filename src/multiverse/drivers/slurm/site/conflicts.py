"""What of a site's own would catch VMs or jobs at the gate: node sets and reservations. And which releases of Slurm go
together. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ClusterShell.NodeSet import NodeSet, NodeSetException

from multiverse.config import SlurmSettings
from multiverse.drivers.slurm.site import gate, install
from multiverse.drivers.slurm.site.requirements import Version
from multiverse.drivers.slurm.site.site_conf import SiteConf, folded
from multiverse.ports.site import Finding, Level

RELEASES = ((20, 2), (20, 11), (21, 8), (22, 5), (23, 2), (23, 11), (24, 5), (24, 11), (25, 5), (25, 11))
"""Slurm's major releases, in order."""


def node_sets(slurm: SlurmSettings, site: SiteConf) -> Iterator[Finding]:
    """Node sets of the site that take in VMs or gate nodes by a feature: partitions that list them would have these."""
    ours = {slurm.node_feature, slurm.gate_feature}
    for record in site.records("NodeSet"):
        features = {word.strip() for word in record.get("feature", "").split(",")}
        if features & ours and record["nodeset"] != gate.NODE_SET:
            yield Finding(
                Level.PROBLEM,
                f"NodeSet={record['nodeset']}",
                f"the node set has all nodes with the feature {', '.join(sorted(features & ours))}: VMs would be in it",
                "give the site's nodes another feature, or set slurm.node_feature and slurm.gate_feature differently",
            )


def reservations(slurm: SlurmSettings, shown: str) -> Iterator[Finding]:
    """Reservations that hold gate nodes or our partitions, by `scontrol show reservation --oneliner`. A job at the gate
    would wait for such a reservation, whatever is free."""
    gates = folded(iter([f"{gate.GATE_NODE}[1-{install.GATE_NODES}]"]))
    partitions = {slurm.partition}
    for line in shown.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        name = fields.get("ReservationName")
        if not name:
            continue
        try:
            nodes = NodeSet(fields.get("Nodes", "").replace("(null)", ""))
        except NodeSetException:
            continue
        of_ours = fields.get("PartitionName", "") in partitions
        if nodes & gates or of_ours:
            what = f"the partition {fields['PartitionName']}" if of_ours else "nodes of the gate"
            until = f" from {fields.get('StartTime', '?')} to {fields.get('EndTime', '?')}"
            yield Finding(
                Level.PROBLEM,
                f"ReservationName={name}",
                f"the reservation holds {what}{until}, so jobs at the gate wait for its end",
                f"name the site's own nodes in it: scontrol update ReservationName={name} Nodes=…",
            )


def guests(release: Version, slurmds: Mapping[str, str | None]) -> Iterator[Finding]:
    """Whether slurmctld of a release accepts the slurmd of each image, given by its version. slurmctld must not be
    older, and accepts the two releases before its own, from 24.11 on three (Slurm's page on upgrades)."""
    for image, text in sorted(slurmds.items()):
        found = re.match(r"(?:\d+:)?(\d+)\.(\d+)", text or "")
        if found is None:
            yield Finding(
                Level.NOTE,
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
            yield Finding(Level.PROBLEM, f"image {image}", message, remedy)
        elif own in RELEASES and slurmd in RELEASES:
            behind, most = RELEASES.index(own) - RELEASES.index(slurmd), 3 if own >= (24, 11) else 2
            if behind > most:
                message = (
                    f"slurmd in the image is {name}, {behind} releases behind slurmctld {release}, of {most} at most"
                )
                yield Finding(Level.PROBLEM, f"image {image}", message, remedy)
        elif slurmd not in RELEASES and slurmd != own:
            message = f"slurmd in the image is {name}, and slurmctld {release}: nobody has tried these together"
            yield Finding(Level.NOTE, f"image {image}", message, remedy)
