"""`python -m multiverse_lab.soak.hog TARGET`: takes memory until only TARGET MiB are available on this machine.

It ends, and so gives everything back, when its input is closed, or when less than two thirds of TARGET are available
because others need memory, too.
"""

from __future__ import annotations

import re
import select
import sys
from pathlib import Path

PIECE = 64  # MiB


def available() -> int:
    """The memory that this machine could give to new processes, in MiB."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) // 1024 if found else 0


def main(target: int) -> None:
    taken: list[bytearray] = []
    while (left := available()) > target * 2 // 3:
        if left > target + PIECE:
            taken.append(bytearray(b"x") * (PIECE << 20))
        if select.select([sys.stdin], [], [], 0.0 if left > target + PIECE else 0.2)[0]:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
