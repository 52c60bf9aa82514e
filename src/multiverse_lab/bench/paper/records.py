"""What is recorded of the paper's runs, and each job's time in the parts that the paper names.

The clone is the copy and the start of the VM's process: the phase `clone` of the job's timeline. A full clone boots
then, which is counted as the simulation does: from the start of the VM to its network is `network_configuration`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from multiverse.api import PhaseView
from multiverse_lab.bench.clusters import OVERHEADS

BARE_METAL, FULL, INSTANT = "bare metal", "full", "instant"
KINDS = (FULL, INSTANT, BARE_METAL)

_TO_NETWORK = frozenset({"plug", "boot", "first_byte", "identity", "network"})
"""Stages of the phase `join` up to the VM's network."""


@dataclass(frozen=True, slots=True)
class PaperJobTimes:
    """A job. Moments are in seconds from the first submission. `computed` are the seconds of its rounds, and `split`
    whether it is known when its VM had its network: if not, all of that is in `slurmd_customization`."""

    number: int
    program: str
    cpus: int
    seconds: float
    rounds: int
    submitted: float
    began: float
    ended: float
    computed: float
    clone: float
    overheads: Mapping[str, float] = field(default_factory=dict)
    split: bool = True

    @property
    def running(self) -> float:
        return self.ended - self.began

    @property
    def other(self) -> float:
        """All overheads."""
        return sum(self.overheads.values())

    @property
    def provisioning(self) -> float:
        """The clone and the overheads, without the wait for room."""
        return self.clone + self.other - self.overheads["get_host"]


@dataclass(frozen=True, slots=True)
class PaperRunTimes:
    """A run of a workload. `cpus` may be claimed. `busy` are the shares of this machine's CPUs that were used, in steps
    of `step` seconds from the first submission. `again` is the number of attempts beyond one for each job."""

    workload: str
    kind: str
    seed: int
    cpus: int
    jobs: tuple[PaperJobTimes, ...]
    step: float
    busy: tuple[float, ...] = ()
    again: int = 0

    @property
    def makespan(self) -> float:
        """Seconds from the first submission to the end of the last job."""
        return max(one.ended for one in self.jobs)

    @property
    def utilization(self) -> tuple[float, ...]:
        """The share of the claimable CPUs that running jobs had, in each step."""
        used = [0.0] * (int(self.makespan // self.step) + 1)
        for job in self.jobs:
            for number in range(int(job.began // self.step), int(job.ended // self.step) + 1):
                start = number * self.step
                used[number] += job.cpus * (min(job.ended, start + self.step) - max(job.began, start))
        return tuple(one / (self.cpus * self.step) for one in used)


def parts(phases: Sequence[PhaseView], submitted: float, began: float) -> tuple[float, dict[str, float], bool]:
    """The clone, the overheads, and whether the network's part is known, of an attempt that ran. Its job was submitted,
    and its script began, at these moments of the same clock. Together they are all of the time between these."""
    found = {phase.name: phase for phase in phases}
    queued, join, launch = found["queued"], found["join"], found["launch"]
    network = sum(seconds for name, seconds in join.stages if name in _TO_NETWORK)
    network = min(network, join.seconds)
    overheads = dict.fromkeys(OVERHEADS, 0.0) | {
        "schedule_clone": max(0.0, queued.began - submitted),
        "get_host": queued.seconds,
        "network_configuration": network,
        "slurmd_customization": join.seconds - network,
        "slurm_schedule": max(0.0, began - launch.began),
    }
    return found["clone"].seconds, overheads, bool(join.stages)


def without_vm(submitted: float, began: float) -> dict[str, float]:
    """The overheads of a job on bare metal: Slurm alone schedules it."""
    return dict.fromkeys(OVERHEADS, 0.0) | {"slurm_schedule": began - submitted}
