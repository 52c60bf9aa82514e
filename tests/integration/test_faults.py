"""What dies, dies at the worst moment, and each job runs once all the same: on the real lab, with real kills."""

from __future__ import annotations

import time

import pytest

from multiverse.core.machines.tables import TABLES
from tests.integration.conftest import LabUnderTest
from tests.integration.mortal import Deadly, Mortal, counting, over
from tests.integration.watch import accounted, kept_by_slurm, mend, nothing_left, until, written

pytestmark = pytest.mark.integration
slow = pytest.mark.slow

ELSEWHERE = {
    "attempt:failed": "takes half an hour of attempts without a VM; simulation",
    "vm:lost": "this lab's only host is never out of reach; simulation",
    "template:broken": "takes an image that does not boot, see test_status; simulation",
}
AT_EACH_END = ("attempt:cancelled", "attempt:requeued", "attempt:revoked")
STATES = [f"{kind}:{state}" for kind, table in TABLES.items() for state in dict.fromkeys(t.target for t in table)]
ON_ITS_WAY = [state for state in STATES if state not in ELSEWHERE and state not in AT_EACH_END]
MIDWAY = ["qemu", *(f"manifest:{phase}" for phase in ("making", "parked", "starting", "started"))]
MIDWAY += ["scontrol:update", "scontrol:delete"]


@pytest.mark.parametrize(
    "fates",
    [
        pytest.param([f"after {state} controller" for state in ON_ITS_WAY], id="after-each-commit"),
        pytest.param([f"before {state} controller" for state in ON_ITS_WAY], id="before-each-commit", marks=slow),
        pytest.param([f"after {point} controller" for point in MIDWAY], id="in-each-effect"),
        pytest.param([f"before {point} controller" for point in MIDWAY], id="before-each-effect", marks=slow),
        *(pytest.param([f"{when} {state} controller"], id=f"{when}-{state}", marks=slow)
          for state in ON_ITS_WAY for when in ("before", "after")),
    ],
)  # fmt: skip
def test_a_controller_killed_in_each_state_runs_its_job_once(
    lab: LabUnderTest, deadly: Deadly, fates: list[str]
) -> None:
    path, script = counting(lab, "each")
    mortal = deadly(())
    if any("template:" in fate for fate in fates):
        say(mortal, "build", ["ready"])
        mortal.doom(fates)
        say(mortal, "drop", [])
    else:
        mortal.doom(fates)
    job = lab.sbatch(script, "--output=/dev/null")
    until(f"job {job} is over", lambda: over(mortal, job))
    until("all fates have come to pass", lambda: mortal.up() and not mortal.left(), 30)
    assert written(path) == "run 0\n" and accounted(lab, job) == ("COMPLETED", "0:0")
    assert len(mortal.client.jobs(job)) == 1, "in one attempt"
    nothing_left(lab, mortal.client)


def say(mortal: Mortal, word: str, states: list[str]) -> None:
    """An operator's word about the template, until it has come to that: said again, for it may die with the daemon."""

    def heeded() -> bool:
        seen = mortal.tell(lambda client: [template["state"] for template in client.templates()])
        if seen != states:
            mortal.tell(lambda client: client.template(word, "slim"))
        return bool(seen == states)

    until(f"the template has heard: {word}", heeded)


def test_a_controller_killed_at_each_other_end_leaves_nothing(lab: LabUnderTest, deadly: Deadly) -> None:
    path, script = counting(lab, "ends", "[ $SLURM_RESTART_COUNT ] || sleep 600")
    mortal = deadly([f"{when} {state} controller" for state in AT_EACH_END for when in ("before", "after")])
    until("it is up", mortal.up)
    never = lab.sbatch("true", "--hold", "--output=/dev/null")
    again = lab.sbatch(script, "--requeue", "--output=/dev/null")
    unserved = lab.sbatch("true", "--profile=task", "--output=/dev/null")
    until("it runs", lambda: over(mortal, again, "allocated") and path.exists())
    lab.run("scontrol", "requeue", again)
    lab.run("scancel", never)
    until("one is over", lambda: over(mortal, never, "cancelled"))
    until("one is refused", lambda: over(mortal, unserved, "revoked"))
    until("the other has run again", lambda: over(mortal, again))
    until("all fates have come to pass", lambda: mortal.up() and not mortal.left(), 30)
    assert written(path) == "run 0\nrun 1\n" and accounted(lab, again) == ("COMPLETED", "0:0")
    nothing_left(lab, mortal.client)


@pytest.mark.parametrize("state", [pytest.param("parked", marks=slow), "starting", pytest.param("joined", marks=slow)])
def test_a_qemu_killed_before_the_job_runs_is_replaced(lab: LabUnderTest, deadly: Deadly, state: str) -> None:
    path, script = counting(lab, "emulator")
    mortal = deadly([f"after vm:{state} qemu"])
    job = lab.sbatch(script, "--output=/dev/null")
    until(f"job {job} is over", lambda: over(mortal, job))
    assert not mortal.left()
    # Once: Slurm may have given it the node that had just died, and it is another run of the job then, of no script.
    (run,) = written(path).splitlines()
    assert state == "joined" or run == "run 0"
    assert accounted(lab, job) == ("COMPLETED", "0:0")
    nothing_left(lab, mortal.client)


@pytest.mark.parametrize(
    "fate",
    [
        "after attempt:spawning slurmctld",
        pytest.param("before scontrol:update slurmctld", marks=slow),
        pytest.param("after scontrol:update slurmctld", marks=slow),
        pytest.param("after attempt:spawning munged", marks=slow),
        pytest.param("after attempt:spawning ganesha", marks=slow),
    ],
)
def test_a_service_killed_while_a_vm_starts(lab: LabUnderTest, deadly: Deadly, fate: str) -> None:
    path, script = counting(lab, "service")
    mortal = deadly([fate])
    submitted = time.time()
    job = lab.sbatch(script, "--output=/dev/null")
    kept_by_slurm(lab, submitted)
    until("it is killed", lambda: mortal.up() and not mortal.left())
    mend(lab)
    until(f"job {job} is over", lambda: over(mortal, job))
    assert written(path) == "run 0\n" and accounted(lab, job) == ("COMPLETED", "0:0")
    nothing_left(lab, mortal.client)
