"""A database that was restored from a copy is older than a VM that was restored from a state. Its rows know the name of
that VM as an earlier one's. The later VM has another token, its node another tag, and its job goes on there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.errors import Broken
from multiverse.core.machines.tables import permitted_effects
from multiverse.core.model.job import AttemptState, JobRef, JobState, Node, NodeState
from multiverse.core.model.saved import SavedSeen, SavedState
from multiverse.core.model.vm import Vm, VmCondition, VmSeen, VmState
from multiverse.core.transition import Done, EffectKind
from tests.unit.planner_harness import PlannerHarness
from tests.unit.rows import SOURCE, vm
from tests.unit.test_saved_jobs import STORAGE, Site

S, A, V = SavedState, AttemptState, VmState
TAG = "mv_42"  # of an attempt whose row was lost


@pytest.fixture
def site() -> Site:
    return Site()


def show_later_vm(site: Site, host: str = "h1", restart: int = 1) -> None:
    """The next run goes on in a VM that was restored on a host, under the same name."""
    if host not in site.hosts:
        site.hosts[host] = replace(site.hosts["h1"], name=host)
    site.vms[site.name] = VmSeen(site.name, host, VmCondition.RUNNING, token="of the later VM")
    site.nodes[site.name] = Node(site.name, NodeState.BUSY, ("slim", TAG))
    ref = JobRef("7", 500, restart)
    site.job(state=JobState.RUNNING, ref=ref, nodes=(site.name,), gated=False, pinned=TAG)


def settle(site: Site) -> set[EffectKind]:
    """Effects end, and change nothing: what they are about is gone. Returns those that are about attempts."""
    kinds = set()
    for _ in range(8):
        for row in (*site.rows.vms.values(), *site.rows.saved.values()):
            site.ended(row.key)
        site.run()
        kinds.update(effect.kind for effect, _ in permitted_effects(site.state) if effect.key.kind == "attempt")
    return kinds


@pytest.mark.parametrize("host", ["h1", "h2"])
@pytest.mark.parametrize("until", ["to_preparing", "to_freezing", "to_cutting", "to_writing", "to_stored"])
def test_the_later_vm_is_found_and_its_job_left_alone(site: Site, until: str, host: str) -> None:
    earlier = site.vm
    getattr(site, until)()
    show_later_vm(site, host)
    site.files.clear()
    on_jobs = settle(site)
    (found,) = site.rows.vms.values()
    assert found.id != earlier.id and (found.name, found.host, found.state) == (site.name, host, V.ORPHAN)
    assert found.token == "of the later VM" and found.job_id == "7"
    assert [claim.owner for claim in site.rows.claims if claim.owner.kind == "vm"] == [found.key]
    assert not site.rows.attempts and not site.rows.saved and not on_jobs


def test_an_attempt_that_waits_for_the_run_that_goes_on_there_is_given_up(site: Site) -> None:
    """The copy was made as the next run waited."""
    site.to_stored()
    assert [one.state for one in site.rows.attempts.values() if one.job.restarts == 1] == [A.QUEUED]
    show_later_vm(site)
    settle(site)
    assert not site.rows.attempts and [one.state for one in site.rows.vms.values()] == [V.ORPHAN]


def test_a_vm_of_which_only_the_node_is_left_does_not_hide_the_later_one(site: Site) -> None:
    site.to_stored()
    site.vms.clear()
    site.node(site.name, NodeState.DOWN)
    for _ in range(4):
        site.ended(site.vm.key)
        site.run()
    assert site.vm.state is V.DELETING
    show_later_vm(site, "h2")
    site.run()
    site.run()
    assert (site.vm.state, site.vm.host) == (V.ORPHAN, "h2")


@pytest.mark.parametrize("until", ["to_writing", "to_stored"])
def test_the_state_is_given_up_once_the_next_run_goes_on_without_it(site: Site, until: str) -> None:
    getattr(site, until)()
    show_later_vm(site)
    site.run()
    assert site.saved.state is S.DISCARDING and "does not go on with its state" in str(site.saved.reason)


def test_a_state_is_kept_while_the_next_run_goes_on_in_the_vm_that_is_restored_from_it(site: Site) -> None:
    site.to_thawing()
    assert site.saved.state is S.THAWING and site.vm.saved == site.saved.name
    site.files[site.saved.name] = SavedSeen(site.saved.name, site.saved.token, 1, STORAGE.name)
    site.run()
    assert site.saved.state is S.THAWING


# --- jobs that are frozen, and no row tells why --------------------------------------------------------


FOUND = [{"frozen": True}, {"freezing": True}]
"""As its host recorded when the freeze was done, or begun."""


def freeze(site: PlannerHarness, name: str, **how: bool) -> None:
    site.vms[name] = replace(site.vms[name], **how)


@pytest.mark.parametrize("how", FOUND)
def test_a_job_that_is_found_frozen_goes_on(site: Site, how: dict[str, bool]) -> None:
    """The copy of the database was made before somebody had the job saved."""
    freeze(site, site.name, **how)
    site.run()
    assert (site.saved.state, site.saved.job, site.saved.vm) == (S.UNDOING, JobRef("7", 500), site.vm.id)
    assert [effect.kind for row, effect in permitted_effects(site.state) if row == site.saved] == [EffectKind.UNDO]
    freeze(site, site.name, frozen=False, freezing=False)
    site.done()
    for _ in range(2):
        site.run()
    assert not site.rows.saved and site.vm.state is V.SERVING and site.attempt().state is A.ALLOCATED


@pytest.mark.parametrize("how", FOUND)
def test_a_frozen_job_goes_on_in_an_orphan(how: dict[str, bool]) -> None:
    """The database was lost."""
    harness = PlannerHarness()
    harness.vms["mvtest0-9"] = VmSeen("mvtest0-9", "h1", VmCondition.RUNNING, token="t", address="10.9.1.9", **how)  # type: ignore[arg-type]
    harness.node("mvtest0-9", NodeState.DRAINED)
    harness.jobs["7"] = harness.job(state=JobState.RUNNING, pinned=TAG)._replace(nodes=("mvtest0-9",))
    for _ in range(3):
        harness.run()
    (saved,) = harness.rows.saved.values()
    (orphan,) = harness.rows.vms.values()
    assert (saved.state, saved.job.job_id, saved.vm, saved.token) == (S.UNDOING, "7", orphan.id, "t")
    assert orphan.state is V.ORPHAN and "no record explained it" in str(saved.reason)
    harness.run(Done(saved.key, EffectKind.UNDO, str(S.UNDOING), Broken("its guest was cut off from its run")))
    assert next(iter(harness.rows.vms.values())).state is V.ENDING


@pytest.mark.parametrize("until", ["to_freezing", "to_undoing", "to_restored"])
def test_a_job_is_left_frozen_while_a_row_tells_why(site: Site, until: str) -> None:
    getattr(site, until)()
    before = [one.id for one in site.rows.saved.values()]
    if site.name in site.vms:
        freeze(site, site.name, frozen=True, freezing=True)
    site.run()
    assert [one.id for one in site.rows.saved.values()] == before


def test_a_frozen_job_whose_run_is_over_is_left_alone(site: Site) -> None:
    freeze(site, site.name, frozen=True)
    site.restart(1)
    site.run()
    assert not site.rows.saved


# --- whose a node is -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "features", "owns"),
    [
        pytest.param({"attempt": 7}, ("slim", "mv_7"), True, id="the tag of its attempt"),
        pytest.param({"attempt": 7}, ("slim", "mv_v1"), True, id="the tag that it got as a spare"),
        pytest.param({"attempt": 7}, ("slim", "mv_8"), False, id="the tag of another attempt"),
        pytest.param({"attempt": 7}, ("slim",), True, id="no tag"),
        pytest.param({}, ("slim", "mv_8"), True, id="it was found, and nobody knows its tag"),
    ],
)
def test_a_vm_knows_its_node_by_the_tag(more: dict[str, object], features: tuple[str, ...], owns: bool) -> None:
    row: Vm = vm(V.SERVING, **more)
    assert row.owns(features) is owns and row.place.source == SOURCE
