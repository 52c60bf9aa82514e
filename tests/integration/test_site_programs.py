"""The site's own programs and settings of slurm.conf in VMs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from multiverse.client import Client
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import nothing_left, until, written

pytestmark = pytest.mark.integration


@pytest.fixture
def site(lab: LabUnderTest) -> Iterator[LabUnderTest]:
    """A site with programs around jobs, steps and tasks on a file system that guests share."""
    home, conf = lab.user.home, lab.where.etc / "site.conf"
    said = home / "said"
    said.mkdir()
    said.chmod(0o777)  # root of a guest is nobody on the server
    for name, text in (
        ("prolog-1", f"echo one $(hostname) $SLURM_JOB_ID > {said}/prolog"),
        ("prolog-2", f"echo two $(id -u) >> {said}/prolog"),
        ("epilog", f"echo $(hostname) $SLURM_JOB_ID > {said}/epilog"),
        ("task-prolog", "echo export COLOUR=blue"),
        ("task-epilog", f"echo $(id -u) >> {said}/task-epilog"),
        ("srun-prolog", f"echo $(hostname) $(id -u) > {said}/srun-prolog"),
    ):
        (home / name).write_text(f"#!/bin/sh\n{text}\n")
        (home / name).chmod(0o755)
    before = conf.read_text()
    conf.write_text(
        f"{before}\nProlog={home}/prolog-*\nEpilog={home}/epilog\nTaskProlog={home}/task-prolog\n"
        f"TaskEpilog={home}/task-epilog\nSrunProlog={home}/srun-prolog\nSrunEpilog=/nowhere/program\nMpiDefault=pmi2\n"
        "LaunchParameters=mpir_use_nodeaddr\nHealthCheckProgram=/nowhere/check\n"
    )
    try:
        yield lab
    finally:
        conf.write_text(before)


def test_programs_around_jobs_steps_and_tasks_run_in_the_vm(site: LabUnderTest, client: Client) -> None:
    """Asks for three CPUs, which no spare has: a guest has the settings of the moment at which it started."""
    home, said = site.user.home, site.user.home / "said"
    out = home / "programs.out"
    conf = "/etc/slurm/multiverse-slurmd.conf"
    inside = (
        "echo $COLOUR $SLURM_CONF; srun sh -c 'echo $COLOUR $SLURM_MPI_TYPE $SLURM_CONF'; hostname; "
        f"grep -cE '^(MpiDefault=pmi2|LaunchParameters=mpir_use_nodeaddr|HealthCheckProgram=.*)$' {conf}"
    )
    job = site.sbatch(inside, "-c3", f"--output={out}")
    until("its epilog has run", lambda: (said / "epilog").exists() and written(said / "epilog").strip())
    script, task, vm, kept = written(out).split("\n")[:-1]
    own = "/etc/slurm/slurm.conf"
    assert (script, task) == (f"blue {own}", f"blue pmi2 {own}"), "TaskProlog runs before the script and each task"
    assert written(said / "prolog").splitlines() == [f"one {vm} {job}", "two 0"]
    assert written(said / "epilog") == f"{vm} {job}\n"
    assert set(written(said / "task-epilog").split()) == {str(site.user.uid)}
    assert written(said / "srun-prolog") == f"{vm} {site.user.uid}\n"
    assert kept == "2", "and no health check"
    nothing_left(site, client)
