"""The agent of this host: the composition root of `multiverse agent`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

import multiverse
from multiverse.agent.protocol import LONGEST_LINE, AgentLink, MoveOffer
from multiverse.agent.self_fence import ContactFile, FenceTimer, SelfFence
from multiverse.agent.server import AgentIdentity, AgentServer, EpochFile
from multiverse.bundles.contract import HostSide, LocalHost, platform_bundles, scheduler_bundle
from multiverse.config import Settings, VxlanSettings, jobs_leave_leases, move_address
from multiverse.core.errors import MultiverseError, Refused
from multiverse.core.model.identity import is_site, site_of
from multiverse.core.model.usage import HostUsage, Load
from multiverse.core.model.vm import VmRef
from multiverse.host import links
from multiverse.host.links import MoveHello, MoveListener, NodeNetwork
from multiverse.host.sampling import Sampler
from multiverse.pilot.lease import NODE_SHARE, read_end, share_of
from multiverse.pilot.run import END_VMS
from multiverse.service import metrics
from multiverse.service.job_vms import serve_jobs
from multiverse.service.metrics import scraped
from multiverse.service.reload import SettingsReload
from multiverse.service.startup import ProcessCounter, bind, locked, stop_signal
from multiverse.system.processes import boot_id

log = structlog.get_logger()


def _host_side(settings: Settings) -> HostSide:
    """The platform of this machine. Raises `Refused` if hosts of the site's platforms have no agents."""
    for bundle in platform_bundles(settings).values():
        if bundle.host is not None:
            return bundle.host
    raise Refused(
        f"hosts of the platform {' and '.join(settings.platforms)} have no agents", hint="see platforms in the settings"
    )


class _Hypervisors:
    """The hypervisor of each site whose controller has connected."""

    def __init__(self, settings: Settings, node: NodeNetwork | None = None) -> None:
        """`node` is the network of a leased node."""
        self._offer: MoveOffer | None = None
        self._lock = threading.Lock()
        self._settings, self._node, self._side = settings, node, _host_side(settings)
        self._of_site: dict[str, LocalHost] = {}

    def check(self) -> None:
        """Make the host's directories; see `LocalHost.check`. That does not depend on the site."""
        alone = replace(self._settings, vxlan=VxlanSettings())  # a VXLAN belongs to a site
        self._side.local(alone, "check").check()

    def of(self, site: str) -> LocalHost:
        """The one of this site, the same each time. Raises `Refused` if `site` is no name of a site."""
        if not is_site(site):
            raise Refused(f"{site!r} is no name of a site", hint="is the other side a controller of Multiverse?")
        with self._lock:
            if site not in self._of_site:
                made = self._of_site[site] = self._side.local(self._settings, site, self._node)
                made.resume_moves(self._offer)
            return self._of_site[site]

    def of_controller(self, site: str) -> LocalHost:
        """The one of this site, whose controller connects. Where its VXLAN cannot be made, VMs are observed and ended,
        and none is started. Raises what `of` raises."""
        hypervisor = self.of(site)
        try:
            hypervisor.restore_vxlan()
        except MultiverseError as error:
            log.warning("the VXLAN cannot be made", reason=str(error))
        return hypervisor

    def receive_moves(self, offer: MoveOffer) -> None:
        """Receive VMs from now on, and go on with moves that an earlier agent has begun."""
        self._offer = offer
        for site in self.sites():
            self.of(site)

    def serve_move(self, sock: socket.socket, hello: MoveHello) -> None:
        """Answer a connection of another host. Raises `Refused` if this host has nothing of that site."""
        site = site_of(hello.name)
        if site not in self._of_site:
            raise Refused(f"nobody expects VM {hello.name}")
        self._of_site[site].serve_move(sock, hello)

    def sites(self) -> Sequence[str]:
        return self._side.sites(self._settings)

    def close(self) -> None:
        for hypervisor in self._of_site.values():
            hypervisor.close()


@contextlib.contextmanager
def _receiving(settings: Settings, hypervisors: _Hypervisors, node: NodeNetwork | None) -> Iterator[AgentLink | None]:
    """Receive VMs of other hosts, if the settings say so, and on a leased `node` the controller, by the link that it
    gives. Raises `Refused` if it cannot listen there."""
    move, secret = settings.move, secrets.token_hex(32)
    listening = node.listening if node is not None else _listen(settings)
    if listening is None:
        yield None
        return

    def serve(sock: socket.socket, hello: MoveHello) -> None:
        if hello.channel != links.COMMAND:
            hypervisors.serve_move(sock, hello)
            return
        if node is None or not hello.knows("", secret):
            raise Refused("it is no controller that this agent knows")
        with socket.socket(socket.AF_UNIX) as agent:
            agent.connect(str(settings.agent.socket))
            links.relay(sock, agent)

    pair = None if move.private else links.certificate(settings.agent.state_dir)
    listener = MoveListener(listening, pair, serve)
    try:
        certificate = pair[0].read_text() if pair is not None else ""
        offer = MoveOffer(address=listener.address, port=listener.port, certificate=certificate)
        if move.enabled:
            hypervisors.receive_moves(offer)
        yield AgentLink(**offer.model_dump(), secret=secret) if node is not None else None
    finally:
        listener.close()


def _listen(settings: Settings) -> socket.socket | None:
    move = settings.move
    return links.listen(move_address(settings, settings.host.name), move.port) if move.enabled else None


def _make_directories(settings: Settings) -> None:
    os.umask(0o077)
    try:
        for path in (settings.agent.state_dir, settings.agent.socket.parent):
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(
            f"cannot use {error.filename}: {error.strerror}",
            hint="run the agent as root, or see agent.state_dir and agent.socket in its settings",
        ) from error


async def _self_fence(settings: Settings, hypervisors: _Hypervisors) -> SelfFence | None:
    """What ends this host's VMs when neither controller nor slurmctld is reached; None: it is off, and all controllers
    know. Raises `Refused` if slurmctld cannot be asked from here: the absence of the controller alone ends no job."""
    seconds = settings.agent.self_fence
    file = ContactFile(settings.agent.state_dir / "contacts", boot_id())
    contacts = file.read()
    if not seconds and not contacts.limits:
        return None
    nodes = scheduler_bundle(settings).reached(settings)
    try:
        if seconds:
            await nodes.check()
    except MultiverseError as error:
        raise Refused(
            f"agent.self_fence needs the scheduler's commands on this host: {error.message}",
            hint="install slurm-client and the site's slurm.conf, or set agent.self_fence = 0",
        ) from error
    return SelfFence(
        # This clock goes on while the machine is suspended.
        FenceTimer(seconds or math.inf, contacts, lambda: time.clock_gettime(time.CLOCK_BOOTTIME)),
        hypervisors.sites,
        hypervisors.of,
        nodes.of,
        file.write,
    )


class _Samples:
    """`agent.server.Samples` of a sampler, asked in threads."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def load(self) -> Load | None:
        return self._sampler.load()

    async def usage(self, span: float, prefix: str) -> HostUsage:
        return await asyncio.to_thread(self._sampler.usage, span, prefix)


@contextlib.asynccontextmanager
async def _sampling(settings: Settings) -> AsyncIterator[_Samples | None]:
    """Sample the host and its VMs in a thread, and let Prometheus read that where the settings say. None: nothing is
    sampled. Raises `Refused` if it cannot listen there."""
    agent = settings.agent
    if not agent.sample:
        yield None
        return
    sampler, stop = Sampler(settings.qemu.vms, agent.sample), threading.Event()
    thread = threading.Thread(target=sampler.run, args=(stop,), name="sampler", daemon=True)

    def usage() -> bytes:
        return metrics.text(metrics.of_usage({settings.host.name: sampler.usage(metrics.SPAN)}))

    async with scraped(agent.metrics, "agent.metrics", usage):
        thread.start()
        try:
            yield _Samples(sampler)
        finally:
            stop.set()
            await asyncio.to_thread(thread.join, 5.0)


async def _end_vms(settings: Settings, hypervisors: _Hypervisors) -> None:
    """End all VMs of this host, whose guests may write back first. What does not end, ends with the lease."""
    ending = []
    for site in hypervisors.sites():
        hypervisor = hypervisors.of(site)
        names = await hypervisor.list_vms()
        ending += [hypervisor.destroy(VmRef(name), settings.pacing.reclaim_grace) for name in names]
    for result in await asyncio.gather(*ending, return_exceptions=True):
        if isinstance(result, BaseException):
            log.warning("a VM does not end", reason=str(result))
    if ending:
        log.info("VMs ended, because the lease ends", number=len(ending))
        await asyncio.sleep(settings.poll + 1)  # meanwhile their controller sees that they are gone


async def _serve_until_ending(
    settings: Settings, server: AgentServer, hypervisors: _Hypervisors, stop: asyncio.Event
) -> None:
    """Wait for the signal of a lease's pilot. Then let the VMs leave, if the controller reaches this agent till the
    end; end those that are left, and this agent."""
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(END_VMS, ending.set)
    await ending.wait()
    if server.link is not None and jobs_leave_leases(settings):
        await _hold_vms(settings, server, hypervisors)
    server.refuse(_ENDS)
    await _end_vms(settings, hypervisors)
    stop.set()


_ENDS = "the lease ends"
_LOOK = 0.5  # seconds between two looks at the VMs that are held
_SPARE = 2.0  # seconds for what takes longer than it should


async def _hold_vms(settings: Settings, server: AgentServer, hypervisors: _Hypervisors) -> None:
    """Take no VM any more, and leave those that are here alone until all have left, or until shortly before the
    scheduler kills the pilot, which may tell another time meanwhile."""
    held = False
    while (until := _holds_until(settings)) > time.time():
        server.refuse(_ENDS, until)
        if not any([await hypervisors.of(site).list_vms() for site in hypervisors.sites()]):
            if held:
                log.info("all VMs have left, because the lease ends")
                await asyncio.sleep(settings.poll + 1)  # meanwhile their controller sees that they are gone
            return
        held = True
        await asyncio.sleep(_LOOK)


def _holds_until(settings: Settings) -> float:
    """Until when (Unix time) the VMs of a lease whose pilot is told to end are left alone: what ends them, and lets the
    controller see that, takes the rest of the time."""
    takes = settings.pacing.reclaim_grace + settings.poll + 1 + _SPARE
    return read_end(settings.agent.state_dir) - takes


async def _serve_jobs_too(stack: contextlib.AsyncExitStack, settings: Settings, reload: SettingsReload | None) -> None:
    apply = await stack.enter_async_context(serve_jobs(settings))
    if reload is not None:
        reload.apply = apply


async def _serve_jobs_alone(settings: Settings, reload: SettingsReload | None) -> None:
    """Serve VMs inside jobs, and no controller. The lock of a host's agent stays free, because pilots refuse a node
    where it is held. Both share only users of QEMUs: these are of a part that no lease has."""
    settings = replace(settings, qemu=replace(settings.qemu, uids=share_of(settings.qemu.uids, NODE_SHARE)))
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(locked(settings.agent.state_dir / "jobs.lock", "agent"))
        hypervisors = _Hypervisors(settings)
        hypervisors.check()
        if settings.agent.metrics:
            await stack.enter_async_context(_sampling(settings))
        stop = stop_signal()
        await _serve_jobs_too(stack, settings, reload)
        log.info("agent of VMs inside jobs started", socket=str(settings.job_vms.socket), pid=os.getpid())
        await stop.wait()
    log.info("agent stopped")


async def serve(settings: Settings, file: Path | None = None, *, node: NodeNetwork | None = None) -> None:
    """Run until SIGTERM or SIGINT. VMs stay; the next agent finds them. At each SIGHUP the settings are read again from
    `file`. On a leased `node` a pilot runs this agent, and tells it when the lease ends."""
    if file is None:
        await _serve(settings, None, node)
        return
    reload = SettingsReload(file, settings)
    reading = asyncio.create_task(reload.run(), name="settings")
    try:
        await _serve(settings, reload, node)
    finally:
        reading.cancel()


async def _serve(settings: Settings, reload: SettingsReload | None, node: NodeNetwork | None) -> None:
    if node is not None and node.listening is None:
        settings = replace(settings, move=replace(settings.move, enabled=False))
    _make_directories(settings)
    if settings.job_vms.only:
        await _serve_jobs_alone(settings, reload)
        return
    state = settings.agent.state_dir
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(locked(state / "lock", "agent"))
        processes = ProcessCounter()
        hypervisors = _Hypervisors(settings, node)
        hypervisors.check()
        stack.callback(hypervisors.close)  # otherwise this process would last as long as its longest call
        who = AgentIdentity(multiverse.__version__, settings.host.name, boot_id(), secrets.token_hex(8))
        link = stack.enter_context(_receiving(settings, hypervisors, node))
        fence = await _self_fence(settings, hypervisors)
        timer = fence.timer if fence else None
        samples = await stack.enter_async_context(_sampling(settings))
        server = AgentServer(
            who, EpochFile(state / "epochs"), hypervisors.of_controller, processes.programs, timer, samples
        )
        server.link = link
        stop = stop_signal()
        sock = bind(settings.agent.socket, "agent.socket")
        stack.callback(settings.agent.socket.unlink, missing_ok=True)
        listening = await asyncio.start_unix_server(server.serve, sock=sock, limit=LONGEST_LINE)
        log.info("agent started", host=who.host, socket=str(settings.agent.socket), pid=os.getpid())
        if settings.job_vms.enabled:
            await _serve_jobs_too(stack, settings, reload)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(fence.run(), name="self-fencing") if fence else None
            pilot = group.create_task(_serve_until_ending(settings, server, hypervisors, stop)) if node else None
            await stop.wait()
            for task in (watching, pilot):
                if task is not None:
                    task.cancel()
        listening.close()
        await server.close()
    log.info("agent stopped")
