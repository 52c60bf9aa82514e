"""The samples of an hour, of one host or VM, in compact arrays."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence

from multiverse.core.model.usage import MEANS, Usage

UNKNOWN = -1.0
"""In place of a figure that the kernel does not tell: no figure is negative."""

WIDTH = 1 + len(MEANS)
"""Values of a sample: its time, in seconds since its chunk began, and the figures in the order of `MEANS`."""

CHUNK = 60
"""Samples of a chunk. The oldest chunk is dropped as a whole."""

SAMPLE_BYTES = 4 * WIDTH

_CPUS, _MEMORY = 1 + MEANS.index("cpus"), 1 + MEANS.index("memory")


class History:
    """The last samples, `limit` at least if there were as many, and a minute's more at most."""

    def __init__(self, limit: int = 3600) -> None:
        self.limit = limit
        self._chunks: deque[tuple[float, array[float]]] = deque()

    def __len__(self) -> int:
        return sum(len(data) for _, data in self._chunks) // WIDTH

    def add(self, now: float, figures: Sequence[float]) -> None:
        """Add a sample that was taken at `now` (monotonic), after all others."""
        if not self._chunks or len(self._chunks[-1][1]) >= CHUNK * WIDTH:
            self._chunks.append((now, array("f")))
            while (len(self._chunks) - 2) * CHUNK >= self.limit:
                self._chunks.popleft()
        began, data = self._chunks[-1]
        data.append(now - began)
        data.extend(figures)

    def usage(self, after: float, interval: float) -> Usage | None:
        """What the samples later than `after` (monotonic) come to, each of which covers `interval` seconds; None if
        there is none. A figure that some of them do not know is the mean of the others."""
        parts = list(self._since(after))
        count = sum(len(part) for part in parts) // WIDTH
        if not count:
            return None
        means: dict[str, float | None] = {}
        for column, name in enumerate(MEANS, start=1):
            columns = [part[column::WIDTH] for part in parts]
            unknown = sum(values.count(UNKNOWN) for values in columns)
            known = sum(map(sum, columns)) - unknown * UNKNOWN
            means[name] = known / (count - unknown) if unknown < count else None
        return Usage(
            count * interval,
            cpus_peak=max(max(part[_CPUS::WIDTH]) for part in parts),
            memory_peak=max(max(part[_MEMORY::WIDTH]) for part in parts),
            **means,  # type: ignore[arg-type]
        )

    def _since(self, after: float) -> Iterator[array[float]]:
        """The samples later than that, the newest chunk first."""
        for began, data in reversed(self._chunks):
            if began > after:
                yield data
                continue
            times = data[0::WIDTH]
            if (first := bisect_right(times, after - began)) < len(times):
                yield data[first * WIDTH :]
            return
