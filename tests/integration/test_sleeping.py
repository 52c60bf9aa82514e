"""VMs of suspended jobs sleep, and Slurm does not notice: with real Slurm and real QEMU, without a controller."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from multiverse.core.errors import Broken, Refused
from multiverse.core.model.identity import Identity
from multiverse.core.model.job import NodeSpec
from multiverse.core.model.vm import VmCondition, VmSeen
from multiverse.drivers.slurm.site.conf import value
from multiverse.drivers.slurm.site.stand_in import stand_in
from multiverse.host import manifest, process
from multiverse.host.manifest import Sleep
from tests.integration.saved_jobs import SavedJob, Saver, saver
from tests.integration.test_restarts import restart_slurmctld
from tests.integration.watch import until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_controller")]

__all__ = ["saver"]  # a fixture

SCRIPT = """
srun --overlap bash -c 'echo step begins; until [ -e go ]; do sleep 0.2; done; exit 3' & step=$!
until [ -e go ]; do echo tick; sleep 0.5; done
wait $step; echo step $?; exit 7
"""
KEY = "ab" * 32


def run(saver: Saver) -> SavedJob:
    job = saver.run(SCRIPT)
    saver.says("step begins")
    saver.says("tick")
    return job


def suspend(saver: Saver, job: SavedJob) -> None:
    saver.lab.run("scontrol", "suspend", job.id)
    assert saver.state(job) == "SUSPENDED"


def sleep(saver: Saver, job: SavedJob, key: str = "") -> None:
    tag = f"mv_{job.vm.rpartition('-')[2]}{job.runs}"
    node = NodeSpec(job.vm, job.spec.address, job.node, ("slim", "instant", tag), tag, "slim")
    identity = Identity(job.vm, job.spec.mac, job.spec.address, saver.settings.network.gateway, "",
                        bootstrap=stand_in(saver.settings, node))  # fmt: skip
    saver.host.sleep(job.vm, job.spec.token, job.sleeps, identity, job.spec.bridge, key)


def wake(saver: Saver, job: SavedJob, key: str = "", *, runs: bool = True) -> None:
    saver.host.wake(job.vm, job.spec.token, job.sleeps, runs=runs, key=key)


def seen(saver: Saver, job: SavedJob) -> VmSeen:
    return saver.host.observe().vms[job.vm]


def asleep(saver: Saver, job: SavedJob) -> Sleep:
    known = manifest.read(saver.settings.qemu.vms / job.vm)
    assert known is not None and known.sleep is not None
    return known.sleep


def ticks(saver: Saver) -> int:
    return saver.output().count("tick")


def goes_on_and_ends(saver: Saver, job: SavedJob) -> None:
    """The job goes on where it was, and its step and its script end with their own exit codes."""
    before = ticks(saver)
    until("the script goes on", lambda: ticks(saver) > before + 1, 20)
    (saver.lab.user.home / "go").touch()
    assert saver.end(job) == ("FAILED", "7:0")
    assert "step 3" in saver.output()
    ended = [(row["JobID"].partition(".")[2], row["State"], row["ExitCode"]) for row in saver.records(job)]
    assert ended == [("", "FAILED", "7:0"), ("batch", "FAILED", "7:0"), ("0", "FAILED", "3:0")]


def node_answers(saver: Saver, job: SavedJob) -> bool:
    shown = saver.lab.run("scontrol", "show", "node", job.vm).stdout
    return "State=IDLE+DYNAMIC_NORM " in shown and f"NodeAddr={job.spec.address.partition('/')[0]} " in shown


def files_of(saver: Saver) -> list[str]:
    """What is left where memory is written to."""
    return [path.name for path in saver.settings.save.directory.iterdir() if not path.name.startswith(".storage")]


@pytest.mark.slow
@pytest.mark.parametrize("longer", [False, True])
def test_slurm_does_not_notice_a_sleep_also_of_longer_than_its_timeout(saver: Saver, *, longer: bool) -> None:
    job = run(saver)
    suspend(saver, job)
    sleep(saver, job)
    before = ticks(saver)
    assert seen(saver, job).condition is VmCondition.ASLEEP
    assert seen(saver, job).private == 0.0
    limit = int(value(saver.lab.where.slurm_conf.read_text(), "SlurmdTimeout"))
    deadline = time.monotonic() + (limit + 30 if longer else 4)
    while time.monotonic() < deadline:
        assert saver.state(job) == "SUSPENDED"
        assert node_answers(saver, job)
        time.sleep(2)
    assert ticks(saver) == before
    saver.lab.run("scontrol", "resume", job.id)
    assert saver.state(job) == "RUNNING"
    wake(saver, job)
    assert seen(saver, job).condition is VmCondition.RUNNING
    assert files_of(saver) == []
    skew = saver.host.examine(job.vm)["skew"]
    assert abs(int(skew)) < 1000, "milliseconds"
    goes_on_and_ends(saver, job)


def test_it_sleeps_and_wakes_again_and_its_file_is_encrypted(saver: Saver) -> None:
    job = run(saver)
    for _ in range(3):
        suspend(saver, job)
        job.sleeps += 1
        sleep(saver, job, KEY)
        sleep(saver, job, KEY)
        saver.lab.run("scontrol", "resume", job.id)
        wake(saver, job, KEY)
        wake(saver, job, KEY)
        with pytest.raises(Refused, match="is over"):
            sleep(saver, job, KEY)
        before = ticks(saver)
        until("the script goes on", lambda before=before: ticks(saver) > before, 20)
    goes_on_and_ends(saver, job)


@pytest.mark.slow
def test_a_job_that_is_still_suspended_stays_so_when_its_vm_wakes(saver: Saver) -> None:
    job = run(saver)
    suspend(saver, job)
    sleep(saver, job)
    wake(saver, job, runs=False)
    before = ticks(saver)
    time.sleep(3)
    assert (ticks(saver), saver.state(job)) == (before, "SUSPENDED")
    saver.lab.run("scontrol", "resume", job.id)
    goes_on_and_ends(saver, job)


def test_a_job_goes_on_though_nobody_hears_its_guest_any_more(saver: Saver) -> None:
    """Its VM was only about to sleep, so the guest hears all that Slurm asks of it."""
    job = run(saver)
    suspend(saver, job)
    channel = saver.host._context.connections.started_channel(job.vm)
    channel._credit = -1.0  # as if the guest had flooded it
    channel.shut_down()
    with pytest.raises(Broken, match="flooded"):
        sleep(saver, job)
    for runs in (False, False, True):
        wake(saver, job, runs=runs)
        known = manifest.read(saver.settings.qemu.vms / job.vm)
        assert known is not None and (known.slept, known.told) == (job.sleeps, runs)
    saver.lab.run("scontrol", "resume", job.id)
    goes_on_and_ends(saver, job)


@pytest.mark.slow
def test_a_job_that_runs_keeps_its_memory(saver: Saver) -> None:
    job = run(saver)
    with pytest.raises(Refused, match="has not stopped"):
        sleep(saver, job)
    assert files_of(saver) == []
    goes_on_and_ends(saver, job)


def test_a_sleeping_job_can_be_cancelled_at_once(saver: Saver) -> None:
    job = run(saver)
    suspend(saver, job)
    sleep(saver, job)
    saver.lab.run("scancel", job.id)
    state, _ = saver.end(job, 15)
    assert state == "CANCELLED"
    until("nothing of the job is on its node", lambda: saver.state(job) in ("", "CANCELLED"), 10)
    its = asleep(saver, job).process
    saver.host.destroy(job.vm, 5.0)
    assert not its.is_alive()
    assert not (saver.settings.qemu.vms / job.vm).exists()
    assert files_of(saver) == []
    assert not Path("/sys/class/net", job.vm).exists()


@pytest.mark.slow
def test_slurmctld_restarts_while_a_job_sleeps(saver: Saver) -> None:
    job = run(saver)
    suspend(saver, job)
    sleep(saver, job)
    saver.lab.run("scontrol", "reconfigure")
    restart_slurmctld(saver.lab)
    until("the node answers", lambda: node_answers(saver, job), 30)
    assert saver.state(job) == "SUSPENDED"
    saver.lab.run("scontrol", "resume", job.id)
    wake(saver, job)
    goes_on_and_ends(saver, job)


@pytest.mark.slow
def test_what_stands_in_is_started_again_when_it_has_ended(saver: Saver) -> None:
    job = run(saver)
    suspend(saver, job)
    sleep(saver, job)
    first = asleep(saver, job).process
    process.kill(first)
    until("something stands in for it", lambda: not seen(saver, job).reason, 20)
    assert asleep(saver, job).process != first
    until("the node answers", lambda: node_answers(saver, job), 30)
    saver.lab.run("scontrol", "resume", job.id)
    wake(saver, job)
    goes_on_and_ends(saver, job)
