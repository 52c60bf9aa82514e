"""What an attempt's VMs can be made of now: on which hosts, of which templates and spares, in which room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from multiverse.core.capacity.host_limits import HostLimits, any_host, others_on
from multiverse.core.capacity.placement import place_vms, placement_request
from multiverse.core.capacity.room import Room, room_of
from multiverse.core.capacity.sizes import vm_claims
from multiverse.core.capacity.usable_hosts import for_attempt
from multiverse.core.capacity_index import HostMap
from multiverse.core.clones.kinds import Choice, choose_clones, on_hosts_making
from multiverse.core.clones.pacing import Parent, wait_for
from multiverse.core.clones.planning import claims_of, describe, placed_by, plan_vms, request_of
from multiverse.core.clones.spares import give_back, parked_for
from multiverse.core.clones.templates import (
    MayBuild,
    any_template,
    ask_for_template,
    node_request,
    template_sizes,
    wish_of,
)
from multiverse.core.context import Context
from multiverse.core.machines.attempt import replace_vms, return_attempt
from multiverse.core.machines.vm import plan_vm
from multiverse.core.model import Attempt, CloneKind, Reason, Size, TemplateState, Vm, Why
from multiverse.core.rows import VmsMissing
from multiverse.core.transition import Event


@dataclass(frozen=True, slots=True)
class NoRoom:
    """There is no room for what is claimed on each host, `why` if it is for want of something else."""

    claims: Mapping[str, Size]
    why: Reason | None = None


class CloneSupply:
    """Finds in one round of admission what attempts' VMs can be made of, and takes the room for them."""

    def __init__(self, context: Context, room: Room) -> None:
        self.context, self.room = context, room  # `context`: as it is for the attempt that is considered
        self.paced: Parent | None = None  # whose pace the last attempt waits for

    def place(
        self,
        attempt: Attempt,
        choice: Choice,
        usable: HostMap[Size],
        kept: Collection[int] = (),
        may: MayBuild = any_template,
    ) -> tuple[list[Vm], list[Vm]] | NoRoom:
        """Spares for the attempt, but those that are `kept`, and new VMs; takes the room that they need. Asks for
        another template, if one may be built, where clones would wait long for their pace."""
        kind = choice.kind
        context = self.context
        claims = vm_claims(node_request(context, attempt, kind), usable, context.hosts, context.policy)
        found = parked_for(self.context, attempt, choice.sizes, self.room) if choice.forks else []
        parked = [one for one in found if one[0].id not in kept]
        give_back([one for one in found if one[0].id in kept], self.room)
        count = attempt.request.nodes - len(parked)
        why = self._out_of_pace(attempt, choice, usable, count, may)
        chosen = None
        if not why:
            wanted = placement_request(self.context, attempt, kind, count)
            limit = others_on(self.context.state, attempt, [vm for vm, _ in parked])
            hosts = HostLimits(self._pace_of(attempt, kind), limit)
            chosen = place_vms(self.context, self.room, wanted, claims, attempt, hosts)
        if chosen is None:
            give_back(parked, self.room)
            return NoRoom(claims, why)
        vms = plan_vms(self.context, request_of(self.context, attempt, choice), chosen)
        if vms is None:
            give_back(parked, self.room)
            for name in chosen:
                self.room.give(name, claims[name])
            return NoRoom(claims, Why.NO_ADDRESS())
        return [vm for vm, _ in parked], vms

    def usable_hosts(
        self, attempt: Attempt, choice: Choice, may: MayBuild = any_template
    ) -> tuple[HostMap[Size], Reason | None]:
        """Hosts that can make this attempt's VMs now; when there are none, why. Asks for a template where one is
        missing and may be built."""
        context, image = self.context, self.context.image_of(attempt)
        able = on_hosts_making(image, choice.kind, choice.sizes)
        if not able:
            return able, Why.NO_CLONES(clones=choice.kind, image=image)
        if not choice.forks:  # booted from the image, without a template
            if choice.prepare:
                forking = on_hosts_making(image, CloneKind.INSTANT, template_sizes(context, attempt))
                wish = wish_of(context, attempt, forking)
                ask_for_template(context, wish, self.room, Why.OTHERS_NEED(), may)
            return able, None
        wish = wish_of(context, attempt, able)
        if ready := wish.ready():
            return ready, None
        why = ask_for_template(context, wish, self.room, Why.JOB_NEEDS(job=attempt.job.job_id), may)
        broken = wish.rows(context, TemplateState.BROKEN)
        if not why and broken:
            why = Why.TEMPLATE_BROKEN(broken[0].reason, image=image, host=broken[0].host)
        return ready, why

    def template_elsewhere(self, attempt: Attempt, choice: Choice, may: MayBuild = any_template) -> Reason | None:
        """The hosts that have the template are too full, or too small for all of a gang: build it on one more host
        where it may be."""
        if not choice.forks:
            return None
        able = on_hosts_making(self.context.image_of(attempt), choice.kind, choice.sizes)
        lacking = wish_of(self.context, attempt, able).lacking()
        return ask_for_template(self.context, lacking, self.room, Why.JOB_NEEDS(job=attempt.job.job_id), may)

    def _pace_of(self, attempt: Attempt, kind: CloneKind) -> Callable[[str], bool]:
        """Says of a host whether the pace lets such a clone be made there now."""
        state, policy, image = self.context.state, self.context.policy, self.context.image_of(attempt)
        if not policy.interval(kind):
            return any_host
        return lambda host: wait_for((host, image, kind), state.paced, state.now, policy) <= 0

    def _out_of_pace(
        self, attempt: Attempt, choice: Choice, usable: HostMap[Size], count: int, may: MayBuild
    ) -> Reason | None:
        """Why on none of these hosts a clone may be made now; None if on one it may. Where the clones that wait for
        their templates take longer than another template does, another one is asked for."""
        image, kind, state, policy = (
            self.context.image_of(attempt),
            choice.kind,
            self.context.state,
            self.context.policy,
        )
        if not count or not policy.interval(kind) or any(map(self._pace_of(attempt, kind), usable)):
            return None
        waits = {host: wait_for((host, image, kind), state.paced, state.now, policy) for host in usable}
        self.paced = (min(waits, key=lambda host: (waits[host], host)), image, kind)
        queued = waits[self.paced[0]] + state.waiting[self.paced] * policy.interval(kind)
        elsewhere = self.template_elsewhere(attempt, choice, may) if queued > policy.template_seconds else None
        state.waiting[self.paced] += count
        return Why.PACE(elsewhere, clones=kind, image=image, rate=policy.rates[kind])


def supply_missing(context: Context, missing: VmsMissing) -> None:
    """Plan the VMs that an attempt lacks, or give its job back to the gate if there is no room for them."""
    state = context.state
    attempt = state.attempts.get(missing.attempt)
    if attempt is None or not context.world.sees_hosts:
        return
    imageless = bool(context.hosts) and not choose_clones(context, attempt).sizes
    context = for_attempt(context, attempt)
    room = room_of(context)
    choice = choose_clones(context, attempt)
    able = on_hosts_making(context.image_of(attempt), choice.kind, choice.sizes)
    if choice.forks:
        able = wish_of(context, attempt, able).ready()
    claims = vm_claims(node_request(context, attempt, choice.kind), able, context.hosts, context.policy)
    wanted = placement_request(context, attempt, choice.kind, missing.count)
    chosen = place_vms(context, room, wanted, claims, attempt, HostLimits(limit=others_on(state, attempt)))
    vms = plan_vms(context, request_of(context, attempt, choice), chosen) if chosen else None
    if vms is None:
        why = Why.AND(missing.reason, Why.IMAGELESS() if imageless else Why.NO_ROOM_LEFT())
        state.move(return_attempt(attempt, Event.GAVE_UP, why, failed=missing.counts and not imageless))
        return
    story = describe(choice, vms, **placed_by(context, attempt, choice, vms))
    again = replace_vms(attempt, missing, story)
    state.move(again, *(plan_vm(vm) for vm in vms), make=claims_of(context, vms))
