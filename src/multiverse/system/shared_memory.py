"""Memory that several processes share, in files without a name (memfd_create(2)).

Nobody can open such a file by a path outside of the processes that have it, and the kernel frees it with the last of
them. Whoever has it can read and write it, and not change its size: a process that maps what another one has cut off
would be killed (mmap(2), SIGBUS).
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Sequence

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedMemory:
    """Regions of memory of `size` MiB each. They are zero, and nothing is allocated for them yet.

    Their descriptors `fds` belong to this object: they are closed by `close`, or when nobody refers to it any more.
    """

    def __init__(self, ids: Sequence[str], size: int) -> None:
        """The kernel shows the ids as names of the files. Raises OSError if there is no room for descriptors."""
        self.size = size
        fds: list[int] = []
        self.close = weakref.finalize(self, _close, fds)
        for each in ids:
            fds.append(os.memfd_create(f"multiverse/ivshmem-{each}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(fds[-1], size << 20)
            fcntl.fcntl(fds[-1], fcntl.F_ADD_SEALS, _SEALS)
        self.fds = tuple(fds)


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
