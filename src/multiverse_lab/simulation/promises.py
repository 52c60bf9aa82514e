"""Checks of the promises that the controller makes, against what the simulated world knows to be true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from math import log2

from multiverse.core.machines.attempt import step_attempt
from multiverse.core.machines.checkpoint import step_state
from multiverse.core.machines.template import step_template
from multiverse.core.machines.vm import step_vm
from multiverse.core.model.basics import Size
from multiverse.core.model.job import OPEN_LEASES, WAITING_STATES, Attempt, AttemptState, LeaseState
from multiverse.core.model.vm import OfferState, TemplateCondition, VmState
from multiverse.core.model.world import World
from multiverse.core.policy import AVOIDED_LIMIT, Policy
from multiverse.core.rows import Rows
from multiverse.core.state import State
from multiverse.core.transition import Event, Move
from multiverse_lab.simulation.faults import IncidentKind
from multiverse_lab.simulation.guests import GuestBehaviour
from multiverse_lab.simulation.jobs import KILL_WAIT, Batch, JobRecord
from multiverse_lab.simulation.machines import DISK
from multiverse_lab.simulation.scenario import Scenario
from multiverse_lab.simulation.world import SimulatedWorld

CHANGE_WINDOW = 20.0
"""Seconds: a cancellation is justified by what the job asked for up to this long before, because a command that its
caller has given up may arrive late."""


LATE = 10.0
"""Seconds that a job may start later than expected: as many VMs as may be made at once may be being made."""


def unclaimed_vms(rows: Rows, world: SimulatedWorld, inherited: Collection[str] = ()) -> list[str]:
    """VMs that exist without a live row or without a claim on their host. There must be none at any commit, except
    `inherited` ones: those that exist as the database is replaced, until they are found."""
    claimed = {(claim.owner, claim.domain) for claim in rows.claims}
    live = {vm.name: vm for vm in rows.vms.values()}
    found = []
    for machine in (*world.machines.vms.values(), *world.machines.copies.values()):
        name = machine.spec.name
        vm = live.get(name)
        other = vm is None or vm.token not in ("", machine.spec.token)  # its row was lost, and this is an earlier one
        if other and name in inherited:
            continue
        if vm is None or (vm.key, machine.spec.host) not in claimed:
            found.append(f"VM {name} is on {machine.spec.host} and nothing is claimed for it")
    return found


def overfull_pools(rows: Rows, policy: Policy) -> list[str]:
    """Pools that have more spares than their settings allow, those included that were taken and whose job did not come.
    Spares that are being withdrawn are replaced, and may be taken all the same: as many again are allowed."""
    live = (VmState.PLANNED, VmState.PARKED, VmState.STARTING, VmState.JOINED)
    spares = [vm for vm in rows.vms.values() if vm.is_spare]
    taken = {id_ for id_, offer in rows.offers.items() if offer.state is OfferState.TAKEN}
    counts = [sum(pool.has(vm) and (vm.state in live or vm.id in taken) for vm in spares) for pool in policy.pools]
    return [
        f"the {pool.depth} pool of {pool.image} may have {pool.most} spares, and has {count}"
        for pool, count in zip(policy.pools, counts, strict=True)
        if count > 2 * pool.most
    ]


class PromisedStarts:
    """Whether the first job that waits for room starts by the time that its user was told first.

    That holds as long as it stays the first one, its user changes nothing, and no job comes and is admitted that is
    earlier in the queue. It does not where jobs do not end by their limits, or VMs not in time: with faults, with users
    who suspend jobs, with jobs that take long to be stopped, and with leased hosts, which are given back. A time that
    is void is not judged again: the user is told another one only if the two differ by more than a minute."""

    def __init__(self, scenario: Scenario) -> None:
        kinds = {action.kind for arrival in scenario.arrivals for action in arrival.actions}
        lingering = any(arrival.batch.lingers > KILL_WAIT for arrival in scenario.arrivals)
        odd = (
            scenario.world.pair.has_cloud
            or scenario.settings.pool
            or scenario.settings.lease
            or kinds & {"suspend", "save", "save_held"}
            or any(arrival.batch.save for arrival in scenario.arrivals)
            or lingering
        )
        self._apply = not odd and not is_disturbed(scenario)
        self._first: Attempt | None = None
        self._by = 0.0
        self._over = set[tuple[int, float]]()  # promises that were kept, broken or void
        self.broken: set[str] = set()
        self.kept = 0

    def check(self, state: State, now: float) -> None:
        """Look at the state after a commit, at a Unix time."""
        if not self._apply:
            return
        if self._first is not None and self._is_over(state, self._first, now):
            self._over.add((self._first.id, self._by))
            self._first = None
        if self._first is None:
            for attempt_id, by in state.promised.items():
                if (attempt_id, by) not in self._over:
                    self._first, self._by = state.attempts[attempt_id], by

    def _is_over(self, state: State, first: Attempt, now: float) -> bool:
        attempt = state.attempts.get(first.id)
        if attempt is None or self._is_void(state, attempt):
            return True
        if attempt.state is not AttemptState.QUEUED:
            self.kept += attempt.state is AttemptState.CLAIMED
            return True
        if now > self._by + LATE:
            late = f"{now - self._by:.1f} s later than it was expected to start as the first in the queue"
            self.broken.add(f"job {attempt.job.job_id} still waits {late}")
            return True
        return False

    def _is_void(self, state: State, attempt: Attempt) -> bool:
        """Whether the promise was made under other conditions."""
        jobs, first = state.queue.jobs, self._first
        job = jobs.get(attempt.job.job_id)
        if first is None or job is None or not job.eligible or attempt.request != first.request:
            return True
        admitted = [change.row for move in state.moves for change in move.changes if change.event is Event.ADMITTED]
        earlier = any(
            isinstance(row, Attempt) and (other := jobs.get(row.job.job_id)) and other.rank < job.rank
            for row in admitted
        )
        return earlier or bool(state.promised and attempt.id not in state.promised)


class LeaseWatch:
    """Checks at each commit that a host is leased only while a job waits, that no VM is planned on a leased host that
    takes none, and that no VM is left on a host when its lease is gone or it counts as off."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.broken: set[str] = set()
        self._world = world
        self._leases: set[str] = set()
        self._last_lease = self._last_vm = 0

    def look(self, rows: Rows) -> None:
        """The rows of a commit."""
        waiting = [one for one in rows.attempts.values() if one.state in WAITING_STATES]
        leases = {lease.name: lease for lease in rows.leases.values()}
        for lease in rows.leases.values():
            if lease.id > self._last_lease and lease.state is LeaseState.PLANNED and not waiting:
                self.broken.add(f"{lease.name} was asked for, and no job waits")
        for name in self._leases - leases.keys():
            if left := self._world.machines.vms_on(name):
                self.broken.add(f"{name} is gone, and {', '.join(left)} go on there")
        for vm in rows.vms.values():
            of = leases.get(vm.host)
            if vm.id > self._last_vm and vm.state is VmState.PLANNED and of is not None and of.state not in OPEN_LEASES:
                self.broken.add(f"VM {vm.name} was planned on {vm.host}, whose lease is {of.state}")
        self._leases = set(leases)
        self._last_lease, self._last_vm = max([self._last_lease, *rows.leases]), max([self._last_vm, *rows.vms])


class BrakeWatch:
    """Whether what fails again and again is braked, where nothing else goes wrong: how often VMs are tried on a host
    where they fail, that no such failure counts as an attempt of a job, and that no run begins before the scheduler's
    own delay is over unless we caused the restart."""

    KINDS = (
        IncidentKind.HOST_REFUSES,
        IncidentKind.HOST_SPOILS,
        IncidentKind.HOST_MUTES,
        IncidentKind.LAUNCHES_FAIL,
        IncidentKind.CONTROLLER_CRASH,
    )

    def __init__(self, scenario: Scenario) -> None:
        quiet = not scenario.hypervisor_odds.rates and not scenario.scheduler_odds.rates and scenario.faults is None
        kinds = {one.kind for one in scenario.incidents}
        self._applies = quiet and kinds <= set(self.KINDS) and not scenario.world.pair.has_cloud
        self._applies = self._applies and scenario.world.guests == GuestBehaviour()
        self._applies = self._applies and not scenario.world.cluster.forgets  # nodes register late if it is killed
        self._scenario = scenario
        # What was planned and not made when a controller crashed is no fault of a host.
        self._counts = not scenario.crashes and IncidentKind.CONTROLLER_CRASH not in kinds
        self._broken = set[str]()

    def look(self, state: State) -> None:
        """The state after a commit."""
        if not self._applies or not self._counts:
            return
        for attempt in state.attempts.values():
            restored = state.saved_for(attempt.job) is not None  # it counts, whoever is at fault
            if attempt.tries and attempt.failed_on and not restored:
                self._broken.add(f"job {attempt.job.job_id} was charged for the failures of {attempt.failed_on}")

    def violations(self, world: SimulatedWorld, now: float) -> list[str]:
        """What was not braked until `now` (virtual seconds)."""
        if not self._applies:
            return []
        tried = Counter((host, image) for _, host, image, _ in world.machines.tried)
        widest = max((arrival.batch.nodes for arrival in self._scenario.arrivals), default=1)
        pacing = self._scenario.settings.pacing
        # Those that were on their way at the first failure, and then one job at a time, after a time that is doubled.
        later = 2 + log2(max(1.0, now / pacing.retry_base)) + now / AVOIDED_LIMIT
        most = pacing.provisioning + widest + widest * later * (1 + len(self._scenario.crashes))
        often = [
            f"{count} VMs of {image} were tried on {host}, where they fail, in {now:.0f} s"
            for (host, image), count in sorted(tried.items())
            if count > most
        ]
        return [*sorted(self._broken), *often, *world.cluster.hasty]


class OverflowWatch:
    """Checks at each commit that jobs of a partition that overflows get VMs in their order: none is admitted while
    one before it that asks for the same could be."""

    def __init__(self) -> None:
        self.broken: set[str] = set()

    def look(self, state: State) -> None:
        """The state after a commit."""
        admitted = [change.row for move in state.moves for change in move.changes if change.event is Event.ADMITTED]
        for row in admitted:
            if isinstance(row, Attempt) and row.origin:
                self.broken.update(self._passed_over(state, row))

    @staticmethod
    def _passed_over(state: State, admitted: Attempt) -> Iterator[str]:
        jobs = state.queue.jobs
        job = jobs.get(admitted.job.job_id)
        for other in state.attempts_in(AttemptState.QUEUED):
            before = jobs.get(other.job.job_id)
            if job is None or before is None or before.ref != other.job or before.rank >= job.rank:
                continue
            same = (other.request, other.origin, other.uid) == (admitted.request, admitted.origin, admitted.uid)
            # Leased hosts take the jobs that end in time and can be queued again.
            same = same and (job.limit, job.requeues) == (before.limit, before.requeues)
            late = other.not_before > state.now or other.quarantined
            if same and before.eligible and before.at_origin and not late:
                yield f"job {job.ref.job_id} was given a VM ahead of job {before.ref.job_id}, which asks for the same"


def violations_at_end(scenario: Scenario, world: SimulatedWorld, rows: Rows) -> list[str]:
    """What is wrong after all jobs have ended and everything should have been removed."""
    found = [*world.violations(), *world.unfinished(), *world.leftovers()]
    found += unjustified_cancellations(scenario, world.cluster.history)
    found += unjustified_refusals(scenario, world.cluster.refused)
    found += [f"{row.key} is still {row.state}: {row.reason}" for row in rows.attempts.values()]
    found += [f"{row.key} is still {row.state}: {row.reason}" for row in rows.vms.values()]
    found += [f"{row.name} is still {row.state}: {row.reason}" for row in rows.leases.values()]
    found += [f"{row.key} is still {row.state}: {row.reason}" for row in rows.saved.values()]
    found += [f"users are told that {name} is at {where}" for name, where in world.cluster.addresses.items()]
    if not is_disturbed(scenario):
        found += [f"the time of {name} was over, and a job ran on it" for name in world.pilots.overran]
    found += [f"claim of {claim.owner} is left" for claim in rows.claims if claim.owner.kind != "template"]
    return found


def unclaimed_templates(rows: Rows, world: SimulatedWorld) -> list[str]:
    """Templates that exist without a claim. A claim for a template that does not exist is only too cautious. What is
    left on a physical node that was set DOWN goes as it is rebooted; its host has gone with its lease."""
    claimed = {rows.templates[claim.owner.id].which for claim in rows.claims if claim.owner.kind == "template"}
    seen = world.machines.templates.items()
    existing = {
        which for which, one in seen if one.condition is not TemplateCondition.BROKEN and which.host in rows.hosts
    }
    return [f"template {which} exists and nothing is claimed for it" for which in sorted(existing - claimed)]


def is_disturbed(scenario: Scenario) -> bool:
    """Whether calls fail, or anything breaks."""
    return bool(
        scenario.incidents
        or scenario.faults
        or scenario.hypervisor_odds.rates
        or scenario.scheduler_odds.rates
        or scenario.world.guests != GuestBehaviour()
        or scenario.world.cluster.forgets
    )


def unjustified_cancellations(scenario: Scenario, history: Iterable[JobRecord]) -> list[str]:
    """Jobs that the controller cancelled for a reason that was not true.

    Jobs whose run was ended by the controller are checked when that happens: see `Machines.destroy`,
    `Cluster.stopped_by_controller` and `Cluster.preempt`."""
    found = []
    disturbed = is_disturbed(scenario)
    removed = _may_lose_hosts(scenario)
    boots = {image.name: image.boots for image in scenario.world.images}
    for job in history:
        if job.result != "CANCELLED" or job.by_user or (job.preempted and not job.revoked):
            continue
        if job.batch.origin:
            found.append(f"job {job.job_id} of partition {job.batch.origin} was cancelled by us: {job.revoked!r}")
            continue
        true_reasons = {
            job.batch.problem: bool(job.batch.problem),
            "; the largest that fits is ": removed
            or not all(_surely_fits(scenario, batch) for batch in _recent_requests(job)),
            f"no user has the uid {job.batch.uid}": job.batch.uid not in scenario.world.users,
            "no VM could be created": disturbed or not boots.get(job.batch.image or "slim", False),
        }
        if not any(true and reason in job.revoked for reason, true in true_reasons.items()):
            found.append(f"job {job.job_id} was cancelled by us, which nothing justifies: {job.revoked!r}")
    return found


def _may_lose_hosts(scenario: Scenario) -> bool:
    """Whether hosts may be removed, which do not count then for what a job may ask for."""
    return any(one.kind is IncidentKind.HOST_REMOVED for one in scenario.incidents)


def unjustified_refusals(scenario: Scenario, refused: Iterable[Batch]) -> list[str]:
    """Jobs that were refused at submission although the hosts could hold them."""
    removed = _may_lose_hosts(scenario)
    fitting = [batch for batch in refused if not removed and _surely_fits(scenario, batch)]
    return [f"a job of {batch.nodes} x {batch.size} was refused, which nothing justifies" for batch in fitting]


def _surely_fits(scenario: Scenario, batch: Batch) -> bool:
    """Whether the empty hosts could hold a job even if it needed four times the memory that it asks for, and could
    write to all of its VMs' disks."""
    each, size = 4 * (batch.size.memory + 256), batch.size
    disk = max(DISK.whole, size.disk, scenario.settings.image.scratch) + DISK.overhead
    most = batch.per_host or batch.nodes

    def held(has: Size) -> int:
        by_net = has.net // size.net if size.net else most
        return min(has.cpus // size.cpus, has.memory // each, (has.disk - DISK.overhead) // disk, by_net, most)

    return sum(held(host.capacity) for host in scenario.world.hosts) >= batch.nodes


def _recent_requests(job: JobRecord) -> list[Batch]:
    """What a cancelled job asked for when it was cancelled and within the window before."""
    if job.changed is None or job.cancelled - job.changed[0] >= CHANGE_WINDOW:
        return [job.batch]
    return [job.batch, job.changed[1]]


def moves_at_rest(state: State, world: World, now: float, policy: Policy) -> list[Move]:
    """The moves of rows that are not to be looked at before something changes. There must be none. The age of saved
    jobs does not count: it is looked at every minute (`changes.LOOK_AT_STATES`)."""
    scratch = State(state.rows(), state.tables)
    scratch.begin(now, {})
    for saved_id in scratch.saved.keys() - state.dirty.saved:
        step_state(scratch, saved_id, world, replace(policy, save_keep=0.0))
    for vm_id in scratch.vms.keys() - state.dirty.vms:
        step_vm(scratch, vm_id, world, policy)
    for template_id in scratch.templates.keys() - state.dirty.templates:
        step_template(scratch, template_id, world)
    for attempt_id in scratch.attempts.keys() - state.dirty.attempts:
        step_attempt(scratch, attempt_id, world, policy)
    return scratch.moves


def orphans_by_looking_at_all(state: State, world: World) -> list[tuple[str, str]]:
    """What `changes.orphans` finds by what has changed, found by looking at all that is shown."""
    if world.scheduler is None:
        return []
    view = world.scheduler.value
    shown = dict.fromkeys(view.nodes.keys() - state.vm_named.keys(), "")
    for source, one in world.views.items():
        shown.update((name, source) for name in one.vms if name not in state.vm_named)
    return sorted((name, source) for name, source in shown.items() if not view.may_have_a_job(name))
