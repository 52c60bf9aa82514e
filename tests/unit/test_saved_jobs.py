"""Saving a job and resuming it, as the planner decides it: each step, and what ends or undoes it between two steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.changes import LOOK_AT_STATES
from multiverse.core.errors import Broken, Refused
from multiverse.core.machines.saved import MOST_TRIES, SAVED_EFFECTS, next_run_takes
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import Size
from multiverse.core.model.job import AttemptState, JobRef, JobState, NodeState, Request
from multiverse.core.model.reason import Reason, Why, text_of
from multiverse.core.model.saved import SavedSeen, SavedState, Storage
from multiverse.core.model.vm import Vm, VmCondition, VmState
from multiverse.core.saving import with_its_state
from multiverse.core.state import State
from multiverse.core.transition import Command, Done, EffectKind
from tests.unit.planner_harness import POLICY
from tests.unit.saved_site import SavedSite

S, A, V = SavedState, AttemptState, VmState
STORAGE = Storage("shared", "qemu 7.2 tcg")


class Site(SavedSite):
    """A host with a storage, and job 7, which runs in a VM there. `files` is what the storage holds."""

    def __init__(self, **job: object) -> None:
        super().__init__()
        self.hosts["h1"] = replace(self.hosts["h1"], storage=STORAGE)
        self.to_allocated(**job)
        self.name = self.vm.name

    @property
    def vm(self) -> Vm:
        return self.rows.vms[max(self.rows.vms)]

    def freeze(self, frozen: bool = True) -> None:
        self.vms[self.name] = replace(self.vms[self.name], frozen=frozen)

    def restart(self, number: int, state: JobState = JobState.PENDING, **more: object) -> None:
        self.job(state=state, ref=JobRef("7", 500, number), nodes=(), gated=True, pinned=None, **more)

    def done(self) -> None:
        """The effect of what is being saved has ended."""
        self.ended(self.saved.key)

    # --- the way of a job that is saved

    def to_preparing(self, *, hold: bool = False) -> None:
        self.run(Command("save", job="7", hold=hold))

    def to_freezing(self) -> None:
        self.to_preparing()
        self.node(self.name, NodeState.DRAINED)
        self.done()
        self.run()

    def to_cutting(self) -> None:
        self.to_freezing()
        self.freeze()
        self.done()
        self.run()

    def to_undoing(self) -> None:
        self.to_freezing()
        self.freeze()
        self.run(Done(self.saved.key, EffectKind.FREEZE, str(self.saved.state), Refused("it cannot")))

    def to_writing(self) -> None:
        self.to_cutting()
        self.restart(1)
        self.done()
        self.run()

    def to_stored(self) -> None:
        self.to_writing()
        self.files[self.saved.name] = SavedSeen(self.saved.name, self.saved.token, 46 << 20, STORAGE.name)
        self.done()
        self.run()

    def to_queued(self) -> None:
        """The first VM is gone, and the next run waits."""
        self.to_stored()
        for _ in range(4):
            self.run()
            self.clear()

    def to_restored(self) -> None:
        self.to_queued()
        for _ in range(3):
            self.run()

    def to_thawing(self) -> None:
        self.to_restored()
        vm = self.vm
        self.seen(vm.name, VmCondition.PARKED)
        self.ended(vm.key)
        self.run()
        self.seen(vm.name, VmCondition.RUNNING)
        self.freeze()
        self.node(vm.name)
        self.ended(vm.key)
        self.run()
        attempt = self.rows.attempts[max(self.rows.attempts)]
        self.node(vm.name, NodeState.BUSY)
        self.job(state=JobState.RUNNING, nodes=(vm.name,), gated=False, pinned=attempt.feature)
        self.ended(attempt.key)
        self.run()
        self.run()


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_job_is_saved_step_by_step(site: Site) -> None:
    first = site.vm
    site.to_preparing()
    assert site.saved.state is S.PREPARING and site.saved.job == JobRef("7", 500)
    site.node(site.name, NodeState.DRAINED)
    site.run()
    assert site.saved.state is S.FREEZING
    site.freeze()
    site.run()
    assert site.saved.state is S.CUTTING
    site.restart(1)
    site.run()
    assert site.saved.state is S.WRITING
    for _ in range(3):
        site.run()
    assert site.rows.vms[first.id].state is V.SERVING, "the VM stays until it is written"
    site.files[site.saved.name] = SavedSeen(site.saved.name, site.saved.token, 46 << 20, STORAGE.name)
    site.done()
    site.run()
    assert (site.saved.state, site.saved.bytes) == (S.STORED, 46 << 20)
    site.run()
    assert site.rows.vms[first.id].state is V.RELEASING


def test_its_next_run_is_restored_where_its_storage_is(site: Site) -> None:
    first = site.vm
    site.to_restored()
    again = site.vm
    assert again.id != first.id
    assert (again.name, again.mac, again.address) == (first.name, first.mac, first.address)
    assert again.token not in ("", first.token), "what comes late for the first one is not for this one"
    assert again.saved == site.saved.name and again.place.template is None
    assert site.rows.attempts[max(site.rows.attempts)].job.restarts == 1


@pytest.mark.parametrize("name", ["h0", "h2"])
def test_a_host_that_is_equal_but_for_its_storage_restores_nothing(site: Site, name: str) -> None:
    site.hosts[name] = replace(site.hosts["h1"], name=name, storage=Storage("another", STORAGE.machine))
    site.to_restored()
    assert site.vm.saved and site.vm.host == "h1"


def test_it_is_not_restored_while_the_scheduler_keeps_the_node_of_its_name(site: Site) -> None:
    first = site.vm
    site.to_stored()
    for _ in range(6):
        site.run()
        site.vms.clear()
        site.ended(first.key)
    assert site.vm.id == first.id and site.vm.state is V.DELETING
    for _ in range(4):
        site.nodes.clear()
        site.run()
        site.ended(site.vm.key)
    assert site.vm.id != first.id and site.vm.name == first.name


def test_a_job_that_was_changed_to_ask_for_more_waits_until_it_is_changed_back(site: Site) -> None:
    first = site.vm
    site.to_stored()
    for memory, waits in ((60_000, True), (64, False)):
        site.restart(1, request=Request(1, Size(1, memory)))
        for _ in range(6):
            site.run()
            site.clear()
        attempt = site.rows.attempts[max(site.rows.attempts)]
        assert ("change it back" in str(site.state.reasons.get(attempt.id))) == waits
        assert any(vm.saved for vm in site.rows.vms.values()) != waits
    assert site.vm.id != first.id


def test_its_processes_go_on_once_and_the_files_go(site: Site) -> None:
    site.to_thawing()
    assert site.saved.state is S.THAWING
    site.freeze(False)
    site.done()
    site.run()
    assert site.saved.state is S.DISCARDING, "the state is used up"
    site.files.clear()
    site.done()
    site.run()
    assert not site.rows.saved
    assert site.vm.state is V.SERVING


def test_a_held_job_waits_until_it_is_resumed(site: Site) -> None:
    site.to_preparing(hold=True)
    site.node(site.name, NodeState.DRAINED)
    site.run()
    site.freeze()
    site.run()
    site.restart(1, held=True, eligible=False)
    site.run()
    site.files[site.saved.name] = SavedSeen(site.saved.name, site.saved.token, 1, STORAGE.name)
    site.done()
    site.run()
    assert site.saved.state is S.STORED
    site.run(Command("resume_saved", job="7"))
    assert site.saved.state is S.RESUMING
    site.restart(1, held=False, eligible=True)
    site.done()
    site.run()
    assert site.saved.state is S.STORED and not site.saved.hold


@pytest.mark.parametrize("kind", [EffectKind.PREPARE, EffectKind.FREEZE])
def test_what_fails_before_the_cut_is_undone(site: Site, kind: EffectKind) -> None:
    site.to_preparing() if kind is EffectKind.PREPARE else site.to_freezing()
    site.run(Done(site.saved.key, kind, str(site.saved.state), Refused("it cannot")))
    assert site.saved.state is S.UNDOING
    site.freeze(False)
    site.node(site.name, NodeState.BUSY)
    site.done()
    site.run()
    assert not site.rows.saved and site.vm.state is V.SERVING


def test_a_step_that_can_be_undone_and_takes_too_long_is(site: Site) -> None:
    site.to_freezing()
    site.pass_time(site.policy.save_timeout + 1)
    site.run()
    assert site.saved.state is S.UNDOING


def test_a_job_that_was_cut_off_is_saved_however_late_the_scheduler_shows_it_queued_again(site: Site) -> None:
    site.to_cutting()
    site.pass_time(site.policy.save_timeout + 1)
    site.run()
    assert site.saved.state is S.CUTTING
    site.restart(1)
    site.run()
    assert site.saved.state is S.WRITING


@pytest.mark.parametrize("way", ["to_preparing", "to_freezing", "to_cutting", "to_writing", "to_stored", "to_queued"])
def test_a_job_that_is_cancelled_leaves_nothing(site: Site, way: str) -> None:
    getattr(site, way)()
    site.job(state=JobState.ENDED, result="CANCELLED", nodes=())
    for _ in range(6):
        site.run()
        if site.rows.saved:
            site.done()
        site.files.clear()
        site.clear()
    assert not site.rows.saved and not site.rows.vms and not site.rows.attempts


def test_a_job_that_ended_while_the_controller_was_off_is_noticed_once_the_scheduler_answers(site: Site) -> None:
    site.to_stored()
    site.state = State(site.store.rows(), TABLES)
    site.scheduler_known = False
    site.run()
    site.jobs.clear()
    site.scheduler_known = True
    site.run()
    assert site.saved.state is S.DISCARDING


def test_another_restart_attaches_to_no_state(site: Site) -> None:
    site.to_stored()
    site.restart(2)
    site.run()
    assert site.saved.state is S.DISCARDING


def test_a_state_is_gone_only_once_no_part_of_it_is_shown_and_nothing_can_write_it(site: Site) -> None:
    site.to_writing()
    unfinished = SavedSeen(site.saved.name, "", 0, STORAGE.name, complete=False)
    site.files[unfinished.name] = unfinished
    site.done()
    site.run()
    assert site.saved.state is S.WRITING, "they are not complete"
    site.job(state=JobState.ENDED, result="CANCELLED", nodes=())
    site.run()
    site.files.clear()
    for _ in range(2):
        site.done()
        site.run()
    assert site.saved.state is S.DISCARDING, "its VM exists, and may still be being written"
    site.files[unfinished.name] = unfinished
    for _ in range(4):
        site.clear()
        site.done()
        site.run()
    assert not site.rows.vms and site.saved.state is S.DISCARDING
    site.files.clear()
    site.done()
    site.run()
    assert not site.rows.saved


def test_a_vm_whose_guest_answers_no_more_is_neither_written_nor_kept(site: Site) -> None:
    site.to_writing()
    for _ in range(MOST_TRIES):
        site.run(Done(site.saved.key, EffectKind.SAVE, str(site.saved.state), Broken("the channel was closed")))
    assert site.saved.state is S.KEEPING
    site.run(Done(site.saved.key, EffectKind.KEEP, str(site.saved.state), Broken("the channel was closed")))
    assert site.saved.state is S.HOLDING and site.saved.ends, (
        "its work is lost, and its user did not agree to another try"
    )


def test_a_guest_that_cannot_cut_its_job_off_lets_it_go_on(site: Site) -> None:
    site.to_cutting()
    site.run(Done(site.saved.key, EffectKind.CUT, str(site.saved.state), Broken("its batch script was not found")))
    assert site.saved.state is S.UNDOING and site.vm.state is V.SERVING
    site.freeze(False)
    site.node(site.name, NodeState.BUSY)
    site.done()
    site.run()
    assert not site.rows.saved and site.vm.state is V.SERVING


@pytest.mark.parametrize("way", ["to_thawing", "to_undoing"])
def test_a_vm_with_frozen_processes_whose_guest_answers_no_more_is_ended(site: Site, way: str) -> None:
    getattr(site, way)()
    effect = SAVED_EFFECTS[site.saved.state]
    site.run(Done(site.saved.key, effect, str(site.saved.state), Broken("the channel was closed")))
    assert site.vm.state is V.ENDING and "the channel was closed" in str(site.vm.reason)
    assert not site.rows.saved or site.saved.state is S.DISCARDING


@pytest.mark.parametrize("way", ["to_thawing", "to_undoing"])
def test_nothing_is_concluded_of_frozen_processes_before_their_host_has_answered(site: Site, way: str) -> None:
    getattr(site, way)()
    state = site.saved.state
    site.hypervisor_known, site.unknown_since = False, site.clock.now()
    site.run(Done(site.saved.key, SAVED_EFFECTS[state], str(state), Broken("the channel was closed")))
    assert site.saved.state is state and site.vm.state is V.SERVING


def test_a_vm_that_is_lost_before_its_state_is_complete_is_not_waited_for(site: Site) -> None:
    site.to_writing()
    site.vms.clear()
    for _ in range(4):
        site.run()
        site.clear()
    assert site.saved.state is S.HOLDING and "was lost" in str(site.saved.reason)
    site.restart(1, held=True, eligible=False)
    site.run()
    assert site.saved.state is S.DISCARDING


def test_a_job_that_cannot_be_saved_is_refused_with_the_reason(site: Site) -> None:
    site.run(Command("save", job="8"))
    site.hosts["h1"] = replace(site.hosts["h1"], storage=None)
    site.run(Command("save", job="7"))
    assert [str(error) for _, error in site.state.refusals] and not site.rows.saved
    assert site.rows.attempts[max(site.rows.attempts)].state is A.ALLOCATED


@pytest.mark.parametrize("way", ["to_writing", "to_stored", "to_queued"])
def test_a_scheduler_that_forgets_that_it_queued_the_job_again_loses_no_work(site: Site, way: str) -> None:
    """slurmctld writes its state some seconds late: killed within them, it shows the run that was cut off again."""
    getattr(site, way)()
    site.job(state=JobState.RUNNING, ref=JobRef("7", 500), nodes=(site.name,), gated=False)
    for _ in range(3):
        site.run()
    asked = way != "to_writing"  # once its state is complete
    assert site.saved.state is (S.QUEUEING if asked else S.WRITING) and site.saved.again is None
    assert (SAVED_EFFECTS[site.saved.state] is EffectKind.QUEUE) == asked, "its time limit may end it meanwhile"
    later = JobRef("7", 530, 1)
    site.job(state=JobState.PENDING, ref=later, nodes=(), gated=True, pinned=None)
    site.run()
    assert site.saved.state is (S.STORED if asked else S.WRITING)
    assert site.saved.again == later and site.saved.is_for(later)
    assert not site.saved.is_for(JobRef("7", 500, 1)), "the run that was forgotten"


@pytest.mark.parametrize("ended", [False, True])
def test_what_is_to_be_queued_again_may_be_of_no_use_before(site: Site, ended: bool) -> None:
    site.policy = replace(POLICY, save_keep=86400.0)
    site.to_stored()
    site.job(state=JobState.RUNNING, ref=JobRef("7", 500), nodes=(site.name,), gated=False)
    site.run()
    site.run()
    assert site.saved.state is S.QUEUEING
    if ended:
        site.job(state=JobState.ENDED, ref=JobRef("7", 500), nodes=(), gated=False, result="TIMEOUT")
    site.pass_time(0.0 if ended else 90000.0)
    site.run()
    assert site.saved.state is (S.DISCARDING if ended else S.HOLDING)


def test_the_age_of_saved_jobs_is_looked_at_every_minute(site: Site) -> None:
    site.policy = replace(POLICY, save_keep=70.0)
    site.to_stored()
    site.pass_time(LOOK_AT_STATES)
    site.run()
    site.pass_time(LOOK_AT_STATES / 2)  # it is too old now
    site.run()
    assert site.saved.state is S.STORED
    site.pass_time(LOOK_AT_STATES / 2)
    site.run()
    assert site.saved.state is S.HOLDING


def test_a_run_that_began_anew_in_the_eyes_of_the_scheduler_has_no_use_for_the_state(site: Site) -> None:
    site.to_stored()
    site.job(state=JobState.PENDING, ref=JobRef("7", 500), nodes=(), gated=True, pinned=None)
    site.run()
    assert site.saved.state is S.DISCARDING


@pytest.mark.parametrize(("froze", "asked"), [(False, False), (True, False), (True, True)])
def test_a_guest_that_does_not_answer_may_have_stopped_its_job_half_way(site: Site, froze: bool, asked: bool) -> None:
    """`asked`: its host has asked the guest to stop it."""
    site.to_freezing() if froze else site.to_preparing()
    kind = EffectKind.FREEZE if froze else EffectKind.PREPARE
    site.run(Done(site.saved.key, kind, str(site.saved.state), Broken("the channel was closed")))
    assert site.saved.state is S.UNDOING and not site.vms[site.name].frozen
    site.vms[site.name] = replace(site.vms[site.name], freezing=asked)
    site.run(Done(site.saved.key, EffectKind.UNDO, str(site.saved.state), Broken("the channel was closed")))
    assert (site.vm.state is V.ENDING) == asked, "a job that was never to be stopped goes on"


def test_a_job_whose_guest_is_mute_is_not_saved_and_goes_on(site: Site) -> None:
    site.to_preparing()
    site.vms[site.name] = replace(site.vms[site.name], mute=True)
    site.run()
    assert site.saved.state is S.UNDOING and site.vm.state is V.SERVING
    site.done()
    site.run()
    assert not site.rows.saved
    site.to_preparing()
    assert not site.rows.saved and "is told nothing" in str(site.state.refusals[-1][1])


def test_a_job_that_may_be_cut_off_is_queued_again_when_its_host_is_back(site: Site) -> None:
    site.to_cutting()
    host = site.hosts.pop("h1")
    site.node(site.name, NodeState.SILENT)
    site.pass_time(POLICY.silence + 1.0)
    site.run()
    site.run()
    assert site.vm.state is V.LOST and site.saved.state is S.CUTTING
    site.hosts["h1"] = host
    site.node(site.name, NodeState.DRAINED)
    site.run()
    assert site.vm.state is V.SERVING and site.saved.state is S.CUTTING


@pytest.mark.parametrize("way", ["to_writing", "to_stored"])
def test_the_run_that_the_scheduler_queued_anew_unseen_goes_on_with_the_state(site: Site, way: str) -> None:
    """slurmctld forgot that it had queued the job again, and did so by itself before it was looked at."""
    getattr(site, way)()
    before, anew = JobRef("7", 500, 1), JobRef("7", 530, 1)
    site.run()
    assert site.saved.again == before
    site.job(state=JobState.PENDING, ref=anew, nodes=(), gated=True, pinned=None)
    site.run()
    assert site.saved.again == anew and not site.saved.is_for(before)
    site.job(state=JobState.PENDING, ref=replace(anew, restarts=2), nodes=(), gated=True, pinned=None)
    site.run()
    assert site.saved.state is S.DISCARDING, "a later run is another one's"


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.COMPLETING])
def test_a_job_that_is_stopped_without_a_reason_goes_on_also_to_end(site: Site, state: JobState) -> None:
    site.freeze()
    site.job(state=state, ref=JobRef("7", 500), nodes=(site.name,), gated=False)
    site.run()
    site.run()
    assert site.saved.state is S.UNDOING and site.saved.job == JobRef("7", 500)
    site.freeze(False)
    site.done()
    site.run()
    assert not site.rows.saved and site.vm.state is V.SERVING


def test_a_saved_job_that_waits_is_told_since_when_and_where(site: Site) -> None:
    site.to_stored()
    waiting, why = site.rows.attempts[max(site.rows.attempts)], Why.CAPACITY()

    def told(asked: Reason) -> str:
        site.state.saved[site.saved.id] = replace(site.saved, asked=asked)
        return text_of(with_its_state(site.state, waiting, why)).partition("UTC ")[2]

    size = "(46 MiB in storage shared)"
    assert told(Why.SAVE_ASKED()) == f"{size}: waiting for capacity"
    assert told(Why.HOST_DRAINED(host="h1")) == f"{size}: host h1 is drained; waiting for capacity"
    assert told(Why.PREEMPTED(job="12", by="high")) == f"for job 12 (high) {size}: waiting for capacity"
    assert with_its_state(site.state, replace(waiting, job=JobRef("8", 500)), why) == why


def test_a_saved_job_that_no_host_in_sight_could_hold_waits_and_blocks_nobody() -> None:
    """Its own host is out of reach for days, say: the others go on, and so does it once the host is back."""
    site = Site(request=Request(1, Size(4, 100)))
    site.to_stored()
    whole = site.hosts["h1"]
    site.hosts["h1"] = replace(whole, capacity=replace(whole.capacity, cpus=2))
    site.job("8", rank=1)
    for _ in range(4):
        site.run()
        site.clear()
    first = next(one.id for one in site.rows.attempts.values() if one.job == JobRef("7", 500, 1))
    (other,) = (one for one in site.rows.attempts.values() if one.job.job_id == "8")
    assert (other.state, site.rows.attempts[first].state) == (A.CLAIMED, A.QUEUED)
    assert "4 CPUs" in str(site.state.reasons[first])
    site.hosts["h1"] = replace(whole, capacity=replace(whole.capacity, cpus=8))
    site.run()
    assert site.rows.attempts[first].state is A.CLAIMED


def test_the_run_that_goes_on_takes_what_was_left_of_the_time_limit() -> None:
    """So it has room where the whole run would not end in time: on a lease, or ahead of an earlier job."""
    now = 1_700_001_000.0
    site = Site(limit=3630.0, deadline=now + 600.0, ends=now + 630.0)
    site.to_cutting()
    left = site.saved.remaining
    assert left is not None and 500.0 < left < 600.0
    (job,) = site.jobs.values()
    assert next_run_takes(site.saved, job) == left + 30.0
    assert next_run_takes(site.saved, job._replace(limit=3690.0)) == left + 60.0 + 30.0, "an operator gave it a minute"
    assert next_run_takes(replace(site.saved, remaining=None), job) == 3630.0
