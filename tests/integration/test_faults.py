"""Each job runs once although processes are killed at the worst moments: on the real lab, with real kills."""

from __future__ import annotations

import time

import pytest

from multiverse.core.machines.tables import TABLES
from multiverse.core.model.job import PREEMPTED_STATES, LeaseState
from multiverse.core.model.saved import SavedState
from multiverse.core.model.vm import SLEEPING_STATES
from tests.integration.conftest import LabUnderTest
from tests.integration.restarting_daemon import RestartingDaemon, StartDaemon, attempt_is, counting_job
from tests.integration.watch import accounted, kept_by_slurm, mend, nothing_left, until, written

pytestmark = pytest.mark.integration
slow = pytest.mark.slow

ELSEWHERE = {
    "attempt:failed": "takes half an hour of attempts without a VM; simulation",
    "attempt:ungated": "the job would have to leave the gate by another hand than ours; simulation",
    "attempt:stray": "the scheduler would have to start a requeued job on its old VM; simulation",
    "attempt:restoring": "takes a partition that overflows into VMs, see test_overflow; simulation",
    "attempt:adding_user": "takes a pool that offers its spares, see test_pool; simulation",
    "attempt:holding": "takes ten runs in a row that end at once, see the contract of the scheduler; simulation",
    "attempt:returning": "its user would have to hold the job while its VMs are made; simulation",
    "vm:retiring": "takes a pool that offers its spares, see test_pool; simulation",
    "vm:dead": "its QEMU would have to die between the pin and the job's start; simulation",
    "vm:ending": "its VM would have to fail, see the tests that kill a QEMU; simulation",
    "vm:removing": "its VM would have to fail, see the tests that kill a QEMU; simulation",
    "vm:deleting": "Slurm would have to keep the node of a VM that is gone, see test_planned_nodes; simulation",
    "vm:lost": "this lab's only host is never out of reach; simulation",
    "vm:moving": "takes two hosts, see test_live_moves; simulation",
    "vm:settling": "takes two hosts, see test_live_moves; simulation",
    **{f"vm:{state}": "takes a job that is suspended, see test_sleeping_jobs" for state in SLEEPING_STATES},
    **{
        f"attempt:{state}": "takes a job that is preempted, see test_evictions; simulation"
        for state in PREEMPTED_STATES
    },
    "vm:orphan": "the database would have to be replaced under a running job; simulation",
    "offer:open": "takes a pool that offers its spares, see test_pool; simulation",
    "offer:taken": "takes a pool that offers its spares, see test_pool; simulation",
    "offer:closing": "takes a pool that offers its spares, see test_pool; simulation",
    "offer:closed": "takes a pool that offers its spares, see test_pool; simulation",
    "offer:ended": "takes a pool that offers its spares, see test_pool; simulation",
    "template:broken": "takes an image that does not boot, see test_status; simulation",
    "host:known": "is reached at the first start, before crash points are set; simulation",
    "host:silent": "takes a host that is cut off, see test_hosts; simulation",
    "host:fencing": "takes a host that is cut off, see test_hosts; simulation",
    "host:fenced": "takes a host that is cut off, see test_hosts; simulation",
    "host:removed": "takes an operator, see test_hosts; simulation",
    "host:returned": "takes a lease, see test_leases; simulation",
    **{f"lease:{state}": "takes a partition that lends hosts, see test_leases; simulation" for state in LeaseState},
    **{f"saved:{state}": "takes a job that is saved, see test_save_command" for state in SavedState},
}
AT_EACH_END = ("attempt:cancelled", "attempt:requeued", "attempt:revoked", "attempt:revoking")
STATES = [f"{kind}:{state}" for kind, table in TABLES.items() for state in dict.fromkeys(t.target for t in table)]
ON_ITS_WAY = [state for state in STATES if state not in ELSEWHERE and state not in AT_EACH_END]
ON_THE_HOST = ["qemu", *(f"manifest:{phase}" for phase in ("creating", "parked", "starting", "started"))]
MIDWAY = [*ON_THE_HOST, "scontrol:update", "scontrol:delete"]


@pytest.mark.parametrize(
    "points",
    [
        pytest.param([f"after {state} controller" for state in ON_ITS_WAY], id="after-each-commit", marks=slow),
        pytest.param([f"before {state} controller" for state in ON_ITS_WAY], id="before-each-commit", marks=slow),
        pytest.param([f"after {point} controller" for point in MIDWAY], id="in-each-effect", marks=slow),
        pytest.param([f"before {point} controller" for point in MIDWAY], id="before-each-effect", marks=slow),
        pytest.param([f"after {point} agent" for point in ON_THE_HOST], id="agent-in-each-effect", marks=slow),
        pytest.param([f"before {point} agent" for point in ON_THE_HOST], id="agent-before-each-effect", marks=slow),
        *(pytest.param([f"{when} {state} controller"], id=f"{when}-{state}", marks=slow)
          for state in ON_ITS_WAY for when in ("before", "after")),
    ],
)  # fmt: skip
def test_a_controller_or_an_agent_killed_in_each_state_runs_its_job_once(
    lab: LabUnderTest, start_daemon: StartDaemon, points: list[str]
) -> None:
    path, script = counting_job(lab, "each")
    daemon = start_daemon(())
    if any("template:" in point for point in points):
        command_template(daemon, "build", ["ready"])
        daemon.set_crash_points(points)
        command_template(daemon, "drop", [])
    else:
        daemon.set_crash_points(points)
    job = lab.sbatch(script, "--output=/dev/null")
    until(f"job {job} is over", lambda: attempt_is(daemon, job))
    until("all crash points were reached", lambda: daemon.ensure_up() and not daemon.crash_points_left(), 30)
    assert written(path) == "run 0\n" and accounted(lab, job) == ("COMPLETED", "0:0")
    assert len(daemon.client.jobs(job)) == 1, "in one attempt"
    nothing_left(lab, daemon.client)


def command_template(daemon: RestartingDaemon, word: str, states: list[str]) -> None:
    """Give an operator's command about the template until the template has the states. The command is repeated because
    the daemon may crash before it is committed."""

    def reached() -> bool:
        seen = daemon.call(lambda client: [template["state"] for template in client.templates()])
        if seen != states:
            daemon.call(lambda client: client.template(word, "slim"))
        return bool(seen == states)

    until(f"the template followed the command {word}", reached)


@pytest.mark.slow
def test_a_controller_killed_at_each_other_end_leaves_nothing(lab: LabUnderTest, start_daemon: StartDaemon) -> None:
    path, script = counting_job(lab, "ends", "[ $SLURM_RESTART_COUNT ] || sleep 600")
    daemon = start_daemon([f"{when} {state} controller" for state in AT_EACH_END for when in ("before", "after")])
    until("it is up", daemon.ensure_up)
    never = lab.sbatch("true", "--hold", "--output=/dev/null")
    again = lab.sbatch(script, "--requeue", "--output=/dev/null")
    unserved = lab.sbatch("true", "--cluster-constraint=x", "--output=/dev/null")
    until("it runs", lambda: attempt_is(daemon, again, "allocated") and path.exists())
    lab.run("scontrol", "requeue", again)
    # Before this, slurmctld may start the job on the VM of its first run, which the controller then ends.
    until("its first run is over", lambda: attempt_is(daemon, again, "queued"))
    now = ("scontrol", "update", f"JobId={again}", "StartTime=now")  # without Slurm's delay
    until("it is queued again", lambda: lab.run(*now, check=False).returncode == 0)
    lab.run("scancel", never)
    until("one is over", lambda: attempt_is(daemon, never, "cancelled"))
    until("one is refused", lambda: attempt_is(daemon, unserved, "revoked"))
    until("the other has run again", lambda: attempt_is(daemon, again))
    until("all crash points were reached", lambda: daemon.ensure_up() and not daemon.crash_points_left(), 30)
    assert written(path) == "run 0\nrun 1\n" and accounted(lab, again) == ("COMPLETED", "0:0")
    nothing_left(lab, daemon.client)


@pytest.mark.parametrize("state", [pytest.param("parked", marks=slow), "starting", pytest.param("joined", marks=slow)])
def test_a_qemu_killed_before_the_job_runs_is_replaced(
    lab: LabUnderTest, start_daemon: StartDaemon, state: str
) -> None:
    path, script = counting_job(lab, "emulator")
    daemon = start_daemon([f"after vm:{state} qemu"])
    job = lab.sbatch(script, "--output=/dev/null")
    until(f"job {job} is over", lambda: attempt_is(daemon, job))
    assert not daemon.crash_points_left()
    # Slurm may have given the job the node that had just died. Then the job is requeued, but its script ran once.
    (run,) = written(path).splitlines()
    assert state == "joined" or run == "run 0"
    assert accounted(lab, job) == ("COMPLETED", "0:0")
    nothing_left(lab, daemon.client)


@pytest.mark.parametrize(
    "point",
    [
        "after attempt:spawning slurmctld",
        pytest.param("before scontrol:update slurmctld", marks=slow),
        pytest.param("after scontrol:update slurmctld", marks=slow),
        pytest.param("after attempt:spawning munged", marks=slow),
        pytest.param("after attempt:spawning ganesha", marks=slow),
    ],
)
def test_a_service_killed_while_a_vm_starts(lab: LabUnderTest, start_daemon: StartDaemon, point: str) -> None:
    path, script = counting_job(lab, "service")
    daemon = start_daemon([point])
    submitted = time.time()
    job = lab.sbatch(script, "--output=/dev/null")
    kept_by_slurm(lab, submitted)
    until("the service is killed", lambda: daemon.ensure_up() and not daemon.crash_points_left())
    mend(lab)
    until(f"job {job} is over", lambda: attempt_is(daemon, job))
    assert written(path) == "run 0\n" and accounted(lab, job) == ("COMPLETED", "0:0")
    nothing_left(lab, daemon.client)
