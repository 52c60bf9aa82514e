"""What others than Multiverse leave of the memory of hosts' machines, where more may be claimed than is declared."""

from __future__ import annotations

from collections.abc import Mapping

from multiverse.core.model import Attempt, CloneKind, Reason, Request, Size, Why
from multiverse.core.provisioning.capacity import index_of, memory_beyond, must_keep
from multiverse.core.provisioning.clones import Choice, on_hosts_making
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.sizes import template_claim, vm_claims
from multiverse.core.provisioning.templates import node_request


class OthersMemory:
    """Says in one round of admission of which attempts others hold the memory; alike ones are looked at once."""

    def __init__(self) -> None:
        self._said: dict[tuple[Request, CloneKind, frozenset[str], bool], Reason | None] = {}

    def why(self, context: Context, attempt: Attempt, choice: Choice) -> Reason | None:
        """Why the attempt would have no room on empty hosts either, with nothing of ours on them: others on their
        machines have the memory, and no job behind it is to wait for that. None where no more is claimed than
        declared: there nobody looks at what others have. How much others hold is not known to the MiB: who was told
        this once is told so until there is some more than enough."""
        if all(kind.host.overcommit.memory <= 1 for kind in index_of(context).classes.values()):
            return None
        lacking = context.state.lacking
        known = (attempt.request, choice.kind) in lacking
        alike = (attempt.request, choice.kind, context.without, known)
        if alike not in self._said:
            self._said[alike] = _why(context, attempt, choice, margin=known)
            (lacking.add if self._said[alike] else lacking.discard)(alike[:2])
        return self._said[alike]


def _why(context: Context, attempt: Attempt, choice: Choice, *, margin: bool) -> Reason | None:
    wanted = node_request(context, attempt, choice.kind)
    sizes = on_hosts_making(wanted.image, choice.kind, choice.sizes)
    frozen: Mapping[str, Size] = {}
    if choice.forks:
        frozen = sizes.map(lambda host, size: template_claim(size, host, wanted.image))
    claims = vm_claims(wanted, sizes, context.hosts, context.policy)
    floors = memory_beyond(context, claims, frozen, attempt.request, margin=margin)
    return Why.MEMORY(*must_keep(floors), others=1) if floors is not None else None
