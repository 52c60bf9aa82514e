"""Scenarios with VMs that move between hosts while their jobs run, drawn from a seed."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from multiverse.config import PacingSettings, Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.machine import MachineKind
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.faults import IncidentKind, every
from multiverse_lab.simulation.generate import BREAKDOWNS, draw_agents, troubled
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.scenario import Arrival, Scenario, UserAction
from multiverse_lab.simulation.world import WorldSettings

UNTIL = 150.0  # seconds in which VMs are moved, calls fail, and things break
KIND = MachineKind("kvm", "Skylake-Server-v1", frozenset({"sse2", "avx"}), "7.2", "pc-q35-7.2", models=("Haswell-v1",))
OLDER = replace(KIND, cpu="Haswell-v1", features=frozenset({"sse2"}))  # VMs move from it to the others, and not back

_ANYWHERE = {IncidentKind.VM_MOVES: (2.0, 5.0, 15.0), **BREAKDOWNS}


def moving(seed: int) -> Scenario:
    """Jobs whose VMs are moved at random moments, by commands and off hosts that are drained, between two to four hosts
    of which not all make the same machine. In most scenarios calls fail, links between hosts are cut at any step, and
    hosts, VMs, slurmctld and the controller are lost."""
    rng = Random(f"{seed}/moving")
    hosts = tuple(_host(rng, number) for number in range(rng.choice((2, 2, 3, 4))))
    cluster = ClusterSettings(
        node_timeout=rng.choice((10.0, 30.0, 300.0)),
        requeue_delay=rng.choice((121.0, 5.0)),
        flavor=Size(64, 2_000_000, 1 << 20),
    )
    pacing = PacingSettings(provisioning=rng.choice((1, 4, 16)), silence=rng.choice((5.0, 30.0, 60.0)))
    arrivals = tuple(_arrival(rng) for _ in range(rng.randint(1, 5)))
    agents = draw_agents(rng)
    quiet = rng.random() < 0.1
    scenario = Scenario(
        seed,
        arrivals,
        WorldSettings(hosts, cluster=cluster, agents=agents, links_cut=0.0 if quiet else rng.choice((0.0, 0.1, 0.4))),
        Settings(pacing=pacing, poll=rng.choice((2.0, 5.0))),
        hints=rng.choice((0.5, 0.9)),
        limit=6000.0,
    )
    moves = every(5.0, IncidentKind.VM_MOVES, rng, UNTIL)
    return replace(scenario, incidents=tuple(moves)) if quiet else troubled(scenario, rng, UNTIL, _ANYWHERE)


def _host(rng: Random, number: int) -> Host:
    capacity = Size(rng.choice((2, 4, 8, 8)), rng.choice((4096, 16384)), 65536)
    moves = rng.choice((*(KIND,) * 8, OLDER, None))
    return Host(f"h{number}", capacity, ABILITIES, Size(2, 4096, 65536), "tcg", moves=moves)


def _arrival(rng: Random) -> Arrival:
    seconds = rng.choice((10.0, 30.0, 60.0, 120.0))
    batch = Batch(
        uid=rng.choice((1000, 1001)),
        seconds=seconds,
        exit_code=rng.choice((0, 0, 3)),
        nodes=rng.choice((1, 1, 1, 2, 3)),
        size=rng.choice((Size(1, 64), Size(1, 64), Size(1, 500), Size(2, 900))),
        priority=rng.randint(1, 3) * 1000,
        requeue=rng.random() < 0.9,
        lingers=rng.choice((*(0.0,) * 8, 4.0, 30.0)),
        image=rng.choice((None, None, None, "stiff")),
        limit=rng.choice((None, None, seconds + 30.0, max(1.0, seconds / 2))),
    )
    actions: tuple[UserAction, ...] = ()
    at, wait = rng.uniform(5.0, 60.0), rng.uniform(0.1, 20.0)
    match rng.randrange(10):
        case 0:
            actions = (UserAction(at, "cancel"),)
        case 1:
            actions = (UserAction(at, "requeue"),)
        case 2:
            actions = (UserAction(at, "suspend"), *(UserAction(at + wait + more, "resume") for more in (0, 100, 200)))
    return Arrival(rng.uniform(0.5, 30.0), batch, 2 if rng.random() < 0.1 else 0, actions)
