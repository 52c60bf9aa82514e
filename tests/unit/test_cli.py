"""The command line as a whole: what it says when it is used wrongly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from multiverse.cli.main import main


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """The exit status, and what it wrote to stderr."""
    monkeypatch.setattr(sys, "argv", ["multiverse", *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the tests' own stay as they are
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "what", "command"),
    [
        (["nonsense"], "No such command 'nonsense'.", "multiverse"),
        (["jobs", "--nope"], "No such option: --nope", "multiverse jobs"),
        (["bench", "burst", "--every", "0"], "greater than or equal to 0.1", "multiverse bench burst"),
        (["timeline"], "Missing argument", "multiverse timeline"),
    ],
)
def test_a_wrong_command_line_is_a_sentence_and_names_the_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], what: str, command: str
) -> None:
    status, text = said(capsys, monkeypatch, *words)
    assert status == 2 and what in text
    assert f"Usage: {command} " in text and f"Try '{command} -h' for help." in text


def test_without_a_word_it_says_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, text = said(capsys, monkeypatch)
    assert status == 2 and text.startswith("Usage: multiverse ") and "Commands: jobs" in text


def test_an_error_of_ours_ends_with_the_next_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MULTIVERSE_SOCKET", str(tmp_path / "none"))
    monkeypatch.delenv("MULTIVERSE_LAB", raising=False)
    status, text = said(capsys, monkeypatch, "jobs")
    assert status == 1 and text.startswith("multiverse: ") and " next: " in text
