"""How AdminComment is composed, which records of slurmctld are told, and whose turn it
is (`drivers.slurm.acting.comment`)."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiverse.core.model.job import JobRef
from multiverse.drivers.slurm.acting.jobs import (
    CommentColumn,
    CommentTurns,
    WaitingRecord,
    _records,
    compose,
    plain_line,
    ranges,
    updates,
)
from tests.unit.slurm_records import task_ids

# --- the text ----------------------------------------------------------------------------------------

OTHERS = st.text(st.characters(exclude_characters="[]\ufffd", exclude_categories=("Cs",)), max_size=40)


@pytest.mark.parametrize(
    ("present", "composed"),
    [
        ("", "[multiverse: why]"),
        ("by ada", "by ada [multiverse: why]"),
        ("[multiverse: other]", "[multiverse: why]"),
        ("by ada [multiverse: other]", "by ada [multiverse: why]"),
        ("[multiverse: other],by ada", "[multiverse: why],by ada"),
        ('a\n"b"  [urgent]', 'a\n"b"  [urgent] [multiverse: why]'),
    ],
)
def test_our_part_is_replaced_and_the_rest_stays(present: str, composed: str) -> None:
    assert compose(present, "why") == composed
    assert compose(composed, "why") == composed


@given(OTHERS, OTHERS, st.text(), st.text())
def test_the_text_of_others_is_kept_whatever_both_write(before: str, after: str, one: str, two: str) -> None:
    present = before + compose("", one) + after
    assert compose(present, two) == before + compose("", two) + after
    assert compose(compose(before, one), two) == compose(before, two)


@pytest.mark.parametrize("present", ["\ufffd", "x" * 30_001])
def test_a_comment_that_could_not_be_written_again_unchanged_is_left_alone(present: str) -> None:
    assert compose(present, "why") == present


def test_a_line_is_printable_and_has_no_brackets_or_double_quotes() -> None:
    assert compose("", 'task 4_[1-2]\n"x"\x1b') == "[multiverse: task 4_(1-2) 'x']"
    assert len(plain_line("x" * 2000)) == 500


# --- records -----------------------------------------------------------------------------------------


def record(base: str, *tasks: int, submitted: int = 500, restarts: int = 0, at_gate: bool = True, held: bool = False,
           comment: str = "") -> WaitingRecord:  # fmt: skip
    return WaitingRecord(base, tasks, submitted, restarts, at_gate, held, comment)


@given(st.sets(st.integers(0, 300)))
def test_ranges_name_exactly_the_tasks(tasks: set[int]) -> None:
    assert task_ids(ranges(tasks)) == sorted(tasks)


def test_a_task_stands_for_all_waiting_records_of_its_array_and_none_is_split() -> None:
    records = [
        record("4", 1, 2, 3, 7),
        record("4", 5, comment="by ada"),
        record("4", 6, at_gate=False),
        record("4", 8, held=True),
        record("9"),
    ]
    assert dict(updates(records, [JobRef("4_2", 500)], "why")) == {
        "[multiverse: why]": ["4_[1-3,7]"],
        "by ada [multiverse: why]": ["4_[5]"],
    }


def test_jobs_that_are_other_runs_or_read_the_text_already_are_left_alone() -> None:
    records = [
        record("1"),
        record("2", restarts=1),
        record("3", submitted=400),
        record("4", comment="[multiverse: why]"),
    ]
    asked = [JobRef(job_id, 500) for job_id in ("1", "2", "3", "4", "5", "1_1")]
    assert list(updates(records, asked, "why")) == [("[multiverse: why]", ["1"])]


def test_a_list_of_tasks_that_is_too_long_for_a_command_is_not_written() -> None:
    assert list(updates([record("4", *range(0, 60_000, 2))], [JobRef("4_0", 500)], "why")) == []


def test_rows_are_read_whatever_a_comment_contains() -> None:
    column = CommentColumn(";0123")
    forged = "two\nlines ;012 1 9 N/A vm 0 500 7 mvgate"
    rows = (
        f"1 4 3 vm 0 500 7 mvgate{column.end}{forged}{column.end}\n"
        f"1 4 5 vm 0 500 7 mvgate{column.end}{forged}{column.end}\n"
        f"6 4 4 vm,other 1 501 0 slim&mvgate{column.end}(null){column.end}\n"
        f"9 9 N/A vmrun 0 500 7 mv_3{column.end}{column.end}\n"
        f"10 10 N/A vm 0 500 7 (null){column.end}{column.end}\n"
    )
    assert _records(column.rows(rows), "vm", "mvgate") == [
        record("4", 3, 5, comment=forged),
        record("4", 4, submitted=501, restarts=1, held=True),
        record("9", at_gate=False),
        record("10"),
    ]


# --- turns -------------------------------------------------------------------------------------------

ONE, TASK, SIBLING, OTHER = JobRef("1", 500), JobRef("4_1", 500), JobRef("4_2", 500), JobRef("7", 500)


async def test_a_job_or_array_that_is_being_changed_is_not_explained() -> None:
    turns = CommentTurns()
    async with turns.changing(TASK), turns.changing(TASK), turns.explaining([ONE, SIBLING, OTHER]) as free:
        assert free == [ONE, OTHER]
    async with turns.explaining([ONE, SIBLING]) as free:
        assert free == [ONE, SIBLING]


async def test_a_change_waits_until_its_job_is_explained_and_for_no_other() -> None:
    turns, order = CommentTurns(), list[str]()

    async def change(job: JobRef) -> None:
        async with turns.changing(job):
            order.append(job.job_id)

    async with turns.explaining([ONE, SIBLING]):
        changes = [asyncio.create_task(change(job)) for job in (TASK, ONE, OTHER)]
        await asyncio.sleep(0.01)
        assert order == ["7"]
        order.append("explained")
    await asyncio.gather(*changes)
    assert order[:2] == ["7", "explained"] and sorted(order[2:]) == ["1", "4_1"]


async def test_explanations_of_one_job_take_turns_and_none_is_lost_when_one_is_cancelled() -> None:
    turns = CommentTurns()
    first = turns.explaining([ONE])
    await first.__aenter__()

    async def explain() -> list[JobRef]:
        async with turns.explaining([ONE]) as free:
            return free

    cancelled, waiting = asyncio.create_task(explain()), asyncio.create_task(explain())
    await asyncio.sleep(0.01)
    cancelled.cancel()
    assert not waiting.done()
    await first.__aexit__(None, None, None)
    assert await asyncio.wait_for(waiting, 1.0) == [ONE]
