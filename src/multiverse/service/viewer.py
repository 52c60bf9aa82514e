"""Who asks, and what of others they may be told: by PrivateData, as Slurm's own commands do."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from multiverse.core.errors import MultiverseError
from multiverse.drivers.slurm import site_conf

_JOB = re.compile(r"\b(jobs?) (?!in\b)(\d+(?:_\d+)?)")
_WORD = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Viewer:
    """A user who may see their own jobs only (`uid`), or an operator (None), who may see all. `others`: other users'
    jobs may be named to them; `hosts`: hosts may be."""

    uid: int | None = None
    others: bool = True
    hosts: bool = True

    def may_see(self, uid: int) -> bool:
        return self.uid is None or self.uid == uid

    def told(self, text: str, own: str, hosts: Collection[str]) -> str:
        """The text without the ids of jobs but their `own`, and without these hosts' names, where these are hidden."""
        if not self.others:
            text = _JOB.sub(lambda found: found[0] if _is_own(found[2], own) else "another job", text)
        if not self.hosts:
            text = _WORD.sub(lambda found: "a host" if found[0].rstrip(".") in hosts else found[0], text)
        return text


OPERATOR = Viewer()


def _is_own(job_id: str, own: str) -> bool:
    return job_id.partition("_")[0] == own.partition("_")[0]


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
