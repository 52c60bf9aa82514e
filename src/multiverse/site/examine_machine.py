"""From the facts of a machine to findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from multiverse.config import Settings
from multiverse.host.qemu.probe import is_since
from multiverse.ports.site import Finding, Level
from multiverse.site.machine_facts import MachineFacts, in_memory

OLDEST_QEMU = (7, 2)
"""The oldest that Multiverse is tried with (Debian 12)."""

STATE_ROOM = 256
"""MiB that the database and its reserve need at least."""


def _problem(name: str, message: str, remedy: str) -> Finding:
    return Finding(Level.PROBLEM, name, message, remedy)


def _note(name: str, message: str, remedy: str) -> Finding:
    return Finding(Level.NOTE, name, message, remedy)


def rights(facts: MachineFacts) -> Iterator[Finding]:
    """Whether the agent may do what it has to, and nobody else may change what it uses."""
    if not facts.root:
        yield _problem("root", "this is not root, so some checks see less than the daemon does", "run it as root")
    for message, hint in facts.unsafe:
        yield _problem("directories", message, hint)


def qemu(settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    """Whether guests can run, and how."""
    if facts.qemu_error:
        yield _problem(
            settings.qemu.binary, facts.qemu_error, "install qemu-system-x86, or set qemu.binary in the settings"
        )
    elif not is_since(facts.qemu, *OLDEST_QEMU):
        yield _problem(
            settings.qemu.binary,
            f"{facts.qemu} is older than 7.2, the oldest that Multiverse is tried with",
            "install QEMU 7.2 or later, and name it in qemu.binary",
        )
    elif not is_since(facts.qemu, 8, 2):
        yield _note(
            settings.qemu.binary,
            f"{facts.qemu} holds the memory of each template twice",
            "no action is needed; from QEMU 8.2 on it is held once",
        )
    for program in facts.programs:
        package = "munge" if "munge" in program else "qemu-utils"
        yield _problem(program, f"there is no program {program}", f"install it: apt install {package}")


def kvm(settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    """Whether KVM truly runs guests: small ones were run."""
    if not facts.kvm:
        return
    if settings.qemu.accel == "kvm":
        yield _problem("KVM", f"KVM does not run guests: {facts.kvm}", 'make KVM work, or set accel = "auto" in [qemu]')
    else:
        yield _note(
            "KVM",
            f"KVM does not run guests, so they are emulated, several times slower: {facts.kvm}",
            "enable virtualisation in the firmware, load kvm_intel or kvm_amd, and check the rights of /dev/kvm",
        )


def kernel(facts: MachineFacts) -> Iterator[Finding]:
    """What VMs need of the kernel."""
    if facts.tun:
        yield _problem("/dev/net/tun", f"/dev/net/tun cannot be opened: {facts.tun}", "run modprobe tun, as root")
    if facts.net_namespaces < 1:
        yield _problem(
            "user.max_net_namespaces",
            "the kernel allows no network namespaces, of which each VM needs one",
            "set it to 100000 or more: sysctl user.max_net_namespaces=100000, and the same in /etc/sysctl.d",
        )
    if not facts.cgroups:
        yield _note(
            "cgroups",
            "there is no control group in which the memory and the threads of QEMU could be limited",
            "mount cgroup2 at /sys/fs/cgroup with the controllers memory and pids",
        )
    for library in facts.libraries:
        yield _problem(
            library,
            f"{library} is missing, so the addresses of VMs are not checked",
            "install it: apt install libnftables1",
        )


def memory(settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    """Whether the machine has the memory that it declares."""
    host = settings.host
    if host.memory > facts.memory:
        yield _problem(
            "host.memory",
            f"{host.memory} MiB are declared for VMs, but the machine has {facts.memory} MiB",
            f"set memory = {max(0, facts.memory - host.floor)} or less in [host], or in this host's class",
        )
    elif host.memory > facts.memory_available and not host.overcommit > 1:
        yield _note(
            "host.memory",
            f"{host.memory} MiB are declared for VMs, and {facts.memory_available} MiB are available now",
            "no action is needed if VMs have the rest; or else declare less in [host]",
        )


def cpus(settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    """Whether the machine has the CPUs that it declares."""
    if settings.host.cores > facts.cpus:
        yield _note(
            "host.cores",
            f"{settings.host.cores} CPUs are declared for VMs, but the machine has {facts.cpus}: jobs will share them",
            f"set cores = {facts.cpus} in [host], or in this host's class, unless that is meant",
        )


def disk(settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    """Whether there is room for what is written."""
    host = settings.host
    if (vms := facts.vms) is not None:
        if vms.available < host.disk_floor:
            yield _problem(
                str(vms.path),
                f"{vms.available} MiB of disk are available, and no VM is added with less than {host.disk_floor} MiB",
                "make room there, or put qemu.vms on another file system",
            )
        if host.disk > vms.total:
            yield _problem(
                "host.disk",
                f"{host.disk} MiB of disk are declared for VMs, but the file system of {vms.path} has {vms.total} MiB",
                f"set disk = {max(0, vms.total - host.disk_floor)} or less in [host], or in this host's class",
            )
    if (state := facts.state) is not None and state.available < STATE_ROOM:
        yield _problem(
            str(state.path),
            f"{state.available} MiB of disk are available for the database, which needs {STATE_ROOM} MiB",
            "make room there: with a full disk no job is admitted",
        )
    yield from _templates(settings, facts)


def _templates(settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    if (found := facts.templates) is None:
        return
    need = settings.qemu.base_memory
    if not in_memory(found):
        yield _problem(
            str(found.path),
            f"templates are to be on a file system in memory, and this is {found.kind or 'unknown'}",
            "set templates in [qemu] to a directory below /dev/shm",
        )
    elif found.available < need:
        yield _problem(
            str(found.path),
            f"{found.available} MiB are available, and a template takes {need} MiB",
            "make room there, or mount it with a larger size=",
        )


def clock(facts: MachineFacts) -> Iterator[Finding]:
    """Whether the clock is kept right: munge refuses credentials of machines whose clocks differ by minutes."""
    if facts.clock is False:
        yield _note(
            "clock",
            "the kernel says that nothing keeps the clock right; guests get their time from it",
            "run chrony, ntpd or systemd-timesyncd here",
        )


def functions(settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    """Whether VMs inside jobs can have the virtual functions that the settings offer."""
    offered = ", ".join(settings.job_vms.sriov)
    if not offered:
        return
    if not facts.iommu:
        yield _problem(
            "IOMMU",
            "the kernel uses no IOMMU, so no VM can have a virtual function: it could write to all memory",
            "turn VT-d or AMD-Vi on in the firmware, and boot with intel_iommu=on or amd_iommu=on",
        )
    if not facts.functions:
        yield _problem(
            "job_vms.sriov",
            f"there is no virtual function of {offered}",
            "create them at each boot: echo N > /sys/bus/pci/devices/ADDRESS/sriov_numvfs",
        )
    elif facts.iommu:
        for one in facts.functions:
            if one.problem:
                yield _note(
                    "job_vms.sriov", f"no VM can have {one.address} now: {one.problem}", "leave it, or mend that"
                )


def examine(settings: Settings, facts: MachineFacts) -> Iterator[tuple[str, list[Finding]]]:
    """All examinations of a machine as a host, by name."""
    yield "rights and directories", list(rights(facts))
    yield "QEMU and programs", list(qemu(settings, facts))
    yield "KVM runs guests", list(kvm(settings, facts))
    yield "kernel", list(kernel(facts))
    yield "CPUs", list(cpus(settings, facts))
    yield "memory", list(memory(settings, facts))
    yield "disk", list(disk(settings, facts))
    yield "clock", list(clock(facts))
    if settings.job_vms.sriov:
        yield "virtual functions", list(functions(settings, facts))
