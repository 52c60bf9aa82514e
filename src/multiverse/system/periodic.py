"""A call at intervals beside work that blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def called_every(seconds: float, call: Callable[[], object], name: str) -> Iterator[None]:
    """Call `call` every so many seconds while this block lasts, in a thread of that name. The block's end waits for a
    call that runs."""
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
