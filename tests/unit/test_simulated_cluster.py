"""Workloads on simulated clusters: their description, their jobs, their figures, and the paper's own ones."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from multiverse.cli import render
from multiverse.cli.commands import build
from multiverse.core.errors import Refused
from multiverse.core.model.basics import CloneKind, Depth, Size
from multiverse.core.model.host import HypervisorView
from multiverse_lab.bench import paper_cluster, swf
from multiverse_lab.bench.clusters import (
    CloneTimes,
    ClusterSpec,
    Collected,
    MeanOver,
    PolicyChoice,
    RunFigures,
    mean_over,
    policy_named,
    read_cluster,
    run_cluster,
)
from multiverse_lab.bench.workloads import GENERATORS, USERS, DrawnJobs, arrivals
from multiverse_lab.cli import simulated_cluster
from multiverse_lab.simulation.hypervisor import SimulatedHosts
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.scenario import Arrival
from multiverse_lab.simulation.workload import JobTimes, WorkloadTotals

SMALL = ClusterSpec(hosts=2, cores=4, memory=16384, memory_per_cpu=1024)
PLAIN = PolicyChoice()


def jobs(count: int, cpus: int = 1, seconds: float = 30.0) -> Iterator[Arrival]:
    for number in range(count):
        yield Arrival(0.0, Batch(str(number), seconds=seconds, size=Size(cpus, 1024), limit=3600.0))


# --- descriptions ------------------------------------------------------------------------------------


def test_a_file_describes_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("hosts = 3\ncores = 8\ncpu_overcommit = 2.0\n[full]\nclone = [50, 75]\nrate = 0.25\n")
    spec = read_cluster(path)
    assert (spec.cpus, spec.full) == (48, CloneTimes((50.0, 75.0), rate=0.25))


@pytest.mark.parametrize(("text", "named"), [
    ("host = 3", "did you mean hosts"),
    ("hosts = 0", "hosts"),
    ("[", "read"),
    ("slurmd = [5.0, 1.0]", "slurmd: must have the least before the most"),
    ("slurmd = [0.0, inf]", "slurmd"),
])  # fmt: skip
def test_a_wrong_file_is_refused_and_its_key_named(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(Refused, match=named):
        read_cluster(tmp_path / "c.toml")


def test_words_choose_a_policy() -> None:
    chosen = policy_named("full+no-backfill+pack+parked")
    assert chosen == PolicyChoice(CloneKind.FULL, "pack", backfill=False, spares=Depth.PARKED)
    with pytest.raises(Refused, match="faster"):
        policy_named("full+faster")
    assert policy_named("full+full") == policy_named("full")
    with pytest.raises(Refused, match="both full and instant"):
        policy_named("full+pack+instant")


# --- jobs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATORS)
def test_jobs_are_drawn_by_rate_and_seed(name: str) -> None:
    drawn = DrawnJobs(4000, 6.0, 16, seed=3)
    found = list(GENERATORS[name](drawn))
    assert found == list(GENERATORS[name](drawn)) != list(GENERATORS[name](replace(drawn, seed=4)))
    assert [one.number for one in found] == list(range(1, 4001))
    assert all(a.submitted <= b.submitted for a, b in pairwise(found))
    assert all(1 <= one.processors <= 16 and one.limit >= one.runs > 0 for one in found)
    assert 0.8 < found[-1].submitted / 40_000 < 1.25, "4,000 jobs at 6 a minute"


def test_a_wide_job_has_several_vms_and_times_begin_at_the_first() -> None:
    found = list(
        arrivals([swf.TraceJob(1, 50.0, 9.0, 10, 20.0, USERS + 3), swf.TraceJob(2, 60.0, 9.0, 2, 20.0)], 4, 512)
    )
    assert [(one.at, one.batch.nodes, one.batch.size) for one in found] == [
        (0.0, 3, Size(4, 2048)),
        (10.0, 1, Size(2, 1024)),
    ]
    assert found[0].batch.uid == found[1].batch.uid + 3


# --- what a cluster does -----------------------------------------------------------------------------


def test_jobs_run_and_nothing_is_kept_of_them() -> None:
    found = run_cluster(SMALL, PLAIN, jobs(12), 1)
    assert (found.jobs, found.refused, found.failed) == (12, 0, 0)
    assert found.makespan > 60.0 and found.wait > 0.0, "8 CPUs have 12 jobs: some wait for a turn"
    assert found.overheads["slurm_restart"] == 0.0 < found.overheads["slurmd_customization"]
    assert found.peak <= 1.0 and found.running == pytest.approx(30.0, abs=2.0)


def test_the_same_seed_gives_the_same_figures() -> None:
    assert run_cluster(SMALL, PLAIN, jobs(6), 5) == run_cluster(SMALL, PLAIN, jobs(6), 5)


def test_jobs_that_fit_nowhere_are_refused() -> None:
    found = run_cluster(SMALL, PLAIN, [*jobs(2), *jobs(1, cpus=64)], 1)
    assert (found.jobs, found.refused) == (3, 1)


def test_jobs_of_which_none_fits_are_an_error_that_says_so() -> None:
    with pytest.raises(Refused, match="no job fits on a host"):
        run_cluster(SMALL, PLAIN, jobs(2, cpus=64), 1)


def test_a_restart_of_slurmctld_is_waited_for_and_shared() -> None:
    found = run_cluster(replace(SMALL, restart=(20.0, 20.0)), PLAIN, jobs(6), 1)
    assert 20.0 <= found.overheads["slurm_restart"] <= 40.0


def test_the_platform_limits_clones() -> None:
    full, kind = CloneTimes((10.0, 10.0)), PolicyChoice(CloneKind.FULL)
    free = run_cluster(replace(SMALL, full=full), kind, jobs(4), 1)
    one = run_cluster(replace(SMALL, full=replace(full, at_once=1)), kind, jobs(4), 1)
    paced = run_cluster(replace(SMALL, full=replace(full, rate=0.05)), kind, jobs(4), 1)
    assert free.clone_most < 15.0 < 40.0 <= one.clone_most < 45.0 and 70.0 <= paced.clone_most < 75.0


def test_cpus_that_are_claimed_twice_are_shared() -> None:
    twice = replace(SMALL, hosts=1, cpu_overcommit=2.0)
    alone, shared = (run_cluster(replace(twice, threads=n), PLAIN, jobs(2, cpus=4), 1) for n in (2.0, 1.0))
    assert alone.running < 35.0 and shared.running > 55.0


# --- figures -----------------------------------------------------------------------------------------


def ended(number: int, began: float, seconds: float, uid: int = 1000) -> JobTimes:
    return JobTimes(str(number), uid, 2, seconds, 0.0, began=began, ended=began + seconds, result="COMPLETED")


def test_figures_of_jobs() -> None:
    collected = Collected(cpus=4, seed=1)
    for job in (ended(1, 0.0, 20.0), ended(2, 20.0, 20.0, uid=1001)):
        collected.add(job)
    found = collected.figures(WorkloadTotals(jobs=2))
    assert (found.makespan, found.utilization, found.peak) == (40.0, 0.5, 0.5)
    assert found.steps[:4] == (0.5, 0.5, 0.5, 0.5)
    assert (found.slowdown, found.wait) == (1.5, 10.0)
    assert found.fairness == pytest.approx(9 / 10), "the slowdowns of the two users are 1 and 2"


def test_a_long_run_keeps_no_more_steps() -> None:
    collected = Collected(cpus=2, seed=1)
    for number in range(100):
        collected.add(ended(number, number * 1000.0, 1000.0))
    found = collected.figures(WorkloadTotals(jobs=100))
    assert found.utilization == pytest.approx(1.0) and len(found.steps) <= 2001 and found.step > 10.0


def test_an_interval_needs_several_seeds() -> None:
    assert mean_over([3.0]) == MeanOver(3.0)
    found = mean_over([1.0, 3.0])
    assert found.value == 2.0 and found.low is not None and found.low < 1.0


# --- the paper ---------------------------------------------------------------------------------------


def test_workload_1_is_the_first_half_of_workload_2() -> None:
    first, second = (list(paper_cluster.jobs_of(name, 7, 1.0)) for name in ("workload-1", "workload-2"))
    assert len(first) == 50 and first == second[:50]
    steady = [one.at for one in paper_cluster.jobs_of("steady", 7, 1.0)]
    assert steady[:3] == [10.0, 20.0, 30.0]


def figures(**changes: float) -> RunFigures:
    zero = dict.fromkeys(RunFigures.__dataclass_fields__, 0.0)
    values = {**zero, "steps": (0.9,) * 30, "overheads": dict.fromkeys(("network_configuration", "slurm_restart"), 1.0)}
    return RunFigures(**{**values, "makespan": 581.0, "provisioning": 36.0, **changes})  # type: ignore[arg-type]


def test_published_figures_are_compared_with_what_came_out() -> None:
    runs = {one: [figures()] for one in paper_cluster.EXPERIMENTS}
    runs[paper_cluster.FULL_2] = [figures(makespan=2000.0, peak=0.52)]
    found = {one.figure: one for one in paper_cluster.reproduced(runs)}
    assert found["workload-2, all done, instant"].within and not found["workload-2, all done, full"].within
    assert found["workload-2, CPUs in use, full, most"].within, "0.52 is within a tenth of 0.5"
    full = found["workload-1, provisioning, full, mean"]
    assert not full.within and full.why and not full.fitted


# --- the command -------------------------------------------------------------------------------------


def call(*words: str) -> str:
    result = CliRunner().invoke(build(["simulate"]), ["simulate", "cluster", *words], catch_exceptions=False)
    return result.stdout


def test_policies_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("hosts = 1\ncores = 8\n")
    words = ("--cluster", str(path), "--generate", "poisson", "--jobs", "4", "--compare", "full")
    found = json.loads(call(*words, "--json"))
    assert list(found["policies"]) == ["instant", "full"]
    assert found["command"] and found["date"]
    clone = {name: one["figures"]["clone, mean"]["value"] for name, one in found["policies"].items()}
    assert clone["instant"] < clone["full"]
    text = call(*words)
    assert "slurm_schedule" in text and "makespan" in text


def test_a_command_without_jobs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("hosts = 1\n")
    with pytest.raises(Refused, match="no jobs"):
        call("--cluster", str(tmp_path / "c.toml"))
    with pytest.raises(Refused, match="generates"):
        call("--cluster", str(tmp_path / "c.toml"), "--generate", "nothing")
    with pytest.raises(Refused, match="ten years"):
        call("--cluster", str(tmp_path / "c.toml"), "--generate", "poisson", "--rate", "1e-9")


def test_two_workloads_are_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("hosts = 1\n")
    with pytest.raises(Refused, match="two workloads"):
        call("--cluster", f"{tmp_path}/c.toml", "--generate", "poisson", "--trace", f"{tmp_path}/t.swf")


def test_what_became_of_the_jobs_of_a_trace_is_said(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("hosts = 1\ncores = 4\n")
    lines = [f"{number} 0 -1 {runs} {cpus} -1 -1 {cpus} 60 -1 1 1 -1 -1 -1 -1 -1 -1" for number, runs, cpus in
             ((1, 20, 2), (2, 20, 400), (3, 6000, 1))]  # fmt: skip
    (tmp_path / "t.swf").write_text("\n".join(lines))
    text = call("--cluster", f"{tmp_path}/c.toml", "--trace", f"{tmp_path}/t.swf", "--compare", " full, ")
    assert "3 jobs on 1 host of 4 cores" in text
    said = " ".join(text.split())
    assert "Refused, as they fit on no host: 1 job. Not completed: 1 job." in said
    assert "full: utilization in" in text


def test_nothing_is_cut_off_on_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.toml").write_text("hosts = 2\ncores = 8\n")
    terminal = Console(force_terminal=True, width=80, file=io.StringIO())
    for module in (render, simulated_cluster):
        monkeypatch.setattr(module, "console", terminal)
    call("--cluster", f"{tmp_path}/c.toml", "--generate", "poisson", "--jobs", "3", "--seeds", "2",
         "--compare", "full,joined,full+no-backfill")  # fmt: skip
    assert isinstance(terminal.file, io.StringIO)
    text = terminal.file.getvalue()
    assert "slurm_schedule" in text and "±" in text and "…" not in text


def test_a_report_has_the_figures_of_each_policy(tmp_path: Path) -> None:
    path, html = tmp_path / "c.toml", tmp_path / "c.html"
    path.write_text("hosts = 2\ncores = 8\n")
    words = ("--cluster", f"{path}", "--generate", "poisson", "--jobs", "4", "--compare", "full", "--seeds", "2")
    found = json.loads(call(*words, "--json", "--html", f"{html}"))
    text = html.read_text()
    for chart in ("Utilization, means", "Wait, means", "Bounded slowdown, means", "Fairness", "CPUs of running jobs"):
        assert f'aria-label="{chart}"' in text
    assert text.count('class="range"') == 8, "each mean has its interval"
    data = dict(re.findall(r'download="(\w+).csv" href="data:text/csv;base64,([^"]+)"', text))
    rows = list(csv.DictReader(io.StringIO(base64.b64decode(data["policies"]).decode())))
    for name, one in found["policies"].items():
        (row,) = [row for row in rows if (row["policy"], row["figure"]) == (name, "fairness")]
        fairness = one["figures"]["fairness"]
        assert (float(row["value"]), float(row["low"])) == (fairness["value"], fairness["low"])
    assert "2 hosts of 8 cores" in text and "1, 2" in text and "nothing here was measured on hardware" in text
    assert f"The report is in {html}." in call(*words, "--html", f"{html}")


def test_the_report_on_the_papers_cluster_has_published_figures_and_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {one: [run_cluster(SMALL, PLAIN, jobs(4), 1)] for one in paper_cluster.EXPERIMENTS}
    monkeypatch.setattr(paper_cluster, "run_paper", lambda seeds, ended: few)
    monkeypatch.setattr(paper_cluster, "run_readings", lambda seeds, ended: {"10 jobs a minute": few})
    monkeypatch.setattr(paper_cluster, "run_changes", lambda seeds, ended: {"no restart": few[paper_cluster.FULL_1]})
    call("--cluster", "paper", "--html", f"{tmp_path}/p.html")
    text = (tmp_path / "p.html").read_text()
    assert all(f'id="{key}"' in text for key in ("simulated", "readings", "changes", "utilization"))
    assert "868 s" in text and "10 jobs a minute" in text and "no restart" in text and "5 hosts of 44 cores" in text


def test_a_job_that_starts_has_only_the_hosts_of_its_vms_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    observed: Counter[str] = Counter()
    observe = SimulatedHosts.observe_host

    async def counted(self: SimulatedHosts, host: str) -> HypervisorView:
        observed[host] += 1
        return await observe(self, host)

    monkeypatch.setattr(SimulatedHosts, "observe_host", counted)
    run_cluster(replace(SMALL, hosts=12, poll=1000.0), PolicyChoice(placement="first-fit"), jobs(3), 1)
    idle = [host for host in observed if observed[host] <= 2]
    assert len(idle) >= 10, observed
