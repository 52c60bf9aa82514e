"""The connection to the agent of one host: kept up, with any number of calls at the same time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any

import structlog

from multiverse.agent.calls import AgentCall, Message, R
from multiverse.agent.controller_epoch import ControllerEpoch
from multiverse.agent.protocol import (
    LONGEST_LINE,
    OLDEST,
    PING,
    PROTOCOL,
    SILENCE,
    Answer,
    Hello,
    Line,
    Welcome,
    decode_answer,
    encode,
)
from multiverse.agent.transport import Stream, Transport
from multiverse.core.errors import MultiverseError, Refused, Superseded, Unknown

AGAIN, AGAIN_LIMIT = 0.5, 30.0
"""Pause before the next attempt to connect, doubled each time up to the limit, of which a random half is left out."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ControllerIdentity:
    """Who asks: the controller's release, a random name of this run of it, its site, and the machine that it is on."""

    release: str
    run: str
    site: str
    machine: str = ""


class AgentConnection:
    """Calls to the agent of `host`. While there is no connection, each call is `Unknown`, with the reason; while one is
    being made, a call waits for it."""

    def __init__(
        self, host: str, transport: Transport, who: ControllerIdentity, epoch: ControllerEpoch, random: Random
    ) -> None:
        self.host = host
        self.welcome: Welcome | None = None
        """What the agent has said of itself; None while there is no connection."""
        self.reason = "the first connection is being made"
        """Why there is no connection."""
        self.heard = -inf
        """When the last line of the agent came, by the event loop's clock."""
        self._transport, self._who, self._epoch, self._random = transport, who, epoch, random
        self._ids = itertools.count(1)
        self._calls: dict[int, tuple[AgentCall[Any], asyncio.Future[Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._ponged = 0  # the last ping of this connection that the agent has answered
        self._settled = asyncio.Event()  # cleared while an attempt to connect is under way
        self._last: dict[type[Message], Message] = {}  # the last result of each kind on this connection

    async def run(self) -> None:
        """Keep the connection up until cancelled. Raises `Superseded` if the agent obeys another controller, which is
        connected to it now."""
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
        `Unknown` without an answer: then it may have been done. A caller that is cancelled lets the agent know."""
        await self._settled.wait()
        if self._writer is None:
            raise Unknown(f"{self.host} has no connection to its agent: {self.reason}")
        if self.welcome is not None and self.welcome.protocol < call.since:
            text = f"the agent of {self.host} is of release {self.welcome.release}, which does not know {call.name}"
            raise Refused(text, hint="install the same release on both machines")
        waiting: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        number = next(self._ids)
        # It stays until it is answered, also when nobody waits any more: a later answer may say that it is the same.
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
        """Connect, greet, and read answers until the connection ends. Raises `Unknown` or `Refused` if it was not
        made; the end of one that was made is logged."""
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
        """No call is sent any more, and every call that waits for an answer is unknown."""
        self._writer = self.welcome = None
        self._last.clear()
        self.reason = f"the connection to the agent of {self.host} was lost: {reason}"
        for _, waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(Unknown(self.reason))
        self._calls.clear()

    async def _handshake(self, stream: Stream) -> Welcome:
        who = self._who
        hello = Hello(
            release=who.release,
            protocol=PROTOCOL,
            oldest=OLDEST,
            controller=who.run,
            site=who.site,
            machine=who.machine,
        )
        stream.writer.write(encode(Line(hello=hello)))
        welcome = (await self._expect(stream, lambda answer: answer.welcome is not None)).welcome
        assert welcome is not None
        if welcome.protocol < OLDEST:
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
        await self._expect(stream, lambda answer: answer.taken is not None)
        return welcome

    def _check_superseded(self, welcome: Welcome, number: int) -> None:
        """Raises `Superseded` if a later controller commands the host now. An epoch alone proves less: it may be of a
        database that was replaced."""
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
        """The next answer but those to `ping`."""
        while True:
            answer = await self._read(stream)
            if wanted(answer):
                return answer

    async def _read(self, stream: Stream) -> Answer:
        """The next line. Raises `Refused` if the agent refuses this controller, `Unknown` if there is none."""
        try:
            async with asyncio.timeout(SILENCE):
                answer = decode_answer(await stream.reader.readuntil())
        except TimeoutError as error:
            raise Unknown(f"it has not answered for {SILENCE:g} s") from error
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
            await asyncio.sleep(PING)
            if not stream.writer.is_closing():
                stream.writer.write(encode(Line(ping=number, heard=self._ponged)))
