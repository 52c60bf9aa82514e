"""`--watch`: a command's output again and again, in place on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Annotated

import typer
from rich.live import Live
from rich.text import Text

from multiverse.cli import render
from multiverse.core.errors import MultiverseError

INTERVAL = 2.0
"""Seconds between two times."""

Watch = Annotated[bool, typer.Option("--watch", "-w", help="Show it again every 2 s, until Ctrl-C.")]


def watched(show: Callable[[], None], *, again: bool) -> None:
    """Call `show`, which prints; with `again` every two seconds until it is interrupted, which is no error. An error
    of the daemon is shown in place of the output, and does not end it."""
    if not again:
        show()
        return
    try:
        if render.console.is_terminal:
            _in_place(show)
        else:
            while True:
                render.console.print(_printed(show), end="")
                render.console.print()
                time.sleep(INTERVAL)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _in_place(show: Callable[[], None]) -> None:
    with Live(console=render.console, screen=True, auto_refresh=False) as live:
        while True:
            text = _printed(show)
            head = Text(f"{datetime.now():%H:%M:%S}, every {INTERVAL:g} s; Ctrl-C ends\n", style="dim")
            room = max(1, render.console.height - 3)
            lines = list(text.split("\n", allow_blank=True))
            if len(lines) > room:
                more = len(lines) - room
                lines = lines[:room]
                lines.append(Text(f"… {more} more lines", style="dim"))
            live.update(Text.assemble(head, Text("\n").join(lines)), refresh=True)
            time.sleep(INTERVAL)


def _printed(show: Callable[[], None]) -> Text:
    """What `show` prints, or why it cannot."""
    with render.console.capture() as captured:
        try:
            show()
        except MultiverseError as error:
            render.console.print(f"multiverse: {error}", markup=False, style="red")
        except typer.Exit:
            pass  # its status is that of one call
    return Text.from_ansi(captured.get())
