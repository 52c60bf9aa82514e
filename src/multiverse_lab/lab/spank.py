"""Slurm's plugin for VMs inside jobs: where it is on this machine, and the copies of it that a lab uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from multiverse.config import JobVmSettings
from multiverse.system import files
from multiverse_lab.lab.layout import Layout

_CHECKOUT = Path(__file__).parents[3] / "var" / "spank"  # where `make spank` puts them
_PLACES = (
    (_CHECKOUT / "multiverse.so", _CHECKOUT / "mventer"),
    (JobVmSettings.plugin, JobVmSettings.enter),  # of the package, or of `make -C spank install PREFIX=/usr`
)
_COMMANDS = (_CHECKOUT / "multiverse-vm", Path("/usr/bin/multiverse-vm"))


def built_plugin(places: Sequence[tuple[Path, Path]] = _PLACES) -> tuple[Path, Path] | None:
    """The plugin and the program that enters a VM: of this checkout, or installed. None if they were not built."""
    return next((both for both in places if all(path.exists() for path in both)), None)


def installed(where: Layout, file: str) -> str:
    """Where the lab has its copy of a file. Each of its nodes has one at the same path."""
    return str(where.programs / Path(file).name)


def install(where: Layout, plugin: str, enter: str, commands: Sequence[Path] = _COMMANDS) -> None:
    """Copy the plugin and its programs to where all users can read them.

    Every command of Slurm loads the plugin as the user who calls it, and a task executes the programs as its user.
    Those cannot read a checkout below a directory that they may not enter. A copy that is in use is replaced, not
    overwritten.
    """
    command = [str(path) for path in commands if path.exists()][:1]
    for file in (plugin, enter, *command):
        content, copy = Path(file).read_bytes(), where.programs / Path(file).name
        if not copy.exists() or copy.read_bytes() != content:
            files.replace(copy, content, mode=0o755)
