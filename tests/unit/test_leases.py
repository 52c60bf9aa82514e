"""Leases: when a host is leased and given back, and what the end of a pilot means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.bundles.qemu.platform import PilotTransport, connect_agents
from multiverse.config import Settings
from multiverse.controller.learned import ForecastRecorder
from multiverse.core.capacity.sizes import job_limits
from multiverse.core.context import Context
from multiverse.core.errors import Broken, Refused, Unknown
from multiverse.core.leases import leasable_hosts
from multiverse.core.machines.host import fences
from multiverse.core.machines.lease import TOLD_WITHIN, step_lease, unexplained_pilots
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.eviction import cause_of
from multiverse.core.model.host import Drain, Host, HostState, KnownHost
from multiverse.core.model.job import (
    AttemptState,
    JobState,
    Lease,
    LeaseState,
    PilotSeen,
    PilotState,
    Request,
    SchedulerView,
)
from multiverse.core.model.reason import Why, text_of
from multiverse.core.model.saved import SavedState, Storage
from multiverse.core.model.vm import TemplateState, Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Row
from multiverse.core.rebalance.plan import proposals
from multiverse.core.transition import Change, Command, Done, EffectKind, Event, Move
from tests.unit.lease_harness import LEASING, PHYSICAL, LeaseHarness
from tests.unit.planner_harness import context_of
from tests.unit.rows import IMAGES, lease, state, vm, world_of

L, P = LeaseState, PilotState


# --- when one is asked for ---------------------------------------------------------------------------


def test_a_lease_is_asked_for_when_a_job_has_waited_for_room() -> None:
    site = LeaseHarness()
    site.full()
    site.waiting_job()
    site.run()
    site.pass_time(PHYSICAL.min_wait - 3.0)
    site.run()
    assert not site.state.leases, "not before it has waited long enough"
    site.pass_time(3.0)
    site.run()
    lease = site.lease
    assert (lease.state, lease.spec.partition, lease.spec.time_limit) == (L.PLANNED, "physical", 3600.0)
    assert lease.name.startswith("lease-test0-") and lease.spec.token and site.effects() == [EffectKind.REQUEST]
    assert lease.name not in site.state.hosts, "its host is none of the site's as yet"


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({"size": Size(9, 100)}, "no node is so large"),
        ({"size": Size(4, 9000)}, "nor has so much memory"),
        ({"limit": 3600.0}, "it would not end within a lease"),
        ({"limit": 3520.0}, "nor would it if the agent and the template took their time"),
        ({"limit": None}, "nobody knows when it ends"),
        ({"requeues": False}, "it could not be queued again"),
        ({"eligible": False}, "it waits for something else"),
        ({"nodes": 5}, "as many nodes may not be leased"),
    ],
)
def test_no_lease_is_asked_for_a_job_that_could_not_be_on_it(job: dict[str, object], why: str) -> None:
    site = LeaseHarness()
    site.full()
    site.waiting_job(**job)  # type: ignore[arg-type]
    site.run_for(60.0)
    assert not site.state.leases, why


def test_a_site_may_let_jobs_that_cannot_be_queued_again_use_its_leases() -> None:
    site = LeaseHarness(replace(LEASING, leases=(replace(PHYSICAL, preemptable_ok=True),)))
    site.full()
    site.waiting_job(requeues=False)
    site.run_for(14.0)
    assert site.lease.state is L.PLANNED


def test_nothing_is_leased_from_a_partition_of_which_nothing_is_known() -> None:
    site = LeaseHarness()
    site.leasable = {}
    site.full()
    site.waiting_job(size=Size(4, 100))
    site.run_for(30.0)
    assert not site.state.leases


def test_capacity_that_is_being_leased_is_counted_before_more_is_asked_for() -> None:
    """A node of 8 CPUs holds two of these jobs; of four, two nodes are needed, and no more than two may be leased."""
    site = LeaseHarness()
    site.full()
    site.waiting_job("7")
    site.waiting_job("8", rank=1)
    site.run_for(30.0)
    assert len(site.state.leases) == 1
    site.waiting_job("9", rank=2)
    site.run_for(30.0)
    assert len(site.state.leases) == 2
    for number in range(10, 14):
        site.waiting_job(str(number), rank=number)
    site.run_for(30.0)
    assert len(site.state.leases) == 2


def test_a_job_of_several_nodes_gets_all_of_its_leases_or_none() -> None:
    site = LeaseHarness()
    site.full()
    site.waiting_job(nodes=4)
    site.run_for(30.0)
    assert len(site.state.leases) == 2
    site.state.leases.clear()
    other = LeaseHarness(replace(LEASING, leases=(replace(PHYSICAL, most=1),)))
    other.full()
    other.waiting_job(nodes=4)
    other.run_for(30.0)
    assert not other.state.leases


def test_a_job_that_may_have_one_vm_on_a_host_gets_as_many_hosts() -> None:
    site = LeaseHarness()
    request = Request(2, Size(1, 100), per_host=1)
    site.waiting_job(request=request)
    site.run_for(14.0)
    assert len(site.state.leases) == 1, "one of its VMs has room on the static host, the other needs another host"


def test_a_job_that_fits_only_on_a_leased_host_waits_and_is_not_cancelled() -> None:
    site = LeaseHarness()
    site.waiting_job(size=Size(6, 1000))
    site.run()
    assert site.reasons["7"] == "waiting for a host to be leased"
    site.run_for(14.0)
    assert site.lease.state is L.PLANNED and site.attempt().state == "queued"


def test_a_lease_that_is_not_needed_any_more_before_it_is_granted_is_given_up() -> None:
    site = LeaseHarness()
    lease = site.until_asked()
    site.pilot(lease)
    site.run()
    assert site.lease.state is L.WAITING and site.effects() == []
    del site.jobs["7"]
    site.run()
    assert site.lease.state is L.RELEASING and site.effects() == [EffectKind.GIVE_BACK]


def test_after_leases_of_no_use_nothing_is_leased_for_a_while() -> None:
    site = LeaseHarness()
    site.rest = {"physical": site.clock.time + 100.0}
    site.full()
    site.waiting_job()
    site.run_for(40.0)
    assert not site.state.leases
    site.pass_time(100.0)
    site.run()
    assert site.lease.state is L.PLANNED


# --- its pilot ---------------------------------------------------------------------------------------


def test_the_host_of_a_lease_belongs_to_the_site_once_its_pilot_runs_and_takes_vms_once_it_is_in_sight() -> None:
    site = LeaseHarness()
    lease = site.until_asked()
    site.pilot(lease, state=P.RUNNING, node="p1", ends=site.clock.wall() + 3600.0)
    site.run()
    assert (site.lease.state, site.lease.pilot, site.lease.node) == (L.STARTING, "50", "p1")
    assert site.state.hosts[lease.name].id == -lease.id and lease.name in site.state.leased_hosts()
    assert lease.name in site.state.closed
    site.answering.add(lease.name)
    site.run()
    assert site.lease.state is L.IDLE and lease.name not in site.state.closed
    site.with_template()
    assert site.lease.state is L.HELD and site.attempt(2).state == "claimed"
    assert [vm.host for vm in site.all_vms(2)] == [lease.name]


def test_the_agent_of_a_pilot_has_a_time_to_answer() -> None:
    site = LeaseHarness()
    lease = site.until_asked()
    site.pilot(lease, state=P.RUNNING, node="p1")
    site.run()
    site.run_for(PHYSICAL.start_timeout - 4.0)
    assert site.lease.state is L.STARTING
    site.scheduler_known = False
    site.run_for(60.0)
    assert site.lease.state is L.STARTING, "while nothing is known of the scheduler, nothing is concluded"
    site.scheduler_known = True
    site.run()
    assert site.lease.state is L.RELEASING and "did not answer" in text_of(site.lease.reason)


def test_a_lease_whose_request_is_refused_is_given_up_and_one_without_a_reply_is_asked_for_again() -> None:
    site = LeaseHarness()
    lease = site.until_asked()
    site.run(Done(lease.key, EffectKind.REQUEST, "planned", Unknown("no reply")))
    assert site.lease.state is L.PLANNED
    site.run(Done(lease.key, EffectKind.REQUEST, "planned", Refused("no such account")))
    assert site.lease.state is L.RELEASING and text_of(site.lease.reason) == "no such account"


def test_absence_counts_only_after_the_last_cancellation_has_ended() -> None:
    site = LeaseHarness()
    lease = site.until_asked()
    site.run(Done(lease.key, EffectKind.REQUEST, "planned", Refused("no such account")))
    site.run()
    assert site.lease.state is L.RELEASING, "its cancellation has not ended"
    site.ended(lease.key)
    site.run()
    assert lease.id not in site.state.leases and L.GONE in [one.state for one in site.store.leases()]


def test_a_pilot_that_is_granted_after_its_lease_was_given_up_is_cancelled() -> None:
    site = LeaseHarness()
    lease = site.until_asked()
    site.run(Done(lease.key, EffectKind.REQUEST, "planned", Refused("no such account")))
    site.pilot(lease, state=P.RUNNING, node="p1")
    site.ended(lease.key)
    site.run()
    assert site.lease.state is L.RELEASING and site.effects() == [EffectKind.GIVE_BACK]
    site.ends(state=P.ENDED, clean=True)
    site.ended(lease.key)
    site.run()
    assert lease.id not in site.state.leases
    late = SchedulerView(pilots={"51": PilotSeen(lease.name, lease.spec.token, P.RUNNING)})
    assert unexplained_pilots(site.state.leases, late) == [(lease.name, "51")]


def test_pilots_that_no_lease_explains_are_found() -> None:
    site = LeaseHarness()
    lease = site.until_asked()
    site.pilot(lease, "60", state=P.PENDING)
    site.pilot(lease, "61", state=P.RUNNING, node="p1")
    site.run()
    assert site.lease.pilot == "61", "the one that has come farthest"
    site.pilots["62"] = PilotSeen(lease.name, "another token", P.PENDING)
    site.pilots["63"] = PilotSeen("lease-test0-zzz", "t", P.RUNNING)
    site.pilots["64"] = PilotSeen("lease-test0-zzy", "t", P.ENDED)
    site.observe()
    assert site.world.scheduler is not None
    found = unexplained_pilots(site.state.leases, site.world.scheduler.value)
    assert found == [(lease.name, "60"), (lease.name, "62"), ("lease-test0-zzz", "63")]


# --- giving back -------------------------------------------------------------------------------------


def test_a_host_without_vms_is_given_back_after_its_idle_time() -> None:
    site = LeaseHarness()
    lease = site.until_idle()
    del site.jobs["7"]
    site.run_for(PHYSICAL.idle - 4.0)
    assert site.lease.state is L.IDLE
    site.run_for(6.0)
    assert site.lease.state is L.RELEASING and lease.name in site.state.closed
    site.ended(lease.key)
    site.ends(state=P.ENDED, clean=True)
    site.run()
    assert not site.state.leases and lease.name not in site.state.hosts
    assert not site.state.templates_on(lease.name), "what was on it has gone with it"
    assert not site.state.claims.on(lease.name)


def test_nothing_is_made_on_a_host_in_the_pass_in_which_its_lease_ends_though_it_is_still_shown() -> None:
    site = LeaseHarness()
    lease = site.until_idle()
    del site.jobs["7"]
    site.run_for(PHYSICAL.idle + 4.0)
    assert site.lease.state is L.RELEASING
    site.waiting_job("8")
    site.run()
    site.ends(state=P.ENDED, clean=True)
    site.ended(lease.key)
    site.run()
    assert lease.id not in site.state.leases and lease.name in site.world.hosts
    assert not site.state.templates_on(lease.name) and not site.state.vms_on(lease.name)


def test_a_host_that_builds_a_template_is_kept_and_one_that_a_job_is_about_to_use_not_for_ever() -> None:
    site = LeaseHarness()
    site.until_idle()
    (template,) = site.state.templates_on(site.lease.name)
    assert template.state is TemplateState.BUILDING
    site.run_for(10 * PHYSICAL.idle, step=10.0)
    assert site.lease.state is L.IDLE, "the job waits for its template there"
    site.run(Done(template.key, EffectKind.BUILD, "building", Broken("it does not boot")))
    site.run()
    assert site.lease.state is L.RELEASING


@pytest.mark.parametrize("builds", [True, False])
def test_a_host_is_kept_while_the_template_of_another_host_of_the_same_job_is_built(builds: bool) -> None:
    """The job would wait for ever if each host were given back before the other one is ready."""
    site = LeaseHarness()
    site.full()
    site.waiting_job(nodes=4)
    site.run_for(14.0)
    first, second = site.state.leases.values()
    for one in (first, second):
        site.ended(one.key)
        site.pilot(one, id_=str(50 + one.id), state=P.RUNNING, node=f"p{one.id}", ends=site.clock.wall() + 3600.0)
    site.run()
    site.answering |= {first.name, second.name}
    site.run()
    site.with_template()
    (template,) = site.state.templates_on(second.name)
    assert template.state is TemplateState.BUILDING
    site.run_for(6 * PHYSICAL.idle, step=10.0)
    assert [one.state for one in site.state.leases.values()] == [L.IDLE, L.IDLE]
    if builds:
        site.with_template(second.name)
        assert [len(site.state.vms_on(one.name)) for one in (first, second)] == [2, 2]
    else:
        site.run(Done(template.key, EffectKind.BUILD, "building", Broken("it does not boot")))
        site.run()
        assert site.state.leases[first.id].state is L.RELEASING


def test_a_host_to_which_an_image_is_brought_is_the_one_that_its_job_needs() -> None:
    """No other one is leased meanwhile, and it is kept longer than one that nobody needs, but not for ever."""
    site = LeaseHarness()
    site.images_there = {}
    lease = site.until_idle()
    site.run_for(PHYSICAL.idle + 10.0)
    assert list(site.state.leases) == [lease.id] and site.lease.state is L.IDLE
    site.images_there = IMAGES
    site.with_template()
    assert [vm.host for vm in site.state.vms_on(lease.name)] == [lease.name]

    site = LeaseHarness()
    site.images_there = {}
    site.until_idle()
    site.run_for(6 * PHYSICAL.idle, step=10.0)
    assert site.lease.state is L.RELEASING


def test_a_host_with_a_vm_is_kept_and_its_idle_time_begins_when_the_last_one_has_gone() -> None:
    site = LeaseHarness(replace(LEASING, leases=(replace(PHYSICAL, idle=20.0),)))
    lease, vm = site.until_held()
    site.run_for(30.0)
    assert site.lease.state is L.HELD
    del site.jobs["7"]
    site.run()
    site.run()
    site.ended(vm.key)
    site.run()
    assert site.lease.state is L.IDLE and site.lease.used == 1 and not site.state.vms_on(lease.name)


def test_an_operator_who_drains_a_leased_host_has_it_given_back_once_it_is_empty() -> None:
    site = LeaseHarness()
    lease, vm = site.until_held()
    drain = Command("drain", lease.name, drain=Drain(0.0, "they need it"))
    site.run(drain)
    assert site.lease.state is L.HELD
    del site.jobs["7"]
    site.run()
    site.run()
    site.ended(vm.key)
    site.run()
    site.run()
    assert site.lease.state is L.RELEASING and text_of(site.lease.reason) == "they need it"


def test_a_leased_host_is_not_removed_from_the_site_but_given_back() -> None:
    site = LeaseHarness()
    lease = site.until_idle()
    site.run(Command("remove", lease.name))
    ((_, refused),) = site.state.refusals
    assert "leased" in str(refused) and "drain" in (refused.hint or "")


# --- which jobs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "placed"), [(500.0, True), (700.0, False)])
def test_a_job_is_placed_only_where_the_lease_lasts_longer(limit: float, placed: bool) -> None:
    site = LeaseHarness()
    site.until_idle(seconds=620.0)
    site.waiting_job(limit=limit)
    site.with_template()
    assert bool(site.state.vms_on(site.lease.name) if site.state.leases else False) is placed


def test_a_job_that_cannot_be_queued_again_is_not_placed_on_a_leased_host() -> None:
    site = LeaseHarness()
    site.until_idle()
    site.waiting_job(requeues=False)
    site.with_template()
    assert not site.state.vms_on(site.lease.name)


# --- the end of a pilot ------------------------------------------------------------------------------


def running_on_lease(site: LeaseHarness) -> str:
    """The waiting job runs on the leased host; the name of its VM."""
    lease, vm = site.until_held()
    site.vms_on[lease.name] = {vm.name: VmSeen(vm.name, lease.name, VmCondition.PARKED, token=vm.token)}
    site.run()
    site.vms_on[lease.name] = {vm.name: VmSeen(vm.name, lease.name, VmCondition.RUNNING, token=vm.token)}
    site.node(vm.name)
    site.ended(vm.key)
    site.run()
    attempt = site.attempt(2)
    site.ended(attempt.key)
    site.jobs["7"] = site.jobs["7"]._replace(
        state=JobState.RUNNING, nodes=(vm.name,), gated=False, pinned=attempt.feature
    )
    site.run()
    assert site.state.vms[vm.id].state is VmState.SERVING
    return vm.name


def test_while_a_pilot_ends_its_host_takes_no_vm_and_its_jobs_are_queued_again() -> None:
    site = LeaseHarness()
    name = running_on_lease(site)
    site.ends(state=P.ENDING, reason="PREEMPTED")
    site.run()
    vm = site.state.vms[site.state.vm_named[name]]
    assert site.lease.state is L.ENDING and site.lease.name in site.state.closed
    assert vm.state is VmState.ENDING and "PREEMPTED" in text_of(vm.reason), (
        "its node is set DOWN, and the reason is told"
    )


def ending(site: LeaseHarness, seconds: float) -> Vm:
    """The agent of the lease holds its VMs for so many seconds; the VM on it, which a storage can take."""
    name = running_on_lease(site)
    site.storage = Storage("shared", "qemu")
    site.refuses, site.holds_until = "the lease ends", site.clock.wall() + seconds
    site.run()
    return site.state.vms[site.state.vm_named[name]]


def test_while_the_agent_of_an_ending_lease_holds_its_vms_their_jobs_are_saved() -> None:
    site = LeaseHarness()
    vm = ending(site, 60.0)
    assert site.lease.state is L.ENDING and vm.state is VmState.SERVING
    (saved,) = site.state.saved.values()
    assert (saved.state, saved.vm, saved.may_restart) == (SavedState.PREPARING, vm.id, True)
    assert text_of(saved.asked) == f"leased host {vm.host}: its pilot 50 is ending: its agent says that the lease ends"
    (eviction,) = site.attempt(2).evictions
    assert (eviction.way, eviction.host) == ("save", vm.host)


@pytest.mark.parametrize(("other", "saves"), [("shared", 1), ("its own", 0)])
def test_nothing_is_saved_to_a_storage_that_no_other_host_reaches(other: str, saves: int) -> None:
    site = LeaseHarness()
    site.static_storage = Storage(other, "qemu")
    vm = ending(site, 60.0)
    assert len(site.state.saved) == saves and vm.state is VmState.SERVING


def test_what_is_out_of_sight_as_its_lease_ends_is_left_alone() -> None:
    """Its agent may hold it still, and ends it otherwise."""
    site = LeaseHarness()
    name = running_on_lease(site)
    site.ends(state=P.ENDING, reason="PREEMPTED")
    site.answering.clear()
    site.run()
    site.pass_time(TOLD_WITHIN + 1.0)
    site.run()
    assert site.lease.state is L.ENDING
    assert site.state.vms[site.state.vm_named[name]].state is VmState.SERVING


def test_what_would_leave_a_lease_that_ends_is_shown_with_the_limit_that_keeps_it() -> None:
    site = LeaseHarness(replace(LEASING, evict_at_once=0))
    vm = ending(site, 60.0)
    (step,) = proposals(Context(site.state, site.world, site.policy))
    assert (step.method, cause_of(step.why), step.vm.id, step.to) == ("lease", "lease", vm.id, "")
    assert step.held is not None and step.held.kind is Why.EVICTIONS_AT_ONCE
    assert [one.vm.id for one in site.state.held_back["lease"]] == [vm.id] and not site.state.saved


def test_what_does_not_leave_in_time_is_ended_when_the_time_is_over() -> None:
    site = LeaseHarness(replace(LEASING, evict_host_rate=1))
    vm = ending(site, 20.0)
    assert vm.state is VmState.SERVING and not site.state.saved, "it would take longer than there is time"
    site.pass_time(15.0)
    site.run()
    assert site.state.vms[vm.id].state is VmState.SERVING
    site.pass_time(6.0)
    site.run()
    assert site.state.vms[vm.id].state is VmState.ENDING
    assert not site.state.saved


def test_a_site_may_have_vms_ended_as_soon_as_their_lease_ends() -> None:
    site = LeaseHarness(replace(LEASING, evict_leases=False))
    assert ending(site, 60.0).state is VmState.ENDING and not site.state.saved


def test_a_pilot_that_the_scheduler_shows_as_ending_has_seconds_to_say_until_when_it_holds_its_vms() -> None:
    site = LeaseHarness()
    name = running_on_lease(site)
    site.storage = Storage("shared", "qemu")
    site.run()
    site.ends(state=P.ENDING, reason="PREEMPTED")
    site.run()
    vm = site.state.vms[site.state.vm_named[name]]
    assert site.lease.state is L.ENDING and vm.state is VmState.SERVING and not site.state.saved
    site.pass_time(TOLD_WITHIN + 1.0)
    site.run()
    assert site.state.vms[vm.id].state is VmState.ENDING


def test_the_agent_of_a_lease_may_say_that_it_ends_before_the_scheduler_does() -> None:
    """Its VMs have ended by then. Their job is told why, and no VM is made there any more."""
    site = LeaseHarness()
    name = running_on_lease(site)
    lease = site.lease
    site.refuses, site.vms_on[lease.name] = "the lease ends", {}
    site.run()
    why = f"host {lease.name}: its pilot 50 is ending: its agent says that the lease ends"
    vm = site.state.vms[site.state.vm_named[name]]
    assert site.lease.state is L.ENDING and lease.name in site.state.closed
    assert vm.leaving and text_of(vm.reason) == why, "and not only that it died"
    ref = replace(site.jobs["7"].ref, restarts=1)
    site.jobs["7"] = site.jobs["7"]._replace(ref=ref, state=JobState.PENDING, nodes=(), gated=True, pinned=None)
    site.run()
    assert text_of(site.attempt(2).reason) == f"the scheduler requeued the job: {why}"
    site.nodes.clear()
    site.ended(vm.key)
    site.run()
    site.run()
    assert name not in site.state.vm_named and not site.state.vms_on(lease.name)
    assert site.lease.state is L.RELEASING, "its pilot is cancelled, though the scheduler shows it as running"
    assert EffectKind.GIVE_BACK in site.effects()


def test_the_end_of_a_pilot_whose_node_answered_is_that_of_its_vms() -> None:
    site = LeaseHarness()
    name = running_on_lease(site)
    lease = site.lease
    site.answering.clear()
    site.ends(state=P.ENDED, clean=True, reason="TIMEOUT")
    site.run()
    assert site.lease.state is L.RELEASING and site.state.hosts[lease.name].state is HostState.FENCED
    vm = site.state.vms[site.state.vm_named[name]]
    site.jobs["7"] = site.jobs["7"]._replace(state=JobState.PENDING, nodes=(), gated=True, pinned=None)
    site.nodes.clear()
    site.ended(vm.key)
    site.ended(lease.key)
    site.run()
    site.run()
    assert not site.state.leases and name not in site.state.vm_named


@pytest.mark.parametrize("shown", [True, False])
def test_a_pilot_whose_node_did_not_answer_leaves_a_host_that_is_fenced_like_any_other(shown: bool) -> None:
    site = LeaseHarness()
    name = running_on_lease(site)
    lease = site.lease
    site.answering.clear()
    if shown:
        site.ends(state=P.ENDED, reason="NODE_FAIL")
    else:
        site.pilots.clear()
    site.run_for(30.0)
    assert site.lease.state is L.LOST and site.effects() == [EffectKind.GIVE_BACK], "one that comes back is cancelled"
    assert site.state.hosts[lease.name].state is not HostState.FENCED
    assert not site.state.vms[site.state.vm_named[name]].leaving
    if shown:
        site.ends(clean=True)  # the node has been rebooted
        site.run()
    else:
        site.run(Command("fence", lease.name))
    assert site.lease.state is L.RELEASING and site.state.hosts[lease.name].state is HostState.FENCED


def test_the_end_of_another_leases_pilot_with_the_same_id_says_nothing_about_the_vms() -> None:
    site = LeaseHarness()
    name = running_on_lease(site)
    lease = site.lease
    site.answering.clear()
    # slurmctld has lost its state, and gave the id to a later lease's pilot.
    site.ends(name="lease-test0-ff", token="another", state=P.ENDED, clean=True)
    site.run()
    assert site.lease.state is L.LOST and not site.state.is_fenced(lease.name)
    assert not site.state.vms[site.state.vm_named[name]].leaving


def test_a_pilot_that_vanishes_from_an_empty_host_leaves_nothing() -> None:
    site = LeaseHarness()
    lease = site.until_idle()
    site.pilots.clear()
    site.answering.clear()
    site.run()
    assert site.lease.state is L.RELEASING
    site.ended(lease.key)
    site.run()
    assert not [one for one in site.state.leases.values() if one.id == lease.id]


@pytest.mark.parametrize("change", [{"restarts": 1}, {"state": P.PENDING, "restarts": 1}])
def test_a_pilot_that_was_queued_again_is_given_up(change: dict[str, object]) -> None:
    site = LeaseHarness()
    running_on_lease(site)
    site.ends(**change)
    site.run()
    assert site.lease.state is L.LOST, "whether its first node has ended its VMs is not known"
    site.ends(state=P.ENDED, clean=True)
    site.run()
    assert site.lease.state is L.RELEASING


def stepped(one: Lease, *others: Row, pilot: PilotSeen | None) -> list[tuple[Event, object]]:
    """What one step of a lease changes: by which event, and to which state."""
    now = 1000.0
    here = state(one, *others, now=now)
    view = SchedulerView(pilots={"50": pilot} if pilot else {})
    step_lease(here, one.id, world_of(view, None, now, effect_ended_at={one.key: now - 10.0}), LEASING)
    return [(change.event, change.row.state) for move in here.moves for change in move.changes]


def host_of(one: Lease, state: HostState = HostState.KNOWN) -> KnownHost:
    return KnownHost(one.name, one.name, state, id=-one.id, version=1)


def pilot_of(one: Lease, state: PilotState, **more: object) -> PilotSeen:
    return PilotSeen(one.name, one.spec.token, state, node="p1", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("before", [L.STARTING, L.IDLE, L.HELD, L.ENDING])
def test_whatever_the_lease_its_vms_are_lost_with_a_pilot_whose_node_may_go_on(before: LeaseState) -> None:
    """A VM may have been planned on its host since the pass before."""
    one = lease(before)
    its_vm = vm(VmState.SERVING, host=one.name)
    assert stepped(one, host_of(one), its_vm, pilot=pilot_of(one, P.ENDED)) == [(Event.LOST, L.LOST)]
    fenced, *_, last = stepped(one, host_of(one), its_vm, pilot=pilot_of(one, P.ENDED, clean=True))
    assert fenced == (Event.FENCED, HostState.FENCED) and last == (Event.VANISHED, L.RELEASING)


def test_the_vms_of_a_lease_that_is_given_back_are_lost_with_a_pilot_whose_node_may_go_on() -> None:
    one = lease(L.RELEASING)
    its_vm = vm(VmState.SERVING, host=one.name)
    assert stepped(one, host_of(one), its_vm, pilot=pilot_of(one, P.RUNNING)) == [], "it is being cancelled"
    for pilot in (pilot_of(one, P.ENDED), None):
        assert stepped(one, host_of(one), its_vm, pilot=pilot) == [(Event.LOST, L.LOST)]


@pytest.mark.parametrize("before", [L.STARTING, L.IDLE, L.HELD])
@pytest.mark.parametrize("silent", [HostState.SILENT, HostState.FENCING])
def test_a_lease_whose_host_is_silent_is_given_up(before: LeaseState, silent: HostState) -> None:
    one = lease(before)
    running = pilot_of(one, P.RUNNING)
    assert stepped(one, host_of(one, silent), pilot=running) == [(Event.FAILED, L.RELEASING)]


@pytest.mark.parametrize("host", [HostState.KNOWN, HostState.SILENT, HostState.FENCING, HostState.FENCED])
def test_a_host_is_given_back_with_its_lease_whatever_is_heard_of_it(host: HostState) -> None:
    one = lease(L.RELEASING)
    changes = stepped(one, host_of(one, host), pilot=None)
    assert changes == [(Event.ABSENT, L.GONE), (Event.GIVEN_BACK, HostState.RETURNED)]


@pytest.mark.parametrize("held", [False, True])
def test_a_pilot_whose_time_limit_is_changed_changes_when_its_lease_ends(held: bool) -> None:
    site = LeaseHarness()
    if held:
        running_on_lease(site)
    else:
        site.until_idle()
    site.ends(ends=9_000.0)
    site.run()
    assert site.lease.ends == 9_000.0 and site.lease.state is (L.HELD if held else L.IDLE)


def test_why_a_pilot_waits_is_noted() -> None:
    site = LeaseHarness()
    site.until_asked()
    for reason in ("Priority", "Resources"):
        site.pilot(reason=reason)
        site.run()
        assert (site.lease.state, text_of(site.lease.reason)) == (L.WAITING, reason)


def test_an_outage_of_the_scheduler_ends_no_lease() -> None:
    site = LeaseHarness()
    name = running_on_lease(site)
    site.scheduler_known = False
    site.answering.clear()
    site.run_for(300.0, step=10.0)
    assert site.lease.state is L.HELD
    site.scheduler_known = True
    site.answering.add(site.lease.name)
    site.run()
    assert site.lease.state is L.HELD and site.state.vms[site.state.vm_named[name]].state is VmState.SERVING


def test_a_leased_host_is_fenced_by_command_only_where_the_site_says_so() -> None:
    for allowed in (False, True):
        policy = replace(LEASING, fences=True, leases=(replace(PHYSICAL, fence=allowed),))
        site = LeaseHarness(policy)
        lease = site.until_idle()
        assert fences(site.state, site.state.hosts[lease.name], policy) is allowed
        assert fences(site.state, site.state.hosts["h1"], policy)


def test_a_controller_that_starts_reaches_leased_hosts_by_their_pilots() -> None:
    site = LeaseHarness()
    lease = site.until_idle()
    agents = {one.name: one.connection for one in connect_agents(context_of(Settings(), site.store)).sources}
    assert isinstance(agents[lease.name]._transport, PilotTransport)
    assert not isinstance(agents["localhost"]._transport, PilotTransport)


def test_the_pause_after_leases_of_no_use_doubles_and_ends_with_one_that_is_used() -> None:
    recorder = ForecastRecorder(LEASING)

    def after(state: LeaseState, event: Event, now: float, **more: object) -> float:
        recorder.note([Move((Change(lease(state, **more), event),))], now)
        return recorder.forecast(now).lease_rest.get("physical", 0.0) - now

    assert after(L.RELEASING, Event.FAILED, 100.0) == 10.0
    assert after(L.RELEASING, Event.RELEASED, 200.0, ends=5000.0) == 20.0, "its host was in sight and got no VM"
    assert recorder.next_due(200.0) == 220.0
    assert after(L.RELEASING, Event.RELEASED, 230.0) < 0.0, "one that was never granted is no failure"
    assert after(L.RELEASING, Event.RELEASED, 240.0, ends=5000.0, used=1) < 0.0
    assert after(L.HELD, Event.TAKEN, 250.0, used=1) < 0.0
    assert after(L.RELEASING, Event.FAILED, 300.0) == 10.0


def test_what_can_be_leased_counts_for_what_is_refused_at_submission() -> None:
    hosts = leasable_hosts({"physical": Size(8, 8192), "other": Size(64, 65536)}, LEASING)
    assert len(hosts) == PHYSICAL.most and all(one.value is not None for one in hosts.values())
    static = {"h1": KnownHost("h1", "h1", value=Host("h1", Size(4, 4096, 65536), frozenset({"full"})))}
    without, limits = job_limits(static, LEASING), job_limits({**static, **hosts}, LEASING)
    assert without is not None and limits is not None
    assert not without.allow(None, CloneKind.FULL, 1, Size(6, 100))
    assert limits.allow(None, CloneKind.FULL, 2, Size(6, 100)) and not limits.allow(
        None, CloneKind.FULL, 3, Size(6, 100)
    )
    assert leasable_hosts({}, LEASING) == {}


def test_nothing_is_added_from_a_partition_that_may_have_no_lease() -> None:
    site = LeaseHarness(replace(LEASING, leases=(replace(PHYSICAL, most=0),)))
    site.full()
    site.waiting_job()
    site.run_for(40.0)
    assert not site.state.leases and site.attempt(2).state is AttemptState.QUEUED


def test_a_partition_that_the_settings_name_no_more_gives_what_it_has_given() -> None:
    site = LeaseHarness()
    first, _ = site.until_held()
    site.policy = replace(LEASING, leases=())
    site.run()
    assert site.lease.state is L.HELD
    for its_vm in site.state.vms_on(first.name):
        site.ended(its_vm.key)
    del site.jobs["7"]
    for _ in range(3):
        site.run()
        for its_vm in site.state.vms_on(first.name):
            site.ended(its_vm.key)
    assert site.lease.state is L.IDLE
    site.run_for(140.0)
    assert site.lease.state is L.RELEASING
