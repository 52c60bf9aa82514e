"""What this machine has that VMs need, measured or asked of the kernel. No fact is derived from another."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from multiverse.config import Settings
from multiverse.core.errors import MultiverseError, Refused
from multiverse.host import cgroups, path_security
from multiverse.host.qemu import abilities
from multiverse.host.virtual_functions import RECORDS, VirtualFunction, VirtualFunctions
from multiverse.system import clock

_MIB = 1 << 20
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_TUN = Path("/dev/net/tun")
_NAMESPACES = Path("/proc/sys/user/max_net_namespaces")
_MEMINFO = Path("/proc/meminfo")
_MOUNTS = Path("/proc/mounts")
_IOMMU_GROUPS = Path("/sys/kernel/iommu_groups")


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What holds a path: its type, and MiB in all and available."""

    path: Path
    kind: str
    total: int
    available: int


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts of this machine as a host. Memory and disk in MiB. `kvm` is why KVM runs no guests (empty: it does, None:
    not tried). `unsafe` is why directories may not be used, each with what to do. `clock`: whether the kernel's clock
    is synchronised, None if it does not say. `tun` is why no tap can be made. `libraries` and `programs` are those that
    are missing. `functions` are the virtual functions that the settings offer. `iommu`: whether the kernel uses one."""

    root: bool = True
    qemu: str = ""
    qemu_error: str = ""
    kvm: str | None = None
    memory: int = 0
    memory_available: int = 0
    cpus: int = 0
    state: FileSystem | None = None
    vms: FileSystem | None = None
    templates: FileSystem | None = None
    unsafe: tuple[tuple[str, str], ...] = ()
    clock: bool | None = None
    tun: str = ""
    net_namespaces: int = 1
    cgroups: bool = True
    libraries: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    functions: tuple[VirtualFunction, ...] = ()
    iommu: bool = True


def of_machine(settings: Settings, *, kvm: bool = True) -> MachineFacts:
    """The facts. With `kvm` small guests are run, which takes seconds."""
    qemu, error = _qemu(settings)
    memory = _meminfo()
    return MachineFacts(
        root=os.geteuid() == 0,
        qemu=qemu,
        qemu_error=error,
        kvm=abilities.why_no_kvm(settings.qemu.binary) if kvm and qemu and settings.qemu.accel != "tcg" else None,
        memory=memory.get("MemTotal", 0),
        memory_available=memory.get("MemAvailable", 0),
        cpus=len(os.sched_getaffinity(0)),
        state=file_system(settings.state_dir),
        vms=file_system(settings.qemu.vms),
        templates=file_system(settings.qemu.templates),
        unsafe=tuple(_unsafe(settings)),
        clock=clock.is_synchronised(),
        tun=_tun(),
        net_namespaces=_number(_NAMESPACES),
        cgroups=bool(cgroups.hierarchies()),
        libraries=tuple(name for name in ("libnftables.so.1",) if not _loads(name)),
        programs=tuple(name for name in ("qemu-img", "munge", "unmunge") if shutil.which(name) is None),
        functions=tuple(VirtualFunctions(settings.job_vms.sriov, settings.qemu.vms / RECORDS).listed()),
        iommu=any(_IOMMU_GROUPS.glob("*")),
    )


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


def in_memory(one: FileSystem) -> bool:
    """Whether the file system is one in memory."""
    return one.kind in _IN_MEMORY


def _qemu(settings: Settings) -> tuple[str, str]:
    try:
        return abilities.qemu_version(settings.qemu.binary), ""
    except Refused as error:
        return "", error.message


def _meminfo() -> dict[str, int]:
    """In MiB."""
    lines = (line.partition(":") for line in _MEMINFO.read_text().splitlines())
    return {key: int(value.split()[0]) // 1024 for key, _, value in lines if value.split()}


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


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


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
