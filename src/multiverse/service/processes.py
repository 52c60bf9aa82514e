"""Counts the processes that the daemon and the agents start.

An audit hook counts them where Python starts them, so no driver can forget to count its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import PurePath
from typing import Any

_COMMANDS = frozenset({"scontrol", "qemu-img"})
"""Programs that are counted by their first argument too, because it is a command; elsewhere it is data."""

_LAUNCHERS = frozenset({"setpriv", "unshare"})
"""Programs that execute the program after "--" in their own place."""


class ProcessCounter:
    """Counts every process that this process starts from now on, by program. An audit hook cannot be removed, so make
    one counter for each process."""

    def __init__(self) -> None:
        self.programs: Counter[str] = Counter()
        sys.addaudithook(self._count)

    def _count(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn"):
            self.programs[_program([str(word) for word in args[1]])] += 1


class Processes:
    """The processes that the daemon has started, and the agents that answer."""

    def __init__(self, own: ProcessCounter, agents: Callable[[], Awaitable[Counter[str]]]) -> None:
        self._own, self._agents = own, agents

    async def programs(self) -> Mapping[str, int]:
        """Their numbers, by program."""
        return self._own.programs + await self._agents()


def _program(argv: list[str]) -> str:
    program = PurePath(argv[0]).name
    if program in _LAUNCHERS and "--" in argv:
        return _program(argv[argv.index("--") + 1 :])
    return f"{program} {argv[1]}" if program in _COMMANDS and len(argv) > 1 else program
