"""How far a long command is: a line in place on a terminal, and elsewhere lines on standard error.

`working` is around the whole of a long command. What is inside tells the present `Work` what is done now, and how much
of how much is done: from that follows how long the rest will take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.text import Text

from multiverse.cli.render import console, duration, errors
from multiverse.system.interrupts import called_every

EVERY, SELDOM = 5.0, 60.0
"""Seconds between two lines where there is no terminal: at first, and in work of hours."""


class Work:
    """What a command is at. Times are of `clock`, in seconds."""

    def __init__(self, what: str, expected: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`expected` is how long all of it took an earlier time, if that is known."""
        self.what, self._expected, self._clock = what, expected, clock
        self._began = self._counted_since = clock()
        self._detail, self._told = "", 0.0
        self._counted: tuple[int, int, float, int] | None = None  # done, of, since when, and what was done then

    def say(self, detail: str) -> None:
        self._detail = detail

    def begin(self, detail: str) -> None:
        """Say what is done next. Nothing of it is counted yet."""
        self._detail, self._counted, self._counted_since = detail, None, self._clock()

    def advance(self, done: int, of: int) -> None:
        """`done` of `of` are done. The pace counts from the first call on."""
        if self._counted is None or self._counted[1] != of or done < self._counted[0]:
            first = self._counted is None and done <= 1
            self._counted = (done, of, self._counted_since if first else self._clock(), 0 if first else done)
        else:
            self._counted = (done, of, *self._counted[2:])

    @property
    def took(self) -> float:
        return self._clock() - self._began

    def left(self) -> float | None:
        """About how many seconds the rest takes; None if that cannot be told."""
        if self._counted is not None:
            done, of, since, before = self._counted
            if done > before and of > done:
                return (self._clock() - since) / (done - before) * (of - done)
            return None
        if self._expected is not None and self._expected > self.took:
            return self._expected - self.took
        return None

    def tells(self) -> bool:
        """Whether another line is due: the longer the work takes, the more seldom it is."""
        if self.took - self._told < min(SELDOM, self.took / 10):
            return False
        self._told = self.took
        return True

    def line(self) -> str:
        counted = f"{self._counted[0]} of {self._counted[1]}" if self._counted else ""
        parts = [self.what, ", ".join(filter(None, (counted, self._detail)))]
        rest = f", about {_rounded(left)} left" if (left := self.left()) is not None else ""
        return f"{': '.join(filter(None, parts))} ({_rounded(self.took)}{rest})"

    def __rich__(self) -> Text:
        return Text(self.line(), style="dim", overflow="ellipsis", no_wrap=True)


def _rounded(seconds: float) -> str:
    return f"{round(seconds)} s" if seconds < 100 else duration(seconds)


_present: list[Work] = []


def present() -> Work:
    """The work that goes on; one that nobody sees if there is none."""
    return _present[-1] if _present else Work("")


@contextmanager
def working(what: str, expected: float | None = None) -> Iterator[Work]:
    """Show how far the work in this block is."""
    work = Work(what, expected)

    def tell() -> None:
        if work.tells():
            errors.print(f"  {work.line()}", markup=False)

    shown: AbstractContextManager[object] = (
        console.status(work, spinner="dots") if console.is_terminal else called_every(EVERY, tell, "progress")
    )
    _present.append(work)
    try:
        with shown:
            yield work
    finally:
        _present.remove(work)


@contextmanager
def step(text: str, done: str = "") -> Iterator[Callable[[str], None]]:
    """A long step of a command: how far it is, then `done` (or `text`) and its time. Yields a function that shows a
    detail. Without a terminal every detail is a line of its own."""
    with working(text) as work:
        if console.is_terminal:
            yield work.say
        else:
            console.print(f"  {text} …", markup=False)

            def say(word: str) -> None:
                work.say(word)
                console.print(f"    {word}", markup=False)

            yield say
    console.print(f"[green]✓[/] {done or text} [dim]{duration(work.took)}[/]")
