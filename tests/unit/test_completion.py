"""Completion: the scripts complete what the commands take, and start no process for it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from multiverse.cli.completion import Shell, script
from multiverse.cli.tree import tree


def completed(*words: str) -> list[str]:
    """What bash proposes for the last word."""
    lines = [
        script(Shell.BASH, tree()),
        f"COMP_WORDS=(multiverse {' '.join(repr(word) for word in words)})",
        f"COMP_CWORD={len(words)}",
        "PATH=/nowhere; _multiverse",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(["bash", "--norc", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_commands_and_their_commands_are_completed() -> None:
    assert completed("expl") == ["explain"]
    assert completed("hosts", "dr") == ["drain"]
    assert set(completed("hosts", "")) >= {"add", "drain", "resume", "remove", "--json"}
    assert completed("nothing", "ho") == ["hosts"], "a word that is no command leads nowhere"


def test_options_are_completed_behind_other_words() -> None:
    assert completed("hosts", "drain", "n1", "--rea") == ["--reason"]
    assert completed("explain", "7", "--js") == ["--json"]
    assert completed("jobs", "--nothing") == []


def test_every_command_and_option_is_in_every_script() -> None:
    nodes = tree().all()
    assert len(nodes) > 40
    for shell in Shell:
        text = script(shell, tree())
        for node in nodes:
            for word in (*node.words, *node.options):
                assert (word.lstrip("-") if shell is Shell.FISH else word) in text, (shell, word)


@pytest.mark.parametrize(("shell", "check"), [(Shell.ZSH, ["zsh", "-n"]), (Shell.FISH, ["fish", "--no-execute"])])
def test_other_shells_accept_their_scripts(shell: Shell, check: list[str]) -> None:
    if not shutil.which(check[0]):
        pytest.skip(f"{check[0]} is not installed")
    subprocess.run([*check, "/dev/stdin"], input=script(shell), text=True, check=True)
