"""What slurm.conf keeps private, as Slurm's own commands do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from multiverse.bundles.contract import Privacy
from multiverse.core.errors import MultiverseError
from multiverse.drivers.slurm import site_conf


class PrivateData:
    """What the slurm.conf at `conf` keeps private. It is read again when it, or a file that it includes, has changed.
    While it cannot be read, everything is private."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: Mapping[Path, int] = {}
        self._kept: frozenset[str] = frozenset({"all"})

    def privacy(self) -> Privacy:
        """What a user may be told of others."""
        if self._has_changed():
            self._files, self._kept = self._read()
        kept = self._kept
        return Privacy(others=not kept & {"jobs", "all"}, hosts=not kept & {"nodes", "all"})

    def _read(self) -> tuple[Mapping[Path, int], frozenset[str]]:
        try:
            site = site_conf.read(self._path)
        except MultiverseError:
            return {}, frozenset({"all"})
        return site.files, frozenset(site.words("PrivateData"))

    def _has_changed(self) -> bool:
        try:
            return not self._files or any(file.stat().st_mtime_ns != at for file, at in self._files.items())
        except OSError:
            return True
