"""Text of users is printed as it is and not interpreted."""

from __future__ import annotations

import io

from rich.console import Console

from multiverse.cli import render
from multiverse.core.model.job import AttemptState
from multiverse.core.model.vm import TemplateState, VmState


def test_a_cell_is_neither_markup_nor_an_escape_sequence() -> None:
    table = render.table("NAME", "STATE")
    for name in ("[red]a[/red]", "[/none]", "\x1b[31mred\x07", "two\nlines\r\ttab", "b\u202ec"):
        table.add_row(name, render.state("done"))
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=False).print(table)
    shown = out.getvalue()
    assert "[red]a[/red]" in shown and "[/none]" in shown and " [31mred" in shown and "two lines  tab" in shown
    assert not {c for c in shown if not c.isprintable()} - {"\n"}


def test_every_state_has_a_colour() -> None:
    states = [*AttemptState, *VmState, *TemplateState]
    never_shown = {VmState.GONE, VmState.PLANNED, VmState.PARKED, TemplateState.ABSENT, TemplateState.RETIRING}
    assert [state for state in states if state not in never_shown and str(state) not in render.STATE_STYLES] == []
