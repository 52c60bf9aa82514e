"""What an attempt's VMs can be made of now: hosts, templates, spares and room; and the rows of new VMs."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multiverse.core.capacity.placement_policies import address_of
from multiverse.core.capacity.room import (
    FALLBACK,
    HostLimits,
    Room,
    any_host,
    every_host,
    others_on,
    place_vms,
    placement_of,
    placement_request,
    room_of,
)
from multiverse.core.capacity.sizes import vm_claim, vm_claims, vm_size
from multiverse.core.capacity.usable_hosts import for_attempt
from multiverse.core.capacity_index import HostMap
from multiverse.core.clones.kinds import (
    Choice,
    MayBuild,
    any_template,
    ask_for_template,
    choose_clones,
    node_request,
    on_hosts_making,
    template_sizes,
    wish_of,
)
from multiverse.core.clones.spares import give_back, parked_for
from multiverse.core.context import Context
from multiverse.core.machines.attempt import replace_vms, return_attempt
from multiverse.core.machines.vm import plan_vm
from multiverse.core.model.basics import CloneKind, Depth, Size, number_of
from multiverse.core.model.host import Claim
from multiverse.core.model.identity import mac_of, token_of, vm_name
from multiverse.core.model.job import Attempt
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.saved import Saved, SavedPart
from multiverse.core.model.vm import Place, TemplateKey, TemplateState, Vm
from multiverse.core.policy import Parent, paid, wait_for
from multiverse.core.rows import VmsMissing
from multiverse.core.transition import Event


@dataclass(frozen=True, slots=True)
class CloneRequest:
    """VMs to be planned."""

    image: str
    kind: CloneKind
    node: Size  # what their nodes declare
    templates: Mapping[str, Size]  # the size of their template, by host
    account: str = ""
    pool: Depth | None = None
    attempt: int | None = None
    sizes: Mapping[str, Size] | None = None  # their own sizes; None: by node and template


def _skip_names_of_nodes(context: Context, count: int) -> None:
    """Give no serial whose name a node has: the database may have lost its place."""
    state, nodes = context.state, context.world.scheduler.value.nodes if context.world.scheduler else {}
    while taken := [n for n in range(count) if vm_name(state.site, state.numbers.next_serial + n) in nodes]:
        state.numbers.skip_serials(state.numbers.next_serial + taken[-1] + 1)


def plan_vms(context: Context, wanted: CloneRequest, hosts: list[str]) -> list[Vm] | None:
    """New rows for VMs, one on each of `hosts`; None when addresses have run out."""
    state, policy = context.state, context.policy
    instant = wanted.kind is CloneKind.INSTANT
    vms: list[Vm] = []
    _skip_names_of_nodes(context, len(hosts))
    fresh: dict[str, int] = {}
    used = ChainMap(fresh, state.addresses)
    for serial, name in enumerate(hosts, state.numbers.next_serial):
        host, size = context.hosts[name], wanted.templates[name]
        assigned = "assigns_addresses" in host.abilities
        address = "" if assigned else address_of(serial, used, policy)
        if address is None:
            return None
        fresh[address] = serial
        which = TemplateKey(name, wanted.image, size, wanted.account) if instant else None
        template = state.template_for(which) if which else None
        place = Place(name, state.source_of(name), which, template.id if template else None)
        vms.append(
            Vm(
                id=serial,
                since=state.now,
                name=vm_name(state.site, serial),
                places=(place,),
                image=wanted.image,
                kind=wanted.kind,
                size=wanted.sizes[name] if wanted.sizes else vm_size(wanted.node, size, host, policy),
                node_size=wanted.node,
                mac="" if assigned else mac_of(state.site, serial),
                address=address,
                attempt=wanted.attempt,
                account=wanted.account,
                pool=wanted.pool,
                token=token_of(state.entropy, serial),
            )
        )
    for name in hosts:
        state.numbers.new_serial()  # not before all have an address: a serial that is counted has a row
        pace = (name, wanted.image, wanted.kind)
        state.paced[pace] = paid(pace, state.paced, state.now, policy)
    return vms


def request_of(context: Context, attempt: Attempt, choice: Choice) -> CloneRequest:
    request = attempt.request
    image = context.image_of(attempt)
    return CloneRequest(image, choice.kind, request.size, choice.sizes, request.account, attempt=attempt.id)


def describe(choice: Choice, vms: Iterable[Vm], **figures: Any) -> Reason:
    return Why.CHOICE(choice.why, clones=choice.kind, hosts=dict.fromkeys(vm.host for vm in vms), **figures)


def placed_by(context: Context, attempt: Attempt, choice: Choice, made: Sequence[Vm]) -> dict[str, str]:
    """Which policy chose the hosts of new VMs, and among how many; nothing where there is one host."""
    if not made or len(context.hosts) < 2:
        return {}
    able = on_hosts_making(context.image_of(attempt), choice.kind, choice.sizes)
    which = number_of(len(able), "host")
    if choice.forks:
        which = f"{len(wish_of(context, attempt, able).ready())} of {which} with its template"
    name = placement_of(context, attempt)
    followed = name not in context.state.placement_faults
    return {"policy": name, "among": which} if followed else {"policy": FALLBACK, "among": which, "failed": name}


def claims_of(context: Context, vms: Iterable[Vm]) -> list[Claim]:
    hosts = context.in_sight  # a joined spare, and a VM that was kept in memory, are taken wherever they are
    return [Claim(vm.key, vm.host, vm_claim(vm.size, hosts[vm.host], vm.image, vm.kind)) for vm in vms]


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
        """Spares (but those `kept`) and new VMs for the attempt. Takes their room; may ask for another template."""
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
        """Hosts that can make the VMs now, or why there are none. Asks for a template where one is missing."""
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
        """Build the template on one more host: those that have it are too full, or too small for a gang."""
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
        """Why no clone may be made on these hosts now, if so. Asks for another template if that is quicker."""
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

    # --- saved VMs --------------------------------------------------------------------------------

    def restore(self, attempt: Attempt, saved: Saved) -> list[Vm] | NoRoom:
        """The rows of VMs that go on as they were saved, on hosts that reach one of its storages and make the same
        machine. Takes the room for them."""
        context, parts = self.context, saved.parts
        if saved.kept:  # its room is claimed for it there
            if saved.kept not in context.in_sight:
                return NoRoom({}, Why.KEPT_AWAY(host=saved.kept))
            return [self._restored(attempt, saved, saved, saved.kept)]
        if not (claims := claims_to_restore(context, saved)):
            return NoRoom({}, Why.NO_STORAGE(storage=" or ".join(saved.storages)))
        wanted = placement_request(context, attempt, saved.kind, len(parts))
        hosts = HostLimits(limit=others_on(context.state, attempt))
        chosen = place_vms(context, self.room, wanted, claims, attempt, hosts)
        if chosen is None:
            return NoRoom(claims)
        return [self._restored(attempt, saved, part, host) for part, host in zip(parts, chosen, strict=True)]

    def _restored(self, attempt: Attempt, saved: Saved, part: Saved | SavedPart, host: str) -> Vm:
        state = self.context.state
        serial = state.numbers.new_serial()
        return Vm(
            id=serial,
            since=state.now,
            name=part.vm_name,
            places=(Place(host, state.source_of(host)),),
            image=saved.image,
            kind=saved.kind,
            size=part.size,
            node_size=saved.node_size,
            mac=part.mac,
            address=part.address,
            attempt=attempt.id,
            account=saved.account,
            token=token_of(state.entropy, serial),  # what still comes for the VM that was saved is not for this one
            saved=saved.name_of(part),
            storage="" if saved.kept else self.context.hosts[host].storage_of(saved),
        )


def claims_to_restore(context: Context, saved: Saved) -> HostMap[Size]:
    """What each VM that goes on as it was saved claims, on the hosts that can restore it."""
    largest = max((part.size for part in saved.parts), key=lambda size: size.memory)  # by the sizes of their templates
    able = every_host(context, largest, lambda host: bool(host.storage_of(saved)) and saved.image in host.images)
    return able.map(lambda host, size: vm_claim(size, host, saved.image, saved.kind))


def supply_missing(context: Context, missing: VmsMissing) -> None:
    """Plan the VMs that an attempt lacks, or give its job back to the gate if there is no room for them now.

    Its reason is then why it lacks them. The room may lack because the failed VMs are not gone yet, and admission says
    what the job waits for."""
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
        why = Why.AND(missing.reason, Why.IMAGELESS()) if imageless else missing.reason
        state.move(return_attempt(attempt, Event.GAVE_UP, why, failed=missing.counts and not imageless))
        return
    story = describe(choice, vms, **placed_by(context, attempt, choice, vms))
    again = replace_vms(attempt, missing, story)
    state.move(again, *(plan_vm(vm) for vm in vms), make=claims_of(context, vms))
