"""Warm pools on the real lab: VMs that are there before their job, each for one job alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from multiverse.client import Client
from multiverse.lab import lifecycle
from multiverse.lab.plan import Wishes
from tests.integration.conftest import LabUnderTest
from tests.integration.watch import ended, nothing_left, until, written

pytestmark = pytest.mark.integration

POOLS = """\
[[pool]]
depth = "parked"
min = 1

[[pool]]
depth = "joined"
min = 1
memory = 300
"""


@pytest.fixture(scope="module")
def controller(lab: LabUnderTest, controller: Callable[[], int]) -> Iterator[Callable[[], int]]:
    """The lab's controller keeps two pools while this module's tests run, and nothing of them afterwards."""
    site = lab.where.etc / "site.toml"
    site.write_text(POOLS)
    asyncio.run(lifecycle.up(lab.where, Wishes()))
    yield controller
    site.write_text("")
    asyncio.run(lifecycle.up(lab.where, Wishes()))
    nothing_left(lab, Client(lab.settings.socket))


def full(client: Client) -> dict[str, str]:
    """The spare of each depth by its name, once the pools are full."""

    def ask() -> dict[str, str] | None:
        pools = client.status()["pools"]
        spares = {vm["state"]: vm["name"] for vm in client.vms() if not vm["job_id"] and vm["state"] in DEPTHS}
        return spares if all(p["ready"] == p["wanted"] == 1 for p in pools) and len(spares) == 2 else None

    return dict(until("both pools are full", ask))


DEPTHS = ("parked", "joined")


def cpus(client: Client) -> int:
    """More than the template has, where guests take up CPUs while they run."""
    (host,) = client.hosts()
    return 2 if "plug_cpus" in host["images"]["slim"] else 1


def events(client: Client, job: str) -> list[dict[str, Any]]:
    return [entry for one in client.timeline(job) for entry in one["entries"]]


def test_a_job_of_another_size_takes_the_parked_one_and_the_pool_is_filled_behind_it(
    lab: LabUnderTest, client: Client
) -> None:
    before, most = full(client), cpus(client)
    out = lab.user.home / "parked.out"
    script = "hostname; nproc; awk '/MemTotal/{print int($2/1024)}' /proc/meminfo; id -un"
    job = lab.sbatch(script, f"--output={out}", f"-n{most}", "--mem=700")
    ended(client, job, "done")
    host, has, memory, user = written(out).split()
    assert (host, has, user) == (before["parked"], str(most), lab.user.name) and int(memory) >= 700
    assert any(entry["event"] == "taken" for entry in events(client, job))
    assert full(client)["parked"] != before["parked"]


def test_a_job_that_fits_the_joined_one_is_its_user_at_home_there(lab: LabUnderTest, client: Client) -> None:
    before = full(client)
    out = lab.user.home / "joined.out"
    job = lab.sbatch("hostname; id -un; echo $HOME; pwd; date +%s", f"--output={out}", "--mem=250")
    ended(client, job, "done")
    host, user, home, place, _ = written(out).split()
    assert (host, user, home, place) == (before["joined"], lab.user.name, str(lab.user.home), str(lab.user.home))
    told = lab.run("scontrol", "show", "job", job).stdout
    assert "AdminComment=instant on" in told and "joined before" in told
    after = full(client)
    assert after["joined"] != before["joined"], "whoever has served a job serves no other"
    assert after["parked"] == before["parked"]


def test_left_to_us_the_kind_is_chosen_and_the_reason_is_told(lab: LabUnderTest, client: Client) -> None:
    full(client)
    job = lab.sbatch("true", "--output=/dev/null", "--constraint=auto", f"-n{cpus(client)}", "--mem=700")
    ended(client, job, "done")
    (admitted,) = [entry for entry in events(client, job) if entry["event"] == "admitted"]
    assert "parked before, one is parked" in admitted["reason"]
    assert admitted["reason"] in lab.run("scontrol", "show", "job", job).stdout
