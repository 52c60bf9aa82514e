"""MPI across the VMs of a job by srun's PMIx, in a lab whose Slurm finds the library of PMIx."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse.config import JobVmSettings
from multiverse.images.catalog import Image
from multiverse_lab.lab.configure import changed_conf
from multiverse_lab.lab.hosts.physical import physical_services
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.users import enter_private_namespace
from tests.integration.conftest import LabUnderTest, new_lab
from tests.integration.images import mpi
from tests.integration.physical_nodes import lab_of, nothing_left
from tests.integration.test_gangs import ALLREDUCE, OPEN_MPI
from tests.integration.watch import accounted, until, written

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LIBRARIES = "/usr/lib/x86_64-linux-gnu"


@pytest.fixture(scope="module")
def lab_with_pmix(accelerator: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabUnderTest]:
    """Two bare-metal nodes. Slurm's plugin opens libpmix.so where Debian's package has it. The image has the package,
    and its libraries are put below those of this machine, for the lab alone."""
    image, root, tmp = mpi(), tmp_path_factory.mktemp("image"), Path(tempfile.mkdtemp(prefix="mvtmp-"))
    enter_private_namespace()
    _mount(image, root)
    try:
        with new_lab(accelerator, LabOptions(cores=4, memory=4096, physical=2), controller=False) as made:
            _separate(made, tmp)
            shown = ("sinfo", "-h", "-p", "physical", "-N", "-o", "%f")
            until("the nodes take jobs", lambda: set(made.run(*shown).stdout.split()) == {JobVmSettings().feature}, 60)
            yield made
    finally:
        subprocess.run(["umount", "--lazy", LIBRARIES, root], check=False)  # this process may have libraries open
        for path in tmp.parent.glob(f"{tmp.name}*"):
            shutil.rmtree(path)


def _mount(image: Image, root: Path) -> None:
    subprocess.run(["mount", "-o", "loop,ro,noload", image.disk, root], check=True)
    lower = f"lowerdir={LIBRARIES}:{root}{LIBRARIES}"
    subprocess.run(["mount", "-t", "overlay", "-o", lower, "overlay", LIBRARIES], check=True)


def _separate(made: LabUnderTest, tmp: Path) -> None:
    """Give each node a TmpFS of its own: slurmstepd makes a directory of the same name there on each node of a step. It
    is in /tmp, where users can make it in their VMs, too."""
    lab = lab_of(made)
    for node in lab.plan.physical_nodes:
        own, conf = Path(f"{tmp}-{node.name}"), made.where.host(node.name).etc / "slurm.conf"
        own.mkdir()
        conf.write_text(changed_conf(conf.read_text(), {"TmpFS": str(own)}))
        slurmd = physical_services(node)[-1]
        asyncio.run(slurmd.stop(made.where))
        asyncio.run(slurmd.ensure(lab))


def test_open_mpi_runs_across_the_vms_of_a_job_by_sruns_pmix(lab_with_pmix: LabUnderTest) -> None:
    lab = lab_with_pmix
    program, out = lab.user.home / "allreduce.py", lab.user.home / "pmix.out"
    program.write_text(ALLREDUCE)
    options = ("--nodes=2", "--ntasks-per-node=2", "--mem=1000", "--vm-image=mpi", f"--output={out}")
    step = f"srun --quiet --mpi=pmix python3 {program} {OPEN_MPI}"
    job = lab.sbatch(step, "--partition=physical", *options)
    assert accounted(lab, job, 600) == ("COMPLETED", "0:0"), out.read_text()
    vms = [f"mvjob-{job}-{place}" for place in (0, 0, 1, 1)]
    assert sorted(written(out).splitlines()) == [f"{rank}/4 1111 {vm}" for rank, vm in enumerate(vms)]
    nothing_left(lab)
