"""Serves VMs inside jobs, where the settings enable them: the part of the agent for jobs of Slurm."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from random import Random
from typing import TypeVar

import structlog

import multiverse
from multiverse.agent.connection import AgentConnection, ControllerEpoch, ControllerIdentity
from multiverse.agent.hypervisor import AgentHypervisor
from multiverse.agent.job_protocol import LONGEST_REQUEST, MOST_VMS, PROTOCOL
from multiverse.agent.job_tasks import JobTasks
from multiverse.agent.jobs import RUNS, JobVm, JobVmService, JobVmSizes
from multiverse.bundles.qemu.platform import EPOCH_WAIT, transport_to
from multiverse.config import Settings
from multiverse.core.errors import Gone, MultiverseError, Refused, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.identity import (
    Identity,
    TaskAccess,
    User,
    mac_of,
    machine_id,
    vm_name,
    vm_prefix,
    without_prefix_length,
)
from multiverse.core.model.vm import TemplateKey, VmCondition, VmRef, VmSpec
from multiverse.drivers.qemu.job_vms import QemuJobVms, guest_name
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.job_vms import SlurmJobRuns, TaskProlog, set_feature, why_not
from multiverse.drivers.slurm.reading.name_service import NameService
from multiverse.guest.protocol import TASKS_PORT
from multiverse.host.cgroups import find_job, find_job_groups, has_steps
from multiverse.service.startup import bind
from multiverse.system import files
from multiverse.system.kernel import SharedMemory

log = structlog.get_logger()


_AGAIN = 10.0  # seconds until a failure is tried again


@asynccontextmanager
async def serve_jobs(settings: Settings) -> AsyncIterator[Callable[[Settings], None]]:
    """Serve the plugin and the tasks of users. Gives what takes settings that are read again. Raises `Refused` if users
    cannot reach the socket."""
    path, records = settings.job_vms.socket, settings.job_vms.records
    for directory in (path.parent, records):
        if not directory.exists():
            directory.mkdir(parents=True)
            directory.chmod(0o755)
    if not path.parent.stat().st_mode & 0o001:
        raise Refused(
            f"users cannot pass through {path.parent} to the socket of job_vms",
            hint=f"chmod o+x {path.parent}, or set job_vms.socket",
        )
    # Before the VMs of earlier agents are looked at: the epilog of a job that ends meanwhile waits for its turn. Tasks
    # run as users; who may do what is decided by their uids.
    async with _job_host(settings) as host:
        sock = bind(path, "job_vms.socket", all_users=True)
        service = _service(settings, host)
        try:
            await service.start()
            listening = await asyncio.start_unix_server(service.serve, sock=sock, limit=LONGEST_REQUEST)
            running = [asyncio.create_task(each) for each in _attended(settings, host, service)]
            try:
                yield partial(_apply, host)
            finally:
                for each in running:
                    each.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                listening.close()
        finally:
            path.unlink(missing_ok=True)
            await service.close()


def _apply(host: QemuJobVms | PlatformJobVms, settings: Settings) -> None:
    host.mounts = settings.mounts


@asynccontextmanager
async def _job_host(settings: Settings) -> AsyncIterator[QemuJobVms | PlatformJobVms]:
    if settings.job_vms.platform == "agent":
        async with connected_platform(settings, node_name(settings)) as platform:
            yield platform
        return
    host = await asyncio.to_thread(QemuJobVms, settings)
    try:
        yield host
    finally:
        host.close()


def _service(settings: Settings, host: QemuJobVms | PlatformJobVms) -> JobVmService:
    # A platform's QEMU is not in the job.
    overhead = settings.job_vms.overhead if settings.job_vms.platform == "host" else 0
    prolog = TaskProlog(SlurmCommands(settings.slurm))
    image, least, commands = settings.image.default, settings.qemu.base_memory, settings.slurm.directory()
    sizes = JobVmSizes(image, least, overhead, commands, prolog.path, settings.job_vms.ivshmem_size)
    state, records = settings.agent.state_dir / "jobs", settings.job_vms.records
    return JobVmService(host, NameService().user, state, records, sizes)


def _attended(
    settings: Settings, host: QemuJobVms | PlatformJobVms, service: JobVmService
) -> Iterator[Coroutine[None, None, None]]:
    yield NodeFeature(settings).keep()
    tasks = JobTasks(service, host, SlurmJobRuns(SlurmCommands(settings.slurm)), node_name(settings))
    if settings.job_vms.design == "tasks":
        service.steps = tasks.answer
    yield tasks.watch()  # also with the plugin: what steps launched before the design was changed is released
    yield _release_again(service)
    if isinstance(host, PlatformJobVms):
        yield _remove_unknown(host, service)


async def _release_again(service: JobVmService) -> None:
    """What could not be removed when its job ended, as while the platform was away."""
    while True:
        await asyncio.sleep(_AGAIN)
        await service.release_again()


async def _remove_unknown(host: PlatformJobVms, service: JobVmService) -> None:
    """What an earlier agent of this node has left on the platform and is known no more."""
    while True:
        try:
            await host.remove_unknown(service.known)
            return
        except MultiverseError as error:
            log.warning("the VMs of this node on the platform are unknown", reason=str(error))
        await asyncio.sleep(_AGAIN)


def node_name(settings: Settings) -> str:
    """What Slurm calls this host."""
    return settings.job_vms.node or settings.host.name


class NodeFeature:
    """Keeps the node's feature for jobs with VMs while they work here. The feature stays when the agent ends: another
    one takes over soon, and without an agent these jobs fail with that reason."""

    def __init__(self, settings: Settings) -> None:
        self._commands, self._jobs = SlurmCommands(settings.slurm), settings.job_vms
        self._node = node_name(settings)
        self._told = ""  # the reason that was logged last

    async def keep(self) -> None:
        while True:
            await self.test()
            await asyncio.sleep(self._jobs.check)

    async def test(self) -> None:
        """Test the plugin, and tell slurmctld, which forgets it when it reads its configuration again."""
        jobs = self._jobs
        if jobs.design == "tasks":
            reason: MultiverseError | None = None
            if not os.access(jobs.enter, os.X_OK):
                reason = Refused(f"{jobs.enter} cannot be executed", hint="make -C spank install, or set job_vms.enter")
        else:
            expected = {"protocol": str(PROTOCOL), "feature": jobs.feature, "records": str(jobs.records)}
            reason = await why_not(self._commands, expected)
        try:
            if isinstance(reason, Unknown):
                raise reason  # the last test counts
            if await set_feature(self._commands, self._node, jobs.feature, reason is None) and reason is None:
                log.info("this node takes jobs with VMs", node=self._node, feature=jobs.feature)
        except MultiverseError as error:
            reason = reason or error
        if (told := str(reason or "")) and told != self._told:
            log.warning("this node takes no jobs with VMs", node=self._node, feature=jobs.feature, reason=told)
        self._told = told


# --- VMs of a platform ------------------------------------------------------------------------------
# VMs behind the agent of another host: `agent.job_vm.JobHost` over `ports.Hypervisor`. The platform knows nothing of
# jobs. Its VMs are in no control groups of a job: a job's limits hold for them because none is larger than what the job
# has. Nothing but the connection tells a task that its VM has ended.

T = TypeVar("T")

_CONNECT_TIMEOUT = 20.0  # seconds: a guest may be busy
_ANSWER_TIMEOUT = 1200.0  # seconds for a call of the platform: it may build a template
_ALIVE = frozenset({VmCondition.RUNNING, VmCondition.PAUSED})

KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""How the end of a VM is noticed: seconds of silence, seconds between probes, and probes without an answer."""

_UNANSWERED = 30_000  # ms until data without an acknowledgement ends the connection


def site_of_node(node: str) -> str:
    """The site in the names of this node's VMs: the platform's agent takes each node for a controller of its own
    site."""
    digest = int.from_bytes(sha256(f"multiverse jobs of {node}".encode()).digest())
    letters = "0123456789abcdefghijklmnopqrstuvwxyz"
    return "j" + "".join(letters[digest // 36**place % 36] for place in range(4))


@asynccontextmanager
async def connected_platform(settings: Settings, node: str) -> AsyncIterator[PlatformJobVms]:
    """The platform of the settings, with a connection that is kept up meanwhile."""
    host, file = settings.job_vms.platform_host, settings.agent.state_dir / "platform-epoch"
    who = ControllerIdentity(multiverse.__version__, secrets.token_hex(8), site_of_node(node), node)
    try:
        kept = int(file.read_text()) if file.exists() else 0
    except ValueError as error:
        raise Refused(f"{file} is damaged: {error}", hint=f"remove {file}, and start the agent again") from error
    epoch = ControllerEpoch(kept, lambda number: files.replace(file, f"{number}\n"), [host], EPOCH_WAIT)
    connection = AgentConnection(host, transport_to(host, settings), who, epoch, Random())
    platform = AgentHypervisor([host], lambda _: connection)
    running = asyncio.create_task(_keep_up(platform), name="platform")
    try:
        yield PlatformJobVms(settings, who.site, platform, asyncio.get_running_loop())
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _keep_up(platform: AgentHypervisor) -> None:
    try:
        await platform.run()
    except MultiverseError as error:  # each call says so
        log.error("the platform of VMs inside jobs is commanded by another node", reason=str(error))


class PlatformJobVms:
    """`agent.job_vm.JobHost`. Its calls block a thread, while the event loop waits for the platform."""

    def __init__(
        self, settings: Settings, site: str, platform: AgentHypervisor, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._settings, self._site, self._platform, self._loop = settings, site, platform, loop
        self.mounts = settings.mounts  # of VMs that are made from here on
        self._host = settings.job_vms.platform_host
        self._addresses = ipaddress.IPv4Network(settings.job_vms.platform_subnet)

    def close(self) -> None:
        pass  # see `connected_platform`

    find_job = staticmethod(find_job)

    def find_groups(self, job: int, pid: int) -> tuple[str, ...]:
        """Only to know whether the job has steps here."""
        return find_job_groups(str(job), pid)

    def has_steps(self, vm: JobVm) -> bool:
        return has_steps(vm.groups)

    def known_as(self, vm: JobVm) -> tuple[str, str]:
        return guest_name(vm.job, vm.rank), self._address(vm)

    def connect_network(self, vms: tuple[JobVm, ...]) -> None:
        """The VMs are on the network of the platform."""
        if vms[0].functions or vms[0].regions:
            raise Refused(
                "VMs of a platform have no virtual functions, and share no regions of memory",
                hint="submit the job without --sriov and --ivshmem",
            )
        if len(vms[0].nodes) > 1:
            raise Refused(
                "VMs of a platform are for jobs of one node, because no agent knows those of another node",
                hint="submit the job with --nodes=1",
            )
        self._address(vms[-1])

    def remove_network(self, vms: tuple[JobVm, ...]) -> None:
        pass

    def control_groups(self, vm: JobVm) -> list[str]:
        return []  # the VM is in none here

    def share_memory(self, vms: tuple[JobVm, ...]) -> SharedMemory:
        return SharedMemory((), 0)

    def make(self, vm: JobVm, vms: tuple[JobVm, ...], user: User, memory: SharedMemory) -> None:
        self._ask(self._make(vm, vms, user))

    async def _make(self, vm: JobVm, vms: tuple[JobVm, ...], user: User) -> None:
        (source,) = self._platform.sources
        host = (await source.observe()).hosts.get(self._host)
        if host is None:
            raise Gone(f"there is no host {self._host}", hint="see job_vms.platform_host")
        qemu = self._settings.qemu
        base, abilities = Size(qemu.base_cpus, qemu.base_memory), host.images.get(vm.image, frozenset())
        is_instant = "instant" in host.abilities and {"plug_cpus", "plug_memory"} <= abilities
        template = TemplateKey(self._host, vm.image, base) if is_instant else None
        spec = self._specification(vm, template)
        try:
            await self._platform.create(spec)
        except Gone:
            if template is None:
                raise
            await self._platform.build_template(template)
            await self._platform.create(spec)
        block = host.memory_block
        size = replace(vm.size, memory=base.memory + (vm.memory - base.memory) // block * block)
        await self._platform.start(spec.ref, size, self._identity(spec, vm, vms, user))

    def is_alive(self, vm: JobVm) -> bool:
        """Raises `Unknown` if the platform does not answer."""
        (source,) = self._platform.sources
        seen = self._ask(source.observe()).vms.get(self._name(vm))
        return seen is not None and seen.token == vm.token and seen.condition in _ALIVE

    def connect(self, vm: JobVm) -> tuple[socket.socket, int]:
        """Nothing happens on the descriptor in place of a pidfd: the connection breaks half a minute after the VM has
        ended."""
        try:
            connection = socket.create_connection((self._address(vm), TASKS_PORT), _CONNECT_TIMEOUT)
        except OSError as error:
            hint = f"does this node have a route to {self._addresses}, and does the VM run on {self._host}?"
            raise Unknown(f"the guest does not answer: {error}", hint=hint) from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (*KEEPALIVE, (socket.TCP_USER_TIMEOUT, _UNANSWERED)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.settimeout(None)
        return connection, os.eventfd(0)

    def kill(self, vm: JobVm) -> None:
        self._ask(self._platform.destroy(self._ref(vm), 0.0))

    def remove(self, vm: JobVm) -> None:
        self._ask(self._platform.destroy(self._ref(vm), self._settings.pacing.reclaim_grace))

    def return_rest(self) -> None:
        """The platform does so itself."""

    async def remove_unknown(self, known: Callable[[], list[tuple[JobVm, ...]]]) -> None:
        """Remove VMs of this node that the platform has and no job has: knowledge of them was lost. Raises `Unknown` if
        the platform does not answer."""
        (source,) = self._platform.sources
        view = await source.observe()
        names = {self._name(vm) for vms in known() for vm in vms}  # later: a VM is known before it is made
        for seen in view.vms.values():
            address = without_prefix_length(seen.address)
            # The digests of two nodes' names can be the same: then their addresses differ.
            is_elsewhere = bool(address) and ipaddress.IPv4Address(address) not in self._addresses
            if seen.name.startswith(vm_prefix(self._site)) and not is_elsewhere and seen.name not in names:
                log.warning("a VM of no job is removed", vm=seen.name)
                await self._platform.destroy(VmRef(seen.name, self._host, seen.token), 0.0)

    def _ask(self, call: Awaitable[T]) -> T:
        """What the platform answers. This is called in threads."""
        answering = asyncio.run_coroutine_threadsafe(_coroutine(call), self._loop)
        try:
            return answering.result(_ANSWER_TIMEOUT)
        except TimeoutError as error:
            answering.cancel()
            raise Unknown(f"{self._host} has not answered for {_ANSWER_TIMEOUT:g} s") from error

    def _name(self, vm: JobVm) -> str:
        return vm_name(self._site, vm.job * RUNS + vm.run)

    def _ref(self, vm: JobVm) -> VmRef:
        return VmRef(self._name(vm), self._host, vm.token)

    def _address(self, vm: JobVm) -> str:
        place = vm.number * MOST_VMS + vm.index
        if (vm.number + 1) * MOST_VMS > self._addresses.num_addresses:
            raise Refused(
                f"this node has VMs inside of {vm.number} jobs already, and no addresses for those of another one",
                hint="enlarge job_vms.platform_subnet",
            )
        return str(self._addresses[place])

    def _specification(self, vm: JobVm, template: TemplateKey | None) -> VmSpec:
        return VmSpec(
            name=self._name(vm),
            host=self._host,
            image=vm.image,
            kind=CloneKind.INSTANT if template is not None else CloneKind.LINKED,
            size=vm.size,
            mac=mac_of(self._site, vm.job * RUNS + vm.run),
            template=template,
            token=vm.token,
            address=f"{self._address(vm)}/{ipaddress.IPv4Network(self._settings.network.subnet).prefixlen}",
            source=self._host,
        )

    def _identity(self, spec: VmSpec, vm: JobVm, vms: tuple[JobVm, ...], user: User) -> Identity:
        network, others = self._settings.network, [one for one in vms if one.index != vm.index]
        commands = str(self._settings.slurm.directory())
        known = tuple(self.known_as(one) for one in vms)
        return Identity(
            hostname=spec.name,
            mac=spec.mac,
            address=spec.address,
            gateway=network.gateway,
            machine_id=machine_id(f"{spec.name} {spec.token}"),
            users=(user,),
            mounts=self.mounts,
            peers=(*network.hosts, *((self._name(one), self._address(one)) for one in others)),
            tasks=TaskAccess(guest_name(vm.job, vm.rank), network.hosts, known, vm.nodes, vm.task_token, commands),
        )


async def _coroutine(call: Awaitable[T]) -> T:
    return await call
