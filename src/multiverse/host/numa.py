"""The NUMA nodes of this machine, and the node of each VM, for its CPUs and for memory that is plugged. The memory of
its template stays where it is, because all clones share it.

A node is chosen when a VM gets its size, under the host's lock, and recorded in the VM's manifest before it has
effects. The node with the most free CPUs is taken, so that VMs share memory channels as late as possible. A VM that
fits on no node is kept on none, and nothing fails for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from multiverse.core.model.basics import Size
from multiverse.core.model.host import NumaNode
from multiverse.host import manifest

NODES = Path("/sys/devices/system/node")


class NumaNodes:
    """The nodes of a machine that have CPUs for VMs; none if the kernel describes none. `vms` is the directory of the
    VMs of this machine; each node may carry `cpu_overcommit` times its CPUs."""

    def __init__(self, vms: Path, cpu_overcommit: float = 1.0, root: Path = NODES) -> None:
        self._vms, self._overcommit, self._root = vms, cpu_overcommit, root
        self.nodes = read_nodes(root, os.sched_getaffinity(0))
        self.are_several = len(self.nodes) > 1

    def cpus_of(self, number: int) -> tuple[int, ...]:
        return next((node.cpus for node in self.nodes if node.number == number), ())

    def choose(self, name: str, size: Size) -> int | None:
        """The node for a VM of that size; None if it fits on none. The caller holds the host's lock."""
        taken = self._taken(but=name)
        left = {
            node.number: (int(len(node.cpus) * self._overcommit) - taken[node.number].cpus,
                          node.memory - taken[node.number].memory)
            for node in self.nodes
        }  # fmt: skip
        fitting = [number for number, (cpus, memory) in left.items() if size.cpus <= cpus and size.memory <= memory]
        return max(fitting, key=lambda number: (*left[number], -number), default=None)

    def view(self) -> tuple[NumaNode, ...]:
        """The nodes as operators see them, with the parts that VMs have."""
        taken = self._taken() if self.are_several else {}
        free = {node.number: _memory(self._root / f"node{node.number}", "MemFree") for node in self.nodes}
        return tuple(
            replace(each, free=free[each.number], taken=taken.get(each.number, Size(0, 0))) for each in self.nodes
        )

    def _taken(self, but: str = "") -> Mapping[int, Size]:
        """The part of each node that VMs have. A VM that is kept on no node has an equal part of each."""
        cpus = dict.fromkeys((node.number for node in self.nodes), 0)
        memory = dict(cpus)
        for path in self._vms.glob(f"*/{manifest.FILE}"):
            known = manifest.read(path.parent)
            if known is None or known.name == but or known.numa is None:
                continue  # a VM without a size yet is paused
            on = [known.numa] if known.numa in cpus else list(cpus)
            for number in on:
                cpus[number] += -(-known.total_cpus // len(on))
                memory[number] += known.total_memory // len(on)
        return {number: Size(cpus[number], memory[number]) for number in cpus}


def read_nodes(root: Path, allowed: AbstractSet[int]) -> tuple[NumaNode, ...]:
    """The nodes that the kernel describes below `root` (sysfs(5)) with some of the `allowed` CPUs, by number."""
    found = []
    for path in root.glob("node[0-9]*"):
        with suppress(OSError, ValueError):  # it went offline
            cpus = tuple(sorted(cpu_list((path / "cpulist").read_text()) & allowed))
            distances = tuple(int(word) for word in (path / "distance").read_text().split())
            if cpus:
                found.append(NumaNode(int(path.name[4:]), cpus, _memory(path, "MemTotal"), distances=distances))
    return tuple(sorted(found, key=lambda node: node.number))


def cpu_list(text: str) -> frozenset[int]:
    """The CPUs of `0-3,8`, as the kernel writes them (cpuset(7))."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _memory(node: Path, key: str) -> int:
    """A figure of the node's meminfo in MiB: lines such as `Node 0 MemTotal: 8039276 kB`."""
    with suppress(OSError, ValueError):
        for line in (node / "meminfo").read_text().splitlines():
            words = line.split()
            if len(words) >= 4 and words[2] == f"{key}:":
                return int(words[3]) >> 10
    return 0
