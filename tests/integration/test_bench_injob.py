"""The benchmark of VMs inside jobs on a small lab: all figures are there. The values are not checked: times vary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiverse_lab.bench import applications, injob
from multiverse_lab.bench.injob import SLURM, SUBMISSION, InjobPlan
from multiverse_lab.bench.launches import INSTANT, PARTS, WAYS, Launches
from multiverse_lab.lab.plan import LabOptions, load
from multiverse_lab.lab.service import Lab
from multiverse_lab.lab.session import LabSession, session_environment
from tests.integration.conftest import new_lab
from tests.integration.images import slim
from tests.integration.watch import emulators

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

PLAN = InjobPlan("slim", repeat=1, vms=4, seed=1, runs=1)


@pytest.fixture(scope="module")
def bench(accelerator: Path) -> Iterator[LabSession]:
    slim()
    with new_lab(accelerator, LabOptions(physical=2, cores=4, memory=4096), controller=True) as lab:
        plan = load(lab.where)
        assert plan is not None
        own = Lab(lab.where, plan)
        yield LabSession(lab.where, lab.settings, lab.user, own, session_environment(lab.where), lab.other)


def test_each_way_of_starting_a_vm_has_all_its_parts_and_leaves_nothing(bench: LabSession, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with Launches(bench.settings, "slim", tmp_path) as launches:
        found = injob.measure_starts(bench, launches, PLAN, lambda *_: None)
    for way in WAYS:
        parts = {SUBMISSION, *PARTS} - ({"description"} if way == INSTANT else set())
        assert set(found.parts[way]) == parts and min(found.totals(way)) > 0
    assert len(found.totals(SLURM)) == 1
    assert not list(tmp_path.iterdir()) and not [line for line in emulators() if str(tmp_path) in line]


def test_vms_are_made_one_by_one_and_at_once_on_all_nodes(bench: LabSession) -> None:
    found = injob.measure_many(bench, PLAN, lambda *_: None)
    assert len(found.each) == 4 and min(found.each) > 0 and found.one_by_one >= sum(found.each) and found.at_once > 0


def test_two_vms_of_a_job_pass_data_by_memory_and_by_their_bridge(bench: LabSession) -> None:
    found = injob.measure_shared(bench, PLAN, lambda *_: None)
    for rounds in (found.shared_memory, found.tcp):
        (one,) = rounds
        assert one.microseconds > 0 and one.mib_per_second > 0


@pytest.mark.timeout(1800)  # sixteen jobs with VMs, one after the other
@pytest.mark.parametrize("application", applications.UNITS)
def test_an_application_runs_in_each_scenario_and_in_a_guest_as_large_as_the_node(
    bench: LabSession, application: str
) -> None:
    (found,) = applications.run(bench, "slim", [application], 1, lambda *_: None).values()
    for scenario in applications.SCENARIOS:
        assert [len(each[scenario]) for each in (found.whole, found.vms)] == [2, 2]
        assert min(found.whole[scenario] + found.vms[scenario]) > 0
