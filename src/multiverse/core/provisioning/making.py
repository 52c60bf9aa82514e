"""What an attempt's VMs can be made of now: on which hosts, of which templates and spares, in which room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from multiverse.core.model import Attempt, CloneKind, Host, Size, Template, TemplateKey, TemplateState, Vm
from multiverse.core.provisioning.capacity import Room
from multiverse.core.provisioning.clones import (
    Choice,
    ask_for_template,
    hosts_making,
    node_request,
    plan_vms,
    request_of,
    template_sizes,
    templates_of,
)
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.pacing import Parent, wait_for
from multiverse.core.provisioning.sizes import vm_claims
from multiverse.core.provisioning.spares import give_back, parked_for

NO_ADDRESS = "waiting for a free address"

MayBuild = Callable[[TemplateKey], bool]
"""Whether a template may be built that is not there."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """There is no room for what is claimed on each host, `why` if it is for want of something else."""

    claims: Mapping[str, Size]
    why: str = ""


def _allowed(rows: Mapping[TemplateKey, Template | None], may: MayBuild) -> dict[TemplateKey, Template | None]:
    return {which: row for which, row in rows.items() if row or may(which)}


class Making:
    """Finds in one round of admission what attempts' VMs can be made of, and takes the room for them."""

    def __init__(self, context: Context, room: Room) -> None:
        self.context, self.room = context, room  # `context`: as it is for the attempt that is considered
        self.paced: Parent | None = None  # whose pace the last attempt waits for

    @property
    def hosts(self) -> Mapping[str, Host]:
        return self.context.hosts

    def place(
        self, attempt: Attempt, choice: Choice, usable: list[str], kept: Collection[int] = ()
    ) -> tuple[list[Vm], list[Vm]] | NoRoom:
        """Spares for the attempt, but those that are `kept`, and new VMs; takes the room that they need."""
        request, sizes = attempt.request, {name: choice.sizes[name] for name in usable}
        claims = vm_claims(node_request(self.context, attempt, choice.kind), sizes, self.hosts, self.context.policy)
        found = parked_for(self.context, attempt, choice.sizes, self.room) if choice.forks else []
        parked = [one for one in found if one[0].id not in kept]
        give_back([one for one in found if one[0].id in kept], self.room)
        count = request.nodes - len(parked)
        in_pace, why = self._hosts_in_pace(attempt, choice, usable, count)
        chosen = self.room.place(count, {name: claims[name] for name in in_pace})
        if chosen is None:
            give_back(parked, self.room)
            return NoRoom(claims, why)
        vms = plan_vms(self.context, request_of(self.context, attempt, choice), chosen)
        if vms is None:
            give_back(parked, self.room)
            for name in chosen:
                self.room.give(name, claims[name])
            return NoRoom(claims, NO_ADDRESS)
        return [vm for vm, _ in parked], vms

    def usable_hosts(self, attempt: Attempt, choice: Choice, may: MayBuild = lambda _: True) -> tuple[list[str], str]:
        """Hosts that can make this attempt's VMs now; when there are none, why. Asks for a template where one is
        missing and may be built."""
        context, image = self.context, self.context.image_of(attempt)
        able = hosts_making(image, choice.kind, self.hosts)
        if not able:
            return [], f"no host can make {choice.kind} clones of image {image}"
        if not choice.forks:  # booted from the image, without a template
            if choice.prepare:
                forking = hosts_making(image, CloneKind.INSTANT, self.hosts)
                rows = templates_of(context, attempt, forking, template_sizes(context, attempt))
                ask_for_template(context, _allowed(rows, may), self.room, "others like this job will need it")
            return able, ""
        rows = templates_of(context, attempt, able, choice.sizes)
        ready = [which.host for which, row in rows.items() if row and row.state is TemplateState.READY]
        if ready:
            return ready, ""
        why = ask_for_template(context, _allowed(rows, may), self.room, f"job {attempt.job.job_id} needs it")
        broken = next((row for row in rows.values() if row), None)
        if not why and broken:
            why = f"the template of image {image} is broken on {broken.host}: {broken.reason}"
        return [], why

    def template_elsewhere(self, attempt: Attempt, choice: Choice, may: MayBuild = lambda _: True) -> str:
        """The hosts that have the template are too full, or too small for all of a gang: build it on one more host
        where it may be."""
        if not choice.forks:
            return ""
        able = hosts_making(self.context.image_of(attempt), choice.kind, self.hosts)
        rows = templates_of(self.context, attempt, able, choice.sizes)
        lacking = {which: row for which, row in rows.items() if not (row and row.state is TemplateState.READY)}
        return ask_for_template(self.context, _allowed(lacking, may), self.room, f"job {attempt.job.job_id} needs it")

    def _hosts_in_pace(self, attempt: Attempt, choice: Choice, usable: list[str], count: int) -> tuple[list[str], str]:
        """Of these hosts, those on which a clone may be made now; when there are none, why."""
        image, kind, state = self.context.image_of(attempt), choice.kind, self.context.state
        waits = {host: wait_for((host, image, kind), state.paced, state.now, self.context.policy) for host in usable}
        ready = [host for host, wait in waits.items() if wait <= 0]
        if ready or not count:
            return ready, ""
        self.paced = (min(waits, key=lambda host: (waits[host], host)), image, kind)
        state.waiting[self.paced] += count
        rate = self.context.policy.rates[kind]
        return [], f"waiting for a turn: {kind} clones of {image} are made at {rate:g} a second"
