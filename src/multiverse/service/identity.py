"""Are clones strangers? What guests say of themselves, compared with each other and with what they were told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from multiverse.core.state import Rows

Facts = Mapping[str, str | int]

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
"""What no two VMs may have in common. An image without host keys has none to share."""
CLOCK = 1000
"""Milliseconds that a guest's clock may be off."""


@dataclass(frozen=True, slots=True)
class VmIdentity:
    """What a VM is, by its own word; its clock's distance from ours in milliseconds."""

    name: str
    job_id: str
    skew: int
    facts: Mapping[str, str]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IdentityAudit:
    """Each VM that runs. `strangers` if there are two at least, all have answered, and nothing is wrong with any."""

    vms: tuple[VmIdentity, ...]
    strangers: bool


def audit(rows: Rows, said: Mapping[str, Facts]) -> IdentityAudit:
    """Compare what the guests said. One that said nothing, or not everything, is wrong as well."""
    vms = {vm.name: vm for vm in rows.vms.values()}
    holders: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, facts in said.items():
        for key in UNIQUE:
            if facts.get(key):
                holders[key, str(facts[key])].append(name)
    found = []
    for name, facts in sorted(said.items()):
        row = vms.get(name)
        told = {"hostname": name}
        if row is not None:
            told |= {"mac": row.mac, "address": row.address.partition("/")[0]}
        problems = [f"it did not answer: {facts['error']}"] if "error" in facts else list(_problems(facts, told))
        for (key, value), names in holders.items():
            others = ", ".join(other for other in names if other != name)
            if name in names and others:
                problems.append(f"the same {UNIQUE[key]} as {others}: {value}")
        attempt = rows.attempt_of(row) if row is not None else None
        skew = facts.get("skew", 0)
        found.append(
            VmIdentity(
                name,
                attempt.job.job_id if attempt is not None else "",
                skew if isinstance(skew, int) else 0,
                {key: str(facts.get(key, "")) for key in UNIQUE},
                tuple(problems),
            )
        )
    return IdentityAudit(tuple(found), len(found) > 1 and not any(vm.problems for vm in found))


def _problems(facts: Facts, told: Facts) -> list[str]:
    found = [f"it says nothing of its {UNIQUE[key]}" for key in UNIQUE if not facts.get(key) and key != "host_keys"]
    for key, value in told.items():
        if facts.get(key) and facts[key] != value:
            found.append(f"its {UNIQUE[key]} is {facts[key]}, and it was told {value}")
    skew = facts.get("skew", 0)
    if not isinstance(skew, int) or abs(skew) >= CLOCK:
        found.append(f"its clock is {skew} ms off")
    return found
