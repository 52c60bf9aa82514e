"""What makes way for jobs that have no room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from multiverse.core.model.host import Host
from multiverse.core.model.job import Attempt
from multiverse.core.model.keys import Key
from multiverse.core.model.sizes import Depth, Size
from multiverse.core.model.template import TemplateKey, TemplateState
from multiverse.core.model.vm import VmState, is_spare
from multiverse.core.policy import Policy, image_of
from multiverse.core.provisioning.capacity import Room, could_ever_fit
from multiverse.core.provisioning.clones import may_fork, parents_of, template_key
from multiverse.core.provisioning.spares import release, spares
from multiverse.core.state import PlanState
from multiverse.core.transition import Change, Event


def release_spares(state: PlanState, image: str, count: int, claims: Mapping[str, Size],
             room_without: Callable[[Collection[Key]], Room]) -> bool:  # fmt: skip
    """Release as many spares as it takes for `count` such claims, by host, to have room: joined ones first, for they
    hold the most, and parked ones of `image` last. What is being released already counts as free. False if there are
    no spares, or all of them would not be enough: then they stay."""
    leaving = {vm.key for vm in state.vms.values() if vm.state is VmState.RELEASING or vm.unwanted}
    here = (vm for vm in spares(state) if vm.host in claims)
    order = sorted(here, key=lambda vm: (vm.pool is Depth.PARKED, vm.image == image, vm.id))
    if not order and not leaving:
        return False
    for going in range(len(order) + 1):
        if room_without(leaving | {vm.key for vm in order[:going]}).place(count, claims) is not None:
            for vm in order[:going]:
                release(state, vm, "its memory is needed")
            return True
    return False


def retire_a_template(
    state: PlanState, attempt: Attempt, queue: list[Attempt], hosts: Mapping[str, Host], policy: Policy
) -> None:
    """Retire one template that nothing uses, so that the attempt may have its room: one that nobody in the queue
    needs, kept only while they fit, or else one that this attempt does not need, where templates alone are in its
    way. One after the other: the room of the first may be enough."""
    if any(
        template.state is TemplateState.RETIRING and template.host in hosts for template in state.templates.values()
    ):
        return
    having = {name for name, host in hosts.items() if image_of(attempt, policy) in host.images}
    spare_keys = {vm.key for vm in state.vms.values() if is_spare(vm)}  # they go with their template
    serving = [vm for vm in state.vms.values() if vm.key not in spare_keys]
    busy = {c.host for c in state.claims.values() if c.owner.kind == "vm" and c.owner not in spare_keys}
    # Jobs that ask for the same want the same: one of each speaks for all.
    wanted = {
        key for one in {a.request: a for a in queue}.values() for key in wanted_templates(state, one, hosts, policy)
    }
    mine = set(wanted_templates(state, attempt, hosts, policy))
    idle = [
        template
        for _, template in sorted(state.templates.items(), key=lambda item: (item[1].since, item[0]))
        if template.state in (TemplateState.READY, TemplateState.BROKEN)
        and template.host in having
        and not any(vm.template == template.which for vm in serving)
    ]
    unwanted = (t for t in idle if t.which not in wanted and t.state is TemplateState.READY)
    in_the_way = (t for t in idle if t.which not in mine and t.host not in busy)
    spare = next(unwanted, None) or next(in_the_way, None)
    if spare:
        state.move(Change(replace(spare, state=TemplateState.RETIRING), Event.DROPPED, "its memory is needed"))


def wanted_templates(
    state: PlanState, attempt: Attempt, hosts: Mapping[str, Host], policy: Policy
) -> list[TemplateKey]:
    if not may_fork(attempt, policy):
        return []
    parents = parents_of(state, attempt, hosts, policy)
    if not could_ever_fit(attempt.request.size, attempt.request.nodes, parents, hosts, policy):
        return []  # if it is to run, then by booting, perhaps where such a template is now
    return [template_key(attempt, name, size, policy) for name, size in parents.items()]
