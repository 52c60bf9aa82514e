"""What can go wrong, said as what is true afterwards.

A driver translates what its platform throws into one of these, once, and keeps the cause. The planner decides by the
class alone; text and hint are for people.
"""

from __future__ import annotations


class MultiverseError(Exception):
    """An error that an operator may see. `hint` is the next step, a sentence, or empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class Refused(MultiverseError):
    """It was not done and never will be as asked; asking again is pointless."""


class Superseded(Refused):
    """Another controller commands the site: this one has to end."""


class Unreachable(Refused):
    """It could not even be asked for: nobody answers there, or it is not ours to use."""


class Exhausted(MultiverseError):
    """It was not done for want of something that may come back: memory, disk, a free address."""


class NotYet(MultiverseError):
    """It was not done, because what it waits for takes its time. Nothing is wrong: ask again later."""


class Gone(MultiverseError):
    """What it was to act on does not exist (any more)."""


class Stale(MultiverseError):
    """What it was to act on has moved on since: the restart count rose, the state changed."""


class Unknown(MultiverseError):
    """No reply, or none that could be understood: it may have been done. Look before doing more."""


class Broken(MultiverseError):
    """It was tried and failed in a way that will repeat until somebody mends the cause."""


class Damaged(Broken):
    """What was saved cannot be read as it was written: it was changed, or removed, or its key was."""
