"""The benchmark of VMs inside jobs: what its figures are computed from, and its search of a graph."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from multiverse.core.errors import Broken
from multiverse_lab.bench import applications
from multiverse_lab.bench.applications import BFS, EASJ, HPL, ApplicationSamples, compile_kernel, speed_of
from multiverse_lab.bench.injob import PAPER, SLURM, SUBMISSION, ManyVms, StartSamples
from multiverse_lab.bench.ivshmem import PassingFigures, PassingRound
from multiverse_lab.bench.launches import ADDRESSES, ANSWER, COPY, IMAGE, INSTANT, WAYS
from multiverse_lab.cli.injob import applications_document, many_document, passing_document, start_document

_MASK = (1 << 64) - 1
_SCALE, _EDGES, _SEARCHES = 6, 4, 3


def test_the_time_in_all_is_the_sum_of_the_parts_of_each_start() -> None:
    samples = StartSamples()
    for way in WAYS:
        image = 4.0 if way == COPY else 0.5
        samples.parts[way] = {SUBMISSION: [1.0, 1.0], IMAGE: [image, image], ANSWER: [0.5, 0.5], ADDRESSES: [0.0, 0.0]}
    samples.parts[SLURM] = {"whole": [2.75, 2.75]}
    found = start_document(samples)
    copy, instant = found["ways"][COPY], found["ways"][INSTANT]
    assert copy["total"]["p50"] == 5.5 and copy["made"]["p50"] == 4.5 and copy["copy_over"]["value"] == 1
    assert instant["copy_over"]["value"] == 5.5 / 2 and instant["copy_over_made"]["value"] == 4.5
    assert found["copy_over_slurm"]["value"] == 2


def test_the_copy_is_compared_with_the_other_starts_of_its_round() -> None:
    samples, load = StartSamples(), (1.0, 2.0, 4.0)
    for way in WAYS:
        samples.parts[way] = {
            SUBMISSION: [0.0, 0.0, 0.0],
            ANSWER: [(9.0 if way == COPY else 3.0) * each for each in load],
        }
    samples.parts[SLURM] = {"whole": [4.5, 1.5, 9.0]}
    found = start_document(samples)
    assert found["ways"][INSTANT]["copy_over"] == {"value": 3.0, "low": 3.0, "high": 3.0}
    assert found["copy_over_slurm"]["value"] == 4  # of 2, 12 and 4
    assert found["copy_over_slurm"]["low"] == 2 and found["copy_over_slurm"]["high"] == 12


def test_many_vms_at_once_are_compared_with_one_by_one_as_in_the_paper() -> None:
    found = many_document(ManyVms(100.0, (50.0, 50.0), 25.0))
    assert found["less"] == 0.75 and round(found["paper_less"], 2) == 0.87 and PAPER["copy_over_snapshot"] == 2.64


def test_shared_memory_is_compared_with_the_bridge_beside_it() -> None:
    shared, tcp = PassingRound(30.0, 1000.0), PassingRound(240.0, 100.0)
    found = passing_document(PassingFigures((shared, shared, shared), (tcp, tcp, tcp)))
    assert found["shared_memory"]["microseconds"]["p50"] == 30 and found["tcp"]["mib_per_second"]["p50"] == 100
    assert (found["times_shorter"]["value"], found["times_faster"]["value"]) == (8, 10)


def test_what_vms_cost_is_the_part_of_the_speed_that_is_lost() -> None:
    samples = ApplicationSamples()
    for each in applications.SCENARIOS:
        samples.whole[each], samples.vms[each] = [10.0, 10.0], [9.0, 9.0]
    (found,) = applications_document({BFS: samples}).values()
    assert round(found[EASJ]["cost"]["value"], 6) == 10


def test_an_application_that_failed_has_no_speed() -> None:
    assert speed_of(BFS, "searches=8 edges=3000000 seconds=1.500 levels=7\n") == 2
    assert speed_of(HPL, "HPL_Tflops=0.0002\nSuccess=1\n") == pytest.approx(0.2)
    for application in (BFS, HPL):
        with pytest.raises(Broken, match="a process has ended"):
            speed_of(application, "bfs: process 1: a process has ended: Success\n")


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_any_number_of_processes_finds_the_levels_of_a_breadth_first_search(tmp_path: Path) -> None:
    program = tmp_path / "bfs"
    compile_kernel(program)
    for count in (1, 2, 3):
        said = _run(program, count)
        match = re.search(r"edges=(\d+) .*levels=(\d+)", said)
        assert match is not None and (int(match[1]), int(match[2])) == _reference(), said


def _run(program: Path, count: int) -> str:
    """Run the search with so many processes; what the first of them says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] - count
    words = [str(program), str(_SCALE), str(_EDGES), str(_SEARCHES)]
    others = [subprocess.Popen([*words, str(rank), str(port), *["127.0.0.1"] * count]) for rank in range(1, count)]
    argv = [*words, "0", str(port), *["127.0.0.1"] * count]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert [other.wait(60) for other in others] == [0] * (count - 1)
    return done.stdout


def _reference() -> tuple[int, int]:
    """The edges that the searches traverse, and the sum of all levels: computed in the simplest way."""
    neighbours: dict[int, list[int]] = {vertex: [] for vertex in range(1 << _SCALE)}
    for number in range(_EDGES << _SCALE):
        one, two = _edge(number)
        if one != two:
            neighbours[one].append(two)
            neighbours[two].append(one)
    state, roots = 1, list[int]()
    while len(roots) < _SEARCHES:
        state, chance = _random(state)
        root = chance & ((1 << _SCALE) - 1)
        roots += [root] if neighbours[root] else []
    edges = levels = 0
    for root in roots:
        level, queue = {root: 0}, [root]
        for vertex in queue:
            for other in neighbours[vertex]:
                if other not in level:
                    level[other] = level[vertex] + 1
                    queue.append(other)
        edges += sum(len(neighbours[vertex]) for vertex in level)
        levels += sum(level.values())
    return edges // 2, levels


def _random(state: int) -> tuple[int, int]:
    """The next state of splitmix64, and what it gives."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    x = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return state, x ^ x >> 31


def _edge(number: int) -> tuple[int, int]:
    """Graph500's Kronecker graph: each bit of both ends is chosen with the probabilities 0.57, 0.19, 0.19 and 0.05."""
    state, one, two = (number * 0xD1342543DE82EF95 + 1) & _MASK, 0, 0
    for _ in range(_SCALE):
        state, chance = _random(state)
        share = (chance >> 32) / 0xFFFFFFFF
        quadrant = 0 if share < 0.57 else 1 if share < 0.76 else 2 if share < 0.95 else 3
        one, two = one << 1 | quadrant >> 1, two << 1 | quadrant & 1
    return _scrambled(one), _scrambled(two)


def _scrambled(vertex: int) -> int:
    for _ in range(2):
        vertex = vertex * 0x9E3779B1 & ((1 << _SCALE) - 1)
        vertex ^= vertex >> (_SCALE + 1) // 2
    return vertex
