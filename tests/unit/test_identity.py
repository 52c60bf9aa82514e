"""The audit of identities: what two VMs may not share, and what counts as a problem."""

from __future__ import annotations

from typing import Any

import pytest

from multiverse.service.convert import UNIQUE, audit
from tests.unit.rows import rows

NOBODY = rows()


def guest(name: str, **other: Any) -> dict[str, str | int]:
    return {**{key: f"{key} of {name}" for key in UNIQUE}, "hostname": name, "skew": 0, **other}


def said(**of_second: Any) -> dict[str, dict[str, str | int]]:
    return {"mva-1": guest("mva-1"), "mva-2": guest("mva-2", **of_second)}


def test_vms_that_share_nothing_are_distinct() -> None:
    found = audit(NOBODY, said(skew=-999))
    assert found.distinct and [vm.problems for vm in found.vms] == [(), ()]
    assert audit(NOBODY, {"mva-1": guest("mva-1", host_keys=""), "mva-2": guest("mva-2", host_keys="")}).distinct


@pytest.mark.parametrize("key", sorted(set(UNIQUE) - {"hostname"}))
def test_what_two_vms_share_is_named_for_both(key: str) -> None:
    found = audit(NOBODY, said(**{key: f"{key} of mva-1"}))
    assert not found.distinct
    assert [vm.problems for vm in found.vms] == [
        (f"the same {UNIQUE[key]} as mva-2: {key} of mva-1",), (f"the same {UNIQUE[key]} as mva-1: {key} of mva-1",)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"skew": 1000}, "its clock is 1000 ms off"),
        ({"skew": -86_400_000}, "its clock is -86400000 ms off"),
        ({"skew": "no number"}, "its clock is no number ms off"),
        ({"boot_id": ""}, "it did not report its boot id"),
        ({"hostname": "other"}, "its host name is other instead of mva-2"),
        ({"error": "it sleeps"}, "it did not answer: it sleeps"),
    ],
)
def test_a_vm_with_a_problem_is_named_and_the_audit_fails(facts: dict[str, Any], problem: str) -> None:
    found = audit(NOBODY, said(**facts))
    assert not found.distinct and found.vms[0].problems == () and problem in found.vms[1].problems


def test_a_single_vm_proves_nothing() -> None:
    assert not audit(NOBODY, {"mva-1": guest("mva-1")}).distinct
    assert not audit(NOBODY, {}).distinct
