"""Who asks, and what of others they may be told: by PrivateData, as Slurm's own commands do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from multiverse.core.errors import MultiverseError
from multiverse.core.model import Reason, text_of
from multiverse.drivers.slurm import site_conf


@dataclass(frozen=True, slots=True)
class Viewer:
    """A user who may see their own jobs only (`uid`), or an operator (None), who may see all. `others`: other users'
    jobs may be named to them; `hosts`: hosts may be."""

    uid: int | None = None
    others: bool = True
    hosts: bool = True

    def may_see(self, uid: int) -> bool:
        return self.uid is None or self.uid == uid

    def hidden(self, reason: Reason, own: str) -> Reason:
        """The reason without ids of jobs but their `own`, and without names of hosts, where these are hidden."""
        return reason.hidden(own, others=self.others, hosts=self.hosts)

    def teller(self, own: str) -> Callable[[Reason | None], str]:
        """Words reasons of that job as far as the viewer may be told of them."""
        return lambda reason: text_of(reason and self.hidden(reason, own))


OPERATOR = Viewer()


class PrivateData:
    """What the slurm.conf at `conf` keeps private. It is read again when it, or a file that it includes, has changed.
    While it cannot be read, everything is private."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: Mapping[Path, int] = {}
        self._kept: frozenset[str] = frozenset({"all"})

    def viewer(self, uid: int) -> Viewer:
        """How a user of this uid is answered."""
        if self._has_changed():
            self._files, self._kept = self._read()
        kept = self._kept
        return Viewer(uid, others=not kept & {"jobs", "all"}, hosts=not kept & {"nodes", "all"})

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
