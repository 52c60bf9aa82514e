"""The number of Slurm commands, commits and processes for each job, counted on the real lab. No times are measured.

Commands of periodic polling (squeue, sinfo, scontrol show, and for arrays that wait scontrol -o) are not counted,
because they do not depend on jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from multiverse.client import Client
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import ended, nothing_left, release

pytestmark = pytest.mark.integration

IN_A_ROW, AT_ONCE = 5, 10
ALONE = {
    "scontrol update": 1.1,
    "scontrol delete": 1.1,
    "sdiag": 1.1,
    "sacctmgr": 1.1,
    "commits": 13.0,
    "qemu": 1.1,
    "others": 0.1,
}
"""The most for each job: its pin is one update, its node is deleted once (before 22.05.9 after a look at backfill,
decision 85), its user is told once what it used, its VM is one QEMU. Facts that arrive close together share a commit,
so a slow machine commits more often: 9.6 to 11.2 times."""

TOGETHER = ALONE | {"scontrol update": 2.1, "sacctmgr": 1.1 + IN_A_ROW / AT_ONCE, "commits": 8.0}
"""The most for each of several jobs: a job that waits gets an update with the reason, and jobs share commits. Users of
the jobs before may be told only now."""


POLLING = ("squeue", "sinfo", "scontrol show", "scontrol -o")

AGAIN = {"scontrol update": 1.5}
"""From 24.11 on slurmctld may refuse to change a job for a moment, and the update is repeated once or twice."""


def counts(client: Client) -> dict[str, float]:
    found = dict.fromkeys(ALONE, 0.0)
    for family in text_string_to_metric_families(client.metrics()):
        for name, labels, value, *_ in family.samples:
            if name == "multiverse_commits_total":
                found["commits"] = value
            elif name == "multiverse_processes_total" and labels["program"] not in POLLING:
                program = labels["program"]
                key = "qemu" if program.startswith("qemu-system") else program if program in ALONE else "others"
                found[key] += value
    return found


def check(what: str, jobs: int, budgets: dict[str, float], before: dict[str, float], after: dict[str, float]) -> None:
    per_job = {name: (after[name] - before[name]) / jobs for name in budgets}
    print(f"{what}, for each of {jobs} jobs:", ", ".join(f"{name} {value:.2f}" for name, value in per_job.items()))
    assert {name: value for name, value in per_job.items() if value > budgets[name]} == {}, per_job
    assert per_job["scontrol update"] >= 1 and per_job["qemu"] >= 1, "the commands that every job needs were counted"


def test_a_job_costs_no_more_than_its_budget(lab: LabUnderTest, controller: Callable[[], int]) -> None:
    controller()
    client = Client(lab.settings.socket)
    ended(client, lab.sbatch("true", "--output=/dev/null"), "done")  # from here on there is a template
    nothing_left(lab, client)
    new = release(lab.run("sbatch", "--version").stdout) >= (24, 11)
    alone, together = (Counter(budget) + Counter(AGAIN if new else {}) for budget in (ALONE, TOGETHER))
    before = counts(client)
    for _ in range(IN_A_ROW):
        ended(client, lab.sbatch("true", "--output=/dev/null"), "done")
    nothing_left(lab, client)
    after = counts(client)
    check("one after the other", IN_A_ROW, alone, before, after)

    array = lab.sbatch("true", f"--array=1-{AT_ONCE}", "--output=/dev/null")
    for task in range(1, AT_ONCE + 1):
        ended(client, f"{array}_{task}", "done")
    nothing_left(lab, client)
    check("at once", AT_ONCE, together, after, counts(client))
