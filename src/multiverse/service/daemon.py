"""The daemon: the only module that chooses the drivers and puts the parts together (composition root)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from multiverse.api import Alert
from multiverse.bundles.composite import together
from multiverse.bundles.contract import (
    DaemonTask,
    Notice,
    Platform,
    PlatformContext,
    SchedulerSystem,
    platform_bundles,
    scheduler_bundle,
)
from multiverse.config import FenceSettings, Settings, users_socket
from multiverse.controller.history import JobUsageRecorder, UtilizationRecorder, prune_regularly
from multiverse.controller.loop import Controller
from multiverse.core.errors import Refused, Unknown
from multiverse.images.catalog import list_images
from multiverse.ports import Clock, Hypervisor, Scheduler
from multiverse.service import startup
from multiverse.service.api import make_api
from multiverse.service.backend import Backend, UtilizationReader
from multiverse.service.lab_advice import in_lab, lab_of
from multiverse.service.publisher import Publisher
from multiverse.service.reload import SettingsReload
from multiverse.service.statistics import MoveLog, Statistics
from multiverse.service.users_socket import Pace, UserQuestions, serve_users
from multiverse.service.web import make_web
from multiverse.store import Store, open_store
from multiverse.system import placements
from multiverse.system.processes import boot_id
from multiverse.trace import Trace, recording

log = structlog.get_logger()


class SystemClock:
    """The machine's own time. Monotonic seconds go on while it sleeps (CLOCK_BOOTTIME)."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    def boot_id(self) -> str:
        return boot_id()


def _restrict_access(settings: Settings) -> None:
    """Make the daemon's directories. New files are readable by its user only, unless a mode is given. Raises `Refused`
    if a directory cannot be used."""
    try:
        for path in (settings.state_dir, settings.socket.parent, users_socket(settings).parent):
            path.mkdir(parents=True, exist_ok=True)  # other users pass through these to files that are theirs
        os.umask(0o077)
        settings.state_dir.chmod(0o711)
        for path in settings.state_dir.glob("multiverse.db*"):
            path.chmod(0o600)
    except OSError as error:
        raise Refused(
            f"cannot use {error.filename}: {error.strerror}",
            hint="run the daemon as root, or see state_dir and socket in its settings",
        ) from error


async def serve(settings: Settings, file: Path | None = None) -> None:
    """Run until SIGTERM or SIGINT. Running VMs and jobs are left as they are; the next start finds them. The settings
    are read again from `file` at each SIGHUP."""
    reload = SettingsReload(file, settings) if file is not None else None
    lab = lab_of(file) if file is not None else None
    _restrict_access(settings)
    placements.check(settings.placement.policy)
    bundles = platform_bundles(settings)
    with startup.locked(settings.state_dir / "lock", "daemon"), contextlib.ExitStack() as stack:
        counter, clock = startup.ProcessCounter(), SystemClock()
        there = [site for bundle in bundles.values() for site in bundle.sites(settings)]
        store = open_store(settings.state_dir, clock, there)
        stack.callback(store.close)
        rows = store.rows()
        system = scheduler_bundle(settings).open(settings, store.site, [one.spec for one in rows.leases.values()])
        context = PlatformContext(settings, store.site, clock, rows, store.epoch, store.keep_epoch, system.leased)
        platform = together({name: bundle.open(context) for name, bundle in bundles.items()})
        controller = Controller(store, *_traced(system, platform, settings, clock, stack), clock, settings)
        controller.fence_by(FenceCommand(settings.fence))
        controller.place_by(placements.load())
        if reload is not None:
            reload.apply = partial(_apply, controller)
        work = await platform.follow(controller)
        sock = startup.bind(settings.socket, "socket")
        stack.callback(settings.socket.unlink, missing_ok=True)
        web = startup.bind_web(settings.web)
        if settings.web.listen.startswith("/"):
            stack.callback(Path(settings.web.listen).unlink, missing_ok=True)
        statistics = Statistics()
        controller.watch(statistics)
        controller.watch(MoveLog(controller.state))
        notices = [*system.notices, *(_other_site(site) for site in there if site != store.site)]
        users = _bind_for_users(settings, stack)
        backend = Backend(
            controller,
            store,
            clock,
            platform.guests,
            startup.Processes(counter, platform.programs),
            [Alert(*notice) for notice in notices],
            settings.history_days,
            settings.poll,
            system.hints_from,
            system.lack_of_nodes,
            system.words,
            _utilization(platform, system, store, controller, clock),
            statistics,
            reload,
            partial(list_images, settings.qemu.images),
            str if lab is None else partial(in_lab, lab),
        )
        for notice in notices:
            event = "setting of Slurm has no effect on VMs" if notice.kind == "unserved" else "VMs of another site"
            log.warning(event, name=notice.name, reason=notice.message)
        log.info("daemon started", site=store.site, socket=str(settings.socket), pid=os.getpid())
        stack.callback(system.close)
        work = [*work, *system.work(partial(_tell, controller)), *_own_work(settings, backend, system, users)]
        await _run(settings, backend, work, (sock, web))
    log.info("daemon stopped")


def _apply(controller: Controller, settings: Settings) -> None:
    """Use settings that were read again. Raises `Refused`, and has changed nothing then."""
    placements.check(settings.placement.policy)
    controller.decide_by(settings)
    controller.fence_by(FenceCommand(settings.fence))


def _tell(controller: Controller, *, submitted: bool, uid: int | None, job_id: str) -> None:
    """`bundles.contract.Tell`."""
    if submitted:
        controller.missing_hints.hint_came()
    controller.hint(uid, job_id)


def _utilization(
    platform: Platform, system: SchedulerSystem, store: Store, controller: Controller, clock: Clock
) -> UtilizationReader | None:
    """What records the use of hosts and jobs; None where nothing is sampled."""
    if platform.measurements is None:
        return None
    jobs = JobUsageRecorder(store, controller.state, platform.measurements, system.reports, clock)
    recorder = UtilizationRecorder(store, platform.measurements, lambda: controller.sources, clock)
    return UtilizationReader(controller, recorder, jobs, clock)


def _other_site(site: str) -> Notice:
    return Notice(
        "orphan",
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
    sock = startup.bind(path, "users.socket", all_users=True)
    stack.callback(path.unlink, missing_ok=True)
    return sock, startup.bind_tcp(users.listen, users.port, "users.listen") if users.listen else None


async def _run(
    settings: Settings,
    backend: Backend,
    work: Sequence[DaemonTask],
    sockets: tuple[socket.socket, socket.socket | None],
) -> None:
    """Do the work, and serve the API and the web page at their `sockets`, until a signal comes or one of them fails."""
    publisher = Publisher(backend, settings.web.viewers)
    listening = [sock for sock in sockets if sock is not None]
    apps: list[Any] = [make_api(backend, publisher), make_web(backend, publisher)]
    servers = [startup.http_server(app) for app, _ in zip(apps, listening, strict=False)]
    stop = startup.stop_signal()
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(one.run(), name=one.name) for one in work]
    serving = [
        asyncio.create_task(server.serve(sockets=[sock]), name="api or web page")
        for server, sock in zip(servers, listening, strict=True)
    ]
    stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([*tasks, *serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, *serving):
            if task.done():
                task.result()  # only a defect ends one of them: raise its error
    finally:
        for server in servers:
            server.should_exit = True  # it answers the requests that it has, and then ends
        await publisher.close()  # or else the requests of viewers would not end
        for task in (*tasks, stopping):
            task.cancel()
        await asyncio.gather(*tasks, *serving, stopping, return_exceptions=True)


def _own_work(
    settings: Settings, backend: Backend, system: SchedulerSystem, users: Listening | None
) -> Iterator[DaemonTask]:
    yield DaemonTask("controller", backend.controller.run)
    yield DaemonTask("pruning", partial(prune_regularly, backend.store, backend.clock, settings.history_days))
    if backend.reload is not None:
        yield DaemonTask("settings", backend.reload.run)
    if backend.utilization is not None:
        yield DaemonTask("use of jobs", backend.utilization.jobs.run)
        yield DaemonTask("utilization", backend.utilization.recorder.run)
    if users is not None:
        questions = UserQuestions(backend, system.privacy, Pace(backend.clock))
        yield DaemonTask("questions of users", partial(serve_users, questions, *users, system.identities))


def _traced(
    system: SchedulerSystem, platform: Platform, settings: Settings, clock: Clock, stack: contextlib.ExitStack
) -> tuple[Scheduler, Hypervisor]:
    """The drivers; with `trace` in the settings, drivers that record every call. `stack` closes the trace."""
    scheduler, hypervisor = system.scheduler, platform.hypervisor
    if not settings.trace:
        return scheduler, hypervisor
    trace = Trace(settings.trace, clock)
    stack.callback(trace.close)
    return recording(scheduler, hypervisor, trace)


# --- fencing ----------------------------------------------------------------------------------------

_LAST_WORDS = 300  # characters of the command's output that are kept


class FenceCommand:
    """`ports.Fencing` by a command, such as one of Debian's fence-agents."""

    def __init__(self, settings: FenceSettings) -> None:
        self._settings = settings

    async def fence(self, host: str) -> None:
        """See `ports.Fencing`. Exit status 0 means that the machine is off. The command and its children are killed
        after its time, or when the host is back."""
        argv = [word.replace("{host}", host) for word in self._settings.command]
        log.warning("fencing", host=host, command=argv[0])
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise Unknown(f"cannot start {argv[0]}: {error.strerror}", hint="see fence.command") from error
        try:
            async with asyncio.timeout(self._settings.timeout):
                output, _ = await process.communicate()
        except TimeoutError as error:
            raise Unknown(f"{argv[0]} did not end within {self._settings.timeout:g} s") from error
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        said = " ".join(output.decode(errors="replace").split())[-_LAST_WORDS:]
        if process.returncode != 0:
            raise Unknown(f"{argv[0]} ended with status {process.returncode}: {said or 'it said nothing'}")
        log.warning("fenced", host=host, said=said)
