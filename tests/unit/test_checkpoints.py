"""Checkpoints, as the planner decides them: when they are made, which are kept, and which run goes on with which."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.context import Context
from multiverse.core.errors import Broken, Damaged, Exhausted, MultiverseError, Refused, Unknown
from multiverse.core.explanation import explain
from multiverse.core.model.basics import Size
from multiverse.core.model.job import AttemptState, CheckpointWish, JobRef, JobState, NodeState, Request
from multiverse.core.model.saved import Saved, SavedSeen, SavedState
from multiverse.core.model.vm import VmCondition, VmState
from multiverse.core.policy import PAUSE_BASE
from multiverse.core.transition import Command, Done, EffectKind, Event
from tests.unit.planner_harness import POLICY
from tests.unit.test_saved_jobs import STORAGE, Site

S, A, V = SavedState, AttemptState, VmState
EVERY = 600.0
ASKS = Request(1, Size(1, 100), checkpoint=CheckpointWish(EVERY))


class Checkpoints(Site):
    """Job 7 runs, and asks for a checkpoint every ten minutes."""

    @property
    def standing(self) -> list[Saved]:
        return [one for _, one in sorted(self.rows.saved.items()) if one.stands]

    def wait(self, seconds: float = EVERY) -> None:
        self.pass_time(seconds)
        self.run()

    def complete(self) -> Saved:
        """The files of the checkpoint that is being made are there."""
        made = self.saved
        assert made.state is S.CAPTURING
        self.files[made.name] = SavedSeen(made.name, made.token, 46 << 20, STORAGE.name)
        self.done()
        self.run()
        for name in set(self.files) - {one.name for one in self.standing}:
            self.files.pop(name)
            self.discarded()
        return self.rows.saved[made.id]

    def discarded(self) -> None:
        for one in list(self.rows.saved.values()):
            if one.state is S.DISCARDING:
                self.ended(one.key)
        self.run()

    def checkpoint(self) -> Saved:
        self.wait()
        return self.complete()

    def lose(self, restart: int) -> None:
        """The VM dies, the scheduler queues the job again, and the pause after that is over."""
        self.lose_vm(restart)
        self.pass_time(PAUSE_BASE)
        for _ in range(6):
            self.run()
            self.clear()

    def lose_vm(self, restart: int) -> None:
        self.wait(15)
        self.vms[self.name] = replace(self.vms[self.name], condition=VmCondition.DEAD)
        self.run()
        self.restart(restart)
        for _ in range(6):
            self.run()
            self.clear()

    def run_again(self) -> None:
        """The next run has a VM, and begins in it; its processes wait."""
        vm = self.vm
        for condition in (VmCondition.PARKED, VmCondition.RUNNING):
            self.seen(vm.name, condition)
            self.freeze(condition is VmCondition.RUNNING)
            self.ended(vm.key)
            self.run()
        self.node(vm.name)
        self.run()
        attempt = self.rows.attempts[max(self.rows.attempts)]
        self.node(vm.name, NodeState.BUSY)
        self.job(state=JobState.RUNNING, nodes=(vm.name,), gated=False, pinned=attempt.feature)
        self.ended(attempt.key)
        self.run()
        self.run()

    def thaw(self) -> None:
        self.freeze(False)
        for one in self.rows.saved.values():
            self.ended(one.key)
        self.run()


@pytest.fixture
def site() -> Checkpoints:
    return Checkpoints(request=ASKS)


def test_one_is_made_each_time_that_the_job_asked_for_and_its_vm_serves_on(site: Checkpoints) -> None:
    site.wait(EVERY - 60)
    assert not site.rows.saved
    site.wait(60)
    assert (site.saved.state, site.saved.checkpoint) == (S.CAPTURING, True)
    assert site.complete().state is S.STORED
    assert site.vm.state is V.SERVING and site.attempt().state is A.ALLOCATED
    site.wait(EVERY - 60)
    assert len(site.rows.saved) == 1
    site.wait(60)
    assert site.saved.state is S.CAPTURING and len(site.standing) == 1


def test_no_job_has_more_in_a_time_than_the_site_permits(site: Checkpoints) -> None:
    site.policy = replace(POLICY, save_checkpoint_every=2 * EVERY)
    site.wait()
    assert not site.rows.saved
    site.wait()
    assert site.saved.state is S.CAPTURING


def test_the_newest_are_kept(site: Checkpoints) -> None:
    made = [site.checkpoint().id for _ in range(4)]
    assert [one.id for one in site.standing] == made[-POLICY.save_checkpoints :]
    assert set(site.files) == {one.name for one in site.standing}


def test_an_operator_or_the_user_can_ask_for_one_at_any_moment() -> None:
    site = Checkpoints()
    site.run(Command("checkpoint", job="7", uid=1001))
    assert not site.rows.saved and "neither saved nor moved" in str(site.state.refusals[0][1])
    site.run(Command("checkpoint", job="7", uid=1000, shared_files=True))
    assert (site.saved.state, site.saved.shared_files) == (S.CAPTURING, True)
    site.run(Command("checkpoint", job="7"))
    assert "is being made" in str(site.state.refusals[0][1]) and len(site.rows.saved) == 1


def test_what_is_being_made_and_a_move_or_a_save_exclude_each_other(site: Checkpoints) -> None:
    site.wait()
    for verb in ("save", "move"):
        site.run(Command(verb, job="7"))
        assert len(site.rows.saved) == 1 and site.state.refusals
    site.complete()
    site.run(Command("save", job="7"))
    assert site.saved.state is S.PREPARING
    site.wait(5 * EVERY)
    assert sum(one.state is S.CAPTURING for one in site.rows.saved.values()) == 0


def test_a_lost_job_goes_on_from_the_newest_one(site: Checkpoints) -> None:
    first, newest = site.checkpoint(), site.checkpoint()
    site.lose(1)
    assert site.vm.saved == newest.name and site.vm.state is V.PLANNED
    assert {one.id for one in site.standing} == {first.id, newest.id}
    site.run_again()
    assert site.rows.saved[newest.id].state is S.THAWING and site.rows.saved[newest.id].again == JobRef("7", 500, 1)
    site.thaw()
    assert all((one.state, one.job.restarts, one.again) == (S.STORED, 1, None) for one in site.rows.saved.values())
    site.wait(60)
    assert site.rows.saved[newest.id].state is S.STORED, "it serves no run twice"


def test_the_scheduler_gives_up_ending_the_lost_run_first(site: Checkpoints) -> None:
    """It would end the next run, whose VM has the same name."""
    site.checkpoint()
    site.lose_vm(1)
    (attempt,) = (one for one in site.rows.attempts.values() if one.job.restarts == 1)
    assert 0 < attempt.not_before - site.clock.time <= PAUSE_BASE and not site.rows.vms
    told = explain(Context(site.state, site.world, site.policy), attempt, site.clock.time)
    assert "has yet to give up telling the VM that is gone" in " ".join(map(str, told.sentences))
    site.wait(PAUSE_BASE)
    assert site.vm.saved and site.vm.state is V.PLANNED


def test_a_run_that_is_lost_before_its_first_one_begins_with_the_same_again(site: Checkpoints) -> None:
    made = site.checkpoint()
    for restart in (1, 2, 3):
        site.lose(restart)
        assert site.vm.saved == made.name
        site.run_again()
        site.thaw()
    assert site.rows.saved[made.id].job.restarts == 3


def test_a_run_that_is_lost_before_its_processes_went_on_leaves_it_as_it_was(site: Checkpoints) -> None:
    made = site.checkpoint()
    site.lose(1)
    site.run_again()
    assert site.rows.saved[made.id].state is S.THAWING
    site.lose(2)
    assert site.rows.saved[made.id].state is S.STORED and site.vm.saved == made.name
    assert site.vm.state is V.PLANNED


def test_it_is_not_used_while_the_earlier_run_may_go_on(site: Checkpoints) -> None:
    site.checkpoint()
    site.vms.pop(site.name)
    site.hosts.clear()  # out of reach
    site.restart(1)
    for _ in range(4):
        site.wait(30)
    assert all(vm.saved == "" for vm in site.rows.vms.values())


def test_all_go_with_their_job(site: Checkpoints) -> None:
    site.checkpoint()
    site.checkpoint()
    site.jobs.pop("7")
    site.run()
    assert {one.state for one in site.rows.saved.values()} == {S.DISCARDING}
    site.files.clear()
    site.discarded()
    assert not site.rows.saved


def test_a_damaged_one_leaves_the_job_to_an_older_one_and_then_to_its_beginning(site: Checkpoints) -> None:
    older, newest = site.checkpoint(), site.checkpoint()
    site.lose(1)
    for expected in (newest.name, older.name):
        assert site.vm.saved == expected
        site.run(Done(site.vm.key, EffectKind.CREATE, str(V.PLANNED), Damaged("its files are not as they were")))
        for _ in range(6):
            site.files.pop(expected, None)
            site.discarded()
            site.clear()
    assert site.vm.saved == "" and site.vm.state is V.PLANNED, "it begins anew by itself"


@pytest.mark.parametrize(
    "error", [Refused("it writes to shared files: /home/x/data"), Broken("no answer"), Exhausted("no room")]
)
def test_what_cannot_be_made_is_told_and_tried_when_it_is_due_again(site: Checkpoints, error: MultiverseError) -> None:
    site.wait()
    site.run(Done(site.saved.key, EffectKind.CAPTURE, str(S.CAPTURING), error))
    assert site.saved.state is S.UNDOING and str(error) in str(site.attempt().note)
    site.done()
    site.run()
    assert not site.rows.saved and site.attempt().state is A.ALLOCATED
    site.wait(EVERY - 120)
    assert not site.rows.saved
    site.wait(120)
    site.complete()
    assert site.attempt().note is None, "the next one was made"


def test_an_answer_that_is_lost_is_no_error(site: Checkpoints) -> None:
    site.wait()
    site.run(Done(site.saved.key, EffectKind.CAPTURE, str(S.CAPTURING), Unknown("no answer")))
    assert site.saved.state is S.CAPTURING
    assert site.complete().state is S.STORED


def test_a_vm_that_is_lost_meanwhile_leaves_nothing(site: Checkpoints) -> None:
    site.wait()
    site.lose(1)
    site.discarded()
    assert not site.rows.saved and site.vm.saved == ""


def test_a_job_that_is_saved_goes_on_from_that_and_its_older_ones_go(site: Checkpoints) -> None:
    made = site.checkpoint()
    site.to_writing()
    assert site.rows.saved[made.id].stands, "until the state is complete"
    site.files[site.saved.name] = SavedSeen(site.saved.name, site.saved.token, 46 << 20, STORAGE.name)
    site.done()
    site.run()
    site.run()
    assert site.rows.saved[made.id].state is S.DISCARDING
    assert site.state.saved_for(JobRef("7", 500, 1)) == site.saved


def test_a_save_whose_vm_is_lost_while_it_is_written_leaves_the_job_to_its_checkpoint(site: Checkpoints) -> None:
    made = site.checkpoint()
    site.to_writing()
    site.vms[site.name] = replace(site.vms[site.name], condition=VmCondition.DEAD)
    for _ in range(3):
        site.run()
    for _ in range(8):
        site.discarded()
        site.clear()
        site.run()
    assert site.vm.saved == made.name and not site.jobs["7"].held


def test_a_job_that_waits_can_be_told_to_begin_anew(site: Checkpoints) -> None:
    site.checkpoint()
    site.hosts["h1"] = replace(site.hosts["h1"], storage=None)  # it cannot go on now
    site.lose(1)
    moves = site.run(Command("resume_saved", job="7", uid=1000, anew=True))
    assert any(change.event is Event.ABANDONED for move in moves for change in move.changes)
    assert not site.state.refusals


def test_a_job_that_the_scheduler_does_not_queue_again_has_none(site: Checkpoints) -> None:
    site.job(requeues=False)
    site.wait()
    assert not site.rows.saved and "--no-requeue" in str(site.attempt().note)
