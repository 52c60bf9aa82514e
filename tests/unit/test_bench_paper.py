"""What `multiverse bench paper` computes: the jobs, the parts of their times, the figures, and the page."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from multiverse.api import PhaseView, decode
from multiverse.core.errors import Broken
from multiverse_lab.bench.applications import compile_kernel
from multiverse_lab.bench.clusters import OVERHEADS, MeanOver
from multiverse_lab.bench.paper import programs, workload
from multiverse_lab.bench.paper.figures import PaperFigure, figures
from multiverse_lab.bench.paper.measure import PaperBench
from multiverse_lab.bench.paper.page import PaperReport, ReportSection, csv_files, page, shown
from multiverse_lab.bench.paper.published import by_experiment
from multiverse_lab.bench.paper.records import (
    BARE_METAL,
    FULL,
    INSTANT,
    PaperJobTimes,
    PaperRunTimes,
    parts,
    without_vm,
)

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


# --- the jobs ----------------------------------------------------------------------------------------


def test_the_scale_keeps_the_papers_proportion_of_running_to_provisioning() -> None:
    scale = workload.scaled(0.2, 17.4, 2, quick=False)
    jobs = [job for seed in range(40) for job in workload.jobs("workload-2", scale, seed)]
    assert len(jobs) == 40 * 20 and scale.cpus == 24
    assert sum(job.seconds for job in jobs) / len(jobs) / 17.4 == pytest.approx(245 / 87, rel=0.05)
    assert {job.cpus for job in jobs} == {1, 4} and {job.memory for job in jobs} == {200, 800}
    assert {job.program for job in jobs} == set(workload.PROGRAMS)
    quick = workload.scaled(0.2, 17.4, 2, quick=True)
    assert quick.second == scale.second and quick.second_of_jobs == pytest.approx(scale.second / 4)
    load = (87 + 245 / 4) / (87 + 245)
    assert quick.second_of_gaps == pytest.approx(scale.second * load) and scale.second_of_gaps == scale.second


def test_workload_1_is_the_first_half_of_workload_2_and_steady_jobs_come_evenly() -> None:
    scale = workload.scaled(0.1, 8.7, 2, quick=False)
    first, both, steady = (workload.jobs(name, scale, 3) for name in workload.WORKLOADS)
    assert first == both[:5] and len(both) == len(steady) == 10
    assert [job.seconds for job in steady] == [job.seconds for job in both]
    gaps = {round(b.at - a.at, 6) for a, b in itertools.pairwise(steady)}
    assert gaps == {10.0}, "10 s of the paper, which are one second here, on a tenth of the cluster"
    assert scale.claimable("workload-1") == 12 and scale.claimable("workload-2") == 24


@pytest.mark.parametrize(("share", "cpus"), [(0.01, 8), (0.06, 8), (0.1, 12), (1.0, 112)])
def test_large_jobs_fill_a_cluster_of_any_scale(share: float, cpus: int) -> None:
    assert workload.scaled(share, 8.7, 2, quick=True).cpus == cpus


def test_if_all_cpus_are_claimed_twice_their_rounds_take_the_whole_machine() -> None:
    scale = workload.scaled(0.2, 87.0, 2, quick=False)
    job = workload.PaperJob(1, 0.0, "cg", 4, 480.0)
    costs = {"cg, 4 CPUs": 0.8}
    count = workload.rounds(job, scale, costs)
    assert count * 0.8 * (48 / 4) == pytest.approx(2 * 480.0), "twelve such jobs on two CPUs for 480 s"
    assert workload.rounds(replace(job, seconds=0.001), scale, costs) == 1


# --- what runs in them ---------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
def test_conjugate_gradients_converge_to_the_solution(tmp_path: Path, threads: int) -> None:
    compile_kernel(tmp_path / "cg", "cg.c", "-pthread", "-lm")
    done = subprocess.run([tmp_path / "cg", "8", "9", "10", f"{threads}"], capture_output=True, text=True, timeout=60)
    said = dict(word.split("=") for word in done.stdout.split())
    assert done.returncode == 0 and said["unknowns"] == f"{720 * threads}"
    assert float(said["residual"]) < 1e-9 and float(said["error"]) < 1e-7
    assert 1 < int(said["iterations"]) < 40, "the preconditioner makes them few"


@needs_compiler
def test_conjugate_gradients_without_a_size_say_what_to_give(tmp_path: Path) -> None:
    compile_kernel(tmp_path / "cg", "cg.c", "-pthread", "-lm")
    done = subprocess.run([tmp_path / "cg", "8"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "give NX NY NZ THREADS" in done.stderr


@needs_compiler
def test_a_job_runs_its_rounds_and_ends_after_its_seconds(tmp_path: Path) -> None:
    here = programs.write_programs(tmp_path)
    done = subprocess.run(
        ["bash", here / "job.sh", "cg", "2", "3", "0.5"], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0 and done.stdout.count("unknowns=8192") == 3
    assert programs.computed(done.stdout) > 0


@needs_compiler
def test_hpcc_runs_once_for_each_cpu_and_a_wrong_result_fails_the_job(tmp_path: Path) -> None:
    here = programs.write_programs(tmp_path)
    for name in programs.SIZES:
        assert re.search(rf"(?m)^{programs.SIZES[name]} .*Ns$", (here / f"{name}.txt").read_text())
    (tmp_path / "hpcc").write_text('#!/bin/sh\npwd >> "$SEEN"\necho "Success=$RIGHT" > hpccoutf.txt\n')
    (tmp_path / "hpcc").chmod(0o755)

    def run(right: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RIGHT": right, "SEEN": f"{tmp_path}/seen"}
        argv = ["bash", here / "job.sh", "hpl", "4", "2", "0"]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env)

    assert run("1").returncode == 0
    assert len((tmp_path / "seen").read_text().split()) == 8 and len(set((tmp_path / "seen").read_text().split())) == 4
    wrong = run("0")
    assert wrong.returncode == 1 and "round 0 of hpl failed" in wrong.stdout
    with pytest.raises(Broken, match="round 0 of hpl failed"):
        programs.computed(wrong.stdout)


class _Slurm:
    """A lab whose jobs run at once, on this machine."""

    def __init__(self, home: Path, *, state: str = "COMPLETED") -> None:
        self.settings = SimpleNamespace(network=SimpleNamespace(gateway="127.0.0.1"), socket=home)
        self.options: list[tuple[str, ...]] = []
        self._state, self._started = state, list[subprocess.Popen[str]]()

    def submit(self, script: str, *options: str) -> str:
        self.options.append(options)
        job = str(len(self.options))
        made = subprocess.Popen(
            ["bash"], stdin=subprocess.PIPE, text=True, env={"SLURM_JOB_ID": job, "PATH": os.defpath}
        )
        assert made.stdin is not None
        made.stdin.write(script)
        made.stdin.close()
        self._started.append(made)
        return job

    def run(self, *argv: str) -> SimpleNamespace:
        assert argv[0] == "sacct"
        for one in self._started:
            one.wait()
        return SimpleNamespace(stdout="".join(f"{job}|{self._state}\n" for job in argv[3].split(",")))


SCALE = workload.PaperScale(0.1, 11, 0.001, 1.0, 0.1)
COSTS = {workload.cost_name(program, cpus): 1.0 for program in workload.PROGRAMS for cpus in (1, 4)}


def _bench(lab: _Slurm, home: Path) -> PaperBench:
    return PaperBench(lab, None, programs.write_programs(home), home, lambda *_: None)  # type: ignore[arg-type]


@needs_compiler
def test_the_jobs_of_a_run_are_submitted_in_their_time_and_measured(tmp_path: Path) -> None:
    lab = _Slurm(tmp_path)
    jobs = [workload.PaperJob(1, 0.0, "cg", 4, 0.3), workload.PaperJob(2, 0.4, "cg", 1, 0.2)]
    found = _bench(lab, tmp_path).run("workload-2", BARE_METAL, 1, jobs, SCALE, COSTS)
    first, second = found.jobs
    assert found.cpus == 22 and found.again == 0 and found.step == pytest.approx(0.01)
    assert first.submitted == 0.0 and second.submitted > 0.2
    assert first.running >= 0.29 and 0 < first.computed <= first.running
    assert second.overheads["slurm_schedule"] == pytest.approx(second.began - second.submitted)
    assert lab.options[0][1:] == ("--cpus-per-task=4", "--mem=10", "--partition=bare")
    assert len(found.busy) > 10 and all(0 <= one <= 1 for one in found.busy)
    assert not list(tmp_path.glob("paper/said.*"))


@needs_compiler
def test_a_job_whose_program_fails_ends_the_run_and_says_why(tmp_path: Path) -> None:
    jobs = [workload.PaperJob(1, 0.0, "hpl", 1, 0.0)]  # there is no hpcc
    with pytest.raises(Broken, match="round 0 of hpl failed"):
        _bench(_Slurm(tmp_path), tmp_path).run("workload-1", BARE_METAL, 1, jobs, SCALE, COSTS)


@needs_compiler
def test_a_job_that_does_not_complete_ends_the_run(tmp_path: Path) -> None:
    jobs = [workload.PaperJob(1, 0.0, "cg", 1, 0.0)]
    with pytest.raises(Broken, match="1 is FAILED"):
        _bench(_Slurm(tmp_path, state="FAILED"), tmp_path).run("workload-1", BARE_METAL, 1, jobs, SCALE, COSTS)


# --- what is recorded ----------------------------------------------------------------------------------

PHASES = (
    PhaseView("queued", 100.5, 4.0),
    PhaseView("clone", 104.5, 0.5),
    PhaseView("join", 105.0, 12.0, (("boot", 9.0), ("first_byte", 0.5), ("network", 0.5), ("files", 1.0))),
    PhaseView("launch", 117.0, 1.5),
    PhaseView("run", 118.5, 30.0),
)


def test_the_parts_of_a_job_are_all_of_its_time_before_it_began() -> None:
    clone, overheads, split = parts(PHASES, 100.0, 118.0)
    assert clone == 0.5 and split
    assert overheads == {
        "schedule_clone": 0.5, "get_host": 4.0, "network_configuration": 10.0, "slurmd_customization": 2.0,
        "slurm_restart": 0.0, "slurm_schedule": 1.0,
    }  # fmt: skip
    assert tuple(overheads) == OVERHEADS
    assert clone + sum(overheads.values()) == pytest.approx(118.0 - 100.0)


def test_a_job_whose_stages_are_not_known_is_marked() -> None:
    phases = [replace(phase, stages=()) for phase in PHASES]
    _, overheads, split = parts(phases, 100.0, 118.0)
    assert not split and overheads["network_configuration"] == 0.0 and overheads["slurmd_customization"] == 12.0


def _job(
    number: int, cpus: int, clone: float, waited: float, running: float, began: float | None = None
) -> PaperJobTimes:
    overheads = without_vm(0.0, 1.0) | {"get_host": waited, "network_configuration": 2.0}
    begins = clone + waited + 3.0 if began is None else began
    return PaperJobTimes(number, "cg", cpus, 20.0, 2, 0.0, begins, begins + running, running / 2, clone, overheads)


def _run(name: str, kind: str, clone: float, seed: int = 1) -> PaperRunTimes:
    jobs = (_job(1, 4, clone, 0.0, 20.0), _job(2, 1, clone * 3, 10.0, 30.0))
    return PaperRunTimes(name, kind, seed, 10, jobs, 10.0, (0.5, 1.0))


RUNS = [
    _run(name, kind, clone)
    for name in workload.WORKLOADS
    for kind, clone in ((FULL, 10.0), (INSTANT, 1.0), (BARE_METAL, 0.0))
]


def test_a_run_is_kept_as_json() -> None:
    assert decode(list[PaperRunTimes], json.loads(json.dumps([asdict(one) for one in RUNS]))) == RUNS


def test_provisioning_is_without_the_wait_for_room() -> None:
    job = _job(1, 4, 10.0, 7.0, 20.0)
    assert job.other == pytest.approx(10.0) and job.provisioning == pytest.approx(13.0) and job.running == 20.0


def test_utilization_is_of_the_cpus_that_may_be_claimed() -> None:
    jobs = (_job(1, 4, 0.0, 0.0, 10.0, began=5.0), _job(2, 1, 0.0, 0.0, 20.0, began=0.0))
    found = PaperRunTimes("workload-2", FULL, 1, 10, jobs, 10.0).utilization
    assert found == pytest.approx((0.3, 0.3, 0.0)), "5 s of 4 CPUs and 10 s of one, twice"


# --- the figures ---------------------------------------------------------------------------------------


def _figures(runs: list[PaperRunTimes] = RUNS) -> dict[str, PaperFigure]:
    return {one.key: one for one in figures(by_experiment(runs), workload.PaperScale(0.1, 11, 0.5, 0.5, 0.1))}


def _ours(figure: PaperFigure, name: str) -> MeanOver:
    (found,) = [one for one in figure.values if one.name == name]
    assert found.ours is not None
    return found.ours


def test_the_figures_have_the_papers_numbers_and_every_published_value_is_in_one() -> None:
    found = _figures()
    assert [one.number for one in found.values()] == list(range(6, 15))
    assert sum(len(one.values) for one in found.values()) == 29 and all(one.values for one in found.values())


def test_completion_times_are_clone_overheads_and_running() -> None:
    one = _figures()["completion-1"]
    (chart,) = one.charts
    assert [panel.title for panel in chart.panels] == [FULL, INSTANT, BARE_METAL]  # type: ignore[union-attr]
    assert chart.panels[0].bars[1].parts == (30.0, 13.0, 30.0)  # type: ignore[union-attr]
    assert _ours(one, "clone, full, mean").value == 20.0 and _ours(one, "clone, full, longest").value == 30.0
    assert _ours(one, "provisioning, full, mean").value == 23.0
    ratio = _ours(one, "provisioning, full / instant")
    assert ratio.value == pytest.approx(23.0 / 5.0)
    assert ratio.low is not None and ratio.high is not None and ratio.low < ratio.value < ratio.high
    (value,) = [value for value in one.values if value.name == "provisioning, full, mean"]
    assert value.published == "260 s" and value.in_paper == pytest.approx(46.0), "a second of the paper is half of one"
    (value,) = [value for value in _figures()["makespan"].values if value.name == "workload-2, full"]
    assert value.in_paper == pytest.approx(73.0 * 4), "and a quarter of one of a job"


def test_the_overheads_are_those_that_the_paper_names_and_the_restart_is_zero_and_shown() -> None:
    one = _figures()["overheads-1"]
    (chart,) = one.charts
    assert chart.series == OVERHEADS  # type: ignore[union-attr]
    bar = chart.panels[0].bars[0]  # type: ignore[union-attr]
    assert bar.parts == (0.0, 5.0, 2.0, 0.0, 0.0, 1.0) and bar.low <= bar.whole <= bar.high
    assert _ours(one, "slurm_restart, full, mean").value == 0.0
    assert (FULL, "slurm_restart", 0.0, 0.0, 0.0) in one.data[1]


def test_makespan_and_throughput_are_of_whole_runs() -> None:
    found = _figures()
    assert _ours(found["makespan"], "workload-2, full") == MeanOver(73.0), "of one run the interval is not known"
    assert _ours(found["makespan"], "workload-2, full / instant").value == pytest.approx(73.0 / 46.0)
    assert _ours(found["throughput"], "workload-2, instant / full").value == pytest.approx(73.0 / 46.0)
    twice = [*RUNS, *(replace(one, seed=2) for one in RUNS)]
    assert _ours(_figures(twice)["makespan"], "workload-2, full") == MeanOver(73.0, 73.0, 73.0)


def test_running_times_say_what_a_round_took() -> None:
    one = _figures()["running"]
    row = dict(zip(one.data[0], one.data[1][0], strict=True))
    assert row["kind"] == FULL and row["cpus"] == 1 and row["running_s"] == 30.0 and row["round_s"] == 7.5
    assert _ours(one, "workload-1, instant / bare metal").value == 1.0


def test_utilization_of_a_run_that_was_over_by_then_is_zero() -> None:
    one = _figures()["utilization"]
    assert _ours(one, "instant, step 21").value == 0.0
    assert _ours(one, "full, most").value == pytest.approx(40.0)
    assert [line.name for line in one.charts[0].lines] == [FULL, INSTANT, BARE_METAL]  # type: ignore[union-attr]
    assert one.charts[1].lines[0].points[:2] == ((0.0, 50.0), (10.0, 100.0))  # type: ignore[union-attr]


def test_what_was_not_run_is_said_and_nothing_is_made_up() -> None:
    found = _figures([one for one in RUNS if one.kind == INSTANT and one.workload == "workload-1"])
    assert all(value.ours is None for value in found["makespan"].values)
    assert shown(None, "s") == "not measured"
    (chart,) = found["completion-2"].charts
    assert chart.panels == ()  # type: ignore[union-attr]


# --- the page ------------------------------------------------------------------------------------------


class _Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids, self.links, self.sources = set[str](), list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids.add(found.get("id") or "")
        self.links.append(found.get("href") or "")
        self.sources.append(found.get("src") or "")


def _report() -> PaperReport:
    section = ReportSection(
        "more", "More", "About it.", "multiverse bench more", (), (("what", "s"), (("a & b", 1.5),)), ("A note.",)
    )
    made = figures(by_experiment(RUNS), workload.PaperScale(0.1, 11, 0.5, 0.5, 0.1))
    return PaperReport("The title", "A lead.", {"seed": "1"}, ("Not of hardware.",), made, (section,))


def test_the_page_needs_nothing_else_and_leads_to_each_figure() -> None:
    seen = _Seen()
    text = page(_report())
    seen.feed(text)
    assert not any(seen.sources) and "<script" not in text and "@import" not in text
    inside = [link[1:] for link in seen.links if link.startswith("#")]
    assert set(inside) <= seen.ids and set(inside) == {*_figures(), "more"}
    assert all(link.startswith(("#", "data:text/csv;base64,")) for link in seen.links if link)
    assert "prefers" not in text and "color-scheme: light dark" in text and "@media print" in text
    assert "260 s" in text and "figure 6" in text and "Not of hardware." in text and "a &amp; b" in text


def test_the_data_of_each_figure_is_in_a_file_and_in_the_page() -> None:
    files = csv_files(_report())
    assert len(files) == 10 and {"figure-06-completion-1.csv", "figure-14-throughput.csv", "more.csv"} <= set(files)
    rows = list(csv.DictReader(io.StringIO(files["figure-13-makespan.csv"])))
    assert rows[0] == {
        "workload": "workload-1",
        "kind": FULL,
        "seed": "1",
        "jobs": "2",
        "again": "0",
        "makespan_s": "73.0",
    }
    text = page(_report())
    assert "15 full clones a minute, so they wait for each other" in text, "why values are not the published ones"
    assert all(f'download="{name}"' in text for name in files)


def test_an_interval_is_shown_with_its_value() -> None:
    assert shown(MeanOver(1.234, 1.0, 2.0), "s") == "1.23 s (1 to 2)" and shown(MeanOver(3.0), "×") == "3 ×"
