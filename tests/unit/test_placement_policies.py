"""Placement policies by name: those of jobs, of the site's settings, and of packages that a site installs."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.config import parse
from multiverse.controller.policy import policy_of
from multiverse.core.capacity.placement_policies import BUILT_IN, COMPARED, CandidateHost, PlacementRequest
from multiverse.core.capacity.room import Room
from multiverse.core.errors import Refused
from multiverse.core.model.basics import CloneKind, Key, Placement, Size
from multiverse.core.model.host import Claim, Host, HypervisorView
from multiverse.core.model.job import AttemptState, Job, JobState, Request, SchedulerView
from multiverse.core.model.reason import text_of
from multiverse.core.model.usage import Load
from multiverse.core.model.vm import TemplateState
from multiverse.core.model.world import Forecast
from multiverse.core.planner import plan
from multiverse.core.policy import Policy
from multiverse.core.state import State
from multiverse.core.transition import Event
from multiverse.service import alerts
from multiverse.system import placements
from tests.unit.planner_harness import POLICY
from tests.unit.rows import IMAGES, as_ready, attempt, changes_of, state, template, world_of

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "placement"
NOW = 1000.0
EAGER = replace(POLICY, provisioning=100)
WIDE = {"h1": 8, "h2": 4, "h3": 16}
"""CPUs of hosts."""


def admit(
    policy: Policy,
    *asked: Request,
    cpus: dict[str, int] | None = None,
    hosts: dict[str, Host] | None = None,
    net: int = 0,
) -> tuple[State, dict[int, list[str]]]:
    """The state after a pass in which these jobs wait, and the hosts of the VMs of each, by its number. Every host has
    the template."""
    cpus = cpus or WIDE
    hosts = hosts or {name: Host(name, Size(count, 1 << 16, 1 << 16, net), frozenset({"instant"}), images=IMAGES)
                      for name, count in cpus.items()}  # fmt: skip
    ready = [template(TemplateState.READY, id=n, host=name) for n, name in enumerate(hosts, 1)]
    waiting = [attempt(AttemptState.QUEUED, id=n, job=str(n), request=one) for n, one in enumerate(asked, 1)]
    jobs = {one.job.job_id: Job(one.job, "hello", 1000, JobState.PENDING, one.request, rank=one.id) for one in waiting}
    world = world_of(SchedulerView(jobs), HypervisorView(hosts, {}, as_ready(ready)), NOW, entropy="chance")
    here = state(*waiting, *ready, now=NOW)
    changes = changes_of(plan(here, world, [], NOW, policy))
    assert not [one for one in changes if one.event is Event.QUARANTINED]
    placed: dict[int, list[str]] = {}
    for vm in here.vms.values():
        placed.setdefault(vm.attempt or 0, []).append(vm.host)
    return here, placed


def loaded(*sizes: tuple[int, Load | None]) -> dict[str, Host]:
    """Hosts `h1`, `h2`, … of so many CPUs and 64 GiB, with what is used there."""
    return {
        f"h{n}": Host(f"h{n}", Size(cpus, 1 << 16, 1 << 16), frozenset({"instant"}), images=IMAGES, load=load)
        for n, (cpus, load) in enumerate(sizes, 1)
    }


def job(nodes: int = 1, placement: str | None = None, cpus: int = 2) -> Request:
    return Request(nodes, Size(cpus, 100), placement=placement)


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [("worst-fit", ["h3"] * 6), ("best-fit", ["h2", "h2", "h1", "h1", "h1", "h1"]),
     ("first-fit", ["h1", "h1", "h1", "h1", "h2", "h2"]), ("pack", ["h3"] * 6)],
)  # fmt: skip
def test_the_settings_and_the_job_name_a_policy(policy: str, chosen: list[str]) -> None:
    if policy == "worst-fit":
        chosen = ["h3", "h3", "h3", "h3", "h1", "h3"]  # equal from then on: by name
    for settings, named in ((policy, None), ("random-fit", policy)):
        here, placed = admit(replace(EAGER, placement=settings), job(6, named))
        assert sorted(placed[1]) == sorted(chosen)
        assert f" by {policy} among 3 of 3 hosts with its template" in text_of(here.attempts[1].choice)


def test_least_loaded_takes_the_host_with_the_least_measured_use_of_cpus_or_memory() -> None:
    memory = Load(0.0, 40_000)
    hosts = loaded((16, Load(12.0, 100)), (16, memory), (8, Load(2.0, 100)), (16, Load(8.0, 100)))
    assert admit(EAGER, job(1, "least-loaded"), hosts=hosts)[1] == {1: ["h3"]}
    assert admit(EAGER, job(1, "least-loaded", cpus=16), hosts=hosts)[1] == {1: ["h4"]}, "it has to fit"


def test_least_loaded_counts_what_was_placed_and_is_not_measured_yet() -> None:
    """Jobs that come together would otherwise all be placed on the host that is the least loaded now."""
    hosts = loaded(*[(8, Load(1.0, 100))] * 2, (8, Load(3.0, 100)))
    _, placed = admit(EAGER, *[job(1, "least-loaded")] * 8, hosts=hosts)
    assert [placed[n] for n in range(1, 9)] == [[h] for h in ("h1", "h2", "h3", "h1", "h2", "h3", "h1", "h2")]


def test_least_loaded_goes_by_claims_where_the_use_is_not_known() -> None:
    hosts = loaded((8, None), (8, None), (8, Load(1.0, 100)))
    _, placed = admit(EAGER, *[job(1, "least-loaded")] * 4, hosts=hosts)
    assert [placed[n] for n in range(1, 5)] == [["h1"], ["h2"], ["h3"], ["h1"]]


def test_least_loaded_compares_a_number_of_many_hosts() -> None:
    hosts = loaded(*[(8, Load(float(n % 8), 100)) for n in range(3 * COMPARED)])
    _, placed = admit(EAGER, *[job(1, "least-loaded")] * 20, hosts=hosts)
    loads = [hosts[name].load for names in placed.values() for name in names]
    assert loads == [Load(0.0, 100)] * 20, "one of an eighth of the hosts is among those that are compared"
    again = admit(EAGER, *[job(1, "least-loaded")] * 20, hosts=hosts)[1]
    assert again == placed


def test_spread_places_the_vms_of_a_job_on_different_hosts() -> None:
    hosts = loaded((4, None), (16, None), (8, None))
    assert sorted(admit(EAGER, job(3, "spread"), hosts=hosts)[1][1]) == ["h1", "h2", "h3"]
    assert admit(EAGER, job(1, "spread"), job(2, "spread"), hosts=hosts)[1] == {1: ["h2"], 2: ["h2", "h3"]}
    seven = Counter(admit(EAGER, job(7, "spread"), hosts=hosts)[1][1])
    assert seven == {"h1": 2, "h2": 3, "h3": 2}, "more VMs than hosts: as evenly as they fit"
    assert Counter(admit(EAGER, job(9, "spread"), hosts=loaded((4, None), (16, None)))[1][1]) == {"h1": 2, "h2": 7}


def test_a_vm_that_is_replaced_is_spread_away_from_those_that_are_left() -> None:
    hosts = loaded((4, None), (16, None), (8, None))
    room = Room(hosts)
    claims = dict.fromkeys(hosts, Size(2, 100))
    assert room.place(1, claims, choose=BUILT_IN["spread"], siblings=["h2", "h3"]) == ["h1"]


@pytest.mark.parametrize("policy", ["pack", "worst-fit", "own"])
def test_no_more_vms_of_a_job_are_on_a_host_than_it_asks_for(policy: str) -> None:
    def own(request: PlacementRequest, hosts: Sequence[CandidateHost], seed: str) -> list[str]:
        return [one.name for one in hosts for _ in range(one.holds)][: request.vms]

    site = replace(EAGER, placement=policy, placements={"own": own})
    here, placed = admit(site, replace(job(4, cpus=1), per_host=2))
    assert sorted(placed[1].count(name) for name in set(placed[1])) == [2, 2] and not here.placement_faults
    here, placed = admit(site, replace(job(3, cpus=1), per_host=1), replace(job(4, cpus=1), per_host=1))
    assert sorted(placed[1]) == ["h1", "h2", "h3"] and 2 not in placed
    assert text_of(here.attempts[2].reason).startswith(
        "4 VMs of 1 CPU, 100 MiB with at most 1 on a host do not fit on all hosts together"
    )


def test_bandwidth_is_claimed_and_a_job_waits_for_it_with_that_reason() -> None:
    def asking(net: int, nodes: int = 1) -> Request:
        return Request(nodes, Size(1, 100, net=net))

    here, placed = admit(EAGER, asking(600), asking(600), asking(300), cpus={"h1": 8}, net=1000)
    assert placed == {1: ["h1"]}
    assert str(here.reasons[2]) == "waiting for bandwidth: hosts that have room otherwise have 400 Mbit/s free at most"
    here, placed = admit(EAGER, asking(600), asking(0), asking(400), cpus={"h1": 8}, net=1000)
    assert placed == {1: ["h1"], 2: ["h1"], 3: ["h1"]}
    assert sum(claim.size.net for claim in here.claims.values()) == 1000
    here, placed = admit(EAGER, asking(1), cpus={"h1": 8})
    assert "a VM of 1 CPU, 100 MiB, 1 Mbit/s fits on no host" in text_of(here.attempts[1].reason), (
        "nothing to claim is declared"
    )


def test_the_same_pass_places_at_random_alike_and_jobs_differently() -> None:
    many = {f"h{n:02}": 4 for n in range(40)}
    first, again = (admit(EAGER, *[job(1, "random-fit")] * 10, cpus=many)[1] for _ in range(2))
    assert first == again and len({name for names in first.values() for name in names}) > 5


def test_every_policy_is_known_by_its_name_in_the_settings() -> None:
    for name in Placement:
        assert policy_of(parse({"placement": {"policy": name.value}}, "test")).placement == name
        placements.check(name)
    with pytest.raises(Refused) as refused:
        placements.check("fast")
    assert "worst-fit, best-fit, first-fit, random-fit, pack, spread, least-loaded" in refused.value.hint


# --- templates on many hosts ------------------------------------------------------------------------


def building(policy: Policy, cpus: dict[str, int], *asked: Request, **more: object) -> list[str]:
    """The hosts on which templates are being built after a pass in which these jobs wait; none is ready."""
    hosts = {name: Host(name, Size(count, 1 << 16, 1 << 16), frozenset({"instant"}), images=IMAGES)
             for name, count in cpus.items()}  # fmt: skip
    waiting = [attempt(AttemptState.QUEUED, id=n, job=str(n), request=one) for n, one in enumerate(asked, 1)]
    jobs = {one.job.job_id: Job(one.job, "hello", 1000, JobState.PENDING, one.request, rank=one.id) for one in waiting}
    claims = [Claim(Key("vm", 90), name, size) for name, size in more.items() if isinstance(size, Size)]
    here = state(*waiting, claims=claims, now=NOW)
    world = world_of(SchedulerView(jobs), HypervisorView(hosts), NOW)
    plan(here, world, [], NOW, policy)
    return [row.host for row in here.templates.values() if row.state is TemplateState.BUILDING]


def test_a_template_is_built_where_there_is_room_for_a_vm_beside_it() -> None:
    assert building(EAGER, WIDE, job()) == ["h1"]
    assert building(EAGER, WIDE, job(), h1=Size(7, 0)) == ["h2"], "h1 has one CPU left"
    full = {name: Size(count, 0) for name, count in WIDE.items()}
    assert building(EAGER, WIDE, job(), **full) == ["h1"], "there will be, once others have ended"


def test_as_many_templates_are_built_at_once_as_the_waiting_jobs_need() -> None:
    """h1 will hold four VMs of two CPUs, and h2 two."""
    assert building(EAGER, WIDE, *[job()] * 4) == ["h1"]
    assert building(EAGER, WIDE, *[job()] * 5) == ["h1", "h2"]
    assert building(EAGER, WIDE, *[job()] * 7) == ["h1", "h2", "h3"]
    assert building(EAGER, WIDE, job(nodes=7)) == ["h1", "h2", "h3"], "one job of several VMs"
    assert building(replace(EAGER, provisioning=4), WIDE, *[job()] * 7) == ["h1"], "no more VMs are made at once"


def test_a_template_is_built_elsewhere_where_clones_queue_for_longer_than_that_takes() -> None:
    """A clone each five seconds from one template: the third job would wait for ten."""
    cpus, slow = {"h1": 64, "h2": 64}, replace(EAGER, rates={CloneKind.INSTANT: 0.2})
    hosts = {name: Host(name, Size(64, 1 << 16, 1 << 16), frozenset({"instant"}), images=IMAGES) for name in cpus}
    ready = template(TemplateState.READY, host="h1")
    for takes, built in ((9.0, ["h2"]), (11.0, [])):
        jobs = [attempt(AttemptState.QUEUED, id=n, job=str(n), request=job()) for n in (1, 2, 3)]
        shown = {a.job.job_id: Job(a.job, "hello", 1000, JobState.PENDING, a.request, rank=a.id) for a in jobs}
        world = world_of(SchedulerView(shown), HypervisorView(hosts, {}, as_ready([ready])), NOW,
                         forecast=Forecast(paced={("h1", "slim", CloneKind.INSTANT): NOW + 10.0}))  # fmt: skip
        here = state(*jobs, ready, now=NOW)
        plan(here, world, [], NOW, replace(slow, template_seconds=takes))
        assert [row.host for row in here.templates.values() if row.state is TemplateState.BUILDING] == built
        assert ("; the template of image slim is being built on h2" in str(here.reasons[1])) is bool(built)


# --- policies of a site -----------------------------------------------------------------------------


def last(request: PlacementRequest, hosts: Sequence[CandidateHost], seed: str) -> list[str]:
    return [hosts[-1].name] * request.vms


def test_a_policy_of_the_site_is_told_what_it_needs_and_followed() -> None:
    asked: list[tuple[PlacementRequest, Sequence[CandidateHost], str]] = []

    def own(request: PlacementRequest, hosts: Sequence[CandidateHost], seed: str) -> list[str]:
        asked.append((request, hosts, seed))
        return last(request, hosts, seed)

    here, placed = admit(replace(EAGER, placements={"own": own}), job(2, "own", cpus=4), job(1, "own", cpus=8))
    assert placed == {1: ["h3", "h3"], 2: ["h3"]} and not here.placement_faults
    (first, hosts, seed), (_, others, other_seed) = asked
    assert (first.vms, first.node, first.image) == (2, Size(4, 100), "slim") and seed != other_seed
    assert [(one.name, one.capacity.cpus, one.free.cpus, one.holds) for one in hosts] == [
        ("h1", 8, 8, 2), ("h2", 4, 4, 1), ("h3", 16, 16, 4),
    ]  # fmt: skip
    assert [(one.name, one.free.cpus) for one in others] == [("h1", 8), ("h3", 8)], "h2 is too small"
    assert all(one.claim.cpus == 4 and one.claim.memory > 100 for one in hosts)


def raises(*_: object) -> list[str]:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (raises, "it raised ZeroDivisionError"),
        (lambda *_: ["h1"], "it chose 1 host for 2 VMs"),
        (lambda *_: ["h1", "h9"], "it chose 'h9', which is none of the hosts that fit"),
        (lambda *_: ["h2", "h2"], "it chose h2 for 2 VMs, and 1 fit there"),
        (lambda *_: "h1", "it must return a list of host names"),
        (lambda *_: None, "it must return a list of host names"),
        (lambda *_: [1, 2], "it must return a list of host names"),
    ],
)
def test_a_policy_that_fails_is_passed_over_and_reported(policy: object, why: str) -> None:
    here, placed = admit(replace(EAGER, placements={"own": policy}), job(2, "own", cpus=4), job(1))  # type: ignore[dict-item]
    assert placed[1] == ["h3", "h3"] and placed[2], "the default places the VMs, and the loop goes on"
    assert here.placement_faults["own"].startswith(why)
    assert "by worst-fit among 3 of 3 hosts with its template, because own failed" in text_of(here.attempts[1].choice)
    assert "own" not in text_of(here.attempts[2].choice)
    alert = alerts.PLACEMENT(policy="own", reason=here.placement_faults["own"])
    assert why in alert.message and alert.name == "placement-own"


def test_a_policy_that_works_again_is_reported_no_more() -> None:
    fails = [True, False]

    def own(request: PlacementRequest, hosts: Sequence[CandidateHost], seed: str) -> list[str]:
        if fails.pop(0):
            raise ValueError("not yet")
        return last(request, hosts, seed)

    here, placed = admit(replace(EAGER, placements={"own": own}), job(1, "own"), job(1, "own"))
    assert not here.placement_faults and placed[2] == ["h3"]


def test_a_policy_that_the_settings_no_longer_name_is_reported() -> None:
    here, placed = admit(EAGER, job(1, "gone"))
    assert placed == {1: ["h3"]} and here.placement_faults == {"gone": "the settings name no such placement policy"}


def test_a_policy_of_the_site_is_not_asked_where_there_is_no_room() -> None:
    here, placed = admit(replace(EAGER, placements={"own": raises}), job(4, cpus=4), job(5, "own", cpus=4))
    assert set(placed) == {1} and not here.placement_faults
    assert set(here.reasons) == {2} and str(here.reasons[2]) == "waiting for capacity: the hosts are full"


# --- packages ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The example is installed as a site would install it."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation",
               "--target", str(directory), str(EXAMPLE)]  # fmt: skip
    subprocess.run(command, check=True, timeout=120)
    sys.path.insert(0, str(directory))
    yield
    sys.path.remove(str(directory))
    sys.modules.pop("site_placement", None)


def test_a_package_registers_a_policy(installed: None) -> None:
    assert placements.names() == [*(one.value for one in Placement), "same-rack"]
    placements.check("same-rack")
    racks = {"r1n1": 4, "r1n2": 4, "r2n1": 6, "r2n2": 4, "r3n1": 2}
    policy = replace(EAGER, placements=placements.load(), placement="same-rack")
    here, placed = admit(policy, job(5), cpus=racks)
    assert {name[:2] for name in placed[1]} == {"r2"} and not here.placement_faults
    assert "by same-rack" in text_of(here.attempts[1].choice)


def register(monkeypatch: pytest.MonkeyPatch, **policies: str) -> None:
    from importlib.metadata import EntryPoint, EntryPoints

    found = EntryPoints(EntryPoint(name.replace("_", "-"), value, placements.GROUP) for name, value in policies.items())
    monkeypatch.setattr(placements, "entry_points", lambda group: found.select(group=group))


def test_a_package_that_cannot_be_loaded_is_reported_when_its_policy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, missing="no.such.module:policy", constant="multiverse.core.capacity.placement_policies:DRAWS")
    loaded = placements.load()
    for name, why in (("missing", "no.such.module:policy cannot be loaded"), ("constant", "is no function")):
        here, placed = admit(replace(EAGER, placements=loaded), job(1, name))
        assert placed == {1: ["h3"]} and why in here.placement_faults[name]


def test_a_package_replaces_no_built_in_policy_and_its_names_are_words(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, pack="os:getcwd", Fast="os:getcwd", fine_one="os:getcwd")
    assert placements.names() == [*(one.value for one in Placement), "fine-one"]
