"""Which hosts could take an attempt's VMs now, and why each of the others is passed over. Pure.

Hosts for which the same is true are one group, because a site may have 10,000 of them. The figures come from where
admission takes them: the same sizes, claims, templates and room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from multiverse.core.capacity.empty_hosts import could_ever_fit
from multiverse.core.capacity.room import Room, room_of
from multiverse.core.capacity.sizes import short_of_disk, template_claim, vm_claim, vm_size
from multiverse.core.capacity.usable_hosts import for_attempt, why_avoided
from multiverse.core.capacity_index import Free
from multiverse.core.clones.kinds import Choice, choose_clones, makes
from multiverse.core.clones.pacing import wait_for
from multiverse.core.clones.templates import node_request, template_key
from multiverse.core.context import Context
from multiverse.core.model import Attempt, Host, HostState, Reason, Size, Template, TemplateState, Why, said
from multiverse.core.rows import plus


@dataclass(frozen=True, slots=True)
class HostVerdict:
    """What is true of some hosts, for one attempt. `fits`: they could take at least one of its VMs now."""

    hosts: tuple[str, ...]
    why: Reason
    fits: bool = False


@dataclass(slots=True)
class _Group:
    """Hosts for which the same is true, but for a figure: `figures` are the least and the most of it."""

    hosts: list[str] = field(default_factory=list)
    figures: tuple[int, int] | None = None

    def add(self, host: str, figure: int | None) -> None:
        self.hosts.append(host)
        if figure is not None:
            least, most = self.figures or (figure, figure)
            self.figures = min(least, figure), max(most, figure)


_Finding = tuple[bool, Reason, int | None]
"""Whether the host fits, why, and the figure in which it may differ from others of which the same is true."""


def host_verdicts(context: Context, attempt: Attempt) -> list[HostVerdict]:
    """Each host of the site in one group: those that fit first, then the largest groups. Costs a look at each host."""
    judge = _Judge(context, attempt)
    groups: dict[tuple[bool, Reason], _Group] = {}
    names = sorted({*context.in_sight, *context.state.hosts})
    for name in names:
        known = context.state.hosts.get(name)
        if known is not None and known.state is HostState.REMOVED:
            continue
        fits, why, figure = judge.of(name)
        groups.setdefault((fits, why), _Group()).add(name, figure)
    found = [HostVerdict(tuple(one.hosts), _with(why, one.figures), fits) for (fits, why), one in groups.items()]
    return sorted(found, key=lambda one: (not one.fits, -len(one.hosts), str(one.why)))


def _with(why: Reason, figures: tuple[int, int] | None) -> Reason:
    if figures is None:
        return why
    least, most = figures
    found = (("least", least), ("most", most))[: 1 if least == most else 2]
    return replace(why, figures=(*why.figures, *found))


class _Judge:
    """Judges one host after the other for one attempt."""

    def __init__(self, context: Context, attempt: Attempt) -> None:
        self._context, self._attempt = for_attempt(context, attempt), attempt
        self._image = context.image_of(attempt)
        self._choice: Choice = choose_clones(self._context, attempt)
        self._room: Room = room_of(self._context)
        self._too_small: dict[tuple[int, Size], Reason | None] = {}  # by class of hosts and size of the template

    def of(self, name: str) -> _Finding:
        context, host = self._context, self._context.in_sight.get(name)
        if (known := context.state.hosts.get(name)) is not None and known.is_off:
            return False, Why.IS_OFF(), None
        if host is None:
            return False, Why.IS_AWAY(), None
        if closed := self._closed(name):
            return False, closed, None
        kind = self._choice.kind
        if self._image not in host.images:
            return False, Why.LACKS_IMAGE(image=self._image), None
        if not makes(host, self._image, kind):
            return False, Why.MAKES_NONE(clones=kind, image=self._image), None
        return self._of_open(name, host, self._choice.sizes[name])

    def _closed(self, name: str) -> Reason | None:
        """Why the host takes no VM of the attempt whatever is free: by an operator's word, or its lease's."""
        context = self._context
        if name not in context.closed:
            return None
        if name in context.avoided and name not in context.with_avoided().closed:
            return Why.IS_AVOIDED(why_avoided(context, name, self._image))
        drain = context.state.drains.get(name)
        if drain is None:
            return Why.LEASE_ENDS() if name in context.without else Why.TAKES_NONE()
        return (Why.WILL_BE_DRAINED if name in context.without else Why.IS_DRAINED)(said(drain.reason))

    def _of_open(self, name: str, host: Host, template: Size) -> _Finding:
        """A host that takes new VMs, has the image, and makes such clones."""
        if why := self._never(name, host, template):
            return False, why, None
        if short_of_disk(host):
            return False, Why.SHORT_OF_DISK(floor=host.overcommit.disk_floor), None
        row = self._context.state.template_for(template_key(self._context, self._attempt, name, template))
        row = row if self._choice.forks else None
        claim = vm_claim(vm_size(self._attempt.request.size, template, host, self._context.policy), host, self._image,
                         self._choice.kind)  # fmt: skip
        build = Size(0, 0, 0)
        if self._choice.forks and row is None:
            build = template_claim(template, host, self._image)
        if lack := self._lack(name, claim, build):
            return lack
        if self._choice.forks and (why := self._template(row)):
            return False, why, None
        state, policy = self._context.state, self._context.policy
        if wait_for((name, self._image, self._choice.kind), state.paced, state.now, policy) > 0:
            return False, Why.PACED_THERE(clones=self._choice.kind), None
        return True, Why.HAS_ROOM(), self._room.held(name, claim)

    def _never(self, name: str, host: Host, template: Size) -> Reason | None:
        """Why the host could not hold one of the VMs if it were empty."""
        kind = self._context.state.free.class_of.get(name)
        key = (id(kind), template)
        if key not in self._too_small:
            wanted = node_request(self._context, self._attempt, self._choice.kind)
            sizes: Mapping[str, Size] = {name: template}
            one = replace(self._attempt.request, nodes=1)
            fits = could_ever_fit(wanted, one, sizes, {name: host}, self._context.policy)
            capacity = host.capacity
            net = capacity.net if self._attempt.request.size.net else None
            small = Why.TOO_SMALL(cpus=capacity.cpus, memory=capacity.memory, net=net)
            self._too_small[key] = None if fits else small
        return self._too_small[key]

    def _lack(self, name: str, claim: Size, build: Size) -> _Finding | None:
        """What there is too little of now."""
        free: Free = self._room.free[name]
        amounts = ("CPUs", "MiB of memory", "MiB of disk", "Mbit/s")
        for what, need, have in zip(amounts, plus(claim, build).amounts, free, strict=True):
            if need > have:
                beside = bool(build.memory) and what in amounts[1:3]
                held = what == "MiB of memory" and name in self._room.tight
                return False, Why.LACKS(need=need, what=what, beside=int(beside), held=int(held)), max(0, have)
        return None

    def _template(self, row: Template | None) -> Reason | None:
        """Why no VM can be forked there now although there is room for it."""
        match row.state if row else None:
            case TemplateState.READY:
                return None
            case TemplateState.BUILDING:
                return Why.BEING_BUILT(image=self._image)
            case TemplateState.BROKEN if row:
                return Why.TEMPLATE_BROKEN(row.reason, image=self._image)
            case TemplateState.RETIRING:
                return Why.BEING_REMOVED(image=self._image)
            case _:
                return Why.NOT_YET_THERE(image=self._image)
