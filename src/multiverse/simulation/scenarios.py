"""Scenarios drawn from a seed: users who do what users do, and as much trouble as is asked for."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from multiverse.config import PacingSettings, PoolSettings, Settings
from multiverse.core.model import CloneKind, Depth, Host, Size
from multiverse.simulation.cluster import ClusterSettings
from multiverse.simulation.faults import Death, Odds, What, every
from multiverse.simulation.guests import GuestPace
from multiverse.simulation.jobs import Batch
from multiverse.simulation.machines import ABILITIES
from multiverse.simulation.run import Arrival, Deed, Scenario
from multiverse.simulation.world import WorldSettings

IMPOSSIBLE = Size(2, 1_000_000)  # larger than any host, yet within the gate's flavor here


def calm(seed: int) -> Scenario:
    """A crowd of jobs, users who change their minds, and nothing that goes wrong."""
    rng = Random(f"{seed}/scenario")
    hosts = tuple(_host(rng, number) for number in range(rng.choice((1, 1, 2, 3))))
    first = rng.randint(1, 10)
    cluster = ClusterSettings(
        silence=rng.choice((10.0, 20.0, 20.0, 60.0, 300.0)),
        last_id=rng.choice((first, first + 1, 60_000)),
        memory=(2.0, rng.choice((2.5, 30.0, 300.0))),
        flavor=Size(64, 2_000_000),
        first_id=first,
    )
    chance = Random(f"{seed}/limits")
    cluster = replace(cluster, max_jobs=chance.choice((0, 0, 1, 2)), max_cpus=chance.choice((0, 0, 4)))
    pacing = PacingSettings(provisioning=rng.choice((1, 4, 16)), attempts=rng.choice((2, 12)))
    tastes = Random(f"{seed}/images")
    arrivals = tuple(_with_image(_arrival(rng), tastes) for _ in range(rng.randint(1, 8)))
    settings = _with_pools(Settings(pacing=pacing, poll=rng.choice((2.0, 5.0))), Random(f"{seed}/pools"))
    if takers := _takers(seed, settings):
        cluster = replace(cluster, probes=Random(f"{seed}/probes").choice((0.0, 0.0, 0.2)))
        arrivals = (*takers, *arrivals)
    return Scenario(seed, arrivals, WorldSettings(hosts, cluster=cluster), settings, hints=rng.choice((0.0, 0.9)))


def _with_pools(settings: Settings, rng: Random) -> Settings:
    """Every fourth history has warm pools and a pace, and leaves it to us which kind of clone is made."""
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


def troubled(seed: int, database: str = ":memory:") -> Scenario:
    """The same crowd, with calls that fail, VMs that die, hosts and a slurmctld that go away, a disk that
    fills up and a controller that dies, for a minute; what then remains must come to its end."""
    rng = Random(f"{seed}/trouble")
    until = 60.0
    scenario = calm(seed)
    takers = len(_takers(seed, scenario.settings))
    fates = Random(f"{seed}/late")
    late = tuple(fates.choice((0.0, 0.0, 5.0, 40.0)) for _ in scenario.world.hosts)
    images = tuple(replace(one, since=late if one.name == "stiff" else ()) for one in scenario.world.images)
    rates = (0.0, 0.02, 0.1, 0.3)
    silence = (5.0, rng.choice((*(30.0,) * 6, 700.0)))  # the longest outlasts the patience that effects have
    odds = [replace(Odds.even(rng.choice(rates), until), silence=silence) for _ in range(2)]
    mishaps = tuple(mishap for what, means in MEANS.items() for mishap in every(rng.choice(means), what, rng, until))
    pace = GuestPace(
        boot=(0.4, rng.choice((1.2, 1.2, 100.0))), mute=rng.choice((0.0, 0.0, 0.1)), small=rng.choice((0.0, 0.0, 0.1))
    )
    return replace(
        scenario,
        # More jobs make a history longer, not harder.
        arrivals=tuple(replace(one, tasks=min(one.tasks, 2)) for one in scenario.arrivals[: takers + 3]),
        world=replace(scenario.world, images=images, guests=pace),
        scheduler_odds=odds[0],
        hypervisor_odds=odds[1],
        mishaps=tuple(sorted(mishaps, key=lambda mishap: mishap.at)),
        deaths=_deaths(rng, rng.choice((0, 0, 5, 30))),
        database=database,
    )


MEANS: dict[What, tuple[float, ...]] = {
    What.VM_DIES: (0.0, 5.0, 30.0),
    What.FLOODS: (0.0, 0.0, 20.0),
    What.REGISTERS_AGAIN: (0.0, 0.0, 20.0),
    What.CLUSTER_AWAY: (0.0, 0.0, 30.0, 100.0),
    What.CLUSTER_RESTARTS: (0.0, 0.0, 30.0),
    What.RECONFIGURED: (0.0, 0.0, 30.0),
    What.HOST_AWAY: (0.0, 0.0, 30.0, 60.0),
    What.HOST_FENCED: (0.0, 0.0, 60.0),
    What.DROPPED: (0.0, 0.0, 10.0),
    What.DISK_FULL: (0.0, 0.0, 30.0),
    What.CRASH: (0.0, 0.0, 8.0, 60.0),
}
"""The mean seconds between two mishaps of a kind: one of these is drawn for each history, 0 for never."""


def _deaths(rng: Random, count: int) -> tuple[Death, ...]:
    """Deaths at commits, some right after one another: the controller dies during its recovery too."""
    return tuple(Death(n, rng.random() < 0.5, rng.uniform(0.05, 5.0)) for n in sorted(rng.sample(range(1, 80), count)))


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
    return Arrival(rng.uniform(0.5, 30.0), batch, tasks, _deeds(rng))


def _takers(seed: int, settings: Settings) -> tuple[Arrival, ...]:
    """Jobs that come when joined spares may be ready, and take one as they are submitted."""
    if all(pool.depth is not Depth.JOINED for pool in settings.pool):
        return ()
    rng = Random(f"{seed}/takers")
    return tuple(_taker(rng) for _ in range(rng.randint(1, 4)))


def _taker(rng: Random) -> Arrival:
    one = _arrival(rng)
    size = rng.choice((Size(1, 64), Size(1, 500), Size(2, 900)))
    batch = replace(one.batch, nodes=1, size=size, problem="", at_most=0, delay=rng.choice((0.0, 0.0, 0.0, 20.0)))
    return replace(one, at=rng.uniform(4.0, 120.0), batch=batch, tasks=0)


def _with_image(arrival: Arrival, rng: Random) -> Arrival:
    """Some want an image that can plug nothing, some have an account whose templates are its own."""
    image, account = rng.choice((None, None, None, "stiff")), rng.choice(("", "", "", "physics"))
    return replace(arrival, batch=replace(arrival.batch, image=image, account=account))


def _deeds(rng: Random) -> tuple[Deed, ...]:
    """What its user does to it. Whatever is stopped is set going again, so that it can end."""
    at = rng.choice((rng.uniform(0.0, 3.0), rng.uniform(3.0, 8.0), rng.uniform(0.0, 30.0)))  # the second: as it starts
    wait = rng.uniform(0.1, 20.0)
    match rng.randrange(12):
        case 0 | 1:
            return (Deed(at, "cancel"),)
        case 2:
            return (Deed(at, "hold"), Deed(at + wait, "release"))
        case 3:
            return (Deed(at, "requeue"),)
        case 4:
            return (Deed(at, "suspend"), Deed(at + wait, "resume"), Deed(100.0, "resume"))
        case 5:
            return (Deed(at, "change", Size(1, 300)),)
        case _:
            return ()
