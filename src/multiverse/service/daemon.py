"""The daemon: composition root. The only module that picks drivers and puts the parts together."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from multiverse.api import Alert
from multiverse.config import Settings
from multiverse.controller.loop import Controller
from multiverse.core.errors import Refused
from multiverse.drivers.qemu.driver import QemuHypervisor
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.drivers.slurm.inbox import hints
from multiverse.ports import Hypervisor, Scheduler
from multiverse.service.api import make_api
from multiverse.service.backend import Backend
from multiverse.service.processes import ProcessCounter
from multiverse.store import open_store
from multiverse.trace import RecordingHypervisor, RecordingScheduler, Trace

log = structlog.get_logger()


class SystemClock:
    """The machine's own time. Monotonic seconds go on while it sleeps (CLOCK_BOOTTIME)."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    def boot_id(self) -> str:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the daemon has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _close_doors(settings: Settings) -> None:
    """From here on, what this process makes is its user's alone, unless something else is said on the spot."""
    try:
        for path in (settings.state_dir, settings.socket.parent, settings.slurm.inbox.parent):
            path.mkdir(parents=True, exist_ok=True)  # others go through these to what is theirs
        os.umask(0o077)
        settings.state_dir.chmod(0o711)
        for path in settings.state_dir.glob("multiverse.db*"):
            path.chmod(0o600)
    except OSError as error:
        raise Refused(
            f"cannot use {error.filename}: {error.strerror}",
            hint="run the daemon as root, or see state_dir, socket and slurm.inbox in its settings",
        ) from error


@contextlib.contextmanager
def _alone(state_dir: Path) -> Iterator[None]:
    """Holds the state directory for this process. Raises `Refused` if another daemon has it."""
    with (state_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Refused(f"another daemon uses {state_dir}", hint="stop it first, or set another state_dir") from error
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def _bind(path: Path) -> socket.socket:
    """A listening Unix socket that only its owner can use, from its first moment on."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as error:
        raise Refused(f"cannot bind {path}: {error.strerror}", hint="set socket in the settings") from error
    finally:
        os.umask(before)
    sock.listen(64)
    return sock


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. Running VMs and jobs are left as they are; the next start finds them."""
    _close_doors(settings)
    with _alone(settings.state_dir):
        processes, clock = ProcessCounter(), SystemClock()
        store = open_store(settings.state_dir, clock)
        scheduler = SlurmScheduler(settings, store.site)
        hypervisor = QemuHypervisor(settings, store.site)
        hypervisor.check()
        trace = Trace(settings.trace, clock) if settings.trace else None
        controller = Controller(store, *_traced(scheduler, hypervisor, trace), clock, settings)
        sock = _bind(settings.socket)
        permanent = [Alert("unserved", *each) for each in scheduler.unserved()]
        backend = Backend(controller, store, clock, hypervisor.measure, hypervisor.examine, processes, permanent)
        api = make_api(backend)
        server = _Server(uvicorn.Config(api, log_level="warning", access_log=False, lifespan="off"))
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        for alert in permanent:
            log.warning(alert.message)
        log.info("daemon started", site=store.site, socket=str(settings.socket), pid=os.getpid())
        work: list[asyncio.Task[Any]] = [
            asyncio.create_task(controller.run(), name="controller"),
            asyncio.create_task(_heed_inbox(settings, controller), name="inbox"),
            asyncio.create_task(server.serve(sockets=[sock]), name="api"),
        ]
        stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait([*work, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                if task.done():
                    task.result()  # only a bug ends one of them: let it be seen
        finally:
            server.should_exit = True
            for task in (*work[:2], stopping):
                task.cancel()
            await asyncio.gather(*work, stopping, return_exceptions=True)
            scheduler.close()
            hypervisor.close()  # or this process would last as long as its longest call
            settings.socket.unlink(missing_ok=True)
            store.close()
            if trace is not None:
                trace.close()
            log.info("daemon stopped")


def _traced(scheduler: Scheduler, hypervisor: Hypervisor, trace: Trace | None) -> tuple[Scheduler, Hypervisor]:
    return (
        (RecordingScheduler(scheduler, trace), RecordingHypervisor(hypervisor, trace))
        if trace
        else (scheduler, hypervisor)
    )


async def _heed_inbox(settings: Settings, controller: Controller) -> None:
    async for _ in hints(settings.slurm.inbox):
        controller.hint()
