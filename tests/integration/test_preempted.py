"""Jobs end for others as Slurm's PreemptMode and GraceTime say, where they can neither move nor be saved."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from tests.integration.conftest import LabUnderTest, new_lab
from tests.integration.images import slim
from tests.integration.watch import accounted, ended, latest, until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

GRACE_TIME = 12  # seconds
_SLURM = """
AccountingStorageEnforce=associations,qos
PreemptType=preempt/qos
PreemptMode=REQUEUE
"""
_QOS = (
    ("add", "account", "physics", "Description=physics", "Organization=lab"),
    ("add", "qos", "requeued", f"GraceTime={GRACE_TIME}", "PreemptMode=requeue"),
    ("add", "qos", "cancelled", f"GraceTime={GRACE_TIME}", "PreemptMode=cancel"),
    ("add", "qos", "urgent", "Preempt=requeued,cancelled", "Priority=1000"),
)
# Notes the time of SIGTERM, and the present one again and again, until there is a file.
_STEP = """
import os, signal, sys, time
path = sys.argv[1]
def note(*_):
    with open(path + ".warned", "a") as file:
        file.write(f"{time.time()}\\n")
signal.signal(signal.SIGTERM, note)
while not os.path.exists(path + ".ends"):
    with open(path + ".time.new", "w") as file:
        file.write(f"{time.time()}")
    os.rename(path + ".time.new", path + ".time")
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def lab(accelerator: Path) -> Iterator[LabUnderTest]:
    """One host, no storage for states of jobs, and a QOS that preempts others."""
    slim()
    options = LabOptions(cores=2, memory=3072, settings={"save": {"enabled": False}})
    with new_lab(accelerator, options, controller=False) as made:
        for words in (*_QOS, ("add", "user", made.user.name, "account=physics", "qos=requeued,cancelled,urgent")):
            subprocess.run(("sacctmgr", "-i", *words), env=made.env, check=True, capture_output=True)
        with (made.where.etc / "site.conf").open("a") as file:
            file.write(_SLURM)
        asyncio.run(lifecycle.up(made.where, options))
        yield made


@pytest.mark.parametrize("qos", ["requeued", "cancelled"])
def test_a_step_is_told_and_goes_on_for_its_grace_time(lab: LabUnderTest, qos: str) -> None:
    own = lab.user.home / qos
    (lab.user.home / "step.py").write_text(_STEP)
    script = f"echo run >> {own}.runs; srun -Q python3 {lab.user.home}/step.py {own}"
    with Client(lab.settings.socket) as client:
        low = lab.sbatch(script, "-c2", "--mem=500", "--time=10", f"--qos={qos}", f"--output={own}.out")
        until("its step runs", Path(f"{own}.time").exists, 240)
        urgent = lab.sbatch("sleep 3", "-c2", "--mem=500", "--time=5", "--qos=urgent")
        until("its step is told", Path(f"{own}.warned").exists)
        row = latest(client, low)
        assert row["state"] == "warned" and f"job {urgent}" in row["evictions"][-1]["reason"], row
        told = lab.run("scontrol", "show", "job", low).stdout
        assert f"job {urgent}" in told, told
        ended(client, urgent, "done")
        warned, *again = map(float, Path(f"{own}.warned").read_text().split())
        assert not [later for later in again if later < warned + GRACE_TIME - 1], "it is told once in that time"
        if qos == "cancelled":
            row = ended(client, low, "done")
            assert row["reason"] == "CANCELLED" and not row["evictions"][-1]["under_way"], row
            assert float(Path(f"{own}.time").read_text()) - warned > GRACE_TIME - 1
            assert accounted(lab, low, 90)[0] in ("CANCELLED", "PREEMPTED")
            assert Path(f"{own}.runs").read_text() == "run\n"
            return
        until("it runs again", lambda: Path(f"{own}.runs").read_text() == "run\nrun\n", 240)
        until("its step runs", lambda: time.time() - float(Path(f"{own}.time").read_text()) < 1)
        Path(f"{own}.ends").touch()
        ended(client, low, "done")
        assert accounted(lab, low, 90) == ("COMPLETED", "0:0")
        assert latest(client, low)["evictions"][-1]["way"] == "requeue"
