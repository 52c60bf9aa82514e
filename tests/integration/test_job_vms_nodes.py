"""VMs inside jobs of several nodes: bare-metal nodes of a lab, each with an agent and the plugin."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse.config import JobVmSettings
from multiverse.lab.hosts.physical import physical_services
from multiverse.lab.plan import LabOptions, load
from multiverse.lab.service import Lab
from tests.integration.conftest import LabUnderTest, new_lab
from tests.integration.watch import accounted, until

pytestmark = pytest.mark.integration

BUILT = Path(__file__).parents[2] / "var" / "spank"
TWO_NODES = ("--quiet", "--partition=physical", "--nodes=2", "--vm-image=slim")


@pytest.fixture(scope="module")
def lab_of_two(accelerator: Path, _images: None) -> Iterator[LabUnderTest]:
    missing = [name for name in ("multiverse.so", "mventer") if not (BUILT / name).exists()]
    assert not missing, f"not built: {' '.join(missing)}; run make spank"
    with new_lab(accelerator, LabOptions(cores=2, memory=4096, physical=2), controller=False) as made:
        until("the agents have tested the plugin", lambda: _features(made) == {JobVmSettings().feature}, 60)
        yield made


@pytest.fixture(autouse=True)
def _nothing_left(lab_of_two: LabUnderTest) -> Iterator[None]:
    """After each test, no part of a VM remains on a node, and the nodes take jobs."""
    yield
    until("nothing is left", lambda: not _left(lab_of_two), 120)
    until("the nodes are idle", lambda: _states(lab_of_two) == {"idle"}, 90)


def _left(lab: LabUnderTest) -> list[Path]:
    owns = [lab.where.host(node.name) for node in _plan(lab).plan.physical_nodes]
    places = [place for own in owns for place in (own.controller / "vms", own.run / "vms", own.agent / "jobs")]
    records = [path for own in owns if (own.run / "jobs").exists() for path in (own.run / "jobs").iterdir()]
    vms = [path for place in places if place.exists() for path in place.glob("mvjob-*")]
    return [*vms, *records, *(path for place in places if place.name == "jobs" for path in place.glob("*"))]


def _states(lab: LabUnderTest) -> set[str]:
    return set(lab.run("sinfo", "-h", "-p", "physical", "-N", "-o", "%T").stdout.split())


def _features(lab: LabUnderTest) -> set[str]:
    return set(lab.run("sinfo", "-h", "-p", "physical", "-N", "-o", "%f").stdout.split())


def _plan(lab: LabUnderTest) -> Lab:
    plan = load(lab.where)
    assert plan is not None
    return Lab(lab.where, plan)


def _srun(lab: LabUnderTest, *argv: str) -> subprocess.CompletedProcess[str]:
    return lab.run("srun", *TWO_NODES, *argv, user=lab.user, check=False, timeout=300)


def test_the_tasks_of_a_job_run_in_the_vms_of_all_its_nodes(lab_of_two: LabUnderTest) -> None:
    command = "echo $SLURM_PROCID $SLURMD_NODENAME $(hostname) $(nproc); [ $SLURM_PROCID != 3 ] || exit 5"
    done = _srun(lab_of_two, "--ntasks-per-node=2", "--vm-per-node=2", "--mem=1000", "sh", "-c", command)
    said = {int(task): rest for task, *rest in map(str.split, done.stdout.splitlines())}
    assert sorted(said) == [0, 1, 2, 3] and done.returncode == 5, done.stderr
    assert [said[task][0] for task in range(4)] == ["mvp1", "mvp1", "mvp2", "mvp2"]
    assert len({name for _, name, _ in said.values()}) == 4, "each task is in a VM of its own"
    assert {cpus for _, _, cpus in said.values()} == {"1"}


def test_a_signal_reaches_the_tasks_of_all_nodes(lab_of_two: LabUnderTest) -> None:
    lab, out = lab_of_two, lab_of_two.user.home / "signal"
    command = (
        f"trap 'echo got >> {out}.$SLURM_PROCID; exit 0' USR1; touch {out}.$SLURM_PROCID; while :; do sleep 0.1; done"
    )
    files = [Path(f"{out}.{task}") for task in (0, 1)]
    argv = ["srun", *TWO_NODES, "--job-name=signalled", "--mem=700", "sh", "-c", command]
    with subprocess.Popen(argv, env=lab.env, user=lab.user.uid, group=lab.user.uid, cwd=lab.user.home) as running:
        until("both tasks run", lambda: all(file.exists() for file in files), 180)
        job = lab.run("squeue", "-h", "-n", "signalled", "-o", "%A").stdout.strip()
        lab.run("scancel", "--signal=USR1", job)
        assert running.wait(120) == 0
    assert [file.read_text() for file in files] == ["got\n", "got\n"]
    assert accounted(lab, job, 90)[0] == "COMPLETED"


def test_a_node_that_provides_no_vm_fails_the_job_and_nothing_runs_bare(lab_of_two: LabUnderTest) -> None:
    lab = _plan(lab_of_two)
    (agent,) = (one for one in physical_services(lab.plan.physical_nodes[1]) if one.name.endswith("-agent"))
    asyncio.run(agent.stop(lab.where))
    try:
        failed = _srun(lab_of_two, "--kill-on-bad-exit", "--mem=700", "sh", "-c", "hostname; sleep 600")
        assert failed.returncode != 0 and "the agent of this host does not answer" in failed.stderr
        assert all(line.startswith("mvjob-") for line in failed.stdout.splitlines()), "nothing ran on a bare node"
    finally:
        asyncio.run(agent.ensure(lab))
