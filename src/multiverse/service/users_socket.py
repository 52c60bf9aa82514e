"""Answers users about their own jobs, and saves and resumes these for them.

A Unix socket is for everybody on this machine; a TCP socket is there where the site wants it.
Who asks is what the kernel says of the peer (SO_PEERCRED), or what munge says of the credential. Nothing else that a
peer sends is believed. A user learns of no other user's job, not even whether there is one. A connection asks one
question. Questions cannot keep the controller from its work: see `Pace`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import structlog
from pydantic import TypeAdapter, ValidationError

from multiverse.api import LONGEST_QUESTION, PURPOSE, ExplanationsView, Question, SavedChanged
from multiverse.bundles.contract import Identities, Privacy
from multiverse.core.errors import Gone, MultiverseError, Refused
from multiverse.ports import Clock
from multiverse.service.backend import Backend, JobChange
from multiverse.service.explanations import TASK_IDS, Viewer
from multiverse.system.processes import peer_of

log = structlog.get_logger()

PATIENCE = 5.0  # seconds in which a peer must have sent its question, and in which it must take its answer
CONNECTIONS = 64  # connections of one listener at the same time, at most; further ones are closed at once
CONNECTIONS_OF_ONE = 8  # of these, those of one user on the Unix socket

REST, REST_OF_ONE = 3.0, 10.0
"""After an answer, all users wait `REST` times as long as it took, and its user `REST_OF_ONE` times."""

_ADAPTER: TypeAdapter[Any] = TypeAdapter(Any)


class Pace:
    """Lets questions take a quarter of the daemon's time at most, and those of one user a tenth. One at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._turn = clock, asyncio.Lock()
        self._turns_of = dict[int, asyncio.Lock]()  # of users who ask something at this moment
        self._asking = Counter[int]()
        self._free_at, self._free_for = 0.0, dict[int, float]()

    @contextlib.asynccontextmanager
    async def turn(self, uid: int) -> AsyncIterator[None]:
        """Wait for this user's turn, and count how long it takes."""
        async with self._alone(uid), self._turn:
            await asyncio.sleep(max(0.0, self._free_at - self._clock.now()))
            began = self._clock.now()
            try:
                yield
            finally:
                self._free_at = self._clock.now() + REST * self._charge(uid, began)

    @contextlib.asynccontextmanager
    async def change(self, uid: int) -> AsyncIterator[None]:
        """The same for a change, which waits for a commit of the controller: others are answered meanwhile."""
        async with self._alone(uid):
            began = self._clock.now()
            try:
                yield
            finally:
                self._charge(uid, began)

    @contextlib.asynccontextmanager
    async def _alone(self, uid: int) -> AsyncIterator[None]:
        """Wait until no other question of the user is answered, and the user's rest is over."""
        self._asking[uid] += 1
        try:
            async with self._turns_of.setdefault(uid, asyncio.Lock()):
                await asyncio.sleep(max(0.0, self._free_for.get(uid, 0.0) - self._clock.now()))
                yield
        finally:
            self._asking[uid] -= 1
            if not self._asking[uid]:
                del self._asking[uid], self._turns_of[uid]

    def _charge(self, uid: int, began: float) -> float:
        """Let the user rest after an answer. Returns how long that took."""
        now = self._clock.now()
        self._free_for[uid] = now + REST_OF_ONE * (now - began)
        self._free_for = {uid: at for uid, at in self._free_for.items() if at > now}
        return now - began


@dataclass(frozen=True, slots=True)
class UserQuestions:
    """Answers one question of a user."""

    backend: Backend
    privacy: Callable[[int], Privacy]
    pace: Pace

    async def answer(self, uid: int, question: Question) -> Any:
        """The answer as a document of JSON. Raises `Gone` for a job that is not the user's, or does not exist, and
        `Refused` for a change that is not possible."""
        if question.ask in ("save", "resume", "checkpoint"):
            if not question.job:
                raise Gone("name a job")
            change = JobChange(question.ask, question.job, question.hold, question.anew, question.shared_files)
            async with self.pace.change(uid):
                await self.backend.change_job(change, uid=uid)
            return _ADAPTER.dump_python(SavedChanged(question.job), mode="json")
        async with self.pace.turn(uid):
            return _ADAPTER.dump_python(self._found(Viewer.of(uid, self.privacy(uid)), question), mode="json")

    def _found(self, viewer: Viewer, question: Question) -> Any:
        explanations = self.backend.explanations
        match question.ask:
            case "capacity":
                return explanations.capacity(viewer)
            case "trial":
                if question.request is None:
                    raise Refused("a trial needs a request")
                return explanations.trial(question.request, viewer)
            case "images":
                return self.backend.images()
            case "saved":
                return self.backend.saved(viewer)
            case "explain":
                found: Any = explanations.of_job(question.job, viewer)
            case "timeline":
                found = self.backend.timelines(question.job, viewer)
        if not question.job or not (found.jobs if isinstance(found, ExplanationsView) else found):
            if not question.job:
                raise Gone("name a job")
            raise Gone(f"you have no job {question.job}", hint=f"see: squeue --me; {TASK_IDS}")
        return found


Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter
Identify = Callable[[bytes, Writer], Awaitable[tuple[int, Question]]]
"""Who asks, and what: from a line and the connection that it came by. Raises `Refused`."""


class Listener:
    """Serves connections, each with one question."""

    def __init__(self, questions: UserQuestions, identify: Identify) -> None:
        self._questions, self._identify = questions, identify
        self._open = Counter[int | None]()  # connections by the uid of their peer, if that is known

    async def serve(self, reader: Reader, writer: Writer) -> None:
        peer = _peer_uid(writer)
        self._open[peer] += 1
        try:
            if self._open.total() > CONNECTIONS or (peer is not None and self._open[peer] > CONNECTIONS_OF_ONE):
                return
            answer = await self._answer(reader, writer)
            writer.write(json.dumps(answer).encode() + b"\n")
            async with asyncio.timeout(PATIENCE):
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a peer that is slow, or has gone
        except asyncio.CancelledError:
            pass  # the daemon ends; asyncio of Python 3.11 would log a task that was cancelled
        finally:
            self._open[peer] -= 1
            self._open += Counter()  # without zeros
            writer.close()

    async def _answer(self, reader: Reader, writer: Writer) -> Any:
        async with asyncio.timeout(PATIENCE):
            line = await reader.readuntil(b"\n")
        try:
            uid, question = await self._identify(line, writer)
            return await self._questions.answer(uid, question)
        except ValidationError:
            return {"error": "this is no question", "hint": "use a command of this release", "status": 400}
        except MultiverseError as error:
            status = 404 if isinstance(error, Gone) else 403 if isinstance(error, Refused) else 503
            return {"error": error.message, "hint": error.hint, "status": status}
        except Exception:  # of one question; it must not end the daemon
            log.exception("question of a user not answered")
            hint = "ask the operators: its log says why"
            return {"error": "the daemon could not answer", "hint": hint, "status": 500}


async def by_kernel(line: bytes, writer: Writer) -> tuple[int, Question]:
    """Who asks is the peer of the Unix socket."""
    uid = _peer_uid(writer)
    if uid is None:
        raise Refused("nobody knows who asks")
    return uid, Question.model_validate_json(line)


def by_credential(identities: Identities) -> Identify:
    """Who asks is who made the credential (munge's, of Slurm), which carries the question."""

    async def identify(line: bytes, _writer: Writer) -> tuple[int, Question]:
        try:
            credential = json.loads(line)["credential"]
        except (ValueError, KeyError, TypeError) as error:
            raise Refused("there is no credential") from error
        uid, payload = await identities.decode(str(credential))
        question = Question.model_validate_json(payload)
        if question.purpose != PURPOSE:
            raise Refused("the credential was made for another purpose")
        return uid, question

    return identify


def _peer_uid(writer: Writer) -> int | None:
    """The uid of a Unix socket's peer; None for other connections."""
    sock = writer.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    return peer_of(sock).uid


async def serve_users(
    questions: UserQuestions, sock: socket.socket, tcp: socket.socket | None, identities: Identities | None
) -> None:
    """Answer users until cancelled: on a Unix socket, and on a TCP socket if their identities can be checked."""
    servers = [await asyncio.start_unix_server(Listener(questions, by_kernel).serve, sock=sock, limit=LONGEST_QUESTION)]
    if tcp is not None and identities is not None:
        listener = Listener(questions, by_credential(identities))
        servers.append(await asyncio.start_server(listener.serve, sock=tcp, limit=LONGEST_QUESTION))
    try:
        await asyncio.Event().wait()
    finally:
        for server in servers:
            server.close()
