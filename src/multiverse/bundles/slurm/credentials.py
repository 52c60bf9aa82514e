"""Decodes munge credentials: who made one, and what it carries. munged itself refuses one that it has seen before."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path

from multiverse.core.errors import Refused, Unknown

TIMEOUT = 5.0
"""Seconds that `unmunge` may take."""

AT_ONCE = 4
"""Credentials that are decoded at the same time."""

_STATUS = {
    15: "it has expired",
    16: "it was made in the future: compare the clocks",
    17: "it was used before",
    18: "it is for another user",
}
"""What munge calls EMUNGE_CRED_EXPIRED, _REWOUND, _REPLAYED and _UNAUTHORIZED. See munge(3)."""

_CREDENTIAL = re.compile(rb"MUNGE:[A-Za-z0-9+/=]+:")


class Credentials:
    """Decodes with the munged behind a socket (None: munge's own)."""

    def __init__(self, socket: Path | None = None) -> None:
        self._socket, self._turns = socket, asyncio.Semaphore(AT_ONCE)

    async def decode(self, credential: str) -> tuple[int, str]:
        """The uid that made it, and its payload. `Refused` for one that is forged, replayed, expired, or for another
        user; `Unknown` if munged does not answer."""
        data = credential.encode("ascii", "replace")
        if not _CREDENTIAL.fullmatch(data):
            raise Refused("this is no munge credential")
        async with self._turns:
            return _parsed(*await self._run(data))

    async def _run(self, data: bytes) -> tuple[int, bytes, bytes]:
        where = [f"--socket={self._socket}"] if self._socket else []
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                "unmunge", "--numeric", "--keys=UID", *where, stdin=pipe, stdout=pipe, stderr=pipe
            )
        except OSError as error:
            raise Unknown(f"cannot run unmunge: {error.strerror}", hint="install munge on this machine") from error
        try:
            async with asyncio.timeout(TIMEOUT):
                out, said = await process.communicate(data)
        except TimeoutError as error:
            raise Unknown("munged does not answer", hint="see whether munged runs") from error
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return process.returncode or 0, out, said


def _parsed(status: int, out: bytes, said: bytes) -> tuple[int, str]:
    """What unmunge prints: metadata, an empty line, the payload. Whatever is wrong with a credential is its status."""
    if status:
        words = said.decode(errors="replace").strip().removeprefix("unmunge: Error: ")
        why = _STATUS.get(status) or words or f"unmunge ended with {status}"
        raise Refused(f"the credential is not accepted: {why}"[:300])
    metadata, _, payload = out.partition(b"\n\n")
    found = re.fullmatch(rb"UID:\s+(\d+)", metadata.strip())
    if not found:
        raise Unknown("unmunge did not say whose the credential is")
    return int(found[1]), payload.decode(errors="replace")
