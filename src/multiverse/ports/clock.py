"""Time, as the controller asks for it."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds. The clock runs on while the machine sleeps and starts anew at boot."""
        ...

    def wall(self) -> float:
        """Unix time in seconds."""
        ...

    def boot_id(self) -> str:
        """Tells one boot's monotonic times from another's."""
        ...
