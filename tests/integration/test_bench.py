"""Small benchmarks on the real lab: all their figures are there. The values are not checked, because times vary."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.bench import arrivals, burst, density
from multiverse_lab.bench.burst import BurstPlan
from multiverse_lab.bench.save import JobReports, SaveCase, SaveRun, disk_speed
from multiverse_lab.lab.plan import load
from multiverse_lab.lab.services import Lab
from multiverse_lab.lab.session import LabSession, session_environment
from tests.integration.conftest import LabUnderTest
from tests.integration.images import BUILT
from tests.integration.watch import nothing_left

pytestmark = [pytest.mark.integration, pytest.mark.slow]

INSTANT = [kind for kind in burst.KINDS if kind.name == "instant"]


@pytest.fixture(scope="module")
def bench(lab: LabUnderTest, controller: Callable[[], int]) -> LabSession:
    plan = load(lab.where)
    assert plan is not None
    return LabSession(lab.where, lab.settings, lab.user, Lab(lab.where, plan), session_environment(lab.where))


def test_all_jobs_of_a_burst_are_measured(bench: LabSession, lab: LabUnderTest, client: Client) -> None:
    samples = burst.run(bench, client, BurstPlan(3, None, INSTANT), lambda *_: None)["instant"]
    assert len(samples.provisioning) == len(samples.submit_to_start) == 3 and samples.again == 0
    assert all(0 < made < start for made, start in zip(samples.provisioning, samples.submit_to_start, strict=True))
    assert max(samples.submit_to_start) == pytest.approx(samples.all_ran)
    # An observation may overtake the end of an effect, so not every job has stages.
    assert samples.stages["clone.restore"] and samples.stages["join.first_byte"]
    nothing_left(lab, client)


def test_a_job_that_fails_ends_the_benchmark(
    bench: LabSession, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "SCRIPT", arrivals.SCRIPT.replace("exit 0", "exit 3"))
    with pytest.raises(Broken, match=r"1 jobs have not completed: \d+_1 is FAILED"):
        burst.run(bench, client, BurstPlan(1, None, INSTANT), lambda *_: None)


def test_a_job_is_saved_and_resumed_and_each_step_measured(
    bench: LabSession, lab: LabUnderTest, client: Client
) -> None:
    case = SaveCase("touched", 200, 20)
    with JobReports(lab.settings.network.gateway) as reports:
        one = SaveRun(bench, client, reports).run(case)
    assert 0 < one.frozen < one.requeued < one.written and one.start > 0 and one.resume > 0
    assert one.size > 20 << 20, "random bytes are not compressed"
    assert disk_speed(lab.settings.save.directory, 1 << 20) > 0
    nothing_left(lab, client)


def test_density_adds_vms_measures_them_and_ends_them(bench: LabSession, lab: LabUnderTest, client: Client) -> None:
    shown: list[density.DensityStep] = []
    found = density.run(bench, client, density.DensityBounds(3, 2, 0, 120.0), shown.append)
    assert [step.vms for step in found.steps] == [2, 3] == [step.vms for step in shown]
    assert found.most == 3 and found.gave_out == ""
    for step in found.steps:
        assert 5 < step.private < 256 and step.shared > 5 and 0 < step.busy <= 1 and step.vm_cpu > 0
    nothing_left(lab, client)


def test_density_ends_when_less_memory_is_available_than_its_floor(
    bench: LabSession, lab: LabUnderTest, client: Client
) -> None:
    found = density.run(bench, client, density.DensityBounds(2, 1, 1 << 30, 120.0), lambda step: None)
    assert found.most == 1 and found.gave_out.startswith("memory: ")
    nothing_left(lab, client)


def test_a_burst_uses_a_lab_of_its_own_and_leaves_nothing_of_it() -> None:
    directory = Path(tempfile.mkdtemp(prefix="mvb-"))
    directory.chmod(0o755)
    program = Path(sys.executable).with_name("multiverse")
    words = ["bench", "burst", "3", "--kinds", "linked,instant", "--dir", f"{directory}/lab", "--images", f"{BUILT}"]
    try:
        done = subprocess.run([program, *words, "--json"], capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert [one["provisioning"]["n"] for one in found["kinds"].values()] == [3, 3]
        assert found["ratios"][0]["over"] == "linked" and found["ratios"][0]["means"]["value"] > 0
        assert not (directory / "lab" / "run").exists()
    finally:
        shutil.rmtree(directory)


def test_the_tasks_of_an_array_run_in_vms_in_spares_and_on_bare_metal_with_the_same_cpus() -> None:
    directory = Path(tempfile.mkdtemp(prefix="mvb-"))
    directory.chmod(0o755)
    program = Path(sys.executable).with_name("multiverse")
    words = ["bench", "throughput", "--tasks", "6", "--cpus", "3", "--seconds", "0.5", "--json"]
    try:
        done = subprocess.run(
            [program, *words, "--dir", f"{directory}/lab", "--images", f"{BUILT}"],
            capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert list(found["kinds"]) == ["bare_metal", "instant", "joined"]
        for name, one in found["kinds"].items():
            assert one["tasks_per_minute"] == pytest.approx(360 / one["all_ran"])
            assert 0 < one["computing"] <= 1 and one["bounded_by"], name
            assert one["stages"]["task"] >= 0.5 and one["again"] == 0
        assert found["kinds"]["instant"]["stages"]["join"] > 0 and found["kinds"]["instant"]["spares"] == 0
        assert found["kinds"]["joined"]["spares"] >= 3, "those that were there before the array"
        assert not (directory / "lab" / "run").exists()
    finally:
        shutil.rmtree(directory)


@pytest.mark.timeout(3600)
def test_the_papers_evaluation_runs_all_workloads_of_all_kinds_and_writes_its_page() -> None:
    directory = Path(tempfile.mkdtemp(prefix="mvb-"))
    directory.chmod(0o755)
    program = Path(sys.executable).with_name("multiverse")
    page, data = directory / "paper.html", directory / "data"
    words = ["bench", "paper", "--quick", "--scale", "0.03", "--html", f"{page}", "--csv", f"{data}", "--json"]
    try:
        done = subprocess.run(
            [program, *words, "--dir", f"{directory}/lab", "--images", f"{BUILT}"],
            capture_output=True, text=True, timeout=3000,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        ran = {(one["workload"], one["kind"]): one for one in found["runs"]}
        assert len(ran) == 9 and {len(one["jobs"]) for one in ran.values()} == {2, 3}
        assert [one["cpus"] for (workload, _), one in ran.items() if workload == "workload-2"] == [16] * 3
        for (_, kind), one in ran.items():
            for job in one["jobs"]:
                assert job["computed"] > 0 and job["ended"] - job["began"] >= job["seconds"] * 0.99
                assert job["overheads"]["slurm_restart"] == 0.0
                assert (job["clone"] > 0) is (kind != "bare metal")
                before = job["clone"] + sum(job["overheads"].values())
                assert before == pytest.approx(job["began"] - job["submitted"], abs=0.2)
        assert len(list(data.glob("figure-*.csv"))) == 9 and page.read_text().count("<svg") == 11
        assert not (directory / "lab" / "run").exists() and not (directory / "lab" / "hpcc").exists()
    finally:
        shutil.rmtree(directory)
