"""Templates by size and by account: images that cannot be plugged, and accounts that share no template."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable

import pytest

from multiverse.client import Client
from multiverse_lab.lab.plan import load
from multiverse_lab.lab.services import CONTROLLER, Lab
from tests.integration.conftest import LabUnderTest
from tests.integration.images import narrow, stiff
from tests.integration.watch import accounted, below, ended, nothing_left, until, written

pytestmark = pytest.mark.integration


def dropped(client: Client, image: str, account: str | None = None) -> None:
    client.template("drop", image, account=account)
    those = {"image": image} | ({"account": account} if account else {})
    until("they are dropped", lambda: not [row for row in client.templates() if those.items() <= row.items()])


@pytest.mark.slow
def test_jobs_of_an_image_that_cannot_be_plugged_get_templates_of_their_size(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    image = stiff()
    controller()  # Slurm learns of the image
    shutil.rmtree(image.path)
    until("no host shows it", lambda: "stiff" not in client.hosts()[0]["images"])
    out = lab.user.home / "stiff.out"
    facts = "nproc; awk '/MemTotal/{print int($2/1024)}' /proc/meminfo; cat /sys/devices/system/cpu/possible"
    job = lab.sbatch(facts, "--constraint=stiff&instant", "-n2", "--mem=600", f"--output={out}")
    why = "no host has image stiff"
    until("it waits for its image", lambda: [row["waiting"] for row in client.jobs(job)] == [why])
    (trouble,) = until("status says so", lambda: client.status()["alerts"])
    assert trouble["name"] == "image-stiff" and job in trouble["jobs"]
    stiff()
    row = ended(client, job, "done")
    assert row["image"] == "stiff"
    cpus, memory, possible = written(out).split()
    assert (cpus, possible) == ("2", "0-1") and int(memory) >= 600, "nothing was plugged, and there is no room for more"
    assert accounted(lab, job) == ("COMPLETED", "0:0")

    close = lab.sbatch("true", "--constraint=stiff&instant", "-n1", "--mem=500", "--output=/dev/null")
    (vm,) = ended(client, close, "done")["vms"]
    assert accounted(lab, close) == ("COMPLETED", "0:0") and vm not in row["vms"]
    (one,) = [row for row in client.templates() if row["image"] == "stiff"]
    assert (one["state"], one["cpus"], one["memory"]) == ("ready", 2, 1024), "one template served both sizes"
    dropped(client, "stiff")
    nothing_left(lab, client)


@pytest.mark.slow
def test_the_first_template_shows_that_a_kernel_cannot_plug_cpus(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    narrow()
    controller()
    out = lab.user.home / "narrow.out"
    job = lab.sbatch("nproc", "--constraint=narrow&instant", "-n2", f"--output={out}")
    ended(client, job, "done")
    assert written(out).split() == ["2"] and accounted(lab, job) == ("COMPLETED", "0:0")
    (host,) = client.hosts()
    assert host["images"]["narrow"] == ["fork", "limit_disk", "plug_memory"]
    assert {row["cpus"] for row in client.templates() if row["image"] == "narrow"} == {1, 2}
    dropped(client, "narrow")
    nothing_left(lab, client)


@pytest.mark.slow
def test_each_account_has_templates_of_its_own(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    controller()
    told = lab.where.settings.read_text()
    lab.where.settings.write_text(told.replace("[image]\n", "[image]\nper_account = true\n"))
    plan = load(lab.where)
    assert plan is not None
    asyncio.run(CONTROLLER.ensure(Lab(lab.where, plan)))
    accounts = ("physics", "../../etc")
    try:
        jobs = [lab.sbatch("true", f"--account={account}", "--output=/dev/null") for account in accounts]
        for job in jobs:
            ended(client, job, "done")
        ready = {row["account"] for row in client.templates() if row["state"] == "ready"}
        assert ready.issuperset(accounts)
        assert not [path for path in below(lab.settings.qemu.templates) if "etc" in path.name]
        for account in accounts:
            dropped(client, "slim", account)
    finally:
        controller()  # with the settings as they were
    nothing_left(lab, client)
