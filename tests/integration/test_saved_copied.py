"""Saved jobs on two hosts: states that are copied elsewhere, so that their jobs go on though the host that saved them
is lost, and jobs of several VMs."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse.core.errors import Gone
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from tests.integration.conftest import LabUnderTest, StartDaemon, more_settings, new_lab
from tests.integration.images import slim
from tests.integration.restarting_daemon import attempt_is
from tests.integration.test_hosts import named, pid_of, plan_of, reached
from tests.integration.test_save_command import COUNTS, running, went_on
from tests.integration.watch import accounted, ended, kill, nothing_left, until

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def copies() -> Iterator[Path]:
    """A directory that all hosts of a lab see, as one on a shared file system."""
    place = Path(tempfile.mkdtemp(prefix="mvcopies-"))
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def two(accelerator: Path, copies: Path) -> Iterator[LabUnderTest]:
    """Two hosts, each with a directory of its own for states."""
    slim()
    settings: dict[str, dict[str, object]] = {
        "save": {"enabled": True, "copy": str(copies), "encrypt": True},
        "pacing": {"silence": 5.0},
    }
    with new_lab(accelerator, LabOptions(hosts=2, cores=4, memory=8192, settings=settings), controller=True) as made:
        yield made


def states_in(place: Path) -> list[str]:
    return [path.name for path in place.iterdir() if path.name.startswith(("mv", ".mv"))]


def repaired(client: Client, host: str) -> bool:
    """Say that a host is off, as soon as that is asked for."""
    with suppress(Gone):
        client.repair(host, fenced=True)
        return True
    return False


def copied(client: Client, job: str) -> bool:
    shown = next((one for one in client.saved() if one["job_id"] == job), {})
    return shown.get("state") == "stored" and bool(shown["copy"])


def test_a_job_goes_on_elsewhere_after_the_host_that_saved_it_was_killed(two: LabUnderTest, copies: Path) -> None:
    with Client(two.settings.socket) as client:
        until("both hosts are observed", lambda: all(reached(client, host.name) for host in plan_of(two.where)))
        job, output = running(two, client)
        (vm,) = client.vms()
        client.save(job, hold=True)
        until("its state is copied", lambda: copied(client, job))
        until("its VM is gone", lambda: not client.vms())
        first = named(two, vm["host"])
        own = two.where.host(first.name).root / "saved"
        assert states_in(own) == states_in(copies) == [f"{vm['name']}-1"]
        for file in (copies / f"{vm['name']}-1").iterdir():
            assert file.read_bytes() == (own / file.parent.name / file.name).read_bytes()
        assert two.run("ls", str(copies), user=two.user, check=False).returncode != 0, "only root reads it"
        before = output.read_text().splitlines()
        kill(pid_of(two.where, first))
        try:
            until("the host is out of reach", lambda: not reached(client, first.name))
            client.resume(job)
            until("it goes on", lambda: output.read_text().splitlines() != before, 60)
            assert [one["host"] for one in client.vms()] == [host.name for host in plan_of(two.where) if host != first]
            ended(client, job, "done")
            until("its record is gone", lambda: client.saved() == [])
            assert not states_in(copies)
        finally:
            asyncio.run(lifecycle.up(two.where, LabOptions()))
        went_on(two, client, job, output)
        until("its own files are removed as the host is back", lambda: not states_in(own), 60)


@pytest.fixture
def copied_lab(lab: LabUnderTest, client: Client, copies: Path) -> Iterator[LabUnderTest]:
    with more_settings(lab, f'[save]\nenabled = true\ncopy = "{copies}"\n'):
        yield lab


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_state_is_copied_though_the_controller_is_killed(
    copied_lab: LabUnderTest, start_daemon: StartDaemon, copies: Path, when: str
) -> None:
    daemon = start_daemon(())
    until("the daemon answers", lambda: daemon.call(lambda client: client.status()))
    job, output = running(copied_lab, daemon.client, COUNTS)
    daemon.set_crash_points([f"{when} saved:{state} controller" for state in ("stored", "copying")])
    saving = lambda: daemon.call(lambda client: client.saved())  # noqa: E731
    until("it is being saved", lambda: saving() or daemon.call(lambda client: client.save(job, hold=True)))
    until("its state is copied", lambda: daemon.ensure_up() and daemon.call(lambda client: copied(client, job)), 60)
    until("each step was reached", lambda: daemon.ensure_up() and not daemon.crash_points_left())
    assert len(states_in(copies)) == 1
    until("it is resumed", lambda: daemon.ensure_up() and daemon.call(lambda client: client.resume(job) or True))
    until(f"job {job} is over", lambda: daemon.ensure_up() and attempt_is(daemon, job), 120)
    went_on(copied_lab, daemon.client, job, output)
    assert not states_in(copies)
    nothing_left(copied_lab, daemon.client)


def test_a_job_goes_on_from_its_checkpoint_after_its_host_was_killed(two: LabUnderTest, copies: Path) -> None:
    """An operator says that the host is off. The job runs nowhere else before, and its output is that of a job that
    nothing has happened to."""
    with Client(two.settings.socket) as client:
        until("both hosts are observed", lambda: all(reached(client, host.name) for host in plan_of(two.where)))
        job, output = running(two, client, COUNTS.replace("seq 8", "seq 40").replace("0.5", "1"))
        (vm,) = client.vms()
        client.checkpoint(job)
        until("it is copied", lambda: copied(client, job))
        before = len(output.read_text().splitlines())
        until("its job has gone on", lambda: len(output.read_text().splitlines()) > before + 3)
        first = named(two, vm["host"])
        kill(pid_of(two.where, first))
        try:
            until("the host is out of reach", lambda: not reached(client, first.name))
            assert [one["name"] for one in client.vms()] == [vm["name"]], "it may still run"
            until("an alert asks whether it is off", lambda: repaired(client, first.name), 60)
            until("it goes on elsewhere", lambda: any(one["host"] != first.name for one in client.vms()), 60)
            told = lambda: client.explain(job)["jobs"][0]["text"]  # noqa: E731
            until("it is told what it would go on from", lambda: "Its last checkpoint is of " in told(), 60)
            ended(client, job, "done")
            until("its record is gone", lambda: client.saved() == [])
            assert not states_in(copies)
        finally:
            asyncio.run(lifecycle.up(two.where, LabOptions()))
        lines = output.read_text().splitlines()
        assert lines[:40] == [f"count {number}" for number in range(1, 41)], "each line is there once"
        assert len(set(lines[40:])) == 1 and accounted(two, job) == ("FAILED", "5:0")
        states = two.run("sacct", "-nPXD", "-j", job, "-o", "State").stdout.split()
        assert states in (["NODE_FAIL", "FAILED"], ["REQUEUED", "FAILED"]), states
        own = two.where.host(first.name).root / "saved"
        until("its own files are removed as the host is back", lambda: not states_in(own), 60)


# --- jobs across two hosts that share a storage -------------------------------------------------------


@pytest.fixture(scope="module")
def sharing(accelerator: Path) -> Iterator[LabUnderTest]:
    """Two hosts that write states to the same directory."""
    slim()
    with tempfile.TemporaryDirectory(prefix="mvshared-") as place:
        settings: dict[str, dict[str, object]] = {
            "save": {"enabled": True, "directory": place},
            "pacing": {"silence": 5.0},
        }
        with new_lab(accelerator, LabOptions(hosts=2, cores=8, memory=8192, settings=settings), controller=True) as lab:
            yield lab


STEP = "srun --overlap -Q bash -c 'for i in $(seq 12); do echo $SLURM_PROCID step $i; sleep 0.5; done; exit 4'"


@pytest.mark.parametrize("vms", [2, 4, 8])
def test_a_job_across_two_hosts_goes_on_in_all_its_vms(sharing: LabUnderTest, vms: int) -> None:
    with Client(sharing.settings.socket) as client:
        until("both hosts are observed", lambda: all(reached(client, host.name) for host in plan_of(sharing.where)))
        options = (f"--nodes={vms}", "--mem=64", f"--comment=vm:per-host={vms // 2}", "--output=saved-%j.txt")
        job = sharing.sbatch(f"{STEP}; echo ended $?; srun -Q hostname; exit 5", *options)
        output = sharing.user.home / f"saved-{job}.txt"
        begun = {f"{rank} step 1" for rank in range(vms)}
        until("all tasks run", lambda: output.exists() and begun <= set(output.read_text().split("\n")))
        before = {vm["name"]: vm["host"] for vm in client.vms()}
        assert len(set(before.values())) == 2, "it runs on both hosts"
        client.save(job)
        frozen = lambda: [one for one in client.saved() if one["spread"] is not None]  # noqa: E731
        (state,) = until("its VMs are frozen", frozen)
        print(f"{vms} VMs: frozen within {state['spread']} s")
        ended(client, job, "done")
        lines = output.read_text().splitlines()
        for rank in range(vms):
            steps = [line for line in lines if line.startswith(f"{rank} step")]
            assert steps == [f"{rank} step {number}" for number in range(1, 13)]
        assert "ended 4" in lines and set(lines[-vms:]) == before.keys()
        assert accounted(sharing, job) == ("FAILED", "5:0")
        until("nothing is left of it", lambda: not client.saved() and not client.vms())
