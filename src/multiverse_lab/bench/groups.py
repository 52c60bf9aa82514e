"""What it takes that all VMs of one user reach each other (docs/decisions/network.md#d0091).

    python -m multiverse_lab.bench.groups [--vms 125 250 500] [--hosts 10]

For each number of VMs it prints how many elements the rules have, and how long it takes to let the VMs in one after the
other, to let in the last one, to make the whole table again, and to take all out: by groups, and beside that by pairs,
as VMs of one job had it before. Then what a host holds of as many VMs on other hosts, with a VXLAN; what a guest
has of their names; and what the controller tells all hosts while they come and go. Root, `unshare`, `nft`, `ip` and
`bridge` are needed. Rules and links are made in a network namespace that ends with this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from multiverse.controller.publication import GroupBook
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.identity import Member, Reach, mac_of
from multiverse.core.model.job import Attempt, JobRef, Request
from multiverse.core.model.vm import Place, Vm, VmState
from multiverse.core.transition import Change, Event, Move
from multiverse.guest.protocol import names_message
from multiverse.host import manifest
from multiverse.host.firewall import Firewall
from multiverse.host.manifest import Manifest, VmPhase
from multiverse.host.vxlan import Vxlan, VxlanConfig

_INSIDE = "MULTIVERSE_BENCH_NAMESPACE"
_USER, _SITE = 1000, "bench"
_GUESTS = ("10.9.1.0", "10.9.255.254")


def run(command: str) -> str:
    """The output of a command."""
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


def timed(work: Callable[[], object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def name(n: int) -> str:
    """The name of a VM."""
    return f"mv{_SITE}-{n}"


def address(n: int) -> str:
    """The address of a VM."""
    return str(IPv4Address(_GUESTS[0]) + n)


def member(n: int, host: str, machine: str = "") -> Member:
    """A VM of the user."""
    return Member(name(n), address(n), mac_of(_SITE, n), host, _USER, machine)


# --- rules ------------------------------------------------------------------------------------------


def rules(count: int, *, pairs: bool) -> dict[str, object]:
    """What the rules of one host with so many VMs of one user are and cost."""
    everybody = [(name(n), address(n)) for n in range(count)]
    with tempfile.TemporaryDirectory() as directory:
        vms = Path(directory)
        firewall = Firewall(f"mv{_SITE}-", vms, _GUESTS, "h1")
        known = [_manifest(n, everybody if pairs else ()) for n in range(count)]
        for one in known:  # before any rule, as the first `allow` makes the table
            (vms / one.name).mkdir()
        each = []
        for one in known:
            manifest.write(vms / one.name, one)
            each.append(timed(lambda one=one: firewall.allow(one)))  # type: ignore[misc]
        found: dict[str, object] = {
            "VMs": count,
            "by": "pairs" if pairs else "groups",
            "elements": _elements(),
            "all in, ms": round(sum(each)),
            "the last, ms": round(sorted(each[-20:])[10], 2),
            "table anew, ms": round(timed(lambda: Firewall(f"mv{_SITE}-", vms, _GUESTS, "h1"))),
        }

        def revoke_all() -> None:
            for one in known:
                firewall.revoke(one)

        return found | {"all out, ms": round(timed(revoke_all))}


def _manifest(n: int, others: Sequence[tuple[str, str]]) -> Manifest:
    peers = [one for one in others if one[0] != name(n)]
    return Manifest(
        name(n),
        CloneKind.INSTANT,
        VmPhase.STARTED,
        mac_of(_SITE, n),
        1,
        256,
        address=address(n),
        peers=tuple(one for one, _ in peers),
        peer_addresses=tuple(where for _, where in peers),
        group=0 if others else _USER,
    )


def _elements() -> int:
    """How many elements the sets and maps of the table have together."""
    listed = json.loads(run(f"nft -j list table bridge mv{_SITE}"))["nftables"]
    return sum(len(one.get("elem", ())) for each in listed for one in (each.get("set"), each.get("map")) if one)


# --- VMs on other hosts -----------------------------------------------------------------------------


def elsewhere(count: int, hosts: int) -> dict[str, object]:
    """What a host with one VM of the user holds of so many of them on other hosts."""
    others = [member(n, f"h{2 + n % hosts}", f"10.8.0.{2 + n % hosts}") for n in range(1, count + 1)]
    with tempfile.TemporaryDirectory() as directory:
        vms, records = Path(directory, "vms"), Path(directory, "records")
        (vms / name(0)).mkdir(parents=True)
        manifest.write(vms / name(0), _manifest(0, ()))
        firewall = Firewall(f"mv{_SITE}-", vms, _GUESTS, "h1")
        vxlan = Vxlan(VxlanConfig(_SITE, 77, 14999, lambda: "10.8.0.1", 1400, "bridge0", records))
        vxlan.restore()

        def tell(members: Sequence[Member], *, whole: bool) -> None:
            firewall.learn(members, (), whole=whole)
            vxlan.replace_members("h1", firewall.members.values())

        *most, last = others
        whole = timed(lambda: tell([member(0, "h1"), *most], whole=True))
        one = timed(lambda: tell([last], whole=False))
        entries = run(f"bridge fdb show dev vx{_SITE}").count(" dst ")
        found: dict[str, object] = {
            "VMs elsewhere": count,
            "elements": _elements(),
            "VXLAN entries": entries,
            "neighbours": run(f"ip neigh show dev vx{_SITE} nud permanent").count("lladdr"),
            "all told, ms": round(whole),
            "one more, ms": round(one, 1),
            "record, KB": round(sum(file.stat().st_size for file in vms.glob(".mv*members")) / 1000),
        }
        vxlan.remove()
        firewall.revoke(_manifest(0, ()))
        return found


def names(count: int) -> dict[str, object]:
    """What a guest has of the names of so many VMs."""
    pairs = [(name(n), address(n)) for n in range(count)]
    return {
        "names": count,
        "lines in the guest": count,
        "file, KB": round(sum(len(f"{where} {one}\n") for one, where in pairs) / 1000, 1),
        "all at the start, KB": round(len(names_message(pairs, (), whole=True)) / 1000, 1),
        "one more, bytes": len(names_message(pairs[-1:], (), whole=False)),
    }


# --- the controller ---------------------------------------------------------------------------------


class _Hosts:
    """`ports.Groups` that counts."""

    def __init__(self, hosts: int) -> None:
        self.listening: Mapping[str, str] = {f"h{n}": "run" for n in range(hosts)}
        self.calls = self.members = self.gone = 0

    async def tell(self, host: str, members: Sequence[Member], gone: Sequence[str], *, whole: bool) -> None:
        self.calls += 1
        self.members += len(members)
        self.gone += len(gone)


class _Clock:
    def now(self) -> float:
        return time.monotonic()

    wall = now

    def boot_id(self) -> str:
        return ""


async def told(count: int, hosts: int) -> dict[str, object]:
    """What the controller tells while so many VMs of one user come, one after the other, and go."""
    attempt = Attempt(1, 0.0, JobRef("1", 0), "", _USER, Request(1, Size(1, 256)))
    state: Any = SimpleNamespace(vms={}, attempt_of=lambda vm: attempt)
    book, groups = GroupBook(state, Reach.USER, _Clock(), Random(1)), _Hosts(hosts)
    began = time.process_time()
    for there in (True, False):
        for n in range(count):
            book.note([Move((Change(_row(n, hosts, there=there), Event.RELEASED),))])
            book.ensure(groups)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    spent = time.process_time() - began
    await book.close()
    return {
        "VMs": count,
        "hosts": hosts,
        "calls": groups.calls,
        "members told": groups.members,
        "told as gone": groups.gone,
        "ms of CPU for each VM": round(spent * 1000 / count, 2),
    }


def _row(n: int, hosts: int, *, there: bool) -> Vm:
    size = Size(1, 256)
    return Vm(
        n,
        0.0,
        name(n),
        (Place(f"h{n % hosts}"),),
        "slim",
        CloneKind.INSTANT,
        size,
        size,
        mac_of(_SITE, n),
        f"{address(n)}/16",
        attempt=1,
        state=VmState.SERVING if there else VmState.RELEASING,
    )


def _table(rows: Sequence[Mapping[str, object]]) -> str:
    heads = list(rows[0])
    lines = [heads, *([str(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m multiverse_lab.bench.groups")
    parser.add_argument("--vms", type=int, nargs="+", default=[125, 250, 500])
    parser.add_argument("--hosts", type=int, default=10)
    options = parser.parse_args()
    if _INSIDE not in os.environ:
        again = [sys.executable, "-m", "multiverse_lab.bench.groups", *sys.argv[1:]]
        os.execvpe("unshare", ["unshare", "--net", "--mount", *again], os.environ | {_INSIDE: "1"})
    for command in (
        "mount -t sysfs sysfs /sys",
        "ip link set lo up",
        "ip link add under type bridge",
        "ip addr add 10.8.0.1/24 dev under",
        "ip link set under up",
        "ip link add bridge0 type bridge",
        "ip link set bridge0 up",
    ):
        run(command)
    print(_table([rules(count, pairs=pairs) for pairs in (False, True) for count in options.vms]), flush=True)
    print("\n" + _table([elsewhere(count, options.hosts) for count in options.vms]), flush=True)
    print("\n" + _table([names(count) for count in options.vms]), flush=True)
    print("\n" + _table([asyncio.run(told(count, options.hosts)) for count in options.vms]), flush=True)


if __name__ == "__main__":
    main()
