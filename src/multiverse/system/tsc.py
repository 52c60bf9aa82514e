"""How fast the time-stamp counter of this machine's CPUs runs. The kernel knows, but tells programs only in its log."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

_READ_COUNTER = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx,32; or rax,rdx; ret
_TRIES = 20  # readings of clock and counter, of which the closest counts: between the two, another process may run


def measured_khz(seconds: float = 0.1) -> int | None:
    """The frequency in kHz, measured against the monotonic clock for `seconds`; with 0.1 s it is right to a few parts
    in a million. None if the CPUs have no counter of constant frequency, or if a program may not execute what it
    wrote."""
    if os.uname().machine != "x86_64" or " constant_tsc " not in Path("/proc/cpuinfo").read_text():
        return None
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None
    page.write(_READ_COUNTER)
    counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    clock, count = _read_both(counter)
    time.sleep(seconds)
    later, counted = _read_both(counter)
    return round((counted - count) * 1_000_000 / (later - clock))


def _read_both(counter: Callable[[], int]) -> tuple[float, int]:
    """The monotonic clock in nanoseconds, and the counter at that time."""
    readings = []
    for _ in range(_TRIES):
        before = time.monotonic_ns()
        count = counter()
        after = time.monotonic_ns()
        readings.append((after - before, (before + after) / 2, count))
    _, clock, count = min(readings)
    return clock, count
