"""Many jobs at once, or one every few seconds: how long until each had its VM, and until all had run.

One kind after the other, each through Slurm from submission to end. Jobs at once are one job array, so a single
submission. The provisioning time, from the claim to a node that can run the job, is read from the timelines; the start
of a script is reported by the script itself. A job that does not run, or does not complete, ends the benchmark with an
error, so no sample is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from multiverse.api import JobView, TimelineView, decode
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.bench.arrivals import Arrivals, until_nothing_is_left
from multiverse_lab.bench.latency import JobKind
from multiverse_lab.bench.stats import Estimate, Summary, median, ratio, summary
from multiverse_lab.lab.session import LabSession

KINDS = (
    JobKind("full_stock", ("--constraint=stock&full",)),
    JobKind("full_slim", ("--constraint=slim&full",)),
    JobKind("linked", ("--constraint=slim&linked",)),
    JobKind("instant", ("--constraint=slim&instant",)),
)
START_LIMIT = 300.0
"""Seconds without the start of any job after which the missing jobs are given up."""

ACCOUNTING_LIMIT = 30.0
"""Seconds after which Slurm's accounting must know the end of every job."""

PAPER = {
    "burst": {"full": 260.0, "instant": 36.0, "ratio": 7.2},
    "steady": {"full": 87.0, "instant": 36.0, "ratio": 2.5},
}
"""Mean provisioning times of Multiverse's paper, in seconds: on vSphere, with hardware virtualization."""


@dataclass
class BurstSamples:
    """The samples of one kind in seconds, one value for each job. `all_ran` is the time from the first submission to
    the last start, `again` the number of attempts beyond one for each job."""

    provisioning: list[float] = field(default_factory=list)
    submit_to_start: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    all_ran: float = 0.0
    again: int = 0


Progress = Callable[[str, int, int, float], None]
"""Called with a kind, the number of its jobs that have run, the number of all its jobs, and the seconds it took."""


@dataclass(frozen=True, slots=True)
class BurstPlan:
    """`jobs` of each kind, submitted all at once (`every` None) or one each `every` seconds."""

    jobs: int
    every: float | None
    kinds: Sequence[JobKind]


def run(lab: LabSession, client: Client, plan: BurstPlan, progress: Progress) -> dict[str, BurstSamples]:
    """Measure each kind of the plan. Returns the samples by the kind's name."""
    return {kind.name: _run_kind(lab, client, plan, kind, progress) for kind in plan.kinds}


def _run_kind(lab: LabSession, client: Client, plan: BurstPlan, kind: JobKind, progress: Progress) -> BurstSamples:
    with Arrivals(lab.settings.network.gateway) as arrivals:
        submitted = _submit(lab, arrivals.script, plan, kind)
        missing = arrivals.wait(submitted, START_LIMIT, lab.settings.socket.exists)
        if missing:
            raise Broken(not_started(client, kind, missing), hint="see the lab's log/controller.log")
        began = min(submitted.values())
        samples = BurstSamples(all_ran=max(arrivals.at[job] for job in submitted) - began)
        samples.submit_to_start = [arrivals.at[job] - at for job, at in submitted.items()]
    progress(kind.name, plan.jobs, plan.jobs, samples.all_ran)
    until_nothing_is_left(client, START_LIMIT)  # the next kind must not be measured while these jobs are reclaimed
    check_completed(lab, submitted)
    documents = [document for job in dict.fromkeys(map(_submission, submitted)) for document in client.timeline(job)]
    add_timelines(samples, decode(list[TimelineView], documents), plan.jobs)
    return samples


def _submit(lab: LabSession, script: str, plan: BurstPlan, kind: JobKind) -> dict[str, float]:
    """Submit the jobs. Returns when each was submitted, in monotonic seconds, by its id."""
    options = ("--output=/dev/null", *kind.options)
    began = time.monotonic()
    if plan.every is None:
        array = lab.submit(script, f"--array=1-{plan.jobs}", *options)
        return {f"{array}_{task}": began for task in range(1, plan.jobs + 1)}
    found: dict[str, float] = {}
    for number in range(plan.jobs):
        time.sleep(max(0.0, began + number * plan.every - time.monotonic()))
        at = time.monotonic()
        found[lab.submit(script, *options)] = at
    return found


def _submission(job: str) -> str:
    """The id that the submission returned: of an array's task, the array's."""
    return job.partition("_")[0]


def not_started(client: Client, kind: JobKind, missing: Sequence[str]) -> str:
    first = missing[0]
    found = {job.job_id: job.waiting or job.reason or job.state for job in decode(list[JobView], client.jobs())}
    reason = found.get(first, "the controller does not know it")
    return f"{len(missing)} jobs of kind {kind.name} did not start: job {first}: {reason}"


def check_completed(lab: LabSession, submitted: Mapping[str, float]) -> None:
    """Raise `Broken` unless Slurm's accounting says that each of these jobs has completed."""
    jobs = ",".join(dict.fromkeys(map(_submission, submitted)))
    deadline = time.monotonic() + ACCOUNTING_LIMIT
    while True:
        lines = lab.run("sacct", "-XnP", "-j", jobs, "-o", "JobID,State").stdout.splitlines()
        states = dict(line.split("|", 1) for line in lines if "|" in line)
        wrong = {job: states.get(job, "unknown") for job in submitted if states.get(job) != "COMPLETED"}
        if not wrong:
            return
        over = any(state not in ("unknown", "PENDING", "RUNNING", "COMPLETING") for state in wrong.values())
        if over or time.monotonic() > deadline:
            shown = ", ".join(f"{job} is {state}" for job, state in list(wrong.items())[:3])
            raise Broken(f"{len(wrong)} jobs have not completed: {shown}", hint="see the lab's log/slurmctld.log")
        time.sleep(0.2)


def add_timelines(samples: BurstSamples, timelines: Sequence[TimelineView], jobs: int) -> None:
    """Add the provisioning times and stages of the attempts that ran. Attempts that were given up count as `again`.
    Raises `Broken` unless as many attempts as `jobs` ran."""
    ran = [one for one in timelines if one.state == "done"]
    samples.again = len(timelines) - len(ran)
    if len(ran) != jobs:
        raise Broken(f"{len(ran)} attempts ran {jobs} jobs", hint="see each job's history: multiverse timeline JOB")
    for one in ran:
        phases = {phase.name: phase for phase in one.phases}
        samples.provisioning.append(sum(phases[name].seconds for name in ("clone", "join")))
        for name, phase in phases.items():
            if name != "run":
                samples.stages.setdefault(name, []).append(phase.seconds)
            for stage, seconds in phase.stages:
                samples.stages.setdefault(f"{name}.{stage}", []).append(seconds)


@dataclass(frozen=True, slots=True)
class BurstResult:
    """The figures of one kind in seconds, as `--json` prints them. `stages` are medians, in the order of the stages."""

    provisioning: Summary | None
    submit_to_start: Summary | None
    all_ran: float
    again: int
    stages: dict[str, float]


def result(samples: BurstSamples) -> BurstResult:
    return BurstResult(
        provisioning=summary(samples.provisioning),
        submit_to_start=summary(samples.submit_to_start),
        all_ran=samples.all_ran,
        again=samples.again,
        stages={name: median(values) for name, values in samples.stages.items()},
    )


@dataclass(frozen=True, slots=True)
class BurstRatio:
    """How many times as long the kind `over` took as the kind `under`, by several figures."""

    over: str
    under: str
    means: Estimate | None
    medians: Estimate | None
    submit_to_start: Estimate | None  # of means


def ratios(found: Mapping[str, BurstSamples], under: str = "instant") -> list[BurstRatio]:
    """Each kind compared with the kind `under`; nothing if that was not measured."""
    if under not in found:
        return []
    base = found[under]
    return [
        BurstRatio(
            name,
            under,
            ratio(one.provisioning, base.provisioning, fmean),
            ratio(one.provisioning, base.provisioning),
            ratio(one.submit_to_start, base.submit_to_start, fmean),
        )
        for name, one in found.items()
        if name != under
    ]
