"""Jobs are saved ahead of their time limits: when, how often, for how long their next runs may take, and what not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.context import Context
from multiverse.core.errors import Refused, Unknown
from multiverse.core.explanation import explain
from multiverse.core.machines.tables import effect_of
from multiverse.core.model.basics import Size
from multiverse.core.model.job import Attempt, JobState, NodeState, Request, SaveWish
from multiverse.core.model.reason import Why, when
from multiverse.core.transition import Command, Done, EffectKind
from tests.unit.test_saved_jobs import A, S, Site

HOUR = 3600.0
ASKS = SaveWish()


class LimitedSite(Site):
    """Job 7 runs for an hour at most, and asks to be saved then, unless `wish` is None."""

    def __init__(self, wish: SaveWish | None = ASKS) -> None:
        super().__init__(request=Request(1, Size(1, 100), save=wish))
        self.limit(HOUR)

    def limit(self, seconds: float) -> None:
        began = self.clock.wall() - (self.clock.time - self.attempt_now.since)
        self.job(deadline=began + seconds, limit=seconds + 60.0, ends=began + seconds + 60.0)

    @property
    def attempt_now(self) -> Attempt:
        return self.rows.attempts[max(self.rows.attempts)]

    def left(self, seconds: float) -> None:
        """Let the time pass until so much of the limit is left."""
        self.pass_time((self.jobs["7"].deadline or 0.0) - self.clock.wall() - seconds - 1.01)
        self.run()


@pytest.fixture
def site() -> LimitedSite:
    return LimitedSite()


def test_it_is_saved_so_long_before_its_time_limit(site: LimitedSite) -> None:
    site.left(site.policy.save_before + 30)
    assert not site.rows.saved
    site.left(site.policy.save_before - 1)
    assert site.saved.state is S.PREPARING and site.saved.asked.kind is Why.SAVE_AT_LIMIT and not site.saved.hold
    site.run()
    assert len(site.rows.saved) == 1, "and once"


def test_a_job_may_say_how_long_before() -> None:
    site = LimitedSite(SaveWish(before=600.0))
    site.left(605)
    assert not site.rows.saved
    site.left(595)
    assert site.rows.saved


def test_half_of_its_time_passes_first() -> None:
    site = LimitedSite(SaveWish(before=3000.0))
    site.left(HOUR / 2 + 10)
    assert not site.rows.saved
    site.left(HOUR / 2 - 5)
    assert site.rows.saved


def test_a_job_that_does_not_ask_for_it_is_not_saved() -> None:
    site = LimitedSite(None)
    site.left(20)
    assert not site.rows.saved


def test_a_suspended_job_and_one_without_a_time_limit_are_not_saved(site: LimitedSite) -> None:
    deadline = site.jobs["7"].deadline
    site.job(state=JobState.SUSPENDED, deadline=None)
    site.pass_time(2 * HOUR)
    site.run()
    assert not site.rows.saved
    site.job(state=JobState.RUNNING, deadline=deadline)
    site.run()
    assert not site.rows.saved, "its time is over: the scheduler may end it at any moment"


def test_a_change_of_the_time_limit_counts(site: LimitedSite) -> None:
    site.left(200)
    site.limit(2 * HOUR)
    site.left(HOUR)
    assert not site.rows.saved
    site.left(100)
    assert site.rows.saved


def test_the_last_run_that_the_site_permits_is_not_saved(site: LimitedSite) -> None:
    site.policy = replace(site.policy, save_max_runs=1)
    site.left(20)
    assert not site.rows.saved


def test_each_run_counts(site: LimitedSite) -> None:
    site.policy = replace(site.policy, save_max_runs=2)
    site.to_thawing()
    assert site.attempt_now.runs == 2
    site.freeze(False)
    site.done()
    site.run()
    site.files.clear()
    site.done()
    site.run()
    site.limit(HOUR)
    site.left(20)
    assert not site.rows.saved


def test_the_next_run_of_a_job_that_asks_for_it_may_take_as_long_as_this_one(site: LimitedSite) -> None:
    site.left(site.policy.save_before - 1)
    site.to_thawing()
    assert site.saved.remaining is None and site.attempt_now.limit is None


def test_the_next_run_of_another_job_may_take_what_is_left() -> None:
    site = LimitedSite(None)
    site.left(1000)
    site.to_queued()
    assert site.saved.remaining is not None and 980 < site.saved.remaining <= 1000
    site.run()
    assert site.attempt_now.limit == site.saved.remaining


@pytest.mark.parametrize("change", [-300.0, 300.0, -2000.0])
def test_a_change_of_the_time_limit_while_it_is_saved_counts(change: float) -> None:
    site = LimitedSite(None)
    site.left(1000)
    site.to_stored()
    remaining = site.saved.remaining or 0.0
    site.job(limit=HOUR + 60.0 + change)
    for _ in range(4):
        site.run()
        site.clear()
    for _ in range(3):
        site.run()
    assert site.attempt_now.limit == max(0.0, remaining + change)


def test_one_that_was_refused_is_not_tried_again_and_says_why(site: LimitedSite) -> None:
    site.left(site.policy.save_before - 1)
    site.run(Done(site.saved.key, EffectKind.PREPARE, str(site.saved.state), Refused("it truncates its output")))
    site.node(site.name, NodeState.BUSY)
    site.done()
    for _ in range(3):
        site.run()
    assert not site.rows.saved and "it truncates its output" in str(site.attempt_now.note)


def test_one_that_failed_is_tried_again(site: LimitedSite) -> None:
    site.left(site.policy.save_before - 1)
    site.run(Done(site.saved.key, EffectKind.PREPARE, str(site.saved.state), Unknown("no answer")))
    site.node(site.name, NodeState.BUSY)
    site.done()
    site.run()
    assert site.rows.saved and site.saved.state is S.PREPARING


def test_one_that_no_host_can_save_says_why_and_goes_on(site: LimitedSite) -> None:
    site.hosts["h1"] = replace(site.hosts["h1"], storage=None)
    site.left(60)
    assert not site.rows.saved and site.attempt_now.state is A.ALLOCATED
    assert "no storage is in reach" in str(site.attempt_now.note)


@pytest.mark.parametrize(
    ("job", "message"),
    [({"batch": False}, "of srun or salloc"), ({"requeues": False}, "(--no-requeue)"), ({"deadline": 1e12}, "")],
)
def test_what_cannot_be_queued_again_is_refused(site: LimitedSite, job: dict[str, object], message: str) -> None:
    site.job(**job)
    site.run(Command("save", job="7"))
    refusals = [str(error) for _, error in site.state.refusals]
    assert (message in refusals[0]) if message else not refusals


def test_a_site_may_save_what_is_not_to_be_queued_again(site: LimitedSite) -> None:
    site.policy = replace(site.policy, save_no_requeue=True)
    site.job(requeues=False)
    site.run(Command("save", job="7"))
    site.node(site.name, NodeState.DRAINED)
    site.run()
    assert site.saved.state is S.PREPARING and not site.saved.requeues, "the scheduler cannot queue it again yet"
    site.job(requeues=True)
    site.run()
    assert site.saved.state is S.FREEZING


@pytest.mark.parametrize(("hold", "text"), [(False, "an operator asked for it"), (True, "multiverse resume 7")])
def test_its_user_is_told_as_it_is_queued_again(site: LimitedSite, hold: bool, text: str) -> None:
    site.to_preparing(hold=hold)
    site.node(site.name, NodeState.DRAINED)
    site.run()
    site.freeze()
    site.run()
    effect = effect_of(site.saved)
    assert effect and effect.kind is EffectKind.CUT and effect.text.startswith("saved since 20") and text in effect.text


def explained(site: LimitedSite) -> str:
    context = Context(site.state, site.world, site.policy)
    found = explain(context, site.state.attempts[site.attempt_now.id], site.clock.time)
    return " ".join([*map(str, found.sentences), found.todo])


def test_a_running_job_is_told_when_it_is_saved(site: LimitedSite) -> None:
    site.run()
    assert f"It is saved {when((site.jobs['7'].deadline or 0) - site.policy.save_before)}, and goes on" in explained(
        site
    )
    site.policy = replace(site.policy, save_max_runs=1)
    assert "it has had 1 run, as many as the site permits" in explained(site)
    site.policy = replace(site.policy, save_max_runs=2)
    site.hosts["h1"] = replace(site.hosts["h1"], storage=None)
    site.left(60)
    assert "It is not saved ahead of its time limit: job 7 cannot be saved on host h1" in explained(site)


def test_a_job_whose_save_was_undone_says_why_and_is_saved_at_its_limit_all_the_same(site: LimitedSite) -> None:
    site.to_undoing()
    site.freeze(False)
    site.node(site.name, NodeState.BUSY)
    site.done()
    site.run()
    assert not site.rows.saved
    assert "It was not saved: it cannot. It is saved " in explained(site)
    site.to_preparing()
    assert "It was not saved" not in explained(site)


def test_a_job_that_is_being_saved_or_waits_with_its_state_says_so(site: LimitedSite) -> None:
    site.to_preparing()
    assert "It is being saved (preparing): an operator asked for it." in explained(site)
    site.to_stored()
    site.restart(1, eligible=False)
    site.run()
    assert "46 MiB in storage shared, and goes on from there." in explained(site)


def test_a_job_that_is_held_with_its_state_says_how_it_goes_on(site: LimitedSite) -> None:
    site.to_preparing(hold=True)
    site.to_stored()
    site.restart(1, held=True, eligible=False)
    site.run()
    assert "It is held until somebody resumes it. multiverse resume 7 lets it go on" in explained(site)
    site.restart(1, held=False, eligible=True)
    site.run()
    assert "held" not in explained(site), "its user has released it by Slurm's own command"


def test_a_job_that_is_held_because_its_state_was_lost_says_so_also_when_nothing_is_left_of_that(
    site: LimitedSite,
) -> None:
    site.to_writing()
    name = site.name
    site.vms.clear()
    for _ in range(4):
        site.run()
        site.clear()
    site.restart(1, held=True, eligible=False)
    for _ in range(3):
        site.run()
    assert not site.rows.saved
    assert "it is held" in explained(site)
    assert f"Before that: its VM {name} was lost before its state was complete." in explained(site)


def test_a_user_saves_and_resumes_own_jobs_and_learns_nothing_of_others(site: LimitedSite) -> None:
    theirs = Command("save", job="7", uid=1001, hold=True)
    site.run(theirs)
    unknown = "runs in no VM of its own (VMs inside a job are neither saved nor moved) (squeue --me shows your jobs)"
    assert not site.rows.saved and str(site.state.refusals[0][1]) == f"job 7 {unknown}"
    site.run(replace(theirs, job="8"))
    assert str(site.state.refusals[0][1]) == f"job 8 {unknown}", "of a job that there is not"
    site.run(replace(theirs, uid=1000))
    assert site.saved.asked.kind is Why.SAVE_ASKED and site.saved.hold
    site.to_stored()
    site.run(Command("resume_saved", job="7", uid=1001))
    assert site.saved.state is S.STORED and str(site.state.refusals[0][1]).startswith("job 7 is not saved")
    site.run(Command("resume_saved", job="7", uid=1000))
    assert site.saved.state is S.RESUMING


def test_a_user_does_not_resume_what_an_operator_holds(site: LimitedSite) -> None:
    site.to_preparing(hold=True)
    site.to_stored()
    site.run(Command("resume_saved", job="7", uid=1000))
    assert site.saved.state is S.STORED and "held by an operator" in str(site.state.refusals[0][1])
    site.run(Command("resume_saved", job="7"))
    assert site.saved.state is S.RESUMING
