"""The report of what `multiverse bench paper --json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from multiverse.api import decode
from multiverse_lab.bench.paper.figures import figures
from multiverse_lab.bench.paper.page import PaperReport, ReportSection
from multiverse_lab.bench.paper.published import by_experiment
from multiverse_lab.bench.paper.records import PaperRunTimes
from multiverse_lab.bench.paper.sections import of_benchmark, of_choices, of_simulation
from multiverse_lab.bench.paper.workload import FULL_PROVISIONING, PaperScale
from multiverse_lab.bench.paper_cluster import RUNNING


def report_of(found: Mapping[str, Any]) -> PaperReport:
    runs, scale = decode(list[PaperRunTimes], found["runs"]), PaperScale(**found["scale"])
    return PaperReport(
        title="The evaluation of the Multiverse paper, on one machine",
        lead="Multiverse: Dynamic VM Provisioning for Virtualized High Performance Computing Clusters "
        "(J. R. Gunasekaran et al., CCGrid 2020): its workloads scaled down, with full clones, instant clones and bare "
        "metal in one run, each figure beside the published one.",
        facts=_facts(found, scale, runs),
        warnings=_warnings(found, scale, runs),
        figures=figures(by_experiment(runs), scale),
        sections=_sections(found),
    )


def _facts(found: Mapping[str, Any], scale: PaperScale, runs: Sequence[PaperRunTimes]) -> dict[str, str]:
    host, full = found["host"], found["full_provisioning"]
    costs = ", ".join(f"{name} {cost:.2f} s" for name, cost in found["round_costs"].items())
    most = max(len(one.jobs) for one in runs)
    running = fmean(job.seconds for one in runs for job in one.jobs)
    return {
        "command": found["command"],
        "date": f"{found['at']}, commit {found['commit'][:12] or 'unknown'}",
        "seeds": ", ".join(map(str, found["seeds"])),
        "machine": f"{host['cpus']} CPUs ({host['cpu']}), {host['memory'] / 1024:.0f} GiB, Slurm {host['slurm']}, "
        f"QEMU {host['qemu']}, guests by {found['accelerator']}; a load of {host['load']:.1f} before the run",
        "cluster": f"one host of {scale.cpus} CPUs, twice as many in workload-2: {scale.share * 100:.0f} % of the "
        f"paper's, with one CPU for two of the paper's; {most} jobs for its 100",
        "full clone alone": f"{fmean(full):.1f} s to provision (mean of {len(full)}); published: "
        f"{FULL_PROVISIONING:g} s",
        "time": f"a second of the paper is {scale.second:.3f} s of a clone and {scale.second_of_jobs:.3f} s of a job "
        f"here; jobs are to run {running:.1f} s on average, "
        f"{running / fmean(full):.2f} times a full clone's provisioning (the paper's: {_PROPORTION:.2f})",
        "programs": "HPL and RandomAccess of HPCC, and conjugate gradients in the manner of HPCG; a round in a VM "
        f"while the lab does nothing else, its time by the CPUs that it can use: {costs}",
    }  # fmt: skip


_PROPORTION = fmean(RUNNING) / FULL_PROVISIONING

_EMULATED = (
    "The CPUs of guests are emulated. A boot, and each program in a guest, takes many times as long as on hardware: "
    "seconds here say nothing of seconds there. The restore of a clone and the start of its node are emulated as well, "
    "so the ratio of full to instant says more of hardware than either time, but promises nothing: a boot executes "
    "more instructions, a full copy moves more bytes. What waits for what, the order of the kinds, and that nothing is "
    "lost, do not depend on the emulation. Bare metal is not emulated."
)
_NUMBERS = (
    "The numbers of the figures follow the order in which the paper's evaluation is told, and were not compared with "
    "its captions. Published values are of vSphere on five hosts. Intervals are of the mean by the bootstrap over jobs "
    "(95 %), and of whole runs by Student's t over seeds; of one run none is known. The largest of several values has "
    "none."
)
_QUICK = (
    "This is a quick run: jobs are a quarter as long as their proportion to a full clone asks for, so overheads weigh "
    "four times as much in makespan, throughput and utilization."
)


def _warnings(found: Mapping[str, Any], scale: PaperScale, runs: Sequence[PaperRunTimes]) -> tuple[str, ...]:
    computing = (
        f"A CPU of the cluster has {scale.computing * 100:.0f} % of a real one: programs run in rounds of fixed work, "
        "as many as take that part of the time, so that the cluster may be larger than the machine. Running times are "
        "alike while the machine has CPUs left; longer ones show that it has none, because of boots, too. HPCC runs "
        "as one process for each CPU, not as ranks of one problem."
    )
    said = [*([_EMULATED] if found["accelerator"] == "tcg" else []), computing, _NUMBERS]
    if found["quick"]:
        said.append(_QUICK)
    if unsplit := sum(not job.split for one in runs for job in one.jobs):
        said.append(
            f"Of {unsplit} jobs it is not known when their VMs had their networks: that is in slurmd_customization."
        )
    return tuple(said)


def _sections(found: Mapping[str, Any]) -> list[ReportSection]:
    made = []
    if simulated := found.get("simulated"):
        made.append(of_choices(simulated["choices"], simulated["seeds"]))
        made.append(of_simulation(simulated, simulated["seeds"]))
    return made + [of_benchmark(one) for one in found.get("with", ())]
