"""The screen of `multiverse top`. The only module that imports Textual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from multiverse.api import Snapshot, decode
from multiverse.cli import top_lines
from multiverse.core.errors import MultiverseError
from multiverse.core.model.basics import number_of

INTERVAL = 1.0  # seconds between two snapshots
SCROLLBAR = 2  # columns of one
MOST_ROWS = 300  # jobs that are listed: more than anybody scrolls through


class TopScreen(App[None]):
    """`ask` returns a document of a snapshot, or raises `MultiverseError`."""

    CSS = """
    Screen { background: $background; }
    #head { height: auto; padding: 0 1; }
    #hosts { height: auto; max-height: 40%; padding: 0 1; margin: 1 0; }
    #hosts Static { height: auto; }
    #filter { display: none; height: 3; }
    #filter.open { display: block; }
    DataTable { height: 1fr; padding: 0 1; background: $background; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape", "leave", "End"),
        Binding("s", "stage", "Stage"),
        Binding("slash", "filter", "Filter"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self._ask = ask
        self._snapshot: Snapshot | None = None
        self._failure = ""
        self._stage = ""

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with VerticalScroll(id="hosts", can_focus=False):
            yield Static(id="lines")
        yield Input(placeholder="Only jobs with these words; Enter keeps them", id="filter")
        yield DataTable(cursor_type="row", zebra_stripes=False, cell_padding=0)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
        self.run_worker(self._follow(), exclusive=True)

    async def _follow(self) -> None:
        while True:
            try:
                self._snapshot, self._failure = decode(Snapshot, await asyncio.to_thread(self._ask)), ""
            except MultiverseError as error:
                self._failure = error.message
            self._draw()
            await asyncio.sleep(INTERVAL)

    def on_resize(self) -> None:
        self._draw()

    def action_leave(self) -> None:
        """End; or, while the filter is typed, close it."""
        box = self.query_one(Input)
        if box.has_class("open"):
            box.value = ""
            self._close_filter()
        else:
            self.exit()

    def action_stage(self) -> None:
        """Go on to the next stage, and after the last one to all."""
        choices = ("", *top_lines.LISTED)
        self._stage = choices[(choices.index(self._stage) + 1) % len(choices)]
        self._draw()

    def action_filter(self) -> None:
        box = self.query_one(Input)
        box.add_class("open")
        box.focus()

    def on_input_changed(self) -> None:
        self._draw()

    def on_input_submitted(self) -> None:
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one(Input).remove_class("open")
        self.query_one(DataTable).focus()

    # --- drawing -----------------------------------------------------------------------------------

    def _draw(self) -> None:
        if self._snapshot is None:
            return
        width = self.size.width - 2
        lines = top_lines.head(self._snapshot, width)
        if self._failure:
            lines.insert(0, Text(f"not connected, figures are old: {self._failure}", style="bold red"))
        self.query_one("#head", Static).update(Text("\n").join(lines))
        self.query_one("#lines", Static).update(Text("\n").join(top_lines.host_lines(self._snapshot, width)))
        self._draw_jobs(self._snapshot, width - SCROLLBAR)

    def _draw_jobs(self, snapshot: Snapshot, width: int) -> None:
        table, words = self.query_one(DataTable), self.query_one(Input).value
        jobs = top_lines.listed(snapshot, self._stage, words)
        heading, rows = top_lines.job_rows(snapshot, jobs[:MOST_ROWS], width)
        at, scrolled = table.cursor_row, table.scroll_offset
        with self.batch_update():
            table.clear(columns=True)
            table.add_column(heading, width=width)
            for job, lines in zip(jobs, rows, strict=False):
                table.add_row(lines, height=lines.plain.count("\n") + 1, key=str(job.attempt))
            if jobs:
                table.move_cursor(row=min(at, len(jobs) - 1), scroll=False)
            table.scroll_to(scrolled.x, scrolled.y, animate=False)
        chosen = [f"{self._stage} only" if self._stage else "", f"with “{words}”" if words else ""]
        more = f", the first {MOST_ROWS} are shown" if len(jobs) > MOST_ROWS else ""
        shown = f"{len(jobs)} of {number_of(len(snapshot.jobs), 'job')}{more}"
        table.border_title = " ".join(filter(None, (shown, *chosen)))
        table.styles.border_top = ("solid", "gray")
