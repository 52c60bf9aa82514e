"""The agent of this host: the composition root of `multiverse agent`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets

import structlog

import multiverse
from multiverse.agent.epochs import EpochFile
from multiverse.agent.protocol import LONGEST_LINE
from multiverse.agent.server import AgentIdentity, AgentServer
from multiverse.config import Settings
from multiverse.core.errors import Refused
from multiverse.core.model import is_site
from multiverse.drivers.qemu.driver import QemuHypervisor
from multiverse.service.processes import ProcessCounter
from multiverse.service.startup import bind, locked, stop_signal
from multiverse.system.processes import boot_id

log = structlog.get_logger()


class _Hypervisors:
    """The hypervisor of each site whose controller has connected."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._of_site: dict[str, QemuHypervisor] = {}

    def check(self) -> None:
        """Make the host's directories; see `QemuHypervisor.check`. That does not depend on the site."""
        QemuHypervisor(self._settings, "check").check()

    def of(self, site: str) -> QemuHypervisor:
        """The one of this site, the same each time. Raises `Refused` for what is no name of a site."""
        if not is_site(site):
            raise Refused(f"{site!r} is no name of a site", hint="is the other side a controller of Multiverse?")
        if site not in self._of_site:
            self._of_site[site] = QemuHypervisor(self._settings, site)
        return self._of_site[site]

    def close(self) -> None:
        for hypervisor in self._of_site.values():
            hypervisor.close()


def _make_directories(settings: Settings) -> None:
    try:
        os.umask(0o077)
        settings.agent.state_dir.mkdir(parents=True, exist_ok=True)
        settings.agent.socket.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(
            f"cannot use {error.filename}: {error.strerror}",
            hint="run the agent as root, or see agent.state_dir and agent.socket in its settings",
        ) from error


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. VMs are left as they are; the next agent finds them."""
    _make_directories(settings)
    state = settings.agent.state_dir
    with locked(state / "lock", "agent"), contextlib.ExitStack() as stack:
        processes = ProcessCounter()
        hypervisors = _Hypervisors(settings)
        hypervisors.check()
        stack.callback(hypervisors.close)  # otherwise this process would last as long as its longest call
        who = AgentIdentity(multiverse.__version__, settings.host.name, boot_id(), secrets.token_hex(8))
        server = AgentServer(who, EpochFile(state / "epochs.json"), hypervisors.of, processes.programs)
        stop = stop_signal()
        sock = bind(settings.agent.socket, "agent.socket")
        stack.callback(settings.agent.socket.unlink, missing_ok=True)
        listening = await asyncio.start_unix_server(server.serve, sock=sock, limit=LONGEST_LINE)
        log.info("agent started", host=who.host, socket=str(settings.agent.socket), pid=os.getpid())
        await stop.wait()
        listening.close()
        await server.close()
    log.info("agent stopped")
