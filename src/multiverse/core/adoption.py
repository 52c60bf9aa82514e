"""VMs and templates that are on a host and that no row explains: they get rows, so that they are claimed for and kept.

That happens after a database was lost, or restored from a copy: then VMs exist, with running jobs, of which it knows
nothing. What is done about an orphan is decided by its step (`core.machines.vm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from multiverse.core.capacity.sizes import template_claim
from multiverse.core.context import Context
from multiverse.core.machines.template import adopt_template, lose_template
from multiverse.core.machines.vm import adopt_vm
from multiverse.core.model import (
    Claim,
    CloneKind,
    Host,
    HypervisorView,
    Place,
    Size,
    Template,
    TemplateCondition,
    TemplateKey,
    TemplateSeen,
    TemplateState,
    Vm,
    VmCondition,
    VmSeen,
    VmState,
    Why,
    serial_of,
)
from multiverse.core.state import State

WHY = Why.FOUND_THERE()


def adopt_unexplained(context: Context) -> None:
    """Give a row to each VM and each template in sight that has none, unless the template is broken, and take spares
    that are in use by others out of their pools. One observation is enough for that: nothing is destroyed by it."""
    state = context.state
    for vm in state.vms_in(VmState.PARKED, VmState.JOINED, VmState.RETIRING):
        if vm.is_spare and _serves_another(context, vm):
            _make_orphan(context, vm)
    for source in state.take_unadopted():
        latest = context.world.latest(source)
        view = latest.value if latest else HypervisorView()
        for which, seen in view.templates.items():
            if seen.condition is not TemplateCondition.BROKEN and seen.host in context.in_sight:
                _drop_earlier_build(state, which, seen)
                if state.template_for(which) is None:
                    _adopt_template(context, source, seen)
        for name in sorted(name for name in view.vms if name not in state.vm_named):
            if view.vms[name].host in context.in_sight:
                _adopt_vm(context, source, view.vms[name], view.templates)


def _serves_another(context: Context, vm: Vm) -> bool:
    """Whether a spare is, or was, in use by what no row tells of, because its row is that of an older database: it was
    started and its row is parked, its guest knows a user, or a job is on its node that did not take it by an offer. A
    guest of a joined spare learns of a user for the job that takes the spare, and its row has an attempt by then."""
    state, world, seen = context.state, context.world, context.world.vm(vm)
    if seen is None:
        return False
    if vm.state is not VmState.PARKED and seen.users_added:
        return True
    if world.scheduler is None or world.scheduler.began <= vm.since:
        return False
    if vm.state is VmState.PARKED:
        return seen.condition in (VmCondition.STARTING, VmCondition.RUNNING, VmCondition.PAUSED)
    return state.offer_of(vm) is None and vm.name in world.scheduler.value.occupied


def _make_orphan(context: Context, vm: Vm) -> None:
    """Its claim grows to what it has."""
    seen, host = context.world.vm(vm), context.in_sight.get(vm.host)
    size = (seen.size if seen else None) or vm.size
    orphan = replace(vm, pool=None, size=size)
    claims = [Claim(vm.key, vm.host, _claim_of(size, seen, host))] if seen and host else []
    why = Why.SERVES_UNTOLD()
    context.state.move(adopt_vm(orphan, why), make=claims, free=vm.claim_keys if claims else ())


def _claim_of(size: Size, seen: VmSeen, host: Host) -> Size:
    """What a VM of `size` claims of which no row says what it was made of: of the disk, what its host lets it write."""
    return Size(size.cpus, size.memory + host.vm_overhead, seen.disk or size.disk, size.net)


def _drop_earlier_build(state: State, which: TemplateKey, seen: TemplateSeen) -> None:
    """End the row of a template that was built again without it. Its VMs map the earlier build, whose memory is counted
    beside the new one's as long as they live (`capacity.left_behind`)."""
    row = state.template_for(which)
    if row is not None and row.state is TemplateState.READY and row.build and seen.build not in ("", row.build):
        state.move(lose_template(row, Why.REBUILT()), free=[row.claim_key])


def _place_of(
    context: Context, serial: int, source: str, seen: VmSeen, shown: Mapping[TemplateKey, TemplateSeen]
) -> Place:
    """Where a VM was found, and which template it was forked from. If no row is that of its build, the VMs of this
    build have a number that no row has, the serial of one of them made negative: so the build's memory is counted once,
    as that of a template whose row has ended."""
    state, host, build = context.state, seen.host, seen.template_build
    if not build:
        return Place(host, source)
    for row in state.templates_on(host):
        if row.build == build or (row.which in shown and shown[row.which].build == build):
            return Place(host, source, row.which, row.id)
    for place, vm in ((vm.place_on(host), vm) for vm in state.vms_on(host)):
        if place.template and (other := context.world.at(vm, place)) and other.template_build == build:
            return place
    return Place(host, source, TemplateKey(host, "", Size(0, seen.template_memory)), -serial)


def _adopt_vm(context: Context, source: str, seen: VmSeen, shown: Mapping[TemplateKey, TemplateSeen]) -> None:
    """Its number is a new one, because an ended row may have that of its name; what comes after has neither."""
    state, policy = context.state, context.policy
    state.numbers.skip_serials(serial_of(seen.name) + 1)
    size = seen.size or policy.base
    serial = state.numbers.new_serial()
    has_prefix = not seen.address or "/" in seen.address
    vm = Vm(
        id=serial,
        since=state.now,
        name=seen.name,
        places=(_place_of(context, serial, source, seen, shown),),
        image="",
        kind=CloneKind.FULL,
        size=size,
        node_size=size,
        mac=seen.mac,
        address=seen.address if has_prefix else f"{seen.address}/{policy.subnet.prefixlen}",
        token=seen.token,
    )
    claim = Claim(vm.key, seen.host, _claim_of(size, seen, context.in_sight[seen.host]))
    state.move(adopt_vm(vm, WHY), make=[claim])


def _adopt_template(context: Context, source: str, seen: TemplateSeen) -> None:
    """A template that is being built holds memory already."""
    state = context.state
    template = Template(
        id=state.numbers.new_template_id(),
        since=state.now,
        host=seen.host,
        image=seen.image,
        size=seen.size,
        account=seen.account,
        source=source,
        build=seen.build,
    )
    claim = Claim(template.key, seen.host, template_claim(seen.size, context.in_sight[seen.host], seen.image))
    found = adopt_template(template, WHY, ready=seen.condition is TemplateCondition.READY)
    state.move(found, make=[claim])
