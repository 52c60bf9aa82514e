"""Which VMs of one host hear each other, tested with taps without VMs in a network namespace of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import permutations
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="taps need root")]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """See `group_taps`."""
    directory = str(tmp_path_factory.mktemp("groups"))
    argv = ["unshare", "--net", "--mount", sys.executable, "-m", "tests.integration.group_taps", directory]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def among(*vms: int) -> set[str]:
    """What is heard among VMs of one group, also what is for all."""
    pairs = list(permutations(vms, 2))
    return {f"{one}>{two}" for one, two in pairs} | {f"{one}>all {two}" for one, two in pairs}


def test_only_vms_of_one_user_hear_each_other_and_a_spare_hears_nobody(seen: dict[str, Any]) -> None:
    assert set(seen["at first"]) == among(1, 2)


def test_a_vm_sends_to_vms_of_its_user_on_other_hosts_once_its_host_is_told(seen: dict[str, Any]) -> None:
    assert seen["regrouped"] == [], "its own VMs are as they were started"
    assert set(seen["told"]) == among(1, 2) | {"1>11", "2>11", "3>12"}


def test_a_spare_reaches_the_vms_of_the_user_that_it_is_given_to(seen: dict[str, Any]) -> None:
    assert set(seen["taken"]) == among(1, 2, 4) | {"1>11", "2>11", "4>11", "3>12"}


def test_the_rules_outlive_the_process_and_a_flush(seen: dict[str, Any]) -> None:
    assert seen["restarted"] == seen["after a flush"] == seen["taken"]


def test_a_vm_whose_group_is_told_anew_changes_it_and_what_is_gone_is_reached_no_more(seen: dict[str, Any]) -> None:
    assert seen["another user's"] == ["mvg-3"]
    assert set(seen["changed"]) == among(1, 2, 3, 4), "neither 11, which is gone, nor 12, of the user that 3 had"
    assert seen["told again"] == [[], True]


def test_a_host_that_is_told_of_nobody_keeps_what_its_vms_were_started_with(seen: dict[str, Any]) -> None:
    assert set(seen["forgotten"]) == among(1, 2, 4)
    assert seen["files"] == [".lock"]


def test_there_are_no_elements_for_pairs_and_none_is_left(seen: dict[str, Any]) -> None:
    one_each = dict.fromkeys(("guests", "addresses", "owners", "groups", "members"), 4)
    assert seen["counts"] == one_each | {"elsewhere": 2, "pairs": 0, "peers": 0}
    assert set(seen["at the end"].values()) == {0}
