"""What people are shown: phases from the journal, and sizes and times as text."""

from __future__ import annotations

import itertools
from dataclasses import replace

from multiverse.cli import render
from multiverse.core.model import HypervisorView, JobState, Key, Stage
from multiverse.core.transition import Command
from multiverse.service.views import host_view, phases, timeline, vm_views
from tests.unit.scene import POLICY, Scene


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


def test_memory_is_shown_as_seen_and_exactly_where_it_was_measured() -> None:
    scene = Scene()
    scene.to_allocated()
    ((name, seen),) = scene.vms.items()
    scene.vms[name] = replace(seen, cpu_s=1.0, private=60.0, shared=90.0)
    held = {key: replace(one, held=220.0) for key, one in scene.templates.items()}
    host = replace(
        scene.hosts["h1"], available=9000, template_copies=2, images={"slim": frozenset({"plug_memory", "fork"})}
    )
    (vm,) = vm_views(scene.rows, scene.vms, {}, scene.clock.time)
    assert (vm.cpu_s, vm.private, vm.shared, vm.pss) == (1.0, 60.0, 90.0, 0.0)
    (vm,) = vm_views(scene.rows, scene.vms, {name: (2.0, 61.5, 70.0)}, scene.clock.time)
    assert (vm.cpu_s, vm.private, vm.shared, vm.pss) == (2.0, 61.5, 90.0, 70.0)
    (unseen,) = vm_views(scene.rows, {}, {}, scene.clock.time)
    assert (unseen.private, unseen.shared) == (0.0, 0.0)
    view = host_view(host, scene.rows, HypervisorView({"h1": host}, scene.vms, held), POLICY)
    assert (view.private, view.shared, view.templates, view.available) == (60.0, 90.0, 220.0, 9000)
    assert view.images == {"slim": ("fork", "plug_memory")}
    assert view.claimed.memory < view.declared.memory and view.template_copies == 2 and view.vms == 1
    scene.run(Command("drop", "h1", "slim"))
    scene.templates.clear()
    scene.ended(Key("template", 1))
    scene.run()
    assert not scene.rows.templates
    later = host_view(host, scene.rows, HypervisorView({"h1": host}, scene.vms, {}), POLICY)
    claims = sum(claim.size.memory for claim in scene.rows.claims)
    assert later.claimed.memory == claims + POLICY.base.memory, "it is gone, and its VM maps it"


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
