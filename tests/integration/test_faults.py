"""What dies, dies at the worst moment, and each job runs once all the same: on the real lab, with real kills."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from multiverse.client import Client
from multiverse.core.lifecycle import TABLES
from tests.integration.conftest import LabUnderTest
from tests.integration.mortal import Deadly, counting, over
from tests.integration.watch import accounted, nothing_left, until, written

pytestmark = pytest.mark.integration
slow = pytest.mark.slow

ELSEWHERE = {
    "attempt:revoked": "the gate refuses what could never run; simulation",
    "attempt:failed": "takes five attempts without a VM; simulation",
    "vm:lost": "this lab's only host is never out of reach; simulation",
    "template:broken": "takes an image that does not boot; simulation",
}
AT_EACH_END = ("attempt:cancelled", "attempt:requeued")
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
    lab: LabUnderTest, client: Client, controller: Callable[[], int], deadly: Deadly, fates: list[str]
) -> None:
    path, script = counting(lab, "each")
    with_template = any("template:" in fate for fate in fates)
    if with_template:
        client.template("build", "slim")
        until("there is a template", lambda: [t for t in client.templates() if t["state"] == "ready"])
    mortal = deadly(fates)
    if with_template:
        until("the template is to go", lambda: mortal.tell(lambda c: c.template("drop", "slim")))
        until("it is gone", lambda: mortal.tell(lambda c: not c.templates()))
    job = lab.sbatch(script, "--output=/dev/null")
    until(f"job {job} is over", lambda: over(mortal, job))
    until("all fates have come to pass", lambda: mortal.up() and not mortal.left(), 30)
    mortal.close()
    controller()
    assert written(path) == "run 0\n" and accounted(lab, job) == ("COMPLETED", "0:0")
    assert len(client.jobs(job)) == 1, "in one attempt"
    nothing_left(lab, client)


def test_a_controller_killed_at_each_other_end_leaves_nothing(
    lab: LabUnderTest, client: Client, controller: Callable[[], int], deadly: Deadly
) -> None:
    path, script = counting(lab, "ends", "[ $SLURM_RESTART_COUNT ] || sleep 600")
    mortal = deadly([f"{when} {state} controller" for state in AT_EACH_END for when in ("before", "after")])
    never = lab.sbatch("true", "--hold", "--output=/dev/null")
    again = lab.sbatch(script, "--requeue", "--output=/dev/null")
    until("it runs", lambda: over(mortal, again, "allocated") and path.exists())
    lab.run("scontrol", "requeue", again)
    lab.run("scancel", never)
    until("one is over", lambda: over(mortal, never, "cancelled"))
    until("the other has run again", lambda: over(mortal, again))
    until("all fates have come to pass", lambda: mortal.up() and not mortal.left(), 30)
    mortal.close()
    controller()
    assert written(path) == "run 0\nrun 1\n" and accounted(lab, again) == ("COMPLETED", "0:0")
    nothing_left(lab, client)


@pytest.mark.parametrize("state", ["parked", "starting", pytest.param("joined", marks=slow)])
def test_a_qemu_killed_before_the_job_runs_is_replaced(
    lab: LabUnderTest, client: Client, controller: Callable[[], int], deadly: Deadly, state: str
) -> None:
    path, script = counting(lab, "emulator")
    mortal = deadly([f"after vm:{state} qemu"])
    job = lab.sbatch(script, "--output=/dev/null")
    until(f"job {job} is over", lambda: over(mortal, job))
    assert not mortal.left()
    mortal.close()
    controller()
    assert written(path) == "run 0\n" and accounted(lab, job) == ("COMPLETED", "0:0")
    nothing_left(lab, client)
