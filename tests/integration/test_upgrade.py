"""The daemon is replaced by one with a newer schema while a job runs: the job does not notice."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import multiverse
from multiverse.client import Client
from multiverse.store import schema
from multiverse_lab.lab.plan import load
from multiverse_lab.lab.service import Lab
from multiverse_lab.lab.services import AGENT, CONTROLLER
from multiverse_lab.simulation.network import NEIGHBOURS, THIS, ProtocolRelease
from tests.integration.conftest import LabUnderTest
from tests.integration.releases import NEWER_SCHEMA, of_release
from tests.integration.watch import accounted, ended, latest, nothing_left, qemu_of, until
from tests.newer_schema import NEWER

pytestmark = pytest.mark.integration


def schema_of(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def test_a_job_goes_on_in_its_vm_through_an_upgrade_and_the_way_back(
    lab: LabUnderTest, controller: Callable[[], int]
) -> None:
    client, plan = Client(lab.settings.socket), load(lab.where)
    assert plan is not None
    database = lab.settings.state_dir / "multiverse.db"
    out, go = lab.user.home / "upgraded.out", lab.user.home / "go"
    go.unlink(missing_ok=True)
    script = f"echo began in $(hostname); until [ -e {go} ]; do sleep 0.2; done; echo ended in $(hostname)"
    job = lab.sbatch(script, f"--output={out}")
    row = until("it runs", lambda: (r := latest(client, job)).get("state") == "allocated" and r)
    (vm,) = row["vms"]
    qemu = qemu_of(vm)

    asyncio.run(CONTROLLER.stop(lab.where))
    asyncio.run(of_release(CONTROLLER, NEWER_SCHEMA).ensure(Lab(lab.where, plan)))
    copy = database.with_name(f"multiverse.db.schema-{schema.HEAD}")
    assert (schema_of(database), schema_of(copy)) == (NEWER, schema.HEAD)
    assert latest(client, job)["state"] == "allocated" and qemu_of(vm) == qemu

    asyncio.run(CONTROLLER.stop(lab.where))
    for name in ("multiverse.db-wal", "multiverse.db-shm"):
        database.with_name(name).unlink(missing_ok=True)
    copy.rename(database)
    controller()
    assert schema_of(database) == schema.HEAD
    assert latest(client, job)["state"] == "allocated" and qemu_of(vm) == qemu
    go.touch()
    ended(client, job, "done")
    assert out.read_text().split("\n")[:2] == [f"began in {vm}", f"ended in {vm}"]
    assert accounted(lab, job) == ("COMPLETED", "0:0") and len(client.jobs(job)) == 1
    nothing_left(lab, client)


EARLIER, LATER = NEIGHBOURS


@pytest.mark.slow
@pytest.mark.parametrize("first", ["agent", "controller"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(EARLIER, THIS), (THIS, LATER)],
    ids=["to this", "from this"],
)
def test_controller_and_agent_are_upgraded_in_either_order_under_a_job(
    lab: LabUnderTest, controller: Callable[[], int], before: ProtocolRelease, after: ProtocolRelease, first: str
) -> None:
    """The job goes on in its VM, and ends once. Between the two upgrades, VMs are made and removed as ever."""
    client, plan = Client(lab.settings.socket), load(lab.where)
    assert plan is not None
    runs: dict[str, ProtocolRelease] = {}

    def run(role: str, release: ProtocolRelease) -> None:
        runs[role] = release
        service = {"agent": AGENT, "controller": CONTROLLER}[role]
        asyncio.run(of_release(service, release).ensure(Lab(lab.where, plan)))
        if len(runs) == 2:
            until("each hears the other's release", lambda: heard_of(lab) == (runs["agent"], runs["controller"]))
            until("the host is observed", lambda: all(source["known"] for source in client.status()["sources"]))

    out, go = lab.user.home / f"upgraded-{first}.out", lab.user.home / f"go-{first}"
    for path in (out, go):
        path.unlink(missing_ok=True)
    try:
        for role in ("agent", "controller"):
            run(role, before)
        script = f"echo began in $(hostname); until [ -e {go} ]; do sleep 0.2; done; echo ended in $(hostname)"
        job = lab.sbatch(script, f"--output={out}")
        (vm,) = until("it runs", lambda: (r := latest(client, job)).get("state") == "allocated" and r)["vms"]
        qemu = qemu_of(vm)
        run(first, after)
        ended(client, lab.sbatch("true"), "done")
        run("controller" if first == "agent" else "agent", after)
        assert latest(client, job)["state"] == "allocated" and qemu_of(vm) == qemu
        go.touch()
        ended(client, job, "done")
        assert out.read_text().split("\n")[:2] == [f"began in {vm}", f"ended in {vm}"]
        assert accounted(lab, job) == ("COMPLETED", "0:0") and len(client.jobs(job)) == 1
        nothing_left(lab, client)
    finally:
        controller()


def heard_of(lab: LabUnderTest) -> tuple[ProtocolRelease | None, ProtocolRelease | None]:
    """The releases of the agent and of the controller, as they have heard of each other last."""
    names = {multiverse.__version__: THIS, **{one.name: one for one in NEIGHBOURS}}

    def last(log: str, text: str) -> ProtocolRelease | None:
        lines = [line for line in (lab.where.log / log).read_text().splitlines() if text in line]
        said = re.search(r"release='(.+?)'", lines[-1]) if lines else None
        return names.get(said[1]) if said else None

    return last("controller.log", "agent connected"), last("agent.log", "controller connected")
