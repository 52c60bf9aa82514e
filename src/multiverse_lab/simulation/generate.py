"""Scenarios drawn from a seed: jobs, what their users do to them, faults and incidents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random

from multiverse.config import (
    BackfillSettings,
    FenceSettings,
    LeaseSettings,
    OverflowSettings,
    PacingSettings,
    PlacementSettings,
    PoolSettings,
    Settings,
)
from multiverse.core.model.basics import CloneKind, Depth, Placement, Size
from multiverse.core.model.host import Host, Overcommitment
from multiverse_lab.simulation.cloud import CLOUD_ABILITIES, QUOTA
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.faults import ControllerCrash, Incident, IncidentKind, Odds, every
from multiverse_lab.simulation.guests import GuestBehaviour
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.network import AgentBehaviour
from multiverse_lab.simulation.pilots import PARTITION, PhysicalNodes
from multiverse_lab.simulation.scenario import Arrival, Scenario, UserAction
from multiverse_lab.simulation.world import Pair, WorldSettings

IMPOSSIBLE = Size(2, 1_000_000)  # larger than any host, but accepted by the gate of these scenarios


def without_faults(seed: int, pair: Pair | None = None) -> Scenario:
    """Jobs, and users who cancel, hold, change or requeue them; no faults and no incidents.

    Without `pair`, the seed decides which scheduler and hypervisor the world has."""
    rng = Random(f"{seed}/scenario")
    hosts = tuple(_host(rng, number) for number in range(rng.choice((1, 1, 2, 3))))
    first = rng.randint(1, 10)
    cluster = ClusterSettings(
        node_timeout=rng.choice((10.0, 20.0, 20.0, 60.0, 300.0)),
        last_id=rng.choice((first, first + 1, 60_000)),
        min_job_age=(2.0, rng.choice((2.5, 30.0, 300.0))),
        flavor=Size(64, 2_000_000, 1 << 20),
        first_id=first,
    )
    chance = Random(f"{seed}/limits")
    cluster = replace(cluster, max_jobs=chance.choice((0, 0, 1, 2)), max_cpus=chance.choice((0, 0, 4)))
    pacing = PacingSettings(provisioning=rng.choice((1, 4, 16)), attempts=rng.choice((2, 12)))
    places = Random(f"{seed}/placement")
    placement = PlacementSettings(places.choice([one.value for one in Placement]))
    hosts = tuple(replace(one, overcommit=Overcommitment(cpus=places.choice((1.0, 1.0, 2.0)))) for one in hosts)
    image_choices = Random(f"{seed}/images")
    arrivals = tuple(_with_image(_arrival(rng), image_choices) for _ in range(rng.randint(1, 8)))
    time_limits = Random(f"{seed}/times")
    arrivals = tuple(_with_limit(arrival, time_limits) for arrival in arrivals)
    arrivals = tuple(_with_placement(one, places) for one in arrivals)
    pacing = replace(pacing, silence=Random(f"{seed}/silence").choice((3.0, 10.0, 60.0)))
    settings = Settings(pacing=pacing, poll=rng.choice((2.0, 5.0)), placement=placement)
    settings = _with_pools(settings, Random(f"{seed}/pools"))
    if (disk := Random(f"{seed}/disk")).random() < 0.3:
        hosts, arrivals, settings = _with_little_disk(hosts, arrivals, settings, disk)
    if late := _arrivals_for_spares(seed, settings):
        cluster = replace(cluster, test_only_share=Random(f"{seed}/probes").choice((0.0, 0.0, 0.2)))
        tests = Random(f"{seed}/tests")  # by a user who has jobs, or by another one
        interval = tests.choice((0.5, 5.0))
        cluster = replace(cluster, tester=tests.choice((0, 0, 0, 1000, 1002)), test_interval=interval)
        arrivals = (*late, *arrivals)
    scenario = Scenario(seed, arrivals, WorldSettings(hosts, cluster=cluster), settings, hints=rng.choice((0.0, 0.9)))
    return with_pair(scenario, pair or PAIRS[seed % len(PAIRS)])


def crowded(seed: int) -> Scenario:
    """More jobs than the hosts hold, with time limits, of which some are exceeded; no faults. Users cancel and hold
    jobs. In some scenarios a job is suspended for a while, so that nobody can tell when the first one starts."""
    rng = Random(f"{seed}/crowd")
    sizes = [Size(rng.choice((2, 4, 6)), rng.choice((4096, 16384)), 65536) for _ in range(rng.randint(1, 3))]
    hosts = tuple(Host(f"h{n}", size, ABILITIES, Size(2, 4096, 65536), "tcg") for n, size in enumerate(sizes))
    widest = sum(host.capacity.cpus for host in hosts) // 2
    suspends = rng.random() < 0.4
    arrivals = []
    for _ in range(rng.randint(6, 14)):
        seconds = rng.choice((2.0, 10.0, 30.0, 90.0))
        batch = Batch(
            uid=rng.choice((1000, 1001)),
            seconds=seconds,
            nodes=rng.choice((1, 1, 1, 2, 3)) if widest >= 3 else 1,
            size=rng.choice((Size(1, 64), Size(1, 500), Size(2, 500), Size(2, 1500))),
            priority=rng.choice((1000, 1000, 2000)),
            image=rng.choice((None, None, None, "stiff")),
            limit=rng.choice((None, seconds + 1, seconds + 20, 3 * seconds, 20.0)),
        )
        actions: tuple[UserAction, ...] = ()
        if suspends and rng.random() < 0.5:
            at = rng.uniform(3.0, 40.0)
            actions = (UserAction(at, "suspend"), UserAction(at + rng.choice((30.0, 120.0)), "resume"))
        elif rng.random() < 0.1:
            actions = (UserAction(rng.uniform(0.0, 60.0), rng.choice(("cancel", "hold"))), UserAction(70.0, "release"))
        arrivals.append(Arrival(rng.uniform(0.5, 60.0), batch, actions=actions))
    cluster = ClusterSettings(max_nodes=16, min_job_age=(2.0, 30.0), flavor=Size(64, 2_000_000, 1 << 20))
    pacing = PacingSettings(provisioning=rng.choice((4, 16)))
    settings = Settings(pacing=pacing, backfill=BackfillSettings(True, rng.choice((3, 100)), rng.choice((1, 3))))
    world = WorldSettings(hosts, cluster=cluster, pair=rng.choice((Pair.SLURM_HOSTS, Pair.GRID_HOSTS)))
    return Scenario(seed, tuple(arrivals), world, settings, hints=rng.choice((0.5, 0.9)))


def requesting(seed: int) -> Scenario:
    """A scenario with faults, or a crowded one, on hosts with an uplink. Some of its jobs request a bandwidth, so many
    VMs on a host, or sockets: no cloud knows of that."""
    rng = Random(f"{seed}/requests")
    pair = rng.choice([one for one in PAIRS if not one.has_cloud])
    scenario = crowded(seed) if rng.random() < 0.3 else with_faults(seed, pair=pair)
    hosts = scenario.world.hosts
    linked = tuple(replace(one, capacity=replace(one.capacity, net=rng.choice((0, 1000, 1000, 2500)))) for one in hosts)
    arrivals = tuple(_asking(one, rng) for one in scenario.arrivals)
    return replace(scenario, arrivals=arrivals, world=replace(scenario.world, hosts=linked))


def operated(seed: int) -> Scenario:
    """Several hosts behind agents, which come, go, die and are cut off, and operators who drain, remove, add and resume
    them; a fence command that works, fails or hangs. Agents are replaced by those of other releases, answer late or
    twice, and may end their VMs by themselves. The controller crashes now and then, or another one starts beside it."""
    rng = Random(f"{seed}/operated")
    hosts = tuple(_host(rng, number) for number in range(rng.choice((2, 3, 3, 4))))
    arrivals = tuple(_with_limit(_arrival(rng), rng) for _ in range(rng.randint(3, 8)))
    cluster = ClusterSettings(
        node_timeout=rng.choice((10.0, 30.0, 60.0)), min_job_age=(2.0, 30.0), flavor=Size(64, 2_000_000, 1 << 20)
    )
    silence = rng.choice((5.0, 30.0))
    command = ("fence", "{host}") if rng.random() < 0.7 else ()
    fence = FenceSettings(command, after=silence + rng.choice((0.0, 30.0)), quorum=rng.choice((0.0, 0.5)))
    settings = Settings(pacing=PacingSettings(silence=silence, provisioning=rng.choice((1, 4))), fence=fence)
    settings = _with_pools(settings, rng)
    incidents = draw_all(OPERATED, rng, until=120.0)
    for kind in (IncidentKind.HOST_AWAY, IncidentKind.LINK_HANGS):
        incidents += (Incident(rng.uniform(2.0, 60.0), kind, rng.choice(CUT_OFF), rng.random()),)
    agents = AgentBehaviour(rng.choice((0.0, 60.0)), late=rng.choice((0.0, 0.0, 0.05)), twice=rng.choice((0.0, 0.2)))
    if agents.self_fence:
        # An agent that does not run ends no VM, and who starts a controller beside another one has to know that.
        incidents = tuple(started_again_soon(one) for one in incidents)
    else:
        incidents += every(rng.choice((0.0, 100.0)), IncidentKind.CONTROLLER_RIVAL, rng, until=120.0)[:1]
    return Scenario(
        seed,
        tuple(replace(one, tasks=min(one.tasks, 2)) for one in arrivals),
        WorldSettings(hosts, cluster=cluster, agents=agents),
        settings,
        incidents=tuple(sorted(incidents, key=lambda incident: incident.at)),
        crashes=draw_crashes(rng, rng.choice((0, 0, 3))),
        limit=6000.0,
    )


def failing(seed: int) -> Scenario:
    """Hosts of which one cannot make VMs, or none of an image, or whose VMs do not register, for a time or for good;
    users for whose jobs slurmctld makes no credentials for a time. In some scenarios the controller crashes, and
    forgets what is no row."""
    rng = Random(f"{seed}/failing")
    hosts = tuple(
        Host(f"h{n}", Size(rng.choice((4, 8)), 16384, 65536), ABILITIES, Size(8, 16384, 65536), "tcg")
        for n in range(rng.choice((1, 2, 2, 3)))
    )
    arrivals = tuple(
        Arrival(
            rng.uniform(0.5, 200.0),
            Batch(
                uid=rng.choice((1000, 1001)),
                seconds=rng.choice((2.0, 20.0, 60.0)),
                nodes=rng.choice((1, 1, 1, 2)),
                size=rng.choice((Size(1, 64), Size(2, 500))),
                image=rng.choice((None, None, "stiff")),
            ),
            actions=(UserAction(rng.uniform(5.0, 60.0), "requeue"),) if rng.random() < 0.2 else (),
        )
        for _ in range(rng.randint(4, 12))
    )
    long = rng.choice((20.0, 300.0, 3000.0, *((1e9,) if len(hosts) > 1 else ())))
    kind = rng.choice((IncidentKind.HOST_REFUSES, IncidentKind.HOST_SPOILS, IncidentKind.HOST_MUTES))
    incidents = [Incident(rng.uniform(0.0, 60.0), kind, long, 0.0)]  # always the first host: others are well
    if rng.random() < 0.5:
        seconds = rng.choice((30.0, 300.0, 3000.0))
        incidents.append(Incident(rng.uniform(0.0, 100.0), IncidentKind.LAUNCHES_FAIL, seconds, rng.random()))
    cluster = ClusterSettings(min_job_age=(2.0, 30.0), flavor=Size(64, 2_000_000, 1 << 20))
    settings = Settings(pacing=PacingSettings(provisioning=rng.choice((1, 4, 16)), attempts=2))
    world = WorldSettings(
        hosts, cluster=cluster, pair=rng.choice((Pair.SLURM_HOSTS, Pair.SLURM_HOSTS, Pair.GRID_HOSTS))
    )
    return Scenario(
        seed,
        arrivals,
        world,
        _with_pools(settings, rng),
        incidents=tuple(sorted(incidents, key=lambda incident: incident.at)),
        crashes=draw_crashes(rng, rng.choice((0, 0, 0, 3))),
        hints=rng.choice((0.5, 0.9)),
        limit=12_000.0,
    )


def leasing(seed: int) -> Scenario:
    """A small host and physical nodes that may be leased, and more jobs than the host holds, in bursts. Pilots are
    preempted, cancelled, queued again, forgotten, or lose their nodes, slurmctld is away, the controller crashes, and
    calls fail, in most scenarios."""
    rng = Random(f"{seed}/leasing")
    hosts = (Host("h1", Size(rng.choice((1, 2)), 4096, 65536), ABILITIES, Size(2, 4096, 65536), "tcg"),)
    arrivals = []
    for burst in (0.5, rng.uniform(60.0, 200.0), rng.uniform(200.0, 500.0))[: rng.choice((1, 2, 3))]:
        for _ in range(rng.randint(1, 5)):
            seconds = rng.choice((2.0, 20.0, 60.0))
            batch = Batch(
                uid=rng.choice((1000, 1001)),
                seconds=seconds,
                nodes=rng.choice((1, 1, 1, 2)),
                size=rng.choice((Size(1, 64), Size(2, 500), Size(4, 500))),
                requeue=rng.random() < 0.8,
                limit=rng.choice((None, seconds + 20, seconds + 20, 3 * seconds)),
            )
            actions = (UserAction(rng.uniform(0.0, 60.0), "cancel"),) if rng.random() < 0.15 else ()
            arrivals.append(Arrival(burst + rng.uniform(0.0, 10.0), batch, actions=actions))
    physical = PhysicalNodes(rng.choice((1, 2, 4)), min_job_age=rng.choice(((2.0, 4.0), (2.0, 300.0))))
    lease = LeaseSettings(
        PARTITION,
        max=min(physical.count, rng.choice((1, 2, 3))),
        time_limit=rng.choice((200.0, 600.0)),
        min_wait=rng.choice((0.0, 5.0)),
        idle=rng.choice((10.0, 40.0)),
        start_timeout=20.0,
    )
    quiet = rng.random() < 0.3
    odds = Odds() if quiet else Odds.even(rng.choice((0.0, 0.02, 0.1)), until=400.0)
    incidents = () if quiet else draw_all(LEASING, rng, until=400.0)
    cluster = ClusterSettings(
        node_timeout=rng.choice((10.0, 60.0)), min_job_age=(2.0, 30.0), flavor=Size(64, 2_000_000)
    )
    pacing = PacingSettings(provisioning=rng.choice((2, 16)), silence=rng.choice((5.0, 60.0)))
    return Scenario(
        seed,
        tuple(arrivals),
        WorldSettings(hosts, cluster=cluster, physical=physical),
        Settings(pacing=pacing, lease=(lease,)),
        scheduler_odds=odds,
        hypervisor_odds=odds,
        incidents=tuple(sorted(incidents, key=lambda incident: incident.at)),
        crashes=() if quiet else draw_crashes(rng, rng.choice((0, 0, 3))),
        hints=rng.choice((0.5, 0.9)),
        limit=6000.0,
    )


def overflowing(seed: int) -> Scenario:
    """Physical nodes whose partition is full now and then, and hosts with room for some of its jobs beside those of the
    gate; in some scenarios other physical nodes may be leased. In most, calls fail, VMs and hosts die, slurmctld is
    away, and the controller crashes."""
    rng = Random(f"{seed}/expanding")
    hosts = tuple(
        Host(f"h{n}", Size(rng.choice((1, 1, 2)), 4096, 65536), ABILITIES, Size(2, 4096, 65536), "tcg")
        for n in range(rng.choice((1, 1, 2)))
    )
    nodes = rng.choice((1, 1, 2))
    arrivals = []
    for burst in (0.5, rng.uniform(40.0, 200.0))[: rng.choice((1, 2))]:
        for _ in range(rng.randint(3, 7)):
            seconds = rng.choice((2.0, 20.0, 60.0))
            batch = Batch(
                uid=rng.choice((1000, 1000, 1001, 1003)),
                seconds=seconds,
                nodes=1 if rng.random() < 0.9 else nodes,
                size=rng.choice((Size(1, 64), Size(1, 64), Size(1, 500), Size(2, 500), Size(16, 500))),
                requeue=rng.random() < 0.9,
                image=rng.choice((*(None,) * 7, "dud")),
                problem=rng.choice((*("",) * 7, "asks for a GPU")),
                limit=rng.choice((None, seconds + 20)),
                origin=OVERFLOWING_PARTITION,
                delay=rng.choice((0.0, 0.0, 0.0, 20.0)),
            )
            if rng.random() < 0.15:
                batch = replace(batch, origin="", uid=1000, nodes=1, size=Size(1, 64), image=None, problem="")
            tasks = rng.randint(2, 4) if rng.random() < 0.15 else 0
            arrivals.append(Arrival(burst + rng.uniform(0.0, 10.0), batch, tasks, _actions(rng)))
    quiet = rng.random() < 0.3
    odds = Odds() if quiet else Odds.even(rng.choice((0.0, 0.1, 0.2)), until=300.0)
    incidents = () if quiet else draw_all(OVERFLOWING, rng, until=300.0)
    min_wait = rng.choice((0.0, 5.0, 30.0))
    cluster = ClusterSettings(
        node_timeout=rng.choice((10.0, 60.0)), min_job_age=(2.0, 30.0), flavor=Size(64, 2_000_000), min_wait=min_wait
    )
    pacing = PacingSettings(provisioning=rng.choice((2, 16)), silence=rng.choice((5.0, 60.0)), attempts=3)
    lending = PhysicalNodes(rng.choice((0, 0, 2)), min_job_age=(2.0, 30.0))
    if lending.count:  # VMs on a leased host go on after the row of its lease is lost, until its pilot is cancelled
        incidents = tuple(one for one in incidents if one.kind is not IncidentKind.DATABASE_LOST)
    lease = LeaseSettings(PARTITION, time_limit=600.0, min_wait=0.0, idle=20.0, start_timeout=20.0)
    return Scenario(
        seed,
        tuple(arrivals),
        WorldSettings(hosts, cluster=cluster, users=(1000, 1001, 1003), physical=lending, overflowing=nodes),
        Settings(
            pacing=pacing,
            lease=(lease,) if lending.count else (),
            overflow=(OverflowSettings(OVERFLOWING_PARTITION, min_wait=min_wait),),
        ),
        scheduler_odds=odds,
        hypervisor_odds=odds,
        incidents=tuple(sorted(incidents, key=lambda incident: incident.at)),
        crashes=() if quiet else draw_crashes(rng, rng.choice((0, 0, 3))),
        hints=rng.choice((0.5, 0.9)),
        limit=6000.0,
    )


OVERFLOWING_PARTITION = "batch"
"""The partition that overflows into VMs."""

OVERFLOWING: Mapping[IncidentKind, tuple[float, ...]] = {
    IncidentKind.VM_DIES: (0.0, 10.0, 20.0),
    IncidentKind.CLUSTER_AWAY: (0.0, 0.0, 100.0),
    IncidentKind.CLUSTER_RESTARTS: (0.0, 0.0, 100.0),
    IncidentKind.HOST_AWAY: (0.0, 30.0, 60.0),
    IncidentKind.TEMPLATE_DELETED: (0.0, 0.0, 60.0),
    IncidentKind.CONTROLLER_CRASH: (0.0, 0.0, 60.0),
    IncidentKind.DATABASE_LOST: (0.0, 0.0, 0.0, 200.0),
}
"""Mean seconds between incidents where a partition overflows into VMs; 0: none."""

LEASING: Mapping[IncidentKind, tuple[float, ...]] = {
    IncidentKind.PILOT_PREEMPTED: (0.0, 100.0),
    IncidentKind.PILOT_CANCELLED: (0.0, 200.0),
    IncidentKind.PILOT_REQUEUED: (0.0, 0.0, 200.0),
    IncidentKind.PILOT_LOST: (0.0, 0.0, 200.0),
    IncidentKind.PILOT_NODE_DOWN: (0.0, 0.0, 150.0),
    IncidentKind.CLUSTER_AWAY: (0.0, 0.0, 200.0),
    IncidentKind.VM_DIES: (0.0, 0.0, 200.0),
}
"""Mean seconds between incidents where hosts are leased; 0: none."""

CUT_OFF = (5.0, 60.0, 600.0)
"""Seconds: shorter than anybody's patience, longer than a connection's, and longer than the time of a fencing."""


def draw_all(choices: Mapping[IncidentKind, tuple[float, ...]], rng: Random, until: float) -> tuple[Incident, ...]:
    """Incidents until `until`, of each kind with one of its mean seconds between two."""
    return tuple(one for kind, means in choices.items() for one in every(rng.choice(means), kind, rng, until))


def started_again_soon(one: Incident) -> Incident:
    """An agent that ends is started again within the time that the controller grants it."""
    return replace(one, seconds=min(one.seconds, 20.0)) if one.kind is IncidentKind.AGENT_DIES else one


def disturbed(
    scenario: Scenario,
    rng: Random,
    until: float,
    anywhere: Mapping[IncidentKind, tuple[float, ...]],
    with_agents: Mapping[IncidentKind, tuple[float, ...]],
) -> Scenario:
    """A scenario in which calls fail until `until`, and incidents of these kinds come: see `draw_all`."""
    silence = (5.0, rng.choice((30.0, 30.0, 30.0, 100.0)))
    odds = [replace(Odds.even(rng.choice((0.0, 0.05, 0.15, 0.3)), until), silence=silence) for _ in range(2)]
    incidents = draw_all(anywhere, rng, until)
    agents = scenario.world.agents
    if agents is not None:
        incidents += draw_all(with_agents, rng, until)
        cut_off = every(rng.choice((0.0, 0.0, 60.0)), IncidentKind.LINK_HANGS, rng, until)
        incidents += tuple(replace(one, seconds=rng.choice(CUT_OFF)) for one in cut_off)
        if agents.self_fence:
            incidents = tuple(started_again_soon(one) for one in incidents)
    return replace(scenario, scheduler_odds=odds[0], hypervisor_odds=odds[1], incidents=incidents)


def in_time(incidents: Iterable[Incident]) -> tuple[Incident, ...]:
    return tuple(sorted(incidents, key=lambda incident: incident.at))


BREAKDOWNS: dict[IncidentKind, tuple[float, ...]] = {
    IncidentKind.VM_DIES: (0.0, 0.0, 30.0),
    IncidentKind.GUEST_FLOODS: (0.0, 0.0, 60.0),
    IncidentKind.REGISTERS_AGAIN: (0.0, 0.0, 30.0),
    IncidentKind.CLUSTER_AWAY: (0.0, 0.0, 30.0),
    IncidentKind.CLUSTER_RESTARTS: (0.0, 0.0, 40.0),
    IncidentKind.HOST_AWAY: (0.0, 0.0, 30.0),
    IncidentKind.HOST_FENCED: (0.0, 0.0, 60.0),
    IncidentKind.HOST_DISK_FULL: (0.0, 0.0, 0.0, 40.0),
    IncidentKind.DISK_FULL: (0.0, 0.0, 0.0, 30.0),
    IncidentKind.CONTROLLER_CRASH: (0.0, 0.0, 8.0, 40.0),
    IncidentKind.HOST_DRAINED: (0.0, 30.0, 60.0),
}
BREAKDOWNS_WITH_AGENTS: dict[IncidentKind, tuple[float, ...]] = {
    IncidentKind.HOST_CRASHES: (0.0, 0.0, 60.0),
    IncidentKind.AGENT_DIES: (0.0, 10.0, 30.0),
    IncidentKind.AGENT_REPLACED: (0.0, 0.0, 60.0),
    IncidentKind.LINK_HANGS: (0.0, 0.0, 30.0),
}
"""The mean seconds between two incidents of a kind: one is drawn for each scenario, 0 for never."""


def troubled(
    scenario: Scenario, rng: Random, until: float, anywhere: Mapping[IncidentKind, tuple[float, ...]] = BREAKDOWNS
) -> Scenario:
    """A scenario that is disturbed until `until`, in which hosts, VMs and the controller break."""
    scenario = disturbed(scenario, rng, until, anywhere, BREAKDOWNS_WITH_AGENTS)
    crashes = draw_crashes(rng, rng.choice((0, 0, 5, 30)))
    return replace(scenario, incidents=in_time(scenario.incidents), crashes=crashes)


def draw_agents(rng: Random) -> AgentBehaviour | None:
    """Agents in half of the scenarios. Some end VMs by themselves, and answer late or twice."""
    if rng.random() >= 0.5:
        return None
    fence = rng.choice((0.0, 0.0, 60.0))
    return AgentBehaviour(fence, late=rng.choice((0.0, 0.0, 0.05)), twice=rng.choice((0.0, 0.2)))


OPERATED: dict[IncidentKind, tuple[float, ...]] = {
    IncidentKind.HOST_CRASHES: (0.0, 60.0),
    IncidentKind.HOST_AWAY: (0.0, 60.0),
    IncidentKind.HOST_FENCED: (0.0, 0.0, 100.0),
    IncidentKind.HOST_DRAINED: (0.0, 30.0),
    IncidentKind.HOST_CLOSING: (0.0, 60.0),
    IncidentKind.HOST_REMOVED: (0.0, 60.0),
    IncidentKind.AGENT_DIES: (0.0, 20.0),
    IncidentKind.AGENT_REPLACED: (0.0, 40.0),
    IncidentKind.LINK_HANGS: (0.0, 30.0),
    IncidentKind.CONTROLLER_CUT_OFF: (0.0, 0.0, 60.0),
    IncidentKind.VM_DIES: (0.0, 30.0),
    IncidentKind.CLUSTER_AWAY: (0.0, 0.0, 60.0),
}
"""The same for scenarios whose hosts are operated."""

PAIRS = tuple(Pair)
CLOUD_LIMIT = 20_000.0
"""Virtual seconds that a scenario in the cloud may take: each VM takes about a minute to be created."""


def with_pair(scenario: Scenario, pair: Pair) -> Scenario:
    """The same scenario with another scheduler and hypervisor. In the cloud the quota is what all hosts together have,
    and all clones are full ones."""
    world = replace(scenario.world, pair=pair)
    if not pair.has_cloud:
        return replace(scenario, world=world)
    sizes = [host.capacity for host in world.hosts]
    quota = Size(sum(s.cpus for s in sizes), sum(s.memory for s in sizes), sum(s.disk for s in sizes))
    world = replace(world, hosts=(Host(QUOTA, quota, CLOUD_ABILITIES, template_copies=0, vm_overhead=0),))
    image = replace(scenario.settings.image, kind=CloneKind.FULL)
    return replace(scenario, world=world, settings=replace(scenario.settings, image=image), limit=CLOUD_LIMIT)


def _with_little_disk(
    hosts: tuple[Host, ...], arrivals: tuple[Arrival, ...], settings: Settings, rng: Random
) -> tuple[tuple[Host, ...], tuple[Arrival, ...], Settings]:
    """Hosts whose disks hold a few VMs, and jobs that ask for disk."""
    small = tuple(replace(host, capacity=replace(host.capacity, disk=rng.choice((7000, 12000)))) for host in hosts)
    asking = tuple(
        replace(one, batch=replace(one.batch, size=replace(one.batch.size, disk=rng.choice((0, 0, 500, 3000)))))
        for one in arrivals
    )
    return small, asking, replace(settings, image=replace(settings.image, scratch=rng.choice((64, 1000))))


def _with_pools(settings: Settings, rng: Random) -> Settings:
    """One scenario in four has warm pools and limited rates of clones, and may leave the kind of clones open."""
    if rng.random() < 0.75:
        return settings
    pools = [
        PoolSettings("slim", Depth.PARKED, rng.randint(0, 2), rng.randint(2, 4), max_age=rng.choice((60.0, 3600.0)))
    ]
    pools += [
        PoolSettings("slim", Depth.JOINED, rng.choice((0, 1, 2, 2)), 2, size.cpus, size.memory, max_age)
        for size in (Size(1, 500), Size(2, 900))
        for max_age in (rng.choice((60.0, 3600.0)),)
    ]
    kind = rng.choice((CloneKind.INSTANT, CloneKind.AUTO))
    pacing = replace(settings.pacing, instant_rate=rng.choice((0.0, 0.1, 200.0)), linked_rate=rng.choice((0.0, 0.25)))
    image = replace(settings.image, kind=kind)
    return replace(settings, pool=tuple(rng.sample(pools, rng.randint(1, 3))), pacing=pacing, image=image)


def with_faults(seed: int, database: str = ":memory:", pair: Pair | None = None) -> Scenario:
    """The same jobs, with faults of calls, incidents and crashes of the controller in the first minute.

    Everything must come to its end afterwards."""
    rng = Random(f"{seed}/trouble")
    scenario = without_faults(seed, pair)
    until = 300.0 if scenario.world.pair.has_cloud else 60.0  # in the cloud little has happened after a minute
    for_spares = len(_arrivals_for_spares(seed, scenario.settings))
    image_times = Random(f"{seed}/late")
    late = tuple(image_times.choice((0.0, 0.0, 5.0, 40.0)) for _ in scenario.world.hosts)
    images = tuple(replace(one, since=late if one.name == "stiff" else ()) for one in scenario.world.images)
    rates = (0.0, 0.02, 0.1, 0.3)
    silence = (5.0, rng.choice((*(30.0,) * 6, 700.0)))  # the longest is longer than the time limit of effects
    odds = [replace(Odds.even(rng.choice(rates), until), silence=silence) for _ in range(2)]
    incidents = draw_all(MEANS, rng, until)
    slow = Random(f"{seed}/slow")
    incidents += every(slow.choice((0.0, 0.0, 0.0, 30.0)), IncidentKind.SOURCE_SLOW, slow, until)
    names = Random(f"{seed}/names")
    incidents += every(names.choice((0.0, 0.0, 0.0, 20.0)), IncidentKind.NAME_SERVICE_SILENT, names, until)
    disks = Random(f"{seed}/disks")
    incidents += every(disks.choice((0.0, 0.0, 0.0, 30.0)), IncidentKind.HOST_DISK_FULL, disks, until)
    store = Random(f"{seed}/database")
    if database == ":memory:" and (replaced := store.choice((*(None,) * 10, *DATABASES))):
        incidents += every(until, replaced, store, until)[:1]
    guests = GuestBehaviour(
        until=until,
        boot=(0.4, rng.choice((1.2, 1.2, 100.0))),
        mute=rng.choice((0.0, 0.0, 0.1)),
        small=rng.choice((0.0, 0.0, 0.1)),
    )
    return replace(
        scenario,
        # More jobs would make a history longer, but not more difficult.
        arrivals=tuple(replace(one, tasks=min(one.tasks, 2)) for one in scenario.arrivals[: for_spares + 3]),
        world=replace(scenario.world, images=images, guests=guests),
        scheduler_odds=odds[0],
        hypervisor_odds=odds[1],
        incidents=tuple(sorted(incidents, key=lambda incident: incident.at)),
        crashes=draw_crashes(rng, rng.choice((0, 0, 5, 30))),
        database=database,
    )


DATABASES = (IncidentKind.DATABASE_RESTORED, IncidentKind.DATABASE_LOST)

MEANS: dict[IncidentKind, tuple[float, ...]] = {
    IncidentKind.VM_DIES: (0.0, 5.0, 30.0),
    IncidentKind.GUEST_FLOODS: (0.0, 0.0, 20.0),
    IncidentKind.REGISTERS_AGAIN: (0.0, 0.0, 20.0),
    IncidentKind.CLUSTER_AWAY: (0.0, 0.0, 30.0, 100.0),
    IncidentKind.CLUSTER_RESTARTS: (0.0, 0.0, 30.0),
    IncidentKind.RECONFIGURED: (0.0, 0.0, 30.0),
    IncidentKind.RESERVED: (0.0, 0.0, 100.0),
    IncidentKind.HOST_AWAY: (0.0, 0.0, 30.0, 60.0),
    IncidentKind.HOST_FENCED: (0.0, 0.0, 60.0),
    IncidentKind.TEMPLATE_DELETED: (0.0, 0.0, 10.0),
    IncidentKind.DISK_FULL: (0.0, 0.0, 30.0),
    IncidentKind.CONTROLLER_CRASH: (0.0, 0.0, 8.0, 60.0),
}
"""The mean seconds between two incidents of a kind: one is drawn for each scenario, 0 for never."""


def draw_crashes(rng: Random, count: int) -> tuple[ControllerCrash, ...]:
    """Crashes at commits. Some follow each other closely, so that the controller crashes during its recovery too."""
    return tuple(
        ControllerCrash(n, rng.random() < 0.5, rng.uniform(0.05, 5.0)) for n in sorted(rng.sample(range(1, 80), count))
    )


def _host(rng: Random, number: int) -> Host:
    capacity = Size(rng.choice((2, 4, 8)), rng.choice((2048, 4096, 16384)), 65536)
    copies = 1 + number % 2
    return Host(f"h{number}", capacity, ABILITIES, Size(2, 4096, 65536), "tcg", template_copies=copies)


def _arrival(rng: Random) -> Arrival:
    batch = Batch(
        name=rng.choice(("hello", "hpl", "sweep")),
        uid=rng.choice((1000, 1001)),
        seconds=rng.choice((0.0, 0.5, 5.0, 40.0)),
        exit_code=rng.choice((0, 0, 3)),
        nodes=rng.choice((1, 1, 1, 2)),
        size=rng.choice((Size(1, 64), Size(1, 500), Size(2, 900))),
        priority=rng.randint(1, 3) * 1000,
        requeue=rng.random() < 0.9,
        lingers=rng.choice((*(0.0,) * 8, 4.0, 200.0)),
        delay=rng.choice((0.0, 0.0, 20.0)),
    )
    if rng.random() < 0.05:
        batch = replace(batch, size=IMPOSSIBLE)
    elif rng.random() < 0.03:
        batch = replace(batch, problem="asks for a reservation, which VMs cannot keep")
    tasks = rng.randint(2, 5) if rng.random() < 0.2 else 0
    batch = replace(batch, at_most=tasks // 2 % 2)
    return Arrival(rng.uniform(0.5, 30.0), batch, tasks, _actions(rng))


def _arrivals_for_spares(seed: int, settings: Settings) -> tuple[Arrival, ...]:
    """Jobs that are submitted when joined spares may be on offer, and may take one."""
    if all(pool.depth is not Depth.JOINED for pool in settings.pool):
        return ()
    rng = Random(f"{seed}/takers")
    return tuple(_arrival_for_spare(rng) for _ in range(rng.randint(1, 4)))


def _arrival_for_spare(rng: Random) -> Arrival:
    one = _arrival(rng)
    size = rng.choice((Size(1, 64), Size(1, 500), Size(2, 900)))
    batch = replace(one.batch, nodes=1, size=size, problem="", at_most=0, delay=rng.choice((0.0, 0.0, 0.0, 20.0)))
    return replace(one, at=rng.uniform(4.0, 120.0), batch=batch, tasks=0)


def _with_image(arrival: Arrival, rng: Random) -> Arrival:
    """Give some jobs an image that can plug neither CPUs nor memory, and some an account with templates of its own."""
    image, account = rng.choice((None, None, None, "stiff")), rng.choice(("", "", "", "physics"))
    return replace(arrival, batch=replace(arrival.batch, image=image, account=account))


def _with_limit(arrival: Arrival, rng: Random) -> Arrival:
    """Give most jobs a time limit, which some of them exceed."""
    seconds = arrival.batch.seconds
    limit = rng.choice((None, seconds + 1.0, seconds + 1.0, seconds + 30.0, 300.0, max(1.0, seconds / 2)))
    return replace(arrival, batch=replace(arrival.batch, limit=limit))


def _with_placement(arrival: Arrival, rng: Random) -> Arrival:
    """Let some jobs name a placement policy, which may be one that is not there."""
    placement = rng.choice((None, None, None, "pack", "best-fit", "gone"))
    return replace(arrival, batch=replace(arrival.batch, placement=placement))


def _asking(arrival: Arrival, rng: Random) -> Arrival:
    """CPUs are a multiple of the sockets, as multiverse.lua rounds them."""
    batch, changed = arrival.batch, any(action.kind == "change" for action in arrival.actions)
    sockets = rng.choice((1, 1, 1, 2))
    sockets = 1 if changed else sockets
    size = replace(batch.size, net=rng.choice((0, 0, 100, 600, 1500)), cpus=-(-batch.size.cpus // sockets) * sockets)
    return replace(arrival, batch=replace(batch, size=size, per_host=rng.choice((0, 0, 1, 2)), sockets=sockets))


def _actions(rng: Random) -> tuple[UserAction, ...]:
    """The later actions of a job's user. A job that is held or suspended is released or resumed, so that it can end."""
    at = rng.choice((rng.uniform(0.0, 3.0), rng.uniform(3.0, 8.0), rng.uniform(0.0, 30.0)))  # the second: most start
    wait = rng.uniform(0.1, 20.0)
    match rng.randrange(12):
        case 0 | 1:
            return (UserAction(at, "cancel"),)
        case 2:
            return (UserAction(at, "hold"), UserAction(at + wait, "release"))
        case 3:
            return (UserAction(at, "requeue"),)
        case 4:
            return (UserAction(at, "suspend"), UserAction(at + wait, "resume"), UserAction(100.0, "resume"))
        case 5:
            return (UserAction(at, "change", Size(1, 300)),)
        case _:
            return ()
