"""Calls that may hang for ever, as those that read a file system whose server is away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class MayHang(Generic[T]):
    """Calls a function in a thread of its own. While a call hangs, no other one is begun: there is never more than one
    such thread. The thread does not keep the process from ending."""

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function, self.name = function, name
        self._latest: Future[T] | None = None

    @property
    def hangs(self) -> bool:
        """Whether the latest call has not ended."""
        return self._latest is not None and not self._latest.done()

    def call(self, within: float) -> T | None:
        """What the function returns; None if it does not do so within so many seconds, or has hung since an earlier
        call, or raises OSError. What it returns later is dropped: it is as old as its beginning."""
        if self.hangs:
            return None
        latest = self._latest = Future[T]()
        threading.Thread(target=self._run, args=(latest,), name=self.name, daemon=True).start()
        try:
            return latest.result(within)
        except OSError:  # also TimeoutError
            return None

    def _run(self, latest: Future[T]) -> None:
        try:
            latest.set_result(self._function())
        except BaseException as error:
            latest.set_exception(error)
