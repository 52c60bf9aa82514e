"""Completion: the shells' scripts ask the program, which answers with commands and options."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from multiverse.cli.commands import Shell, script


def completed(*words: str) -> list[str]:
    """What bash proposes for the last word."""
    lines = [
        script(Shell.BASH),
        f"COMP_WORDS=(multiverse {' '.join(repr(word) for word in words)})",
        f"COMP_CWORD={len(words)}",
        f"PATH={Path(sys.executable).parent}:$PATH; _multiverse_completion multiverse",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(["bash", "--norc", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_commands_and_their_commands_are_completed() -> None:
    assert completed("expl") == ["explain"]
    assert completed("hosts", "dr") == ["drain"]
    assert set(completed("hosts", "")) >= {"add", "drain", "resume", "remove"}
    assert completed("nothing", "ho") == ["hosts"], "a word that is no command leads nowhere"


def test_options_are_completed_behind_other_words() -> None:
    assert completed("hosts", "drain", "n1", "--rea") == ["--reason"]
    assert completed("explain", "7", "--js") == ["--json"]
    assert completed("jobs", "--nothing") == []


@pytest.mark.parametrize(("shell", "check"), [(Shell.ZSH, ["zsh", "-n"]), (Shell.FISH, ["fish", "--no-execute"])])
def test_other_shells_accept_their_scripts(shell: Shell, check: list[str]) -> None:
    if not shutil.which(check[0]):
        pytest.skip(f"{check[0]} is not installed")
    subprocess.run([*check, "/dev/stdin"], input=script(shell), text=True, check=True)
