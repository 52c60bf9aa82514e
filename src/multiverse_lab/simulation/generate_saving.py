"""Scenarios with jobs that are saved and resumed, drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

from multiverse.config import PacingSettings, SaveSettings, Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.job import SaveWish
from multiverse.core.model.saved import Storage
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.faults import Incident, IncidentKind, every
from multiverse_lab.simulation.generate import BREAKDOWNS_WITH_AGENTS, disturbed, draw_agents, draw_crashes, in_time
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.scenario import Arrival, Scenario, UserAction
from multiverse_lab.simulation.world import WorldSettings

UNTIL = 120.0  # seconds in which calls fail, and things break
KEEP_REPLACED = 0.005
"""Days that states are kept where the database is replaced. What no record explains is removed once it is older."""

_ANYWHERE: dict[IncidentKind, tuple[float, ...]] = {
    IncidentKind.VM_DIES: (0.0, 0.0, 20.0),
    IncidentKind.GUEST_FLOODS: (0.0, 0.0, 60.0),
    IncidentKind.REGISTERS_AGAIN: (0.0, 0.0, 30.0),
    IncidentKind.CLUSTER_AWAY: (0.0, 0.0, 30.0),
    IncidentKind.CLUSTER_RESTARTS: (0.0, 0.0, 40.0),
    IncidentKind.RECONFIGURED: (0.0, 0.0, 40.0),
    IncidentKind.HOST_AWAY: (0.0, 0.0, 40.0),
    IncidentKind.HOST_FENCED: (0.0, 0.0, 60.0),
    IncidentKind.HOST_DISK_FULL: (0.0, 0.0, 0.0, 40.0),
    IncidentKind.STORAGE_AWAY: (0.0, 0.0, 20.0),
    IncidentKind.STORAGE_FULL: (0.0, 0.0, 20.0),
    IncidentKind.STORAGE_LOST: (0.0, 0.0, 0.0, 40.0),
    IncidentKind.DISK_FULL: (0.0, 0.0, 0.0, 30.0),
    IncidentKind.CONTROLLER_CRASH: (0.0, 0.0, 8.0, 40.0),
}
_WITH_AGENTS = {**BREAKDOWNS_WITH_AGENTS, IncidentKind.HOST_DRAINED: (0.0, 0.0, 60.0)}
"""The mean seconds between two incidents of a kind: one is drawn for each scenario, 0 for never."""


def saving(seed: int) -> Scenario:
    """Jobs that are saved at random moments, some again and again, some held until they are resumed, in many scenarios
    in several VMs, on hosts that share a storage or have one each, in some with another one for copies. Users cancel,
    hold, change, suspend and requeue them between the steps, and time limits end some. In most scenarios calls fail,
    storages, hosts, slurmctld and the controller are lost."""
    rng = Random(f"{seed}/saving")
    hosts = tuple(_host(rng, number) for number in range(rng.choice((1, 2, 2, 3))))
    one_each = rng.random() < 0.3
    machine = [rng.choice(("qemu", "qemu", "qemu", "another")) for _ in hosts]
    hosts = tuple(
        replace(host, storage=Storage(f"of {host.name}" if one_each else "shared", what))
        for host, what in zip(hosts, machine, strict=True)
    )
    if len(hosts) > 1 and rng.random() < 0.1:
        hosts = (*hosts[:-1], replace(hosts[-1], storage=None))
    hosts = _with_copies(hosts, Random(f"{seed}/copies"), one_each=one_each)
    cluster = ClusterSettings(
        node_timeout=rng.choice((10.0, 30.0, 300.0)),
        requeue_delay=rng.choice((121.0, 121.0, 5.0)),
        min_job_age=(2.0, rng.choice((2.5, 30.0))),
        flavor=Size(64, 2_000_000, 1 << 20),
    )
    pacing = PacingSettings(provisioning=rng.choice((1, 4, 16)), silence=rng.choice((5.0, 30.0, 60.0)))
    arrivals = _in_several_vms((_arrival(rng) for _ in range(rng.randint(1, 5))), Random(f"{seed}/gangs"))
    quiet = rng.random() < 0.2
    agents = draw_agents(rng)
    scenario = Scenario(
        seed,
        arrivals,
        WorldSettings(hosts, cluster=cluster, agents=agents),
        Settings(pacing=pacing, poll=rng.choice((2.0, 5.0)), save=SaveSettings(True, no_requeue=rng.random() < 0.5)),
        hints=rng.choice((0.5, 0.9)),
        limit=6000.0,
    )
    return scenario if quiet else _with_trouble(scenario, rng)


def _in_several_vms(arrivals: Iterable[Arrival], rng: Random) -> tuple[Arrival, ...]:
    """In two of five scenarios most jobs have several VMs."""
    many = rng.random() < 0.4
    return tuple(
        replace(one, batch=replace(one.batch, nodes=rng.choice((2, 2, 3)))) if many and rng.random() < 0.7 else one
        for one in arrivals
    )


def _with_copies(hosts: tuple[Host, ...], rng: Random, *, one_each: bool) -> tuple[Host, ...]:
    """In some scenarios, in most of those in which each host has a storage of its own, the hosts have a storage for
    copies; in some of these one host writes there."""
    if rng.random() > (0.8 if one_each else 0.2):
        return hosts
    there = tuple(replace(host, copies=host.storage and replace(host.storage, name="copies")) for host in hosts)
    if len(there) > 1 and rng.random() < 0.2:
        there = (*there[:-1], replace(there[-1], storage=there[-1].copies, copies=None))
    return there


def _with_trouble(scenario: Scenario, rng: Random) -> Scenario:
    scenario = disturbed(scenario, rng, UNTIL, _ANYWHERE, _WITH_AGENTS)
    replaced = _replaced_database(scenario, rng)
    keep = KEEP_REPLACED if replaced else scenario.settings.save.keep_days
    cluster = replace(scenario.world.cluster, forgets=rng.choice((0.0, 0.0, 0.2, 0.5)))
    return replace(
        scenario,
        world=replace(scenario.world, cluster=cluster),
        settings=replace(scenario.settings, save=replace(scenario.settings.save, keep_days=keep)),
        incidents=in_time((*scenario.incidents, *replaced)),
        crashes=draw_crashes(rng, rng.choice((0, 0, 5, 30))),
    )


def _replaced_database(scenario: Scenario, rng: Random) -> tuple[Incident, ...]:
    """In some scenarios the database is lost, in others restored from a copy. Not behind agents: one that does not
    answer as the controller starts would know a later epoch than that takes, and stay out of reach."""
    if scenario.world.agents is not None:
        return ()
    if rng.random() < 0.2:
        return every(UNTIL / 2, IncidentKind.DATABASE_LOST, rng, UNTIL)[:1]
    own = Random(f"{scenario.seed}/restored")
    return every(UNTIL / 2, IncidentKind.DATABASE_RESTORED, own, UNTIL)[:1] if own.random() < 0.4 else ()


def _host(rng: Random, number: int) -> Host:
    capacity = Size(rng.choice((2, 4, 8)), rng.choice((4096, 16384)), 65536)
    return Host(f"h{number}", capacity, ABILITIES, Size(2, 4096, 65536), "tcg")


def _arrival(rng: Random) -> Arrival:
    seconds = rng.choice((2.0, 10.0, 30.0, 60.0, 120.0))
    batch = Batch(
        uid=rng.choice((1000, 1001)),
        seconds=seconds,
        exit_code=rng.choice((0, 0, 3)),
        nodes=1 if rng.random() < 0.95 else 2,
        size=rng.choice((Size(1, 64), Size(1, 500), Size(2, 900))),
        priority=rng.randint(1, 3) * 1000,
        requeue=rng.random() < 0.9,
        lingers=rng.choice((*(0.0,) * 8, 4.0, 30.0)),
        image=rng.choice((None, None, None, "stiff")),
        limit=rng.choice((None, None, seconds + 1.0, seconds + 30.0, max(1.0, seconds / 2))),
    )
    anew = rng.random() < 0.5
    if rng.random() < 0.2:  # it needs several runs
        limit = rng.choice((30.0, 60.0))
        batch = replace(batch, seconds=120.0, limit=limit, save=SaveWish(rng.choice((12.0, limit / 2)), anew))
    elif rng.random() < 0.2:
        batch = replace(batch, save=SaveWish(5.0, anew))
    tasks = 2 if rng.random() < 0.1 else 0
    return Arrival(rng.uniform(0.5, 30.0), batch, tasks, _actions(rng, batch.size))


def _actions(rng: Random, size: Size) -> tuple[UserAction, ...]:
    """A job is saved up to three times. Between the steps of the first one its user does something else, in one job of
    two: the steps take some seconds in all."""
    actions: list[UserAction] = []
    at = first = rng.choice((rng.uniform(0.0, 10.0), rng.uniform(5.0, 60.0)))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        held = rng.random() < 0.3
        actions.append(UserAction(at, "save_held" if held else "save"))
        at += rng.choice((rng.uniform(0.0, 5.0), rng.uniform(5.0, 60.0)))
        if held:
            actions.append(UserAction(at, "resume_saved"))
        at += rng.uniform(5.0, 60.0)
    between = first + rng.choice((rng.uniform(0.0, 3.0), rng.uniform(0.0, 10.0), rng.uniform(10.0, 40.0)))
    wait = rng.uniform(0.1, 20.0)
    match rng.randrange(14):
        case 0 | 1:
            actions.append(UserAction(between, "cancel"))
        case 2 | 3:
            actions += [UserAction(between, "hold"), UserAction(between + wait, "release")]
        case 4 | 5:
            actions.append(UserAction(between, "requeue"))
        case 6:
            actions += [UserAction(between, "suspend"), UserAction(between + wait, "resume")]
            actions += [UserAction(after, "resume") for after in (100.0, 200.0, 300.0)]
        case 7:
            actions += [UserAction(between, "change", Size(1, 300)), UserAction(between + 5 * wait, "change", size)]
            actions.append(UserAction(300.0, "change", Size(1, 64)))  # whatever it was saved as: its node holds that
        case _:
            pass
    return tuple(sorted(actions, key=lambda action: action.after))
