"""Accounting limits, from output of 22.05.8 that was captured while a job of ada and a job of bob ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multiverse.drivers.slurm.reading.accounting_limits import AccountingLimits, licences
from multiverse.drivers.slurm.site import conf

ASSOC_MGR = (Path(__file__).parent / "slurm_data" / "assoc_mgr-22.05.8.txt").read_text()
LICENSES = "LicenseName=matlab\n    Total=3 Used=1 Free=2 Reserved=0 Remote=no\n"
ADA: dict[str, Any] = {
    "account": "physics",
    "association_id": 5,
    "qos": "normal",
    "user_id": 61801,
    "tres_req_str": "cpu=1,mem=1.50G,node=1,billing=1",
}
BOB = ADA | {"association_id": 6, "user_id": 61802, "qos": "tight"}
OF_ACCOUNT = {"AssocGrpCpuLimit: account physics": 1, "AssocGrpMemLimit: account physics": 1536}


def test_a_limit_allows_what_does_not_run_yet() -> None:
    assert AccountingLimits((), ASSOC_MGR, LICENSES).left == {
        "AssocGrpCpuLimit: account physics": 5 - 2,
        "AssocGrpMemLimit: account physics": 4096 - 200,
        "AssocGrpCpuLimit: user ada in account physics": 3 - 1,
        "AssocMaxJobsLimit: user ada in account physics": 2 - 1,
        "QOSGrpJobsLimit: QOS tight": 4 - 1,
        "QOSMaxJobsPerUserLimit: QOS tight, uid 61802": 1 - 1,
        "QOSMaxCpuPerUserLimit: QOS tight, uid 61802": 2 - 1,
        "Licenses: matlab": 2,
    }


def test_a_job_uses_its_own_limits_and_those_of_parent_accounts() -> None:
    limits = AccountingLimits((), ASSOC_MGR)
    own = {"AssocMaxJobsLimit: user ada in account physics": 1, "AssocGrpCpuLimit: user ada in account physics": 1}
    assert dict(limits.uses(ADA)) == OF_ACCOUNT | own
    tight = {
        "QOSGrpJobsLimit: QOS tight": 1,
        "QOSMaxJobsPerUserLimit: QOS tight, uid 61802": 1,
        "QOSMaxCpuPerUserLimit: QOS tight, uid 61802": 1,
    }
    assert dict(limits.uses(BOB)) == OF_ACCOUNT | tight


def test_a_limit_of_the_qos_replaces_that_of_the_association() -> None:
    """The QOS's MaxJobsPerUser replaces ada's MaxJobs; its GrpTRES replaces those of ada and of the account."""
    shown = ASSOC_MGR.replace("      61802\n", "      ada(61801)\n").replace(
        "QOS=tight(2)", "QOS=tight(2) GrpTRES=cpu=9(0)"
    )
    limits = AccountingLimits((), shown)
    names = {name.partition(":")[0] for name, _ in limits.uses(ADA | {"qos": "tight"})}
    assert names == {
        *("QOSGrpJobsLimit", "QOSGrpCpuLimit", "QOSMaxJobsPerUserLimit", "QOSMaxCpuPerUserLimit"),
        "AssocGrpMemLimit",
    }


def test_a_job_without_limits_uses_none() -> None:
    assert AccountingLimits().uses(ADA | {"licenses": "matlab", "array_max_tasks": 0}) == ()
    assert AccountingLimits((), ASSOC_MGR).uses(ADA | {"association_id": 99, "qos": "unheard-of"}) == ()


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("", {}),
        ("matlab", {"matlab": 1}),
        ("matlab:2,fluent@server=3", {"matlab": 2, "fluent@server": 3}),
        ("matlab|fluent", {}),
        ("matlab:2,vm:1", {"matlab": 2}),  # the gate's own
    ],
)
def test_requested_licences_are_counted(text: str, asked: dict[str, int]) -> None:
    assert licences({"licenses": text}, "vm") == asked
    known = {f"Licenses: {name}": count for name, count in asked.items() if name == "matlab"}
    assert dict(AccountingLimits((), "", LICENSES, "vm").uses({"licenses": text})) == known


def test_the_limit_of_an_array_is_counted() -> None:
    records = [
        {"array_job_id": 7, "array_max_tasks": 3, "job_state": state}
        for state in ("PENDING", "RUNNING", "SUSPENDED", "COMPLETED")
    ]
    assert AccountingLimits(records).left == {"JobArrayTaskLimit: 7": 1}
    assert AccountingLimits(records).uses(records[0]) == (("JobArrayTaskLimit: 7", 1),)


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("", False),
        ("AccountingStorageEnforce=associations", False),
        ("AccountingStorageEnforce=associations, limits,qos", True),
        ("accountingstorageenforce=safe", True),
    ],
)
def test_enforcement_of_limits_is_read_from_slurm_conf(line: str, kept: bool) -> None:
    assert conf.limits_are_kept(f"ClusterName=x\n{line}\n") is kept
