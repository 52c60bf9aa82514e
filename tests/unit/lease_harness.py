"""A planner harness with a scheduler that lends hosts: pilots and leased hosts that a test sets."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from multiverse.core.machines.tables import permitted_effects
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.job import Job, Lease, PilotSeen, PilotState
from multiverse.core.model.saved import Storage
from multiverse.core.model.vm import TemplateCondition, TemplateKey, TemplateSeen, Vm, VmSeen
from multiverse.core.model.world import Observation, Seen
from multiverse.core.policy import LeasePolicy, Policy
from multiverse.core.transition import EffectKind, Move
from tests.unit.planner_harness import POLICY, PlannerHarness
from tests.unit.rows import IMAGES

PHYSICAL = LeasePolicy("physical", time_limit=3600.0, most=2, min_wait=10.0, idle=60.0, start_timeout=30.0)
LEASING = replace(POLICY, leases=(PHYSICAL,))
BIG = Size(4, 1000)


class LeaseHarness(PlannerHarness):
    """One static host of 4 CPUs, and nodes of 8 CPUs that may be leased. Time passes in steps of a second."""

    def __init__(self, policy: Policy = LEASING, *, cpus: int = 4) -> None:
        super().__init__(policy, cpus=cpus)
        self.pilots: dict[str, PilotSeen] = {}
        self.leasable = {"physical": Size(8, 8192)}
        self.answering: set[str] = set()  # leased hosts whose agents answer
        self.refuses = ""  # what these say to new VMs
        self.holds_until = 0.0  # Unix time until which they leave their VMs alone meanwhile
        self.storage: Storage | None = None  # to which these save
        self.static_storage: Storage | None = None  # to which the static host saves
        self.images_there = IMAGES  # what these have
        self.vms_on: dict[str, dict[str, VmSeen]] = {}
        self.rest: dict[str, float] = {}

    @property
    def lease(self) -> Lease:
        """The first lease that there is."""
        return self.state.leases[min(self.state.leases)]

    def waiting_job(self, job_id: str = "7", *, size: Size = BIG, limit: float | None = 600.0, **more: object) -> Job:
        """A job with a time limit."""
        return self.job(job_id, size=size, limit=limit, **more)

    def full(self) -> None:
        """All of the static host is taken by a job that runs."""
        self.to_allocated(job_id="1", size=Size(self.hosts["h1"].capacity.cpus, 100))

    def until_asked(self) -> Lease:
        """A job waits for room until a lease is asked for."""
        self.full()
        self.waiting_job()
        self.run()
        self.pass_time(self.policy.leases[0].min_wait)
        self.run()
        return self.lease

    def pilot(self, lease: Lease | None = None, id_: str = "50", **more: object) -> None:
        """Show a pilot of the lease, which waits unless it is said what it does."""
        lease = lease or self.lease
        values: dict[str, object] = {"state": PilotState.PENDING, **more}
        self.pilots[id_] = PilotSeen(lease.name, lease.spec.token, **values)  # type: ignore[arg-type]

    def until_idle(self, *, ends: float = inf, seconds: float = 3600.0) -> Lease:
        """The lease is granted and its agent answers. The job that needed it goes on waiting for its template."""
        lease = self.until_asked()
        self.ended(lease.key)
        self.granted(lease, self.clock.wall() + seconds if ends == inf else ends)
        return self.lease

    def granted(self, lease: Lease, ends: float) -> None:
        self.pilot(lease, state=PilotState.RUNNING, node="p1", ends=ends)
        self.run()
        self.answering.add(lease.name)
        self.run()

    def with_template(self, host: str = "") -> None:
        """The template that the waiting job needs is ready on a leased host, the first one if none is named."""
        which = TemplateKey(host or self.lease.name, "slim", self.policy.base)
        self.templates[which] = TemplateSeen("t", which.host, "slim", TemplateCondition.READY, self.policy.base)
        self.run()
        self.run()

    def until_held(self) -> tuple[Lease, Vm]:
        """A VM of the waiting job is planned on the leased host."""
        self.until_idle()
        self.with_template()
        (vm,) = self.state.vms_on(self.lease.name)
        return self.lease, vm

    def ends(self, **more: object) -> None:
        """The pilot changes."""
        ((id_, pilot),) = self.pilots.items()
        self.pilots[id_] = replace(pilot, **more)  # type: ignore[arg-type]

    def effects(self) -> list[EffectKind]:
        return [effect.kind for row, effect in permitted_effects(self.state) if isinstance(row, Lease)]

    def observe(self) -> None:
        super().observe()
        if self.world.scheduler is None:
            return
        now = self.world.scheduler.began
        view = replace(self.world.scheduler.value, pilots=dict(self.pilots), leasable=dict(self.leasable))
        sources = dict(self.world.sources)
        for name in self.state.leased_hosts():
            host = Host(
                name,
                Size(8, 8192, 65536),
                frozenset({"instant", "full"}),
                images=self.images_there,
                refuses=self.refuses,
                holds_until=self.holds_until,
                storage=self.storage,
            )
            templates = {which: one for which, one in self.templates.items() if which.host == name}
            shown = HypervisorView({name: host}, dict(self.vms_on.get(name, {})), templates)
            known = Seen(shown, now) if name in self.answering else None
            sources[name] = Observation(known, 0.0 if known else now)
        own = sources["hosts"]
        if own.latest is not None:
            mine = {which: one for which, one in self.templates.items() if which.host == "h1"}
            hosts = {name: replace(one, storage=self.static_storage) for name, one in own.latest.value.hosts.items()}
            static = replace(own.latest.value, hosts=hosts, templates=mine)
            sources["hosts"] = replace(own, latest=Seen(static, own.latest.began))
        forecast = replace(self.world.forecast, lease_rest=dict(self.rest))
        self.world = replace(self.world, scheduler=Seen(view, now), sources=sources, forecast=forecast)

    def run_for(self, seconds: float, step: float = 2.0) -> list[Move]:
        """Passes while so much time passes."""
        moves: list[Move] = []
        for _ in range(int(seconds / step)):
            self.pass_time(step - 1.01)
            moves += self.run()
        return moves
