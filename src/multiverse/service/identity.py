"""Compares what running guests report about themselves: with each other, and with what they were told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from multiverse.api import IdentityAudit, VmIdentity

Facts = Mapping[str, str | int]
"""What a guest reports, by property; `skew` is its clock minus the host's in milliseconds. A guest that did not answer
has only `error`."""

UNIQUE = {
    "hostname": "host name",
    "machine_id": "machine-id",
    "boot_id": "boot id",
    "mac": "MAC",
    "address": "address",
    "host_keys": "host keys",
    "random": "random bytes drawn first",
    "fresh": "random bytes drawn now",
}
"""What no two VMs may have in common, with its name in messages."""

OPTIONAL = "host_keys"
"""The property that a guest may lack: an image without host keys has none to share."""

MAX_SKEW = 1000
"""Milliseconds that a guest's clock may be off."""


@dataclass(frozen=True, slots=True)
class KnownVm:
    """What the controller told a VM: its MAC and address (without prefix length). `job_id` is empty for a spare."""

    job_id: str
    mac: str
    address: str


def audit(known: Mapping[str, KnownVm], reported: Mapping[str, Facts]) -> IdentityAudit:
    """Compare the reports, both by the VM's name. A guest that reported nothing, or not everything, is a problem."""
    holders: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, facts in reported.items():
        for key in UNIQUE:
            if facts.get(key):
                holders[key, str(facts[key])].append(name)
    found = []
    for name, facts in sorted(reported.items()):
        vm = known.get(name)
        skew = facts.get("skew", 0)
        found.append(
            VmIdentity(
                name,
                vm.job_id if vm is not None else "",
                skew if isinstance(skew, int) else 0,
                {key: str(facts.get(key, "")) for key in UNIQUE},
                (*_problems(name, vm, facts), *_shared(name, holders)),
            )
        )
    return IdentityAudit(tuple(found), len(found) > 1 and not any(vm.problems for vm in found))


def _problems(name: str, vm: KnownVm | None, facts: Facts) -> Iterator[str]:
    """What is wrong with one guest's report, apart from all others."""
    if "error" in facts:
        yield f"it did not answer: {facts['error']}"
        return
    for key in UNIQUE:
        if not facts.get(key) and key != OPTIONAL:
            yield f"it did not report its {UNIQUE[key]}"
    expected = {"hostname": name} | ({"mac": vm.mac, "address": vm.address} if vm is not None else {})
    for key, value in expected.items():
        if facts.get(key) and facts[key] != value:
            yield f"its {UNIQUE[key]} is {facts[key]} instead of {value}"
    skew = facts.get("skew", 0)
    if not isinstance(skew, int) or abs(skew) >= MAX_SKEW:
        yield f"its clock is {skew} ms off"


def _shared(name: str, holders: Mapping[tuple[str, str], list[str]]) -> Iterator[str]:
    """What the VM has in common with others."""
    for (key, value), names in holders.items():
        others = ", ".join(other for other in names if other != name)
        if name in names and others:
            yield f"the same {UNIQUE[key]} as {others}: {value}"
