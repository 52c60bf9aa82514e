"""What the controller asks of a site's means to switch a machine off."""

from __future__ import annotations

from typing import Protocol


class Fencing(Protocol):
    """The site's fence command."""

    async def fence(self, host: str) -> None:
        """Make sure that the machine is off. Returns only if it surely is, or was after this call began. Raises
        `Unknown` with what the command has said otherwise; then it is repeated."""
        ...
