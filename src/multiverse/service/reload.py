"""Reading of the settings while the daemon or an agent runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from multiverse.config import Settings, changed_keys, load, reloaded
from multiverse.core.errors import Refused
from multiverse.site.setting_files import mistakes_in
from multiverse.system.interrupts import reload_signal

log = structlog.get_logger()


class SettingsReload:
    """Reads a file of settings again at each SIGHUP. A file with mistakes changes nothing."""

    def __init__(self, file: Path, settings: Settings) -> None:
        """Signals count from here on. `settings` are those that the process has begun with."""
        self.file, self.running = file, settings
        self.apply: Callable[[Settings], None] = lambda _: None  # may raise `Refused`, and then has changed nothing
        self.mistakes = ""  # in the file, as it was read last
        self.waiting: tuple[str, ...] = ()  # keys whose new values need a restart
        self._asked = reload_signal()

    async def run(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self.read()

    async def read(self) -> None:
        log.info("reading the settings again", file=str(self.file))  # equal errors are logged only now and then
        try:
            new = await asyncio.to_thread(load, self.file)
            running, waiting = reloaded(self.running, new)
            applied = changed_keys(self.running, running)
            if applied:
                self.apply(running)
        except Refused as error:
            self.mistakes = await asyncio.to_thread(_with_lines, self.file, error)
            log.error("settings not read again, because of mistakes", reason=self.mistakes)
            return
        self.running, self.waiting, self.mistakes = running, tuple(waiting), ""
        log.info(
            "settings read again", applied=", ".join(applied) or "nothing", restart=", ".join(waiting) or "not needed"
        )
        if waiting:
            log.warning("settings changed that need a restart", keys=", ".join(waiting))


def _with_lines(file: Path, error: Refused) -> str:
    """What is wrong in the file, with lines; of an error that no line shows, its message."""
    try:
        found = mistakes_in(file)
    except Refused as unreadable:
        return unreadable.message
    return "; ".join(f"{line or file}: {mistake}" for line, mistake in found) or error.message
