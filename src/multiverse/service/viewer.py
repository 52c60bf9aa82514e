"""Who asks, and what of others they may be told: by the scheduler's own rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from multiverse.bundles.contract import Privacy
from multiverse.core.model import Reason, text_of


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

    def hidden(self, reason: Reason, own: str) -> Reason:
        """The reason without ids of jobs but their `own`, and without names of hosts, where these are hidden."""
        return reason.hidden(own, others=self.others, hosts=self.hosts)

    def teller(self, own: str) -> Callable[[Reason | None], str]:
        """Words reasons of that job as far as the viewer may be told of them."""
        return lambda reason: text_of(reason and self.hidden(reason, own))


OPERATOR = Viewer()
