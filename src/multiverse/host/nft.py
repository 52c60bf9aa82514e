"""nftables by its own library, libnftables(3): a change takes a fraction of a millisecond."""

from __future__ import annotations

import ctypes
import os
import weakref

_LIBRARY = "libnftables.so.1"


def _descriptors() -> set[int]:
    """The open descriptors of this process, without the one that this listing uses itself: that one is closed again,
    and its number is the next to be given out."""
    listed = os.listdir("/proc/self/fd")  # noqa: PTH208  (numbers, not paths)
    return {int(number) for number in listed if os.path.lexists(f"/proc/self/fd/{number}")}


class Nft:
    """libnftables, loaded into this process. One thread at a time may use it."""

    def __init__(self) -> None:
        """Raises `OSError` if this machine has no such library."""
        library = ctypes.CDLL(_LIBRARY)
        self._run, self._error = library.nft_run_cmd_from_buffer, library.nft_ctx_get_error_buffer
        library.nft_ctx_new.restype = ctypes.c_void_p
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self._error.argtypes, self._error.restype = [ctypes.c_void_p], ctypes.c_char_p
        before = _descriptors()
        self._context = ctypes.c_void_p(library.nft_ctx_new(0))
        library.nft_ctx_free.argtypes, library.nft_ctx_free.restype = [ctypes.c_void_p], None
        weakref.finalize(self, library.nft_ctx_free, self._context)  # it has a socket, and megabytes
        for fd in _descriptors() - before:
            try:
                os.set_inheritable(fd, False)  # programs that this process starts must not inherit its socket
            except OSError:
                continue
        for buffer in (library.nft_ctx_buffer_error, library.nft_ctx_buffer_output):
            buffer.argtypes = [ctypes.c_void_p]
            buffer(self._context)

    def run(self, commands: str) -> str:
        """Run the commands as one transaction. Returns the problem, or nothing."""
        if self._run(self._context, commands.encode()) == 0:
            return ""
        return str(self._error(self._context).decode(errors="replace")).strip().partition("\n")[0] or "nftables refused"
