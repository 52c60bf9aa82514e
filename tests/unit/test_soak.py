"""The plan of a soak test, the records of its jobs, and the verdict on each job."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from multiverse.api import JobView
from multiverse_lab.cli import soak as command
from multiverse_lab.lab.session import LabSession
from multiverse_lab.soak import facts, summary
from multiverse_lab.soak.judge import SETTLE, SLACK, Ending, HappenedIncident, JobFacts, JudgedAttempt, judge
from multiverse_lab.soak.kinds import BY_NAME, CONTROLLER_KILLED, INCIDENT_BY_NAME, INCIDENTS, KINDS, Harm
from multiverse_lab.soak.plan import Rates, make_plan
from multiverse_lab.soak.record import RecordedRun, parse, script, whole
from multiverse_lab.soak.run import SoakResult
from multiverse_lab.soak.workload import SubmittedJob

HOUR = 3600.0


# --- the plan --------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_plan_and_another_seed_another_one() -> None:
    assert make_plan(7, HOUR) == make_plan(7, HOUR)
    assert make_plan(7, HOUR).submissions != make_plan(8, HOUR).submissions
    assert make_plan(7, HOUR).incidents != make_plan(8, HOUR).incidents


def test_a_longer_plan_begins_like_a_shorter_one() -> None:
    short, long = make_plan(7, HOUR / 4), make_plan(7, HOUR)
    assert long.submissions[: len(short.submissions)] == short.submissions
    assert long.incidents[: len(short.incidents)] == short.incidents


def test_an_hour_has_every_kind_of_job_at_the_planned_rate() -> None:
    plan = make_plan(7, HOUR, Rates(submissions=2.0))
    assert {one.kind for one in plan.submissions} == set(KINDS)
    assert len(plan.submissions) == pytest.approx(HOUR / 2, rel=0.1)
    assert all(one.kind.seconds[0] <= one.seconds <= one.kind.seconds[1] for one in plan.submissions)
    assert len({one.name for one in plan.submissions}) == len(plan.submissions)
    times = [one.at for one in plan.submissions]
    assert times == sorted(times) and times[-1] < HOUR


def test_each_round_of_incidents_has_every_kind_as_often_as_its_weight_says() -> None:
    plan, size = make_plan(7, HOUR), sum(kind.weight for kind in INCIDENTS)
    rounds = [plan.incidents[i : i + size] for i in range(0, len(plan.incidents), size)]
    for some in rounds:
        assert Counter(one.kind for one in some) == {kind: kind.weight for kind in INCIDENTS}
    assert len({tuple(one.kind for one in some) for some in rounds}) == len(rounds) > 1
    assert all(one.kind.pause[0] <= one.pause <= one.kind.pause[1] for one in plan.incidents)
    twofold = [one for one in plan.incidents if one.twofold]
    assert twofold and all(one.kind is not CONTROLLER_KILLED for one in twofold)


# --- the record ------------------------------------------------------------------------------------


def run_script(directory: Path, text: str, node: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", text.replace("sleep 2", "true")],
        env={"PATH": "/usr/bin:/bin", "HOSTNAME": node, **env},
        capture_output=True,
        text=True,
        cwd=directory,
    )


def test_what_a_script_writes_is_read_as_its_runs(tmp_path: Path) -> None:
    text = script("soak-4", tmp_path, 6, body="say tasks 2\n", code=3)
    for node in ("mv-1", "mv-2"):
        done = run_script(tmp_path, text, node, SLURM_ARRAY_TASK_ID="2")
        assert (done.returncode, done.stdout) == (3, f"{whole('soak-4_2')}\n"), done.stderr
    lines = (tmp_path / "soak-4_2.record").read_text().splitlines()
    runs, damaged = parse(lines)
    assert damaged == 0 and len(lines) == 2 * (1 + 1 + 3 + 1)
    first, second = runs
    assert (first.node, first.ended, first.nodes) == ("mv-1", True, 2) and second.node == "mv-2"
    assert first.began <= first.last <= second.began


def test_a_script_that_lasts_once_ends_at_once_when_it_is_restarted(tmp_path: Path) -> None:
    text = script("soak-5", tmp_path, 6, once=True)
    run_script(tmp_path, text, "mv-1")
    run_script(tmp_path, text, "mv-2", SLURM_RESTART_COUNT="1")
    words = [line.split()[0] for line in (tmp_path / "soak-5.record").read_text().splitlines()]
    assert words == ["begin", "beat", "beat", "beat", "end", "begin", "end"]


@pytest.mark.parametrize(
    "line", ["", "begin 0", "beat 0 mv-9 5.0", "begin 0 mv-1 6.0", "begin x mv-9 5", "what 0 mv-1 5"]
)
def test_lines_that_make_no_sense_are_counted(line: str) -> None:
    runs, damaged = parse(["begin 0 mv-1 4.0", line])
    assert damaged == 1 and [run.node for run in runs] == ["mv-1"]


# --- the verdict -----------------------------------------------------------------------------------

GOOD_RUN = RecordedRun("mv-1", 110.0, 120.0, ended=True)
GOOD = JobFacts(
    "soak-1",
    BY_NAME["batch"],
    submitted=100.0,
    job_id="9",
    state="COMPLETED",
    exit_code="0:0",
    ended=121.0,
    attempts=(JudgedAttempt("done", "it ended", ("mv-1",)),),
    runs=(GOOD_RUN,),
    whole=True,
)
AGAIN = replace(
    GOOD,
    ended=151.0,
    attempts=(JudgedAttempt("requeued", "mv-0 died", ("mv-0",)), *GOOD.attempts),
    runs=(RecordedRun("mv-0", 105.0, 109.0), replace(GOOD_RUN, last=150.0)),
)


def incident(name: str, began: float = 106.0, mended: float = 109.0, vm: str = "") -> HappenedIncident:
    return HappenedIncident(INCIDENT_BY_NAME[name], began, mended, vm)


def test_a_job_that_ran_once_and_completed_is_as_expected() -> None:
    verdict = judge(GOOD, ())
    assert (verdict.ending, verdict.violations) == (Ending.EXPECTED, ())


KILLED = (incident("QEMU killed", vm="mv-0"),)


def test_a_job_whose_vm_was_killed_may_run_again() -> None:
    verdict = judge(AGAIN, KILLED)
    assert (verdict.ending, verdict.violations, verdict.hits) == (Ending.AGAIN, (), KILLED)


@pytest.mark.parametrize(
    ("job", "incidents", "violation"),
    [
        (AGAIN, (), "ran 2 times, where 1 is explained"),
        (AGAIN, (incident("QEMU killed", vm="mv-7"),), "ran 2 times, where 1 is explained"),
        (AGAIN, (incident("controller killed"),), "ran 2 times, where 1 is explained"),
        (replace(AGAIN, attempts=GOOD.attempts), (incident("disk full"),), "ran 2 times, where 1 is explained"),
        (replace(AGAIN, attempts=(JudgedAttempt("requeued", "", ("mv-0",)), *GOOD.attempts)), KILLED,
         "an attempt is requeued without a reason"),
        (replace(AGAIN, runs=(RecordedRun("mv-0", 105.0, 112.0), GOOD_RUN)), KILLED,
         "ran twice at the same time, on mv-0 and on mv-1"),
        (replace(GOOD, runs=(replace(GOOD_RUN, last=121.0 + SLACK + 5),)), (),
         f"went on for {SLACK + 5:.0f} s after its end"),
        (replace(GOOD, runs=(replace(GOOD_RUN, ended=False),)), (), "is COMPLETED, but its script did not end"),
        (replace(GOOD, runs=()), (), "is COMPLETED, but did not run"),
        (replace(GOOD, whole=False), (), "its output is not whole"),
        (replace(GOOD, damaged=2), (), "2 lines of its record make no sense"),
        (replace(GOOD, state="FAILED", exit_code="1:0"), (), "is FAILED 1:0, not COMPLETED: it ended"),
        (replace(GOOD, state="FAILED", exit_code="1:0"), (incident("NFS killed"),),
         "is FAILED 1:0, not COMPLETED: it ended"),
        (replace(GOOD, state="CANCELLED", attempts=(JudgedAttempt("done", "", ("mv-1",)),)), (incident("disk full"),),
         "is CANCELLED, not COMPLETED, without a reason"),
        (replace(GOOD, state="PENDING", attempts=()), (), "is still PENDING: no reason is given"),
        (replace(GOOD, state="CANCELLED", ended=119.0, stopped=125.0), (), "is CANCELLED 0:0, not COMPLETED: it ended"),
        (replace(GOOD, state=""), (), "was accepted, and Slurm does not know it"),
        (replace(GOOD, state="", refusal="Socket timed out"), (), "was refused: Socket timed out"),
        (replace(GOOD, kind=BY_NAME["gang"], runs=(replace(GOOD_RUN, nodes=1),)), (),
         "its step ran on 1 nodes, not on 2"),
        (replace(GOOD, kind=BY_NAME["fails"], state="FAILED", exit_code="1:0"), (), "exited with 1:0, not 3:0"),
        (replace(GOOD, kind=BY_NAME["cancel running"], acted=112.0, state="CANCELLED"), (),
         "is CANCELLED, but its script came to its end"),
        (replace(GOOD, kind=BY_NAME["cancel running"], acted=112.0), (), "is COMPLETED 0:0, not CANCELLED: it ended"),
        (replace(GOOD, kind=BY_NAME["time limit"], state="TIMEOUT"), (), "is TIMEOUT, but its script came to its end"),
    ],
)  # fmt: skip
def test_each_kind_of_violation_is_found(
    job: JobFacts, incidents: tuple[HappenedIncident, ...], violation: str
) -> None:
    verdict = judge(job, incidents)
    assert verdict.violations == (violation,) and verdict.ending is Ending.WRONG


@pytest.mark.parametrize(
    ("job", "incidents", "ending"),
    [
        (replace(GOOD, state="NODE_FAIL", runs=()), (incident("QEMU killed", vm="mv-1"),), Ending.EXPLAINED),
        (replace(GOOD, state="CANCELLED", runs=()), (incident("disk full"),), Ending.EXPLAINED),
        (replace(GOOD, state="", refusal="no"), (incident("slurmctld killed"),), Ending.REFUSED),
        (replace(GOOD, refusal="its reply was lost"), (), Ending.EXPECTED),
        (replace(GOOD, state="CANCELLED", ended=121.0, stopped=120.0, runs=()), (), Ending.STOPPED),
        (replace(GOOD, state="CANCELLED", ended=None, stopped=120.0, runs=()), (), Ending.STOPPED),
        (replace(GOOD, kind=BY_NAME["cancel queued"]), (), Ending.EXPECTED),
        (replace(GOOD, kind=BY_NAME["cancel queued"], acted=101.0, state="CANCELLED", runs=()), (), Ending.EXPECTED),
        (replace(AGAIN, kind=BY_NAME["requeued"], acted=106.0), (), Ending.EXPECTED),
        (replace(GOOD, kind=BY_NAME["fails"], state="FAILED", exit_code="3:0"), (), Ending.EXPECTED),
        (replace(GOOD, kind=BY_NAME["out of memory"], state="OUT_OF_MEMORY"), (), Ending.EXPECTED),
    ],
)  # fmt: skip
def test_what_is_explained_is_no_violation(
    job: JobFacts, incidents: tuple[HappenedIncident, ...], ending: Ending
) -> None:
    verdict = judge(job, incidents)
    assert (verdict.violations, verdict.ending) == ((), ending)


def test_an_incident_hits_the_jobs_that_live_while_it_lasts_or_settles() -> None:
    early, late = incident("disk full", 50.0, 100.0 - SETTLE - 1), incident("disk full", 122.0, 130.0)
    settling, at_the_end = incident("disk full", 30.0, 100.0 - SETTLE + 1), incident("disk full", 120.0, 140.0)
    assert judge(GOOD, (early, settling, at_the_end, late)).hits == (settling, at_the_end)


def test_only_incidents_that_may_end_a_job_excuse_its_end() -> None:
    failed = replace(GOOD, state="FAILED", exit_code="1:0")
    excusing = {kind.name for kind in INCIDENTS if not judge(failed, (incident(kind.name, vm="mv-1"),)).violations}
    assert excusing == {kind.name for kind in INCIDENTS if Harm.END in kind.harm}


# --- facts and figures -----------------------------------------------------------------------------


def view(job: str, attempt: int, state: str = "done", reason: str = "", vms: tuple[str, ...] = ()) -> JobView:
    return JobView(
        job, "", 1, attempt, state, nodes=1, cpus=1, memory=1, image="slim", kind="instant", since=0.0, waiting="",
        reason=reason, restarts=0, vms=vms, quarantined="",
    )  # fmt: skip


def test_facts_are_put_together_by_name_and_by_task(tmp_path: Path) -> None:
    accounts = facts.read_accounts(
        "7|soak-1|COMPLETED|0:0|1700000000\n8_1|soak-2|CANCELLED by 30707|0:0|1700000001\n"
        "8_[2-3]|soak-2|PENDING|0:0|Unknown\n"
    )
    (tmp_path / "soak-1.record").write_text("begin 0 mv-1 5.0\nend 0 mv-1 6.0\nnonsense\n")
    (tmp_path / "soak-1.out").write_text(f"warning\n{whole('soak-1')}\n")
    jobs = [SubmittedJob("soak-1", BY_NAME["batch"], 1.0, "7"), SubmittedJob("soak-2", BY_NAME["array"], 2.0, "8")]
    jobs.append(SubmittedJob("soak-3", BY_NAME["srun"], 3.0, refusal="no"))
    attempts = [view("7", 5, vms=("mv-1",)), view("7", 4, state="requeued", reason="died"), view("8_1", 6)]
    one, *tasks, refused = facts.collect(jobs, accounts, attempts, tmp_path, None)
    assert (one.job_id, one.state, one.ended, one.whole, one.damaged) == ("7", "COMPLETED", 1700000000.0, True, 1)
    assert [attempt.reason for attempt in one.attempts] == ["died", ""] and one.runs[0].ended
    assert [(task.name, task.job_id, task.state) for task in tasks] == [
        ("soak-2_1", "8_1", "CANCELLED"), ("soak-2_2", "8_2", "PENDING"), ("soak-2_3", "8_3", "PENDING"),
    ]  # fmt: skip
    assert [len(task.attempts) for task in tasks] == [1, 0, 0]
    assert (refused.state, refused.refusal, refused.job_id) == ("", "no", "")


@dataclass
class TellingLab:
    """A lab with these answers of Slurm's commands."""

    answers: dict[str, str]
    env: dict[str, str] = field(default_factory=dict)

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(argv, 0, self.answers[argv[0]])


async def test_jobs_that_slurm_does_not_account_for_are_remembered() -> None:
    lab = TellingLab(
        {"sacct": "7|soak-1|COMPLETED|0:0|5\n", "squeue": "8|soak-2|CANCELLED||6\n7|soak-1|COMPLETED||5\n"}
    )
    found = await facts.accounts(cast("LabSession", lab))
    assert found == {
        "soak-1": facts.Account("7", "COMPLETED", "0:0", 5.0),
        "soak-2": facts.Account("8", "CANCELLED", "", 6.0),
    }


def result() -> SoakResult:
    happened = [
        incident("disk full", 100.0, 109.0),
        incident("disk full", 115.0, 119.0),
        incident("names lost", 1, 200),
    ]
    verdicts = [judge(GOOD, ()), judge(replace(AGAIN, name="soak-2"), ()), judge(replace(GOOD, whole=False), ())]
    return SoakResult(
        verdicts, happened, {"soak-2": ["100.0 vm-1 died dead"]}, ["munged ended by itself"], ["node mv1-2 in Slurm"], 4
    )


def test_incidents_are_summed_up_with_the_time_until_a_job_started() -> None:
    found = summary.incidents(result().incidents, result().verdicts)
    assert found == {
        "disk full": summary.IncidentSummary(2, 9.0, 1.0),
        "names lost": summary.IncidentSummary(1, 199.0, None),
    }


def test_the_document_has_every_violation_with_its_timeline() -> None:
    found = json.loads(json.dumps(summary.document(result(), 7, 2.0)))
    assert found["seed"] == 7 and found["not_submitted"] == 4 and found["left"] == ["node mv1-2 in Slurm"]
    assert found["jobs"] == {"batch": {"as expected": 1, "wrong": 2}}
    assert [one["violations"] for one in found["violations"]] == [
        ["ran 2 times, where 1 is explained"], ["its output is not whole"],
    ]  # fmt: skip
    assert found["violations"][0]["timeline"] == ["100.0 vm-1 died dead"]


def test_what_is_not_as_expected_is_explained_in_a_line() -> None:
    assert judge(AGAIN, KILLED).explanation == "COMPLETED, 2 runs: mv-0 died"
    refused = judge(replace(GOOD, state="", refusal="no answer"), (incident("slurmctld killed"),))
    assert refused.explanation == "refused: no answer"
    failed = replace(GOOD, state="NODE_FAIL", attempts=(JudgedAttempt("done", "mv-1 died", ("mv-1",)),))
    hit = (incident("QEMU killed", vm="mv-1"),)
    assert judge(failed, hit).explanation == "NODE_FAIL, 1 runs: mv-1 died"
    found = summary.document(SoakResult([judge(failed, hit), judge(GOOD, ())]), 7, 2.0)
    assert found["explained"] == [
        {"job": "9", "name": "soak-1", "kind": "batch", "explanation": "NODE_FAIL, 1 runs: mv-1 died",
         "hits": ["QEMU killed"]},
    ]  # fmt: skip


def test_the_printed_result_names_the_seed_the_violations_and_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    command._print(result(), 7, 2.0)
    shown = capsys.readouterr().out
    for words in ("seed 7", "its output is not whole", "vm-1 died dead", "disk full"):
        assert words in shown
    assert "left: node mv1-2 in Slurm" in shown and "died: munged ended by itself" in shown
    assert "nothing is left" not in shown
    good = [judge(GOOD, ())]
    assert not result().good and SoakResult(good).good
    assert not SoakResult(good, died=["munged"]).good and not SoakResult(good, leftovers=["node"]).good
