"""Users whom the name service has not told yet: which of them to ask for, and how long their jobs hold up others."""

from __future__ import annotations

from collections.abc import Mapping

from multiverse.core.model import World
from multiverse.core.state import State

PATIENCE = 2.0
"""Seconds that an answer may take while the jobs behind wait, too: after a restart every user is asked for, and the
order of the queue must not depend on whose answer comes first. With one answer outstanding for longer, nobody waits."""

ASKED_AHEAD = 20
"""With a user, those of so many attempts at the head of the queue are asked for."""


class UnknownUsers:
    """The users that one round of admission asks for. Since when each was asked for is kept in the state."""

    def __init__(self, state: State, world: World) -> None:
        self._state, self._world = state, world
        self._before: Mapping[int, float] = state.users_asked
        state.users_asked = {}
        for uid in state.queue.unknown_users:
            self.ask(uid)

    def ask_patiently(self, uid: int) -> bool:
        """Ask for the user of the attempt whose turn it is. Whether the answer is to be waited for before anything is
        decided about those behind it."""
        self.ask(uid)
        for _, attempt_id in self._state.queue.candidates.first(ASKED_AHEAD):
            other = self._state.attempts[attempt_id].uid
            if self._world.user_known_since(other) == float("inf"):
                self.ask(other)
        return all(self._state.now - since < PATIENCE for since in self._state.users_asked.values())

    def ask(self, uid: int) -> None:
        """Ask for a user. Nothing waits for the answer."""
        self._state.users_asked.setdefault(uid, self._before.get(uid, self._state.now))
