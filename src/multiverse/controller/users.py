"""Who the users of jobs are: asked before a VM is made for them, kept, and asked again if there was no answer.

The name service is not a source that can be observed whole: it is asked for one user at a time, for those of the jobs
that are about to be admitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

import structlog

from multiverse.controller.publication import end_tasks
from multiverse.core.errors import Gone, MultiverseError, Refused, Unknown
from multiverse.core.model.identity import User, UserSeen
from multiverse.ports import Clock

log = structlog.get_logger()

FRESH = 300.0  # seconds for which an answer is used without asking again: groups may change
KEPT = 86400.0  # seconds for which an answer is used while the name service does not answer any more
AGAIN, AGAIN_LIMIT = 1.0, 30.0  # seconds before a user is looked up again; doubled up to the limit
TIMEOUT = 60.0  # Seconds after which a look-up counts as failed. A driver may have a shorter limit of its own


@dataclass(frozen=True, slots=True)
class LookupFailure:
    """A user that could not be looked up, since when (monotonic) and why."""

    uid: int
    since: float
    reason: str


@dataclass(slots=True)
class _Inquiry:
    user: User | None = None
    answered: float = 0.0  # when the look-up of `user` began
    seen: UserSeen | None = None  # the last answer, while it may be used
    failing_since: float | None = None
    reason: str = ""
    failures: int = 0  # in a row
    again_at: float = 0.0
    task: asyncio.Task[None] | None = None


class UserDirectory:
    """What `find` answered about users. Calls `known` if one was unknown before, then `changed`."""

    def __init__(
        self,
        find: Callable[[int], Awaitable[User]],
        clock: Clock,
        changed: Callable[[], None],
        known: Callable[[], None] = lambda: None,
    ) -> None:
        self._find, self._clock, self._changed, self._known = find, clock, changed, known
        self._entries: dict[int, _Inquiry] = {}
        self._seen: Mapping[int, UserSeen] | None = None  # as told last; None: that has changed since

    def seen(self) -> Mapping[int, UserSeen]:
        """What is known of users; a user that is missing is unknown. The same object while nothing has changed."""
        if self._seen is None:
            self._seen = {uid: entry.seen for uid, entry in self._entries.items() if entry.seen is not None}
        return self._seen

    def _note(self, entry: _Inquiry, seen: UserSeen | None) -> None:
        entry.seen, self._seen = seen, None

    def name(self, uid: int) -> str:
        """The user's name as it was answered last; the uid while nobody has asked for it."""
        entry = self._entries.get(uid)
        return entry.user.name if entry and entry.user else str(uid)

    def failures(self) -> list[LookupFailure]:
        return [
            LookupFailure(uid, entry.failing_since, entry.reason)
            for uid, entry in sorted(self._entries.items())
            if entry.failing_since is not None and entry.seen is None
        ]

    def next_due(self) -> float:
        return min((e.again_at for e in self._entries.values() if e.failures and e.task is None), default=float("inf"))

    def look_up(self, uids: Collection[int]) -> None:
        """Ask for users that jobs need now, unless asked a moment ago. Others are not asked for again."""
        now = self._clock.now()
        for uid in [uid for uid, entry in self._entries.items() if entry.failures and uid not in uids]:
            self._entries[uid].failures, self._entries[uid].failing_since = 0, None
        for uid in sorted(uids):
            entry = self._entries.setdefault(uid, _Inquiry())
            if entry.task is None and entry.again_at <= now:
                entry.task = asyncio.create_task(self._ask(uid, entry), name=f"look up user {uid}")

    def remember(self, user: User) -> None:
        """Take an answer as of now, for a caller that has it already."""
        now = self._clock.now()
        entry = self._entries.setdefault(user.uid, _Inquiry())
        entry.user, entry.answered = user, now
        self._note(entry, UserSeen(True, now, now))

    async def user(self, uid: int) -> User:
        """The user, for a guest. Raises `Refused` if there surely is none, `Unknown` if nobody can tell."""
        entry = self._entries.setdefault(uid, _Inquiry())
        if entry.user is None or self._clock.now() - entry.answered > FRESH:
            await self._ask(uid, entry)
        if entry.user is not None:
            return entry.user
        if entry.seen is not None:
            raise Refused(f"the job's user is unknown here: {entry.seen.reason}")
        raise Unknown(entry.reason)

    async def _ask(self, uid: int, entry: _Inquiry) -> None:
        began = self._clock.now()
        try:
            async with asyncio.timeout(TIMEOUT):
                user = await self._find(uid)
        except Gone as error:
            entry.user = None
            self._note(entry, UserSeen(False, began, self._clock.now(), error.message))
            self._succeeded(entry)
        except Exception as error:  # a defect of the driver too: nothing is known of the user
            self._failed(uid, entry, began, error)
        else:
            was_known = entry.seen is not None and entry.seen.exists
            since = entry.seen.since if entry.seen and was_known else self._clock.now()
            entry.user, entry.answered = user, began
            self._note(entry, UserSeen(True, began, since))
            self._succeeded(entry)
            if not was_known:
                self._known()
        finally:
            entry.task = None
        self._changed()

    def _succeeded(self, entry: _Inquiry) -> None:
        entry.failures, entry.failing_since, entry.reason, entry.again_at = 0, None, "", self._clock.now() + AGAIN

    def _failed(self, uid: int, entry: _Inquiry, began: float, error: Exception) -> None:
        expected = isinstance(error, MultiverseError | TimeoutError)
        reason = str(error) or f"no answer within {TIMEOUT:g} s"
        reason = reason if expected else f"{type(error).__name__}: {error}"
        if reason != entry.reason:
            log.warning("user not looked up", uid=uid, reason=reason, exc_info=not expected)
        if entry.user is None or began - entry.answered > KEPT:
            entry.user = None
            self._note(entry, None)
        entry.failing_since = began if entry.failing_since is None else entry.failing_since
        entry.reason, entry.failures = reason, entry.failures + 1
        entry.again_at = self._clock.now() + min(AGAIN_LIMIT, AGAIN * 2.0 ** min(entry.failures - 1, 8))

    async def close(self) -> None:
        await end_tasks(entry.task for entry in self._entries.values())
