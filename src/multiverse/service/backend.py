"""What the API, the metrics and the audit are answered from.

The only module of the service that asks the controller and the store. It decides nothing: it reads what was committed
and observed, and hands an operator's commands to the controller.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from multiverse import __version__
from multiverse.api import (
    Alert,
    HostsChanged,
    HostView,
    IdentityAudit,
    JobView,
    LeaseView,
    PruneView,
    SizeView,
    SourceView,
    StatusView,
    TemplateView,
    TimelineView,
    VmView,
)
from multiverse.api.grid import GridHost, GridSummary
from multiverse.bundles.contract import UNKNOWN_WORDS, GuestFacts, Notice, SchedulerWords
from multiverse.controller import history
from multiverse.controller.loop import Controller
from multiverse.core.errors import Refused
from multiverse.core.model import Attempt, HostUsage, Reason, Vm, VmSeen, World, text_of
from multiverse.core.model.usage import JobUsage
from multiverse.core.rows import Rows
from multiverse.core.transition import Command, EffectKind
from multiverse.ports import Clock
from multiverse.service import alerts, convert, findings, identity, snapshot
from multiverse.service.explanations import Explanations
from multiverse.service.hosts import Troubles, host_views, lease_views
from multiverse.service.processes import Processes
from multiverse.service.snapshot import Changed, Documents, ShownJob
from multiverse.service.statistics import Statistics
from multiverse.service.utilization import UtilizationReader
from multiverse.service.viewer import OPERATOR, Viewer
from multiverse.store import Pruning, Store
from multiverse.store.history import read_job_usage

COMMIT_TIMEOUT = 10.0
"""Seconds that a client waits for its command to be committed."""

FAILURES_UNTIL_ALERT = 3
"""The number of failures in a row from which on a repeated effect is an alert: one or two are routine."""

PRUNE_LIMIT = 2.0
"""Seconds that one request to prune takes."""

MAX_TIMELINES = 100
"""The most timelines that a user is shown at a time."""

MAX_JOBS = 10000
"""The most attempts that one answer lists."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What the daemon has done since it started, and how many live rows there are by kind and state."""

    commits: int
    processes: Mapping[str, int]
    sources: Sequence[SourceView]
    effects: Mapping[tuple[str, str], int]  # by kind and outcome
    rows: Mapping[str, Mapping[str, int]]
    jobs: Mapping[str, int]  # by stage
    waiting: Mapping[str, int]  # by the word of their reason
    alerts: Mapping[str, int]  # by kind
    hosts: Sequence[GridHost]
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Backend:
    """`guests` is None where VMs cannot be asked. `permanent` are alerts that last as long as this process; the two
    after it are as in the settings. `hints_from`, `lack_of_nodes` and `words` are those of the `SchedulerSystem`.
    `utilization` is None where nothing is recorded."""

    controller: Controller
    store: Store
    clock: Clock
    guests: GuestFacts | None
    processes: Processes
    permanent: Sequence[Alert] = ()
    history_days: float = 0.0
    poll: float = 0.0
    hints_from: str = ""
    lack_of_nodes: Callable[[int], Sequence[Notice]] = lambda cpus: ()
    words: SchedulerWords = UNKNOWN_WORDS
    utilization: UtilizationReader | None = None
    statistics: Statistics = field(default_factory=Statistics)

    def _rows(self) -> Rows:
        """The live rows as committed."""
        return self.controller.state.rows()

    # --- the daemon --------------------------------------------------------------------------------

    def status(self) -> StatusView:
        rows = self._rows()
        states = convert.row_counts(rows)
        return StatusView(
            pid=os.getpid(),
            version=__version__,
            site=self.store.site,
            up=self.clock.now() - self.controller.began,
            sources=self.sources(),
            jobs=convert.job_counts(rows),
            attempts=states["attempt"],
            vms=states["vm"],
            templates=states["template"],
            pools=tuple(map(convert.pool_view, self.controller.pools())),
            alerts=tuple(self.alerts()),
        )

    def sources(self) -> tuple[SourceView, ...]:
        """The scheduler first, then the hypervisor's sources."""
        now, controller = self.clock.now(), self.controller
        hypervisors = (convert.source_view(one, now) for one in controller.sources.values())
        return (convert.source_view(controller.scheduler, now), *hypervisors)

    def alerts(self) -> list[Alert]:
        """All alerts. Those that stop the most come first."""
        now, controller, rows = self.clock.now(), self.controller, self._rows()
        unkept, unhinted = controller.uncommitted, [at for at in (controller.missing_hints.since,) if at is not None]
        return [
            *([alerts.STORE(seconds=now - unkept[0], reason=unkept[1])] if unkept else ()),
            *findings.sources_away((one.name, one.unknown_for, one.failure) for one in self.sources()),
            *(alerts.HINTS(seconds=now - since, poll=self.poll, inbox=self.hints_from) for since in unhinted),
            *findings.findings(rows, controller.world(), controller.policy, now),
            *(findings.unknown_user(one, rows, now) for one in controller.unknown_users()),
            *(
                alerts.PLACEMENT(policy=name, reason=why)
                for name, why in sorted(controller.state.placement_faults.items())
            ),
            *(findings.failing_effect(one, now) for one in controller.failing(FAILURES_UNTIL_ALERT)),
            *(alerts.STRANGER(name=name) for name in controller.orphans()),
            *(Alert(*one) for one in self.lack_of_nodes(controller.claimable_cpus())),
            *self.permanent,
        ]

    async def counts(self) -> Counts:
        rows = self._rows()
        waiting = list(rows.attempts.values())
        return Counts(
            commits=self.store.commits,
            processes=await self.processes.programs(),
            sources=self.sources(),
            effects=self.controller.effects_ended,
            rows=convert.row_counts(rows),
            jobs=convert.job_counts(rows),
            waiting=convert.counted(waiting, self._waiting_reasons(waiting, self.clock.now())),
            alerts=Counter(alert.kind for alert in self.alerts()),
            hosts=[snapshot.grid_host(host, self.clock.wall()) for host in self.hosts()],
            statistics=self.statistics,
        )

    def used(self) -> Mapping[str, HostUsage]:
        """What each host, by name, has used lately, with its VMs."""
        return self.utilization.current() if self.utilization else {}

    # --- jobs --------------------------------------------------------------------------------------

    def jobs(self, job: str | None = None, *, ended: bool = False, limit: int = 200) -> list[JobView]:
        """Live attempts, oldest first; with `ended` or a `job`, the last `limit` attempts that ended too."""
        if ended or job is not None:
            attempts = list(reversed(self.store.attempts(job_id=job, limit=max(1, min(limit, MAX_JOBS)))))
        else:
            attempts = list(self._rows().attempts.values())
        vms, now = self.store.vms_of([attempt.id for attempt in attempts]), self.clock.now()
        waiting, policy = self._waiting_reasons(attempts, now), self.controller.policy
        return convert.job_views(attempts, vms, waiting, now, policy, self._job_usages(attempts))

    def _job_usages(self, attempts: Sequence[Attempt]) -> Mapping[int, JobUsage]:
        """What those of these attempts have used that have ended, or are about to."""
        ran = [attempt.id for attempt in attempts if attempt.outcome is not None]
        return read_job_usage(self.store, ran) if ran else {}

    def timelines(self, job: str) -> list[TimelineView]:
        """One timeline for each known attempt of the job, oldest first; empty if there is none."""
        return self._timelines(self.store.attempts(job_id=job)[::-1], OPERATOR)

    def timelines_for(self, job: str, viewer: Viewer) -> list[TimelineView]:
        """The same for a user: of their own jobs, and without what they may not be told of others'."""
        attempts = [one for one in self.store.attempts(job_id=job, limit=MAX_TIMELINES) if viewer.may_see(one.uid)]
        return self._timelines(attempts[::-1], viewer)

    def _timelines(self, attempts: Sequence[Attempt], viewer: Viewer) -> list[TimelineView]:
        now = self.clock.now()
        waiting = self._waiting_reasons(attempts, now)
        entries = {one.id: self.store.journal(attempts=[one.id]) for one in attempts}
        return [
            convert.timeline_view(one, entries[one.id], now, waiting.get(one.id), viewer.teller(one.job.job_id))
            for one in attempts
        ]

    @property
    def explanations(self) -> Explanations:
        """Why jobs wait, and what would start at once."""
        return Explanations(self.controller, self.store, self.clock, self.words)

    def _waiting_reasons(self, attempts: Sequence[Attempt], now: float) -> Mapping[int, Reason]:
        return convert.waiting_reasons(attempts, self.controller.world(), self.controller.state.reasons, now)

    # --- VMs, hosts, templates ---------------------------------------------------------------------

    async def vms(self, *, exact: bool = False) -> list[VmView]:
        measured = await self.guests.measure() if exact and self.guests else {}
        return convert.vm_views(self._rows(), self.controller.world(), measured, self.clock.now())

    def leases(self) -> list[LeaseView]:
        """The hosts that are leased, or about to be."""
        return lease_views(self._rows(), self.clock.now())

    def hosts(self) -> list[HostView]:
        """All hosts of the site, whether or not they are in reach."""
        controller = self.controller
        failing = controller.failing(1)
        rows = self._rows()
        names = {host.key: host.name for host in rows.hosts.values()}
        troubles = Troubles(
            {one.name: one.failure for one in controller.sources.values()},
            controller.held_back(),
            {names[one.effect.key]: one.reason for one in failing if one.effect.kind is EffectKind.FENCE},
        )
        return host_views(rows, controller.world(), self.clock.now(), troubles)

    def host_names(self) -> list[str]:
        """The hosts in reach, by name."""
        return sorted(self.controller.world().hosts)

    def templates(self) -> list[TemplateView]:
        return convert.template_views(self._rows(), self.clock.now())

    @property
    def base_size(self) -> SizeView:
        """The size of a template that is built without a size."""
        return convert.size_view(self.controller.policy.base)

    async def identity_audit(self) -> IdentityAudit:
        return identity.audit(convert.known_vms(self._rows()), await self.guests.examine() if self.guests else {})

    # --- the whole, for viewers --------------------------------------------------------------------

    def refresh(self, documents: Mapping[str, Documents]) -> tuple[GridSummary, dict[str, Changed]]:
        """Bring the documents up to date. Returns what is said of the whole, and which documents have changed."""
        world, wall = self.controller.world(), self.clock.wall()
        found = {
            "hosts": snapshot.host_documents(self.hosts(), wall),
            "vms": snapshot.vm_documents(self._vms_shown(world), world.epoch),
            "jobs": snapshot.job_documents(self._attempts_shown(world), self.controller.policy, world.epoch),
            "alerts": snapshot.alert_documents(self.alerts()),
        }
        changed = {kind: documents[kind].update(some) for kind, some in found.items()}
        return self._summary(wall), changed

    def _vms_shown(self, world: World) -> Iterator[tuple[Vm, VmSeen | None, str]]:
        attempts = self.controller.state.attempts
        for vm in self.controller.state.vms.values():
            attempt = attempts.get(vm.attempt) if vm.attempt is not None else None
            yield vm, world.vm(vm), attempt.job.job_id if attempt else vm.job_id

    def _attempts_shown(self, world: World) -> Iterator[tuple[Attempt, ShownJob]]:
        state, users = self.controller.state, self.controller.users
        jobs = world.scheduler.value.jobs if world.scheduler else {}
        waiting = convert.waiting_reasons(list(state.attempts.values()), world, state.reasons, self.clock.now())
        names = convert.vm_names(list(state.vms.values()))
        for attempt in state.attempts.values():
            job = jobs.get(attempt.job.job_id)
            order = job.rank if job else snapshot.UNKNOWN_ORDER
            vms = tuple(names.get(attempt.id, ()))
            yield attempt, ShownJob(text_of(waiting.get(attempt.id)), order, users.name(attempt.uid), vms)

    def _summary(self, wall: float) -> GridSummary:
        now, state = self.clock.now(), self.controller.state
        return GridSummary(
            site=self.store.site,
            version=__version__,
            wall=wall,
            up_since=round(wall - now + self.controller.began, 1),
            jobs=convert.stage_counts(state.attempts.values()),
            vms=Counter(str(vm.state) for vm in state.vms.values()),
            sources={one.name: "" if one.known else one.failure or "not yet observed" for one in self.sources()},
            rates=self.statistics.rates(now),
        )

    # --- commands ----------------------------------------------------------------------------------

    async def repair(self, alert: Alert) -> None:
        """Have the alert's repair committed. Raises `TimeoutError` if it is not committed in time."""
        await self._commit(findings.repair_command(alert))

    async def template(
        self, verb: str, image: str, host: str, size: tuple[int, int] | None, account: str | None
    ) -> None:
        """Have the command to build or drop (`verb`) templates committed. `size` is CPUs and MiB. Raises `TimeoutError`
        if it is not committed in time."""
        await self._commit(convert.template_command(verb, image, host, size, account))

    async def change_hosts(self, verb: str, names: Sequence[str], reason: str, begins: float | None) -> HostsChanged:
        """Have a change (`verb`) to hosts committed, together. Raises `TimeoutError` if that takes too long."""
        moment = self.clock.wall() if begins is None else begins
        made = [self.controller.command(convert.host_command(verb, name, reason, moment)) for name in names]
        async with asyncio.timeout(COMMIT_TIMEOUT):
            results = await asyncio.gather(*made, return_exceptions=True)
        refused = {name: str(error) for name, error in zip(names, results, strict=True) if isinstance(error, Refused)}
        return HostsChanged(tuple(name for name in names if name not in refused), refused)

    async def prune(self, older_than: float | None, *, dry_run: bool, after: str) -> PruneView:
        """Delete, or count, what ended more than `older_than` seconds ago; None: as the settings say. Works for two
        seconds at most, from `after` on (empty: from the beginning), so that the daemon can be stopped. Raises
        `Refused` if the settings keep everything or `after` makes no sense, `Exhausted` if it cannot be committed."""
        age = self.history_days * history.DAY if older_than is None else older_than
        if older_than is None and not self.history_days:
            raise Refused("the settings keep all records (history_days = 0)", hint="give an age: --older-than 30d")
        one_round = Pruning(self.store, self.clock.wall() - age, after=after, dry_run=dry_run)
        await history.prune(one_round, self.clock, limit=PRUNE_LIMIT)
        return PruneView(age, one_round.position, dry_run, **asdict(one_round.removed))

    async def _commit(self, command: Command) -> None:
        """A committed command outlives the daemon, so it is answered only then."""
        await asyncio.wait_for(self.controller.command(command), COMMIT_TIMEOUT)
