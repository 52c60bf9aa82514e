"""How VMs are made: which template they are forked from, what their rows say, and when a template is worth building."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.capacity.room import every_host
from multiverse.core.changes import mark_changes
from multiverse.core.clones.kinds import Choice, choose_clones, choose_kind, template_sizes, ways_to_make
from multiverse.core.clones.spares import node_spec
from multiverse.core.clones.supply import supply_missing
from multiverse.core.context import Context
from multiverse.core.errors import Gone
from multiverse.core.model.basics import CloneKind, Depth, Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.job import Attempt, AttemptState, Job, JobState, NodeSpec, Request, SchedulerView
from multiverse.core.model.reason import Why, text_of
from multiverse.core.model.vm import Template, TemplateState, VmState
from multiverse.core.model.world import Row
from multiverse.core.rows import VmsMissing
from multiverse.core.transition import EffectKind
from tests.unit import rows as hand
from tests.unit.planner_harness import POLICY, PlannerHarness, failed

A, V, T = AttemptState, VmState, TemplateState
NOW = 100.0
AUTO = replace(POLICY, kind=CloneKind.AUTO)


def host(abilities: str = "instant linked", can: str = "fork plug_cpus plug_memory", memory: int = 65536) -> Host:
    """A host whose images have those abilities."""
    images = {"slim": frozenset(can.split())}
    return Host("h1", Size(16, memory, 65536), frozenset(abilities.split()), images=images)


def context(*rows: Row, on: Host, jobs: tuple[Job, ...] = ()) -> Context:
    view = SchedulerView({job.ref.job_id: job for job in jobs})
    held, world = hand.state(*rows, now=NOW), hand.world_of(view, HypervisorView({"h1": on}), NOW)
    mark_changes(held, world, AUTO)
    return Context(held, world, AUTO)


# --- which template ---------------------------------------------------------------------------------


def forked_from(node: Size, *templates: Template, can: str, memory: int = 65536) -> Size:
    """The size of the template that the VM of a job is forked from, which asks for a node of that size."""
    row = hand.attempt(A.QUEUED, request=Request(1, node))
    return template_sizes(context(row, *templates, on=host(can=can, memory=memory)), row)["h1"]


def ready(size: Size, id: int = 1, **more: object) -> Template:
    return hand.template(T.READY, id=id, size=size, **more)


def test_of_several_templates_the_one_with_the_least_memory_and_then_the_fewest_cpus_is_used() -> None:
    node, more_memory, more_cpus = Size(2, 800), ready(Size(2, 2048), 1), ready(Size(4, 1024), 2)
    assert forked_from(node, can="fork") == Size(2, 1024), "what would be built"
    assert forked_from(node, more_memory, can="fork") == Size(2, 2048)
    assert forked_from(node, more_memory, more_cpus, can="fork") == Size(4, 1024)
    assert forked_from(node, more_memory, more_cpus, ready(Size(3, 1024), 3), can="fork") == Size(3, 1024)


def test_a_template_with_more_of_what_can_be_plugged_is_not_used() -> None:
    for can, own, other, used in (
        ("fork plug_cpus", Size(1, 1024), Size(2, 1024), False),
        ("fork plug_cpus", Size(1, 1024), Size(1, 2048), True),
        ("fork plug_memory", Size(2, 256), Size(2, 512), False),
        ("fork plug_memory", Size(2, 256), Size(4, 256), True),
    ):
        node = Size(2, 800)
        assert forked_from(node, can=can) == own
        assert forked_from(node, ready(other), can=can) == (other if used else own), (can, other)


@pytest.mark.parametrize("other", [{"image": "stock"}, {"account": "physics"}, {"host": "h2"}])
def test_a_template_of_another_image_account_or_host_is_not_used(other: dict[str, object]) -> None:
    assert forked_from(Size(2, 800), ready(Size(2, 2048), **other), can="fork") == Size(2, 1024)
    assert forked_from(Size(2, 800), replace(ready(Size(2, 2048)), state=T.BUILDING), can="fork") == Size(2, 1024)


# --- the kind of clone ------------------------------------------------------------------------------


def chosen(
    *others: Attempt, jobs: tuple[Job, ...] = (), on: Host | None = None, request: Request | None = None
) -> Choice:
    """The choice for a job that asks for no kind of clone, where there is no template yet."""
    mine = hand.attempt(A.QUEUED, request=request or Request(1, Size(1, 100)))
    found = context(mine, *others, on=on or host(), jobs=jobs)
    return choose_kind(found, mine, every_host(found, Size(1, 4096)))


def test_where_clones_are_neither_booted_nor_forked_they_are_copied() -> None:
    assert chosen(on=host("full")) == Choice(CloneKind.FULL, Why.NONE_FORKS())
    assert chosen(on=host("full instant")) == Choice(CloneKind.INSTANT, Why.NONE_BOOTS())


def test_a_job_whose_template_no_host_could_hold_beside_it_boots() -> None:
    found = chosen(on=host(memory=4200))
    assert found == Choice(CloneKind.LINKED, Why.NO_ROOM_BESIDE())


def wanted_by(other: Attempt, **job: object) -> bool:
    """Whether a template is worth building if there is that other attempt."""
    shown = Job(other.job, other.job_name, other.uid, JobState.PENDING, other.request, **job)  # type: ignore[arg-type]
    return chosen(other, jobs=(shown,)).prepare


def test_another_job_that_waits_or_was_admitted_in_this_pass_makes_a_template_worth_building() -> None:
    waits = hand.attempt(A.QUEUED, id=2, job="8")
    assert wanted_by(waits)
    assert not wanted_by(waits, eligible=False), "it is held"
    assert not chosen(waits).prepare, "the scheduler does not show it"
    assert not wanted_by(replace(waits, request=Request(1, Size(1, 100), image="stock")))
    admitted = replace(waits, state=A.CLAIMED, since=NOW)
    assert wanted_by(admitted)
    assert not wanted_by(replace(admitted, since=NOW - 0.1)), "the forecast knows of it"
    assert not wanted_by(replace(admitted, state=A.SPAWNING)), "its VMs are made"


def test_the_wants_of_all_jobs_of_an_image_count_whether_they_name_it_or_not() -> None:
    mine = hand.attempt(A.QUEUED)
    other = hand.attempt(A.QUEUED, id=2, job="8", request=Request(1, Size(1, 100), image=POLICY.image))
    long_ago = hand.attempt(A.CLAIMED, id=3, job="9", since=NOW - 9)
    jobs = tuple(Job(one.job, one.job_name, one.uid, JobState.PENDING, one.request) for one in (mine, other))
    assert chosen(other, jobs=jobs).prepare
    assert chosen(other, long_ago, jobs=jobs).prepare
    assert not chosen(long_ago, jobs=jobs[:1]).prepare


# A VM that boots is larger here than one that is forked: memory comes in blocks of 1 GiB, and templates cost nothing.
TIGHT = replace(host(can="fork plug_cpus", memory=1200), template_copies=0, memory_block=1024)
FORKED = Choice(CloneKind.INSTANT, Why.NO_ROOM_BOOTED(), templates={"h1": Size(1, 1024)})


def kind_on(on: Host, *rows: Row, kind: CloneKind | None = None, site: CloneKind = CloneKind.AUTO) -> Choice:
    """The choice for a job of 500 MiB that asks for such a kind, where the settings' own is `site`."""
    row = hand.attempt(A.QUEUED, request=Request(1, Size(1, 500), kind=kind))
    found = context(*rows, on=on)
    return choose_clones(replace(found, policy=replace(POLICY, kind=site)), row)


def test_a_vm_that_no_host_could_hold_booted_is_forked() -> None:
    assert kind_on(TIGHT) == FORKED
    assert kind_on(TIGHT, kind=CloneKind.AUTO, site=CloneKind.LINKED) == FORKED
    roomy, tiny = (replace(TIGHT, capacity=Size(16, memory, 65536)) for memory in (1400, 1000))
    assert kind_on(roomy).kind is CloneKind.LINKED and "not worth a template" in text_of(kind_on(roomy).why)
    assert kind_on(tiny).kind is CloneKind.LINKED, "no host could hold it forked either"
    stiff = replace(TIGHT, images={"slim": frozenset({"plug_cpus"})})
    assert text_of(kind_on(stiff).why) == "no host can fork its image" and kind_on(stiff).kind is CloneKind.LINKED


def test_a_kind_that_is_chosen_for_another_reason_or_asked_for_is_kept() -> None:
    assert kind_on(TIGHT, kind=CloneKind.LINKED).kind is CloneKind.LINKED
    assert kind_on(TIGHT, site=CloneKind.LINKED).kind is CloneKind.LINKED
    assert kind_on(TIGHT, kind=CloneKind.LINKED, site=CloneKind.AUTO).why is None
    frozen = kind_on(TIGHT, ready(Size(1, 1024)))
    assert frozen.kind is CloneKind.INSTANT and text_of(frozen.why).startswith("its template is ready")


@pytest.mark.parametrize(
    ("kind", "abilities", "ways"),
    [
        (CloneKind.INSTANT, "instant linked", [CloneKind.INSTANT]),
        (CloneKind.LINKED, "instant linked", [CloneKind.LINKED]),
        (CloneKind.FULL, "instant full", [CloneKind.FULL]),
        (CloneKind.AUTO, "instant linked", [CloneKind.INSTANT, CloneKind.LINKED]),
        (CloneKind.AUTO, "instant full", [CloneKind.INSTANT]),
        (CloneKind.AUTO, "linked full", [CloneKind.LINKED]),
        (CloneKind.AUTO, "full", [CloneKind.FULL]),
    ],
)
def test_the_ways_to_make_a_vm(kind: CloneKind, abilities: str, ways: list[CloneKind]) -> None:
    on = host(abilities, can="fork plug_cpus")
    forked, booted = {"h1": Size(1, 1024)}, {"h1": POLICY.base}
    expected = [(way, forked if way is CloneKind.INSTANT else booted) for way in ways]
    for asked, site in ((kind, CloneKind.FULL), (None, kind)):
        row = hand.attempt(A.QUEUED, request=Request(1, Size(1, 500), kind=asked))
        found = replace(context(on=on), policy=replace(POLICY, kind=site))
        assert [(way, dict(sizes)) for way, sizes in ways_to_make(found, row)] == expected


# --- rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("account", ["", "physics"])
def test_the_row_of_an_instant_clone_names_the_row_of_its_template(account: str) -> None:
    harness = PlannerHarness()
    harness.run()
    for _ in range(4):
        harness.job(request=Request(1, Size(1, 100), account=account))
        harness.run()
        for row in harness.rows.templates.values():
            seen = harness.templates.pop(harness.template())
            harness.templates[row.which] = replace(seen, account=account)
    (template,) = harness.rows.templates.values()
    (vm,) = harness.all_vms()
    assert (vm.place.template_id, vm.place.template, vm.account) == (template.id, template.which, account)


def test_the_row_of_a_clone_that_boots_names_no_template() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    harness.job("8", request=Request(1, POLICY.base, kind=CloneKind.FULL))
    harness.run()
    (vm,) = harness.all_vms(2)
    assert (vm.kind, vm.place.template_id, vm.place.template) == (CloneKind.FULL, None, None)
    (instant,) = harness.all_vms(1)
    assert instant.place.template_id == next(iter(harness.rows.templates)), "although there is one"


def test_the_node_of_a_vm_is_its_attempts_or_for_the_job_that_takes_it() -> None:
    row = hand.attempt(A.SPAWNING, request=Request(1, Size(1, 100), features=("slim", "gpu")))
    own = hand.vm(V.STARTING, id=5, attempt=1, node_size=Size(2, 700), account="physics")
    assert node_spec(own, row) == NodeSpec(
        name="mvtest0-5",
        address="10.9.1.5/16",
        size=Size(2, 700),
        features=("slim", "gpu", "mv_1"),
        tag="mv_1",
        image="slim",
        account="physics",
        spare=False,
    )
    spare = replace(own, attempt=None, pool=Depth.JOINED, account="")
    assert node_spec(spare, None) == NodeSpec(
        name="mvtest0-5",
        address="10.9.1.5/16",
        size=Size(2, 700),
        features=("slim", "instant", "auto", "mv_v5"),
        tag="mv_v5",
        image="slim",
        account="",
        spare=True,
    )


# --- VMs that are missing ---------------------------------------------------------------------------


def test_an_attempt_that_lacks_a_vm_waits_while_no_host_is_known() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    harness.hypervisor_known, harness.unknown_since = False, harness.clock.time
    harness.run(failed(harness.all_vms()[0], EffectKind.CREATE, Gone("no luck")))
    assert (harness.attempt().state, [vm.state for vm in harness.all_vms()]) == (A.CLAIMED, [V.ENDING])
    harness.hypervisor_known = True
    harness.run()
    assert (harness.attempt().state, [vm.state for vm in harness.all_vms()]) == (A.CLAIMED, [V.ENDING, V.PLANNED])


def test_nothing_is_planned_for_an_attempt_that_is_over() -> None:
    found = context(on=host())
    supply_missing(found, VmsMissing(1, 1, "a VM was lost"))
    assert found.state.moves == []
