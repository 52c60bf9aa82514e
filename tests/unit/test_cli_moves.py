"""What the command line says of VMs that move, and of how a move has ended."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import pytest

from multiverse.api import VmView
from multiverse.cli import render
from multiverse.cli.commands import build
from multiverse.client import Client
from multiverse.core.errors import Refused
from tests.unit.test_top import vm

MOVES = replace(vm("v1", "n1", "moving"), other_host="n2")
BEGUN = {"vm": "v1", "job_id": "1", "host": "n1", "target": "n2"}


def said(capsys: pytest.CaptureFixture[str], words: str, *shown: VmView | None) -> str:
    """What a command prints, if the VM looks like this one time after the other."""
    answers = iter([[asdict(one)] if one else [] for one in shown])

    def answer(_: Client) -> list[dict[str, Any]]:
        return next(answers)

    with (
        mock.patch.object(Client, "vms", answer),
        mock.patch.object(Client, "move", lambda *_: BEGUN),
        mock.patch("time.sleep"),
        mock.patch.object(render.console, "_width", 80),
    ):
        build()(words.split(), prog_name="multiverse", standalone_mode=False)
    return capsys.readouterr().out


@pytest.mark.parametrize(("state", "places"), [("moving", "n1 → n2"), ("settling", "n1, n2"), ("lost", "n1, n2")])
def test_both_hosts_of_the_only_vm_are_shown(capsys: pytest.CaptureFixture[str], state: str, places: str) -> None:
    assert f" {places} " in said(capsys, "vms", replace(MOVES, state=state))


def test_who_moves_a_vm_is_told_when_it_has_moved(capsys: pytest.CaptureFixture[str]) -> None:
    settling = replace(MOVES, state="settling", host="n2", other_host="n1")
    for last in (vm("v1", "n2"), settling):
        text = said(capsys, "move 1", MOVES, MOVES, last)
        assert "VM v1 of job 1 moves from n1 to n2." in text and "It has moved, in " in text


@pytest.mark.parametrize(
    ("last", "how"),
    [
        (vm("v1", "n1"), "VM v1 did not move"),
        (replace(MOVES, state="settling"), "VM v1 did not move; n1 and n2 settle which of them keeps it"),
        (None, "VM v1 has ended meanwhile"),
    ],
)
def test_who_moves_a_vm_in_vain_is_told_how_that_ended(
    capsys: pytest.CaptureFixture[str], last: VmView | None, how: str
) -> None:
    with pytest.raises(Refused) as refused:
        said(capsys, "move 1", MOVES, last)
    assert (refused.value.message, refused.value.hint) == (how, "multiverse timeline 1 says why")
