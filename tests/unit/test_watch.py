"""--watch shows a command's output again and again, whatever the daemon does, and ends without an error."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import typer
from rich.console import Console

from multiverse.cli import render
from multiverse.core.errors import Unknown


def watching(
    monkeypatch: pytest.MonkeyPatch, show: Callable[[], None], times: int, *, terminal: bool
) -> tuple[str, int]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, height=10, highlight=False)
    monkeypatch.setattr(render, "console", console)
    left = [times]

    def sleep(_seconds: float) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(render.time, "sleep", sleep)
    with pytest.raises(typer.Exit) as ended:
        render.watched(show, again=True)
    return out.getvalue(), ended.value.exit_code


def test_without_it_a_command_shows_once() -> None:
    calls: list[int] = []
    render.watched(lambda: calls.append(1), again=False)
    assert calls == [1]


@pytest.mark.parametrize("terminal", [True, False])
def test_it_goes_on_when_the_daemon_does_not_answer(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    calls: list[int] = []

    def show() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Unknown("the daemon did not answer")
        render.console.print(f"call {len(calls)}")
        if len(calls) == 3:
            raise typer.Exit(1)  # as status does with an alert

    text, status = watching(monkeypatch, show, 4, terminal=terminal)
    assert status == 0 and len(calls) == 4
    assert "call 1" in text and "did not answer" in text and "call 3" in text and "call 4" in text


def test_what_does_not_fit_the_screen_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def show() -> None:
        for line in range(30):
            render.console.print(f"line {line}")

    text, _ = watching(monkeypatch, show, 1, terminal=True)
    assert "line 6" in text and "line 7" not in text and "more lines" in text
