"""The settings that decisions depend on, and the rules that follow from them alone."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from multiverse.core.model.basics import CloneKind, Depth, Placement, Size
from multiverse.core.model.job import Attempt, Job
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.vm import Vm, VmState
from multiverse.core.model.world import Forecast

AVOIDED_LIMIT = 600.0  # seconds for which a host on which VMs fail is avoided at most
PAUSE_BASE, PAUSE_LIMIT = 15.0, 1800.0  # seconds before the next run after two short ones; doubled for each further one


@dataclass(frozen=True, slots=True)
class Pool:
    """A warm pool: VMs of one image that exist, as far as `depth` says, before any job asks for them."""

    image: str
    depth: Depth
    least: int  # spares that are kept at least
    most: int  # at most; in between as the arrival rate asks for
    size: Size  # what nodes of joined spares declare
    max_age: float = 3600.0  # seconds; then a spare is replaced
    offer: bool = True  # a job may take a joined spare as it is submitted

    def has(self, vm: Vm) -> bool:
        """Whether the VM is such a one as the pool keeps."""
        same = vm.image == self.image and vm.pool is self.depth
        return same and (self.depth is Depth.PARKED or vm.node_size == self.size)

    def is_too_old(self, vm: Vm, now: float) -> bool:
        return vm.state in (VmState.PARKED, VmState.JOINED) and now - vm.since > self.max_age

    def wanted(self, rate: float, seconds: float) -> int:
        """How many spares to have: as many as are used in `seconds`, and twice the square root for chance."""
        used = rate * seconds
        return min(self.most, max(self.least, math.ceil(used + 2 * math.sqrt(used)))) if used > 0.05 else self.least


@dataclass(frozen=True, slots=True)
class Backfill:
    """Whether later jobs may start ahead of the first one that waits for room."""

    depth: int = 100  # later jobs that are looked at in a pass
    overtakes: int = 20  # how often the first one is overtaken while nobody knows when it starts


@dataclass(frozen=True, slots=True)
class LeasePolicy:
    """Hosts that may be leased from a partition: see `config.LeaseSettings`. Times in seconds."""

    partition: str
    size: Size = Size(0, 0)  # CPUs and MiB; no CPUs: a whole node
    account: str = ""
    user: str = ""
    time_limit: float = 14400.0
    most: int = 1  # at a time
    min_wait: float = 10.0
    idle: float = 120.0
    start_timeout: float = 120.0
    preemptable_ok: bool = False
    fence: bool = False


@dataclass(frozen=True, slots=True)
class OverflowPolicy:
    """A partition of physical nodes whose waiting jobs may run in VMs."""

    partition: str
    constraint: str = ""  # that they must ask for; empty: all may
    accounts: tuple[str, ...] = ()  # of these; empty: of all


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that decisions depend on. Times in seconds, memory and disk in MiB."""

    subnet: ipaddress.IPv4Network
    gateway: str
    first_address: int = 256
    image: str = "slim"
    kind: CloneKind = CloneKind.INSTANT
    base: Size = Size(1, 256)
    guest_reserve: int = 80
    scratch: int = 0  # what each job may write to its VM's disk, also if it asks for less
    settle: float = 30.0  # where memory is over-committed, how long a VM serves before it counts as what it takes
    provisioning: int = 4
    silence: float = 60.0  # how long a source is unknown before its VMs no longer count for their jobs
    spawn_timeout: float = 60.0
    sleep_after: float = 0.0  # seconds that a job is suspended before its VM frees its memory; 0: it keeps that
    save_timeout: float = 60.0  # for each step of saving a job that can be undone
    save_before: float = 120.0  # how long before its time limit a job is saved that does not say so itself
    save_max_runs: int = 7  # of a job: the last one is not saved
    save_checkpoint_every: float = 60.0  # seconds between two checkpoints of a job at the least
    save_checkpoints: int = 2  # of a job that are kept
    save_user_quota: int = 0  # bytes that the states of one user may take; 0: any
    save_site_quota: int = 0  # the same of all users
    save_keep: float = 0.0  # seconds for which a state waits for its job; 0: for ever
    save_encrypt: bool = False  # whether states are encrypted
    save_no_requeue: bool = False  # jobs that the scheduler is not to queue again can be saved, too
    moves_at_once: int = 2  # VMs that move from and to one host
    move_timeout: float = 660.0  # from the beginning of a move until it is given up
    move_again: float = 60.0  # before a VM of a drained host is to move again that did not move
    evict_drains: bool = True  # jobs leave hosts that are to be emptied
    evict_maintenance: bool = True  # hosts of the scheduler's reservations for maintenance are emptied before
    maintenance_notice: float = 900.0  # seconds before such a reservation begins
    evict_preemption: bool = True  # jobs give way to those that may preempt them by the scheduler's rules
    evict_leases: bool = True  # jobs leave leased hosts that end, or that others can replace
    evict_at_once: int = 8  # jobs of the site
    evict_rate: int = 0  # MiB a second that evictions may send; 0: any
    evict_per_job: int = 6  # evictions of one job in an hour at most
    evict_alert: float = 600.0  # seconds for which a limit holds evictions back until that is an alert
    evict_host_rate: int = 200  # MiB a second that one host sends or writes
    lease_keeps: float = 600.0  # a leased host is emptied if its jobs would keep it for longer
    pin_timeout: float = 60.0
    held_timeout: float = 10.0  # a pinned job that the scheduler holds back; its reason may be an old one till then
    complete_timeout: float = 120.0
    here: str = ""  # the host that the controller itself is on, if any
    fences: bool = False  # whether the site has a fence command
    fence_after: float = 60.0  # seconds that nothing is heard of a host before it is fenced
    quorum: float = 0.5  # the share of the other hosts that must be in sight for that; 0: none
    fence_margin: float = 60.0  # seconds beyond its time for an agent to end its VMs by itself; at least a fifth
    paused_timeout: float = 10.0  # the same for a job with a VM that is paused, because its host's disk is full
    retry_base: float = 2.0
    retry_limit: float = 300.0
    replacements: int = 2
    attempts: int = 12
    patience: float = 2.0  # how long a job waits before its user is told why
    pools: tuple[Pool, ...] = ()
    leases: tuple[LeasePolicy, ...] = ()
    overflows: tuple[OverflowPolicy, ...] = ()
    backfill: Backfill | None = None  # None: nothing starts ahead of the first job that waits for room
    reclaim: float = 10.0  # from a job's end until its VMs are gone
    placement: str = Placement.WORST_FIT  # the policy that places VMs of jobs that name none
    placements: Mapping[str, Callable[..., Sequence[str]]] = field(default_factory=dict)
    """The site's own policies, by name: see `core.capacity.placement_policies.PlacementPolicy`."""
    rates: Mapping[CloneKind, float] = field(default_factory=dict)
    """Clones a second from one template, or of one image on one host; kinds that are not in it go unpaced."""
    seconds: Mapping[CloneKind, float] = field(
        default_factory=lambda: MappingProxyType({CloneKind.INSTANT: 1.5, CloneKind.LINKED: 8.0, CloneKind.FULL: 15.0})
    )
    """From claim to node, until it has been seen how long that takes here."""
    template_seconds: float = 10.0  # for a template to be made

    def backoff(self, tries: int) -> float:
        """Seconds to wait after `tries` failures in a row: doubled each time, up to the limit."""
        if tries <= 0:
            return 0.0
        return float(min(self.retry_limit, self.retry_base * 2 ** min(tries - 1, 30)))

    def avoids_for(self, failures: int, took: float) -> float:
        """Seconds for which a host is avoided after failures in a row; the last one took `took` seconds."""
        first = max(self.retry_base, took / 2)
        return float(min(AVOIDED_LIMIT, first * 2 ** min(max(0, failures - 1), 30)))

    def pause_after(self, short_runs: int, *, lost: bool = False, goes_on: bool = False) -> float:
        """Seconds to wait after short runs in a row: none after the first, then doubled. After a lost run, until the
        scheduler has given up what would end the next run: the lost run's launch, if that run was short, and the
        order to end it, if the next run goes on in a VM of the same name."""
        if short_runs <= 1 and not (lost and (short_runs or goes_on)):
            return 0.0
        return float(min(PAUSE_LIMIT, PAUSE_BASE * 2 ** min(max(0, short_runs - 2), 30)))

    def interval(self, kind: CloneKind) -> float:
        """Seconds between clones of one template, on the average."""
        rate = self.rates.get(kind, 0.0)
        return 1.0 / rate if rate > 0 else 0.0

    def lease_from(self, partition: str) -> LeasePolicy:
        """How hosts are leased from a partition; no more hosts if the settings do not name it any more."""
        return next((one for one in self.leases if one.partition == partition), LeasePolicy(partition, most=0))

    def takes(self, image: str, kind: CloneKind, forecast: Forecast) -> float:
        """Seconds that a VM lately took from claim to node. For a kind that was not observed, the usual time,
        multiplied by how much slower than usual the image's other kinds were."""
        if (image, kind) in forecast.seconds:
            return forecast.seconds[image, kind]
        seen = [forecast.seconds[image, other] / usual for other, usual in sorted(self.seconds.items())
                if (image, other) in forecast.seconds]  # fmt: skip
        return self.seconds.get(kind, 0.0) * (sum(seen) / len(seen) if seen else 1.0)


def image_of(attempt: Attempt, policy: Policy) -> str:
    return attempt.request.image or policy.image


def why_stays(job: Job, policy: Policy) -> Reason | None:
    """Why a job that waits for physical nodes is not moved to a VM, whatever is free; None if it may be."""
    rule = next((one for one in policy.overflows if one.partition == job.origin), None)
    if rule is None:
        return Why.NO_OVERFLOW(partition=job.origin)
    if job.problem:
        return Why.PROBLEM(text=job.problem)
    request = job.request
    if rule.accounts and job.account not in rule.accounts:
        accounts = ", ".join(rule.accounts)
        if len(rule.accounts) > 1:
            return Why.ONLY_ACCOUNTS(accounts=accounts, partition=rule.partition)
        return Why.ONLY_ACCOUNT(account=accounts, partition=rule.partition)
    if request is None or (rule.constraint and rule.constraint not in request.features):
        return Why.ONLY_FEATURE(constraint=rule.constraint, partition=rule.partition)
    if request.nodes != 1:
        return Why.SEVERAL_NODES(nodes=request.nodes)
    if not job.requeues:
        return Why.NO_REQUEUE()
    if not job.eligible:
        return Why.TOO_EARLY(partition=rule.partition)
    return None


ARRIVALS_FADE = 60.0  # seconds after which an arrival counts for 1/e of what it did: what an arrival rate is taken over

Parent = tuple[str, str, CloneKind]  # of clones that share a pace: (host, image, kind)


def wait_for(parent: Parent, paced: Mapping[Parent, float], now: float, policy: Policy) -> float:
    """Seconds until the pace lets another clone be made (generic cell rate algorithm, ITU-T I.371)."""
    interval = policy.interval(parent[2])
    return max(0.0, paced.get(parent, 0.0) - now - max(0.0, 1.0 - interval)) if interval else 0.0


def paid(parent: Parent, paced: Mapping[Parent, float], now: float, policy: Policy) -> float:
    """Until when the pace is paid for, once another clone has been made."""
    return max(paced.get(parent, 0.0), now) + policy.interval(parent[2])
