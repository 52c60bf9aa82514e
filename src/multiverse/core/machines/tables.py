"""All state machines together."""

from __future__ import annotations

from collections.abc import Iterator

from multiverse.core.machines.attempt import ACTING_ATTEMPTS, ATTEMPT, AWAITED_ATTEMPTS, attempt_effect
from multiverse.core.machines.host import HOST, host_effect
from multiverse.core.machines.lease import ACTING_LEASES, LEASE, lease_effect
from multiverse.core.machines.offer import OFFER, offer_effect
from multiverse.core.machines.template import ACTING_TEMPLATES, TEMPLATE, template_effect
from multiverse.core.machines.vm import ACTING_VMS, AWAITED_VMS, VM, vm_effect
from multiverse.core.model import Attempt, HostState, KnownHost, Lease, Offer, Row, Template, TemplateState, Vm, VmState
from multiverse.core.state import State
from multiverse.core.transition import Awaiting, Effect, Tables

TABLES = Tables({"attempt": ATTEMPT, "vm": VM, "offer": OFFER, "template": TEMPLATE, "host": HOST,
                 "lease": LEASE})  # fmt: skip


def effect_of(row: Row) -> Effect | None:
    """What the row's state permits. Derived from the row, never stored."""
    match row:
        case Attempt():
            return attempt_effect(row)
        case Vm():
            return vm_effect(row)
        case Offer():
            return offer_effect(row)
        case Template():
            return template_effect(row)
        case KnownHost():
            return host_effect(row)
        case Lease():
            return lease_effect(row)


def awaited_rows(state: State) -> list[tuple[Vm | Attempt, Awaiting]]:
    """The rows for whose sake the scheduler is read, each with when it may go on."""
    vms = [(vm, AWAITED_VMS[vm.state]) for vm in state.vms_in(*AWAITED_VMS)]
    return [*vms, *((one, AWAITED_ATTEMPTS[one.state]) for one in state.attempts_in(*AWAITED_ATTEMPTS))]


def note_unconfirmed(state: State) -> None:
    """These rows are those of an earlier run of the daemon, perhaps of a copy that is older than its end: names of VMs
    are not given again, and what has come since may need the room of a template. So what was to be made then is made
    only if it is seen."""
    state.unconfirmed.update(vm.key for vm in state.vms_in(VmState.PLANNED))
    state.unconfirmed.update(template.key for template in state.templates_in(TemplateState.BUILDING))


def permitted_effects(state: State) -> Iterator[tuple[Row, Effect]]:
    """The effects that the live rows permit, at most one under each key: an offer's gives way to its VM's. A VM that an
    earlier run of the daemon planned is not created, nor is such a template built, unless it was seen."""
    for attempt in state.attempts_in(*ACTING_ATTEMPTS):
        if effect := attempt_effect(attempt):
            yield attempt, effect
    offered = [vm for id_ in sorted(state.offers) if (vm := state.vms.get(id_))]
    acting = {vm.id: vm for vm in [*state.vms_in(*ACTING_VMS), *offered]}
    for _, vm in sorted(acting.items()):
        unconfirmed = vm.state is VmState.PLANNED and vm.key in state.unconfirmed
        offer = state.offers.get(vm.id)
        if not unconfirmed and (effect := vm_effect(vm) or (offer_effect(offer) if offer else None)):
            yield vm, effect
    for host in state.hosts_in(HostState.FENCING):
        if effect := host_effect(host):
            yield host, effect
    for lease in state.leases_in(*ACTING_LEASES):
        if effect := lease_effect(lease):
            yield lease, effect
    for template in state.templates_in(*ACTING_TEMPLATES):
        unconfirmed = template.state is TemplateState.BUILDING and template.key in state.unconfirmed
        if not unconfirmed and (effect := template_effect(template)):
            yield template, effect
