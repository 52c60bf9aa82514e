"""Restarts of slurmctld: before Slurm 23.11.4 it does not know any more where the VMs of a job are."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable

import pytest

from multiverse.client import Client
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.services import SERVICES
from tests.integration.conftest import LabUnderTest
from tests.integration.images import copy_of_slim
from tests.integration.watch import accounted, ended, latest, mend, nothing_left, until, written

pytestmark = pytest.mark.integration
slow = pytest.mark.slow


def restart_slurmctld(lab: LabUnderTest) -> None:
    (slurmctld,) = (service for service in SERVICES if service.name == "slurmctld")
    assert asyncio.run(slurmctld.stop(lab.where)), "it ran"
    mend(lab)


class Steps:
    """A job that runs a command by srun again and again, on all of its VMs, until it is told to end."""

    def __init__(self, lab: LabUnderTest, name: str, *options: str) -> None:
        self._lab, self._said, self._end = lab, lab.user.home / f"{name}.steps", lab.user.home / f"{name}.end"
        self._asked, self._answer = lab.user.home / f"{name}.asked", lab.user.home / f"{name}.answer"
        for path in (self._said, self._end, self._asked, self._answer):
            path.unlink(missing_ok=True)
        self.job = lab.sbatch(
            f"until [ -e {self._end} ]; do srun -Q hostname >> {self._said} || echo failed $? >> {self._said};"
            f" [ ! -e {self._asked} ] || {{ mv {self._asked} asked; bash asked > told 2>&1; mv told {self._answer}; }};"
            " done",
            *(*options, f"--output={lab.user.home}/{name}.out"),
        )

    def running(self, client: Client) -> set[str]:
        """The job's VMs, once it has run a step on each."""
        row = until(f"{self.job} runs", lambda: (one := latest(client, self.job)).get("state") == "allocated" and one)
        vms = set(row["vms"])
        until("a step ran", lambda: self._said.exists() and vms <= {*self._lines()})
        return vms

    def _lines(self) -> list[str]:
        return self._said.read_text().split("\n") if self._said.exists() else []

    def go_on(self, vms: set[str]) -> None:
        """The job runs two more whole steps, and no step failed."""
        before = len(self._lines())
        until("steps go on", lambda: len(self._lines()) > before + 2 * len(vms) or "failed" in self._said.read_text())
        assert {*self._lines()} - {""} == vms, (self._lines(), written(self._said.with_suffix(".out")))

    def inside(self, script: str) -> str:
        """What a script prints that the job's own runs."""
        (self._asked.with_suffix(".new")).write_text(script)
        self._asked.with_suffix(".new").rename(self._asked)
        return str(until("the script has run", lambda: self._answer.exists() and self._answer.read_text(), 300))

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self._lab.run("scancel", self.job, check=False)  # one that a failed test left has room that others need

    def end(self, client: Client) -> None:
        self._end.touch()
        ended(client, self.job, "done")
        assert accounted(self._lab, self.job) == ("COMPLETED", "0:0")


def test_jobs_start_steps_after_a_restart_of_slurmctld(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    controller()
    with Steps(lab, "alone") as alone, Steps(lab, "gang", "-N2", "--ntasks-per-node=1") as gang:
        vms = {steps: steps.running(client) for steps in (alone, gang)}
        restart_slurmctld(lab)
        for steps, its in vms.items():
            steps.go_on(its)
            done = lab.run("srun", "-Q", f"--jobid={steps.job}", "--overlap", "hostname", user=lab.user, check=False)
            assert {*done.stdout.split()} == its, f"from outside: {done.stderr}"
        for steps in vms:
            steps.end(client)
    nothing_left(lab, client)


@slow
@pytest.mark.parametrize("reconfigured", [False, True])
def test_each_way_to_start_a_step_of_a_large_job_works_after_a_restart(
    lab: LabUnderTest, client: Client, controller: Callable[[], int], reconfigured: bool
) -> None:
    """Of seven nodes: from there on the ends of steps, and sbcast's files, travel along a tree of slurmds."""
    controller()
    home, count = lab.user.home, 7
    with Steps(lab, "large", f"-N{count}", "--ntasks-per-node=1", "--overcommit") as gang:
        vms = gang.running(client)
        restart_slurmctld(lab)
        if reconfigured:
            lab.run("scontrol", "reconfigure")
        gang.go_on(vms)
        (home / "file").write_text("by sbcast")
        said = gang.inside(
            f"srun -Q -N1 -n1 srun -Q --overlap -N1 -n1 hostname\n"
            f"sbcast -f {home}/file /tmp/by-sbcast && srun -Q cat /tmp/by-sbcast; echo\n"
            "srun -Q --mpi=pmi2 hostname\n"
        )
        assert said.count("by sbcast") == count and {*said.replace("by sbcast", "").split()} == vms, said
        assert said.count("-") == count + 1, said
        at = ("srun", "-Q", f"--jobid={gang.job}", "--overlap")
        terminal = lab.run("script", "-qec", " ".join((*at, "-N1", "-n1", "--pty", "tty")), "/dev/null", user=lab.user)
        assert "/dev/pts/" in terminal.stdout
        with subprocess.Popen(
            (*at, "sh", "-c", "for i in $(seq 15); do echo tick $SLURM_PROCID; sleep 1; done"), env=lab.env, cwd=home,
            user=lab.user.uid, group=lab.user.uid, extra_groups=[], stdout=subprocess.PIPE, text=True,
        ) as srun:  # fmt: skip
            assert srun.stdout is not None
            seen: set[str] = set()
            while len(seen) < count:  # sattach shows nothing of tasks that have not begun
                seen.add(srun.stdout.readline())
            shown = ("squeue", "-h", "-s", "-j", gang.job, "-o", "%i %j")
            step = until("the step is shown", lambda: [w for w, n in steps_of(lab, shown) if n == "sh"])[-1]
            attached = lab.run("sattach", step, user=lab.user, check=False)
            srun.stdout.read()
        assert attached.stdout.count("tick") >= count, attached.stderr
        gang.end(client)
    until("no VM is left", lambda: not client.vms() and not client.jobs(), 300)  # it takes minutes after a reconfigure
    nothing_left(lab, client)


def steps_of(lab: LabUnderTest, shown: tuple[str, ...]) -> list[tuple[str, str]]:
    lines = lab.run(*shown).stdout.splitlines()
    return [(one, name) for one, name in map(str.split, lines) if not one.endswith((".batch", ".extern"))]


@slow
def test_an_allocation_on_a_login_node_goes_on_after_a_restart(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    controller()
    said, go = lab.user.home / "salloc.said", lab.user.home / "salloc.go"
    go.unlink(missing_ok=True)
    steps = f"srun -Q hostname >> {said}; until [ -e {go} ]; do sleep 0.2; done; srun -Q hostname >> {said}"
    with subprocess.Popen(
        ("salloc", "-Q", "-N2", "--ntasks-per-node=1", "bash", "-c", steps), env=lab.env, cwd=lab.user.home,
        user=lab.user.uid, group=lab.user.uid, extra_groups=[],
    ) as salloc:  # fmt: skip
        first = until("steps ran", lambda: said.exists() and len(said.read_text().split()) == 2 and said.read_text())
        restart_slurmctld(lab)
        go.touch()
        assert salloc.wait(120) == 0
    assert sorted(said.read_text().split()) == sorted(2 * first.split())
    nothing_left(lab, client)


def test_jobs_can_ask_for_a_new_image_without_a_restart_of_slurmctld(
    lab: LabUnderTest, controller: Callable[[], int]
) -> None:
    controller()
    before = lifecycle.status(lab.where)["slurmctld"]
    submit = ("sbatch", "--parsable", "--hold", "--constraint=fresh", "--wrap=true")
    image = copy_of_slim("fresh")
    try:
        assert "Invalid feature" in lab.run(*submit, user=lab.user, check=False).stderr
        controller()
        lab.run("scancel", lab.run(*submit, user=lab.user).stdout.strip())
        assert lifecycle.status(lab.where)["slurmctld"] == before
    finally:
        shutil.rmtree(image.path)
        controller()
