"""What passes are told beside what is observed: results of effects, and commands of operators."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from multiverse.core.commands import may_add
from multiverse.core.errors import Refused
from multiverse.core.transition import Command, Message


class CommandInbox:
    """Messages that no committed pass has taken yet, in their order."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._messages: deque[Message] = deque()
        self._asked: list[tuple[Command, asyncio.Future[None]]] = []  # for each command among them

    def put(self, message: Message) -> None:
        """Keep a message for the next pass. It does not make the next pass come sooner."""
        self._messages.append(message)

    def ask(self, command: Command) -> asyncio.Future[None]:
        """Keep a command, and wake the loop. Done when a pass that took it is committed; raises `Refused` if it
        may not be done."""
        self.put(command)
        self._wake()
        committed = asyncio.get_running_loop().create_future()
        self._asked.append((command, committed))
        return committed

    def of_pass(self, *, releasing: bool) -> list[Message]:
        """The messages for a pass; with `releasing` without those that may add something."""
        return [message for message in self._messages if not (releasing and may_add(message))]

    def committed(self, messages: Sequence[Message], refusals: Iterable[tuple[Command, Refused]]) -> None:
        """A pass is kept, and with it what came of these messages."""
        kept = {id(message) for message in messages}
        self._messages = deque(message for message in self._messages if id(message) not in kept)
        refused = {id(command): error for command, error in refusals}
        for command, committed in self._asked:
            if id(command) in kept and not committed.done():  # whoever asked may have gone
                if error := refused.get(id(command)):
                    committed.set_exception(error)
                else:
                    committed.set_result(None)
        self._asked = [(command, committed) for command, committed in self._asked if id(command) not in kept]
