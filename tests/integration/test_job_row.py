"""A thousand jobs with VMs inside, with mixed ends: nothing is left of them, and the agent does not grow.

MULTIVERSE_JOB_ROW says how many.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.integration.conftest import LabUnderTest
from tests.integration.job_nodes import JobNode, job_nodes
from tests.integration.watch import until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

JOBS = int(os.environ.get("MULTIVERSE_JOB_ROW", "1000"))
AT_ONCE = 4
KINDS = ("success", "failure", "signal", "cancelled", "step")
ENDS = {
    "success": ("COMPLETED", "0:0"),
    "failure": ("FAILED", "3:0"),
    "signal": ("FAILED", "0:9"),
    "cancelled": ("CANCELLED", "0:0"),
    "step": ("COMPLETED", "0:0"),
}
SCRIPT = """
case $((SLURM_ARRAY_TASK_ID % 5)) in
0) hostname >> {ran} ;;
1) exit 3 ;;
2) kill -KILL $$ ;;
3) touch {home}/cancel-$SLURM_ARRAY_TASK_ID; sleep 600 ;;
4) srun --quiet hostname >> {ran} ;;
esac
"""


@dataclass(frozen=True)
class AgentUse:
    """What the agent uses, with no job on its node. Memory in KiB."""

    memory: int
    descriptors: int
    threads: int


@pytest.fixture(scope="module")
def node(lab_of_two: LabUnderTest) -> JobNode:
    node = job_nodes(lab_of_two)[0]
    node.begin()
    return node


def _use(node: JobNode) -> AgentUse:
    process = Path(f"/proc/{node.running('agent').pid}")
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return AgentUse(int(fields["VmRSS"].split()[0]), len(list((process / "fd").iterdir())), int(fields["Threads"]))


def _run(node: JobNode, jobs: int) -> Counter[tuple[str, str, str]]:
    """Run so many jobs, and cancel those that ask for it. How many ended how, by kind, state and exit code."""
    lab: LabUnderTest = node.under_test
    ran = lab.user.home / "ran"
    ran.unlink(missing_ok=True)
    script = SCRIPT.format(ran=ran, home=lab.user.home)
    array = node.sbatch(script, f"--array=0-{jobs - 1}%{AT_ONCE}", f"--output={lab.user.home}/row.%a")

    def over() -> bool:
        for asked in lab.user.home.glob("cancel-*"):
            lab.run("scancel", f"{array}_{asked.name.partition('-')[2]}", check=False)
            asked.unlink()
        time.sleep(0.5)
        return not lab.run("squeue", "-h", "-j", array, check=False).stdout.strip()

    until(f"{jobs} jobs are over", over, 30 * jobs + 120)
    node.nothing_left()
    hosts = ran.read_text().split()
    assert all(host.startswith("mvjob-") for host in hosts) and len(set(hosts)) == len(hosts), "each in a VM of its own"
    shown = ("sacct", "-X", "-n", "-P", "-o", "JobID,State,ExitCode,End", "-j", array)
    lines = until("all are accounted for", lambda: _ended(lab.run(*shown).stdout, jobs), 120)
    ends = {int(name.partition("_")[2]): (state.split()[0], code) for name, state, code, _ in lines}
    for number, end in ends.items():
        if end != ENDS[KINDS[number % len(KINDS)]]:
            print(f"\njob {number} ended as {end}: {(lab.user.home / f'row.{number}').read_text()}")
    return Counter((KINDS[number % len(KINDS)], *end) for number, end in ends.items())


def _ended(text: str, jobs: int) -> list[list[str]]:
    lines = [line.split("|") for line in text.splitlines()]
    return lines if len(lines) == jobs and all(end != "Unknown" for *_, end in lines) else []


@pytest.mark.timeout(7200)
def test_a_thousand_jobs_with_all_ends_leave_nothing_and_the_agent_does_not_grow(node: JobNode) -> None:
    uses, began = [], time.monotonic()
    for jobs in (JOBS // 10, (JOBS - JOBS // 10) // 2, JOBS - JOBS // 10 - (JOBS - JOBS // 10) // 2):
        counted = _run(node, jobs)
        expected = Counter({(kind, *ENDS[kind]): len(range(one, jobs, len(KINDS))) for one, kind in enumerate(KINDS)})
        assert counted == +expected
        uses.append(_use(node))
        print(f"\nafter {jobs} more, {time.monotonic() - began:.0f} s: {asdict(uses[-1])}")
    before, half, after = uses
    assert after.descriptors <= before.descriptors + 6
    assert after.threads <= before.threads + 64
    assert min(half.memory - before.memory, after.memory - half.memory) <= 4096 + JOBS // 2
