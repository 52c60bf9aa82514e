"""How two VMs of a job on one node pass data: through memory that they share, and by TCP on the job's bridge.

Both are measured by `mvshm bench` in the VMs (`guest.shared_memory_program`), one after the other in each round, so
that each round has its own baseline.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from multiverse.core.errors import Broken

STEP = ("--ntasks=2", "--vm-per-node=2", "--ivshmem=1")
"""The options of srun for the two VMs, beside partition, memory and image."""


@dataclass(frozen=True, slots=True)
class PassingRound:
    """One round of one way: half of a median round trip of 8 bytes, and how fast messages of 1 MiB arrive."""

    microseconds: float
    mib_per_second: float


@dataclass(frozen=True, slots=True)
class PassingFigures:
    """The rounds of both ways, in the order in which they were measured."""

    shared_memory: tuple[PassingRound, ...]
    tcp: tuple[PassingRound, ...]

    def lines(self) -> list[str]:
        """The medians of the rounds, for a reader."""
        ways = (("shared memory", self.shared_memory), ("TCP on the job's bridge", self.tcp))
        return [
            f"{name}: {median(one.microseconds for one in rounds):.0f} us for 8 bytes, "
            f"{median(one.mib_per_second for one in rounds):.0f} MiB/s"
            for name, rounds in ways
        ]


def measure_passing(srun: Callable[[Sequence[str]], str], rounds: int = 5) -> PassingFigures:
    """Measure in one job. `srun` runs a step with these options and this command, in a job of its own, and returns its
    output. Raises `Broken` if the output is not what `mvshm bench` prints."""
    loop = f"for round in $(seq {rounds}); do mvshm bench --json || exit; done"
    said = srun([*STEP, "sh", "-c", loop])
    try:
        found = [json.loads(line) for line in said.splitlines()]
        shared, tcp = ([PassingRound(**one[way]) for one in found] for way in ("shared_memory", "tcp"))
    except (ValueError, KeyError, TypeError) as error:
        hint = f"run it by hand: srun {shlex.join(STEP)} mvshm bench"
        raise Broken(f"mvshm bench printed no figures: {said[:400]!r}", hint=hint) from error
    if len(found) != rounds:
        raise Broken(f"mvshm bench printed {len(found)} of {rounds} rounds", hint="see the errors of the step")
    return PassingFigures(tuple(shared), tuple(tcp))
