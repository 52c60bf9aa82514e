"""Plugging CPUs and memory into a clone that is paused, up to the size of its job."""

from __future__ import annotations

from multiverse.core.errors import Exhausted
from multiverse.host.manifest import Manifest
from multiverse.host.qemu.machine import DIMMS
from multiverse.host.qemu.qmp import Command, Monitor, QmpError

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


def plug(monitor: Monitor, known: Manifest, cpus: int, plugged: int) -> None:
    """Plug the VM of that manifest up to `cpus` CPUs, and `plugged` MiB of memory.

    Devices are found by their ids, so what an earlier, interrupted call has plugged is left. Raises `Exhausted` if the
    machine has no room for as much.
    """
    present = {device["name"] for device in monitor.execute("qom-list", path="/machine/peripheral")}
    commands = _memory_commands(known, plugged, present)
    if cpus > known.cpus:
        commands += _cpu_commands(monitor, known, cpus, present)
    try:
        if commands:
            monitor.execute_all(commands)
    except QmpError as error:
        raise Exhausted(
            f"cannot plug VM {known.name} up to {cpus} CPUs and {plugged} MiB more: {error.message}",
            hint="does its template allow as much? see host.cores, host.memory",
        ) from error


def _memory_commands(known: Manifest, plugged: int, present: set[str]) -> list[Command]:
    commands: list[Command] = []
    for number, size in enumerate(dimm_sizes(known.memory, plugged)):
        if f"dimm{number}" in present:
            continue
        if number >= DIMMS:
            raise Exhausted(f"VM {known.name} has no memory slot left", hint="destroy it and create it again")
        backend = {"qom-type": "memory-backend-ram", "id": f"mem{number}", "size": size << 20}
        device = {"driver": "pc-dimm", "id": f"dimm{number}", "memdev": f"mem{number}"}
        commands += [("object-add", backend), ("device_add", device)]
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
