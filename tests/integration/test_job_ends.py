"""However a job with a VM inside ends, nothing of it is left on its node, and no task ran there without its VM."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import LabUnderTest
from tests.integration.job_nodes import JobNode, job_nodes
from tests.integration.watch import accounted, kill, matching, until

pytestmark = pytest.mark.integration

HOG = "head -c {size}M /dev/zero | tail | wc -c"
"""Makes tail(1) allocate `size` MiB, because the input has no line end."""


@pytest.fixture(scope="module")
def node(lab_of_two: LabUnderTest) -> JobNode:
    node = job_nodes(lab_of_two)[0]
    node.begin()
    return node


@pytest.fixture(autouse=True)
def _nothing_left(node: JobNode) -> Iterator[None]:
    yield
    node.nothing_left()


def memory_limit(group: Path) -> Path:
    """The file with the limit of a control group of either version. In version 1, groups of other controllers have
    none."""
    return group / ("memory.max" if (group / "cgroup.controllers").exists() else "memory.limit_in_bytes")


def test_the_qemu_is_in_a_child_of_the_control_groups_of_its_job_beside_the_steps(node: JobNode) -> None:
    job, _ = node.begun("sleep 1000")
    (qemu,) = node.processes("qemu-system-x86_64", here=True)
    found = {group: matching(group, "mvjob-*/cgroup.procs") for group in node.groups_of(job)}
    (own,) = (group for group, files in found.items() if files and str(qemu) in files[0].read_text().split())
    assert int(memory_limit(own).read_text()) == 700 << 20, "the job's limit holds for its VM"
    node.under_test.run("scancel", job)
    assert accounted(node.under_test, job, 120)[0] == "CANCELLED"


@pytest.mark.skipif(not Path("/sys/fs/cgroup/cgroup.controllers").exists(), reason="of control groups of version 2")
def test_slurm_leaves_groups_of_version_2_of_a_job_without_a_vm_too(node: JobNode) -> None:
    job = node.under_test.sbatch("true", "--partition=physical", f"--nodelist={node.name}", "--mem=100")
    assert accounted(node.under_test, job, 120)[0] == "COMPLETED"
    assert node.groups_of(job), "JobNode need not ignore them any more"


@pytest.mark.slow
def test_a_job_that_is_out_of_time_is_told_so_in_its_vm_and_ends(node: JobNode) -> None:
    job, out = node.begun("trap 'echo TERM' TERM; while :; do sleep 0.2; done", "--time=1")
    assert accounted(node.under_test, job, 180)[0] == "TIMEOUT"
    # Slurm accounts for the job as its time is over, and the script goes on for KillWait seconds.
    until("the script gets a signal in its VM before its end", lambda: "TERM\n" in out.read_text(), 60)
    assert "DUE TO TIME LIMIT" in out.read_text()


@pytest.mark.slow
def test_a_guest_without_memory_tells_the_job_and_goes_on(node: JobNode) -> None:
    job, out = node.begun(f"{HOG.format(size=300)}; echo after; srun --quiet hostname", "--mem=450")
    assert accounted(node.under_test, job, 180)[0] == "COMPLETED"
    said = out.read_text()
    assert "the VM of this job ran out of memory" in said and "submit the job with more --mem" in said
    name, *_ = said.splitlines()
    assert said.partition("after\n")[2].startswith(f"{name}\n"), "its VM goes on"


def test_the_end_of_a_vm_above_the_memory_of_its_job_fails_the_job_with_a_message(node: JobNode) -> None:
    """`job_vms.overhead` is room for QEMU, so only a limit that sinks brings it there. slurmstepd counts what is killed
    in the control groups of its step only, so Slurm's state is not OUT_OF_MEMORY."""
    job, out = node.begun(f"while [ ! -e {node.under_test.user.home}/go ]; do sleep 0.1; done; {HOG.format(size=400)}")
    (limit,) = (file for group in node.groups_of(job) if (file := memory_limit(group)).exists())
    used = limit.with_name("memory.current" if limit.name == "memory.max" else "memory.usage_in_bytes")
    limit.write_text(str(int(used.read_text()) + (32 << 20)))
    (node.under_test.user.home / "go").touch()
    assert accounted(node.under_test, job, 180) == ("FAILED", "1:0"), out.read_text()
    assert "the VM of this job has ended; did the job need more memory than it has" in out.read_text()


@pytest.mark.parametrize("step", ["batch", "0"])
def test_a_killed_slurmstepd_leaves_no_vm(node: JobNode, step: str) -> None:
    """Slurm learns of its end when the job is cancelled, or times out."""
    job, out = node.begun("srun --quiet sh -c 'echo step; sleep 300'; echo after; sleep 300")
    until("the step runs", lambda: "step" in out.read_text(), 60)
    kill(node.stepds(job)[step])
    node.under_test.run("scancel", job)
    assert accounted(node.under_test, job, 120)[0] == "CANCELLED"
    node.nothing_left(killed=job)


def test_a_killed_slurmd_ends_no_vm_and_the_next_one_releases_those_of_jobs_that_ended_meanwhile(node: JobNode) -> None:
    job, out = node.begun("sleep 1000")
    ended, other = node.begun(f"while [ ! -e {out}.end ]; do sleep 0.1; done; echo over")
    node.kill("slurmd")
    Path(f"{out}.end").touch()
    until("a script ends without slurmd", lambda: "over" in other.read_text(), 60)
    node.ensure("slurmd")
    assert accounted(node.under_test, ended, 120)[0] == "COMPLETED"
    until("its VM is gone", lambda: not (node.own.agent / "jobs" / f"{ended}.json").exists(), 60)
    assert node.groups_of(job), "the other one runs"
    node.under_test.run("scancel", job)
    assert accounted(node.under_test, job, 120)[0] == "CANCELLED"


def test_a_job_that_is_queued_again_has_another_vm(node: JobNode) -> None:
    script = "cat /tmp/marker; echo run $SLURM_RESTART_COUNT | tee /tmp/marker; [ $SLURM_RESTART_COUNT ] || sleep 1000"
    job, out = node.begun(script, "--requeue", "--open-mode=append")
    until("the first run has begun", lambda: "run" in out.read_text(), 60)
    run = node.under_test.run
    run("scontrol", "requeue", job)
    until("it waits", lambda: run("squeue", "-h", "-j", job, "-o", "%T").stdout.strip() == "PENDING", 60)
    time.sleep(2)  # slurmd runs no prolog again in the second in which the first run's credential was revoked
    run("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm would let it wait for two minutes
    until("it has run again", lambda: out.read_text().endswith("run 1\n"), 180)  # sacct shows the first run until then
    assert accounted(node.under_test, job, 60) == ("COMPLETED", "0:0")
    assert out.read_text().count("No such file") == 2, "nothing of the first run's VM is in the second's"


def test_sattach_shows_what_a_step_prints_in_its_vm_and_ends_as_the_step_does(node: JobNode) -> None:
    lab, over = node.under_test, node.under_test.user.home / "attached.over"
    step = f"while [ ! -e {over} ]; do hostname; sleep 0.2; done; exit 3"
    job, out = node.begun(f'exec srun --quiet sh -c "{step}"')
    until("the step runs", lambda: out.read_text().count("mvjob-") > 2, 60)
    ids = {"user": lab.user.uid, "group": lab.user.uid, "extra_groups": []}
    attached = subprocess.Popen(["sattach", f"{job}.0"], env=lab.env, stdout=subprocess.PIPE, text=True, **ids)
    assert attached.stdout is not None and attached.stdout.readline().startswith("mvjob-")
    over.touch()
    attached.communicate(timeout=60)
    assert attached.returncode == 3
    assert accounted(lab, job, 90) == ("FAILED", "3:0")


@pytest.mark.slow
def test_a_slurmd_that_is_away_while_its_job_is_cancelled(node: JobNode) -> None:
    job, _ = node.begun("sleep 1000")
    node.kill("slurmd")
    node.under_test.run("scancel", job)
    time.sleep(5)
    node.ensure("slurmd")
    assert accounted(node.under_test, job, 120)[0] == "CANCELLED"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_that_has_rebooted_has_nothing_of_the_job_that_was_on_it(node: JobNode) -> None:
    job, out = node.begun("sleep 1000", "--no-requeue")
    time.sleep(25)  # slurmctld believes a node that a batch job is not there only so long after its start
    node.reset()
    assert accounted(node.under_test, job, 300)[0] in ("NODE_FAIL", "CANCELLED", "FAILED"), out.read_text()
    until("the agent has tested the plugin", node.takes_jobs, 60)
    node.nothing_left()
    node.begin()  # its template was in memory


@pytest.mark.slow
def test_a_job_that_cannot_be_recorded_waits_to_be_cancelled_while_slurmctld_is_away(node: JobNode) -> None:
    lab, records = node.under_test, node.own.run / "jobs"
    out, moved = lab.user.home / "unrecorded", records.with_name("elsewhere")
    asyncio.run(node.service("agent").stop(node.lab.where))  # it would take the node's feature away
    records.rename(moved)
    records.write_text("no directory")
    port, hook = node.lab.plan.slurmctld_port, "type filter hook output priority 0;"
    rules = f"table inet away {{ chain leaving {{ {hook} tcp dport {port} reject; }}; }}"
    try:
        lab.run(*node.inside, "nft", rules)
        job = node.sbatch("hostname", f"--output={out}", "--export=NONE")
        shown = ("squeue", "-h", "-j", job, "-o", "%T")
        until("its prolog begins", lambda: lab.run(*shown).stdout.strip() == "RUNNING", 60)
        time.sleep(15)
        assert not out.exists(), "the prolog goes on until slurmctld has heard of it"
        lab.run(*node.inside, "nft", "delete table inet away")
        assert accounted(lab, job, 180)[0].startswith("CANCELLED")
        assert not out.exists() or node.name not in out.read_text()
    finally:
        lab.run(*node.inside, "nft", "delete table inet away", check=False)
        records.unlink()
        moved.rename(records)
        node.ensure("agent")
