"""VMs and templates that are on a host and that no row explains: they get rows, so that they are claimed for and kept.

That happens after a database was lost, or restored from a copy: then VMs exist, with running jobs, of which it knows
nothing. What is done about an orphan is decided by its step (`core.machines.vm`).
"""

from __future__ import annotations

from dataclasses import replace

from multiverse.core.model import (
    Claim,
    CloneKind,
    Host,
    HypervisorView,
    Size,
    Template,
    TemplateCondition,
    TemplateSeen,
    TemplateState,
    Vm,
    VmCondition,
    VmSeen,
    VmState,
    serial_of,
)
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.sizes import template_claim
from multiverse.core.transition import Change, Event

WHY = "it was found on its host, and no record explained it"


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
        for name in sorted(name for name in view.vms if name not in state.vm_named):
            if view.vms[name].host in context.in_sight:
                _adopt_vm(context, source, view.vms[name])
        for which, seen in view.templates.items():
            broken = seen.condition is TemplateCondition.BROKEN
            if not broken and state.template_for(which) is None and seen.host in context.in_sight:
                _adopt_template(context, source, seen)


def _serves_another(context: Context, vm: Vm) -> bool:
    """Whether a spare is in use by what no row tells of, because its row is that of an older database: it was started
    and its row is parked, or a job is on its node that did not take it by an offer."""
    state, world, seen = context.state, context.world, context.world.vm(vm)
    if seen is None or world.scheduler is None or world.scheduler.began <= vm.since:
        return False
    if vm.state is VmState.PARKED:
        return seen.condition in (VmCondition.STARTING, VmCondition.RUNNING, VmCondition.PAUSED)
    return state.offer_of(vm) is None and vm.name in world.scheduler.value.occupied


def _make_orphan(context: Context, vm: Vm) -> None:
    """Its claim grows to what it has."""
    seen, host = context.world.vm(vm), context.in_sight.get(vm.host)
    size = (seen.size if seen else None) or vm.size
    orphan = replace(vm, state=VmState.ORPHAN, pool=None, size=size)
    claims = [Claim(vm.key, vm.host, _claim_of(size, seen, host))] if seen and host else []
    why = "it serves a job of which no record tells"
    context.state.move(Change(orphan, Event.FOUND, why), make=claims, free=[vm.key] if claims else ())


def _claim_of(size: Size, seen: VmSeen, host: Host) -> Size:
    """What a VM of `size` claims of which no row says what it was made of: of the disk, what its host lets it write."""
    return Size(size.cpus, size.memory + host.vm_overhead, seen.disk or size.disk, size.net)


def _adopt_vm(context: Context, source: str, seen: VmSeen) -> None:
    """Its number is a new one, because an ended row may have that of its name; what comes after has neither."""
    state, policy = context.state, context.policy
    state.skip_serials(serial_of(seen.name) + 1)
    size = seen.size or policy.base
    has_prefix = not seen.address or "/" in seen.address
    vm = Vm(
        id=state.new_serial(),
        version=0,
        state=VmState.ORPHAN,
        since=state.now,
        name=seen.name,
        host=seen.host,
        image="",
        kind=CloneKind.FULL,
        size=size,
        node_size=size,
        mac=seen.mac,
        address=seen.address if has_prefix else f"{seen.address}/{policy.subnet.prefixlen}",
        source=source,
        token=seen.token,
    )
    claim = Claim(vm.key, seen.host, _claim_of(size, seen, context.in_sight[seen.host]))
    state.move(Change(vm, Event.FOUND, WHY), make=[claim])


def _adopt_template(context: Context, source: str, seen: TemplateSeen) -> None:
    """A template that is being built holds memory already. Its row lets the build be finished."""
    state = context.state
    ready = seen.condition is TemplateCondition.READY
    template = Template(
        id=state.new_template_id(),
        version=0,
        state=TemplateState.READY if ready else TemplateState.BUILDING,
        since=state.now,
        host=seen.host,
        image=seen.image,
        size=seen.size,
        account=seen.account,
        source=source,
    )
    claim = Claim(template.key, seen.host, template_claim(seen.size, context.in_sight[seen.host], seen.image))
    state.move(Change(template, Event.FOUND, WHY), make=[claim])
