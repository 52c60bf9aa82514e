"""The daemon: the only module that chooses the drivers and puts the parts together (composition root)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import structlog

from multiverse.agent.hypervisor import AgentHypervisor
from multiverse.agent.overlay import OverlayDirectory
from multiverse.api import Alert
from multiverse.config import Settings, users_socket
from multiverse.controller.job_usage import JobUsageRecorder
from multiverse.controller.loop import Controller
from multiverse.controller.pruning import prune_regularly
from multiverse.controller.utilization import UtilizationRecorder
from multiverse.core.errors import Refused
from multiverse.core.model import Key, Vm, serial_of
from multiverse.drivers.qemu.driver import overlay_config, sites
from multiverse.drivers.slurm.auth import munge_socket
from multiverse.drivers.slurm.bootstrap import slurm_uid
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.drivers.slurm.inbox import Hint, hints, take
from multiverse.ports import Clock, Hypervisor, Scheduler
from multiverse.service.agents import connect_agents
from multiverse.service.api import make_api
from multiverse.service.backend import Backend
from multiverse.service.credentials import Credentials
from multiverse.service.fencing import FenceCommand
from multiverse.service.image_copies import copy_regularly
from multiverse.service.inbox_access import warn_of_closed_inbox
from multiverse.service.move_log import MoveLog
from multiverse.service.node_count import NodeCount
from multiverse.service.overlay import MachineOverlay, follow_regularly
from multiverse.service.processes import ProcessCounter, Processes
from multiverse.service.publisher import Publisher
from multiverse.service.startup import Server, bind, bind_tcp, bind_web, http_server, locked, stop_signal
from multiverse.service.statistics import Statistics
from multiverse.service.users_socket import Desk, Pace, serve_users
from multiverse.service.utilization import UtilizationReader
from multiverse.service.viewer import PrivateData
from multiverse.service.web import make_web
from multiverse.store import open_store
from multiverse.system import placements
from multiverse.system.processes import boot_id
from multiverse.trace import RecordingHypervisor, RecordingScheduler, Trace

log = structlog.get_logger()

NAME_SERVICE_TIMEOUT = 10.0
"""Seconds that the daemon waits, once it has started, to learn who slurmctld's user is."""


class SystemClock:
    """The machine's own time. Monotonic seconds go on while it sleeps (CLOCK_BOOTTIME)."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    def boot_id(self) -> str:
        return boot_id()


def _restrict_access(settings: Settings) -> None:
    """Make the daemon's directories. Files that this process creates from here on are readable by its user only,
    unless a mode is given. Raises `Refused` if a directory cannot be used."""
    try:
        for path in (
            settings.state_dir,
            settings.socket.parent,
            users_socket(settings).parent,
            settings.slurm.inbox.parent,
        ):
            path.mkdir(parents=True, exist_ok=True)  # other users pass through these to files that are theirs
        os.umask(0o077)
        settings.state_dir.chmod(0o711)
        for path in settings.state_dir.glob("multiverse.db*"):
            path.chmod(0o600)
    except OSError as error:
        raise Refused(
            f"cannot use {error.filename}: {error.strerror}",
            hint="run the daemon as root, or see state_dir, socket and slurm.inbox in its settings",
        ) from error


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. Running VMs and jobs are left as they are; the next start finds them."""
    _restrict_access(settings)
    placements.check(settings.placement.policy)
    with locked(settings.state_dir / "lock", "daemon"), contextlib.ExitStack() as stack:
        counter, clock = ProcessCounter(), SystemClock()
        there = sites(settings)
        store = open_store(settings.state_dir, clock, there)
        stack.callback(store.close)
        scheduler = SlurmScheduler(settings, store.site, leased=[one.spec for one in store.rows().leases.values()])
        scheduler.check_gate()
        scheduler.check_leases()
        scheduler.check_expansions()
        hypervisor = connect_agents(settings, store)
        traced = _traced(scheduler, hypervisor, settings, clock, stack)
        controller = Controller(store, *traced, clock, settings)
        controller.fence_by(FenceCommand(settings.fence))
        controller.place_by(placements.load())
        overlay = await _overlay(settings, store.site, hypervisor, controller)
        sock = bind(settings.socket, "socket")
        stack.callback(settings.socket.unlink, missing_ok=True)
        web = bind_web(settings.web)
        if settings.web.listen.startswith("/"):
            stack.callback(Path(settings.web.listen).unlink, missing_ok=True)
        statistics = Statistics()
        controller.watch(statistics)
        controller.watch(MoveLog(controller.state))
        permanent = [Alert("unserved", *each) for each in scheduler.unserved()]
        permanent += map(_other_site, (site for site in there if site != store.site))
        jobs = JobUsageRecorder(store, controller.state, hypervisor, scheduler, clock)
        recorder = UtilizationRecorder(store, hypervisor, lambda: controller.sources, clock)
        users = _bind_for_users(settings, stack)
        backend = Backend(
            controller,
            store,
            clock,
            hypervisor.measure,
            hypervisor.examine,
            Processes(counter, hypervisor.count_processes),
            permanent,
            settings.history_days,
            settings.poll,
            str(settings.slurm.inbox),
            NodeCount(settings.slurm.conf).alerts,
            UtilizationReader(controller, recorder, jobs, clock),
            statistics,
        )
        for alert in permanent:
            event = "setting of Slurm has no effect on VMs" if alert.kind == "unserved" else "VMs of another site"
            log.warning(event, name=alert.name, reason=alert.message)
        log.info("daemon started", site=store.site, socket=str(settings.socket), pid=os.getpid())
        stack.callback(scheduler.close)
        await _run(settings, backend, hypervisor, overlay, (sock, web), users)
    log.info("daemon stopped")


async def _overlay(
    settings: Settings, site: str, hypervisor: AgentHypervisor, controller: Controller
) -> MachineOverlay | None:
    """This machine in the overlay, in which the hypervisor's hosts take part from here on; None if there is none."""
    config = overlay_config(settings, site)
    if config is None:
        return None

    def find(name: str) -> Vm | None:
        row = controller.state.get(Key("vm", serial_of(name)))
        return row if isinstance(row, Vm) and row.name == name else None

    def node_of(host: str) -> str:
        leases = controller.state.leases.values()
        return next((lease.node for lease in leases if lease.name == host), host)

    machine = await asyncio.to_thread(MachineOverlay, settings, config, node_of)
    hypervisor.overlay = OverlayDirectory(machine, find, hypervisor.connect)
    return machine


def _other_site(site: str) -> Alert:
    return Alert(
        "stranger",
        f"site-{site}",
        f"there are VMs of another site, {site}, in qemu.vms: another daemon's, or of a database that was lost",
        "if no daemon is to have them, put back its database, or end them: they keep memory that is not claimed here",
    )


Listening = tuple[socket.socket, socket.socket | None]
"""The sockets on which users ask: of this machine, and of others if they may."""


def _bind_for_users(settings: Settings, stack: contextlib.ExitStack) -> Listening | None:
    if not settings.users.enabled:
        return None
    path, users = users_socket(settings), settings.users
    sock = bind(path, "users.socket", all_users=True)
    stack.callback(path.unlink, missing_ok=True)
    return sock, bind_tcp(users.listen, users.port, "users.listen") if users.listen else None


def _servers(settings: Settings, backend: Backend, publisher: Publisher, *, web: bool) -> list[Server]:
    """The server of the API and, if there is to be a `web` page, its own."""
    apps: list[Any] = [make_api(backend, publisher), *([make_web(backend, publisher)] if web else [])]
    return [http_server(app) for app in apps]


async def _run(
    settings: Settings,
    backend: Backend,
    hypervisor: AgentHypervisor,
    overlay: MachineOverlay | None,
    sockets: tuple[socket.socket, socket.socket | None],
    users: Listening | None,
) -> None:
    """Run the controller, the connections to the agents, the inbox, the pruning, the API and the web page until a
    signal comes or one of them fails, then end all. `sockets` are the API's and the web page's."""
    publisher = Publisher(backend, settings.web.viewers)
    listening = [sock for sock in sockets if sock is not None]
    servers = _servers(settings, backend, publisher, web=len(listening) > 1)
    stop, controller = stop_signal(), backend.controller
    work: list[asyncio.Task[Any]] = [
        asyncio.create_task(hypervisor.run(), name="agents"),
        asyncio.create_task(controller.run(), name="controller"),
        asyncio.create_task(_forward_hints(settings, controller), name="inbox"),
        asyncio.create_task(_poll_inbox(settings, controller), name="shared inbox"),
        asyncio.create_task(warn_of_closed_inbox(settings), name="access to the inbox"),
        asyncio.create_task(prune_regularly(backend.store, backend.clock, settings.history_days), name="pruning"),
    ]
    if backend.utilization is not None:
        work.append(asyncio.create_task(backend.utilization.jobs.run(), name="use of jobs"))
        work.append(asyncio.create_task(backend.utilization.recorder.run(), name="utilization"))
    if overlay is not None:
        following = follow_regularly(overlay, lambda: controller.state.vms, settings.poll)
        work.append(asyncio.create_task(following, name="overlay"))
    if users is not None:
        desk = Desk(backend, PrivateData(settings.slurm.conf), Pace(backend.clock))
        answering = serve_users(desk, *users, Credentials(munge_socket(settings.slurm.conf)))
        work.append(asyncio.create_task(answering, name="questions of users"))
    if settings.image.source is None:  # or else hosts copy by themselves
        copying = copy_regularly(settings, controller.state.rows, controller.world, controller.policy, backend.clock)
        work.append(asyncio.create_task(copying, name="images"))
    serving = [
        asyncio.create_task(server.serve(sockets=[sock]), name="api or web page")
        for server, sock in zip(servers, listening, strict=True)
    ]
    stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([*work, *serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in (*work, *serving):
            if task.done():
                task.result()  # only a defect ends one of them: raise its error
    finally:
        for server in servers:
            server.should_exit = True  # it answers the requests that it has, and then ends
        await publisher.close()  # or else the requests of viewers would not end
        for task in (*work, stopping):
            task.cancel()
        await asyncio.gather(*work, *serving, stopping, return_exceptions=True)


def _traced(
    scheduler: Scheduler, hypervisor: Hypervisor, settings: Settings, clock: Clock, stack: contextlib.ExitStack
) -> tuple[Scheduler, Hypervisor]:
    """The drivers; with `trace` in the settings, drivers that record every call. `stack` closes the trace."""
    if not settings.trace:
        return scheduler, hypervisor
    trace = Trace(settings.trace, clock)
    stack.callback(trace.close)
    return RecordingScheduler(scheduler, trace), RecordingHypervisor(hypervisor, trace)


async def _forward_hints(settings: Settings, controller: Controller) -> None:
    inbox = settings.slurm.inbox
    owner = None  # as it is now
    with contextlib.suppress(TimeoutError):  # of a name service that does not answer
        owner = await asyncio.wait_for(asyncio.to_thread(slurm_uid, settings), NAME_SERVICE_TIMEOUT)
    async for hint in hints(inbox, owner):
        _forward(hint, controller)


async def _poll_inbox(settings: Settings, controller: Controller) -> None:
    """Hints that another machine wrote into a shared directory: inotify does not report these."""
    while True:
        await asyncio.sleep(settings.poll)
        for hint in await asyncio.to_thread(lambda: list(take(settings.slurm.inbox))):
            _forward(hint, controller)


def _forward(hint: Hint, controller: Controller) -> None:
    if hint.kind == "submit":
        controller.missing_hints.hint_came()
    controller.hint(hint.uid, hint.job_id)
