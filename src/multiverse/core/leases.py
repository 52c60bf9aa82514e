"""When a host is leased from the scheduler, and when it is given back.

Jobs that wait for room are distributed in their order, as admission would: to what is free, to leases that are coming,
then to new leases, which are asked for once the jobs have waited for a while. A coming lease that no job needs is given
up, and a host without a VM is given back after a time, unless a job is about to use it.

Nothing oscillates: a job that would not fit into what is left of a lease is no reason for one, and after a useless
lease the next one of its partition waits, each time for longer (`Forecast.lease_rest`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from multiverse.core.capacity.room import HostLimits, room_of
from multiverse.core.capacity.sizes import empty_capacity, template_claim, template_size, vm_claim, vm_claims, vm_size
from multiverse.core.capacity.usable_hosts import for_attempt, may_be_preempted, surely_ends_by
from multiverse.core.capacity_index import changed, how_many
from multiverse.core.clones.kinds import choose_clones, node_request, on_hosts_making
from multiverse.core.clones.supply import claims_to_restore
from multiverse.core.context import Context
from multiverse.core.machines.lease import plan_lease, release_lease
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Host, KnownHost
from multiverse.core.model.identity import lease_name, token_of
from multiverse.core.model.job import COMING_LEASES, OPEN_LEASES, Attempt, Lease, LeaseSpec, LeaseState
from multiverse.core.model.reason import Why, said
from multiverse.core.model.saved import Saved
from multiverse.core.model.vm import TemplateState
from multiverse.core.policy import LeasePolicy, Policy
from multiverse.core.state import State, quarantine_on_error, why_earlier_run
from multiverse.core.transition import Event

STARTUP = 60.0  # seconds beyond a pilot's start limit until a job's first VM runs: its template is built first
ENOUGH = 1 << 30  # MiB of disk, and Mbit/s, of a host while nobody knows better


def leasable_host(context: Context, lease: LeasePolicy) -> Host | None:
    """A host as it would be leased: as an earlier one of the partition, or else with the CPUs and memory of its node
    and able to do everything. None while nobody knows the partition's nodes."""
    for one in context.state.leases_in(*OPEN_LEASES):
        known = context.state.hosts.get(one.name)
        if one.spec.partition == lease.partition and known is not None and known.value is not None:
            return known.value
    scheduler = context.world.scheduler
    return declared_host(lease, scheduler.value.leasable) if scheduler is not None else None


def declared_host(lease: LeasePolicy, leasable: Mapping[str, Size]) -> Host | None:
    """What a host that would be leased has, by what the scheduler tells of the partition's nodes."""
    node = leasable.get(lease.partition)
    if node is None:
        return None
    cpus, memory = lease.size.cpus or node.cpus, lease.size.memory or node.memory
    kinds = frozenset(kind.value for kind in CloneKind)
    return Host(lease.partition, Size(cpus, memory, ENOUGH, ENOUGH), kinds, memory_block=1, vm_overhead=0)


def leasable_hosts(leasable: Mapping[str, Size], policy: Policy) -> dict[str, KnownHost]:
    """All hosts that could be leased at the same time, by names that no host has, for what is refused at submission."""
    found = {}
    for lease in policy.leases:
        if (host := declared_host(lease, leasable)) is not None:
            for number in range(lease.most):
                name = f"{lease.partition}/{number}"
                found[name] = KnownHost(name, "", value=replace(host, name=name))
    return found


def may_use(context: Context, attempt: Attempt, lease: LeasePolicy) -> bool:
    """Whether the attempt's job would be on a host that was leased now, whatever its size."""
    if not (lease.preemptable_ok or may_be_preempted(context, attempt)):
        return False
    takes = surely_ends_by(context, attempt) - context.now
    return takes + lease.start_timeout + STARTUP <= lease.time_limit


def claims_there(context: Context, attempt: Attempt, host: Host) -> tuple[Size, Size]:
    """What a VM of the attempt, and its template, claim on the host. A VM that boots has no template."""
    policy, image, node = context.policy, context.image_of(attempt), attempt.request.size
    asked = attempt.request.kind or policy.kind
    kind = CloneKind.INSTANT if asked is CloneKind.AUTO else asked
    able = host
    if image not in host.images:  # it is copied there
        able = replace(host, images={image: frozenset({"fork", "plug_cpus", "plug_memory", "limit_disk"})})
    template = template_size(node, able, image, policy) if kind is CloneKind.INSTANT else policy.base
    claim = vm_claim(vm_size(node, template, able, policy), able, image, kind)
    frozen = template_claim(template, able, image) if kind is CloneKind.INSTANT else Size(0, 0)
    return claim, frozen


def fits_on_leases(context: Context, attempt: Attempt) -> bool:
    """Whether hosts that can be leased could hold the job, were as many leased as may be."""
    held = 0
    for lease in context.policy.leases:
        host = leasable_host(context, lease) if may_use(context, attempt, lease) else None
        if host is None:
            continue
        claim, frozen = claims_there(context, attempt, host)
        if claim.cpus <= host.capacity.cpus:
            each = how_many(claim, changed(empty_capacity(host).amounts, frozen, -1))
            held += lease.most * attempt.request.most_on_a_host(each)
    return held >= attempt.request.nodes


# --- asking and giving back -------------------------------------------------------------------------


DEPTH = 100  # waiting jobs, the first of the queue, for which hosts are leased
PATIENCE = 5.0  # so many times the idle time a host is kept at most for jobs that do not use it


@dataclass(slots=True)
class _Coming:
    """A host that is coming, or may be asked for, and what is still free on it. `lease` None: it is not asked for."""

    policy: LeasePolicy
    host: Host
    lease: Lease | None = None
    free: list[int] = field(default_factory=list)
    templates: set[tuple[str, Size]] = field(default_factory=set)
    uses: int = 0

    def __post_init__(self) -> None:
        self.free = list(empty_capacity(self.host).amounts)

    def take(self, image: str, claim: Size, frozen: Size) -> bool:
        """Take the room for one VM, and for its template if it is the first of it; whether there was enough."""
        left = changed(self.free, claim, -1)
        if (image, frozen) not in self.templates:
            left = changed(left, frozen, -1)
        if min(left) < 0 or claim.cpus > self.host.capacity.cpus:
            return False
        self.free = left
        self.templates.add((image, frozen))
        self.uses += 1
        return True


def reconcile_leases(context: Context) -> None:
    """Ask for leases that jobs need, and give others back. Needs the scheduler."""
    state = context.state
    if context.world.scheduler is None or not (context.policy.leases or state.leases):
        return
    needs = _Needs(context)
    for attempt in waiting_for_room(context):
        with quarantine_on_error(state, attempt.key):
            needs.add(attempt)
    for lease in [state.leases[number] for number in sorted(state.leases)]:
        with quarantine_on_error(state, lease.key):
            _give_back_unneeded(context, lease, needs)
    for new in needs.new:
        _request(context, new)


def waiting_for_room(context: Context) -> Iterator[Attempt]:
    """The first attempts that wait for room alone, in their order, also if no host in sight can hold them."""
    state, queue = context.state, context.state.queue
    limits = Counter(context.scheduler.limits)
    first = sorted([*queue.candidates.first(DEPTH), *queue.unfit.first(DEPTH)])[:DEPTH]
    for _, number in first:
        attempt, job = state.attempts[number], queue.job_of(number)
        limited = any(count > limits[limit] for limit, count in job.uses)
        if not job.eligible or attempt.waits_for_delay(job) or limited or state.now < attempt.not_before:
            continue
        if why_earlier_run(state, context.world, attempt):
            continue
        if context.world.user_known_since(attempt.uid) == float("inf"):
            # No host in sight may be able to hold it, so nobody else has asked who the user is.
            state.users_asked.setdefault(attempt.uid, state.now)
            continue
        limits.subtract(dict(job.uses))
        yield attempt


class _Needs:
    """Distributes waiting jobs to what is free, to the leases that are coming, and to new ones."""

    def __init__(self, context: Context) -> None:
        self._context, self._room = context, room_of(context).copy()
        # Hosts in sight that jobs are about to use, each with all hosts of the same jobs.
        self.used: defaultdict[str, set[str]] = defaultdict(set)
        self.new: list[LeasePolicy] = []
        self._hopeless: set[tuple[object, ...]] = set()  # jobs for which there is nothing
        self._claims: dict[tuple[int, frozenset[str]], Mapping[str, Size]] = {}  # on hosts in sight, of jobs alike
        self._coming = [
            _Coming(policy, host, lease)
            for lease in context.state.leases_in(*COMING_LEASES)
            if (host := leasable_host(context, policy := context.policy.lease_from(lease.spec.partition))) is not None
        ]
        # Images are brought to them; until then, no job has room there.
        self._without_images = [
            _Coming(context.policy.lease_from(lease.spec.partition), context.hosts[lease.name], lease)
            for lease in context.state.leases_in(LeaseState.IDLE)
            if lease.name in context.hosts
        ]
        self._left = Counter({one.partition: one.most for one in context.policy.leases})
        self._left.subtract(lease.spec.partition for lease in context.state.leases.values())
        self._giving_back = {lease.spec.partition for lease in context.state.leases_in(LeaseState.RELEASING)}

    def needs(self, lease: Lease) -> bool:
        return any(one.uses for one in self._coming if one.lease is not None and one.lease.id == lease.id)

    def add(self, attempt: Attempt) -> None:
        """A job takes all that it needs, or nothing. Where it gets nothing, its equals get nothing."""
        job = self._context.state.queue.job_of(attempt.id)
        saved = self._context.state.saved_for(attempt.job)
        alike = (self._context.state.queue.shape_of(attempt.id), job.limit, job.requeues, saved and saved.id)
        if alike in self._hopeless:
            return
        left = attempt.request.nodes - self._place_in_sight(attempt, saved)
        if left > 0 and not self._place_on_leases(attempt, left):
            self._hopeless.add(alike)

    def _place_in_sight(self, attempt: Attempt, saved: Saved | None) -> int:
        context = for_attempt(self._context, attempt)
        claims, on = self._claims_in_sight(context, attempt, saved), Counter[str]()

        def accept(name: str) -> bool:
            return attempt.request.most_on_a_host(on[name] + 1) > on[name]

        while on.total() < attempt.request.nodes and (chosen := self._room.place(1, claims, hosts=HostLimits(accept))):
            on.update(chosen)
        for name in on:
            self.used[name].update(on)
        return on.total()

    def _claims_in_sight(self, context: Context, attempt: Attempt, saved: Saved | None) -> Mapping[str, Size]:
        """What one VM of the attempt claims, on the hosts in sight that can make it."""
        if saved is not None:
            return claims_to_restore(context, saved)
        alike = (context.state.queue.shape_of(attempt.id), context.without)
        if alike not in self._claims:
            choice = choose_clones(context, attempt)
            able = on_hosts_making(context.image_of(attempt), choice.kind, choice.sizes)
            wanted = node_request(context, attempt, choice.kind)
            self._claims[alike] = vm_claims(wanted, able, context.hosts, context.policy) if able else {}
        return self._claims[alike]

    def _place_on_leases(self, attempt: Attempt, count: int) -> bool:
        """Take what `count` VMs need of leases; whether there was enough."""
        context, state = self._context, self._context.state
        usable = [one for one in context.policy.leases if may_use(context, attempt, one)]
        partitions = {one.partition for one in usable}
        image = context.image_of(attempt)
        bare = [one for one in self._without_images if image not in one.host.images]
        coming = [one for one in (*self._coming, *bare) if one.policy.partition in partitions]
        before = [(one, list(one.free), set(one.templates), one.uses) for one in coming]
        left = self._take(attempt, coming, count)
        new: list[_Coming] = []
        for policy in usable:
            waited = state.now - attempt.since >= policy.min_wait
            rests = state.now < context.world.forecast.lease_rest.get(policy.partition, 0.0)
            rests = rests or policy.partition in self._giving_back  # why is not in the forecast yet
            host = leasable_host(context, policy) if waited and not rests else None
            already = sum(one.policy.partition == policy.partition for one in new)
            while host is not None and left and self._left[policy.partition] > already:
                fresh = _Coming(policy, host)
                rest = self._take(attempt, [fresh], left)
                if rest == left:
                    break
                left, already = rest, already + 1
                new.append(fresh)
        if left:  # not all of it: it needs nothing yet
            for one, free, templates, uses in before:
                one.free, one.templates, one.uses = free, templates, uses
            return False
        for name in (one.lease.name for one in bare if one.lease is not None and one.uses):
            self.used[name].add(name)
        for fresh in new:
            self._left[fresh.policy.partition] -= 1
            self.new.append(fresh.policy)
        self._coming += new
        return True

    def _take(self, attempt: Attempt, hosts: list[_Coming], count: int) -> int:
        image = self._context.image_of(attempt)
        for one in hosts:
            claim, frozen = claims_there(self._context, attempt, one.host)
            may = attempt.request.most_on_a_host(count)
            while count and may and one.take(image, claim, frozen):
                count, may = count - 1, may - 1
        return count


def _request(context: Context, policy: LeasePolicy) -> None:
    state = context.state
    number = state.numbers.new_lease_id()
    name = lease_name(state.site, number)
    # Numbers of VMs and of leases are the same now and then, and their tokens must not be.
    token = token_of(f"{context.state.entropy}/{name}", number)
    spec = LeaseSpec(name, token, policy.partition, policy.size, policy.time_limit, policy.account, policy.user)
    state.move(plan_lease(Lease(number, state.now, spec), Why.JOBS_WAIT()))


def _give_back_unneeded(context: Context, lease: Lease, needs: _Needs) -> None:
    state = context.state
    if lease.quarantined:
        return
    policy = context.policy.lease_from(lease.spec.partition)
    match lease.state:
        case LeaseState.PLANNED | LeaseState.WAITING if not needs.needs(lease):
            state.move(release_lease(lease, Event.RELEASED, Why.NO_JOB_NEEDS()))
        case LeaseState.IDLE if not state.vms_on(lease.name):
            idle = state.now - lease.since
            kept = lease.name in needs.used and _kept_for_jobs(state, lease, needs.used[lease.name], policy)
            drain = state.drains.get(lease.name)
            if drain is not None and drain.begins <= context.now:
                state.move(release_lease(lease, Event.RELEASED, said(drain.reason) or Why.OPERATOR_DRAINED()))
            elif idle >= policy.idle and not kept:
                state.move(release_lease(lease, Event.RELEASED, Why.WAS_IDLE(limit=policy.idle)))


def _kept_for_jobs(state: State, lease: Lease, used: set[str], policy: LeasePolicy) -> bool:
    """Whether an idle host is kept for jobs. They start once the last of the hosts in `used` has its template."""
    templates = [one for host in sorted(used) for one in state.templates_on(host)]
    built = [one.since for one in templates if one.state is TemplateState.READY]
    builds = any(one.state is TemplateState.BUILDING for one in templates)
    return builds or state.now - max([lease.since, *built]) < PATIENCE * policy.idle
