"""The site's fence command: switches a machine off, and says whether it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import structlog

from multiverse.config import FenceSettings
from multiverse.core.errors import Unknown

log = structlog.get_logger()

_LAST_WORDS = 300
"""Characters of the command's output that are kept."""


class FenceCommand:
    """`ports.Fencing` by a command, such as one of Debian's fence-agents."""

    def __init__(self, settings: FenceSettings) -> None:
        self._settings = settings

    async def fence(self, host: str) -> None:
        """See `ports.Fencing`. Exit status 0 means that the machine is off. The command and all that it has started are
        killed after its time, and when nobody waits for it any more, because the host is back."""
        argv = [word.replace("{host}", host) for word in self._settings.command]
        log.warning("fencing", host=host, command=argv[0])
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise Unknown(f"cannot start {argv[0]}: {error.strerror}", hint="see fence.command") from error
        try:
            async with asyncio.timeout(self._settings.timeout):
                output, _ = await process.communicate()
        except TimeoutError as error:
            raise Unknown(f"{argv[0]} did not end within {self._settings.timeout:g} s") from error
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        said = " ".join(output.decode(errors="replace").split())[-_LAST_WORDS:]
        if process.returncode != 0:
            raise Unknown(f"{argv[0]} ended with status {process.returncode}: {said or 'it said nothing'}")
        log.warning("fenced", host=host, said=said)
