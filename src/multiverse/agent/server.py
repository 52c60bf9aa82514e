"""The agent's side of the protocol: it answers calls of controllers, over any number of connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import structlog

from multiverse.agent.calls import AgentCall, LocalHypervisor, Message, Observe
from multiverse.agent.epochs import Epoch, Epochs
from multiverse.agent.protocol import (
    LONGEST_LINE,
    OLDEST,
    PROTOCOL,
    SILENCE,
    Answer,
    CallFailure,
    Hello,
    Line,
    Welcome,
    decode_line,
    encode,
)
from multiverse.agent.self_fence import FenceTimer
from multiverse.core.errors import MultiverseError, Refused, Unknown
from multiverse.core.model import (
    HostUsage,
    HypervisorView,
    Load,
    Stage,
    VmCondition,
    VmSeen,
    VmSpec,
    vm_prefix,
)

log = structlog.get_logger()


class Samples(Protocol):
    """What this host and its VMs have used."""

    def load(self) -> Load | None:
        """What the host has used in the last minute, if that is known."""
        ...

    async def usage(self, span: float, prefix: str) -> HostUsage:
        """What was used in the last `span` seconds, by the host and by VMs whose names begin with `prefix`."""
        ...


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """Who answers: the agent's release, the host's name and its boot, a random name of this run of the agent, and what
    it speaks."""

    release: str
    host: str
    boot_id: str
    run: str
    protocol: int = PROTOCOL
    oldest: int = OLDEST


@dataclass(eq=False)
class _Connection:
    """One connection, from its handshake on, to a controller on a machine, since a time of the event loop: the
    `SiteAgent` of its calls."""

    server: AgentServer
    writer: asyncio.StreamWriter
    site: str
    epoch: Epoch
    hypervisor: LocalHypervisor
    machine: str
    since: float
    calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    newest: int = 0  # the highest id of a call
    shown: float | None = None  # the time of self-fencing in the last observation
    # When pings were answered, and what had been shown before, until the controller has heard the answers.
    pongs: dict[int, tuple[float, float | None]] = field(default_factory=dict)
    results: dict[str, bytes] = field(default_factory=dict)  # the last result sent of each kind that is repeated

    def send(self, line: bytes) -> None:
        """Send a line, unless nobody reads it any more."""
        if not self.writer.is_closing():
            self.writer.write(line)

    @property
    def host(self) -> str:
        return self.server.who.host

    @property
    def processes(self) -> Mapping[str, int]:
        return self.server.processes

    async def observe(self) -> HypervisorView:
        """The view, with the host's load, with whether VMs are ended here by the agent itself, with why it takes no
        VM any more, and with the VMs whose creation runs and has left nothing to see yet. The call may have come over a
        connection that was lost since: its controller must not take the VM for absent."""
        view, server = await self.hypervisor.observe(), self.server
        vms = dict(view.vms)
        for (of, name), vm in server.creating.items():
            if of == self.site and name not in vms:
                vms[name] = VmSeen(name, vm.host, VmCondition.CREATING, token=vm.token)
        news: dict[str, Any] = {}
        if server.samples is not None and (load := server.samples.load()) is not None:
            news["load"] = load
        if server.refusing:
            news["refuses"] = server.refusing
        if server.fence_timer is not None:
            news["self_fence"] = self.shown = server.fence_timer.shown(self.site)
        hosts = {name: replace(host, **news) for name, host in view.hosts.items()}
        return replace(view, hosts=hosts, vms=MappingProxyType(vms))

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        key, creating = (self.site, vm.name), self.server.creating
        creating[key] = vm
        try:
            return await self.hypervisor.create(vm)
        finally:
            if creating.get(key) is vm:
                del creating[key]

    async def usage(self, span: float) -> HostUsage:
        if self.server.samples is None:
            raise Refused(f"{self.host} samples nothing", hint="see agent.sample in its settings")
        return await self.server.samples.usage(span, vm_prefix(self.site))


class AgentServer:
    """Answers the controllers of all sites. `hypervisor` gives the one of a site, the same one each time. `processes`
    are those that this process has started, by program. `samples` is None if nothing is sampled."""

    def __init__(
        self,
        who: AgentIdentity,
        epochs: Epochs,
        hypervisor: Callable[[str], LocalHypervisor],
        processes: Mapping[str, int] = MappingProxyType({}),
        fence_timer: FenceTimer | None = None,
        samples: Samples | None = None,
    ) -> None:
        self.fence_timer, self.samples = fence_timer, samples
        self.who, self._epochs, self._hypervisor, self.processes = who, epochs, hypervisor, processes
        self.refusing = ""
        self.creating: dict[tuple[str, str], VmSpec] = {}  # by site and name
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._serving: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._connections: set[_Connection] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection until its end. Calls that run then go on: what they do is observed."""
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = writer
        try:
            connection = await self._handshake(reader, writer)
            if connection is not None:
                self._connections.add(connection)
                try:
                    await self._answer(reader, connection)
                finally:
                    self._connections.discard(connection)
        except (Refused, OSError, TimeoutError, EOFError) as error:
            log.warning("connection ended", reason=str(error) or type(error).__name__)
        finally:
            del self._serving[task]
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def refuse(self, why: str) -> None:
        """Take no VM from now on, and build no template: this host is about to end."""
        self.refusing = why

    async def close(self) -> None:
        """End all calls that run, and all connections. What the calls have begun is observed by the next agent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        serving = dict(self._serving)
        for writer in serving.values():
            writer.transport.abort()  # the other side may read nothing; and asyncio logs a connection that is cancelled
        await asyncio.gather(*serving, return_exceptions=True)

    # --- handshake ------------------------------------------------------------------------------------

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Connection | None:
        """The connection of a controller that is obeyed, or None after it was told why it is not."""
        first = await _line(reader)
        if first is None:
            return None
        if (hello := first.hello) is None:
            raise Refused("the first line is no greeting", hint="is the other side a controller of Multiverse?")
        try:
            self._check_protocol(hello)
            welcome = self._welcome(hello.site)
            greeted = self.fence_timer.now() if self.fence_timer else 0.0
            writer.write(encode(Answer(welcome=welcome)))
            # The controller may wait for other agents before it takes its epoch; meanwhile it sends pings.
            while (line := await _line(reader)) is not None and line.take is None:
                writer.write(encode(Answer(pong=line.ping)))
            if line is None or line.take is None:
                return None
            hypervisor = self._hypervisor(hello.site)
            epoch = Epoch(line.take, hello.controller)
            self._epochs.take(hello.site, epoch)
            if self.fence_timer is not None:  # the controller has got the greeting
                self.fence_timer.heard(hello.site, greeted)
        except MultiverseError as error:
            log.warning("controller refused", controller=hello.controller, reason=str(error))
            writer.write(encode(Answer(refused=CallFailure.of(error))))
            return None
        writer.write(encode(Answer(taken=epoch.number)))
        log.info("controller connected", site=hello.site, release=hello.release, epoch=epoch.number)
        since = asyncio.get_running_loop().time()
        return _Connection(self, writer, hello.site, epoch, hypervisor, hello.machine, since)

    def _welcome(self, site: str) -> Welcome:
        highest, now = self._epochs.highest(site), asyncio.get_running_loop().time()
        holders = [one for one in self._connections if (one.site, one.epoch) == (site, highest)]
        return Welcome(
            release=self.who.release,
            protocol=self.who.protocol,
            host=self.who.host,
            boot_id=self.who.boot_id,
            agent=self.who.run,
            epoch=highest.number,
            holder=highest.holder,
            commanding=max((now - one.since for one in holders), default=None),
            machine=holders[0].machine if holders else "",
        )

    def _check_protocol(self, hello: Hello) -> None:
        if hello.protocol < self.who.oldest or hello.oldest > self.who.protocol:
            raise Refused(
                f"the agent of {self.who.host} is of release {self.who.release} and does not understand"
                f" release {hello.release}",
                hint="only neighbouring releases work together: install the same release on both machines",
            )

    # --- calls ----------------------------------------------------------------------------------------

    async def _answer(self, reader: asyncio.StreamReader, connection: _Connection) -> None:
        while (line := await _line(reader)) is not None:
            self._check_obeyed(connection)
            if line.ping is not None:
                connection.send(encode(Answer(pong=line.ping)))
                self._note_contact(connection, line.ping, line.heard or 0)
            elif line.cancel is not None:
                if task := connection.calls.get(line.cancel):
                    task.cancel()
            # A call that comes a second time is the same call: ids rise.
            elif line.id is not None and line.call is not None and line.id > connection.newest:
                connection.newest = line.id
                self._begin(connection, line.id, line.call)
            await connection.writer.drain()

    def _check_obeyed(self, connection: _Connection) -> None:
        """Raises `Refused`, and tells the controller, if a later one has come. That it is in contact counts no more,
        either: the later one may take its VMs for ended."""
        try:
            self._epochs.check(connection.site, connection.epoch)
        except Refused as error:
            connection.send(encode(Answer(refused=CallFailure.of(error))))
            raise

    def _note_contact(self, connection: _Connection, ping: int, heard: int) -> None:
        """The controller has heard the answer to an earlier ping, which was sent when `pongs` says."""
        if self.fence_timer is None:
            return
        now = self.fence_timer.now()
        connection.pongs[ping] = now, connection.shown
        at, shown = connection.pongs.get(heard, (None, None))
        if shown is not None:
            self.fence_timer.known(connection.site, shown)
        if at is not None:
            self.fence_timer.heard(connection.site, at)
            connection.pongs = {number: sent for number, sent in connection.pongs.items() if number > heard}

    def _begin(self, connection: _Connection, number: int, call: AgentCall[Any]) -> None:
        task = asyncio.create_task(self._run(connection, number, call), name=f"{call.name} {number}")
        connection.calls[number] = task
        self._tasks[task] = None

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.pop(task, None)
            del connection.calls[number]

        task.add_done_callback(ended)

    async def _run(self, connection: _Connection, number: int, call: AgentCall[Any]) -> None:
        """Do what the call asks, and send what came of it."""
        failure: MultiverseError | None = None
        try:
            self._check_taken(call)
            result = await call.answer(connection)
        except asyncio.CancelledError:
            failure = Unknown(f"{call.name} was cancelled")
            raise
        except MultiverseError as error:
            failure = error
        except Exception as error:  # a defect of the host library: its caller is to hear of it, and the agent goes on
            log.exception("call failed unexpectedly", call=call.name)
            failure = Unknown(f"{type(error).__name__}: {error}")
        else:
            self._send_result(connection, number, call, result)
        finally:
            if failure is not None:
                connection.send(encode(Answer(id=number, error=CallFailure.of(failure))))

    def _send_result(self, connection: _Connection, number: int, call: AgentCall[Any], result: Message) -> None:
        data = result.model_dump_json(exclude_none=True).encode()
        if isinstance(call, Observe) and connection.results.get(call.name) == data:
            connection.send(encode(Answer(id=number, same=True)))
            return
        if isinstance(call, Observe):
            connection.results[call.name] = data
        connection.send(b'{"id":%d,"result":%s}\n' % (number, data))

    def _check_taken(self, call: AgentCall[Any]) -> None:
        if self.refusing and call.adds:
            raise Refused(self.refusing, hint="another host takes the VM")


async def _line(reader: asyncio.StreamReader) -> Line | None:
    """The next line; None at the end of the stream. Raises `TimeoutError` if a controller is silent for too long: it
    asks at intervals whether the agent is there, so its machine is gone, or the network."""
    async with asyncio.timeout(3 * SILENCE):
        try:
            data = await reader.readuntil()
        except asyncio.IncompleteReadError:
            return None  # a part of a line is none
        except asyncio.LimitOverrunError as error:
            raise Refused(f"a line has more than {LONGEST_LINE} bytes") from error
    return decode_line(data)
