"""The warm pools: release useless spares, create missing ones, and offer joined ones to jobs as they come."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from multiverse.core.avoidance import is_tried
from multiverse.core.capacity.room import Blockage, HostLimits, room_of
from multiverse.core.capacity.sizes import short_of_memory, template_size
from multiverse.core.clones.kinds import TemplateWish, ask_for_template, hosts_making
from multiverse.core.clones.spares import awaiting_job, fit_to_serve, release_spare, spare_claim, spare_size, spares
from multiverse.core.clones.supply import CloneRequest, plan_vms
from multiverse.core.context import Context
from multiverse.core.machines.offer import open_offer, withdraw_offer
from multiverse.core.machines.vm import plan_vm
from multiverse.core.model.basics import CloneKind
from multiverse.core.model.host import Claim, Host
from multiverse.core.model.job import Attempt, AttemptState, NodeState, first_on
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.model.vm import LEAVING_STATES, OfferState, TemplateState, Vm, VmState
from multiverse.core.policy import Policy, Pool, wait_for


def may_offer(context: Context, vm: Vm) -> bool:
    """Whether a joined spare may be offered to jobs: it never was, is an idle node, and fit to serve."""
    node = context.scheduler.nodes.get(vm.name)
    fresh = vm.state is VmState.JOINED and context.state.offer_of(vm) is None
    idle = node is not None and node.state is NodeState.IDLE and not node.reserved
    can = context.scheduler.offers is not None
    return can and fresh and idle and is_offered(vm, context.policy) and fit_to_serve(context, vm)


def is_offered(vm: Vm, policy: Policy) -> bool:
    return any(pool.offer for pool in policy.pools if pool.has(vm))


BEING_CREATED = (VmState.PLANNED, VmState.STARTING)


def reconcile_offers(context: Context, blockage: Blockage) -> None:
    state, kept = context.state, first_on(context.scheduler.reservations, context.now)
    for vm in spares(state):
        offer = state.offers.get(vm.id)
        offered = is_offered(vm, context.policy)
        if offer is not None and offer.state is OfferState.OPEN:
            if kept or blockage is Blockage.ROOM:
                state.move(withdraw_offer(offer, kept.why() if kept else Why.JOBS_WAIT()))
            elif not offered:
                state.move(withdraw_offer(offer, Why.POOL_OFFERS_NONE()))
        elif offer is not None and offer.state is OfferState.CLOSED and offered and not blockage and not kept:
            if not _is_another_changing(context, vm):
                release_spare(state, vm, Why.UNTAKEN())  # another is made and offered
        elif not blockage and not kept and may_offer(context, vm):
            state.move(open_offer(vm, state.now))


def _is_another_changing(context: Context, spare: Vm) -> bool:
    """Whether another such spare is being made or released: they are replaced one by one."""
    changing = (*BEING_CREATED, VmState.PARKED, *LEAVING_STATES, VmState.RETIRING)
    return any(
        vm.attempt is None and (vm.pool, vm.image) == (spare.pool, spare.image)
        for vm in context.state.vms_in(*changing)
    )


LAUNCH = 1.0  # seconds from a job's running, as Slurm shows it, until its script has begun


def reconcile_pools(context: Context, blockage: Blockage) -> None:
    """Bring every pool to its size. Nothing is made while jobs wait for room or a turn, nothing is on offer while jobs
    wait for room, neither during a reservation. Spares that were taken count until their jobs come."""
    if context.world.scheduler is None or not context.world.sees_hosts:
        return
    if context.state.closing:
        context = replace(context, without=context.state.closing)
    state, hosts = context.state, context.hosts
    for vm in spares(state):
        if vm.host in hosts and short_of_memory(hosts[vm.host]):
            release_spare(state, vm, Why.HOST_TIGHT(host=vm.host))
    unwanted = {vm.id: vm for vm in spares(state)}
    kept = first_on(context.scheduler.reservations, context.now)
    for pool in context.policy.pools:
        mine = [vm for vm in unwanted.values() if pool.has(vm)]
        for vm in mine:
            del unwanted[vm.id]
        mine = [vm for vm in mine if not _release_if_spent(context, vm, pool)]
        wanted = wanted_of(context, pool)
        for vm in mine[: max(0, len(mine) - wanted)]:  # the oldest
            release_spare(state, vm, Why.POOL_KEEPS(wanted=wanted))
        taken = sum(pool.has(vm) for vm in awaiting_job(state))
        lacking = min(wanted, pool.most - taken) - len(mine)
        if not blockage and not kept and lacking > 0 and _may_make(context, pool):
            _refill(context, pool, lacking)
    for vm in unwanted.values():
        release_spare(state, vm, Why.NO_POOL())
    reconcile_offers(context, blockage)


def wanted_of(context: Context, pool: Pool) -> int:
    forecast = context.world.forecast
    seconds = context.policy.takes(pool.image, CloneKind.INSTANT, forecast)
    return pool.wanted(forecast.arrivals.get(pool.image, 0.0), seconds)


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """How it stands with a pool: numbers of its spares."""

    pool: Pool
    wanted: int  # now
    ready: int
    creating: int
    offered: int  # of those ready, to jobs as they come


def pool_status(context: Context) -> list[PoolStatus]:
    shown = context.world.scheduler.value.offers if context.world.scheduler else {}
    found = []
    for pool in context.policy.pools:
        mine = [vm for vm in spares(context.state) if pool.has(vm)]
        ready = sum(vm.state.value == pool.depth.value for vm in mine)
        opened = [vm for vm in mine if context.state.offer_of(vm) is OfferState.OPEN]
        offered = sum((shown or {}).get(vm.name) is False for vm in opened)
        found.append(PoolStatus(pool, wanted_of(context, pool), ready, len(mine) - ready, offered))
    return found


def _has_idle_cpus(context: Context, host: Host) -> bool:
    """Whether another spare slows down no job that starts: half of the machine's CPUs are enough for both."""
    cpus = (host.machine or host.capacity).cpus
    at_work = 0
    for vm in context.state.vms_on(host.name):
        attempt = context.state.attempt_of(vm)
        at_work += _is_starting(attempt, context.state.now) if attempt is not None else vm.state in BEING_CREATED
    return at_work < max(1, cpus // 2)


def _is_starting(attempt: Attempt, now: float) -> bool:
    """From its admission until its script has begun: some time after the job runs."""
    if attempt.state is AttemptState.ALLOCATED:
        return now - attempt.since < LAUNCH
    starting = (AttemptState.CLAIMED, AttemptState.SPAWNING, AttemptState.SPAWNED, AttemptState.ADDING_USER)
    return attempt.state in starting


def _may_make(context: Context, pool: Pool) -> bool:
    """Not while a spare that failed is being destroyed, and not before its image's rest is over."""
    failed = any(
        vm.pool and vm.attempt is None and vm.image == pool.image
        for vm in context.state.vms_in(VmState.ENDING, VmState.REMOVING)
    )
    return not failed and context.state.now >= context.world.forecast.rest.get(pool.image, 0.0)


def _release_if_spent(context: Context, vm: Vm, pool: Pool) -> bool:
    if why := _why_spent(context, vm, pool):
        release_spare(context.state, vm, why)
    elif why := _why_unfit(context, vm):
        release_spare(context.state, vm, why, unfit=True)
    return bool(why)


def _why_unfit(context: Context, vm: Vm) -> Reason | None:
    """Why the spare cannot serve although nothing has changed: a daemon in it has ended, or its node is unusable."""
    node, seen = context.scheduler.nodes.get(vm.name), context.world.vm(vm)
    if vm.state in (VmState.PARKED, VmState.JOINED) and seen is not None and seen.reason:
        return said(seen.reason)
    unusable = node is None or node.is_unusable
    if vm.state is VmState.JOINED and context.world.node_began(vm.name) > vm.since and unusable:
        return Why.NODE_STATE(said(node.reason), found=node.state) if node else Why.NODE_GONE()
    return None


def _why_spent(context: Context, vm: Vm, pool: Pool) -> Reason | None:
    state = context.state
    which, host = vm.place.template, context.hosts.get(vm.host)
    template = state.template_for(which) if which else None
    if host is not None and vm.image not in host.images:
        return Why.IMAGE_GONE()
    if template is None or template.state is not TemplateState.READY:
        return Why.TEMPLATE_GONE()
    if pool.is_too_old(vm, state.now):
        return Why.TOO_OLD(limit=pool.max_age)
    return None


def _refill(context: Context, pool: Pool, lacking: int) -> None:
    """Plan spares beside what is being made for jobs: half of a turn, one at least."""
    state, policy, kind = context.state, context.policy, CloneKind.INSTANT
    if state.leases:  # a host is leased for jobs, and its spares would keep it
        context = replace(context, without=context.without | state.leased)
    context = context.without_avoided(pool.image)
    hosts, room = context.hosts, room_of(context)
    able = hosts_making(context, pool.image, kind)
    templates = able.map(lambda host, _: template_size(pool.size, host, pool.image, policy))
    wish = TemplateWish(pool.image, "", templates)
    ready = wish.ready()
    if not ready:
        ask_for_template(context, wish, room, Why.POOL_NEEDS())
        return
    being_made = Counter(vm.attempt is None for vm in state.vms_in(*BEING_CREATED))
    turns = policy.provisioning - being_made[False]  # VMs of jobs come first
    may = max(1, turns // 2) - being_made[True] if turns > 0 else 0
    sizes = ready.map(lambda host, template: spare_size(pool, template, host, policy))
    claims = sizes.map(lambda host, size: spare_claim(pool, size, host))

    def accept(name: str) -> bool:
        parent = (name, pool.image, kind)
        if name in state.faults.get(pool.image, ()) and is_tried(state, name, pool.image):
            return False  # another one is tried there first
        return not wait_for(parent, state.paced, state.now, policy) and _has_idle_cpus(context, hosts[name])

    wanted = CloneRequest(pool.image, kind, pool.size, templates, pool=pool.depth, sizes=sizes)
    for _ in range(min(lacking, may)):
        chosen = room.place(1, claims, hosts=HostLimits(accept))
        vms = plan_vms(context, wanted, chosen) if chosen else None
        if vms is None:
            return
        state.move(
            *(plan_vm(vm, Why.FOR_POOL(depth=pool.depth, image=pool.image)) for vm in vms),
            make=(Claim(vm.key, vm.host, claims[vm.host]) for vm in vms),
        )
