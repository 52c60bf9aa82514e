"""Scenarios with jobs that are suspended for long, so that their VMs sleep, drawn from a seed."""

from __future__ import annotations

from random import Random

from multiverse.config import PacingSettings, SaveSettings, Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.saved import Storage
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.generate import draw_agents, troubled
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.scenario import Arrival, Scenario, UserAction
from multiverse_lab.simulation.world import WorldSettings

UNTIL = 200.0  # seconds in which jobs are suspended and resumed, calls fail, and things break


def sleeping(seed: int) -> Scenario:
    """Jobs that are suspended and resumed again and again, more than the hosts hold at once, on hosts that let their
    VMs sleep. In most scenarios calls fail, and hosts, VMs, slurmctld and the controller are lost."""
    rng = Random(f"{seed}/sleeping")
    hosts = tuple(_host(rng, number) for number in range(rng.choice((1, 1, 2, 3))))
    flavor = Size(64, 2_000_000, 1 << 20)
    timeout, delay = rng.choice((30.0, 300.0)), rng.choice((121.0, 5.0))
    cluster = ClusterSettings(node_timeout=timeout, requeue_delay=delay, flavor=flavor)
    pacing = PacingSettings(provisioning=rng.choice((1, 4, 16)), silence=rng.choice((5.0, 30.0, 60.0)))
    save = SaveSettings(enabled=True, sleep_after=rng.choice((1.0, 5.0, 20.0)))
    arrivals = tuple(_arrival(rng) for _ in range(rng.randint(3, 10)))
    agents = draw_agents(rng)
    scenario = Scenario(
        seed,
        arrivals,
        WorldSettings(hosts, cluster=cluster, agents=agents),
        Settings(pacing=pacing, save=save, poll=rng.choice((2.0, 5.0))),
        hints=rng.choice((0.5, 0.9)),
        limit=8000.0,
    )
    return scenario if rng.random() < 0.2 else troubled(scenario, rng, UNTIL)


def _host(rng: Random, number: int) -> Host:
    capacity = Size(rng.choice((2, 4)), rng.choice((2048, 4096)), 65536)
    storage = Storage(f"of h{number}", "7.2 tcg") if rng.random() < 0.95 else None
    return Host(f"h{number}", capacity, ABILITIES, Size(2, 4096, 65536), "tcg", storage=storage)


def _arrival(rng: Random) -> Arrival:
    seconds = rng.choice((20.0, 60.0, 120.0))
    batch = Batch(
        uid=rng.choice((1000, 1001)),
        seconds=seconds,
        exit_code=rng.choice((0, 0, 3)),
        nodes=rng.choice((1, 1, 1, 1, 2)),
        size=rng.choice((Size(1, 500), Size(1, 500), Size(2, 900))),
        priority=rng.randint(1, 3) * 1000,
        requeue=rng.random() < 0.9,
        limit=rng.choice((None, None, seconds + 60.0)),
    )
    actions: list[UserAction] = []
    at = rng.uniform(3.0, 40.0)
    for _ in range(rng.randint(0, 4)):
        actions.append(UserAction(at, "suspend"))
        at += rng.choice((0.2, 4.0, 10.0, 30.0, 60.0)) * rng.uniform(0.5, 1.5)
        if rng.random() < 0.1:
            actions.append(UserAction(at, rng.choice(("cancel", "requeue"))))
        actions.append(UserAction(at, "resume"))
        at += rng.choice((0.1, 1.0, 5.0, 20.0)) * rng.uniform(0.5, 1.5)
    ends = (UserAction(UNTIL + more, "resume") for more in (0, 100, 200)) if actions else ()
    return Arrival(rng.uniform(0.5, 30.0), batch, 0, (*actions, *ends))
