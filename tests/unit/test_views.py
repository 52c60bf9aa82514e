"""What people are shown: phases from the journal, and sizes and times as text."""

from __future__ import annotations

import itertools
from dataclasses import replace

from multiverse.cli import render
from multiverse.core.model import JobState, Stage
from multiverse.service.views import phases, timeline
from tests.unit.scene import Scene


def test_a_jobs_phases_follow_each_other_without_gap() -> None:
    scene = Scene()
    scene.to_allocated()
    with scene.store.transaction() as tx:
        tx.measured(scene.all_vms()[0], "create", [Stage("overlay", 0.002), Stage("exec", 0.047)])
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.ENDED, result="COMPLETED")
    scene.run()
    scene.clear()
    scene.run()
    found = phases(scene.store.journal(attempts=[1]), scene.clock.time)
    assert [p.name for p in found] == ["queued", "clone", "join", "launch", "run", "reclaim"]
    for one, after in itertools.pairwise(found):
        assert one.began + one.seconds == after.began
    assert found[1].stages == (("overlay", 0.002), ("exec", 0.047))


def test_a_job_cut_short_has_no_phase_after_its_end_but_reclaim() -> None:
    scene = Scene()
    scene.to_spawning()
    del scene.jobs["7"]
    scene.run()
    view = timeline(scene.attempt(), scene.store.journal(attempts=[1]), scene.clock.time)
    assert [p.name for p in view.phases] == ["queued", "clone", "join", "reclaim"]
    assert view.entries[0].at == 0.0 and view.entries[0].event == "submitted"


def test_durations_and_sizes_read_well() -> None:
    assert [render.duration(s) for s in (0.481, 12.34, 250, 7500, 273600)] == [
        "0.48 s",
        "12.3 s",
        "4m10s",
        "2h05m",
        "3d04h",
    ]
    assert render.memory(256) == "256 MiB" and render.memory(16384) == "16.0 GiB"


def test_a_bar_fills_its_width_and_shows_every_part() -> None:
    text = render.bar([(0.001, "red"), (10.0, "green")], 40)
    assert 40 <= len(text.plain) <= 41
