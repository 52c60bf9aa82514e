"""An event loop in virtual time, which is deterministic for each seed.

Time jumps to the next timer as soon as nothing is ready. Ready callbacks run in an order drawn from the seed, so that
no code can rely on the order of asyncio. Access to the real world (threads, executors, processes, sockets) raises
`RealWorldAccess`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from heapq import heappush
from random import Random
from selectors import EVENT_READ, EVENT_WRITE, SelectorKey
from typing import Any, TypeVar

import async_solipsism

T = TypeVar("T")

STEPS = 5_000_000  # turns of the loop after which it is considered endless
TICK = 1e-6  # seconds; async-solipsism's resolution

DAY = 86_400.0  # the longest wait of asyncio at once

# Audit events. ScriptProcesses, name look-ups and sockets; threads have an event of their own from 3.12 on only.
_FORBIDDEN = frozenset(
    (
        "subprocess.Popen",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "socket.__new__",
        "socket.getaddrinfo",
        "socket.gethostbyname",
    )
)


class RealWorldAccess(RuntimeError):
    """Simulated code tried to use the real world."""


class Livelock(RuntimeError):
    """The loop turned as often as it may without an end."""


class _Timer(float):
    """A timer of the loop, in place of asyncio's: it is its own time, so that the heap compares it in C. With a
    thousand hosts each timer is compared a dozen times."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_loop", "_scheduled")
    _loop: Any
    _callback: Any
    _args: tuple[Any, ...]
    _context: Context
    _source_traceback = None
    _when = property(float)
    _run = asyncio.Handle._run  # which asks for no more than these attributes

    def __init__(self, _: float) -> None:
        self._scheduled, self._cancelled = True, False

    def when(self) -> float:
        return float(self)

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        if not self._cancelled:
            self._loop._timer_handle_cancelled(self)
            self._cancelled, self._callback, self._args = True, None, ()


class _Shuffled(deque[Any]):
    """The queue of ready callbacks. The next one is drawn at random."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng

    def popleft(self) -> Any:
        if len(self) > 1:
            self.rotate(-self._rng.randrange(len(self)))
        return super().popleft()


class _Selector(async_solipsism.selector.Selector):  # type: ignore[misc]  # untyped
    """As its base, which takes several steps for each socket in each turn of the loop."""

    _fd_to_key: dict[Any, SelectorKey]

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        ready = []
        for fd, key in self._fd_to_key.items():  # a loop without further calls: there is a turn for each callback
            wanted, socket = key.events, fd.socket
            events = EVENT_READ if wanted & EVENT_READ and socket.read_ready() else 0
            if wanted & EVENT_WRITE and socket.write_ready():
                events |= EVENT_WRITE
            if events:
                ready.append((key, events))
        if not ready and timeout is None:
            raise async_solipsism.SleepForeverError("every task waits, and no timer is set")
        if not ready and timeout is not None and timeout > 0:
            self.clock.advance(min(timeout, DAY - 1.0))
        return ready


class VirtualLoop(async_solipsism.EventLoop):  # type: ignore[misc]  # untyped
    """An asyncio event loop in virtual time. `time()` begins at 0."""

    _selector: Any

    def __init__(self, seed: int, most: int = 0) -> None:
        super().__init__()
        self._most = most or STEPS
        self._selector = _Selector(self._selector.clock)
        self.time = self._selector.clock.time  # asked a thousand times for each job
        self._ready = _Shuffled(Random(f"{seed}/loop"))
        self._steps = 0

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        # A timer is never due at once, so that time passes in every chain of timers.
        timer = _Timer(max(when, self.time() + TICK))
        timer._loop, timer._callback, timer._args = self, callback, args
        timer._context = copy_context() if context is None else context
        heappush(self._scheduled, timer)
        return timer

    async def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        raise RealWorldAccess("an executor is not allowed in virtual time")

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        if not _virtual():
            raise RealWorldAccess("a thread is not allowed in virtual time")
        return self.call_soon(callback, *args, context=context)

    def _run_once(self) -> None:
        self._steps += 1
        if self._steps > self._most:
            raise Livelock(f"no end after {self._most} turns, at {self.time():.3f} s")
        super()._run_once()


def _virtual() -> bool:
    return isinstance(asyncio._get_running_loop(), VirtualLoop)


def _guard(event: str, _args: tuple[Any, ...]) -> None:
    if event in _FORBIDDEN and _virtual():
        raise RealWorldAccess(f"{event} is not allowed in virtual time")


@contextmanager
def _no_threads() -> Iterator[None]:
    """Python 3.11 has no audit event for threads, so `threading` is patched while a virtual loop runs."""
    real = threading._start_new_thread  # type: ignore[attr-defined]

    def guarded(*args: Any) -> Any:
        if _virtual():
            raise RealWorldAccess("a thread is not allowed in virtual time")
        return real(*args)

    threading._start_new_thread = guarded  # type: ignore[attr-defined]
    try:
        yield
    finally:
        threading._start_new_thread = real  # type: ignore[attr-defined]


# An audit hook cannot be removed, so there is one for the life of the process. It does nothing unless the thread runs a
# virtual loop.
sys.addaudithook(_guard)


def run(main: Coroutine[Any, Any, T], seed: int, most: int = 0) -> T:
    """Run `main` in virtual time and return its result. Tasks that `main` leaves behind are cancelled. The loop may
    turn `most` times (0: `STEPS`).

    Raises what `main` raises, and `SleepForeverError` if every task waits and no timer is set."""
    loop = VirtualLoop(seed, most)
    try:
        asyncio.set_event_loop(loop)
        try:
            with _no_threads():
                return loop.run_until_complete(main)  # type: ignore[no-any-return]
        except KeyboardInterrupt:  # it ended whichever task was its turn, and nobody asks that task how it ended
            loop.set_exception_handler(lambda _loop, _context: None)
            raise
        finally:
            _cancel_rest(loop)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _cancel_rest(loop: VirtualLoop) -> None:
    rest = [task for task in asyncio.all_tasks(loop) if not task.done()]
    for task in rest:
        task.cancel()
    if rest:
        loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
