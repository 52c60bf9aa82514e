"""/sys of a process that has mount and network namespaces of its own (mount(2), cgroups(7))."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from multiverse.system import kernel

_CGROUPS = Path("/sys/fs/cgroup")


def mount_sys(groups: Mapping[Path, Path], empty: Path) -> None:
    """Mount /sys anew: it shows the interfaces of the network namespace in which it is mounted. Of control groups it
    shows these alone, each as the whole hierarchy: `groups` has them by where the hierarchy is mounted. `empty` is a
    directory that is used meanwhile. Raises OSError."""
    kept = {where: empty / f"group{number}" for number, where in enumerate(groups)}
    for where, beside in kept.items():
        beside.mkdir()
        kernel.mount(str(groups[where]), beside, kernel.MS_BIND)
    kernel.umount("/sys")  # with all that is mounted below it
    mount_new(Path("/sys"), "sysfs")
    if _CGROUPS not in groups:
        mount_new(_CGROUPS, "tmpfs", "mode=0755")
    for where, beside in kept.items():
        where.mkdir(exist_ok=True)
        kernel.mount(str(beside), where, kernel.MS_MOVE)
        beside.rmdir()


def mount_new(path: Path, kind: str, options: str | None = None) -> None:
    """Mount a file system of this kind without devices or set-user-ID programs. Raises OSError."""
    kernel.mount(kind, path, kernel.MS_NOSUID | (0 if kind == "sysfs" else kernel.MS_NODEV), kind, options)
