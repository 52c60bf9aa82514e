"""The figures of passing data between VMs, from what the program in them prints."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from multiverse.core.errors import Broken
from multiverse_lab.bench.ivshmem import STEP, PassingRound, measure_passing


def _round(factor: float) -> str:
    ways = {"shared_memory": (30.0, 1000.0), "tcp": (250.0, 100.0)}
    found = {way: {"microseconds": a * factor, "mib_per_second": b * factor} for way, (a, b) in ways.items()}
    return json.dumps(found)


def test_the_rounds_of_one_job_are_kept_with_their_baseline() -> None:
    asked: list[Sequence[str]] = []

    def srun(argv: Sequence[str]) -> str:
        asked.append(argv)
        return "\n".join(map(_round, (1.0, 3.0, 2.0)))

    found = measure_passing(srun, 3)
    assert len(asked) == 1 and asked[0][: len(STEP)] == [*STEP] and "seq 3" in asked[0][-1]
    assert found.shared_memory[1] == PassingRound(90.0, 3000.0) and found.tcp[2] == PassingRound(500.0, 200.0)
    assert found.lines() == [
        "shared memory: 60 us for 8 bytes, 2000 MiB/s",
        "TCP on the job's bridge: 500 us for 8 bytes, 200 MiB/s",
    ]


@pytest.mark.parametrize("said", ["", "no figures", "{}", '{"tcp": {}, "shared_memory": {}}', _round(1.0)])
def test_what_is_not_what_was_asked_for_is_no_figure(said: str) -> None:
    with pytest.raises(Broken, match="mvshm bench printed"):
        measure_passing(lambda _: said, 2)
