"""`multiverse saved` on narrow and wide terminals."""

from __future__ import annotations

from dataclasses import asdict, replace
from unittest import mock

import pytest

from multiverse.api import SavedView
from multiverse.cli import render, saved

STORAGE, COPY = "0f27d96ce8f8cbfb", "77aa12cd9012fe56"
ONE = SavedView(
    "mvab12c-1-1", "1234567_89", 1000, False, "stored", 0.0, "mvab12c-10001", ["mvab12c-10001", "mvab12c-10002"], 0.1,
    4711 << 20, STORAGE, COPY, False, True, "its user asked for it, and so it waits until somebody resumes it",
)  # fmt: skip
KEPT = replace(ONE, job_id="8", storage="", copy="", in_memory=True, held=False, vms=["mvab12c-7"], reason="no room")


class Daemon:
    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def saved(self) -> list[dict[str, object]]:
        return [asdict(ONE), asdict(KEPT)]


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("terminal", [True, False])
def test_names_are_never_split_and_all_is_said(capsys: pytest.CaptureFixture[str], width: int, terminal: bool) -> None:
    with (
        mock.patch.object(saved, "asker", lambda _: Daemon()),
        mock.patch.object(render.console, "_width", width),
        mock.patch.object(render.console, "_force_terminal", terminal),
    ):
        saved.saved()
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    assert {"1234567_89", "stored", "4711", STORAGE, COPY, "yes", "memory"} <= set(text.replace(";", " ").split())
    words = " ".join(text.split())
    if width == 80:
        assert f"1234567_89: {', '.join(ONE.vms)}; copy in {COPY}; {ONE.reason}" in words
        assert f"8: mvab12c-7; {KEPT.reason}" in words
    else:
        assert "REASON" in text and "mvab12c-7" in text and KEPT.reason in words
