"""`multiverse config`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from multiverse.cli import render, settings
from multiverse.config import load
from multiverse.core.errors import Refused
from multiverse.site import setting_files

RUNNER = CliRunner()


def run(monkeypatch: pytest.MonkeyPatch, *words: str, width: int = 200) -> tuple[int, str]:
    monkeypatch.setattr(render, "console", Console(width=width, highlight=False, soft_wrap=False))
    app = typer.Typer()
    app.add_typer(settings.config_app, name="config")
    done = RUNNER.invoke(app, ["config", *words])
    if isinstance(done.exception, Refused):
        raise done.exception
    return done.exit_code, done.output


def test_the_examples_that_are_printed_pass_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting_files, "list_images", lambda _: [])  # a demonstration may have left others here
    for options in ([], ["--all"]):
        path = tmp_path / "m.toml"
        path.write_text(run(monkeypatch, "example", *options)[1])
        assert run(monkeypatch, "check", str(path)) == (0, f"{path}: no mistakes\n")
        assert load(path).host.memory >= load(path).qemu.base_memory


def test_the_check_shows_each_mistake_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.toml"
    path.write_text("[host]\ncore = 4\nmemory = 'x'\n")
    status, printed = run(monkeypatch, "check", str(path), width=40)
    assert status == 1
    assert f"{path}:2: host.core: no such key, did you mean cores?\n" in printed, "a path and a line are not wrapped"
    assert f'{path}:3: host.memory: must be a whole number, not "x"\n' in printed and "2 mistakes" in printed


def test_a_file_that_is_not_there_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="cannot read") as refused:
        run(monkeypatch, "check", str(tmp_path / "m.toml"))
    assert "--config" not in refused.value.hint and f"multiverse config example > {tmp_path}" in refused.value.hint


def test_what_was_changed_is_shown_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.toml"
    path.write_text("[host]\ncores = 4\n")
    status, printed = run(monkeypatch, "show", "host", "--changed", "-c", str(path))
    rows = [line.split() for line in printed.splitlines() if "host" in line]
    assert (status, rows) == (0, [["host.cores", "4", f"{path}:2"]])
    shown = json.loads(run(monkeypatch, "show", "host.cores", "--json", "-c", str(path))[1])
    assert shown == [{"key": "host.cores", "value": 4, "source": "file", "file": str(path), "line": 2}]
    (default,) = json.loads(run(monkeypatch, "show", "slurm.conf", "--json", "-c", str(path))[1])
    assert (default["value"], default["source"], default["line"]) == ("/etc/slurm/slurm.conf", "default", None)


def test_a_key_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.toml"
    path.write_text("")
    with pytest.raises(Refused, match=r"there is no key host.core"):
        run(monkeypatch, "show", "host.core", "-c", str(path))
    assert "All values are defaults" in run(monkeypatch, "show", "host", "--changed", "-c", str(path))[1]
