"""What the kernel says of its clock."""

from __future__ import annotations

import ctypes

_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised to a reliable server
_SIZE = 256  # at least as large as struct timex


def is_synchronised() -> bool | None:
    """Whether something keeps the clock right, such as chrony or ntpd; None if the kernel does not say."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_SIZE))  # of zeros: it only reads
    return None if state < 0 else state != _TIME_ERROR
