"""How the agent of a host is reached: a stream of bytes to its Unix socket, or to a command that connects to that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from multiverse.agent.protocol import LONGEST_LINE
from multiverse.core.errors import Refused, Unknown

_LAST_WORDS = 2000
"""Characters of a command's error output that are kept."""

_END = 2.0
"""Seconds for a command to end after its input was closed; then it is killed."""


class Stream(Protocol):
    """An open stream of bytes in both directions."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def close(self) -> str:
        """End the stream, and what carries it. Returns what that says of its end; empty if nothing."""
        ...


class Transport(Protocol):
    """A way to the agent of one host."""

    async def open(self) -> Stream:
        """A new stream. Raises `Unknown` if the agent cannot be reached."""
        ...


class _SocketStream:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def close(self) -> str:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
        return ""


class UnixTransport:
    """The agent of this machine, by its Unix socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def open(self) -> Stream:
        """See `Transport`."""
        try:
            return _SocketStream(*await asyncio.open_unix_connection(self._path, limit=LONGEST_LINE))
        except OSError as error:
            raise Unknown(
                f"no agent answers at {self._path}: {error.strerror}", hint="is `multiverse agent` running?"
            ) from error


class _CommandStream:
    """A command's input and output. What it says on its error output is the reason of its end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.reader, self.writer = process.stdout, process.stdin
        self._process = process
        self._said = ""
        self._listening = asyncio.create_task(self._listen(process.stderr))

    async def _listen(self, errors: asyncio.StreamReader) -> None:
        while text := await errors.read(4096):
            self._said = (self._said + text.decode(errors="replace"))[-_LAST_WORDS:]

    async def close(self) -> str:
        self.writer.close()
        try:
            try:
                await asyncio.wait_for(self._process.wait(), _END)
            except TimeoutError:
                pass
            # The error output ends with the command, unless another process has it too, as ssh's master connection.
            await asyncio.wait([self._listening], timeout=0.2)
        finally:
            self._listening.cancel()
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        return " ".join(self._said.split())


def command_of(connect: Sequence[str], host: str) -> list[str]:
    """The command of the setting `agent.connect` for that host."""
    return [word.replace("{host}", host) for word in connect]


def other_command(connect: Sequence[str], host: str, *words: str) -> list[str]:
    """A command that reaches the host in the same way, and runs another command of `multiverse agent` there. Raises
    `Refused` if `agent.connect` does not show how."""
    *way, last = command_of(connect, host)
    if last != "dial-stdio":
        raise Refused(
            f"agent.connect does not end with dial-stdio, so `{words[0]}` cannot be run on {host}",
            hint="end it with `multiverse agent dial-stdio`, or copy the image yourself",
        )
    return [*way, *words]


class CommandTransport:
    """The agent of another machine, by a command such as `ssh HOST multiverse agent dial-stdio`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)

    async def open(self) -> Stream:
        """See `Transport`. The command is started; whether it reaches the agent shows as it answers."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=LONGEST_LINE,
                start_new_session=True,  # a Ctrl-C at the controller's terminal is the controller's alone
            )
        except OSError as error:
            raise Unknown(f"cannot start {self._command[0]}: {error.strerror}", hint="is it installed?") from error
        return _CommandStream(process)
