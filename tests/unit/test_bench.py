"""What the benchmarks compute from their samples."""

from __future__ import annotations

import re
import select
import socket
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from multiverse.api import HostView, PhaseView, SizeView, TimelineView, VmView
from multiverse.cli.commands import build
from multiverse.core.errors import Broken, Refused
from multiverse_lab.bench import burst as bursts
from multiverse_lab.bench import density as densities
from multiverse_lab.bench.arrivals import Arrivals
from multiverse_lab.bench.density import busy, overcommit
from multiverse_lab.bench.latency import (
    KINDS,
    LatencySamples,
    add_both_ends,
    add_timeline,
    beside_bare_metal,
    plugging,
    result,
)
from multiverse_lab.bench.long_queue import STAGES, mean_cycles
from multiverse_lab.bench.stats import excess, percentile, ratio, summary
from multiverse_lab.cli.bench import kinds_of


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    assert percentile([7.0], 0.95) == 7.0


def test_a_summary_bounds_its_median_and_is_reproducible() -> None:
    samples = [float(n) for n in range(1, 31)]
    one = summary(samples)
    assert one is not None and one == summary(samples)
    assert one.low < one.p50 == 15.5 < one.high and one.max == 30.0 and one.n == 30
    assert summary([]) is None


def test_the_first_byte_is_the_sum_of_the_stages_up_to_it() -> None:
    samples = LatencySamples()
    phases = (
        PhaseView("clone", 0.0, 0.1, (("overlay", 0.01), ("exec", 0.05))),
        PhaseView("join", 0.1, 0.9, (("first_byte", 0.04), ("identity", 0.07))),
        PhaseView("run", 1.0, 5.0),
    )
    add_timeline(samples, TimelineView("7", 1, "done", 0.0, phases, ()))
    found = result(samples)
    assert found.first_byte is not None and found.first_byte.p50 == pytest.approx(0.10)
    assert found.node_idle is not None and found.node_idle.p50 == pytest.approx(1.0)
    assert found.stages["join.identity"] == 0.07 and "run" not in found.stages
    assert found.cpu_s is None, "no cost was measured"


def test_the_stages_of_a_job_add_up_to_the_time_from_its_submission_to_its_first_instruction() -> None:
    samples, began, arrived = LatencySamples(), 99.0, 102.5
    phases = (
        PhaseView("queued", 99.25, 0.05),
        PhaseView("clone", 99.3, 0.2),
        PhaseView("join", 99.5, 2.0),
        PhaseView("launch", 101.5, 1.2),  # the running job is seen after it has begun
        PhaseView("run", 102.7, 1.0),
    )
    one = TimelineView("7", 1, "done", 0.0, phases, ())
    add_timeline(samples, one)
    add_both_ends(samples, one, began, arrived)
    assert samples.stages["seen"] == [0.25] and samples.stages["start"] == [1.0]
    assert sum(samples.stages[name][0] for name in STAGES if name != "sbatch") == pytest.approx(arrived - began)


def test_an_attempt_that_was_given_up_has_no_start() -> None:
    samples = LatencySamples()
    add_both_ends(samples, TimelineView("7", 1, "done", 0.0, (PhaseView("queued", 1.0, 0.5),), ()), 0.5, 3.0)
    assert samples.stages == {}


def test_kinds_are_chosen_by_name() -> None:
    assert [kind.name for kind in kinds_of("instant, bare_metal", KINDS)] == ["instant", "bare_metal"]
    assert [kind.name for kind in kinds_of(",".join(kind.name for kind in KINDS), KINDS)] == [k.name for k in KINDS]
    with pytest.raises(Refused, match="no such kind: fast"):
        kinds_of("fast", KINDS)


# --- comparisons -----------------------------------------------------------------------------------


def test_a_ratio_lies_within_its_bounds_and_is_reproducible() -> None:
    slow, fast = [30.0, 31.0, 32.0, 90.0], [2.0, 2.1, 1.9, 2.0]
    by_medians, by_means = ratio(slow, fast), ratio(slow, fast, fmean)
    assert by_medians is not None and by_means is not None and by_medians == ratio(slow, fast)
    assert by_medians.value == pytest.approx(31.5 / 2.0) and by_means.value == pytest.approx(45.75 / 2.0)
    for one in (by_medians, by_means):
        assert one.low < one.value < one.high
    assert ratio(slow, slow) is not None and ratio([], fast) is None and ratio(slow, []) is None


def test_an_excess_compares_medians_and_may_include_zero() -> None:
    found = excess([0.15, 0.16, 0.17], [0.10, 0.11, 0.12])
    assert found is not None and found.value == pytest.approx(0.05) and found.low <= found.value <= found.high
    same = excess([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert same is not None and same.low < 0.0 < same.high
    assert excess([], [1.0]) is None


def test_each_kind_is_compared_with_bare_metal() -> None:
    found = {"joined": LatencySamples([0.6, 0.8, 1.0]), "bare_metal": LatencySamples([0.4, 0.4, 0.4])}
    (one,) = beside_bare_metal(found)
    assert one.kind == "joined" and one.ratio is not None and one.excess is not None
    assert one.ratio.value == pytest.approx(2.0) and one.excess.value == pytest.approx(0.4)
    assert one.ratio.low < 2.0 < one.ratio.high
    assert beside_bare_metal({"joined": LatencySamples([0.6])}) == []


def test_plugging_is_the_time_that_a_larger_clone_takes_more_than_a_small_one() -> None:
    small, large = (
        LatencySamples(node_idle=[1.0], first_byte=[0.1]),
        LatencySamples(node_idle=[1.25], first_byte=[0.125]),
    )
    small.stages["join.plug"], large.stages["join.plug"] = [0.0], [0.03]
    found = plugging({"instant": small, "plugged": large})
    assert {name: one and one.value for name, one in found.items()} == {
        "plug": pytest.approx(0.03), "first_byte": pytest.approx(0.025), "node_idle": pytest.approx(0.25),
    }  # fmt: skip
    assert plugging({"instant": small}) == {}


# --- bursts ----------------------------------------------------------------------------------------


def timeline(job: str, clone: float, join: float, state: str = "done") -> TimelineView:
    phases = (
        PhaseView("queued", 0.0, 7.0),
        PhaseView("clone", 0.0, clone, (("overlay", 0.002),)),
        PhaseView("join", 0.0, join),
        PhaseView("run", 0.0, 100.0),
    )
    return TimelineView(job, 1, state, 0.0, phases, ())


def test_provisioning_counts_from_claim_to_node_of_the_attempt_that_ran() -> None:
    samples = bursts.BurstSamples(submit_to_start=[9.0, 10.0], all_ran=10.0)
    bursts.add_timelines(
        samples, [timeline("5_1", 1.0, 1.0), timeline("5_2", 9.0, 9.0, "requeued"), timeline("5_2", 2.0, 2.0)], 2
    )
    found = bursts.result(samples)
    assert samples.provisioning == [2.0, 4.0] and found.again == 1
    assert found.provisioning is not None and found.provisioning.mean == 3.0
    assert found.stages["clone.overlay"] == 0.002 and "run" not in found.stages


def test_a_job_without_an_attempt_that_ran_is_an_error() -> None:
    with pytest.raises(Broken, match="1 attempts ran 2 jobs"):
        bursts.add_timelines(bursts.BurstSamples(), [timeline("5_1", 1.0, 1.0), timeline("5_2", 1.0, 1.0, "failed")], 2)


def test_each_kind_is_compared_with_the_instant_one() -> None:
    full, instant = bursts.BurstSamples([30.0] * 5, [60.0] * 5), bursts.BurstSamples([2.0] * 5, [6.0] * 5)
    (one,) = bursts.ratios({"full_stock": full, "instant": instant})
    assert (one.over, one.under) == ("full_stock", "instant")
    assert [e and e.value for e in (one.means, one.medians, one.submit_to_start)] == [15.0, 15.0, 10.0]
    assert bursts.ratios({"full_stock": full}) == []


def say(script: str, word: str) -> socket.socket:
    """Do what a job's script does: connect, and report the job's id."""
    match = re.search(r"/dev/tcp/([\d.]+)/(\d+)", script)
    assert match is not None
    one = socket.create_connection((match[1], int(match[2])))
    one.sendall(f"{word}\n".encode())
    return one


def test_arrivals_are_timed_as_they_come_and_held_until_the_end() -> None:
    arrivals = Arrivals("127.0.0.1", hold=True)
    with say(arrivals.script, "5_2") as second, say(arrivals.script, "5_1") as first:
        try:
            assert arrivals.wait(["5_1", "5_2"], 30.0, lambda: True) == []
            assert set(arrivals.at) == {"5_1", "5_2"}
            assert arrivals.wait(["5_1", "5_3"], 0.01, lambda: True) == ["5_3"]
            with pytest.raises(Broken, match="the lab went down while 1 jobs"):
                arrivals.wait(["5_3"], 30.0, lambda: False)
        finally:
            arrivals.close()
        assert first.recv(1) == second.recv(1) == b"", "the connections are closed, so the jobs end"


# --- density ---------------------------------------------------------------------------------------


def test_a_cpu_is_busy_unless_it_is_idle_or_waits_for_io() -> None:
    before = (100, 0, 50, 1000, 10, 0, 0, 0)
    assert busy(before, (130, 0, 60, 1050, 20, 0, 0, 0)) == pytest.approx(0.4)
    assert busy(before, (100, 0, 50, 1200, 10, 0, 0, 0)) == 0.0


def test_the_overcommit_factor_is_just_enough_for_the_vms() -> None:
    assert overcommit(10, 288, 16384) == 1.0
    for vms in (57, 100, 200):
        times = overcommit(vms, 288, 16384)
        assert times * 16384 >= (vms + 4) * 288 > (times - 0.2) * 16384


def test_wrong_arguments_are_refused_before_a_lab_starts() -> None:
    for words in (["burst", "0"], ["burst", "--every", "0"], ["density", "--most", "0"], ["burst", "many"]):
        assert CliRunner().invoke(build(), ["bench", *words]).exit_code == 2
    with pytest.raises(Refused, match="no such kind: fast") as caught:
        CliRunner().invoke(build(), ["bench", "burst", "3", "--kinds", "fast"], catch_exceptions=False)
    assert caught.value.hint


class FakeHost:
    """A lab and its controller's client. Each task of an array reports at once, and its VM takes 100 MiB."""

    def __init__(self, memory: int, starts: int) -> None:
        self.memory, self.starts = memory, starts
        self.running: list[socket.socket] = []
        self.settings = SimpleNamespace(network=SimpleNamespace(gateway="127.0.0.1"), socket=Path("/"))

    def submit(self, script: str, array: str, *_: str) -> str:
        for task in range(1, int(array.rpartition("-")[2]) + 1):
            if len(self.running) < self.starts:
                self.running.append(say(script, f"7_{task}"))
        return "7"

    def run(self, *_: str) -> None:
        pass

    def hosts(self) -> list[dict[str, Any]]:
        size = SizeView(1, 1, 1)
        host = HostView(
            name="h1", reachable=True, declared=size, claimed=size, machine=None, accelerator="tcg", abilities=(),
            images={}, vms=0, available=self.memory - 100 * len(self.running), private=0.0, shared=0.0, templates=0.0,
            template_copies=1, overcommit=1.0, floor=0, usable=size,
        )  # fmt: skip
        return [asdict(host)]

    def vms(self, *, exact: bool = False) -> list[dict[str, Any]]:
        over = not select.select(self.running, [], [], 0)[0]  # they are held until the end
        names = [f"mv-{n}" for n in range(len(self.running))] if over else []
        return [
            asdict(
                VmView(
                    name, "serving", "h1", "slim", "instant", 1, 256, "", None, "", 9.0, 1.0, 90.0, 80.0, 0.0, "", ""
                )
            )
            for name in names
        ]

    def jobs(self) -> list[dict[str, Any]]:
        return []

    def status(self) -> dict[str, Any]:
        return {
            "pid": 1, "version": "0", "site": "test0", "up": 1.0, "sources": [], "jobs": {"running": len(self.running)},
            "attempts": {}, "vms": {}, "templates": {}, "pools": [], "alerts": [],
        }  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "starts", "most", "said"),
    [
        (10_000, 9, 1, ""),
        (1150, 9, 1, "memory: 1050 MiB are available, 1100 were to be left"),
        (10_000, 0, 0, "1 more did not start"),
    ],
)
def test_density_ends_when_something_is_exhausted(
    memory: int, starts: int, most: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(densities, "IDLE_SECONDS", 0.01)
    fake = FakeHost(memory, starts)
    found = densities.run(fake, fake, densities.DensityBounds(1, 1, 1100, 0.05), lambda step: None)  # type: ignore[arg-type]
    assert found.most == most and found.gave_out.startswith(said) and bool(found.gave_out) == bool(said)
    if found.steps:
        assert (found.steps[0].private, found.steps[0].used) == (90.0, 100)


# --- queue -----------------------------------------------------------------------------------------

SDIAG = """\
Main schedule statistics (microseconds):
	Last cycle:   105
	Max cycle:    2314
	Total cycles: 12
	Mean cycle:   611
	Mean depth cycle:  3

Backfilling stats
	Total backfilled jobs (since last slurm start): 0
	Last cycle: 120
	Mean cycle: 8345
"""


def test_the_mean_cycles_of_both_schedulers_are_read_from_sdiag() -> None:
    assert mean_cycles(SDIAG) == {"main": 611.0, "backfill": 8345.0}
    assert mean_cycles("Main schedule statistics:\n\tLast cycle: 3\n") == {}, "no cycle since the counters were reset"
