"""The command line as a whole: its messages when it is used wrongly."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from multiverse.cli.commands import EXIT_CODES, INTERRUPTED, NO_ANSWER, NOT_DONE, SUPERSEDED
from multiverse.cli.main import main
from multiverse.core.errors import (
    Broken,
    Exhausted,
    Gone,
    MultiverseError,
    Refused,
    Superseded,
    Unknown,
    Unreachable,
)


def run_wrongly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """Run the command line. Returns its exit status and what it wrote to stderr, on one line."""
    monkeypatch.setattr(sys, "argv", ["multiverse", *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest's handlers stay in place
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
def test_wrong_usage_is_reported_with_the_command_that_shows_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], what: str, command: str
) -> None:
    status, text = run_wrongly(capsys, monkeypatch, *words)
    assert status == 2 and what in text
    assert f"Usage: {command} " in text and f"Try '{command} -h' for help." in text


@pytest.mark.parametrize("interrupt", ["SIG_IGN", "default_int_handler"])
def test_sigterm_ends_a_command_without_a_traceback_also_where_ctrl_c_is_ignored(interrupt: str) -> None:
    """A shell lets what a script starts with `&` ignore SIGINT."""
    script = f"""
import signal, time
from multiverse.cli import main
signal.signal(signal.SIGINT, signal.{interrupt})
main.for_arguments = lambda _: lambda **_: (print("begun", flush=True), time.sleep(60))
main.main()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdout=pipe, stderr=pipe, text=True) as command:
        assert command.stdout and command.stdout.readline() == "begun\n"
        command.terminate()
        _, said = command.communicate()
    assert (command.returncode, said) == (INTERRUPTED, "")


def test_a_signal_that_comes_while_an_interrupted_command_ends_changes_nothing() -> None:
    script = """
import atexit, signal
import typer
from multiverse.cli import main
app = typer.Typer()
app.command()(lambda: signal.raise_signal(signal.SIGINT))
main.for_arguments = lambda _: app
atexit.register(signal.raise_signal, signal.SIGINT)
main.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (INTERRUPTED, "")


def test_a_daemon_that_another_one_supersedes_ends_with_a_status_after_which_it_is_not_started_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def superseded(**_: object) -> None:
        raise Superseded("another controller runs on n2", hint="keep this one ended")

    monkeypatch.setattr("multiverse.cli.main.for_arguments", lambda _: superseded)
    status, text = run_wrongly(capsys, monkeypatch, "daemon")
    assert status == SUPERSEDED and text == "multiverse: another controller runs on n2 next: keep this one ended"
    unit = (files("multiverse") / "site/templates/multiverse.service").read_text()
    assert f"RestartPreventExitStatus={SUPERSEDED}\n" in unit


def test_a_command_is_imported_only_if_it_may_be_meant() -> None:
    script = "import sys, multiverse.cli.commands as c; c.for_arguments(sys.argv[1:]); print(*sys.modules)"
    for given, named in ((["jobs"], True), ([], False), (["-h"], False), (["unknown"], False)):
        loaded = subprocess.run([sys.executable, "-c", script, *given], stdout=subprocess.PIPE, check=True, text=True)
        assert ("multiverse.cli.jobs" in loaded.stdout.split()) is named
        assert "multiverse_lab.cli.soak" not in loaded.stdout.split()


def test_without_a_command_all_commands_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, text = run_wrongly(capsys, monkeypatch)
    assert status == 2 and text.startswith("Usage: multiverse ") and "Commands: jobs" in text


def test_an_operator_error_has_a_next_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MULTIVERSE_SOCKET", str(tmp_path / "none"))
    monkeypatch.delenv("MULTIVERSE_LAB", raising=False)
    status, text = run_wrongly(capsys, monkeypatch, "jobs")
    assert status == NO_ANSWER and text.startswith("multiverse: ") and " next: " in text


def test_each_kind_of_error_has_the_exit_status_that_is_documented(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {
        Refused: NOT_DONE, Gone: NOT_DONE, Broken: NOT_DONE, Exhausted: NOT_DONE, Unknown: NO_ANSWER,
        Unreachable: NO_ANSWER, Superseded: SUPERSEDED,
    }  # fmt: skip
    for kind, expected in kinds.items():

        def failing(kind: type[MultiverseError] = kind, **_: object) -> None:
            raise kind("it failed", hint="do that")

        monkeypatch.setattr("multiverse.cli.main.for_arguments", lambda _, failing=failing: failing)
        assert run_wrongly(capsys, monkeypatch, "jobs")[0] == expected and expected in EXIT_CODES


def test_an_interruption_has_an_exit_status_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("multiverse.cli.main.for_arguments", lambda _: interrupted)
    assert run_wrongly(capsys, monkeypatch, "jobs")[0] == 130
