"""Records of jobs and states of nodes, captured from 22.05.8, become values of the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.job import Job, JobRef, JobState, NodeState
from multiverse.drivers.slurm.reading import parse
from multiverse.drivers.slurm.reading.accounting_limits import AccountingLimits
from multiverse.drivers.slurm.site import conf
from tests.unit.slurm_records import jobs_of

DATA = Path(__file__).parent / "slurm_data"
JOBS: list[dict[str, Any]] = json.loads((DATA / "squeue-22.05.8.json").read_text())["jobs"]
NAMES = parse.SiteNames(site="ab12c", partition="vm", gate_feature="mvgate", licence="vm")
NOW = 1795254668.0  # when they were captured


def parsed(records: list[dict[str, Any]], now: float = NOW) -> dict[str, Job]:
    return jobs_of(records, NAMES, now)


def test_a_request_names_the_account_if_accounts_have_own_templates() -> None:
    record = by_name(JOBS[0]["name"], account="physics")
    assert [job.request and job.request.account for job in parsed([record]).values()] == [""]
    (job,) = jobs_of([record], replace(NAMES, per_account=True), NOW).values()
    assert job.request is not None and job.request.account == "physics"


def by_name(name: str, **changes: Any) -> dict[str, Any]:
    """A record of the table: it has a description only in place of the reason."""
    return next(record for record in JOBS if record["name"] == name) | {"state_description": ""} | changes


def one(record: dict[str, Any], now: float = NOW) -> Job:
    (job,) = parsed([record], now).values()
    return job


def test_captured_jobs_are_understood() -> None:
    jobs = parsed(JOBS)
    assert sorted(jobs, key=lambda job_id: [int(part) for part in job_id.split("_")]) == [
        *("15", "16", "17", "18", "19", "20", "22_0", "22_3", "22_6", "22_9", "22_20", "23", "24", "27")
    ]
    states = {job_id: (job.eligible, job.held, job.gated, job.pinned) for job_id, job in jobs.items()}
    assert states["16"] == (False, True, True, None)  # held by its user
    assert states["17"] == (False, False, True, None)  # a dependency
    assert states["18"] == (False, False, True, None)  # a begin time
    assert states["19"] == (True, False, False, "mv_1")
    assert states["20"] == (False, True, True, None)  # held by an operator
    assert states["23"] == (True, False, True, None)
    running, ended = jobs["19"], jobs["15"]
    assert (running.state, running.nodes, running.uid) == (JobState.RUNNING, ("mvab12c-1",), 65534)
    assert (ended.state, ended.result, ended.exit_code) == (JobState.ENDED, "FAILED", 3)
    assert running.ref == JobRef("19", 1795254665, 0)


@pytest.mark.parametrize(
    ("status", "batch", "unopened"),
    [(4021, 1, True), (53, 1, True), (53 << 8, 1, False), (9, 1, False), (4021, 0, False)],
)
def test_a_job_whose_files_slurmstepd_could_not_open_is_told_from_others_that_failed(
    status: int, batch: int, unopened: bool
) -> None:
    """4021 as of 22.05, whose squeue prints what slurmstepd sent; 0:53 as of later releases."""
    (record,) = (one for one in JOBS if one["job_id"] == 15)
    ended = one({**record, "exit_code": status, "batch_flag": batch})
    assert (ended.result, ended.unopened) == ("FAILED", unopened)


def test_each_waiting_task_uses_the_limit_of_its_array() -> None:
    """Five tasks wait, 22_3 is pinned and 22_6 is held. Each uses one of the two that may run."""
    limits = AccountingLimits(JOBS)
    jobs = jobs_of(JOBS, NAMES, NOW, limits.uses)
    assert limits.left == {"JobArrayTaskLimit: 22": 2}
    tasks = [jobs[f"22_{task}"] for task in (0, 3, 9, 20)]
    assert [task.uses for task in tasks] == [(("JobArrayTaskLimit: 22", 1),)] * 4
    assert all(task.eligible for task in tasks) and jobs["16"].uses == ()
    assert {task.ref.submitted for task in tasks} == {1795254665}


def test_the_reason_of_a_counted_limit_does_not_block_a_job_at_the_gate() -> None:
    uses = (("QOSMaxJobsPerUserLimit: QOS tight, uid 1", 1),)
    waits = by_name("n2", state_reason="QOSMaxJobsPerUserLimit")
    pinned = waits | {"features": "mv_3", "licenses": ""}
    for record, eligible in ((waits, True), (waits | {"state_reason": "QOSGrpCpuLimit"}, False), (pinned, False)):
        (job,) = jobs_of([record], NAMES, NOW, lambda _: uses).values()
        assert job.eligible is eligible and job.uses == uses


def test_ranks_follow_priority_then_task() -> None:
    jobs = parsed(JOBS)
    pending = sorted((job for job in jobs.values() if job.state is JobState.PENDING), key=lambda job: job.rank)
    assert len({job.rank for job in pending}) == len(pending)
    assert [job.ref.job_id for job in pending if job.eligible] == [*("22_0", "22_3", "22_9", "22_20", "23", "24", "27")]
    assert {pending[-1].ref.job_id, pending[-2].ref.job_id, pending[-3].ref.job_id} == {"16", "20", "22_6"}


def test_a_rank_does_not_depend_on_other_jobs() -> None:
    alone = {job_id: job for record in JOBS for job_id, job in parsed([record]).items()}
    assert alone == parsed(JOBS)


def test_the_size_of_each_node_is_computed() -> None:
    jobs = parsed(JOBS)
    assert jobs["22_0"].request is not None
    assert (jobs["22_0"].request.size, jobs["22_0"].request.nodes) == (Size(4, 300), 1)  # -n2 -c2 --mem=300
    assert jobs["23"].request is not None
    assert (jobs["23"].request.size, jobs["23"].request.nodes) == (Size(4, 600), 2)  # -N2 -n3 -c2: two tasks on one
    assert jobs["27"].request is not None
    assert jobs["27"].request.size == Size(1, conf.MEMORY_PER_CPU)  # --mem=0: all memory of the VM


def test_a_job_without_a_profile_has_no_problem() -> None:
    assert all(one(by_name("n2", profile=word)).request for word in ("", "NONE", "NOT_SET", "None"))


def test_image_and_kind_are_features() -> None:
    job = one(by_name("n2", features="linked&mine&mvgate"))
    assert job.request is not None
    assert (job.request.image, job.request.kind) == ("mine", CloneKind.LINKED), "whether it is there, the hosts know"
    assert job.request.features == ("linked", "mine")
    assert "a job has one image, not slim and fast" in one(by_name("n2", features="slim&fast&full&mvgate")).problem
    placed = one(by_name("n2", features="place-best-fit&mine&mvgate")).request
    assert placed is not None and (placed.placement, placed.image) == ("best-fit", "mine")
    assert job.request.placement is None
    assert "a job has one placement policy, not" in one(by_name("n2", features="place-a&place-b&mvgate")).problem
    assert parse.features("a&mv_3&mvgate,b&mv_x", "mvgate") == (("a", "b", "mv_x"), "mv_3")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"user_id": 0}, "root"),
        ({"het_job_id": 9}, "heterogeneous"),
        ({"core_spec": 1}, "specialized cores"),
        ({"thread_spec": 2}, "specialized cores"),
        ({"profile": "Task"}, "--profile"),
        ({"cluster_features": "far"}, "--cluster-constraint"),
        ({"partition": "vm,other"}, "partition"),
        ({"resv_name": "x"}, "reservations"),
        ({"prefer": "x"}, "--prefer"),
        ({"required_nodes": "mvgate1"}, "--nodelist"),
        ({"tres_per_node": "gres:gpu:1"}, "generic"),
        ({"features": "slim|stock&mvgate"}, "alternatives"),
        ({"features": "slim&stock&mvgate"}, "one image"),
        ({"features": "full&linked&mvgate"}, "one kind"),
    ],
)
def test_an_unsupported_option_is_named(changes: dict[str, Any], word: str) -> None:
    job = one(by_name("n2", **changes))
    assert job.request is None
    assert word in job.problem


@pytest.mark.parametrize(
    ("changes", "eligible", "held"),
    [
        ({"state_reason": "Priority"}, True, False),
        ({"state_reason": "None", "dependency": "afterok:16(unfulfilled)"}, False, False),
        ({"state_reason": "ReqNodeNotAvail", "eligible_time": int(NOW) + 900}, False, False),  # not evaluated yet
        ({"state_reason": "BeginTime", "eligible_time": int(NOW) - 1}, True, False),  # the reason is outdated
        ({"state_reason": "QOSMaxJobsPerUserLimit"}, False, False),
        ({"state_reason": "Licenses"}, True, False),  # the gate's own; those of the user are counted
        ({"state_reason": "SomethingNew"}, False, False),
        ({"state_reason": "BadConstraints", "priority": 0}, False, False),  # Slurm itself holds the job
        ({"state_reason": "JobHeldUser", "priority": 0}, False, True),
        (
            {"state_reason": "JobHeldUser", "priority": 0, "state_description": "launch failed requeued held"},
            False,
            True,
        ),
        ({"state_reason": "JobHoldMaxRequeue", "priority": 0}, False, True),
    ],
)
def test_reasons_decide_whether_a_job_is_eligible_or_held(changes: dict[str, Any], eligible: bool, held: bool) -> None:
    job = one(by_name("n2", **changes))
    assert (job.eligible, job.held) == (eligible, held)


@pytest.mark.parametrize(
    ("column", "slurms"),
    [
        ("JobHeldUser", False),
        ("job requeued in held state", False),  # after `scontrol requeuehold` the column does not show JobHeldUser
        ("job requeued in special exit state", False),
        ("launch failed requeued held", False),  # a launch that failed is Slurm's own back-off
        ("JobHoldMaxRequeue", False),
        ("BadConstraints", True),
    ],
)
def test_squeues_column_shows_who_holds_a_job(column: str, slurms: bool) -> None:
    assert parse.slurms_hold(column) is slurms


def test_slurms_delay_after_a_requeue_is_shown_by_itself() -> None:
    at = int(NOW)
    requeued = by_name("n2", restart_cnt=1, submit_time=at, eligible_time=at + 121, state_reason="BeginTime")
    assert one(requeued).eligible and one(requeued).delayed_until == at + 121
    assert one(requeued | {"eligible_time": at - 1}).delayed_until is None, "it is over"
    assert not one(requeued | {"restart_cnt": 0}).eligible
    own = one(requeued | {"eligible_time": at + 900})
    assert not own.eligible and own.delayed_until is None, "the begin time is its user's"


def test_a_requeued_job_that_is_completing_is_the_previous_run() -> None:
    """As observed: the restart is counted already, and there is no end time or one in the future."""
    record = by_name("run", job_state="COMPLETING", restart_cnt=1, start_time=0, end_time=0)
    before = JobRef("19", 1795254665, 0)
    assert one(record).ref == before
    assert one(record | {"end_time": int(NOW) + 3600}).ref == before
    ended = one(record | {"end_time": int(NOW) - 1})
    assert (ended.ref.restarts, ended.state) == (1, JobState.COMPLETING)


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("CONFIGURING", JobState.RUNNING),
        ("SUSPENDED", JobState.SUSPENDED),
        ("REQUEUE_HOLD", JobState.PENDING),
        ("NODE_FAIL", JobState.ENDED),
        ("NEVER_HEARD_OF", JobState.RUNNING),
    ],
)
def test_states_of_jobs_are_understood(word: str, state: JobState) -> None:
    assert one(by_name("run", job_state=word)).state is state


def test_the_newer_of_two_jobs_of_one_id_counts() -> None:
    old, new = by_name("run", job_state="FAILED"), by_name("run", submit_time=1795254700)
    assert one_of(parsed([new, old])).ref.submitted == 1795254700


def one_of(jobs: dict[str, Job]) -> Job:
    (job,) = jobs.values()
    return job


def test_jobs_of_other_partitions_are_not_shown() -> None:
    assert parsed([by_name("run", partition="bare")]) == {}


@pytest.mark.parametrize(("status", "code"), [(0, 0), (768, 3), (9, 137)])
def test_exit_codes_are_those_of_a_shell(status: int, code: int) -> None:
    assert parse.exit_code(status) == code


@pytest.mark.parametrize(
    ("state", "flags", "seen"),
    [
        ("idle", ["DYNAMIC_NORM"], NodeState.IDLE),
        ("mixed", ["DYNAMIC_NORM"], NodeState.BUSY),
        ("idle", ["COMPLETING"], NodeState.BUSY),
        ("idle", ["DRAIN"], NodeState.DRAINED),
        ("mixed", ["DRAIN", "DYNAMIC_NORM"], NodeState.DRAINED),
        ("idle", ["INVALID_REG", "DRAIN"], NodeState.DRAINED),
        ("idle", ["FAIL"], NodeState.DRAINED),
        ("down", [], NodeState.DOWN),
        ("down", ["DRAIN"], NodeState.DOWN),
        ("down", ["NOT_RESPONDING"], NodeState.DOWN),
        ("allocated", ["NOT_RESPONDING"], NodeState.SILENT),
        ("mixed", ["DRAIN", "NOT_RESPONDING"], NodeState.SILENT),
        ("idle", ["POWERED_DOWN"], NodeState.SILENT),
        ("unknown", [], NodeState.JOINING),
        ("future", [], NodeState.JOINING),
    ],
)
def test_states_of_nodes_are_understood(state: str, flags: list[str], seen: NodeState) -> None:
    assert parse.node("mvab12c-1", [state, *flags], "", "").state is seen
