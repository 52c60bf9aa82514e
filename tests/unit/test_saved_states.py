"""The states of saved jobs in their storage: their room, their age, what cannot be written, and what is damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.errors import Damaged, Exhausted, Gone, MultiverseError, Refused
from multiverse.core.model.basics import ClaimKey, Size
from multiverse.core.model.host import Drain
from multiverse.core.model.identity import UserSeen
from multiverse.core.model.job import AttemptState, JobRef, NodeState, Request, SaveWish
from multiverse.core.model.saved import SavedSeen, SavedState
from multiverse.core.model.vm import VmState
from multiverse.core.model.world import World
from multiverse.core.saving import unexplained_states
from multiverse.core.transition import Command, Done, EffectKind
from tests.unit.planner_harness import POLICY
from tests.unit.rows import SOURCE
from tests.unit.test_saved_jobs import STORAGE, Site

S, A, V = SavedState, AttemptState, VmState
GIB = 1 << 30


@pytest.fixture
def site() -> Site:
    return Site()


def fail_to_write(site: Site, times: int = 1) -> None:
    for _ in range(times):
        site.run(Done(site.saved.key, EffectKind.SAVE, str(S.WRITING), Exhausted("no room")))


def keep(site: Site) -> None:
    """The host keeps the VM, which it shows as saved and no more as a VM."""
    site.files[site.saved.name] = SavedSeen(site.saved.name, site.saved.token, 0, "", kept=True)
    site.vms.pop(site.name, None)
    site.done()
    site.run()


def to_kept(site: Site) -> None:
    site.to_writing()
    fail_to_write(site, 3)
    keep(site)
    for _ in range(3):
        site.run()
        site.clear()


def damage(site: Site, error: type[MultiverseError] = Damaged) -> None:
    """The restored VM cannot be created."""
    vm = site.vm
    assert vm.state is V.PLANNED and vm.saved == site.saved.name
    site.run(Done(vm.key, EffectKind.CREATE, str(V.PLANNED), error("its files are not as they were")))
    for _ in range(4):
        site.run()
        site.clear()


def attempt_state(site: Site) -> AttemptState:
    return site.rows.attempts[max(site.rows.attempts)].state


# --- room ------------------------------------------------------------------------------------------


def refused(site: Site) -> str:
    site.run(Command("save", job="7"))
    return " ".join(str(error) for _, error in site.state.refusals)


@pytest.mark.parametrize("quota", ["save_user_quota", "save_site_quota"])
def test_a_state_that_may_exceed_a_quota_is_not_begun(site: Site, quota: str) -> None:
    site.policy = replace(POLICY, **{quota: 200 << 20})  # type: ignore[arg-type]
    said = refused(site)
    assert "cannot be saved" in said and quota.replace("save_", "save.") in said and not site.rows.saved
    site.policy = replace(POLICY, **{quota: 4 * GIB})  # type: ignore[arg-type]
    assert not refused(site) and site.saved.state is S.PREPARING


def test_a_state_counts_as_its_bytes_once_it_is_complete(site: Site) -> None:
    site.to_writing()
    bound = site.saved.claimed
    assert bound >= site.saved.size.memory << 20
    site.files[site.saved.name] = SavedSeen(site.saved.name, site.saved.token, 46 << 20, STORAGE.name)
    site.done()
    site.run()
    assert site.saved.claimed == 46 << 20 < bound


def test_a_storage_without_room_is_not_written_to(site: Site) -> None:
    site.hosts["h1"] = replace(site.hosts["h1"], storage_free=200 << 20)
    assert "has room for 200 MiB" in refused(site) and not site.rows.saved
    site.hosts["h1"] = replace(site.hosts["h1"], storage_free=64 * GIB)
    assert not refused(site) and site.saved.state is S.PREPARING


# --- what cannot be written -------------------------------------------------------------------------


def test_what_cannot_be_written_is_tried_again_a_few_times(site: Site) -> None:
    site.to_writing()
    fail_to_write(site, 2)
    assert site.saved.state is S.WRITING and "no room" in str(site.saved.reason)
    fail_to_write(site)
    assert site.saved.state is S.KEEPING and site.vm.state is V.SERVING


def test_what_cannot_be_written_goes_on_in_place(site: Site) -> None:
    first = site.vm
    to_kept(site)
    assert (site.saved.state, site.saved.kept) == (S.STORED, "h1") and site.saved.claimed == 0
    for _ in range(3):
        site.run()
    again = site.vm
    assert again.id != first.id and (again.saved, again.host) == (site.saved.name, "h1")
    assert again.token not in ("", first.token), "what comes late for the VM that was kept is not for this one"
    assert site.state.claims.get(ClaimKey(site.saved.key, "h1")) is None, "the VM has the room of the state"
    assert [claim.owner for claim in site.rows.claims if claim.owner.kind == "vm"] == [again.key]


def test_a_job_in_memory_goes_on_though_its_host_is_drained(site: Site) -> None:
    site.to_writing()
    fail_to_write(site, 3)
    site.run(Command("drain", "h1", drain=Drain(0.0, "a fan")))
    keep(site)
    for _ in range(4):
        site.run()
        site.clear()
        if site.vm.saved:
            break
    assert (site.vm.saved, site.vm.host) == (site.saved.name, "h1")
    assert not [one for one in site.rows.attempts.values() if one.quarantined]


def test_a_job_in_memory_goes_on_though_the_first_one_waits_for_its_room(site: Site) -> None:
    large = Size(4, 1000)  # all CPUs of the host
    site.to_writing()
    fail_to_write(site, 3)
    site.job("3", request=Request(1, large), ref=JobRef("3", 100), rank=-1)
    keep(site)
    for _ in range(4):
        site.run()
        site.clear()
        if site.vm.saved:
            break
    assert site.vm.saved == site.saved.name
    assert [one.state for one in site.rows.attempts.values() if one.job.job_id == "3"] == [A.QUEUED]


def test_a_vm_that_its_host_keeps_has_not_died(site: Site) -> None:
    """It is shown no more before the effect has ended, and before the scheduler was read after a restart."""
    site.to_writing()
    fail_to_write(site, 3)
    site.effect_ended_at[site.saved.key] = float("inf")
    site.files[site.saved.name] = SavedSeen(site.saved.name, site.saved.token, 0, "", kept=True)
    site.vms.pop(site.name)
    site.scheduler_known = False
    site.run()
    assert (site.saved.state, site.vm.state) == (S.KEEPING, V.SERVING)
    site.scheduler_known = True
    site.run()
    assert (site.saved.state, site.saved.kept) == (S.STORED, "h1")
    assert site.vm.state is V.RELEASING, "it is needed no more, and did not fail"


def test_what_is_kept_in_memory_claims_it(site: Site) -> None:
    first = site.vm
    before = site.state.claims.get(ClaimKey(first.key, "h1"))
    site.to_writing()
    fail_to_write(site, 3)
    keep(site)
    after = site.state.claims.get(ClaimKey(site.saved.key, "h1"))
    assert before is not None and after is not None and after.size == before.size
    assert site.state.claims.get(ClaimKey(first.key, "h1")) is None


def test_a_vm_that_did_not_take_it_over_leaves_it_there(site: Site) -> None:
    to_kept(site)
    for _ in range(3):
        site.run()
    vm = site.vm
    site.run(Done(vm.key, EffectKind.CREATE, str(V.PLANNED), Exhausted("no room for its manifest")))
    for _ in range(4):
        site.run()
        site.clear()
    assert site.saved.state is S.STORED
    assert (
        len([claim for claim in site.rows.claims if claim.domain == "h1" and claim.owner.kind in ("vm", "saved")]) == 1
    )


def test_the_room_of_a_vm_that_did_not_take_it_over_is_given_to_no_other_job(site: Site) -> None:
    to_kept(site)
    for _ in range(3):
        site.run()
    site.job("3", request=Request(1, Size(4, 1000)), ref=JobRef("3", 100), rank=-1)  # all CPUs of the host
    site.run(Done(site.vm.key, EffectKind.CREATE, str(V.PLANNED), Gone("the daemon was restarted")))
    for _ in range(6):
        site.run()
        site.clear()
        assert [one.state for one in site.rows.attempts.values() if one.job.job_id == "3"] == [A.QUEUED]
        assert [one.owner.kind for one in site.rows.claims if one.domain == "h1" and one.owner.kind != "template"]


@pytest.mark.parametrize("agreed", [False, True])
def test_what_was_lost_with_the_memory_of_its_host_is_given_up(agreed: bool) -> None:
    site = Site(request=Request(1, Size(1, 100), save=SaveWish(restart=agreed)))
    site.to_writing()
    fail_to_write(site, 3)
    site.restart(1, held=True, eligible=False)
    keep(site)
    site.files.clear()
    site.run()
    if not agreed:
        assert site.saved.state is S.HOLDING and "memory of h1 was lost" in str(site.saved.reason)
        site.done()
        site.run()
    assert site.saved.state is S.DISCARDING
    site.done()
    site.run()
    assert not site.rows.saved
    assert not any(claim.owner.kind == "saved" for claim in site.rows.claims)


def test_a_vm_that_is_kept_no_more_is_given_up_as_it_is_taken_over(site: Site) -> None:
    to_kept(site)
    site.files.clear()
    damage(site)
    assert site.saved.state is S.HOLDING and site.saved.ends


def test_a_host_that_keeps_a_state_in_its_memory_is_not_removed(site: Site) -> None:
    site.to_writing()
    fail_to_write(site, 3)
    site.restart(1, held=True, eligible=False)
    keep(site)
    for _ in range(4):
        site.run(Command("drop", "h1", "slim"))
        site.templates.clear()
        site.clear()
    site.run(Command("remove", "h1"))
    assert "saved jobs in its memory (7)" in str(site.state.refusals[0][1])


# --- age --------------------------------------------------------------------------------------------


def test_a_state_that_waits_for_too_long_is_discarded_and_its_job_held(site: Site) -> None:
    site.policy = replace(POLICY, save_keep=86400.0)
    site.to_stored()
    site.restart(1, held=True, eligible=False)
    site.run()
    site.pass_time(86000.0)
    site.run()
    assert site.saved.state is S.STORED
    site.pass_time(500.0)
    site.run()
    assert site.saved.state is S.HOLDING and "discarded after 1 d" in str(site.saved.reason)
    site.run()
    assert site.saved.state is S.DISCARDING


# --- what is damaged --------------------------------------------------------------------------------


def test_the_job_of_a_damaged_state_is_held_with_the_reason(site: Site) -> None:
    site.to_restored()
    damage(site)
    assert site.saved.state is S.HOLDING and "not as they were" in str(site.saved.reason)
    assert attempt_state(site) is A.QUEUED and not site.rows.vms, "it does not begin anew"
    site.restart(1, held=True, eligible=False)
    site.run()
    assert site.saved.state is S.STORED and site.saved.hold, "the state is kept: perhaps it is mended"
    site.restart(1, held=False, eligible=True)
    for _ in range(3):
        site.run()
    assert site.vm.saved == site.saved.name, "released, it is tried again"


def test_the_job_of_a_damaged_state_begins_anew_if_its_user_agreed() -> None:
    site = Site(request=Request(1, Size(1, 100), save=SaveWish(restart=True)))
    site.to_restored()
    damage(site)
    assert site.saved.state is S.DISCARDING
    assert attempt_state(site) is A.CLAIMED and not site.vm.saved, "in a VM that is not restored"


def test_a_storage_out_of_reach_is_waited_for(site: Site) -> None:
    site.to_restored()
    damage(site, Gone)
    assert site.saved.state is S.STORED
    site.hosts["h1"] = replace(site.hosts["h1"], storage=None)
    for _ in range(30):
        site.pass_time(60.0)
        site.run()
        site.clear()
    assert site.saved.state is S.STORED and attempt_state(site) is A.QUEUED and not site.rows.vms


def test_a_vm_that_cannot_be_restored_again_and_again_does_not_end_its_job(site: Site) -> None:
    site.to_queued()
    for _ in range(POLICY.attempts + 2):
        for _ in range(8):
            site.pass_time(POLICY.retry_limit)
            site.run()
            if any(vm.state is V.PLANNED for vm in site.rows.vms.values()):
                break
            site.clear()
        if site.saved.state is not S.STORED:
            break
        site.run(Done(site.vm.key, EffectKind.CREATE, str(V.PLANNED), Exhausted("no")))
    assert site.saved.state is S.HOLDING and "cannot go on" in str(site.saved.reason)
    assert attempt_state(site) in (A.RETURNING, A.RECLAIMING, A.QUEUED)


def test_an_operator_lets_a_held_job_begin_anew(site: Site) -> None:
    site.to_restored()
    damage(site)
    site.restart(1, held=True, eligible=False)
    site.run()
    site.run(Command("resume_saved", job="7", anew=True))
    assert site.saved.state is S.RESUMING
    site.restart(1, held=False, eligible=True)
    site.done()
    site.run()
    assert site.saved.state is S.DISCARDING
    site.template()
    for _ in range(3):
        site.run()
    assert site.vm.state is V.PLANNED and not site.vm.saved


def test_a_job_that_is_being_saved_does_not_begin_anew(site: Site) -> None:
    site.to_writing()
    site.run(Command("resume_saved", job="7", anew=True))
    assert [str(error) for _, error in site.state.refusals] and site.saved.state is S.WRITING


# --- what no row explains ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "days", "swept"),
    [
        pytest.param("mvtest0-3-1", 0.0, True, id="its number was given, and its row has ended"),
        pytest.param("mvtest0-3-99", 1.0, False, id="the database may have lost its row"),
        pytest.param("mvtest0-3-99", 31.0, True, id="so long ago that any state would be discarded"),
    ],
)
def test_only_states_that_nobody_can_need_are_swept(site: Site, name: str, days: float, swept: bool) -> None:
    policy = replace(POLICY, save_keep=30 * 86400.0)
    site.to_preparing()
    site.run(Done(site.saved.key, EffectKind.PREPARE, str(S.PREPARING), Refused("it cannot")))
    site.node(site.name, NodeState.BUSY)
    site.done()
    site.run()
    assert not site.rows.saved
    written = site.state.now + site.world.epoch - days * 86400.0
    site.files[name] = SavedSeen(name, "token", 1, STORAGE.name, written)
    site.run()
    assert bool(unexplained_states(site.state, site.world, policy)) is swept


class Forgetful(Site):
    """A controller that was started again as the job was saved: it knows another user only."""

    def observe(self) -> None:
        super().observe()
        self.world = replace(self.world, users={1001: UserSeen(True, 0.0, 0.0)} if self.rows.saved else None)


def test_the_user_of_a_job_in_memory_is_looked_up_though_another_is_first() -> None:
    site = Forgetful()
    site.to_writing()
    fail_to_write(site, 3)
    site.job("3", request=Request(1, Size(4, 1000)), ref=JobRef("3", 100), rank=-1, uid=1001)
    keep(site)
    for _ in range(4):
        site.run()
        site.clear()
    assert 1000 in site.state.users_asked


@pytest.mark.parametrize("seen", [{"complete": False}, {"kept": True}])
def test_what_nobody_can_go_on_with_is_swept_at_once(site: Site, seen: dict[str, bool]) -> None:
    site.files["mvtest0-3-99"] = SavedSeen("mvtest0-3-99", "token", 0, STORAGE.name, **seen)
    site.run()
    assert unexplained_states(site.state, site.world, site.policy) == [("mvtest0-3-99", SOURCE)]


def test_of_several_hosts_that_show_a_state_always_the_same_one_sweeps_it(site: Site) -> None:
    site.files["mvtest0-3-99"] = SavedSeen("mvtest0-3-99", "token", 0, STORAGE.name, complete=False)
    site.run()
    both = World(sources=dict.fromkeys(("a", "b"), site.world.sources[SOURCE]))
    for order in (("a", "b"), ("b", "a")):
        site.state.compared.stray = dict.fromkeys(order, ("mvtest0-3-99",))
        assert unexplained_states(site.state, both, site.policy) == [("mvtest0-3-99", "a")]


def test_what_a_row_explains_is_not_swept(site: Site) -> None:
    site.to_stored()
    assert site.world.views and not unexplained_states(site.state, site.world, site.policy)
