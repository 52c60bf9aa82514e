"""Who asks, and what of others they may be told: by the scheduler's own rules."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from multiverse.bundles.contract import Privacy

_JOB = re.compile(r"\b(jobs?) (?!in\b)(\d+(?:_\d+)?)")
_WORD = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Viewer:
    """A user who may see their own jobs only (`uid`), or an operator (None), who may see all. `others`: other users'
    jobs may be named to them; `hosts`: hosts may be."""

    uid: int | None = None
    others: bool = True
    hosts: bool = True

    @classmethod
    def of(cls, uid: int, privacy: Privacy) -> Viewer:
        """A user, whom the scheduler permits so much."""
        return cls(uid, privacy.others, privacy.hosts)

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
