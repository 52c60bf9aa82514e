"""QEMU as a hypervisor: one host, this machine. The host library does the work, in threads of this driver."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import TypeVar

from multiverse.agent.protocol import MoveHolds, MoveOffer
from multiverse.config import Settings, vxlan_address
from multiverse.core.errors import Gone, MultiverseError, Refused
from multiverse.core.model.basics import Size
from multiverse.core.model.host import HypervisorView
from multiverse.core.model.identity import Identity, Member, Neighbour, User, network_id_of, site_of, vm_prefix
from multiverse.core.model.vm import Stage, TemplateKey, VmRef, VmSpec
from multiverse.host.links import MoveHello, MovePeer, NodeNetwork
from multiverse.host.manifest import RECEIVED, Specification
from multiverse.host.qemu.context import MoveConfig, QemuHostConfig
from multiverse.host.qemu.library import QemuHost
from multiverse.host.qemu.machine import Accelerator, Feature
from multiverse.host.vxlan import VxlanConfig

T = TypeVar("T")

_THREADS = 64  # a start waits for its guest in one of them
_URGENT = 4
_STORAGES = 4  # more copies at once are no faster


class QemuHypervisor:
    """`ports.Hypervisor` with QEMU on this machine. `site` marks which VMs are ours: `mv<site>-<serial>`."""

    def __init__(self, settings: Settings, site: str, node: NodeNetwork | None = None) -> None:
        """`node` is the network of a leased node."""
        self._bridge = settings.qemu.bridge
        config = host_config(settings, site)
        if node is not None:
            moves = config.moves and replace(config.moves, namespace=node.namespace)
            config = replace(config, vxlan=node.vxlan, moves=moves)
        self.templates = self.users = self.groups = self
        self.membership = None  # this machine alone
        self.moves = None  # this machine alone: see `exchange`
        self._offer: MoveOffer | None = None  # where this machine receives VMs, once it does
        self.saves = self.sleeps = self if config.saves is not None else None
        self.silence = None  # this process answers for the machine that it is on
        self._host = QemuHost(config)
        self._creating: dict[str, Future[list[Stage]]] = {}
        self._deletions: Counter[TemplateKey] = Counter()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="qemu")
        self._urgent = ThreadPoolExecutor(_URGENT, thread_name_prefix="urgent")  # for what waits for nobody
        self._storages = ThreadPoolExecutor(_STORAGES, thread_name_prefix="storage")  # for what may hang with a storage

    @property
    def accelerator(self) -> Accelerator:
        return self._host.accelerator

    @property
    def name(self) -> str:
        return self._host.config.host

    @property
    def sources(self) -> Sequence[QemuHypervisor]:
        return (self,)

    @property
    def exchange(self) -> QemuHypervisor | None:
        return self if self._host.config.moves is not None else None

    def resume_moves(self, offer: MoveOffer | None) -> None:
        self._offer = offer
        self._host.moves.resume()
        self._host.settle_checkpoints()
        self._host.settle_sleepers()

    def serve_move(self, sock: socket.socket, hello: MoveHello) -> None:
        self._host.moves.serve(sock, hello)

    async def receive_move(self, vm: VmSpec, number: int, secret: str, neighbours: Sequence[Neighbour]) -> MoveOffer:
        if self._offer is None:
            raise Refused(f"{self.name} receives no VMs", hint="see the log of its agent")
        spec = self._specification(vm)
        await self._in_thread(self._host.moves.receive, spec, number, secret, neighbours, urgent=True)
        return self._offer

    async def send_move(self, vm: VmRef, number: int, secret: str, offer: MoveOffer) -> Sequence[Stage]:
        peer = MovePeer(offer.address, offer.port, offer.certificate)
        return await self._in_thread(self._host.moves.send, vm.name, vm.token, number, secret, peer)

    async def cancel_move(self, vm: VmRef, number: int, *, absent: bool) -> MoveHolds:
        return await self._in_thread(partial(self._host.moves.cancel, vm.name, vm.token, number, absent=absent))

    @property
    def vxlan(self) -> QemuHypervisor | None:
        return self if self._host.config.vxlan is not None else None

    @property
    def hosts(self) -> Sequence[str]:
        return [self._host.config.host]

    def check(self) -> None:
        self._host.check()

    def restore_vxlan(self) -> None:
        self._urgent.submit(self._host.restore_vxlan).result()  # pyroute2 runs in no thread with an event loop

    async def observe(self) -> HypervisorView:
        def observe() -> HypervisorView:
            self._host.resume_paused()
            return self._host.observe()

        return await self._in_thread(observe)

    async def list_vms(self) -> Sequence[str]:
        """Unlike an observation it asks no QEMU, and waits for no other call."""
        return await self._in_thread(self._host.list_vms, urgent=True)

    async def kill(self, vms: Collection[str]) -> None:
        await self._in_thread(self._host.kill, vms, urgent=True)

    async def measure(self) -> Mapping[str, tuple[float, float, float]]:
        return await self._in_thread(self._host.measure)

    def audit(self, name: str) -> Mapping[str, str | int]:
        return self._host.audit(name)

    async def examine(self) -> Mapping[str, Mapping[str, str | int]]:
        names = await self._in_thread(self._host.list_vms)
        found = await asyncio.gather(*(self._in_thread(self._examine, name) for name in names))
        return {name: facts for name, facts in zip(names, found, strict=True) if facts is not None}

    def _examine(self, name: str) -> Mapping[str, str | int] | None:
        try:
            return self._host.examine(name)
        except Gone:
            return None
        except MultiverseError as error:
            return {"error": error.message}

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        deletions = self._deletions[template]
        return await self._in_thread(
            self._host.build_template, template, lambda: self._deletions[template] != deletions
        )

    async def delete_template(self, template: TemplateKey) -> None:
        # A thread goes on when its caller is cancelled: it must not build the template after this call.
        self._deletions[template] += 1
        await self._in_thread(self._host.delete_template, template)

    async def delete_all_templates(self) -> None:
        """Remove every template of this host, also templates of other processes, and unfinished ones."""
        await self._in_thread(self._host.delete_all_templates)

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        spec = self._specification(vm)
        creating = self._creating[spec.name] = self._threads.submit(self._host.create, spec)
        creating.add_done_callback(lambda done: self._created(spec.name, done))
        return await asyncio.wrap_future(creating)

    def _created(self, name: str, creating: Future[list[Stage]]) -> None:
        if self._creating.get(name) is creating:
            del self._creating[name]

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> Sequence[Stage]:
        return await self._in_thread(self._host.start, vm.name, size, identity, vm.token)

    async def add_user(self, vm: VmRef, user: User, group: int = 0) -> None:
        await self._in_thread(self._host.add_user, vm.name, user, group, vm.token)

    async def freeze(self, vm: VmRef, *, script: bool = True) -> None:
        await self._in_thread(partial(self._host.freeze, vm.name, vm.token, script=script))

    async def cut(self, vm: VmRef) -> None:
        await self._in_thread(self._host.cut, vm.name, vm.token)

    async def save(self, vm: VmRef, name: str, key: str = "") -> Sequence[Stage]:
        return await self._in_thread(self._host.save, vm.name, vm.token, name, key)

    async def checkpoint(self, vm: VmRef, name: str, key: str = "", *, shared_files: bool = False) -> Sequence[Stage]:
        write = partial(self._host.checkpoint, vm.name, vm.token, name, key, shared_files=shared_files)
        return await self._in_thread(write)

    async def sleep(self, vm: VmRef, number: int, identity: Identity, key: str = "") -> Sequence[Stage]:
        return await self._in_thread(self._host.sleep, vm.name, vm.token, number, identity, self._bridge, key)

    async def wake(self, vm: VmRef, number: int, *, runs: bool, key: str = "") -> Sequence[Stage]:
        return await self._in_thread(partial(self._host.wake, vm.name, vm.token, number, runs=runs, key=key))

    async def copy(self, source: str, name: str, key: str = "") -> None:
        await asyncio.get_running_loop().run_in_executor(self._storages, self._host.copy_saved, name, key)

    async def keep_in_memory(self, vm: VmRef, name: str) -> None:
        await self._in_thread(self._host.keep, vm.name, vm.token, name)

    async def thaw(self, vm: VmRef) -> None:
        await self._in_thread(self._host.thaw, vm.name, vm.token)

    async def discard(self, source: str, name: str) -> None:
        await self._in_thread(self._host.discard_kept, name)
        await asyncio.get_running_loop().run_in_executor(self._storages, self._host.discard_files, name)

    @property
    def listening(self) -> Mapping[str, str]:
        return {self.name: ""}

    async def tell(self, host: str, members: Sequence[Member], gone: Sequence[str], *, whole: bool) -> None:
        if host != self.name:
            raise Gone(f"there is no host {host}", hint=f"QEMU runs on {self.name} only")
        await self._in_thread(partial(self._host.tell, members, gone, whole=whole), urgent=True)

    async def connect(self, vm: VmRef, neighbours: Sequence[Neighbour]) -> None:
        await self._in_thread(self._host.connect, vm.name, neighbours, vm.token, urgent=True)

    async def destroy(self, vm: VmRef, grace: float) -> None:
        creating = self._creating.get(vm.name)
        await self._in_thread(self._host.destroy, vm.name, grace, vm.token)
        if creating is not None:
            # A thread goes on when its caller is cancelled. Its QEMU has just been killed, so it ends soon; then what
            # it created meanwhile is removed.
            await asyncio.wait([asyncio.wrap_future(creating)])
            await self._in_thread(self._host.destroy, vm.name, 0.0, vm.token)

    def close(self) -> None:
        """Wait for nothing: calls that still wait end with an error. VMs and finished templates stay. Builds of
        templates are ended, because nobody could finish them."""
        self._host.close()
        for threads in (self._threads, self._urgent, self._storages):
            threads.shutdown(wait=False, cancel_futures=True)

    def _specification(self, vm: VmSpec) -> Specification:
        if vm.host != self._host.config.host:
            raise Gone(f"there is no host {vm.host}", hint=f"QEMU runs on {self._host.config.host} only")
        return Specification(**{one.name: getattr(vm, one.name) for one in fields(vm)}, bridge=self._bridge)

    async def _in_thread(self, function: Callable[..., T], *arguments: object, urgent: bool = False) -> T:
        threads = self._urgent if urgent else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: function(*arguments))


JOB_SITE = "job"  # the site in names of VMs inside jobs, which no controller knows; real sites have five characters


def sites(settings: Settings) -> list[str]:
    """The sites that have VMs, or remains of VMs, on this machine. VMs inside jobs are of no site."""
    places = [place for place in (settings.qemu.vms, settings.qemu.run) if place.is_dir()]
    names = [path.name.removeprefix(RECEIVED) for place in places for path in place.iterdir()]
    return sorted({site_of(name) for name in names} - {"", JOB_SITE})


def vxlan_config(settings: Settings, site: str) -> VxlanConfig | None:
    """The VXLAN of this machine; None if there is none, as for VMs inside jobs."""
    vxlan = settings.vxlan
    if not vxlan.enabled or site == JOB_SITE:
        return None
    return VxlanConfig(
        site,
        vxlan.network or network_id_of(site),
        vxlan.port,
        partial(vxlan_address, settings, settings.host.name),
        vxlan.mtu,
        settings.qemu.bridge,
        settings.state_dir.absolute() / f"vxlan-{site}",
    )


def move_config(settings: Settings) -> MoveConfig | None:
    move = settings.move
    if not move.enabled:
        return None
    return MoveConfig(move.private, move.compress, move.bandwidth, move.timeout, move.downtime)


def host_config(settings: Settings, site: str) -> QemuHostConfig:
    host, qemu = settings.host, settings.qemu
    network = ipaddress.IPv4Network(settings.network.subnet)
    return QemuHostConfig(
        host=host.name,
        prefix=vm_prefix(site),
        capacity=Size(host.cores, host.memory, host.disk, host.net),
        uplink=qemu.uplink,
        overcommit=host.overcommitment,
        images=qemu.images.absolute(),
        image_source=settings.image.source and settings.image.source.absolute(),
        template_source=settings.image.templates and settings.image.templates.absolute(),
        templates=qemu.templates.absolute(),
        saves=settings.save.directory.absolute() if settings.save.enabled else None,
        copies=settings.save.copy.absolute() if settings.save.enabled and settings.save.copy else None,
        moves=move_config(settings),
        vms=qemu.vms.absolute(),
        run=qemu.run.absolute(),
        cache=settings.state_dir.absolute(),
        binary=qemu.binary,
        accelerator=qemu.accel,
        cpu=qemu.cpu,
        uids=qemu.uids,
        base=Size(qemu.base_cpus, qemu.base_memory),
        largest=Size(qemu.max_cpus, qemu.max_memory),
        scratch=settings.image.scratch,
        tb_size=qemu.tb_size,
        features={
            Feature.VHOST_NET: qemu.vhost_net,
            Feature.HUGE_PAGES: qemu.huge_pages,
            Feature.NATIVE_AIO: qemu.native_aio,
            Feature.IOTHREAD: qemu.iothread,
        },
        guests=(str(network[settings.network.first]), str(network[-2])),
        vxlan=vxlan_config(settings, site),
        mtu=settings.vxlan.mtu if settings.vxlan.enabled else 0,
    )
