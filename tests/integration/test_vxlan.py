"""The VXLAN of hosts that a router separates, without VMs: what reaches whom, and what cannot be forged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """See `vxlan_hosts`."""
    directory = str(tmp_path_factory.mktemp("vxlan"))
    argv = ["unshare", "--net", "--mount", sys.executable, "-m", "tests.integration.vxlan_hosts", directory]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_guests_of_two_hosts_reach_each_other_with_packets_of_the_full_size(seen: dict[str, Any]) -> None:
    assert seen["full size"] and seen["transfer"]
    assert not seen["too large"]


def test_a_frame_for_an_unknown_address_leaves_no_host(seen: dict[str, Any]) -> None:
    assert (seen["unknown address"], seen["sent for it"]) == (False, 0)


def test_nobody_but_the_hosts_own_bridges_can_send_to_guests(seen: dict[str, Any]) -> None:
    """Neither another machine, nor any user of a host, nor a guest whose address its host translates."""
    assert seen["forged"] == {
        "stranger": False,
        "user": False,
        "root": False,
        "guest": False,
        "user without rule": True,
        "guest without rule": True,
        "stranger without rule": True,
    }


def test_entries_end_with_their_last_owner(seen: dict[str, Any]) -> None:
    assert seen["entries"] == {
        "fdb": ["02:00:00:00:00:02 dst 10.9.2.2"],
        "neighbours": ["10.77.0.2 lladdr 02:00:00:00:00:02"],
        "machines": ["10.9.2.2"],
    }
    assert seen["a shared entry stays"]
    assert seen["entries at the end"] == {"fdb": [], "neighbours": [], "machines": []}
    assert not seen["reached at the end"]


NOTHING: dict[str, list[str]] = {"fdb": [], "neighbours": [], "machines": []}


def test_a_vm_that_has_moved_is_found_by_all_where_it_is_and_nothing_of_its_old_place_stays(
    seen: dict[str, Any],
) -> None:
    """Also after a restart of the agent, and when those that knew it at its old place have ended."""
    assert seen["moved"] == {
        "where": {
            "fdb": ["02:00:00:00:00:02 dst 10.9.3.2"],
            "neighbours": ["10.77.0.2 lladdr 02:00:00:00:00:02"],
            "machines": ["10.9.3.2"],
        },
        "restarted": True,
        "one of the job has ended": True,
        "ended": [NOTHING, []],
    }


def test_a_change_that_failed_is_made_when_it_is_told_again(seen: dict[str, Any]) -> None:
    assert seen["failed"] == {"failed": NOTHING, "again": seen["entries"]}


def test_what_was_removed_is_restored_from_the_records(seen: dict[str, Any]) -> None:
    assert seen["after a flush"] and seen["dropped after a flush"]
    assert seen["restored"] and seen["not kept"]
    assert not seen["left"]


def test_what_does_not_fit_the_machine_is_refused(seen: dict[str, Any]) -> None:
    assert "10.9.9.9" in seen["address"]
    assert "1460 bytes" in seen["mtu"] and "MTU 1500" in seen["mtu"]
    assert "other with the id 9, has the port 14790" in seen["collision"]


def test_leases_of_a_node_share_its_vxlan_until_the_last_one_ends(seen: dict[str, Any]) -> None:
    found = seen["leases"]
    assert found["both"] == ["mvtest0-1", "mvtest0-2"] and found["reached"]
    assert found["other"], "what is the other one's stays"
    assert not found["left"]
    assert "the controller's machine" in found["refused"]


def test_hosts_may_be_connected_by_ipv6(seen: dict[str, Any]) -> None:
    assert seen["IPv6"] == {
        "passes": True,
        "transfer": True,
        "user": False,
        "stranger": False,
        "by IPv4": False,
        "user without rule": True,
        "entries at the end": False,
    }
