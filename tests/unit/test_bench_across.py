"""What `multiverse bench across` reads and compares."""

from __future__ import annotations

import pytest

from multiverse.core.errors import Broken
from multiverse_lab.bench.across import ONE_HOST, PLAIN, TWO_HOSTS, AcrossSample, sample_of
from multiverse_lab.bench.hpcc import hpcc_figures
from multiverse_lab.cli.across import FIGURES, document

SUMMARY = """Begin of Summary section.
VersionMajor=1
Success=1
HPL_Tflops=0.000128242
HPL_N=480
MaxPingPongLatency_usec=3249.4
AvgPingPongLatency_usec=250.5
AvgPingPongBandwidth_GBytes=0.0711124
NaturallyOrderedRingLatency_usec=114.666
End of Summary section.
"""


def test_figures_are_read_in_common_units() -> None:
    assert sample_of(SUMMARY, "job 7") == AcrossSample(250.5, 114.666, pytest.approx(71.1124), pytest.approx(0.128242))


@pytest.mark.parametrize("text", ["", SUMMARY.replace("Success=1", "Success=0"), "Success=1\n"])
def test_a_run_without_right_results_has_no_figures(text: str) -> None:
    assert hpcc_figures(text) == {}
    with pytest.raises(Broken, match="job 7: mpirun said this"):
        sample_of(text, "job 7: mpirun said this")


def test_each_figure_is_compared_with_the_plain_nodes() -> None:
    samples = {
        TWO_HOSTS: [AcrossSample(200.0, 300.0, 50.0, 1.0), AcrossSample(220.0, 300.0, 50.0, 1.0)],
        ONE_HOST: [AcrossSample(100.0, 150.0, 100.0, 1.0)],
        PLAIN: [AcrossSample(20.0, 30.0, 500.0, 10.0)],
    }
    found = document(samples)
    assert found[TWO_HOSTS]["latency"]["median"] == 210.0 and found[TWO_HOSTS]["latency"]["samples"] == [200.0, 220.0]
    assert found[TWO_HOSTS]["latency"]["times_plain"]["value"] == pytest.approx(10.5)
    assert found[ONE_HOST]["bandwidth"]["times_plain"]["value"] == pytest.approx(0.2)
    assert all(found[PLAIN][figure]["times_plain"]["value"] == 1.0 for figure in FIGURES)
