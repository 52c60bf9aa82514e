"""A database that was restored from a copy is older than a VM that was restored from a state. Its rows know the name of
that VM as an earlier one's. The later VM has another token, its node another tag, and its job goes on there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.machines.tables import permitted_effects
from multiverse.core.model.job import AttemptState, JobRef, JobState, Node, NodeState
from multiverse.core.model.saved import SavedSeen, SavedState
from multiverse.core.model.vm import Vm, VmCondition, VmSeen, VmState
from multiverse.core.transition import EffectKind
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
