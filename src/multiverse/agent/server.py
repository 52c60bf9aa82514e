"""The agent's side of the protocol: it answers calls of controllers, over any number of connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import structlog

from multiverse.agent import protocol
from multiverse.agent.protocol import OLDEST, PROTOCOL, AgentCall, Answer, CallFailure, Line, encode
from multiverse.agent.self_fence import FenceTimer
from multiverse.core.errors import Broken, MultiverseError, Refused, Unknown
from multiverse.core.model.host import HypervisorView
from multiverse.core.model.identity import vm_prefix
from multiverse.core.model.usage import HostUsage, Load
from multiverse.core.model.vm import Stage, VmCondition, VmSeen, VmSpec
from multiverse.system.files import Record


@dataclass(frozen=True, slots=True)
class Epoch:
    number: int = 0  # orders the controllers of a site
    holder: str = ""  # the run of the controller that took the epoch


class Epochs:
    """The controller that an agent obeys for each site: the one with the highest epoch that the agent has ever seen."""

    def __init__(self, highest: Mapping[str, Epoch] | None = None) -> None:
        self._highest = dict(highest or {})

    def highest(self, site: str) -> Epoch:
        return self._highest.get(site, Epoch())

    def take(self, site: str, epoch: Epoch) -> None:
        """Obey this controller from here on. Raises `Refused` if a later one was seen, or another one of the same
        epoch, and `Broken` if the epoch cannot be kept."""
        self.check(site, epoch)
        if epoch != self.highest(site):
            highest = {**self._highest, site: epoch}
            self._keep(highest)
            self._highest = highest

    def check(self, site: str, epoch: Epoch) -> None:
        """Raise `Refused` if this controller is not to be obeyed (any more)."""
        highest = self.highest(site)
        if epoch.number < highest.number or (epoch.number == highest.number and epoch.holder != highest.holder):
            raise Refused(
                f"another controller of site {site} has commanded this host, with epoch {highest.number};"
                f" this one has {epoch.number}",
                hint="end the other controller; if there is none, as after a database was restored, restart this one",
            )

    def _keep(self, highest: Mapping[str, Epoch]) -> None:
        """Keep this for the next run of the agent. Raises `Broken` if that fails."""


class EpochFile(Epochs):
    """Epochs that outlive the agent, so that it obeys no older controller after a restart. A new controller is obeyed
    also while the disk is full: it destroys the VMs that fill the disk, once their jobs have ended."""

    def __init__(self, path: Path) -> None:
        """Read the file, or allocate it. Raises `Broken` if it cannot be read: nothing else tells whom to obey."""
        self._path = path
        try:
            self._record = Record(path)
            kept = json.loads(self._record.text or "{}")
            super().__init__({site: Epoch(int(one["number"]), str(one["holder"])) for site, one in kept.items()})
        except OSError as error:
            raise Broken(f"cannot use {path}: {error.strerror}", hint="see its directory, agent.state_dir") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            hint = "end all other controllers of this site, and remove the file"
            raise Broken(f"cannot read {path}: {error}", hint=hint) from error

    def _keep(self, highest: Mapping[str, Epoch]) -> None:
        try:
            self._record.write(json.dumps({site: asdict(epoch) for site, epoch in highest.items()}))
        except (OSError, ValueError) as error:
            message = f"cannot keep the epoch in {self._path}: {getattr(error, 'strerror', error)}"
            raise Broken(message, hint="see whether its disk works, and start the agent again") from error


log = structlog.get_logger()


class Samples(Protocol):
    """The usage of this host and its VMs."""

    def load(self) -> Load | None:
        """The usage of the host in the last minute, if it is known."""

    async def usage(self, span: float, prefix: str) -> HostUsage:
        """The usage of the host, and of VMs whose names begin with `prefix`, in the last `span` seconds."""


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    release: str
    host: str
    boot_id: str
    run: str  # a random name of this run of the agent
    protocol: int = PROTOCOL
    oldest: int = OLDEST


@dataclass(eq=False)
class _Connection:
    """One connection, from its handshake on: the `SiteAgent` of its calls."""

    server: AgentServer
    writer: asyncio.StreamWriter
    site: str
    epoch: Epoch
    hypervisor: protocol.LocalHypervisor
    machine: str  # where the controller runs
    since: float  # time of the event loop
    calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    newest: int = 0  # the highest id of a call
    shown: float | None = None  # the time of self-fencing in the last observation
    # When pings were answered, and what had been shown before, until the controller has heard the answers.
    pongs: dict[int, tuple[float, float | None]] = field(default_factory=dict)
    shown_view: bytes = b""  # the last observation that was sent

    def send(self, line: bytes) -> None:
        if not self.writer.is_closing():
            self.writer.write(line)

    @property
    def host(self) -> str:
        return self.server.who.host

    @property
    def processes(self) -> Mapping[str, int]:
        return self.server.processes

    async def observe(self) -> HypervisorView:
        """The view, with what the agent itself knows: the host's load, the time of self-fencing, why it takes no VM any
        more, and the VMs whose creation has left nothing to see yet. A creation may have been asked for over a
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
            news |= {"refuses": server.refusing, "holds_until": server.holds_until}
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
    """Answers the controllers of all sites. `hypervisor` gives the hypervisor of a site, the same object each time.
    `processes` are the numbers of processes that this agent has started, by program."""

    def __init__(
        self,
        who: AgentIdentity,
        epochs: Epochs,
        hypervisor: Callable[[str], protocol.LocalHypervisor],
        processes: Mapping[str, int] = MappingProxyType({}),
        fence_timer: FenceTimer | None = None,
        samples: Samples | None = None,
    ) -> None:
        self.fence_timer, self.samples = fence_timer, samples
        self.link: protocol.AgentLink | None = None  # by which a controller that is obeyed may connect, too
        self.who, self._epochs, self._hypervisor, self.processes = who, epochs, hypervisor, processes
        self.refusing, self.holds_until = "", 0.0
        self.creating: dict[tuple[str, str], VmSpec] = {}  # by site and name
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._serving: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._connections: set[_Connection] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection until its end. Calls that still run go on: their results are observed."""
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

    def refuse(self, why: str, holds_until: float = 0.0) -> None:
        """Take no VM from now on, and build no template: the host is about to end. Its VMs are left alone until then
        (Unix time)."""
        self.refusing, self.holds_until = why, holds_until

    async def close(self) -> None:
        """End all calls and connections. The next agent observes what the calls have begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        serving = dict(self._serving)
        for writer in serving.values():
            writer.transport.abort()  # the other side may read nothing; and asyncio logs a connection that is cancelled
        await asyncio.gather(*serving, return_exceptions=True)

    # --- handshake ------------------------------------------------------------------------------------

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Connection | None:
        """The connection of a controller that is obeyed. None for another controller, which was told why."""
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
        writer.write(encode(Answer(taken=epoch.number, link=self.link)))
        log.info("controller connected", site=hello.site, release=hello.release, epoch=epoch.number)
        since = asyncio.get_running_loop().time()
        return _Connection(self, writer, hello.site, epoch, hypervisor, hello.machine, since)

    def _welcome(self, site: str) -> protocol.Welcome:
        highest, now = self._epochs.highest(site), asyncio.get_running_loop().time()
        holders = [one for one in self._connections if (one.site, one.epoch) == (site, highest)]
        return protocol.Welcome(
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

    def _check_protocol(self, hello: protocol.Hello) -> None:
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
        """Raise `Refused`, and tell the controller, if a later one has come. Contact with the earlier one counts no
        more: the later one may take the VMs for ended."""
        try:
            self._epochs.check(connection.site, connection.epoch)
        except Refused as error:
            connection.send(encode(Answer(refused=CallFailure.of(error))))
            raise

    def _note_contact(self, connection: _Connection, ping: int, heard: int) -> None:
        """The controller has heard the answer to an earlier ping. `pongs` has when that was sent."""
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
        failure: MultiverseError | None = None
        try:
            if self.refusing and call.adds:
                raise Refused(self.refusing, hint="another host takes the VM")
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

    def _send_result(
        self, connection: _Connection, number: int, call: AgentCall[Any], result: protocol.Message
    ) -> None:
        data = result.model_dump_json(exclude_none=True).encode()
        if isinstance(call, protocol.Observe):
            if connection.shown_view == data:
                connection.send(encode(Answer(id=number, same=True)))
                return
            connection.shown_view = data
        connection.send(b'{"id":%d,"result":%s}\n' % (number, data))


async def _line(reader: asyncio.StreamReader) -> Line | None:
    """The next line; None at the end of the stream. Raises `TimeoutError` if a controller is silent for too long: it
    sends pings, so its machine or the network is gone."""
    async with asyncio.timeout(3 * protocol.SILENCE):
        try:
            data = await reader.readuntil()
        except asyncio.IncompleteReadError:
            return None  # a part of a line is none
        except asyncio.LimitOverrunError as error:
            raise Refused(f"a line has more than {protocol.LONGEST_LINE} bytes") from error
    return protocol.decode(Line, data)
