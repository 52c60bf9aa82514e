"""Overflow of partitions in Slurm: what squeue says of their jobs, and at which sites a partition can overflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multiverse.config import LeaseSettings, OverflowSettings, Settings, SlurmSettings, parse
from multiverse.core.errors import Refused
from multiverse.core.model.job import Job, JobState
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.drivers.slurm.reading import parse as slurm_parse
from multiverse.drivers.slurm.site import conf as site_conf
from multiverse.drivers.slurm.site import install
from multiverse.drivers.slurm.site.gate import examine_overflow, leased_nodes, limits_like, moved_text, told_origin
from multiverse.drivers.slurm.site.requirements import Version
from multiverse.drivers.slurm.site.requirements import examine as examine_site
from tests.unit.slurm_records import jobs_of

OVERFLOW = OverflowSettings("batch", constraint="any", min_wait=30.0)
NAMES = slurm_parse.SiteNames("ab12c", "vm", "mvgate", "vm", overflowing=(OVERFLOW,))
NOW = 1_000_000.0
RECORD: dict[str, Any] = {
    "job_id": 7, "array_job_id": 0, "array_task_id": None, "partition": "batch", "job_state": "PENDING",
    "restart_cnt": 0, "submit_time": int(NOW) - 100, "eligible_time": int(NOW) - 60, "user_id": 1000, "priority": 5,
    "node_count": 1, "cpus": 2, "tasks": 1, "memory_per_node": 500, "features": "any", "state_reason": "Resources",
    "account": "physics", "requeue": 1, "batch_flag": 1, "oversubscribe": "OK", "threads_per_core": "*",
}  # fmt: skip


def shown(now: float = NOW, **changes: Any) -> Job:
    (job,) = jobs_of([RECORD | changes], NAMES, now).values()
    return job


# --- jobs ---------------------------------------------------------------------------------------------


def test_a_job_that_waits_for_physical_nodes_is_shown_with_its_partition() -> None:
    job = shown()
    assert (job.origin, job.at_origin, job.gated, job.pinned, job.account) == ("batch", True, False, None, "physics")
    assert job.eligible and job.request is not None
    assert (job.request.image, job.request.features) == (None, ("any",)), "the rule's feature is no image"


@pytest.mark.parametrize("reason", ["None", "Dependency", "PartitionTimeLimit", "ReqNodeNotAvail", "AssocMaxJobsLimit"])
def test_only_a_job_that_waits_for_nodes_or_behind_others_may_be_moved(reason: str) -> None:
    assert shown(state_reason="Priority").eligible and not shown(state_reason=reason).eligible
    assert not shown(priority=0, state_reason="JobHeldUser").eligible


def test_a_job_may_be_moved_once_it_has_waited_long_enough() -> None:
    began = int(NOW) - 60
    assert not shown(began + 29.0).eligible and shown(began + 30.0).eligible
    assert slurm_parse.changes_at(RECORD, NAMES, began + 1.0) == began + 30.0
    array = RECORD | {"array_job_id": 7, "array_task_string": "0-1"}
    assert {job_id: job.eligible for job_id, job in jobs_of([array], NAMES, NOW).items()} == {
        "7_0": True,
        "7_1": True,
    }


def test_jobs_of_physical_nodes_rank_behind_all_jobs_at_the_gate_and_keep_their_order() -> None:
    gated = shown(partition="vm", features="mvgate", licenses="vm:1", priority=1)
    urgent, usual = shown(priority=9), shown()
    assert gated.rank < urgent.rank < usual.rank
    tasks = jobs_of([RECORD | {"array_job_id": 7, "array_task_string": "0-1"}], NAMES, NOW)
    assert gated.rank < tasks["7_0"].rank < tasks["7_1"].rank


@pytest.mark.parametrize(
    ("partition", "features", "place"),
    [
        ("vm", "any&mv_from_batch&mv_3", ("batch", False, False, "mv_3")),
        ("vm", "any&mv_from_batch&mvgate", ("batch", False, True, None)),
        ("vm", "any&mvgate", ("", False, True, None)),
        ("batch", "any&mv_3", ("batch", True, False, "mv_3")),
    ],
)
def test_the_record_of_a_job_shows_where_it_was_moved_from(partition: str, features: str, place: object) -> None:
    job = shown(partition=partition, features=features, licenses="vm:1" if "mvgate" in features else "")
    assert (job.origin, job.at_origin, job.gated, job.pinned) == place
    assert job.request is None or job.request.features == ("any",)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"oversubscribe": "NO"}, "--exclusive"),
        ({"oversubscribe": "USER"}, "--exclusive"),
        ({"memory_per_node": 0}, "all memory of a node"),
        ({"memory_per_node": None}, "all memory of a node"),
        ({"reboot": "1"}, "--reboot"),
        ({"network": "ib"}, "--network"),
        ({"container": "/c"}, "--container"),
        ({"threads_per_core": "2"}, "several threads"),
        ({"tasks_per_core": "2"}, "several tasks"),
        ({"burst_buffer": "pool"}, "burst buffer"),
        ({"tres_per_node": "gres:gpu:1"}, "generic resources"),
        ({"required_nodes": "n1"}, "--nodelist"),
        ({"partition": "batch,other"}, "name one partition only: batch"),
    ],
)
def test_what_a_vm_is_not_keeps_a_job_on_physical_nodes(changes: dict[str, Any], problem: str) -> None:
    job = shown(**changes)
    assert job.request is None and problem in job.problem
    at_gate = shown(partition="vm", features="mvgate", licenses="vm:1", oversubscribe="NO")
    assert not at_gate.problem, "multiverse.lua decides about jobs of the gate"


def test_one_that_runs_on_a_physical_node_is_shown_so() -> None:
    job = shown(job_state="RUNNING", nodes="n1", state_reason="None")
    assert (job.state, job.at_origin, job.nodes) == (JobState.RUNNING, True, ("n1",))


# --- what users are told ------------------------------------------------------------------------------


def test_the_comment_of_a_moved_job_tells_where_it_was_moved_from() -> None:
    comment = f"of others [multiverse: {moved_text('batch', 'instant on h1')}]"
    assert told_origin(comment) == "batch"
    assert [told_origin(other) for other in ("", "moved from partition batch, which", "[multiverse: x]")] == [""] * 3


# --- sites --------------------------------------------------------------------------------------------

SITE = "NodeName=n[1-4] Feature=big\nNodeName=m1\nNodeSet=some Feature=big\nNodeSet=one Nodes=n2\n"
BATCH = "PartitionName=batch Nodes=n[1-2]"
LIMITS = "MaxTime=1-0 TRESBillingWeights=CPU=1.0,Mem=0.25G AllowAccounts=b,a QOS=part PriorityJobFactor=1"


def problems(tmp_path: Path, text: str, ours: str = "", rule: str = "", **more: Any) -> list[str]:
    """What is said of a site with that slurm.conf, whose file of ours is as given."""
    conf = tmp_path / "slurm.conf"
    conf.write_text(f"{text}\nInclude multiverse.conf\n")
    (tmp_path / "multiverse.conf").write_text(ours)
    settings = Settings(overflow=(OverflowSettings("batch", constraint=rule),), slurm=SlurmSettings(conf=conf), **more)
    found = list(examine_overflow(settings, site_conf.read(conf)))
    scheduler = SlurmScheduler(settings, "ab12c")
    if found:
        with pytest.raises(Refused) as refused:
            scheduler.check_overflow()
        assert refused.value.hint, "with the next step"
        assert set(found) <= set(examine_site(settings, site_conf.read(conf), Version(22, 5)))
    else:
        scheduler.check_overflow()
    return [each.message for each in found]


def rendered(tmp_path: Path, text: str) -> str:
    """Our file for a site with that slurm.conf."""
    conf = tmp_path / "before.conf"
    conf.write_text(text)
    settings = Settings(overflow=(OverflowSettings("batch", constraint="any"),))
    files = install.render(settings, install.derive(settings, site_conf.read(conf), ["slim"], 64030))
    return files["multiverse.conf"]


@pytest.mark.parametrize("defaults", ["", "PartitionName=DEFAULT MaxNodes=3 DefaultTime=60\n"])
def test_our_partition_is_rendered_with_the_limits_of_the_one_that_overflows(tmp_path: Path, defaults: str) -> None:
    text = f"{SITE}{defaults}{BATCH} {LIMITS}"
    ours = rendered(tmp_path, text)
    assert problems(tmp_path, text, ours) == []
    assert limits_like("batch", site_conf.SiteConf(text)).startswith("AllowAccounts=b,a ") or "MaxTime=1-0" in ours
    assert "mv_from_batch" in ours and ",any" in ours, "jobs may wait at the gate with these features"


@pytest.mark.parametrize(
    "changed",
    [
        "MaxTime=2-0", "MaxTime=INFINITE", "TRESBillingWeights=CPU=2.0", "AllowAccounts=a", "QOS=other", "DenyQos=x",
        "PriorityJobFactor=3", "DefaultTime=5", "OverTimeLimit=5", "AllowGroups=x", "MaxNodes=1",
    ],
)  # fmt: skip
def test_a_partition_with_other_limits_than_ours_does_not_overflow(tmp_path: Path, changed: str) -> None:
    ours = rendered(tmp_path, f"{SITE}{BATCH} {LIMITS}")
    key = changed.partition("=")[0]
    limits = " ".join([*(word for word in LIMITS.split() if not word.startswith(f"{key}=")), changed])
    (found,) = problems(tmp_path, f"{SITE}{BATCH} {limits}", ours)
    assert f"{key} of partition vm differs" in found


@pytest.mark.parametrize("mark", ["mv_from_batch", "any"])
def test_a_gate_that_was_rendered_without_the_features_of_moved_jobs_is_not_used(tmp_path: Path, mark: str) -> None:
    text = f"{SITE}{BATCH} {LIMITS}"
    ours = rendered(tmp_path, text)
    (found,) = problems(tmp_path, text, ours.replace(f",{mark}", ""), rule="any")
    assert f"lack the feature {mark}," in found


def test_the_same_limits_may_be_written_in_other_words(tmp_path: Path) -> None:
    ours = rendered(tmp_path, f"{SITE}{BATCH} {LIMITS}")
    other = (
        LIMITS.replace("1-0", "24:00:00")
        .replace("b,a", "a,b")
        .replace(" PriorityJobFactor=1", " AllowQos=ALL MinNodes=0")
    )
    assert problems(tmp_path, f"{SITE}{BATCH} {other}", ours) == []


@pytest.mark.parametrize(
    ("nodes", "shared"),
    [("n[2-4]", "n2"), ("some", "n[1-2]"), ("one", "n2"), ("ALL", "n[1-2]"), ("m1,n1", "n1"), ("n[3-4],m1", "")],
)
def test_a_partition_that_overflows_shares_no_node_with_one_that_is_leased(
    tmp_path: Path, nodes: str, shared: str
) -> None:
    text = f"{SITE}{BATCH}\nPartitionName=lent Nodes={nodes}"
    found = problems(tmp_path, text, lease=(LeaseSettings("lent"),))
    assert len(found) == bool(shared) and all(f"shares {shared} with partition lent" in text for text in found)


def test_a_partition_that_is_missing_or_gives_whole_nodes_does_not_overflow(tmp_path: Path) -> None:
    assert "there is no such partition" in problems(tmp_path, SITE)[0]
    assert "gets whole nodes" in problems(tmp_path, f"{SITE}{BATCH} OverSubscribe=EXCLUSIVE")[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ({"overflow": [{"partition": "a b"}]}, "overflow.1.partition: must be the name"),
        ({"overflow": [{"partition": "vm"}]}, "overflow.1.partition: vm has no physical nodes"),
        ({"overflow": [{"partition": "batch", "constraint": "a&b"}]}, "overflow.1.constraint"),
        ({"overflow": [{"partition": "batch", "min_wait": -1}]}, "overflow.1.min_wait"),
        ({"overflow": [{"partition": "batch"}, {"partition": "batch"}]}, "one partition twice"),
        ({"overflow": [{"partition": "batch"}], "lease": [{"partition": "batch"}]}, "batch is leased, too"),
    ],
)
def test_settings_that_make_no_sense_are_refused(text: dict[str, Any], problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        parse(text, "settings")
    assert parse({"overflow": [{"partition": "batch", "accounts": ["a"]}]}, "s").overflow[0].accounts == ("a",)


def test_the_nodes_that_may_be_leased_are_known(tmp_path: Path) -> None:
    """Their addresses are checked where there is a VXLAN."""
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "NodeName=n[1-3]\nPartitionName=DEFAULT State=UP\nPartitionName=lent Nodes=n[2-3]\nPartitionName=b Nodes=n1\n"
    )
    settings = Settings(lease=(LeaseSettings("lent"), LeaseSettings("none")))
    assert leased_nodes(settings, site_conf.read(conf)) == ["n2", "n3"]
    assert leased_nodes(Settings(), site_conf.read(conf)) == []
