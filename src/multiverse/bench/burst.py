"""Many jobs at once, or one each few seconds: how long until each had its VM, and until all had run.

Kind after kind, each through Slurm from submission to end. At once means one job array: a single submission. What
provisioning took, from the claim to a node that can run the job, is read from the timelines; when a script began is its
own word. A job that does not run, or does not complete, ends the benchmark with an error: nothing is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from multiverse.bench.arrivals import Arrivals, until_nothing_is_left
from multiverse.bench.latency import Kind
from multiverse.bench.stats import Estimate, Summary, median, ratio, summary
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse.lab.session import LabSession

KINDS = (
    Kind("full_stock", ("--constraint=stock&full",)),
    Kind("full_slim", ("--constraint=slim&full",)),
    Kind("linked", ("--constraint=slim&linked",)),
    Kind("instant", ("--constraint=slim&instant",)),
)
STILL = 300.0
"""Seconds without another job's start after which those that are missing are given up."""

PAPER = {
    "burst": {"full": 260.0, "instant": 36.0, "ratio": 7.2},
    "steady": {"full": 87.0, "instant": 36.0, "ratio": 2.5},
}
"""Mean provisioning times, in seconds, as Multiverse's paper has them: on vSphere, with KVM's equal of a CPU."""


@dataclass
class Samples:
    """Of one kind, a value for each job, in seconds. `all_ran` is from the first submission to the last start,
    `again` how many attempts it took beyond one for each job."""

    provisioning: list[float] = field(default_factory=list)
    submit_to_start: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    all_ran: float = 0.0
    again: int = 0


Progress = Callable[[str, int, int, float], None]
"""Called with a kind, how many of its jobs have run, of how many, and the seconds it took."""


def run(
    lab: LabSession, client: Client, jobs: int, every: float | None, kinds: Sequence[Kind], progress: Progress
) -> dict[str, Samples]:
    """`jobs` of each kind, all at once or one `every` so many seconds; by the kind's name."""
    return {kind.name: _of_kind(lab, client, jobs, every, kind, progress) for kind in kinds}


def _of_kind(
    lab: LabSession, client: Client, jobs: int, every: float | None, kind: Kind, progress: Progress
) -> Samples:
    with Arrivals(lab.settings.network.gateway) as arrivals:
        submitted = _submit(lab, arrivals.script, jobs, every, kind)
        missing = arrivals.wait(submitted, STILL, lab.settings.socket.exists)
        if missing:
            raise Broken(_lost(client, kind, missing), hint="see the lab's log/controller.log")
        began = min(submitted.values())
        samples = Samples(all_ran=max(arrivals.at[job] for job in submitted) - began)
        samples.submit_to_start = [arrivals.at[job] - at for job, at in submitted.items()]
    progress(kind.name, jobs, jobs, samples.all_ran)
    until_nothing_is_left(client, STILL)  # the next kind must not pay for this one's end
    _completed(lab, submitted)
    stories = [story for job in dict.fromkeys(_whole(job) for job in submitted) for story in client.timeline(job)]
    tell(samples, stories, jobs)
    return samples


def _submit(lab: LabSession, script: str, jobs: int, every: float | None, kind: Kind) -> dict[str, float]:
    """When each job was submitted, by its id."""
    options = ("--output=/dev/null", *kind.options)
    began = time.monotonic()
    if every is None:
        array = lab.submit(script, f"--array=1-{jobs}", *options)
        return {f"{array}_{task}": began for task in range(1, jobs + 1)}
    found: dict[str, float] = {}
    for number in range(jobs):
        time.sleep(max(0.0, began + number * every - time.monotonic()))
        at = time.monotonic()
        found[lab.submit(script, *options)] = at
    return found


def _whole(job: str) -> str:
    """The array that a task is of; a job that is none, itself."""
    return job.partition("_")[0]


def _lost(client: Client, kind: Kind, missing: Sequence[str]) -> str:
    said = {job["job_id"]: job["waiting"] or job["reason"] or job["state"] for job in client.jobs()}
    first = missing[0]
    why = said.get(first, "the controller knows nothing of it")
    return f"{len(missing)} jobs of kind {kind.name} did not start: job {first}: {why}"


def _completed(lab: LabSession, submitted: Mapping[str, float]) -> None:
    """Raise `Broken` unless Slurm says that each of these jobs has completed; its accounting may be a moment late."""
    jobs = ",".join(dict.fromkeys(_whole(job) for job in submitted))
    deadline = time.monotonic() + 30.0
    while True:
        lines = lab.run("sacct", "-XnP", "-j", jobs, "-o", "JobID,State").stdout.splitlines()
        states = dict(line.split("|", 1) for line in lines if "|" in line)
        wrong = {job: states.get(job, "unknown") for job in submitted if states.get(job) != "COMPLETED"}
        if not wrong:
            return
        over = any(state not in ("unknown", "PENDING", "RUNNING", "COMPLETING") for state in wrong.values())
        if over or time.monotonic() > deadline:
            told = ", ".join(f"{job} is {state}" for job, state in list(wrong.items())[:3])
            raise Broken(f"{len(wrong)} jobs have not completed: {told}", hint="see the lab's log/slurmctld.log")
        time.sleep(0.2)


def tell(samples: Samples, stories: Sequence[Mapping[str, Any]], jobs: int) -> None:
    """Add what the timelines say of the attempts that ran; one that was given up counts as `again`."""
    whole = [story for story in stories if story["state"] == "done"]
    samples.again = len(stories) - len(whole)
    if len(whole) != jobs:
        raise Broken(f"{len(whole)} attempts ran {jobs} jobs", hint="multiverse timeline tells of each")
    for story in whole:
        phases = {phase["name"]: phase for phase in story["phases"]}
        samples.provisioning.append(sum(phases[name]["seconds"] for name in ("clone", "join")))
        for name, phase in phases.items():
            if name != "run":
                samples.stages.setdefault(name, []).append(phase["seconds"])
            for stage, seconds in phase["stages"]:
                samples.stages.setdefault(f"{name}.{stage}", []).append(seconds)


@dataclass(frozen=True, slots=True)
class Result:
    """One kind's figures, as `--json` prints them. Seconds; `stages` are medians, in the order of their happening."""

    provisioning: Summary | None
    submit_to_start: Summary | None
    all_ran: float
    again: int
    stages: dict[str, float]


def result(samples: Samples) -> Result:
    return Result(
        provisioning=summary(samples.provisioning),
        submit_to_start=summary(samples.submit_to_start),
        all_ran=samples.all_ran,
        again=samples.again,
        stages={name: median(values) for name, values in samples.stages.items()},
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as long `over` took as `under`, and what both took is measured as."""

    over: str
    under: str
    means: Estimate | None
    medians: Estimate | None
    submit_to_start: Estimate | None  # of means


def ratios(found: Mapping[str, Samples], under: str = "instant") -> list[Ratio]:
    """Each kind beside the instant one; nothing if that was not asked for."""
    if under not in found:
        return []
    base = found[under]
    return [
        Ratio(
            name,
            under,
            ratio(one.provisioning, base.provisioning, fmean),
            ratio(one.provisioning, base.provisioning),
            ratio(one.submit_to_start, base.submit_to_start, fmean),
        )
        for name, one in found.items()
        if name != under
    ]
