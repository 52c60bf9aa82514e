"""Tables of squeue and sinfo, captured from 22.05.8, and what is made of damaged ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from multiverse.config import SlurmSettings
from multiverse.core.errors import Gone, Unknown
from multiverse.core.model.basics import Size
from multiverse.core.model.job import Job, JobRef, NodeState, SchedulerView
from multiverse.core.model.reason import text_of
from multiverse.drivers.slurm.command import Completed, SlurmCommands
from multiverse.drivers.slurm.reading import jobs, nodes, parse
from multiverse.drivers.slurm.reading.accounting_limits import AccountingLimits
from multiverse.drivers.slurm.reading.jobs import (
    UNKNOWN_DETAILS,
    DetailReader,
    JobColumns,
    JobDetails,
    JobRow,
    JobTable,
    is_per_cpu,
    parse_details,
)
from tests.unit.slurm_records import jobs_of

DATA = Path(__file__).parent / "slurm_data"
SECRET = "5ec3e7"
END = f"\x1f{SECRET}\x1f"
TABLE = (DATA / "squeue-table-22.05.8.txt").read_text().replace("␟", "\x1f").replace("<END>", END)
RECORDS: list[dict[str, Any]] = json.loads((DATA / "squeue-of-table-22.05.8.json").read_text())["jobs"]
NAMES = parse.SiteNames("ab12c", "vm", "mvgate", "vm", 150)
NOW = 1795392670.0  # when it was captured
ARRAYS = {"15007": JobDetails(2, True), "15012": JobDetails(0, True), "15014": JobDetails(0, True)}


def table() -> JobTable:
    return JobTable(JobColumns(SECRET))


def read(into: JobTable, text: str = TABLE, now: float = NOW, assoc_mgr: str = "") -> dict[str, Job]:
    rows = into.read(text, NAMES)
    for row in rows.values():
        if row.needs_details:
            row.complete(ARRAYS[row.base[0]])
    limits = AccountingLimits([row.record for row in rows.values()], assoc_mgr)
    jobs = into.convert(rows.values(), NAMES, limits, now)
    into.keep_whole(rows, jobs)
    return jobs


def test_a_table_gives_the_same_jobs_as_json() -> None:
    """Both were captured at the same time. The JSON has the reason and its description apart, and the array's limit."""
    limits = AccountingLimits(RECORDS)
    assert read(table()) == jobs_of(RECORDS, NAMES, NOW, limits.uses)


def test_a_task_that_slurm_gave_a_record_of_its_own_has_a_second_number() -> None:
    found = read(table())
    assert {job_id: one.other_id for job_id, one in found.items() if one.other_id} == {"15007_2": "15013"}
    view = SchedulerView(found)
    assert [view.own_id(asked) for asked in ("15013", "15007", "15003", "9")] == ["15007_2", "15007", "15003", "9"]


def test_the_script_of_a_batch_job_runs_on_one_of_its_nodes() -> None:
    """squeue shows the machine of submission of another job."""
    waits, runs = f"{END}n/a{END}", f"{END}mvab12c-2{END}"
    before, after = read(table()), read(table(), TABLE.replace(waits, runs))
    assert {job.script_node for job in before.values()} == {""}
    assert {job.script_node for job in after.values()} == {"mvab12c-2"}
    record = {**RECORDS[0], "batch_flag": 0, "batch_host": "login"}
    assert [job.script_node for job in jobs_of([record], NAMES, NOW).values()] == [""]


@pytest.mark.parametrize(
    ("cpus", "sockets", "per_socket", "found"),
    [
        (4, "2", "*", 2),
        (4, "*", "*", 1),
        (6, "*", "2", 1),
        (4, "*", "1", 1),
        (4, "65534", "65534", 1),
        (3, "2", "*", 1),
    ],
)
def test_a_node_has_the_sockets_that_its_cpus_are_divided_among(
    cpus: int, sockets: str, per_socket: str, found: int
) -> None:
    (record,) = [row.record for row in table().read(TABLE, NAMES).values() if row.base[0] == "15001"]
    asked = {"cpus": cpus, "sockets_per_node": sockets, "tasks_per_socket": per_socket}
    (job,) = jobs_of([{**record, **asked}], NAMES, NOW).values()
    assert job.request and job.request.sockets == found


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        ({"cpus": 1, "tasks": 8, "cpus_per_task": 1}, 1),
        ({"cpus": 1, "tasks": 8, "cpus_per_task": 2, "minimum_cpus_per_node": 2}, 2),
        ({"cpus": 2, "tasks": 8, "node_count": 2}, 1),
        ({"cpus": 2, "tasks": 8, "node_count": 2, "tasks_per_node": 4}, 4),
        ({"cpus": 8, "tasks": 8, "node_count": 2, "tasks_per_node": 4}, 4),
    ],
)
def test_tasks_that_share_cpus_have_those_of_one(shown: dict[str, int], found: int) -> None:
    """--overcommit, which Slurm does not show: no other job that can start has more tasks than CPUs."""
    (record,) = [row.record for row in table().read(TABLE, NAMES).values() if row.base[0] == "15001"]
    (job,) = jobs_of(
        [{**record, "minimum_cpus_per_node": 1, "cpus_per_task": 1, **shown}],
        NAMES,
        NOW,
    ).values()
    assert job.request and job.request.size.cpus == found


def test_a_row_that_did_not_change_gives_the_same_objects() -> None:
    kept = table()
    before = read(kept)
    changed = TABLE.replace("4294901745", "4294901700")  # the priority of 15002
    after = read(kept, changed)
    assert {job_id for job_id in before if before[job_id] is not after[job_id]} == {"15002"}
    assert after["15002"].rank > before["15002"].rank


def test_an_equal_job_in_another_row_is_the_same_object() -> None:
    kept = table()
    before = read(kept)["15001"]
    row = "15001\x1fvm\x1fPENDING\x1f0\x1f1795392133\x1f"
    assert f"{row}N/A" in TABLE
    assert read(kept, TABLE.replace(f"{row}N/A", f"{row}1"))["15001"] is before


def test_a_row_is_converted_again_when_its_begin_time_has_come() -> None:
    kept = table()
    assert not read(kept)["15005"].eligible
    assert read(kept, now=1795393035.0)["15005"].eligible


def test_a_row_is_converted_again_when_other_limits_apply() -> None:
    kept = table()
    assert read(kept)["15003"].uses == ()
    shown = "QOS=normal(1)\n  User Limits\n 65534\n MaxJobsPU=9(0)\n"
    uses = (("QOSMaxJobsPerUserLimit: QOS normal, uid 65534", 1),)
    assert read(kept, assoc_mgr=shown)["15003"].uses == uses


def test_the_text_of_a_user_does_not_break_the_table() -> None:
    jobs = read(table())
    assert jobs["15002"].name == "it is \x1f odd\nname|"
    forged = "15099\x1fvm\x1fPENDING\n"
    assert read(table(), TABLE.replace("it is", f"{forged}{forged}"))["15002"].name.startswith(forged)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "incomplete"),
        ("squeue: warning\n", "incomplete"),
        (TABLE[:-1], "incomplete"),
        (TABLE[: len(TABLE) // 2], "incomplete"),
        (TABLE.replace("USER", "").replace("UID", ""), "user_id"),
        (TABLE.replace("15003\x1f", ""), "damaged"),
        (TABLE.replace("15003\x1fvm", "x\x1fvm"), "cannot understand"),
    ],
    ids=["nothing", "other text", "no end", "half", "no column", "a cell is missing", "no number"],
)
def test_a_damaged_table_is_unknown(text: str, reason: str) -> None:
    with pytest.raises(Unknown) as caught:
        read(table(), text)
    assert reason in str(caught.value)


def test_a_table_without_jobs_is_empty_and_known() -> None:
    assert read(table(), TABLE.partition("\n")[0] + "\n") == {}


@pytest.mark.parametrize(
    ("memory", "nodes_", "cpus", "tres", "per_cpu"),
    [
        (130, 1, 3, "cpu=3,mem=390M,node=1,billing=3", True),
        (100, 2, 4, "cpu=4,mem=400M,node=2,billing=4", True),
        (150, 2, 2, "cpu=2,mem=300M,node=2,billing=2", False),  # both: the size of a node is the same
        (1536, 1, 6, "cpu=6,mem=1.50G,node=1,billing=6", False),
        (1024, 1, 5, "cpu=5,mem=5G,node=1,billing=5", True),
        (0, 1, 5, "cpu=5,node=1,billing=5", False),
    ],
)
def test_the_total_tells_whether_memory_is_that_of_a_cpu(
    memory: int, nodes_: int, cpus: int, tres: str, per_cpu: bool
) -> None:
    assert is_per_cpu(memory, nodes_, cpus, tres) is per_cpu


def test_a_job_whose_details_are_unknown_gets_the_larger_memory() -> None:
    rows = table().read(TABLE, NAMES)
    row = next(row for row in rows.values() if row.base[0] == "15012")
    assert row.needs_details
    row.complete(UNKNOWN_DETAILS)
    job = parse.job(row.record, NAMES, NOW)
    assert job.request is not None and job.request.size == Size(2, 666)
    row.complete(JobDetails(0, memory_per_cpu=False))
    job = parse.job(row.record, NAMES, NOW)
    assert job.request is not None and job.request.size == Size(2, 333)


@pytest.mark.parametrize(("tasks", "per_node", "ambiguous"), [(2, 0, False), (2, 1, False), (6, 3, True)])
def test_memory_is_ambiguous_if_a_node_gets_more_cpus_than_the_total_says(
    tasks: int, per_node: int, ambiguous: bool
) -> None:
    """With --overcommit and --ntasks-per-node, two nodes with three tasks each are a request for two CPUs."""
    shape = "\x1f2\x1f4\x1f4\x1f2\x1f1\x1f100M\x1f2\x1f"
    assert TABLE.count(shape) == 1
    other = f"\x1f2\x1f2\x1f{tasks}\x1f{per_node}\x1f1\x1f100M\x1f1\x1f"
    rows = table().read(TABLE.replace(shape, other), NAMES)
    row = next(row for row in rows.values() if row.base[0] == "15002")
    assert row.needs_details is ambiguous


SHOWN = (
    "JobId=15007 ArrayJobId=15007 ArrayTaskId=0,4,6,8%2 ArrayTaskThrottle=2 JobName=wrap UserId=nobody(65534) "
    "MinCPUsNode=3 MinMemoryCPU=150M MinTmpDiskNode=0\n"
    "JobId=15013 ArrayJobId=15007 ArrayTaskId=2 ArrayTaskThrottle=2 JobName= ArrayTaskThrottle=9  UserId=nobody\n"
)


def test_details_of_an_array_are_understood() -> None:
    assert parse_details(SHOWN) == JobDetails(2, True)
    assert parse_details("JobId=7 JobName=x ArrayTaskThrottle=5  MinMemoryNode=3M \n") == JobDetails(0, False)


class FakeScontrol:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def run(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        self.asked.append(command[-1])
        if command[-1] == "9":
            raise Gone("no job 9")
        return SHOWN


async def test_details_are_read_once_and_again_in_turn_or_if_a_hint_names_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scontrol = FakeScontrol()
    reader = DetailReader(scontrol)  # type: ignore[arg-type]  # only run() is called
    await reader.complete([("15007", 5), ("9", 5)])
    assert (reader.of(("15007", 5)).at_most, reader.of(("9", 5)), reader.of(("15007", 6))) == (
        2,
        UNKNOWN_DETAILS,
        UNKNOWN_DETAILS,
    )
    await reader.complete([("15007", 5)])
    await reader.read_again()
    assert sorted(scontrol.asked) == ["15007", "9"], "they were read just now"
    await reader.complete([("15007", 5), ("9", 5)], named=[("15007", 5)])
    assert sorted(scontrol.asked) == ["15007", "15007", "9"]
    monkeypatch.setattr(jobs, "_AGE", 0.0)
    monkeypatch.setattr(jobs, "_AGAIN", 1)
    await reader.read_again()
    await reader.read_again()
    assert scontrol.asked[-2:] == ["9", "15007"], "the one that was read longest ago comes first"
    reader.keep([])
    await reader.read_again()
    assert reader.of(("15007", 5)) == UNKNOWN_DETAILS and len(scontrol.asked) == 5


# --- nodes -----------------------------------------------------------------------------------------

NODES = "".join(
    "\x1f".join(cells) + "\x1f\n"
    for cells in (
        ("NODELIST", "STATECOMPLETE", "ACTIVE_FEATURES", "REASON"),
        ("mvgate[1-8]", "unknown+drain+not_responding", "mvgate,slim", "multiverse gate"),
        ("mvab12c-[1-2],mvab1-7", "idle+dynamic_norm", "vm,slim,mv_1", "none"),
        ("mvab12c-3", "down+dynamic_norm", "vm,slim", "it\nis old"),
    )
)


def test_nodes_of_the_site_are_understood_and_stay_the_same_objects() -> None:
    kept = nodes.NodeTable()
    found = kept.nodes = kept.read(NODES, "ab12c")
    assert {name: node.state for name, node in found.items()} == {
        "mvab12c-1": NodeState.IDLE,
        "mvab12c-2": NodeState.IDLE,
        "mvab12c-3": NodeState.DOWN,
    }
    assert (found["mvab12c-1"].features, text_of(found["mvab12c-1"].reason)) == (("vm", "slim", "mv_1"), "")
    assert text_of(found["mvab12c-3"].reason) == "it\nis old"
    after = kept.read(NODES.replace("[1-2]", "1").replace("slim,mv_1", "slim,mv_1"), "ab12c")
    assert all(after[name] is found[name] for name in ("mvab12c-1", "mvab12c-3")) and "mvab12c-2" not in after


@pytest.mark.parametrize("text", ["", NODES[:-1], NODES[: len(NODES) // 2], NODES.replace("REASON", "")])
def test_a_damaged_table_of_nodes_is_unknown(text: str) -> None:
    with pytest.raises(Unknown):
        nodes.NodeTable().read(text, "ab12c")


async def test_the_nodes_that_slurmctld_reaches_are_those_that_answer_be_they_drained_or_not() -> None:
    states = ("idle", "mixed+drain", "allocated+not_responding", "down+drain", "mixed+drain+not_responding", "unknown")
    rows = [f"mvab12c-{number}\x1f{state}\x1fvm\x1fnone\x1f\n" for number, state in enumerate(states)]

    async def sinfo(argv: Sequence[str], env: Mapping[str, str], timeout: float) -> Completed:
        return Completed(0, (NODES.partition("\n")[0] + "\n" + "".join(rows)).encode(), b"")

    commands = SlurmCommands(SlurmSettings(), {}, sinfo)
    assert await nodes.reached_nodes(commands, "ab12c") == ["mvab12c-0", "mvab12c-1"]


def test_a_running_task_counts_in_its_array_also_after_a_requeue() -> None:
    changed = TABLE.replace(
        "15007_2\x1fvm\x1fPENDING\x1f0\x1f1795392134", "15007_2\x1fvm\x1fRUNNING\x1f1\x1f1795392200"
    )
    rows = table().read(changed, NAMES)
    lacking = {row.base for row in rows.values() if row.needs_details}
    for row in rows.values():
        if row.base in lacking:
            row.complete(ARRAYS[row.base[0]])
    assert AccountingLimits([row.record for row in rows.values()]).left == {"JobArrayTaskLimit: 15007": 1}


def test_a_job_keeps_the_newer_of_two_rows_of_its_id() -> None:
    kept = table()
    rows = kept.read(TABLE, NAMES)
    (row,) = [row for row in rows.values() if row.base[0] == "15003"]
    newer = JobRow({**row.record, "submit_time": 1795392200}, NAMES)
    for order in ([row, newer], [newer, row]):
        (job,) = kept.convert(order, NAMES, AccountingLimits(), NOW).values()
        assert job.ref == JobRef("15003", 1795392200)
