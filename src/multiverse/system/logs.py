"""The log's limits: a guest, or a failure that lasts, cannot fill the disk with equal lines, and a line that cannot be
written, as to a full disk, is dropped."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

import structlog

_LIMITED = frozenset({"warning", "warn", "error", "exception", "critical"})
_DETAILS = frozenset({"reason", "hint", "exc_info", "stack_info"})  # what differs between lines about one object


class LossyStream(io.TextIOBase):
    """A stream to another one. What that cannot take is dropped, so that logging never fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


@dataclass
class _Window:
    """What was logged about one object since `began`, in seconds of the clock, and how many lines were not."""

    began: float
    told: set[str] = field(default_factory=set)
    dropped: int = 0


class RepeatLimiter:
    """A processor of structlog for warnings and errors. For `seconds` after the first line about an object, a line that
    equals an earlier one is dropped, and any line after `lines` different ones. The next line then tells with
    `repeated` how many were dropped. An object is what the event and its fields name, but for the reason. Lines are
    counted for the `objects` named last."""

    def __init__(
        self,
        seconds: float = 600.0,
        lines: int = 5,
        objects: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._lines, self._objects, self._clock = seconds, lines, objects, clock
        self._windows: OrderedDict[str, _Window] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, logger: Any, method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """The line, or `structlog.DropEvent`."""
        if method not in _LIMITED:
            return line
        about = repr(sorted((key, str(value)) for key, value in line.items() if key not in _DETAILS))
        caught = sys.exc_info()[1] if line.get("exc_info") is True else line.get("exc_info")
        text = repr([str(line.get("reason")), repr(caught) if caught else ""])
        with self._lock:
            dropped = self._count(about, text)
        if dropped:
            line["repeated"] = dropped
        return line

    def _count(self, about: str, text: str) -> int:
        """How many lines were dropped before this one, which is logged. Raises `DropEvent` if it is not."""
        now = self._clock()
        window = self._windows.pop(about, None)
        dropped = 0
        if window is None or now - window.began >= self._seconds:
            dropped = window.dropped if window is not None else 0
            window = _Window(now)
        self._windows[about] = window
        if len(self._windows) > self._objects:
            self._windows.popitem(last=False)
        if text in window.told or len(window.told) >= self._lines:
            window.dropped += 1
            raise structlog.DropEvent
        window.told.add(text)
        return dropped
