"""What the benchmark computes from its samples."""

from __future__ import annotations

import pytest

from multiverse.bench.latency import KINDS, Samples, _stages, result
from multiverse.bench.stats import percentile, summary
from multiverse.cli.bench import _chosen
from multiverse.core.errors import Refused


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    assert percentile([7.0], 0.95) == 7.0


def test_a_summary_bounds_its_median_and_is_the_same_each_time() -> None:
    samples = [float(n) for n in range(1, 31)]
    one = summary(samples)
    assert one is not None and one == summary(samples)
    assert one.low < one.p50 == 15.5 < one.high and one.max == 30.0 and one.n == 30
    assert summary([]) is None


def test_the_first_byte_is_the_sum_of_the_stages_up_to_it() -> None:
    samples = Samples()
    phases = [
        {"name": "clone", "seconds": 0.1, "stages": [["overlay", 0.01], ["exec", 0.05]]},
        {"name": "join", "seconds": 0.9, "stages": [["first_byte", 0.04], ["identity", 0.07]]},
        {"name": "run", "seconds": 5.0, "stages": []},
    ]
    _stages(samples, {"phases": phases})
    found = result(samples)
    assert found.first_byte is not None and found.first_byte.p50 == pytest.approx(0.10)
    assert found.node_idle is not None and found.node_idle.p50 == pytest.approx(1.0)
    assert found.stages["join.identity"] == 0.07 and "run" not in found.stages
    assert found.cpu_s is None, "nothing was measured, so nothing is claimed"


def test_kinds_are_chosen_by_name() -> None:
    assert [kind.name for kind in _chosen("instant, bare_metal")] == ["instant", "bare_metal"]
    assert len(KINDS) == 4
    with pytest.raises(Refused, match="no such kind: fast"):
        _chosen("fast")
