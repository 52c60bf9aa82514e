"""The output of the command line: tables that fit 80 columns and use 140, JSON, durations and sizes; and --watch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from multiverse import api
from multiverse.core.errors import MultiverseError

T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

WIDE = 140  # columns from which on tables show everything. What goes to no terminal is as wide as that.
_WIDTH = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else WIDE

console = Console(width=_WIDTH, highlight=False, soft_wrap=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

STYLES_OF_STATES = {
    "yellow": "queued ungated restoring holding stray requeued avoided closing draining drained",
    "cyan": "claimed spawning starting building falling_asleep delayed",
    "blue": "spawned adding_user joined",
    "bold green": "allocated serving moving settling waking",
    "magenta": "warned preempting returning revoking reclaiming retiring ending removing releasing deleting fenced",
    "green": "done ready up",
    "dim": "cancelled asleep",
    "red": "revoked refused failed lost orphan dead broken away",
    "bold red": "silent fencing",
}
STATE_STYLES = {state: style for style, states in STYLES_OF_STATES.items() for state in states.split()}


def state(word: str, quarantined: str = "") -> Text:
    """A state in its colour, marked if the record is quarantined (`quarantined` is the reason)."""
    if quarantined:
        return Text(f"{word} (quarantined)", style="bold red")
    return Text(word, style=STATE_STYLES.get(word, ""))


class _PlainTable(Table):
    """A table whose strings are shown as they are: a job's name is neither markup nor an escape sequence."""

    def add_row(self, *cells: Any, **more: Any) -> None:
        super().add_row(*(plain(cell) if isinstance(cell, str) else cell for cell in cells), **more)


def plain(text: str) -> Text:
    """The text with a blank for each character that is not printable, because a terminal may act on it."""
    return Text("".join(c if c.isprintable() else " " for c in text))


def say(text: str, *, indent: int = 2, style: str = "") -> None:
    """Print a text below a heading, wrapped at the width of the output, without blanks at the ends of lines."""
    for line in plain(text).wrap(console, max(20, console.width - indent)):
        line.rstrip()
        console.print(Text(" " * indent).append_text(line), style=style, no_wrap=True, crop=False)


def table(*columns: str, right: Sequence[str] = (), fold: Sequence[str] = ()) -> Table:
    """An empty table. Columns in `fold` are wrapped when the terminal is too narrow, others are cut. Without a terminal
    all are wrapped, because what is cut is lost."""
    fold = fold if console.is_terminal else columns
    made = _PlainTable(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for column in columns:
        folds = column in fold
        justify: Literal["left", "right"] = "right" if column in right else "left"
        made.add_column(column, justify=justify, no_wrap=not folds, overflow="fold" if folds else "ellipsis")
    return made


def is_wide() -> bool:
    return console.width >= WIDE


def as_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def present(found: T, json: bool, show: Callable[[T], None]) -> None:
    """Print what was found: as JSON, or by `show`."""
    if json:
        as_json(asdict(found) if is_dataclass(found) and not isinstance(found, type) else found)
    else:
        show(found)


def show(made: Table, empty: str) -> None:
    """Print the table, or the sentence `empty` if it has no rows."""
    if made.row_count:
        console.print(made)
    else:
        console.print(empty)


def listed(
    found: Iterable[T],
    empty: str,
    columns: Mapping[str, Callable[[T], str | Text]],
    right: Sequence[str] = (),
    fold: Sequence[str] = (),
) -> None:
    """Print a table with a row for each, or the sentence `empty`. `columns` has a cell of each row by its title."""
    made = table(*columns, right=right, fold=fold)
    for one in found:
        made.add_row(*(cell(one) for cell in columns.values()))
    show(made, empty)


def duration(seconds: float) -> str:
    """A duration with two or three digits: 0.48 s, 12.3 s, 4m10s, 2h05m, 3d04h."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h"


def age(since: float) -> str:
    """How long ago a Unix time is."""
    return duration(max(0.0, time.time() - since))


def moment(at: float) -> str:
    """A Unix time in local time."""
    return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}"


def memory(mib: float) -> str:
    """A size given in MiB, shown in GiB from 10 GiB on."""
    if mib >= 10 * 1024:
        return f"{mib / 1024:.1f} GiB"
    return f"{mib:.0f} MiB"


def places(vm: api.VmView) -> str:
    """Where a VM is: also to which host it moves, or where something of it may be left after a move."""
    if vm.state == "moving":
        return f"{vm.host} → {vm.other_host}"
    return ", ".join(filter(None, (vm.host, vm.other_host)))


def bar(parts: Sequence[tuple[float, str]], width: int) -> Text:
    """A bar of about `width` cells for parts of (seconds, style). A part has a cell at least unless it took no time."""
    total = sum(seconds for seconds, _ in parts) or 1.0
    text = Text()
    for seconds, style in parts:
        cells = round(seconds / total * width)
        text.append("━" * max(1 if seconds > 0 else 0, cells), style=style)
    return text


PHASE_STYLES: Mapping[str, str] = {
    "queued": "yellow",
    "clone": "cyan",
    "join": "blue",
    "launch": "bright_blue",
    "run": "green",
    "reclaim": "magenta",
}


# --- --watch ----------------------------------------------------------------------------------------

INTERVAL = 2.0  # seconds between two times

Watch = Annotated[bool, typer.Option("--watch", "-w", help="Show it again every 2 s, until Ctrl-C.")]


def watched(show: Callable[[], None], *, again: bool) -> None:
    """Call `show`, which prints; with `again` every two seconds until Ctrl-C. An error of the daemon is shown, and ends
    nothing."""
    if not again:
        show()
        return
    try:
        if console.is_terminal:
            _in_place(show)
        else:
            while True:
                console.print(_printed(show), end="")
                console.print()
                time.sleep(INTERVAL)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _in_place(show: Callable[[], None]) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            text = _printed(show)
            head = Text(f"{datetime.now():%H:%M:%S}, every {INTERVAL:g} s; Ctrl-C ends\n", style="dim")
            room = max(1, console.height - 3)
            lines = list(text.split("\n", allow_blank=True))
            if len(lines) > room:
                more = len(lines) - room
                lines = lines[:room]
                lines.append(Text(f"… {more} more lines", style="dim"))
            live.update(Text.assemble(head, Text("\n").join(lines)), refresh=True)
            time.sleep(INTERVAL)


def _printed(show: Callable[[], None]) -> Text:
    with console.capture() as captured:
        try:
            show()
        except MultiverseError as error:
            console.print(f"multiverse: {error}", markup=False, style="red")
        except typer.Exit:
            pass  # its status is that of one call
    return Text.from_ansi(captured.get())
