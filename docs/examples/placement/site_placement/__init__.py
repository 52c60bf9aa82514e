"""A placement policy of a site: the VMs of a job in as few racks as possible.

The name of a host says in which rack it is: `r2n14` is host 14 of rack 2. Among racks that hold as many of the job's
VMs, `seed` decides, so that jobs are spread over them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256

from multiverse.core.capacity.placement_policies import CandidateHost, PlacementRequest


def same_rack(request: PlacementRequest, hosts: Sequence[CandidateHost], seed: str) -> list[str]:
    """Take whole racks, the one that holds the most VMs first."""
    racks: defaultdict[str, list[CandidateHost]] = defaultdict(list)
    for host in hosts:
        racks[host.name.partition("n")[0]].append(host)

    def order(rack: str) -> tuple[int, bytes]:
        holds = min(request.vms, sum(host.holds for host in racks[rack]))
        return -holds, sha256(f"{seed}/{rack}".encode()).digest()

    places = [host.name for rack in sorted(racks, key=order) for host in racks[rack] for _ in range(host.holds)]
    return places[: request.vms]
