"""Whether Slurm may have as many nodes as there can be VMs: hosts may have come that no settings name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from multiverse.bundles.contract import Notice
from multiverse.core.errors import MultiverseError
from multiverse.drivers.slurm import requirements, site_conf


class NodeCount:
    """What the slurm.conf at `conf` lacks. It is read again when it, or a file that it includes, has changed: a large
    one takes a tenth of a second, in which the daemon does nothing else."""

    def __init__(self, conf: Path) -> None:
        self._conf, self._cpus = conf, -1
        self._files: Mapping[Path, int] = {}
        self._lack: list[Notice] = []

    def lack(self, cpus: int) -> list[Notice]:
        """What is lacking for VMs that claim so many CPUs together. Nothing while the file cannot be read, of which
        `multiverse site check` tells."""
        if cpus != self._cpus or self._has_changed():
            self._cpus = cpus
            self._files, self._lack = self._read(cpus)
        return self._lack

    def _read(self, cpus: int) -> tuple[Mapping[Path, int], list[Notice]]:
        try:
            site = site_conf.read(self._conf)
        except MultiverseError:
            return {}, []
        lack = requirements.lack_of_nodes(cpus, site)
        return site.files, [Notice("nodes", lack.name, lack.message, lack.remedy)] if lack else []

    def _has_changed(self) -> bool:
        try:
            return not self._files or any(file.stat().st_mtime_ns != at for file, at in self._files.items())
        except OSError:
            return True
