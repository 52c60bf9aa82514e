"""What a site installs has nothing of the laboratory in it, and the laboratory adds its commands."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email import message_from_bytes
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import multiverse
from multiverse.cli import commands
from multiverse.cli.commands import COMMANDS, build, for_arguments, modules, outline

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """The wheels of both distributions, by name."""
    where = tmp_path_factory.mktemp("wheels")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index",
         "--no-build-isolation", "--wheel-dir", where, ROOT, ROOT / "src" / "multiverse_lab"],
        check=True,
    )  # fmt: skip
    return {path.name.partition("-")[0]: zipfile.ZipFile(path) for path in where.iterdir()}


def required(wheel: zipfile.ZipFile) -> list[str]:
    """What a wheel requires, without extras."""
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    found = message_from_bytes(wheel.read(name)).get_all("Requires-Dist", [])
    return [text for text in found if "extra ==" not in text]


def test_the_product_has_nothing_of_the_laboratory(wheels: dict[str, zipfile.ZipFile]) -> None:
    names = wheels["multiverse"].namelist()
    assert "multiverse/service/daemon.py" in names and "multiverse/web/index.html" in names
    assert not [name for name in names if "multiverse_lab" in name or "multiverse-bench" in name]
    assert not [text for text in required(wheels["multiverse"]) if "solipsism" in text or "lab" in text]


def test_the_laboratory_has_only_itself_and_requires_the_product(wheels: dict[str, zipfile.ZipFile]) -> None:
    names = wheels["multiverse_lab"].namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"multiverse_lab"}
    for name in ("lab/templates/slurm.conf", "bench/kernels/bfs.c", "simulation/run.py", "cli/lab.py"):
        assert f"multiverse_lab/{name}" in names
    assert f"multiverse=={multiverse.__version__}" in required(wheels["multiverse_lab"])


def test_the_laboratory_adds_its_commands_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    added = modules().keys() - COMMANDS.keys()
    assert added == {"lab", "bench", "simulate", "demo", "soak"}
    assert list(modules())[: len(COMMANDS)] == list(COMMANDS), "after those of the product, in the help"
    monkeypatch.setattr(commands, "entry_points", lambda group: [])
    assert modules().keys() == COMMANDS.keys()
    assert len(build().registered_groups + build().registered_commands) == len(COMMANDS)
    assert len(for_arguments(["lab", "up"]).registered_commands) == len(COMMANDS)


def test_a_distribution_does_not_replace_a_command_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    other = EntryPoint("jobs", "elsewhere", commands.GROUP)
    monkeypatch.setattr(commands, "entry_points", lambda group: [other])
    assert modules()["jobs"] == "multiverse.cli.jobs"


def test_the_outline_of_the_help_says_of_each_command_what_its_own_help_says() -> None:
    whole, short = (get_command(one).commands for one in (build(), outline()))  # type: ignore[attr-defined]
    assert list(short) == list(modules())
    assert {name: one.help for name, one in short.items()} == {name: one.help for name, one in whole.items()}


def test_help_imports_no_command_and_no_library_of_the_daemon() -> None:
    script = (
        "import sys; from multiverse.cli.main import main; sys.argv = ['multiverse', '--help']\n"
        "try: main()\nexcept SystemExit: print(*sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    loaded = {*said.splitlines()[-1].split()}
    assert "explain      Say why a job waits" in said
    assert not loaded & {"multiverse.cli.jobs", "multiverse.config", "pydantic", "sqlalchemy", "httpx", "fastapi"}


def test_the_version_is_shown() -> None:
    assert CliRunner().invoke(outline(), ["--version"]).output == f"multiverse {multiverse.__version__}\n"
