r"""What SIGINT, SIGTERM and SIGHUP do to a command that has started something.

The first signal interrupts it, as Ctrl-C does: a coroutine at the place where it waits, anything else at once. What the
command has started is then ended by its context managers. That is not interrupted: further signals are answered with a
line. SIGQUIT (Ctrl-\) and SIGKILL end the command at once, and what they leave is ended by the next one in the same
directory.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WAIT = b"What was started is being ended. Ctrl-\\ leaves the rest.\n"


class _Command:
    """This process, as far as signals are concerned."""

    interrupted = False
    cancel: Callable[[], object] | None = None  # cancels the coroutine that runs


def handle() -> None:
    """Let the signals interrupt this process. An ignored one, as by nohup(1), stays so; but a shell lets its background
    commands ignore SIGINT, and SIGTERM interrupts these, too."""
    _Command.interrupted = False
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def ignore() -> None:
    """Ignore the signals from now on. One that comes while Python ends would change the status of the process."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(_number: int, _frame: object) -> None:
    if signal.getsignal(signal.SIGINT) not in (_interrupt, signal.SIG_IGN):  # a daemon has its own way to end
        signal.raise_signal(signal.SIGINT)
        return
    if _Command.interrupted:
        with suppress(OSError):
            os.write(2, _WAIT)
        return
    _Command.interrupted = True
    if _Command.cancel is None:
        raise KeyboardInterrupt
    _Command.cancel()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. Raises `KeyboardInterrupt` if a signal has cancelled it, when it has ended."""

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        _Command.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            return await coroutine
        finally:
            _Command.cancel = None

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        if _Command.interrupted:
            raise KeyboardInterrupt from None
        raise


@contextmanager
def held() -> Iterator[None]:
    """Let no signal interrupt this process meanwhile: it ends what it started. A signal that came is delivered
    afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: object) -> None:
        came.append(number)
        with suppress(OSError):
            os.write(2, _WAIT)

    with _handled_by(note):
        yield
    if came:
        signal.raise_signal(came[0])


@contextmanager
def noted(stop: asyncio.Event) -> Iterator[None]:
    """Let the signals set an event of the running loop while the context lasts, in place of interrupting."""
    loop = asyncio.get_running_loop()
    with _handled_by(lambda *_: loop.call_soon_threadsafe(stop.set)):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, object], object]) -> Iterator[None]:
    """Let this handler take the signals that have one."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    ours = {number: old for number, old in before.items() if callable(old)}
    for number in ours:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in ours.items():
            signal.signal(number, old)


async def whole(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread, which cannot be cancelled: a cancelled caller waits until the function has
    returned."""
    call = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        if not call.cancelled():
            call.exception()  # it is not asked for: the caller ends
        raise


@contextmanager
def called_every(seconds: float, call: Callable[[], object], name: str) -> Iterator[None]:
    """Call `call` every so many seconds meanwhile, in a thread of that name. The end waits for a call that runs."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# --- SIGHUP of a daemon ------------------------------------------------------------------------------


def hold_reloads() -> None:
    """Keep a SIGHUP that comes before `reload_signal` is called: the settings are read only then."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def reload_signal() -> asyncio.Event:
    """Set as soon as SIGHUP comes, or has come since `hold_reloads`. Belongs to the running event loop."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    return asked
