"""Runs a program in control groups of its node's own, as a program:
python -m multiverse_lab.lab.hosts.confined GROUP NODE PLACE PROGRAM [ARGUMENT...].

The groups are `GROUP/NODE` in each hierarchy that Slurm uses. The program has a cgroup namespace in which they are the
roots of their hierarchies, and finds these below PLACE. So the nodes of two labs on one machine share no group. Where
hierarchies are mounted otherwise stays as it is: agents outside name the groups of jobs by those paths.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from multiverse.system import kernel
from multiverse_lab.lab.hosts import control_groups

_CGROUPS = Path("/sys/fs/cgroup")


def main() -> None:
    lab, node, place, *argv = sys.argv[1:]
    try:
        groups = control_groups.create(lab, node, every=True)
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWCGROUP)
        kernel.mount(None, Path("/"), kernel.MS_REC | kernel.MS_PRIVATE)
        _mount(groups, Path(place))
    except OSError as error:
        raise SystemExit(str(error)) from error
    os.execvp(argv[0], argv)


def _mount(groups: Mapping[Path, Path], place: Path) -> None:
    """Let each group be a hierarchy below `place`, where that has the name by which this machine mounts it."""
    for where, group in groups.items():
        target = place / (where.relative_to(_CGROUPS) if where.is_relative_to(_CGROUPS) else where.name)
        target.mkdir(parents=True, exist_ok=True)
        kernel.mount(str(group), target, kernel.MS_BIND)
        if (
            group / "cgroup.controllers"
        ).exists():  # version 2: a group with groups that have controllers has no process
            control_groups.join_daemons_of(target)


if __name__ == "__main__":
    main()
