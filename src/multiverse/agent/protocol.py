"""The protocol between a controller and the agent of a host: lines of JSON in both directions.

    controller                                   agent
    {"hello": …}                   →
                                   ←  {"welcome": …}, or {"refused": …} and the end
    {"take": 7}                    →
                                   ←  {"taken": 7}, or {"refused": …} and the end
    {"id": 1, "call": {…}}         →                       any number at the same time
    {"id": 2, "call": {…}}         →
                                   ←  {"id": 2, "result": {…}}
    {"cancel": 1}                  →                       the controller no longer waits for this call
                                   ←  {"id": 1, "error": {…}}
    {"ping": 5}                    →
                                   ←  {"pong": 5}

An epoch numbers the controllers of a site: each takes a higher one than all before it. An agent refuses a controller
whose epoch is below the highest that the agent has seen. In the middle of a connection, it answers the next line with
`refused` and ends the connection. An observation that equals the last one on the same connection is sent as
`{"id": 3, "same": true}`.

A field that the other release does not know is ignored; one that it does not send has its default. So fields may be
added, with defaults, and `PROTOCOL` rises when there is another call (`AgentCall.since`) or the meaning of a field
changes. An agent and a controller understand each other if each one's `PROTOCOL` is at least the other's `OLDEST`.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from multiverse.agent.calls import AnyCall, Message
from multiverse.core.errors import (
    Broken,
    Exhausted,
    Gone,
    MultiverseError,
    Refused,
    Stale,
    Unknown,
)

M = TypeVar("M", bound=BaseModel)

PROTOCOL = 1
"""What this release speaks."""

OLDEST = 1
"""The oldest protocol that this release understands: that of the release before it, once there is one."""

LONGEST_LINE = 1 << 24
"""Bytes. An observation of a thousand VMs has about 250 kB; a longer line is an error of the other side."""

PING = 5.0
"""Seconds after which a controller that has heard nothing asks whether the agent is there."""

SILENCE = 20.0
"""Seconds without a line after which a connection counts as lost; an agent waits three times as long."""


# --- handshake -----------------------------------------------------------------------------------


class Hello(Message):
    """The first line of a controller. `controller` names this run of it, at random, and `machine` where it runs; `site`
    marks its VMs."""

    release: str
    protocol: int
    oldest: int
    controller: str
    site: str
    machine: str = ""


class Welcome(Message):
    """The agent's answer. `agent` names this run of the agent, at random. `epoch` is the highest that it has seen of
    this site, 0 if none; `holder` is the controller that took it. If that one is connected now, `commanding` says for
    how many seconds, and `machine` from where."""

    release: str
    protocol: int
    host: str
    boot_id: str
    agent: str
    epoch: int = 0
    holder: str = ""
    commanding: float | None = None
    machine: str = ""


class CallFailure(Message):
    """An error of `core.errors`, by the name of its class."""

    kind: str
    message: str
    hint: str = ""

    @staticmethod
    def of(error: MultiverseError) -> CallFailure:
        return CallFailure(kind=type(error).__name__.lower(), message=error.message, hint=error.hint)

    def error(self) -> MultiverseError:
        """The error itself. One that this release does not know says nothing about what was done."""
        return _ERRORS.get(self.kind, Unknown)(self.message, hint=self.hint)


_ERRORS: dict[str, type[MultiverseError]] = {
    kind.__name__.lower(): kind for kind in (Refused, Exhausted, Gone, Stale, Unknown, Broken)
}


# --- lines ---------------------------------------------------------------------------------------


class Line(Message):
    """A line of a controller. One field is set, or `id` and `call`, or `ping` and `heard`: the last ping whose answer
    has come, 0 if none. So the agent knows until when its controller has surely heard it."""

    hello: Hello | None = None
    take: int | None = None
    id: int | None = None
    call: AnyCall | None = None
    cancel: int | None = None
    ping: int | None = None
    heard: int | None = None


class Answer(Message):
    """A line of an agent. One field is set, or `id` and one more. `result` is read as `AgentCall.result` says."""

    welcome: Welcome | None = None
    refused: CallFailure | None = None
    taken: int | None = None
    id: int | None = None
    result: dict[str, Any] | None = None
    error: CallFailure | None = None
    same: bool = False
    pong: int | None = None


def encode(message: Line | Answer) -> bytes:
    """A line, with its end."""
    return message.model_dump_json(exclude_none=True).encode() + b"\n"


def decode_line(data: bytes) -> Line:
    """A line of a controller. Raises `Refused` for anything else."""
    return _decode(Line, data)


def decode_answer(data: bytes) -> Answer:
    """A line of an agent. Raises `Refused` for anything else."""
    return _decode(Answer, data)


def _decode(kind: type[M], data: bytes) -> M:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        # Not pydantic's own text: it quotes the input, which may hold a secret.
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise Refused(
            f"a line of {len(data)} bytes is not of this protocol: {place or 'the line'}: {first['msg']}",
            hint="see that the other side is of this release or of its neighbour",
        ) from None
