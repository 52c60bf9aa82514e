"""Examines this machine as a host: measures what VMs need, and says what is missing."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from multiverse.config import Settings
from multiverse.core.errors import Broken, MultiverseError, Refused
from multiverse.core.model.basics import number_of
from multiverse.core.model.machine import HOST_CPU
from multiverse.host import cgroups, path_security
from multiverse.host.qemu import abilities, cpus
from multiverse.host.qemu.abilities import is_since
from multiverse.host.virtual_functions import RECORDS, VirtualFunction, VirtualFunctions
from multiverse.ports.site import Finding, Level
from multiverse.system.kernel import is_synchronised

_MIB = 1 << 20
_TUN = Path("/dev/net/tun")
_NAMESPACES = Path("/proc/sys/user/max_net_namespaces")
_MEMINFO = Path("/proc/meminfo")
_MOUNTS = Path("/proc/mounts")
_STAND_IN = ("slurmd", "munged", "/usr/bin/python3")
_IOMMU_GROUPS = Path("/sys/kernel/iommu_groups")


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What holds a path."""

    path: Path
    kind: str
    total: int  # MiB
    available: int  # MiB

    @property
    def in_memory(self) -> bool:
        return self.kind in ("tmpfs", "ramfs", "hugetlbfs")


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts of this machine as a host. Memory and disk in MiB."""

    root: bool = True
    qemu: str = ""  # its version
    qemu_error: str = ""
    kvm: str | None = None  # why KVM runs no guests; empty: it does; None: not tried
    model: str = ""  # why guests do not have the CPU model of the settings
    memory: int = 0
    memory_available: int = 0
    cpus: int = 0
    state: FileSystem | None = None
    vms: FileSystem | None = None
    templates: FileSystem | None = None
    unsafe: tuple[tuple[str, str], ...] = ()  # why directories may not be used, each with what to do
    clock: bool | None = None  # whether the kernel's clock is synchronised; None: it does not say
    tun: str = ""  # why no tap can be made
    net_namespaces: int = 1
    cgroups: bool = True
    libraries: tuple[str, ...] = ()  # that are missing
    programs: tuple[str, ...] = ()  # that are missing
    stand_in: tuple[str, ...] = ()  # programs that are missing of what stands in for a VM that sleeps
    functions: tuple[VirtualFunction, ...] = ()  # the virtual functions that the settings offer
    iommu: bool = True  # the kernel uses one


def of_machine(settings: Settings, *, kvm: bool = True) -> MachineFacts:
    """The facts. With `kvm` small guests are run, which takes seconds."""
    qemu, error = "", ""
    try:
        qemu = abilities.qemu_version(settings.qemu.binary)
    except Refused as refused:
        error = refused.message
    lines = (line.partition(":") for line in _MEMINFO.read_text().splitlines())
    memory = {key: int(value.split()[0]) // 1024 for key, _, value in lines if value.split()}
    namespaces = 0
    with suppress(OSError, ValueError):
        namespaces = int(_NAMESPACES.read_text())
    no_kvm = abilities.why_no_kvm(settings.qemu.binary) if kvm and qemu and settings.qemu.accel != "tcg" else None
    return MachineFacts(
        root=os.geteuid() == 0,
        qemu=qemu,
        qemu_error=error,
        kvm=no_kvm,
        model=_why_not_model(settings) if no_kvm == "" else "",
        memory=memory.get("MemTotal", 0),
        memory_available=memory.get("MemAvailable", 0),
        cpus=len(os.sched_getaffinity(0)),
        state=file_system(settings.state_dir),
        vms=file_system(settings.qemu.vms),
        templates=file_system(settings.qemu.templates),
        unsafe=tuple(_unsafe(settings)),
        clock=is_synchronised(),
        tun=_tun(),
        net_namespaces=namespaces,
        cgroups=bool(cgroups.hierarchies()),
        libraries=tuple(_missing("libnftables.so.1")),
        programs=tuple(name for name in ("qemu-img", "munge", "unmunge") if shutil.which(name) is None),
        stand_in=tuple(name for name in _STAND_IN if shutil.which(name, path=f"/usr/sbin:{os.defpath}") is None),
        functions=tuple(VirtualFunctions(settings.job_vms.sriov, settings.qemu.vms / RECORDS).listed()),
        iommu=any(_IOMMU_GROUPS.glob("*")),
    )


def _why_not_model(settings: Settings) -> str:
    """Why guests do not have the CPU model of the settings; empty if they have."""
    if settings.qemu.cpu == HOST_CPU:
        return ""
    try:
        return cpus.examine(settings.qemu.binary).why_not(settings.qemu.cpu)
    except Broken as error:
        return error.message


def file_system(path: Path) -> FileSystem | None:
    """The file system of a path, or of the nearest directory above it that exists. None if it cannot be examined."""
    there = next(one for one in (path, *path.parents) if one.exists())
    try:
        found = os.statvfs(there)
    except OSError:
        return None
    total, free = found.f_blocks * found.f_frsize // _MIB, found.f_bavail * found.f_frsize // _MIB
    return FileSystem(path, _kind(there), total, free)


def _kind(path: Path) -> str:
    """The type of the file system, by the longest mount point above the path."""
    real, best, kind = path.resolve(), Path("/"), ""
    for line in _MOUNTS.read_text().splitlines():
        _source, point, found, *_ = line.split()
        where = Path(point.encode().decode("unicode_escape"))
        if real.is_relative_to(where) and len(where.parts) >= len(best.parts):
            best, kind = where, found
    return kind


def _unsafe(settings: Settings) -> list[tuple[str, str]]:
    found = []
    for path in (settings.qemu.images, settings.qemu.templates, settings.qemu.vms, settings.qemu.run):
        if path.exists():
            try:
                path_security.check(path)
            except MultiverseError as error:
                found.append((error.message, error.hint))
    return found


def _tun() -> str:
    try:
        os.close(os.open(_TUN, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _missing(library: str) -> Iterator[str]:
    try:
        ctypes.CDLL(library)
    except OSError:
        yield library


def munge_problem(socket: Path | None) -> str:
    """Why a credential cannot be made and decoded here; empty if it can."""
    where = [f"--socket={socket}"] if socket else []
    try:
        made = subprocess.run(["munge", "--no-input", *where], capture_output=True, timeout=10, check=False)
        if made.returncode == 0:
            made = subprocess.run(
                ["unmunge", "--no-output", *where], input=made.stdout, capture_output=True, timeout=10, check=False
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = made.stderr.decode(errors="replace").strip()
    return (said or f"it ended with {made.returncode}") if made.returncode else ""


# --- from facts to findings -------------------------------------------------------------------------

OLDEST_QEMU = (7, 2)  # the oldest that Multiverse is tried with (Debian 12)
STATE_ROOM = 256  # MiB that the database and its reserve need at least


def problem(name: str, message: str, remedy: str) -> Finding:
    return Finding(Level.PROBLEM, name, message, remedy)


def note(name: str, message: str, remedy: str) -> Finding:
    return Finding(Level.NOTE, name, message, remedy)


def _of_rights(_settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    """Whether the agent may do what it has to, and nobody else may change what it uses."""
    if not facts.root:
        yield problem("root", "this is not root, so some checks see less than the daemon does", "run it as root")
    for message, hint in facts.unsafe:
        yield problem("directories", message, hint)


def _of_qemu(settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    if facts.qemu_error:
        yield problem(
            settings.qemu.binary, facts.qemu_error, "install qemu-system-x86, or set qemu.binary in the settings"
        )
    elif not is_since(facts.qemu, *OLDEST_QEMU):
        yield problem(
            settings.qemu.binary,
            f"{facts.qemu} is older than 7.2, the oldest that Multiverse is tried with",
            "install QEMU 7.2 or later, and name it in qemu.binary",
        )
    elif not is_since(facts.qemu, 8, 2):
        yield note(
            settings.qemu.binary,
            f"{facts.qemu} holds the memory of each template twice",
            "no action is needed; from QEMU 8.2 on it is held once",
        )
    for program in facts.programs:
        package = "munge" if "munge" in program else "qemu-utils"
        yield problem(program, f"there is no program {program}", f"install it: apt install {package}")


def _of_kvm(settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    """Whether KVM truly runs guests: small ones were run. And whether they have the CPU of the settings."""
    if facts.model:
        yield problem(
            "qemu.cpu",
            f"guests have the CPU of this host, and not the model {settings.qemu.cpu}: {facts.model}",
            "set a model that all hosts run: multiverse doctor names the newest, on the controller's machine",
        )
    if not facts.kvm:
        return
    if settings.qemu.accel == "kvm":
        yield problem("KVM", f"KVM does not run guests: {facts.kvm}", 'make KVM work, or set accel = "auto" in [qemu]')
    else:
        yield note(
            "KVM",
            f"KVM does not run guests, so they are emulated, several times slower: {facts.kvm}",
            "enable virtualisation in the firmware (of a virtual machine: nested virtualisation on its host), load "
            "kvm_intel or kvm_amd, and check the rights of /dev/kvm; if there is none, no action is needed, or "
            'set accel = "tcg" in [qemu], so that it is not tried any more',
        )


def _of_kernel(_settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    if facts.tun:
        yield problem("/dev/net/tun", f"/dev/net/tun cannot be opened: {facts.tun}", "run modprobe tun, as root")
    if facts.net_namespaces < 1:
        yield problem(
            "user.max_net_namespaces",
            "the kernel allows no network namespaces, and each VM needs one",
            "set it to 100000 or more: sysctl user.max_net_namespaces=100000, and the same in /etc/sysctl.d",
        )
    if not facts.cgroups:
        yield note(
            "cgroups",
            "there is no control group in which the memory and the threads of QEMU could be limited",
            "mount cgroup2 at /sys/fs/cgroup with the controllers memory and pids",
        )
    for library in facts.libraries:
        yield problem(
            library,
            f"{library} is missing, so the addresses of VMs are not checked",
            "install it: apt install libnftables1",
        )


def _of_memory(settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    host = settings.host
    if host.memory > facts.memory:
        yield problem(
            "host.memory",
            f"{host.memory} MiB are declared for VMs, but the machine has {facts.memory} MiB",
            f"set memory = {max(0, facts.memory - host.floor)} or less in [host], or in this host's class",
        )
    elif host.memory > facts.memory_available and not host.overcommit > 1:
        yield note(
            "host.memory",
            f"{host.memory} MiB are declared for VMs, and {facts.memory_available} MiB are available now",
            f"no action is needed if VMs have the rest; or else set memory = {facts.memory_available} in [host], or in "
            "this host's class",
        )


def _of_cpus(settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    if settings.host.cores > facts.cpus:
        yield note(
            "host.cores",
            f"host.cores declares {number_of(settings.host.cores, 'CPU')} for VMs, but the machine has {facts.cpus}: "
            "jobs will share them",
            f"set cores = {facts.cpus} in [host], or in this host's class, unless that is meant",
        )


def _of_disk(settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    host = settings.host
    if (vms := facts.vms) is not None:
        if vms.available < host.disk_floor:
            yield problem(
                str(vms.path),
                f"{vms.available} MiB of disk are available, and no VM is added with less than {host.disk_floor} MiB",
                "make room there, or put qemu.vms on another file system",
            )
        if host.disk > vms.total:
            yield problem(
                "host.disk",
                f"{host.disk} MiB of disk are declared for VMs, but the file system of {vms.path} has {vms.total} MiB",
                f"set disk = {max(0, vms.total - host.disk_floor)} or less in [host], or in this host's class",
            )
    if (state := facts.state) is not None and state.available < STATE_ROOM:
        yield problem(
            str(state.path),
            f"{state.available} MiB of disk are available for the database, which needs {STATE_ROOM} MiB",
            "make room there: with a full disk no job is admitted",
        )
    if facts.templates is not None:
        yield from _of_templates(facts.templates, settings.qemu.base_memory)


def _of_templates(found: FileSystem, need: int) -> Iterator[Finding]:
    if not found.in_memory:
        yield problem(
            str(found.path),
            f"templates are to be on a file system in memory, and this is {found.kind or 'unknown'}",
            "set templates in [qemu] to a directory below /dev/shm",
        )
    elif found.available < need:
        yield problem(
            str(found.path),
            f"{found.available} MiB are available, and a template takes {need} MiB",
            "make room there, or mount it with a larger size=",
        )


def _of_clock(_settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    """Whether the clock is kept right: munge refuses credentials of machines whose clocks differ by minutes."""
    if facts.clock is False:
        yield note(
            "clock",
            "the kernel says that nothing keeps the clock right; guests get their time from it",
            "run chrony, ntpd or systemd-timesyncd here",
        )


def _of_functions(settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    """Whether VMs inside jobs can have the virtual functions that the settings offer."""
    offered = ", ".join(settings.job_vms.sriov)
    if not facts.iommu:
        yield problem(
            "IOMMU",
            "the kernel uses no IOMMU, so no VM can have a virtual function: it could write to all memory",
            "turn VT-d or AMD-Vi on in the firmware, and boot with intel_iommu=on or amd_iommu=on",
        )
    if not facts.functions:
        yield problem(
            "job_vms.sriov",
            f"there is no virtual function of {offered}",
            "create them at each boot: echo N > /sys/bus/pci/devices/ADDRESS/sriov_numvfs",
        )
    elif facts.iommu:
        for one in facts.functions:
            if one.problem:
                yield note(
                    "job_vms.sriov", f"no VM can have {one.address} now: {one.problem}", "leave it, or mend that"
                )


def _of_sleep(settings: Settings, facts: MachineFacts) -> Iterator[Finding]:
    """Whether something can stand in for VMs that sleep while their jobs are suspended."""
    for program in facts.stand_in if settings.save.enabled else ():
        name = program.rpartition("/")[2]
        message = f"there is no program {program}, so VMs of suspended jobs keep their memory (save.sleep_after)"
        yield problem(
            name, message, "install slurmd and munge of the cluster's release; neither is to run as a service"
        )


_PARTS = {
    "rights and directories": _of_rights,
    "QEMU and programs": _of_qemu,
    "KVM runs guests": _of_kvm,
    "kernel": _of_kernel,
    "CPUs": _of_cpus,
    "memory": _of_memory,
    "disk": _of_disk,
    "clock": _of_clock,
    "virtual functions": _of_functions,
    "suspended jobs": _of_sleep,
}


def examine(settings: Settings, facts: MachineFacts) -> Iterator[tuple[str, list[Finding]]]:
    """All examinations of a machine as a host, by name."""
    for name, part in _PARTS.items():
        wanted = {"virtual functions": bool(settings.job_vms.sriov), "suspended jobs": settings.save.sleep_after > 0}
        if wanted.get(name, True):
            yield name, list(part(settings, facts))
