"""QEMU on hosts with agents, as a platform: connections, the controller's machine in the VXLAN, copies of images.

The images of the controller's machine are copied to hosts that lack them, once jobs or pools want them. That decides
nothing: a job waits as long as no host shows its image, whoever brings it there. A copy that is repeated, late or
interrupted does no harm (`images.transfer`). With `image.source` hosts copy by themselves, and show an image before
they have it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import structlog

import multiverse
from multiverse.agent.connection import (
    AgentConnection,
    CommandTransport,
    ControllerEpoch,
    ControllerIdentity,
    SocketStream,
    Stream,
    Transport,
    UnixTransport,
    command_of,
    other_command,
)
from multiverse.agent.hypervisor import NOT_STARTED, AgentHypervisor, VxlanDirectory
from multiverse.agent.protocol import LONGEST_LINE, AgentLink
from multiverse.bundles.contract import DaemonTask, Examination, Followed, LeasedTransport, PlatformContext
from multiverse.config import Settings, host_names, host_settings, uplink_of, vxlan_address
from multiverse.core.errors import Broken, MultiverseError, Refused, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Host, HostState
from multiverse.core.model.identity import Neighbour, without_prefix_length
from multiverse.core.model.job import AttemptState, LeasedHost
from multiverse.core.model.vm import Vm
from multiverse.core.model.world import World
from multiverse.core.policy import Policy, image_of
from multiverse.core.rows import Rows
from multiverse.core.state import State
from multiverse.drivers.qemu.driver import QemuHypervisor, sites, vxlan_config
from multiverse.host.links import COMMAND, MoveHello, MovePeer, NodeNetwork, check_certificate, client_context
from multiverse.host.vxlan import Vxlan, VxlanConfig, is_of_machine, machine_owner
from multiverse.images import transfer
from multiverse.images.catalog import Image, list_images
from multiverse.ports import Clock
from multiverse.site import machine
from multiverse.system import files

log = structlog.get_logger()

PERIOD = 5.0  # seconds between two looks at what is wanted
RETRY = 60.0  # seconds until a copy is repeated that failed, or that its host does not show
AT_ONCE = 4  # copies at the same time
Send = Callable[[Image, str], bool]  # copies an image to a host, as `transfer.send` does. Blocks
_FASTEST_UPLINK = 800_000  # Mbit/s that no Ethernet port exceeds
EPOCH_WAIT = 5.0  # seconds that the agents have, as the controller starts, to say which epochs they have seen


def connect_agents(context: PlatformContext) -> AgentHypervisor:
    """The hypervisor behind the agents of all hosts of the site: of the settings, of rows and of leases, without hosts
    that an operator removed. Its `run` makes the connections."""
    settings = context.settings
    who = ControllerIdentity(multiverse.__version__, secrets.token_hex(8), context.site, socket.gethostname())
    known, leased = context.rows.hosts, context.rows.leased_hosts()
    removed = {host.name for host in known.values() if host.state is HostState.REMOVED}
    named = dict.fromkeys((*host_names(settings), *known))
    hosts = [name for name in named if name not in removed and name not in leased]
    epoch = ControllerEpoch(context.epoch, context.keep_epoch, hosts, EPOCH_WAIT)

    def connect(host: str) -> AgentConnection:
        return AgentConnection(host, transport_to(host, settings), who, epoch, Random())

    kept = settings.state_dir / "links"
    for path in kept.glob("*"):
        if path.name not in leased:
            path.unlink()

    def connect_leased(host: LeasedHost) -> AgentConnection:
        transport = PilotTransport(context.leased, host, kept / host.lease.name)
        return AgentConnection(host.lease.name, transport, who, epoch, Random(), transport.learned)

    return AgentHypervisor([*hosts, *leased], connect, partial(declared, settings), connect_leased, leased)


def declared(settings: Settings, name: str) -> Host | None:
    """A host as the settings declare it; None if they do not name it. Its agent will report no more than this."""
    host = host_settings(settings, name)
    if host is None:
        return None
    # Only the host itself knows what its uplink reports.
    net = host.net or (_FASTEST_UPLINK if uplink_of(settings, name) else 0)
    return Host(
        name,
        Size(host.cores, host.memory, host.disk, net),
        frozenset(kind.value for kind in CloneKind),
        memory_block=1,
        vm_overhead=0,
        overcommit=host.overcommitment,
    )


class PilotTransport:
    """The agent of a leased host: by the link that it has told of, or else by a step in its pilot. No step begins any
    more once a pilot is told to end."""

    def __init__(self, leased: LeasedTransport | None, host: LeasedHost, kept: Path | None = None) -> None:
        """The link is `kept` in that file for a later run of the controller, which may begin as the lease ends."""
        self._leased, self._host, self._kept = leased, host, kept
        self._link: AgentLink | None = None
        self._tried = False  # the link, and nobody was greeted there since
        if kept is not None:
            with suppress(OSError, ValueError):
                self._link = AgentLink.model_validate_json(kept.read_bytes())

    def learned(self, link: AgentLink) -> None:
        if self._kept is not None and link != self._link:
            with suppress(OSError):  # a full disk
                self._kept.parent.mkdir(mode=0o700, exist_ok=True)
                files.replace(self._kept, link.model_dump_json(), mode=0o600)
        self._link, self._tried = link, False

    async def open(self) -> Stream:
        """A new step needs slurmctld; a step that runs, and the link, do not. After a restart of the agent it takes a
        step, because there is another secret."""
        self._tried = not self._tried
        if self._link is not None and self._tried:
            with suppress(Unknown, Broken):
                return await LinkTransport(self._host.lease.name, self._link).open()
            self._tried = False
        if self._leased is None:
            raise Unknown(f"the scheduler does not lead to {self._host.lease.name}", hint="it leases no hosts now")
        try:
            command = self._leased.dial(self._host)
        except Refused as error:
            raise Unknown(error.message, hint=error.hint) from error
        return await CommandTransport(command).open()


_LINK_TIMEOUT = 3.0  # seconds


class LinkTransport:
    """The agent of a leased host, by a connection to its node."""

    def __init__(self, host: str, link: AgentLink) -> None:
        self._host, self._link = host, link

    async def open(self) -> Stream:
        """Raises `Unknown` if nobody answers there, and `Broken` if another one does."""
        link = self._link
        peer = MovePeer(link.address, link.port, link.certificate)
        context = client_context() if link.certificate else None
        try:
            async with asyncio.timeout(_LINK_TIMEOUT):
                stream = SocketStream(
                    *await asyncio.open_connection(link.address, link.port, ssl=context, limit=LONGEST_LINE)
                )
        except (OSError, TimeoutError) as error:
            what = f"cannot connect to {link.address} port {link.port}: {error or 'no answer'}"
            raise Unknown(what, hint="is the port open between the controller and leased nodes?") from error
        if context is not None:
            try:
                check_certificate(stream.writer.get_extra_info("ssl_object").getpeercert(binary_form=True), peer)
            except Broken:
                await stream.close()
                raise
        stream.writer.write(MoveHello(self._host, "", 0, link.secret, COMMAND).line)
        return stream


def transport_to(host: str, settings: Settings) -> Transport:
    if host == settings.host.name:
        return UnixTransport(settings.agent.socket)
    return CommandTransport(command_of(settings.agent.connect, host))


LiveVms = Callable[[], Mapping[int, Vm]]  # gives the rows of the VMs that there are now, by number


class MachineVxlan:
    """`agent.hypervisor.VxlanMachines`: the controller's machine in the VXLAN. slurmctld, and all that guests reach
    through it, is behind its bridge. VMs on other machines are reached from here as long as their rows live."""

    def __init__(self, settings: Settings, config: VxlanConfig, node_of: Callable[[str], str] = str) -> None:
        """`node_of` gives the name that the settings have for a host's machine: a leased host has a name of its own.
        Raises the errors of `Vxlan` and `Vxlan.restore`."""
        self._settings, self._config, self._node_of = settings, config, node_of
        self._vxlan = Vxlan(config)
        self._vxlan.restore()
        self._hosts: dict[str, str] = {}  # the host at which each VM is reached, as told since the start: VMs move

    @property
    def own(self) -> str:
        return self._settings.host.name

    async def address_of(self, host: str) -> str:
        return await asyncio.to_thread(vxlan_address, self._settings, self._node_of(host))

    async def gateway(self) -> Neighbour:
        try:
            mac = Path(f"/sys/class/net/{self._config.bridge}/address").read_text().strip()
        except OSError as error:
            hint = "start it: systemctl start multiverse-bridge"
            raise Broken(f"there is no bridge {self._config.bridge}", hint=hint) from error
        return Neighbour(self._settings.network.gateway, mac, await self.address_of(self.own))

    async def reach(self, vm: str, neighbour: Neighbour) -> None:
        await asyncio.to_thread(self._vxlan.add, machine_owner(vm), (neighbour,))

    async def follow(self, vms: LiveVms) -> None:
        """Forget the VMs that have no row any more, and reach those that run, also if this machine has lost its
        records. The next call repeats what fails."""
        # The rows are read after the records: a VM has its row before this machine reaches it.
        known = {owner for owner in await asyncio.to_thread(self._vxlan.owners) if is_of_machine(owner)}
        there = {vm.name: vm for vm in vms().values() if vm.host != self.own and vm.address}
        for owner in known - {machine_owner(name) for name in there}:
            await asyncio.to_thread(self._vxlan.drop, owner)
        self._hosts = {name: host for name, host in self._hosts.items() if name in there}
        for name, vm in there.items():
            missing = machine_owner(name) not in known or self._hosts.get(name) != vm.host
            if missing and vm.state not in NOT_STARTED:
                machine = await self.address_of(vm.host)
                await self.reach(name, Neighbour(without_prefix_length(vm.address), vm.mac, machine))
                self._hosts[name] = vm.host


async def follow_regularly(vxlan: MachineVxlan, vms: LiveVms, interval: float) -> None:
    while True:
        try:
            await vxlan.follow(vms)
        except MultiverseError as error:
            log.warning("the VXLAN does not follow", reason=str(error))
        await asyncio.sleep(interval)


def wanted_copies(
    rows: Rows, world: World, policy: Policy, offered: Collection[str], own: str
) -> Iterator[tuple[str, str]]:
    """Each image of `offered` that a queued job or a pool wants, with each host that lacks it and takes new VMs. `own`
    is the controller's machine, which has these images."""
    lacking: dict[str, list[str]] = {}
    for name, host in sorted(world.hosts.items()):
        known = rows.hosts.get(name)
        if name != own and known is not None and known.drain is None:
            for image in set(offered).difference(host.images):
                lacking.setdefault(image, []).append(name)
    if not lacking:  # as nearly always: the queue need not be read
        return
    wanted = {pool.image for pool in policy.pools}
    wanted |= {image_of(row, policy) for row in rows.attempts.values() if row.state is AttemptState.QUEUED}
    for image in sorted(wanted & lacking.keys()):
        yield from ((image, host) for host in lacking[image])


class ImageCopies:
    """The copies that run, and when others may be tried again."""

    def __init__(self, images: Path, own: str, send: Send, clock: Clock) -> None:
        self._images, self._own, self._send, self._clock = images, own, send, clock
        self._not_before: dict[tuple[str, str], float] = {}
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def look(self, rows: Callable[[], Rows], world: Callable[[], World], policy: Policy) -> None:
        """Begin the copies that are wanted now."""
        offered = {image.name: image for image in await asyncio.to_thread(list_images, self._images)}
        for image, host in wanted_copies(rows(), world(), policy, offered, self._own):
            self._begin(offered, image, host)

    async def close(self) -> None:
        """Do not wait for copies that run: their programs finish them, or fail."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _begin(self, offered: Mapping[str, Image], image: str, host: str) -> None:
        which, now = (image, host), self._clock.now()
        if which in self._running or now < self._not_before.get(which, 0.0) or len(self._running) >= AT_ONCE:
            return
        self._not_before[which] = now + RETRY
        self._running[which] = task = asyncio.create_task(self._copy(offered[image], host))
        task.add_done_callback(lambda _: self._running.pop(which, None))

    async def _copy(self, image: Image, host: str) -> None:
        try:
            copied = await _in_thread(lambda: self._send(image, host))
        except MultiverseError as error:
            log.warning("image not copied", image=image.name, host=host, reason=error.message)
        else:
            log.info("image copied" if copied else "image is there", image=image.name, host=host)
        self._not_before[image.name, host] = self._clock.now() + RETRY


async def copy_regularly(
    settings: Settings, controller: Followed, clock: Clock, transport: LeasedTransport | None
) -> None:
    """Copy images until cancelled, to leased hosts by this transport."""
    leased: Mapping[str, LeasedHost] = {}

    def send(image: Image, host: str) -> bool:
        if (lease := leased.get(host)) is None:
            return transfer.send(image, other_command(settings.agent.connect, host, "receive-image"))
        if transport is None:
            raise Unknown(f"the scheduler does not lead to {host}", hint="it leases no hosts now")
        return transfer.send(image, transport.receive(lease), partial(transport.bring, lease, image.name))

    copies = ImageCopies(settings.qemu.images, settings.host.name, send, clock)
    try:
        while True:
            leased = controller.state.rows().leased_hosts()
            await copies.look(controller.state.rows, controller.world, controller.policy)
            await asyncio.sleep(PERIOD)
    finally:
        await copies.close()


async def _in_thread(work: Callable[[], bool]) -> bool:
    """Do `work` in a thread that does not keep this process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bool] = loop.create_future()

    def tell(result: bool, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, problem = False, None
        try:
            result = work()
        except Exception as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, result, problem)

    threading.Thread(target=run, name="image copy", daemon=True).start()
    return await done


class QemuPlatform:
    """`bundles.contract.Platform`: any number of hosts, each reached through its agent."""

    def __init__(self, context: PlatformContext) -> None:
        self._context = context
        self.hypervisor = self.measurements = self.guests = connect_agents(context)

    async def programs(self) -> Counter[str]:
        return await self.hypervisor.count_processes()

    async def follow(self, controller: Followed) -> Sequence[DaemonTask]:
        """The connections to agents, the controller's machine in the VXLAN, and copies of images."""
        context, settings = self._context, self._context.settings
        work = [DaemonTask("agents", self.hypervisor.run)]
        config = vxlan_config(settings, context.site)
        if config is not None:
            state = controller.state
            machine = await asyncio.to_thread(MachineVxlan, settings, config, partial(_node_of, state))
            self.hypervisor.vxlan = VxlanDirectory(machine, partial(_find, state), self.hypervisor.connect)
            work.append(DaemonTask("vxlan", partial(follow_regularly, machine, lambda: state.vms, settings.poll)))
        if settings.image.source is None:  # or else hosts copy by themselves
            copying = partial(copy_regularly, settings, controller, context.clock, context.leased)
            work.append(DaemonTask("images", copying))
        return work


def _find(state: State, name: str) -> Vm | None:
    return state.vms[state.vm_named[name]] if name in state.vm_named else None


def _node_of(state: State, host: str) -> str:
    lease = state.lease_of(host)
    return lease.node if lease else host


class QemuBundle:
    """`bundles.contract.PlatformBundle` and `HostSide`, for this machine as a host."""

    def __init__(self) -> None:
        self.host = self

    def local(self, settings: Settings, site: str, node: NodeNetwork | None = None) -> QemuHypervisor:
        return QemuHypervisor(settings, site, node)

    def open(self, context: PlatformContext) -> QemuPlatform:
        return QemuPlatform(context)

    def sites(self, settings: Settings) -> Sequence[str]:
        return sites(settings)

    def examine(self, settings: Settings, *, run_guests: bool) -> Iterator[Examination]:
        """See `PlatformBundle`: this machine as a host."""
        facts = machine.of_machine(settings, kvm=run_guests)
        why = "no QEMU" if run_guests else "--no-kvm"
        if settings.qemu.accel == "tcg":
            why = 'accel = "tcg" in [qemu]'
        for name, found in machine.examine(settings, facts):
            skipped = f"not tried: {why}" if name == "KVM runs guests" and facts.kvm is None else ""
            yield Examination(name, tuple(found), skipped)


QEMU = QemuBundle()
