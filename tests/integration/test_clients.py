"""Programs that submit jobs for their users do so in the VM partition, unmodified, as on bare metal.

What each of them does is in clients/, and so are their versions. They and their jobs run as an ordinary user, with an
environment of Python in the user's home, which guests mount.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from multiverse.client import Client
from multiverse_lab.lab import baremetal
from multiverse_lab.lab.plan import load
from multiverse_lab.lab.services import Lab
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import kill, nothing_left, qemu_of, until, written

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(2400)]

CLIENTS = Path(__file__).parent / "clients"
LIMIT = 1500.0
"""Seconds in which a client ends. Emulated guests start Python ten times more slowly than bare metal."""
SNAKEMAKE = (
    "-m snakemake --executor=slurm --jobs=4 --latency-wait=60 --slurm-init-seconds-before-status-checks=5"
    " --slurm-no-account --slurm-no-requeue"
)


@dataclass(frozen=True)
class Place:
    """A partition, and a directory in which a client runs."""

    lab: LabUnderTest
    python: Path
    partition: str
    directory: Path
    cpus: int

    def prepare(self) -> None:
        """Make the directory, for bare metal with what its srun needs."""
        self.directory.mkdir(parents=True)
        if self.partition == "bare":
            self._prepare_bare_metal()
        os.chown(self.directory, self.lab.user.uid, self.lab.user.uid)

    def _prepare_bare_metal(self) -> None:
        """Users' commands find this node of a lab only if a file names it. snakemake drops Slurm's variables in its
        jobs, so its srun is told there."""
        lab = self.lab
        self._conf.write_text(
            f"Include {lab.env['SLURM_CONF']}\n"
            f"SlurmdSpoolDir={lab.where.run}/bare/spool\n"
            f"NodeName={baremetal.NODE} NodeHostname={platform.node()} NodeAddr={lab.settings.network.gateway}\n"
        )
        srun = self.directory / "bin" / "srun"
        srun.parent.mkdir()
        srun.write_text(f'#!/bin/sh\nexport SLURM_CONF={self._conf}\nexec {shutil.which("srun")} "$@"\n')
        srun.chmod(0o755)

    @property
    def _conf(self) -> Path:
        return self.directory / "slurm.conf"

    def start(self, *argv: str) -> subprocess.Popen[str]:
        """A client, by its words for Python."""
        lab, user = self.lab, self.lab.user
        more = {"HOME": str(user.home), "PATH": f"{self.python.parent}:{lab.env['PATH']}"}
        if self.partition == "bare":
            more |= {"SLURM_CONF": str(self._conf), "PATH": f"{self.directory}/bin:{more['PATH']}"}
        return subprocess.Popen(
            [str(self.python), *argv],
            env=lab.env | more,
            cwd=self.directory,
            user=user.uid,
            group=user.uid,
            extra_groups=[],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def said(self, client: str, *words: str) -> dict[str, Any]:
        """What a client of clients/ says of its jobs, with `PARTITION` in place of the partition's name."""
        program = shutil.copy(CLIENTS / f"{client}_client.py", self.directory)
        out, errors = finished(self.start(program, self.partition, *words))
        assert out, errors
        found = json.loads(out.splitlines()[-1].replace(self.partition, "PARTITION"))
        assert isinstance(found, dict)
        return found


def finished(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a client has printed. It has succeeded."""
    try:
        out, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, f"{out}\n{errors}"
    return out, errors


@pytest.fixture(scope="module")
def python(lab: LabUnderTest) -> Iterator[Path]:
    """The interpreter of an environment that the user has made, of that Python which guests have at the same path."""
    made = lab.user.home / "environment"
    lab.run("/usr/bin/python3", "-m", "venv", str(made), user=lab.user)
    wanted = ("install", "--quiet", "--disable-pip-version-check", "-r", str(CLIENTS / "requirements.txt"))
    lab.run(str(made / "bin" / "pip"), *wanted, user=lab.user, timeout=600)
    yield made / "bin" / "python"
    shutil.rmtree(made)


@pytest.fixture
def places(lab: LabUnderTest, client: Client, python: Path) -> Iterator[tuple[Place, Place]]:
    """The VM partition and bare metal, each with a new directory."""
    plan = load(lab.where)
    assert plan is not None
    own = Lab(lab.where, plan)
    base = lab.user.home / "client"
    found = (
        Place(lab, python, "vm", base / "vm", plan.cores),
        Place(lab, python, "bare", base / "bare", os.cpu_count() or 1),
    )
    for place in found:
        place.prepare()
    asyncio.run(baremetal.start(own))
    try:
        yield found
        nothing_left(lab, client)
    finally:
        lab.run("scancel", "--user", lab.user.name)
        until("its jobs are gone", lambda: not lab.run("squeue", "-h", "-u", lab.user.name).stdout)
        asyncio.run(baremetal.stop(own))
        shutil.rmtree(base)


def test_submitit(places: tuple[Place, Place]) -> None:
    vm, bare = (place.said("submitit") for place in places)
    assert vm == bare
    assert [vm["one"], *vm["several"], *vm["batch"]] == [f"PARTITION {number}" for number in range(1, 7)]
    assert vm["failed"], "the exception in the job is known"
    assert vm["arrays"] == [1, 1], "each of the two is one array"
    assert vm["again"] == [1, 1], "the second run has what the first one had saved"
    assert vm["states"] == ["COMPLETED", "COMPLETED", "FAILED", *["COMPLETED"] * 5]


def test_psij(places: tuple[Place, Place]) -> None:
    for place in places:
        said = place.said("psij", str(place.cpus))
        assert said["polled"] == ["QUEUED"] * 3, "they wait for the first one, and are told so"
        assert said["seen"]["running"] == ["QUEUED", "ACTIVE", "CANCELED"]
        assert said["seen"]["unwanted"] == ["QUEUED", "CANCELED"]
        ends = [(states[0], states[-1]) for name in ("waiting", "failing") if (states := said["seen"][name])]
        assert ends == [("QUEUED", "COMPLETED"), ("QUEUED", "FAILED")]
        assert (said["codes"], said["out"]) == ([None, 0, 3], "PARTITION")


def test_parsl(places: tuple[Place, Place], lab: LabUnderTest) -> None:
    vm, bare = (place.said("parsl", lab.settings.network.gateway) for place in places)
    assert vm == bare
    parts = [f"PARTITION {number}" for number in range(3)]
    assert (vm["parts"], vm["together"]) == (parts, ", ".join(parts))
    assert (vm["code"], vm["out"]) == (0, f"PARTITION: {vm['together']}")
    assert vm["failed"] == "ValueError('on purpose')"
    assert vm["blocks"] == ["RUNNING"], "one job ran all of it"


def test_simple_slurm(places: tuple[Place, Place]) -> None:
    vm, bare = (place.said("simple") for place in places)
    assert vm == bare
    assert vm["held"] == ["client", "PD", "(JobHeldUser)"] and vm["cancelled"]
    assert (vm["first"], vm["second"], vm["array"]) == ("PARTITION client", "PARTITION client", ["2", "3", "4"])
    assert (vm["step"], vm["code"]) == ("PARTITION", 0)


def test_dask_jobqueue(places: tuple[Place, Place], lab: LabUnderTest) -> None:
    vm, bare = (place.said("dask", lab.settings.network.gateway) for place in places)
    assert vm == bare
    assert (vm["workers"], vm["holders"]) == (2, 2), "both workers hold parts, so they have to send them"
    total = sum(number * number % 7 for number in range(400_000))
    assert (vm["sum"], vm["moved"]) == (total, 2 * total)
    assert vm["said"] == [f"PARTITION {number}" for number in range(3)]
    assert vm["adaptive"] == sum(number * number for number in range(100))


def snakemake(place: Place, *more: str) -> subprocess.Popen[str]:
    """snakemake with the rules of clients/, whose jobs go to the partition."""
    shutil.copy(CLIENTS / "Snakefile", place.directory)
    resources = f"--default-resources slurm_partition={place.partition} mem_mb=500 runtime=30"
    return place.start(*SNAKEMAKE.split(), *more, *resources.split())


def test_snakemake(places: tuple[Place, Place]) -> None:
    for place in reversed(places):  # bare metal first, because it is quick
        finished(snakemake(place))
        report = (place.directory / "report.txt").read_text().splitlines()
        assert report == [f"2 2 {place.partition}", "2"], "the last rule has two CPUs"


def test_snakemake_goes_on_after_a_lost_vm(places: tuple[Place, Place], lab: LabUnderTest) -> None:
    """Its plugin excludes the lost VM in all jobs that it submits then."""
    vm, _ = places
    (vm.directory / "lose").touch()
    process = snakemake(vm, "--retries=2")
    begun = vm.directory / "begun"
    until("the rule runs", begun.exists, 600)
    lost = written(begun).strip()
    kill(qemu_of(lost))
    finished(process)
    assert (vm.directory / "report.txt").read_text().splitlines() == ["2 2 vm", "2"]
    rows = ("sacct", "-nXP", "-u", lab.user.name, "-N", lost, "-o", "State")
    until("only the loss is accounted there", lambda: lab.run(*rows).stdout.split() == ["NODE_FAIL"], 30)
