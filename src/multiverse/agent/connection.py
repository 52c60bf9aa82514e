"""The connection to the agent of one host: kept up, with any number of calls at the same time.

A transport is a stream of bytes to the agent's Unix socket, or to a command that connects to that socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Protocol

import structlog

from multiverse.agent import protocol
from multiverse.agent.protocol import LONGEST_LINE, AgentCall, AgentLink, Answer, Line, Message, R, Welcome, encode
from multiverse.core.errors import MultiverseError, Refused, Superseded, Unknown


class ControllerEpoch:
    """The epoch of this run of the controller: one above every epoch that the store or any agent knows. A host that
    does not answer in time, and has seen a higher epoch, refuses this controller: then a controller with another
    database has commanded it, and an operator has to decide."""

    def __init__(self, kept: int, keep: Callable[[int], None], hosts: Collection[str], wait: float) -> None:
        """`kept` is the store's epoch; `keep` stores the next one. The agents of `hosts` have `wait` seconds to
        answer."""
        self._highest, self._keep, self._wait = kept, keep, wait
        self._awaited = set(hosts)
        self._all_answered = asyncio.Event()
        self._number: asyncio.Task[int] | None = None
        if not self._awaited:
            self._all_answered.set()

    def answered(self, host: str, epoch: int) -> None:
        """An agent has said which epoch it has seen."""
        if self._number is None or not self._number.done():
            self._highest = max(self._highest, epoch)
        self.given_up(host)

    def given_up(self, host: str) -> None:
        """An agent could not be reached: nobody waits for it."""
        self._awaited.discard(host)
        if not self._awaited:
            self._all_answered.set()

    async def number(self) -> int:
        """The epoch, once it is known. Raises what storing it raises; then the next call tries again."""
        failed = self._number is not None and self._number.done() and self._number.exception() is not None
        if self._number is None or failed:
            self._number = asyncio.create_task(self._decide(), name="epoch")
        return await asyncio.shield(self._number)

    async def _decide(self) -> int:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_answered.wait(), self._wait)
        number = self._highest + 1
        self._keep(number)
        return number


_LAST_WORDS = 2000  # characters of a command's error output that are kept
_END = 2.0  # seconds for a command to end after its input was closed; then it is killed


class Stream(Protocol):
    """An open stream of bytes in both directions."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def close(self) -> str:
        """End the stream, and what carries it. Returns the last words of its carrier, which may be empty."""


class Transport(Protocol):
    """A way to the agent of one host."""

    async def open(self) -> Stream:
        """A new stream. Raises `Unknown` if the agent cannot be reached."""


class SocketStream:
    """A connected socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def close(self) -> str:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
        return ""


class UnixTransport:
    """The agent of this machine, by its Unix socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def open(self) -> Stream:
        try:
            return SocketStream(*await asyncio.open_unix_connection(self._path, limit=LONGEST_LINE))
        except OSError as error:
            text = f"no agent answers at {self._path}: {error.strerror}"
            raise Unknown(text, hint="is `multiverse agent` running?") from error


class _CommandStream:
    """A command's input and output. Its error output tells why it ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.reader, self.writer = process.stdout, process.stdin
        self._process = process
        self._said = ""
        self._listening = asyncio.create_task(self._listen(process.stderr))

    async def _listen(self, errors: asyncio.StreamReader) -> None:
        while text := await errors.read(4096):
            self._said = (self._said + text.decode(errors="replace"))[-_LAST_WORDS:]

    async def close(self) -> str:
        self.writer.close()
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _END)
            # The error output ends with the command, unless another process has it too, as ssh's master connection.
            await asyncio.wait([self._listening], timeout=0.2)
        finally:
            self._listening.cancel()
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        return " ".join(self._said.split())


def command_of(connect: Sequence[str], host: str) -> list[str]:
    """The command of the setting `agent.connect` for that host."""
    return [word.replace("{host}", host) for word in connect]


def other_command(connect: Sequence[str], host: str, *words: str) -> list[str]:
    """A command that runs `multiverse agent` with these `words` on the host, and reaches it in the same way. Raises
    `Refused` if `agent.connect` does not show how."""
    *way, last = command_of(connect, host)
    if last != "dial-stdio":
        raise Refused(
            f"agent.connect does not end with dial-stdio, so `{words[0]}` cannot be run on {host}",
            hint="end it with `multiverse agent dial-stdio`, or copy the image yourself",
        )
    return [*way, *words]


class CommandTransport:
    """The agent of another machine, by a command such as `ssh HOST multiverse agent dial-stdio`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)

    async def open(self) -> Stream:
        """The command is started; whether it reaches the agent shows as it answers."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=LONGEST_LINE,
                start_new_session=True,  # a Ctrl-C at the controller's terminal is the controller's alone
            )
        except OSError as error:
            raise Unknown(f"cannot start {self._command[0]}: {error.strerror}", hint="is it installed?") from error
        return _CommandStream(process)


AGAIN, AGAIN_LIMIT = 0.5, 30.0
"""Seconds before the next attempt to connect: doubled each time up to the limit, then cut by up to a half at random."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ControllerIdentity:
    release: str
    run: str  # a random name of this run of the controller
    site: str
    machine: str = ""  # that the controller runs on


class AgentConnection:
    """Calls to the agent of `host`. While there is no connection, each call raises `Unknown` with the reason. While a
    connection is being made, calls wait for it."""

    def __init__(
        self,
        host: str,
        transport: Transport,
        who: ControllerIdentity,
        epoch: ControllerEpoch,
        random: Random,
        learned: Callable[[AgentLink], None] | None = None,
    ) -> None:
        """`learned` is told of another way to the agent."""
        self.host = host
        self.welcome: Welcome | None = None  # what the agent has said of itself; None while there is no connection
        self.reason = "the first connection is being made"  # why there is no connection
        self.heard = -inf  # when the last line of the agent came, by the event loop's clock
        self._transport, self._who, self._epoch, self._random = transport, who, epoch, random
        self._learned = learned
        self._ids = itertools.count(1)
        self._calls: dict[int, tuple[AgentCall[Any], asyncio.Future[Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._ponged = 0  # the last ping of this connection that the agent has answered
        self._settled = asyncio.Event()  # cleared while an attempt to connect is under way
        self._last: dict[type[Message], Message] = {}  # the last result of each kind on this connection

    async def run(self) -> None:
        """Keep the connection up until cancelled. Raises `Superseded` once the agent obeys another connected
        controller."""
        try:
            await self._keep_up()
        finally:
            self.reason = "it is given up"
            self._settled.set()  # nobody waits for it any more
            self._epoch.given_up(self.host)

    async def _keep_up(self) -> None:
        failures, logged = 0, ""
        while True:
            self._settled.clear()
            try:
                await self._connect()
                failures, logged = 0, ""  # it was up
            except Superseded:
                raise
            except MultiverseError as error:
                if str(error) != logged:
                    log.warning("no connection to agent", host=self.host, reason=str(error))
                failures, logged, self.reason = failures + 1, str(error), str(error)
            self._settled.set()
            self._epoch.given_up(self.host)
            pause = min(AGAIN * 2.0**failures, AGAIN_LIMIT)
            await asyncio.sleep(pause * (1 - self._random.random() / 2))

    async def call(self, call: AgentCall[R]) -> R:
        """Let the agent do something. Raises the agent's error, `Refused` if its release does not know the call, or
        `Unknown` without an answer: then the agent may have done it. The agent is told if the caller is cancelled."""
        await self._settled.wait()
        if self._writer is None:
            raise Unknown(f"{self.host} has no connection to its agent: {self.reason}")
        if self.welcome is not None and self.welcome.protocol < call.since:
            text = f"the agent of {self.host} is of release {self.welcome.release}, which does not know {call.name}"
            raise Refused(text, hint="install the same release on both machines")
        waiting: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        number = next(self._ids)
        # The call stays here until its answer comes, also if nobody waits any more: a later answer may be `same`.
        self._calls[number] = (call, waiting)
        self._send(Line(id=number, call=call))
        try:
            return await waiting
        except asyncio.CancelledError:
            self._send(Line(cancel=number))
            raise

    def _answered(self, answer: Answer) -> None:
        if answer.id is None or answer.id not in self._calls:
            return
        call, waiting = self._calls.pop(answer.id)
        try:
            result = self._result(call, answer)
        except MultiverseError as error:
            if not waiting.done():
                waiting.set_exception(error)
        else:
            if not waiting.done():
                waiting.set_result(result)

    def _result(self, call: AgentCall[Any], answer: Answer) -> Message:
        if answer.error is not None:
            raise answer.error.error()
        kind = call.result
        if answer.same and kind in self._last:
            return self._last[kind]
        # From here on the agent takes this answer for the last one, whether or not it can be read.
        self._last.pop(kind, None)
        try:
            result = kind.model_validate(answer.result)
        except ValueError as error:
            text = f"what the agent of {self.host} has answered to {call.name} cannot be read"
            raise Unknown(text, hint="is its release a neighbour of this one?") from error
        self._last[kind] = result
        return result

    def _send(self, line: Line) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(line))

    # --- one connection -------------------------------------------------------------------------------

    async def _connect(self) -> None:
        """Connect, greet, and read answers until the connection ends. Raises `Unknown` or `Refused` if no connection
        was made. The end of a connection is logged."""
        stream = await self._transport.open()
        self._ponged = 0
        pinging = asyncio.create_task(self._ping(stream), name=f"ping {self.host}")
        made, error = False, MultiverseError("it was given up")
        try:
            self.welcome = await self._handshake(stream)
            self._writer, made, self.reason = stream.writer, True, ""
            self._settled.set()
            log.info("agent connected", host=self.host, release=self.welcome.release)
            while True:
                self._answered(await self._read(stream))
        except MultiverseError as caught:
            error = caught
        finally:
            pinging.cancel()
            self._disconnected(str(error))
            said = await stream.close()
        if not made and isinstance(error, Refused):
            raise error
        self.reason = f"the agent of {self.host} cannot be reached: {said or error}"
        if not made:
            raise Unknown(self.reason)
        log.warning("agent disconnected", host=self.host, reason=said or str(error))

    def _disconnected(self, reason: str) -> None:
        self._writer = self.welcome = None
        self._last.clear()
        self.reason = f"the connection to the agent of {self.host} was lost: {reason}"
        for _, waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(Unknown(self.reason))
        self._calls.clear()

    async def _handshake(self, stream: Stream) -> Welcome:
        who = self._who
        hello = protocol.Hello(
            release=who.release,
            protocol=protocol.PROTOCOL,
            oldest=protocol.OLDEST,
            controller=who.run,
            site=who.site,
            machine=who.machine,
        )
        stream.writer.write(encode(Line(hello=hello)))
        welcome = (await self._expect(stream, lambda answer: answer.welcome is not None)).welcome
        assert welcome is not None
        if welcome.protocol < protocol.OLDEST:
            raise Refused(
                f"the agent of {self.host} is of release {welcome.release}, which this one, {who.release}, does not"
                " understand",
                hint="only neighbouring releases work together: install the same release on both machines",
            )
        if welcome.host != self.host:
            raise Refused(
                f"the agent that answers for {self.host} says that it is {welcome.host}",
                hint="see host.name in the settings there, and how the name is resolved here",
            )
        self._epoch.answered(self.host, welcome.epoch)
        number = await self._epoch.number()
        self._check_superseded(welcome, number)
        stream.writer.write(encode(Line(take=number)))
        taken = await self._expect(stream, lambda answer: answer.taken is not None)
        if taken.link is not None and self._learned is not None:
            self._learned(taken.link)
        return welcome

    def _check_superseded(self, welcome: Welcome, number: int) -> None:
        """Raise `Superseded` if a later controller commands the host now. An epoch alone proves less: it may come from
        a database that was replaced."""
        who = self._who
        if welcome.commanding is None or (welcome.epoch, welcome.holder) <= (number, who.run):
            return
        where = f"on {welcome.machine}" if welcome.machine else "elsewhere"
        raise Superseded(
            f"another controller of site {who.site} runs {where}: it has commanded {self.host} for"
            f" {welcome.commanding:.0f} s, with epoch {welcome.epoch}; this one has {number}",
            hint="keep this one ended; if this one is to go on, end the other one, and start this one again",
        )

    async def _expect(self, stream: Stream, wanted: Callable[[Answer], bool]) -> Answer:
        """The next answer that is `wanted`: an answer to a ping may come before it."""
        while True:
            answer = await self._read(stream)
            if wanted(answer):
                return answer

    async def _read(self, stream: Stream) -> Answer:
        """The next line. Raises `Refused` if the agent refuses this controller, `Unknown` if there is none."""
        try:
            async with asyncio.timeout(protocol.SILENCE):
                answer = protocol.decode(Answer, await stream.reader.readuntil())
        except TimeoutError as error:
            raise Unknown(f"it has not answered for {protocol.SILENCE:g} s") from error
        except asyncio.IncompleteReadError as error:
            raise Unknown("it has ended the connection") from error
        except asyncio.LimitOverrunError as error:
            raise Unknown(f"it has sent a line of more than {LONGEST_LINE} bytes") from error
        except OSError as error:
            raise Unknown(str(error)) from error
        self.heard = asyncio.get_running_loop().time()
        if answer.pong is not None:
            self._ponged = answer.pong
        if answer.refused is not None:
            raise answer.refused.error()
        return answer

    async def _ping(self, stream: Stream) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(protocol.PING)
            if not stream.writer.is_closing():
                stream.writer.write(encode(Line(ping=number, heard=self._ponged)))
