"""What the command line prints for the documents in api_documents.json: the same as recorded in cli_output.txt.

To write the record anew after an intended change, run `python -m tests.unit.test_cli_output` in the repository's root.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import urlencode

import pytest

from multiverse.cli import render
from multiverse.cli.commands import build
from multiverse.client import Client
from multiverse.core.model.reason import moment

DOCUMENTS = json.loads(Path(__file__).with_name("api_documents.json").read_text())
RECORDED = Path(__file__).with_name("cli_output.txt")

NOW = 1000.0  # when the documents were made, in Unix time

COMMANDS = (
    "status",
    "status --json",
    "repair --dry-run",
    "jobs",
    "jobs 8_1 --all",
    "jobs --json",
    "vms",
    "vms --json",
    "hosts",
    "hosts --json",
    "template list",
    "template list --json",
    "timeline 7",
    "timeline 7 --events",
    "timeline 7 --json",
    "audit identity",
    "audit identity --json",
)


def answer(_client: Client, method: str, path: str, *, params: dict[str, str] | None = None) -> Any:
    """The recorded document for a question, whatever its other parameters."""
    job = (params or {}).get("job")
    asked = path + (f"?{urlencode({'job': job})}" if job else "")
    return SimpleNamespace(json=lambda: json.loads(DOCUMENTS[f"{method} {asked} null"]["document"]))


def printed(command: str, width: int = 160) -> str:
    out = io.StringIO()
    with (
        mock.patch.object(Client, "_ask", answer),
        mock.patch.object(render.console, "_width", width),
        mock.patch.object(render.time, "time", lambda: NOW),
        mock.patch.object(render, "moment", lambda at: moment(at)[:19]),  # in UTC, wherever this runs
        contextlib.redirect_stdout(out),
    ):
        status = build()(command.split(), prog_name="multiverse", standalone_mode=False)
    lines = "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
    return f"$ multiverse {command}\n{lines}exit status {status or 0}\n\n"


def recorded() -> dict[str, str]:
    blocks = RECORDED.read_text().split("$ multiverse ")[1:]
    return {block.splitlines()[0]: f"$ multiverse {block}" for block in blocks}


def test_hosts_that_lack_an_image_of_the_settings_are_named_together_with_the_next_step() -> None:
    hosts = json.loads(DOCUMENTS["GET /hosts null"]["document"])
    lacking = [host | {"name": f"n{number}", "lacks": ["stock"]} for number, host in enumerate(hosts[:2])]
    document = {"GET /hosts null": {"document": json.dumps([*hosts, *lacking])}}
    assert "no image" not in printed("hosts")
    with mock.patch.dict(DOCUMENTS, document):
        text = " ".join(printed("hosts").split())
    assert "n[0-1]: no image stock, so no job of that image starts there" in text
    assert "multiverse image push stock n[0-1]" in text and "multiverse image build stock" in text


@pytest.mark.parametrize("command", [one for one in COMMANDS if "--json" not in one])
def test_every_screen_fits_80_columns_and_cuts_no_reason(command: str) -> None:
    text = printed(command, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text or command.startswith("template")


def test_jobs_with_the_same_reason_are_named_together_where_there_is_no_column_for_it() -> None:
    narrow, wide = printed("jobs", 80), printed("jobs", 140)
    assert "REASON" in wide and "REASON" not in narrow
    for reason in ("no room", "it is odd"):
        assert reason in wide and reason in narrow


def test_the_hosts_fit_a_terminal_of_80_columns() -> None:
    text = printed("hosts", 80)
    assert max(map(len, text.splitlines())) <= 80
    table = text.split("\n\n")[1]
    assert {"HOST", "STATE", "VMS", "JOBS", "CPUS", "MEMORY"} <= set(table.split()) and "FEATURES" not in table
    said = "DISK, VMS TAKE, TEMPLATES, AVAILABLE and NETWORK: on a terminal of 140 columns, or with --json."
    assert said in " ".join(text.split()) and "on a terminal" not in printed("hosts", 140)
    assert "draining" in table and "a fan" in text and "multiverse repair h2 --fenced" in " ".join(text.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_the_same_as_before(command: str) -> None:
    assert printed(command) == recorded()[command]


if __name__ == "__main__":
    RECORDED.write_text("".join(printed(command) for command in COMMANDS))
