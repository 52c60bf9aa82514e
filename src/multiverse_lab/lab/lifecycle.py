"""Brings a lab up, shows its status, and brings it down. Every step can be repeated."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from multiverse.config import Settings
from multiverse.core.errors import MultiverseError, Refused
from multiverse.core.model.basics import number_of
from multiverse.system.interrupts import whole
from multiverse.system.locks import try_locked_directory
from multiverse_lab.lab import baremetal, bridge, process, router, users_command, vms
from multiverse_lab.lab.configure import configure
from multiverse_lab.lab.hosts.machine import remove_remains
from multiverse_lab.lab.hosts.physical import physical_services
from multiverse_lab.lab.hosts.services import host_services
from multiverse_lab.lab.layout import Layout
from multiverse_lab.lab.plan import LabHost, LabOptions, LabPlan, decide, load
from multiverse_lab.lab.service import Lab, Service, patience, run
from multiverse_lab.lab.services import AGENT, CONTROLLER, services

Progress = Callable[[str, str, float], None]
"""Called with the name of a step, its result, and the seconds it took."""

_GATE = 10.0
"""Seconds for the controller to hold the gate's licence."""


@contextmanager
def _locked(where: Layout) -> Iterator[None]:
    """Hold the lab's lock. `Refused` while another `up` or `down` holds it."""
    with try_locked_directory(where.root) as ours:
        if not ours:
            raise Refused(f"another command uses the lab in {where.root}", hint="wait until it has ended")
        yield


async def up(
    where: Layout,
    options: LabOptions,
    progress: Progress = lambda name, result, seconds: None,
    *,
    controller: bool = True,
) -> Settings:
    """Start the services that do not run, all but the controller and the agent with `controller=False`.

    `Broken` names a service that does not start. The services that were started before it go on running.
    """

    def wanted(plan: LabPlan) -> Iterable[Service]:
        return (service for service in services(plan) if controller or service not in (AGENT, CONTROLLER))

    settings = await _up(where, options, progress, wanted)
    if controller:
        await whole(_await_gate, where, settings)
    return settings


def _await_gate(where: Layout, settings: Settings) -> None:
    """Wait until jobs can wait at the gate, which the controller's first observation of Slurm sees to. Before, Slurm
    refuses every job. `multiverse status` shows what keeps it; here it is waited for no longer than usual."""
    plan, name = load(where), settings.slurm.gate_feature
    deadline = time.monotonic() + _GATE * patience()
    while plan is not None and time.monotonic() < deadline:
        if f"ReservationName={name} " in run(Lab(where, plan), "scontrol", "show", "reservation", "-o", check=False):
            return
        time.sleep(0.05)


async def up_hosts(where: Layout, options: LabOptions, progress: Progress) -> Settings:
    """Start hosts with namespaces of their own alone: no Slurm, and no controller. Otherwise as `up`."""
    return await _up(where, options, progress, lambda plan: chain.from_iterable(map(host_services, plan.own_hosts)))


async def _up(
    where: Layout, options: LabOptions, progress: Progress, wanted: Callable[[LabPlan], Iterable[Service]]
) -> Settings:
    if os.geteuid() != 0:
        raise Refused("a lab needs root: it makes links and starts daemons as their own users", hint="use sudo")
    where.make()
    with _locked(where):
        _check_hosts(where, options)
        plan = await whole(decide, where, options)
        settings = await whole(configure, where, plan)
        await whole(users_command.install, where)
        lab = Lab(where, plan)
        began = time.monotonic()
        created = await whole(bridge.up, plan)
        progress("bridge", "created" if created else "exists", time.monotonic() - began)
        if plan.routed:
            began = time.monotonic()
            created = await whole(router.up, plan)
            progress("router", "created" if created else "exists", time.monotonic() - began)
        for service in wanted(plan):
            began = time.monotonic()
            started = await service.ensure(lab)
            progress(service.name, "started" if started else "runs", time.monotonic() - began)
        return settings


def _check_hosts(where: Layout, options: LabOptions) -> None:
    """`Refused` if the number of hosts is to change while something of the lab runs."""
    plan = load(where)
    if plan is None:
        return
    wanted = ((options.hosts, plan.hosts), (options.physical, plan.physical), (options.routed, plan.routed))
    if all(one in (None, there) for one, there in wanted):
        return
    if any(service.running(where) for service in services(plan)):
        nodes = f" and {number_of(plan.physical, 'bare-metal node')}" if plan.physical else ""
        between = ", a router" if plan.routed else ""
        raise Refused(
            f"the lab in {where.root} runs with {number_of(plan.hosts, 'host')}{between}{nodes}",
            hint="bring it down first: multiverse lab down",
        )


async def stop_controller(where: Layout) -> int:
    """Stop the controller and the agent, or the hosts with namespaces of their own, then destroy all VMs; the number of
    VMs that were destroyed one by one: those of such a host end with it."""
    plan = load(where)
    await CONTROLLER.stop(where)
    await AGENT.stop(where)
    for host in (*plan.own_hosts, *plan.physical_nodes) if plan else ():
        await _stop_host(where, host)
    return await vms.destroy_all(where)


async def _stop_host(where: Layout, host: LabHost) -> None:
    """Stop a host, and remove its VMs, its network and its control groups. Its keys and images stay."""
    for service in reversed((physical_services if host.physical else host_services)(host)):
        await service.stop(where)
    await whole(remove_remains, where, host)
    own = where.host(host.name)
    for path in (own.run, own.controller / "vms"):
        await whole(shutil.rmtree, path, ignore_errors=True)


async def down(where: Layout, progress: Progress = lambda name, result, seconds: None) -> None:
    """Stop all services in reverse order, and destroy all VMs, also those of a dead controller.

    Logs, keys, the database and caches stay in the lab's directory. The first error is raised after all steps have been
    tried.
    """
    if not where.root.exists():
        return
    errors: list[MultiverseError] = []
    with _locked(where):
        plan = load(where)
        async with _step(baremetal.SLURMD.name, progress, errors) as result:
            result.append("stopped" if await baremetal.end(where) else "was not running")
        for service in reversed(services(plan)):
            async with _step(service.name, progress, errors) as result:
                result.append("stopped" if await service.stop(where) else "was not running")
            if service is AGENT and plan is not None:
                async with _step("VMs", progress, errors) as result:
                    result.append(f"{await vms.destroy_all(where)} destroyed")
        for host in (*plan.own_hosts, *plan.physical_nodes) if plan is not None else ():
            async with _step(f"{host.name}-vms", progress, errors) as result:
                await _stop_host(where, host)
                result.append("removed")
        if plan is not None and plan.routed:
            async with _step("router", progress, errors) as result:
                result.append("deleted" if await whole(router.down, plan) else "did not exist")
        if plan is not None:
            async with _step("bridge", progress, errors) as result:
                await whole(router.remove_vxlans, where)
                result.append("deleted" if await whole(bridge.down, plan) else "did not exist")
        async with _step("others", progress, errors) as result:
            result.append(f"{await whole(process.end_unrecorded, where.root)} ended")
        if errors:
            raise errors[0]
        for path in (where.run, where.memory):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.asynccontextmanager
async def _step(name: str, progress: Progress, errors: list[MultiverseError]) -> AsyncIterator[list[str]]:
    began = time.monotonic()
    result: list[str] = []
    try:
        yield result
    except MultiverseError as error:
        errors.append(error)
        result.append(f"failed: {error.message}")
    progress(name, result[-1], time.monotonic() - began)


def status(where: Layout) -> dict[str, dict[str, Any]]:
    """Each service with its pid, whether it is alive, and its start time (Unix time). Reads only /proc."""
    found: dict[str, dict[str, Any]] = {}
    plan = load(where)
    for service in reversed(services(plan)):
        running = service.running(where)
        found[service.name] = {
            "pid": running.pid if running else None,
            "alive": running is not None,
            "since": running.since if running else None,
        }
    there = bridge.is_up(plan) if plan else False
    found["bridge"] = {
        "name": plan.bridge if plan else None,
        "address": f"{plan.gateway}/{plan.prefix}" if plan else None,
        "alive": there,
    }
    return found
