"""VMs inside the allocations of jobs, as Slurm's plugin asks for them. No controller is involved.

A job has one VM on this host, or as many as it asked for: all of them or none. The agent writes a file of them before
they exist, so that the next agent can go on. The plugin keeps a record of a job as long as its allocation on this host
lasts. When the agent starts, it releases VMs of jobs without a record.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import structlog
from pydantic import TypeAdapter

from multiverse.agent.job_protocol import (
    LAUNCH,
    EnterVm,
    LaunchVms,
    PlainRequest,
    ProvideVm,
    ReleaseVm,
    StepRequest,
    answer,
    parse,
    vm_size,
)
from multiverse.core.errors import Gone, MultiverseError, Refused, Unknown
from multiverse.core.model.basics import Size
from multiverse.core.model.identity import User
from multiverse.system import files
from multiverse.system.kernel import SharedMemory
from multiverse.system.processes import Peer, peer_of

log = structlog.get_logger()
T = TypeVar("T")

RUNS = 512  # names that the VMs of one job can have on a host
MOST_JOBS = 250  # with VMs on one host
PLUGIN_UID = 0  # the user that slurmd runs the plugin as
CONNECTIONS_OF_ONE = 512  # of one user at the same time; further ones are closed at once. Each task makes one
ENTERED_AT_ONCE = 4  # tasks of one job that are connected to its guest at the same time: a guest may not answer
_THREADS = 32
_REQUEST_TIMEOUT = 10.0  # seconds for a request of one line
_random = secrets.SystemRandom()


@dataclass(frozen=True, slots=True)
class JobVm:
    """A VM of one run of a job."""

    job: int
    run: int  # a random number for the VM's name
    # When the plugin recorded the run (Unix time in nanoseconds; 0: not), or, if `watched`, when slurmctld started it.
    record: int
    uid: int
    number: int  # of the job on this host: it chooses the job's addresses here
    image: str
    cpus: int
    memory: int
    disk: int
    token: str
    task_token: str  # by which the guest knows the agent of the host
    groups: tuple[str, ...]  # control groups of the job
    index: int = 0  # of the VM on this host
    vms: int = 1  # on each of the job's nodes
    nodes: tuple[str, ...] = ("",)
    node: int = 0  # the number of this host among the nodes
    functions: int = 0  # virtual functions of this host's devices
    function_groups: tuple[int, ...] = ()  # IOMMU groups whose device files the job may open
    regions: tuple[str, ...] = ()  # ids of regions of memory that the job's VMs here share; no other job ever has one
    watched: bool = False  # no plugin records the job's runs and tells their ends

    @property
    def rank(self) -> int:
        """The number of the VM among all VMs of the job, from 0 on."""
        return self.node * self.vms + self.index

    @property
    def size(self) -> Size:
        return Size(self.cpus, self.memory, self.disk)


class JobHost(Protocol):
    """Makes these VMs. All calls block, and raise the errors of the host library."""

    def find_groups(self, job: int, pid: int) -> tuple[str, ...]:
        """The directories of the job's control groups, if the process `pid` is in one; none if the job has none."""

    def find_job(self, pid: int) -> int:
        """The job whose control group has the process `pid`; 0: no job. Raises `Refused` if the process has ended."""

    def has_steps(self, vm: JobVm) -> bool:
        """Whether a step of the VM's job is on this host, as far as control groups tell."""

    def known_as(self, vm: JobVm) -> tuple[str, str]:
        """The VM's name and address in the network of its job."""

    def connect_network(self, vms: tuple[JobVm, ...]) -> None:
        """Make the network of these VMs: all VMs of the job here. After an error a part of it may remain."""

    def control_groups(self, vm: JobVm) -> list[str]:
        """The directories of the control groups that the VM will have, or has."""

    def share_memory(self, vms: tuple[JobVm, ...]) -> SharedMemory:
        """The regions of memory that these VMs share: all VMs of the job here."""

    def make(self, vm: JobVm, vms: tuple[JobVm, ...], user: User, memory: SharedMemory) -> None:
        """Make `vm` of `vms`; return when its guest accepts tasks. After an error a part of the VM may remain."""

    def is_alive(self, vm: JobVm) -> bool: ...

    def connect(self, vm: JobVm) -> tuple[socket.socket, int]:
        """A new connection to the guest, and a pidfd that ends with the VM. Raises `Gone` and `Unknown`."""

    def kill(self, vm: JobVm) -> None:
        """End the VM at once. What waits for its guest gets an error."""

    def remove(self, vm: JobVm) -> None:
        """Let the guest write back, end the VM and remove all of it. Absent is success."""

    def return_rest(self) -> None:
        """Take back devices of VMs that do not exist any more."""

    def remove_network(self, vms: tuple[JobVm, ...]) -> None:
        """Remove the network of these VMs, after the VMs. Absent is success."""


class JobVmService:
    """Answers the plugin and users' tasks. `state` is the directory of the agent's records, `records` the plugin's."""

    def __init__(
        self, host: JobHost, users: Callable[[int], Awaitable[User]], state: Path, records: Path, sizes: JobVmSizes
    ) -> None:
        self.steps: Callable[[StepRequest, Peer], Awaitable[str]] | None = None  # answers steps, in place of a plugin
        self._host, self._users, self._state, self._records, self._sizes = host, users, state, records, sizes
        self._known: dict[int, tuple[JobVm, ...]] = {}
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()  # while somebody holds it or waits
        self._making: set[int] = set()  # jobs whose VMs are being made
        self._released: set[int] = set()  # the same jobs, if they have ended
        self._unreleased: set[int] = set()  # jobs that have ended, and whose VMs could not be removed
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="jobs")
        # Threads of their own: VMs that are being made, and guests, can keep one waiting, and jobs must be able to end.
        self._ending = ThreadPoolExecutor(_THREADS, thread_name_prefix="ending")
        self._entering = ThreadPoolExecutor(_THREADS, thread_name_prefix="entering")
        self._turns: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()  # to enter, by job
        self._open = Counter[int]()  # connections, by user
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Find the VMs of earlier agents again. Release VMs of jobs that have ended since, and unfinished VMs: no task
        has entered these, and the job's next task gets another."""
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in self._state.glob("*.json"):
            try:
                vms = _read(path)
            except (OSError, ValueError) as error:
                log.warning(
                    "VMs of a job are unknown, because their file cannot be read; cancel the job, end what "
                    "`pgrep -af mvjob` shows of it, and remove the file",
                    path=str(path),
                    reason=str(error) or type(error).__name__,
                )
                continue
            self._known[vms[0].job] = vms
        for job in list(self._known):
            goes_on = self._known[job][0].watched or (self._records / str(job)).exists()
            if goes_on and self._groups(job).exists():
                continue
            try:
                await self.release(job)
            except MultiverseError as error:
                log.warning("VMs of an ended job not released", job=job, reason=str(error))
        await self._call(self._host.return_rest)

    async def close(self) -> None:
        """End the connections. VMs stay as they are, also unfinished ones."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for threads in (self._threads, self._ending, self._entering):
            threads.shutdown(wait=False, cancel_futures=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        sock: socket.socket = writer.get_extra_info("socket")
        peer = peer_of(sock)
        uid = peer.uid
        self._serving.add(task)
        self._open[uid] += 1
        try:
            if uid == PLUGIN_UID or self._open[uid] <= CONNECTIONS_OF_ONE:
                await self._serve(reader, writer, peer)
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError) as error:
            log.debug("request of a job ended", uid=uid, reason=str(error) or type(error).__name__)
        finally:
            self._serving.discard(task)
            self._open[uid] -= 1
            self._open += Counter()  # without zeros
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer) -> None:
        sock: socket.socket = writer.get_extra_info("socket")
        told = ""
        async with asyncio.timeout(_REQUEST_TIMEOUT):
            line = await reader.readuntil()
        try:
            request = parse(line)
            if isinstance(request, EnterVm):
                await self._enter(request, peer.uid, peer.gid, sock)
                return
            if isinstance(request, LaunchVms | PlainRequest) and request is not PlainRequest.TEST:
                if self.steps is None:
                    hint = "submit the job with --vm-image, or set job_vms.design in the settings of this host"
                    raise Refused("Slurm's plugin launches the VMs of jobs on this host", hint=hint)
                told = await self.steps(request, peer)
            elif peer.uid != PLUGIN_UID:
                raise Refused("only root may do that: Slurm's plugin does it for the job")
            elif isinstance(request, ProvideVm):
                if self.steps is not None:
                    raise Refused("job_vms.design of this host is tasks", hint=f"launch its VMs in the job: {LAUNCH}")
                await self.provide(request, peer.pid)
            elif isinstance(request, ReleaseVm):
                await self.release(request.job)
        except MultiverseError as error:
            note = log.info if peer.uid == PLUGIN_UID else log.debug  # users may ask as often as they like
            note("request of a job refused", request=line.decode("ascii", "replace").strip(), reason=str(error))
            writer.write(answer(error))
        except Exception as error:  # a defect of ours: the job is to hear of it, and the agent goes on
            log.exception("request of a job failed unexpectedly")
            writer.write(answer(Unknown(f"the agent failed: {type(error).__name__}: {error}")))
        else:
            writer.write(answer(told=told))
        await writer.drain()

    # --- what is asked for ----------------------------------------------------------------------------

    def known(self) -> list[tuple[JobVm, ...]]:
        """The VMs of each job on this host."""
        return list(self._known.values())

    def vms_of(self, job: int) -> tuple[JobVm, ...]:
        """The VMs of a job; none if it has none."""
        return self._known.get(job, ())

    async def provide(self, request: ProvideVm, pid: int) -> None:
        """Make the VMs of a job, unless they are there. `pid` is a process in the job's control groups. Raises
        `Refused` for what the job cannot have, `Gone` if a VM has ended, and errors of `JobHost`; then the job has no
        VM."""
        job = request.job
        async with self._lock(job):
            self._unreleased.discard(job)
            known = self._known.get(job)
            if known is not None and (known[0].record, known[0].uid) != (self._run_of(request), request.uid):
                await self._remove(known)  # of an earlier run, whose epilog did not reach us
                known = None
            if known is None:
                await self._make(await self._planned(request, pid))
                return
            if not all([await self._call(self._host.is_alive, vm) for vm in known]):
                hint = "reclaim it, and launch another" if request.started else "submit the job again"
                raise Gone("a VM of this job has ended, and what was in it is lost", hint=hint)
            if request.started and not self._is_same(request, known):
                raise Refused("this job has other VMs on this node", hint="first: srun multiverse-vm reclaim")

    def _is_same(self, request: ProvideVm, known: tuple[JobVm, ...]) -> bool:
        wanted = self._image(request), self._size(request), request.functions, request.regions
        one = known[0]
        return len(known) == request.vms and wanted == (one.image, one.size, one.functions, len(one.regions))

    def _size(self, request: ProvideVm) -> Size:
        return vm_size(request, self._sizes.least, self._sizes.overhead, self._sizes.region)

    def _image(self, request: ProvideVm) -> str:
        return request.image or self._sizes.default_image

    def _run_of(self, request: ProvideVm) -> int:
        return request.started or self._recorded(request.job)

    async def _planned(self, request: ProvideVm, pid: int) -> tuple[JobVm, ...]:
        size = self._size(request)
        groups = await self._call(self._host.find_groups, request.job, pid)
        # Nothing is awaited from here until the VMs are known: the job's number is taken then.
        taken = {vms[0].number for vms in self._known.values()}
        number = next((number for number in range(MOST_JOBS) if number not in taken), None)
        if number is None:
            raise Refused(f"this host has VMs inside of {MOST_JOBS} jobs already")
        runs = _random.sample(range(RUNS), request.vms)
        regions = tuple(secrets.token_hex(16) for _ in range(request.regions))
        return tuple(
            JobVm(
                job=request.job,
                run=run,
                record=self._run_of(request),
                uid=request.uid,
                number=number,
                image=self._image(request),
                cpus=size.cpus,
                memory=size.memory,
                disk=size.disk,
                token=secrets.token_hex(16),
                task_token=secrets.token_hex(16),
                groups=groups,
                index=index,
                vms=request.vms,
                nodes=request.nodes,
                node=request.node,
                functions=request.functions,
                function_groups=request.groups,
                regions=regions,
                watched=bool(request.started),
            )
            for index, run in enumerate(runs)
        )

    async def _make(self, vms: tuple[JobVm, ...]) -> None:
        """Make all of these, or none."""
        first = vms[0]
        self._known[first.job] = vms
        self._making.add(first.job)
        try:
            user = await self._users(first.uid)
            await self._call(self._write, vms)
            await self._call(self._host.connect_network, vms)
            await self._call(self._write_groups, vms)
            await self._make_each(vms, user)
            await self._call(self._unfinished(first.job).rename, self._groups(first.job))
            if first.job in self._released:
                raise Gone("the job has ended")
        except Exception:
            # Not if this agent ends: a thread may still make a VM, after it was removed. The next agent removes it.
            with suppress(MultiverseError):
                await self._remove(vms)
            raise
        finally:
            self._making.discard(first.job)
        log.info("VMs of a job made", job=first.job, vms=len(vms), image=first.image, size=str(first.size))

    async def _make_each(self, vms: tuple[JobVm, ...], user: User) -> None:
        """Make these VMs at the same time, with the memory that they share."""
        memory = await self._call(self._host.share_memory, vms)
        try:
            await _all_done(self._call(self._make_one, vm, vms, user, memory) for vm in vms)
        except Exception:
            memory.close()
            raise
        memory.close()  # not if this agent ends: a thread may still pass it on

    def _make_one(self, vm: JobVm, vms: tuple[JobVm, ...], user: User, memory: SharedMemory) -> None:
        if vm.job in self._released:  # while this waited for a thread
            raise Gone("the job has ended")
        self._host.make(vm, vms, user, memory)

    async def _enter(self, request: EnterVm, uid: int, gid: int, sock: socket.socket) -> None:
        job = request.job
        vm = next((vm for vm in self._known.get(job, ()) if vm.index == request.vm), None)
        if vm is None or vm.uid != uid:  # a job of another user is as good as none
            raise Refused(f"job {job} has no VM of yours on this host")
        user = await self._users(uid)
        prolog = await self._sizes.task_prolog()
        told = f"{self._sizes.commands} prolog={prolog}" if prolog else str(self._sizes.commands)
        async with self._turns.setdefault(job, asyncio.Semaphore(ENTERED_AT_ONCE)):
            loop = asyncio.get_running_loop()
            connection, process = await loop.run_in_executor(self._entering, self._host.connect, vm)
        try:
            greeting = {"token": vm.task_token, "name": user.name, "uid": uid, "gid": gid}
            connection.sendall(json.dumps(greeting).encode() + b"\n")
            with socket.socket(fileno=os.dup(sock.fileno())) as own:
                socket.send_fds(own, [answer(told=told)], [connection.fileno(), process])
        except OSError as error:
            raise Unknown(f"the guest or the task has closed its connection: {error.strerror}") from error
        finally:
            connection.close()
            os.close(process)

    async def release(self, job: int) -> None:
        """Remove the VMs of a job, also while they are being made. None is success."""
        if job in self._making:
            self._released.add(job)
            for vm in self._known[job]:
                with suppress(MultiverseError):
                    await self._end(self._host.kill, vm)  # it is being made: that fails soon
        async with self._lock(job):
            self._released.discard(job)  # who made it has seen that; it must not fail the job's next run
            if (vms := self._known.get(job)) is not None:
                self._unreleased.add(job)
                await self._remove(vms)

    async def release_again(self) -> None:
        """Remove the VMs of jobs that have ended, where that has failed: nobody else asks for it again."""
        for job in list(self._unreleased):
            async with self._lock(job):
                if job in self._unreleased:  # nobody has removed them, or uses them again
                    with suppress(MultiverseError, OSError):  # it was logged
                        await self._remove(self._known[job])

    def _lock(self, job: int) -> asyncio.Lock:
        """One request for a job at a time."""
        return self._locks.setdefault(job, asyncio.Lock())

    async def _remove(self, vms: tuple[JobVm, ...]) -> None:
        """Remove all VMs of a job. If one cannot be removed, all stay known, and are removed again."""
        job = vms[0].job
        await _all_done(self._end(self._host.remove, vm) for vm in vms)
        await self._end(self._host.remove_network, vms)
        for path in (self._state / f"{job}.json", self._groups(job), self._unfinished(job)):
            await self._end(lambda path=path: path.unlink(missing_ok=True))
        self._known.pop(job, None)
        self._unreleased.discard(job)
        log.info("VMs of a job released", job=job)

    def _recorded(self, job: int) -> int:
        """When the plugin recorded the job's present run: before its first step. It removes the record at the end.
        Slurm does not tell its own count of restarts to every step."""
        try:
            return (self._records / str(job)).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    # --- files ----------------------------------------------------------------------------------------

    def _write(self, vms: tuple[JobVm, ...]) -> None:
        files.replace(self._state / f"{vms[0].job}.json", json.dumps([asdict(vm) for vm in vms]))

    def _groups(self, job: int) -> Path:
        return self._records / f"{job}.groups"

    def _unfinished(self, job: int) -> Path:
        """The file of groups while the VMs are being made."""
        return self._records / f"{job}.making"

    def _write_groups(self, vms: tuple[JobVm, ...]) -> None:
        """Tell the plugin where it finds the VMs' processes if there is no agent at the job's end."""
        groups = [group for vm in vms for group in self._host.control_groups(vm)]
        files.replace(self._unfinished(vms[0].job), "".join(f"{group}\n" for group in groups))

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _end(self, function: Callable[..., T], *arguments: object) -> T:
        """The same, for the ends of VMs."""
        return await asyncio.get_running_loop().run_in_executor(self._ending, function, *arguments)


@dataclass(frozen=True, slots=True)
class JobVmSizes:
    """Values for all VMs inside jobs on this host. Memory in MiB."""

    default_image: str  # of jobs that name none
    least: int  # memory of a VM
    overhead: int  # memory of a QEMU beside its guest
    commands: Path  # the directory of Slurm's commands
    task_prolog: Callable[[], Awaitable[str]]  # gives the path of the site's TaskProlog; empty: there is none
    region: int = 0  # of shared memory


_VMS = TypeAdapter(tuple[JobVm, ...])


def _read(path: Path) -> tuple[JobVm, ...]:
    """The VMs of a job, from their file. Raises `OSError`, and `ValueError` for a damaged file."""
    if not (found := _VMS.validate_json(path.read_bytes())):
        raise ValueError(f"{path} is empty")
    return found


async def _all_done(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for the end of all calls; then return their results, or raise the error of one."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
