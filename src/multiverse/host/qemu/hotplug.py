"""Plugging CPUs and memory into a clone that is paused, up to the size of its job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import structlog

from multiverse.core.errors import Exhausted
from multiverse.host.manifest import Manifest
from multiverse.host.qemu.machine import DIMMS, HUGE_PAGE
from multiverse.host.qemu.qmp import Command, Monitor, QmpError

log = structlog.get_logger(__name__)

_BLOCK = 128  # MiB: x86 Linux accepts plugged memory in blocks of this size
_RATIO = 8  # see `dimm_sizes`


def memory_to_plug(booted: int, wanted: int) -> int:
    """MiB that have to be plugged into a guest with `booted` MiB to give it `wanted`, in whole blocks."""
    return max(0, -(-(wanted - booted) // _BLOCK) * _BLOCK)


def dimm_sizes(memory: int, plugged: int) -> list[int]:
    """Sizes in MiB of the DIMMs by which a guest of `memory` MiB gets `plugged` MiB more.

    Linux describes each page of 4 KiB in 64 bytes, for a whole DIMM before it can use any of it. So a DIMM is at most
    eight times what the guest had before; the descriptions then take an eighth of that.
    """
    sizes: list[int] = []
    while (left := plugged - sum(sizes)) > 0:
        sizes.append(min(left, _RATIO * (memory + sum(sizes)) // _BLOCK * _BLOCK or left))
    return sizes


def plug(monitor: Monitor, known: Manifest, cpus: int, plugged: int, *, huge: bool = False) -> int:
    """Plug the VM of that manifest up to `cpus` CPUs, and `plugged` MiB of memory. Returns how many MiB of the memory
    are in huge pages.

    With `huge` these are used as far as enough of them are free; the log says so if they are not. The memory is taken
    from the VM's NUMA node, if it has one, as long as there is some. Devices and objects are found by their ids, so
    what an earlier, interrupted call has plugged is left. Raises `Exhausted` if the machine has no room for as much.
    """
    listed: list[Command] = [("qom-list", {"path": path}) for path in ("/machine/peripheral", "/objects")]
    present, objects = ({one["name"] for one in found} for found in monitor.execute_all(listed))
    sizes = dict(enumerate(dimm_sizes(known.memory, plugged)))
    if huge:
        missing = {n: size for n, size in sizes.items() if not {f"mem{n}", f"huge{n}"} & objects}
        objects |= _allocate_huge(monitor, known, missing)
    commands = _memory_commands(known, sizes, present, objects)
    if cpus > known.cpus:
        commands += _cpu_commands(monitor, known, cpus, present)
    try:
        if commands:
            monitor.execute_all(commands)
    except QmpError as error:
        if known.numa not in (None, -1):
            # A QEMU without libnuma, or a node without memory.
            log.warning("memory plugged on any NUMA node", vm=known.name, reason=error.message)
            return plug(monitor, replace(known, numa=-1), cpus, plugged, huge=huge)
        raise Exhausted(
            f"cannot plug VM {known.name} up to {cpus} CPUs and {plugged} MiB more: {error.message}",
            hint="does its template allow as much? see host.cores, host.memory",
        ) from error
    return sum(size for number, size in sizes.items() if f"huge{number}" in objects)


def _near(known: Manifest) -> dict[str, object]:
    """The properties of a backend whose memory is taken from the VM's node, as long as there is some."""
    return {} if known.numa in (None, -1) else {"host-nodes": [known.numa], "policy": "preferred"}


def _allocate_huge(monitor: Monitor, known: Manifest, sizes: Mapping[int, int]) -> set[str]:
    """Make backends of huge pages, by the numbers of their DIMMs. Returns the names of those for which there are enough
    free pages: QEMU reserves a backend's pages when it makes it, so a guest never finds too few."""
    made: set[str] = set()
    for number, size in sizes.items():
        options = {"size": size << 20, "hugetlb": True, "hugetlbsize": HUGE_PAGE, **_near(known)}
        try:
            monitor.execute("object-add", **{"qom-type": "memory-backend-memfd", "id": f"huge{number}", **options})
        except QmpError as error:
            left = sum(size for other, size in sizes.items() if other >= number)
            log.warning("memory plugged without huge pages", vm=known.name, mib=left, reason=error.message)
            break
        made.add(f"huge{number}")
    return made


def _memory_commands(known: Manifest, sizes: Mapping[int, int], present: set[str], objects: set[str]) -> list[Command]:
    """The commands that plug what is not `present`, each DIMM on its backend of huge pages if it has one."""
    commands: list[Command] = []
    for number, size in sizes.items():
        if f"dimm{number}" in present:
            continue
        if number >= DIMMS:
            raise Exhausted(f"VM {known.name} has no memory slot left", hint="destroy it and create it again")
        backend = f"huge{number}" if f"huge{number}" in objects else f"mem{number}"
        if backend not in objects:
            ordinary = {"qom-type": "memory-backend-ram", "id": backend, "size": size << 20, **_near(known)}
            commands.append(("object-add", ordinary))
        commands.append(("device_add", {"driver": "pc-dimm", "id": f"dimm{number}", "memdev": backend}))
    return commands


def _cpu_commands(monitor: Monitor, known: Manifest, cpus: int, present: set[str]) -> list[Command]:
    free = [cpu for cpu in monitor.execute("query-hotpluggable-cpus") if "qom-path" not in cpu]
    free.sort(key=lambda cpu: tuple(sorted(cpu["props"].items())))
    missing = [f"cpu{number}" for number in range(known.cpus, cpus) if f"cpu{number}" not in present]
    if len(free) < len(missing):
        raise Exhausted(
            f"VM {known.name} cannot have {cpus} CPUs", hint="delete its template, which was built for fewer"
        )
    return [
        ("device_add", {"driver": cpu["type"], "id": name, **cpu["props"]})
        for name, cpu in zip(missing, free, strict=False)
    ]
