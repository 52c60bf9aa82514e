"""What the API, the metrics and the audit are answered from.

The only module of the service that asks the controller and the store. It decides nothing: it reads what was committed
and observed, and hands an operator's commands to the controller.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

from multiverse import __version__, api
from multiverse.bundles.contract import UNKNOWN_WORDS, GuestFacts, Notice, SchedulerWords
from multiverse.controller import history
from multiverse.controller.history import JobUsageRecorder, UtilizationRecorder
from multiverse.controller.loop import Controller
from multiverse.core.context import Context
from multiverse.core.errors import Gone, Refused
from multiverse.core.explanation import compatible_hosts, is_being_evicted
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Drain
from multiverse.core.model.job import Attempt
from multiverse.core.model.reason import Reason
from multiverse.core.model.usage import HostUsage, Usage, combined
from multiverse.core.model.vm import Vm, VmState
from multiverse.core.rows import Rows
from multiverse.core.saving import with_its_state
from multiverse.core.transition import Command, EffectKind
from multiverse.images.catalog import Image
from multiverse.ports import Clock
from multiverse.service import alerts, convert, metrics
from multiverse.service.convert import ShownJob, size_view
from multiverse.service.explanations import OPERATOR, Explanations, Viewer
from multiverse.service.hosts import Troubles, eviction_view, host_views, lease_views, saved_view, without_noise
from multiverse.service.reload import SettingsReload
from multiverse.service.startup import Processes
from multiverse.service.statistics import Statistics
from multiverse.store import Pruning, Store
from multiverse.store.history import UsageRecord, UsedBy, read_job_usage, read_usage

HOUR, FIVE_MINUTES = 3600.0, 300.0

AT_ONCE = 20  # hosts and VMs whose history is read before others get their turn: a few milliseconds


@dataclass(frozen=True, slots=True)
class UtilizationReader:
    """Answers from the recorder's figures and its history. `jobs` learns what jobs use."""

    controller: Controller
    recorder: UtilizationRecorder
    jobs: JobUsageRecorder
    clock: Clock

    async def views(self, names: Collection[str] = ()) -> list[api.UtilizationView]:
        """Hosts and live VMs by name, each host with its VMs behind it; all, or those with these names."""
        found = []
        for number, view in enumerate(self._known()):
            if names and view.name not in names:
                continue
            found.append(self._with_history(view))
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        return found

    def history(self, name: str, hours: float) -> list[api.UsagePoint]:
        """The rows of a host or VM in the last hours, also of a VM that has ended. Raises `Gone` if there are none."""
        kind: UsedBy = "host" if name in self.controller.state.hosts else "vm"
        records = read_usage(self.recorder.store, kind, name, self.clock.wall() - hours * HOUR)
        if not records:
            raise Gone(f"nothing is known of what {name} used in the last {hours:g} hours")
        return [api.UsagePoint(one.wall, one.span, view) for one in records if (view := _usage_view(one.usage))]

    def compatible(self, node: Size, image: str, kind: CloneKind | None, policy: str) -> list[api.CompatibleHostView]:
        """See `compatible_hosts`. Raises `Refused` if there is no such policy."""
        controller = self.controller
        state = controller.state
        # With the hosts as the latest pass knew them: they are not observed here.
        context = Context(state, controller.observed, controller.policy, sight=state.free.hosts)
        return [
            api.CompatibleHostView(one.name, size_view(one.free), size_view(one.claim), one.holds, one.use)
            for one in compatible_hosts(context, node, image, kind, policy)
        ]

    def _known(self) -> Iterator[api.UtilizationView]:
        rows, world, current = self.controller.state.rows(), self.controller.world(), self.recorder.current()
        vms: defaultdict[str, list[Vm]] = defaultdict(list)
        for vm in sorted(rows.vms.values(), key=lambda vm: vm.name):
            vms[vm.host].append(vm)
        for name in sorted(host.name for host in self.controller.known_hosts().values()):
            host, used = world.hosts.get(name), current.get(name, HostUsage())
            machine = host.machine if host else None
            size = (machine.cpus, machine.memory) if machine else (0, 0)
            yield api.UtilizationView("host", name, "", "", *size, _usage_view(used.usage), None, None)
            for vm in vms[name]:
                seen = used.vms.get(vm.name)
                attempt = rows.attempt_of(vm)
                job_id = attempt.job.job_id if attempt else ""
                now = _usage_view(seen.usage if seen else None)
                yield api.UtilizationView("vm", vm.name, name, job_id, vm.size.cpus, vm.size.memory, now, None, None)

    def _with_history(self, view: api.UtilizationView) -> api.UtilizationView:
        wall = self.clock.wall()
        kind: UsedBy = "host" if view.kind == "host" else "vm"
        records = read_usage(self.recorder.store, kind, view.name, wall - HOUR)
        latest = [one for one in records if one.wall >= wall - FIVE_MINUTES - 60]
        return replace(view, five_minutes=_mean(latest), hour=_mean(records))


def _mean(records: list[UsageRecord]) -> api.UsageView | None:
    return _usage_view(combined([one.usage for one in records]) if records else None)


def _usage_view(usage: Usage | None) -> api.UsageView | None:
    return None if usage is None else api.UsageView(*(getattr(usage, one.name) for one in fields(api.UsageView)))


COMMIT_TIMEOUT = 10.0  # seconds that a client waits for its command to be committed
FAILURES_UNTIL_ALERT = 3  # failures in a row that make a repeated effect an alert: one or two are routine
PRUNE_LIMIT = 2.0  # seconds that one request to prune takes
MAX_TIMELINES = 100  # the most timelines that a user is shown at a time
MAX_HELD = 200  # the most evictions that are held back and are shown to viewers
MAX_JOBS = 10000  # the most attempts that one answer lists

Source = tuple[str, tuple[Any, ...], Callable[[], object]]
"""A document for viewers: its key, its source, and what makes it. The first part of a source is compared by identity: a
row that has changed is another object."""


class JobChange(NamedTuple):
    """What somebody wants of a job: `save` it (and `hold` it), make a `checkpoint` of it (also if it writes to
    `shared_files`), or `resume` a saved one (or let it begin `anew`)."""

    verb: str
    job: str
    hold: bool = False
    anew: bool = False
    shared_files: bool = False


@dataclass(frozen=True, slots=True)
class Backend:
    controller: Controller
    store: Store
    clock: Clock
    guests: GuestFacts | None  # None where VMs cannot be asked
    processes: Processes
    permanent: Sequence[api.Alert] = ()  # alerts that last as long as this process
    history_days: float = 0.0  # as in the settings
    poll: float = 0.0  # as in the settings
    hints_from: str = ""  # this and the next two are those of the `SchedulerSystem`
    lack_of_nodes: Callable[[int], Sequence[Notice]] = lambda cpus: ()
    words: SchedulerWords = UNKNOWN_WORDS
    utilization: UtilizationReader | None = None  # None where nothing is recorded
    statistics: Statistics = field(default_factory=Statistics)
    reload: SettingsReload | None = None  # None where the settings are of no file
    made_images: Callable[[], Sequence[Image]] = tuple  # on this machine
    advised: Callable[[str], str] = str  # what is to be done here in place of what a site's operator is advised to

    def _rows(self) -> Rows:
        return self.controller.state.rows()

    # --- the daemon --------------------------------------------------------------------------------

    def status(self) -> api.StatusView:
        rows = self._rows()
        states = convert.row_counts(rows)
        return api.StatusView(
            pid=os.getpid(),
            version=__version__,
            site=self.store.site,
            up=self.clock.now() - self.controller.began,
            sources=self.sources(),
            jobs=convert.stage_counts(rows.attempts.values()),
            attempts=states["attempt"],
            vms=states["vm"],
            templates=states["template"],
            pools=tuple(map(convert.pool_view, self.controller.pools())),
            alerts=tuple(self.alerts()),
        )

    def sources(self) -> tuple[api.SourceView, ...]:
        """The scheduler first, then the hypervisor's sources."""
        now, controller = self.clock.now(), self.controller
        hypervisors = (convert.source_view(one, now) for one in controller.sources.values())
        return (convert.source_view(controller.scheduler, now), *hypervisors)

    def alerts(self) -> list[api.Alert]:
        """All alerts. Those that stop the most come first."""
        now, controller, rows = self.clock.now(), self.controller, self._rows()
        unkept, unhinted = controller.uncommitted, controller.missing_hints.since
        found = [
            *([alerts.STORE(seconds=now - unkept[0], reason=unkept[1])] if unkept else ()),
            *alerts.sources_away((one.name, one.unknown_for, one.failure) for one in self.sources()),
            *(
                []
                if unhinted is None
                else [alerts.HINTS(seconds=now - unhinted, poll=self.poll, inbox=self.hints_from)]
            ),
            *alerts.findings(rows, controller.world(), controller.policy, now),
            *(alerts.unknown_user(one, rows, now) for one in controller.unknown_users()),
            *(
                alerts.PLACEMENT(policy=name, reason=why)
                for name, why in sorted(controller.state.placement_faults.items())
            ),
            *alerts.evictions_held_back(controller.held_evictions(), controller.policy, now),
            *(alerts.failing_effect(one, rows, now) for one in controller.failing(FAILURES_UNTIL_ALERT)),
            *(alerts.ORPHAN(name=name) for name in controller.orphans()),
            *(api.Alert(*one) for one in self.lack_of_nodes(controller.claimable_cpus())),
            *(alerts.of_reload(self.reload.mistakes, self.reload.waiting) if self.reload else ()),
            *self.permanent,
        ]
        found = [replace(one, remedy=self.advised(one.remedy)) for one in found]
        return [replace(one, command=alerts.command_of(one)) for one in found]

    async def metrics(self) -> bytes:
        """What the daemon has done since it started, what there is, and what is used, as Prometheus reads it."""
        rows, programs = self._rows(), await self.processes.programs()
        attempts = list(rows.attempts.values())
        waiting = convert.counted(attempts, self._waiting_reasons(attempts))
        return metrics.text(
            metrics.of_the_daemon(self.store.commits, programs, self.sources(), self.controller.effects_ended),
            metrics.of_rows(convert.row_counts(rows), convert.stage_counts(attempts), waiting, self.alerts()),
            metrics.of_moves(self.statistics),
            metrics.of_evictions(self.statistics, self.controller.held_evictions()),
            metrics.of_hosts(self.hosts()),
            metrics.of_usage(self.utilization.recorder.current() if self.utilization else {}),
        )

    # --- jobs --------------------------------------------------------------------------------------

    def jobs(self, job: str | None = None, *, ended: bool = False, limit: int = 200) -> list[api.JobView]:
        """Live attempts, oldest first; with `ended` or a `job`, the last `limit` attempts that ended too."""
        job = job and self._own_id(job)
        if ended or job is not None:
            attempts = list(reversed(self.store.attempts(job_id=job, limit=max(1, min(limit, MAX_JOBS)))))
        else:
            attempts = list(self._rows().attempts.values())
        vms = self.store.vms_of([attempt.id for attempt in attempts])
        ran = [attempt.id for attempt in attempts if attempt.outcome is not None]
        usages = read_job_usage(self.store, ran) if ran else {}
        policy, epoch = self.controller.policy, self.controller.world().epoch
        return [
            convert.job_view(one, facts, policy, epoch, usages.get(one.id))
            for one, facts in self._job_facts(attempts, vms)
        ]

    def _own_id(self, job: str) -> str:
        scheduler = self.controller.scheduler.latest
        return scheduler.value.own_id(job) if scheduler else job

    def _job_facts(self, attempts: Sequence[Attempt], vms: Iterable[Vm]) -> Iterator[tuple[Attempt, ShownJob]]:
        world = self.controller.world()
        jobs = world.scheduler.value.jobs if world.scheduler else {}
        state, reasons = self.controller.state, self._waiting_reasons(attempts)
        told = {one.id: why for one in attempts if (why := with_its_state(state, one, reasons.get(one.id)))}
        evicted = {one.id for one in attempts if is_being_evicted(state, one)}
        return convert.job_facts(attempts, vms, told, jobs, self.controller.users.name, evicted)

    def _waiting_reasons(self, attempts: Sequence[Attempt]) -> Mapping[int, Reason]:
        controller = self.controller
        return convert.waiting_reasons(attempts, controller.world(), controller.state.reasons, self.clock.now())

    def timelines(self, job: str, viewer: Viewer = OPERATOR) -> list[api.TimelineView]:
        """One timeline for each attempt of the job that the viewer may see, oldest first."""
        limit, job = 1000 if viewer is OPERATOR else MAX_TIMELINES, self._own_id(job)
        attempts = [one for one in self.store.attempts(job_id=job, limit=limit) if viewer.may_see(one.uid)][::-1]
        now, waiting = self.clock.now(), self._waiting_reasons(attempts)
        return [
            convert.timeline_view(
                one, self.store.journal(attempts=[one.id]), now, waiting.get(one.id), viewer.teller(one.job.job_id)
            )
            for one in attempts
        ]

    @property
    def explanations(self) -> Explanations:
        """Why jobs wait, and what would start at once."""
        return Explanations(self.controller, self.store, self.clock, self.words)

    def images(self) -> list[api.ImageView]:
        """The images that hosts have, that wait here to be copied to hosts, or that are the default."""
        default, made = self.controller.policy.image, {one.name: one for one in self.made_images()}
        there = Counter(name for host in self.controller.world().hosts.values() for name in host.images)
        away = (name for host in self.controller.known_hosts().values() if host.value for name in host.value.images)
        return [
            api.ImageView(name, name == default, there[name], convert.about_image(made.get(name)))
            for name in sorted({default, *made, *there, *away})
        ]

    # --- VMs, hosts, templates ---------------------------------------------------------------------

    async def vms(self, *, exact: bool = False) -> list[api.VmView]:
        measured = await self.guests.measure() if exact and self.guests else {}
        return convert.vm_views(self._rows(), self.controller.world(), measured)

    def saved(self, viewer: Viewer = OPERATOR) -> list[api.SavedView]:
        found = [one for _, one in sorted(self._rows().saved.items()) if viewer.may_see(one.uid)]
        return [saved_view(one, viewer.teller(one.job.job_id)) for one in found]

    def leases(self) -> list[api.LeaseView]:
        return lease_views(self._rows(), self.controller.world().epoch)

    def hosts(self) -> list[api.HostView]:
        """All hosts of the site, whether or not they are in reach."""
        controller, rows = self.controller, self._rows()
        names = {host.key: host.name for host in rows.hosts.values()}
        fences = (one for one in controller.failing(1) if one.effect.kind is EffectKind.FENCE)
        troubles = Troubles(
            {one.name: one.failure for one in controller.sources.values()},
            controller.held_back(),
            {names[one.effect.key]: one.reason for one in fences},
            controller.staying(),
            frozenset((controller.policy.image, *(pool.image for pool in controller.policy.pools))),
        )
        found = host_views(rows, controller.world(), self.clock.now(), troubles)
        return [replace(one, todo=self.advised(one.todo)) if one.todo else one for one in found]

    def evictions(self) -> list[api.EvictionView]:
        """The jobs that would leave their hosts now. Nothing is begun."""
        epoch = self.controller.world().epoch
        return [eviction_view(one, epoch) for one in self.controller.evictions()]

    def host_names(self) -> list[str]:
        """The hosts in reach, by name."""
        return sorted(self.controller.world().hosts)

    def templates(self) -> list[api.TemplateView]:
        return convert.template_views(self._rows(), self.controller.world().epoch)

    @property
    def base_size(self) -> api.SizeView:
        """The size of a template that is built without a size."""
        return convert.size_view(self.controller.policy.base)

    async def identity_audit(self) -> api.IdentityAudit:
        return convert.audit(self._rows(), await self.guests.examine() if self.guests else {})

    # --- the whole, for viewers --------------------------------------------------------------------

    def shown(self) -> tuple[api.SummaryView, Mapping[str, Iterable[Source]]]:
        """What is said of the whole, and the documents of each kind."""
        state, policy, epoch = self.controller.state, self.controller.policy, self.controller.world().epoch
        hosts = map(without_noise, self.hosts())
        return self._summary(), {
            "hosts": ((one.name, ("host", one), partial(_itself, one)) for one in hosts),
            "vms": self._vms_shown(),
            "jobs": (
                (str(one.id), (one, facts), partial(convert.job_view, one, facts, policy, epoch))
                for one, facts in self._job_facts(list(state.attempts.values()), state.vms.values())
            ),
            "alerts": ((f"{one.kind} {one.name}", ("alert", one), partial(_itself, one)) for one in self.alerts()),
            "evictions": (
                (f"{one.method} {one.vm}", ("eviction", one), partial(_itself, one))
                for one in (eviction_view(step, epoch) for step in self.controller.held_evictions()[:MAX_HELD])
            ),
        }

    def _vms_shown(self) -> Iterator[Source]:
        attempts, world = self.controller.state.attempts, self.controller.world()
        for vm in self.controller.state.vms.values():
            job_id = convert.job_of(vm, attempts.get(vm.attempt) if vm.attempt is not None else None)
            private = round(seen.private) if (seen := world.vm(vm)) else 0
            yield (
                vm.name,
                (vm, private, job_id),
                partial(convert.vm_view, vm, job_id, world.epoch, (0.0, private, 0.0, 0.0)),
            )

    def _summary(self) -> api.SummaryView:
        now, wall, state = self.clock.now(), self.clock.wall(), self.controller.state
        return api.SummaryView(
            site=self.store.site,
            version=__version__,
            wall=wall,
            up_since=round(wall - now + self.controller.began, 1),
            jobs=convert.stage_counts(state.attempts.values()),
            vms=Counter(str(vm.state) for vm in state.vms.values()),
            sources={one.name: "" if one.known else one.failure or "not yet observed" for one in self.sources()},
            rates=self.statistics.rates(now),
            evictions=self.statistics.evictions.lately(now),
        )

    # --- commands ----------------------------------------------------------------------------------
    # A committed command outlives the daemon, so it is answered only then. All raise `TimeoutError` if it is not
    # committed in time.

    async def repair(self, alert: api.Alert) -> None:
        await asyncio.wait_for(self.controller.command(alerts.repair_command(alert)), COMMIT_TIMEOUT)

    async def template(
        self, verb: str, image: str, host: str, size: tuple[int, int] | None, account: str | None
    ) -> None:
        """Have the command to build or drop (`verb`) templates committed. `size` is CPUs and MiB."""
        command = Command(verb, host, image, size=Size(*size) if size else None, account=account)
        await asyncio.wait_for(self.controller.command(command), COMMIT_TIMEOUT)

    async def change_hosts(self, verb: str, names: Sequence[str], request: api.HostRequest) -> api.HostsChanged:
        """Have a change (`verb`: add, drain, resume or remove) to hosts committed, together."""
        at = self.clock.wall() if request.begins is None else request.begins
        drain = Drain(at, request.reason, request.move, request.save) if verb == "drain" else None
        made = [self.controller.command(Command(verb, host=name, drain=drain)) for name in names]
        async with asyncio.timeout(COMMIT_TIMEOUT):
            results = await asyncio.gather(*made, return_exceptions=True)
        refused = {name: str(error) for name, error in zip(names, results, strict=True) if isinstance(error, Refused)}
        return api.HostsChanged(tuple(name for name in names if name not in refused), refused)

    async def change_job(self, change: JobChange, uid: int | None = None) -> None:
        """Have a change of a job committed, for an operator or a user. Raises `Refused` if it is not possible."""
        command = Command(
            "resume_saved" if change.verb == "resume" else change.verb,
            job=change.job,
            hold=change.hold,
            uid=uid,
            anew=change.anew,
            shared_files=change.shared_files,
        )
        await asyncio.wait_for(self.controller.command(command), COMMIT_TIMEOUT)

    async def move(self, what: str, host: str) -> api.MoveBegun:
        """Have the move of a running VM to a host, or to any, committed. Raises `Refused` if it cannot move."""
        await asyncio.wait_for(self.controller.command(Command("move", host, job=what)), COMMIT_TIMEOUT)
        rows = self._rows()
        moving = [vm for _, vm in sorted(rows.vms.items()) if vm.state is VmState.MOVING]
        for vm in moving:
            job_id = convert.job_of(vm, rows.attempt_of(vm))
            if what in (vm.name, job_id):
                return api.MoveBegun(vm.name, job_id, vm.host, vm.places[1].host)
        raise Refused(f"the move of {what} is over already", hint=f"multiverse timeline {what} shows how it went")

    async def prune(self, older_than: float | None, *, dry_run: bool, after: str) -> api.PruneView:
        """Delete, or count, what ended more than `older_than` seconds ago; None: as in the settings. Works for two
        seconds at most, from `after` on, so that the daemon can be stopped. Raises `Refused` if the settings keep
        everything or `after` makes no sense, `Exhausted` if it cannot be committed."""
        age = self.history_days * history.DAY if older_than is None else older_than
        if older_than is None and not self.history_days:
            raise Refused("the settings keep all records (history_days = 0)", hint="give an age: --older-than 30d")
        one_round = Pruning(self.store, self.clock.wall() - age, after=after, dry_run=dry_run)
        await history.prune(one_round, self.clock, limit=PRUNE_LIMIT)
        return api.PruneView(age, one_round.position, dry_run, **asdict(one_round.removed))


def _itself(made: object) -> object:
    return made
