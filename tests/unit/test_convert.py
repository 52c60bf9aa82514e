"""The conversion of rows and of the journal to the types of the API, and the texts of sizes and durations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from multiverse.cli import render
from multiverse.core.model.basics import Key
from multiverse.core.model.host import HypervisorView
from multiverse.core.model.job import AttemptState, JobState
from multiverse.core.model.reason import said
from multiverse.core.model.vm import Stage, TemplateKey, TemplateSeen, VmSeen
from multiverse.core.model.world import World
from multiverse.core.queue import BEHIND
from multiverse.core.transition import Command
from multiverse.service.convert import job_facts, job_view, phases, timeline_view, vm_views, waiting_reasons
from multiverse.service.hosts import Troubles, host_views
from tests.unit.planner_harness import POLICY, PlannerHarness
from tests.unit.rows import world_of


def test_the_phases_of_a_job_follow_each_other_without_gap() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    with harness.store.transaction() as tx:
        tx.measured(harness.all_vms()[0], "create", [Stage("overlay", 0.002), Stage("exec", 0.047)])
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.ENDED, result="COMPLETED")
    harness.run()
    harness.clear()
    harness.run()
    found = phases(harness.store.journal(attempts=[1]), harness.clock.time)
    assert [p.name for p in found] == ["queued", "clone", "join", "launch", "run", "reclaim"]
    for one, after in itertools.pairwise(found):
        assert one.began + one.seconds == after.began
    assert found[1].stages == (("overlay", 0.002), ("exec", 0.047))


def test_each_waiting_job_has_a_reason_its_own_or_that_it_waits_behind_others() -> None:
    harness = PlannerHarness()
    for number in range(1, 14):
        harness.job(str(number), rank=number)
    harness.job("14", rank=14, eligible=False, held=True)
    harness.run()
    attempts = list(harness.rows.attempts.values())
    reasons = waiting_reasons(attempts, harness.world, harness.state.reasons, harness.clock.time)
    facts = job_facts(attempts, [], reasons, {}, str)
    views = {one.job.job_id: job_view(one, more, POLICY, 0.0) for one, more in facts}
    assert "is being built" in views["1"].waiting and views["1"].waiting == views["10"].waiting
    assert {views[job].waiting for job in ("11", "12", "13")} == {str(BEHIND)}
    assert views["14"].waiting == "", "its user holds it"
    assert timeline_view(attempts[0], [], harness.clock.time, reasons[1]).waiting == views["1"].waiting


def test_a_job_in_its_back_off_shows_why_the_attempt_before_failed() -> None:
    harness = PlannerHarness()
    harness.job(eligible=False)
    harness.run()
    failed = replace(harness.attempt(), note=said("it does not boot"), not_before=harness.clock.time + 60)
    for world in (harness.world, World()):
        assert waiting_reasons([failed], world, {}, harness.clock.time) == {1: said("it does not boot")}
    running = replace(failed, state=AttemptState.ALLOCATED)
    assert waiting_reasons([running], harness.world, {}, harness.clock.time) == {}


def test_an_interrupted_job_has_only_the_phase_reclaim_after_its_end() -> None:
    harness = PlannerHarness()
    harness.to_spawning()
    del harness.jobs["7"]
    harness.run()
    view = timeline_view(harness.attempt(), harness.store.journal(attempts=[1]), harness.clock.time)
    assert [p.name for p in view.phases] == ["queued", "clone", "join", "reclaim"]
    assert view.entries[0].at == 0.0 and view.entries[0].event == "submitted"


def test_memory_is_that_of_the_last_observation_or_of_an_exact_measurement() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    ((name, seen),) = harness.vms.items()
    harness.vms[name] = replace(seen, cpu_s=1.0, private=60.0, shared=90.0)
    held = {key: replace(one, held=220.0) for key, one in harness.templates.items()}
    host = replace(
        harness.hosts["h1"], available=9000, template_copies=2, images={"slim": frozenset({"plug_memory", "fork"})}
    )

    def world(vms: Mapping[str, VmSeen], templates: Mapping[TemplateKey, TemplateSeen]) -> World:
        return world_of(None, HypervisorView({"h1": host}, vms, templates), harness.clock.time)

    seen_world = world(harness.vms, held)
    (vm,) = vm_views(harness.rows, seen_world, {})
    assert (vm.cpu_s, vm.private, vm.shared, vm.pss) == (1.0, 60.0, 90.0, 0.0)
    (vm,) = vm_views(harness.rows, seen_world, {name: (2.0, 61.5, 70.0)})
    assert (vm.cpu_s, vm.private, vm.shared, vm.pss) == (2.0, 61.5, 90.0, 70.0)
    (unseen,) = vm_views(harness.rows, World(), {})
    assert (unseen.private, unseen.shared) == (0.0, 0.0)
    (view,) = host_views(harness.rows, seen_world, harness.clock.time, Troubles({}, {}, {}, {}))
    assert (view.private, view.shared, view.templates, view.available) == (60.0, 90.0, 220.0, 9000)
    assert view.images == {"slim": ("fork", "plug_memory")}
    named = Troubles({}, {}, {}, {}, frozenset({"slim", "stock"}))
    (view,) = host_views(harness.rows, seen_world, harness.clock.time, named)
    assert view.lacks == ("stock",)
    (unseen_host,) = host_views(harness.rows, World(), harness.clock.time, named)
    assert unseen_host.lacks == (), "what a host that is away has now is unknown"
    assert view.claimed.memory < view.declared.memory and view.template_copies == 2 and view.vms == 1
    harness.run(Command("drop", "h1", "slim"))
    harness.templates.clear()
    harness.ended(Key("template", 1))
    harness.run()
    assert not harness.rows.templates
    now_world = world(harness.vms, {})
    (later,) = host_views(harness.rows, now_world, harness.clock.time, Troubles({}, {}, {}, {}))
    claims = sum(claim.size.memory for claim in harness.rows.claims)
    assert later.claimed.memory == claims + POLICY.base.memory, "the template is gone, but its VM still maps its memory"


def test_durations_and_sizes_are_short() -> None:
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
