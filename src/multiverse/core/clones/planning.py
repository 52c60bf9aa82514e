"""The rows of new VMs, and what they claim."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multiverse.core.capacity.placement import FALLBACK, placement_of
from multiverse.core.capacity.placement_policies import address_of
from multiverse.core.capacity.sizes import vm_claim, vm_size
from multiverse.core.clones.kinds import Choice, on_hosts_making
from multiverse.core.clones.pacing import paid
from multiverse.core.clones.templates import wish_of
from multiverse.core.context import Context
from multiverse.core.model import Attempt, Claim, CloneKind, Depth, Place, Reason, Size, TemplateKey, Vm, Why
from multiverse.core.model.identity import mac_of, token_of, vm_name


@dataclass(frozen=True, slots=True)
class CloneRequest:
    """VMs to be planned: of which image, kind and account, what their nodes declare, and by host the size of their
    template, which is also where their sizes come from unless `sizes` gives them."""

    image: str
    kind: CloneKind
    node: Size
    templates: Mapping[str, Size]
    account: str = ""
    pool: Depth | None = None
    attempt: int | None = None
    sizes: Mapping[str, Size] | None = None


def _skip_names_of_nodes(context: Context, count: int) -> None:
    """Let the next serials be ones whose names no node has, also in a database that has lost its place."""
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
    """What an attempt's VMs are to be."""
    request = attempt.request
    image = context.image_of(attempt)
    return CloneRequest(image, choice.kind, request.size, choice.sizes, request.account, attempt=attempt.id)


def describe(choice: Choice, vms: Iterable[Vm], **figures: Any) -> Reason:
    """What was chosen for an attempt, as its user is told."""
    return Why.CHOICE(choice.why, clones=choice.kind, hosts=[vm.host for vm in vms], **figures)


def placed_by(context: Context, attempt: Attempt, choice: Choice, made: Sequence[Vm]) -> dict[str, str]:
    """Figures of what the user is told: which policy chose the hosts of new VMs, and among how many. None where
    there is one host."""
    if not made or len(context.hosts) < 2:
        return {}
    able = on_hosts_making(context.image_of(attempt), choice.kind, choice.sizes)
    which = f"{len(able)} hosts"
    if choice.forks:
        which = f"{len(wish_of(context, attempt, able).ready())} of {which} with its template"
    name = placement_of(context, attempt)
    followed = name not in context.state.placement_faults
    return {"policy": name, "among": which} if followed else {"policy": FALLBACK, "among": which, "failed": name}


def claims_of(context: Context, vms: Iterable[Vm]) -> list[Claim]:
    """What these VMs claim, each where it is placed."""
    hosts = context.with_avoided().hosts  # of a joined spare, which is taken wherever it is
    return [Claim(vm.key, vm.host, vm_claim(vm.size, hosts[vm.host], vm.image, vm.kind)) for vm in vms]
