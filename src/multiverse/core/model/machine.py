"""The machines that VMs see on hosts: between which of them a VM can move while it runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

HOST_CPU = "host"
"""The CPU model of guests that have all that the CPU of their host has."""


@dataclass(frozen=True, slots=True)
class MachineKind:
    """The machine that VMs see on a host. A VM that runs can go on only on a machine that has all that its own has."""

    accelerator: str
    cpu: str  # QEMU's CPU model
    features: frozenset[str]  # of the host's CPU, as a guest with all of them sees it; empty: guests are emulated
    release: str  # of QEMU, with the distribution's revision
    board: str  # QEMU's versioned machine type, such as pc-q35-7.2
    page_size: int = 4096  # bytes
    tsc_khz: int = 0  # of the time stamp counter, where guests see the host's own; 0: QEMU scales it
    vendor: str = ""  # of the host's CPU: guests see it with any model
    processor: str = ""  # the host's CPU by its name and numbers
    models: tuple[str, ...] = ()  # that the host's CPU runs, the newest first
    wanted: str = ""  # the model of the settings, if the host's CPU does not run it
    lacking: tuple[str, ...] = ()  # features of that model that the CPU lacks; empty: QEMU does not know the model


TSC_TOLERANCE = 500e-6
"""Of the frequency that hosts measure and show in whole MHz: NTP corrects clocks that are so far off (RFC 5905)."""


def why_other_machine(needed: MachineKind, made: MachineKind) -> str:
    """What a VM of a machine would miss on another one; empty if it can go on there."""
    pairs = (
        ("runs guests by", needed.accelerator, made.accelerator),
        ("has QEMU", needed.release, made.release),
        ("makes machines of type", needed.board, made.board),
        ("has pages of", needed.page_size, made.page_size),
        ("has a CPU by", needed.vendor, made.vendor),
    )
    told = next((f"it {what} {has}, not {asked}" for what, asked, has in pairs if asked != has), "")
    told = told or (_why_other_host_cpu if needed.cpu == HOST_CPU else _why_other_model)(needed, made)
    if not told and abs(needed.tsc_khz - made.tsc_khz) > needed.tsc_khz * TSC_TOLERANCE:
        return f"its time stamp counter runs at {made.tsc_khz} kHz, not {needed.tsc_khz}"
    return told


def _why_other_host_cpu(needed: MachineKind, made: MachineKind) -> str:
    """Guests that have all of their host's CPU go on with an equal one alone: they would notice a larger one, too."""
    if missing := needed.features - made.features:
        return f"its CPU lacks {_some(missing)}"
    if more := made.features - needed.features:
        return f"its CPU also has {_some(more)}, and a VM with its host's CPU needs an equal one"
    return f"its CPU is {made.processor}, not {needed.processor}" if made.processor != needed.processor else ""


def _why_other_model(needed: MachineKind, made: MachineKind) -> str:
    if needed.cpu in (made.cpu, *made.models):
        return ""
    if needed.cpu == made.wanted and made.lacking:
        return f"its CPU lacks {_some(made.lacking)} of model {needed.cpu}"
    return f"it does not run guests with CPU model {needed.cpu}"


def _some(features: Collection[str]) -> str:
    return ", ".join(sorted(features)[:3]) + (" and more" if len(features) > 3 else "")


def common_model(machines: Collection[MachineKind]) -> str:
    """The newest CPU model with which VMs move between all of these hosts. Empty if there is none, and if they move
    between them all as it is."""
    first, *others = machines
    if not any(why_other_machine(first, one) or why_other_machine(one, first) for one in others):
        return ""

    model = next((model for model in first.models if all(model in one.models for one in others)), "")
    needed = replace(first, cpu=model)
    return "" if any(why_other_machine(needed, one) for one in others) else model
