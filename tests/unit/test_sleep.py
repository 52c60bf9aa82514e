"""VMs whose jobs are suspended sleep, and wake when their jobs are resumed and there is room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from multiverse.core.context import Context
from multiverse.core.errors import Broken, Damaged, Exhausted, MultiverseError, Refused, Unknown
from multiverse.core.machines.sleep import STAND_IN, delay_vm, job_of, put_to_sleep, stay_awake, step_sleep
from multiverse.core.model.basics import ClaimKey, Depth, Size
from multiverse.core.model.host import Claim, HypervisorView
from multiverse.core.model.job import AttemptState, Job, JobRef, JobState, Request, SchedulerView
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.saved import Storage
from multiverse.core.model.vm import TemplateState, Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Observation, Row, World
from multiverse.core.sleeping import AGAIN, put_suspended_to_sleep, wake_resumed
from multiverse.core.state import State
from multiverse.core.transition import Command, Done, EffectKind, Event
from tests.unit.planner_harness import POLICY
from tests.unit.rows import attempt, state, template, vm, world_of
from tests.unit.test_places import Site
from tests.unit.test_preemption import host as storing

V, C = VmState, VmCondition
AFTER = 60.0  # seconds that a job is suspended before its VM sleeps


class Sleeper(Site):
    """A job in a VM of a host that lets it sleep."""

    told: bool | None = None  # what its guest was told last
    mute = False  # whether its guest cannot be told anything

    def __init__(self) -> None:
        super().__init__()
        self.policy = replace(self.policy, sleep_after=AFTER)
        self.hosts["h1"] = replace(self.hosts["h1"], storage=Storage("st", "7.2 tcg"))
        self.run()

    def observe(self) -> None:
        super().observe()
        latest = self.world.sources["h1"].latest
        if latest is not None:
            vms = {name: replace(seen, told=self.told, mute=self.mute) for name, seen in latest.value.vms.items()}
            shown = Observation(replace(latest, value=replace(latest.value, vms=vms)), 0.0)
            self.world = replace(self.world, sources={**self.world.sources, "h1": shown})

    def shows(self, state: JobState, left: float | None = None) -> None:
        """The scheduler shows the job in that state, with so many seconds left of its time limit."""
        deadline = None if left is None else self.world.epoch + self.clock.time + left
        self.jobs["7"] = self.jobs["7"]._replace(state=state, deadline=deadline)
        self.run()

    def suspend(self) -> None:
        self.shows(JobState.SUSPENDED)
        self.pass_time(AFTER + 1)
        self.run()

    def done(self, condition: VmCondition) -> None:
        """The effect has ended, and the VM is shown like that."""
        self.pass_time(1)
        self.there["h1"] = condition
        self.told = self.vm.runs
        self.ended(self.vm.key)
        self.run()

    def fall_asleep(self) -> None:
        self.suspend()
        self.done(C.ASLEEP)
        assert self.vm.state is V.ASLEEP

    def fill(self) -> None:
        """Something else takes the host."""
        self.hosts["h1"] = replace(self.hosts["h1"], capacity=Size(8, STAND_IN + 100, 65536))
        self.run()

    def vm_reasons(self, event: Event) -> list[Reason | None]:
        return [one.reason for one in self.store.journal() if one.kind == "vm" and one.event == event]

    @property
    def claim(self) -> Size:
        (size,) = (one.size for one in self.rows.claims if one.owner == self.vm.key)
        return size


@pytest.fixture
def site() -> Sleeper:
    return Sleeper()


def test_a_vm_sleeps_when_its_job_has_been_suspended_for_long_and_claims_its_disk_alone(site: Sleeper) -> None:
    whole = site.claim
    site.shows(JobState.SUSPENDED)
    site.pass_time(AFTER - 5)
    site.run()
    assert site.vm.state is V.SERVING
    site.pass_time(5)
    site.run()
    assert (site.vm.state, site.claim) == (V.FALLING_ASLEEP, whole)
    site.done(C.RUNNING)
    assert (site.vm.state, site.claim) == (V.FALLING_ASLEEP, whole), "it is asked again"
    site.done(C.ASLEEP)
    assert (site.vm.state, site.claim) == (V.ASLEEP, Size(0, STAND_IN, whole.disk))


def test_a_vm_keeps_its_memory_without_the_setting_or_without_a_storage(site: Sleeper) -> None:
    site.policy = replace(site.policy, sleep_after=0.0)
    site.suspend()
    assert site.vm.state is V.SERVING
    site.policy = replace(site.policy, sleep_after=AFTER)
    site.hosts["h1"] = replace(site.hosts["h1"], storage=None)
    site.run()
    assert site.vm.state is V.SERVING


def test_a_job_that_was_resumed_meanwhile_begins_its_time_anew(site: Sleeper) -> None:
    site.shows(JobState.SUSPENDED)
    site.pass_time(AFTER - 1)
    site.shows(JobState.RUNNING)
    site.shows(JobState.SUSPENDED)
    site.pass_time(2)
    site.run()
    assert site.vm.state is V.SERVING


def test_it_wakes_when_its_job_is_resumed_and_serves_once_it_was_told_that(site: Sleeper) -> None:
    whole = site.claim
    site.fall_asleep()
    site.shows(JobState.RUNNING, left=300.0)
    assert (site.vm.state, site.vm.runs, site.claim) == (V.WAKING, True, whole)
    assert site.vm.left == pytest.approx(300.0, abs=10)
    site.done(C.ASLEEP)
    assert site.vm.state is V.WAKING
    site.done(C.RUNNING)
    assert (site.vm.state, site.vm.runs, site.vm.left) == (V.SERVING, None, None)


def test_it_is_told_again_if_its_job_was_suspended_or_resumed_while_it_woke(site: Sleeper) -> None:
    site.fall_asleep()
    site.shows(JobState.RUNNING)
    site.there["h1"] = C.RUNNING
    site.jobs["7"] = site.jobs["7"]._replace(state=JobState.SUSPENDED)
    site.done(C.RUNNING)
    assert (site.vm.state, site.vm.runs) == (V.WAKING, False)
    site.run()
    assert site.vm.state is V.WAKING, "the effect that has ended told it something else"
    site.done(C.RUNNING)
    assert site.vm.state is V.SERVING


def test_without_room_it_waits_and_goes_on_before_all_others(site: Sleeper) -> None:
    site.fall_asleep()
    before = site.hosts["h1"]
    site.fill()
    site.shows(JobState.RUNNING, left=300.0)
    assert (site.vm.state, site.claim.cpus) == (V.DELAYED, 0)
    assert site.vm.reason is not None and site.vm.reason.kind is Why.NO_ROOM_TO_WAKE
    assert "h1" in site.state.closed, "no other VM takes what is free there"
    left = site.vm.left
    site.pass_time(100)
    site.run()
    assert (site.vm.state, site.vm.left) == (V.DELAYED, left), "its time limit grows by the wait"
    site.hosts["h1"] = before
    site.run()
    assert (site.vm.state, site.vm.left) == (V.WAKING, left)
    assert "h1" not in site.state.closed


def test_a_vm_that_runs_and_was_not_told_whether_its_job_does_is_told_again(site: Sleeper) -> None:
    site.fall_asleep()
    site.shows(JobState.RUNNING)
    site.pass_time(1)
    site.there["h1"] = C.RUNNING
    site.run(Done(site.vm.key, EffectKind.WAKE, V.WAKING, Broken("its guest does not answer")))
    site.ended(site.vm.key)
    site.run()
    assert site.vm.state is V.WAKING
    site.done(C.RUNNING)
    assert site.vm.state is V.SERVING


def test_one_that_waits_sleeps_on_when_its_job_is_suspended_again(site: Sleeper) -> None:
    site.fall_asleep()
    site.fill()
    site.shows(JobState.RUNNING)
    site.shows(JobState.SUSPENDED)
    assert (site.vm.state, site.vm.left, site.vm.runs) == (V.ASLEEP, None, None)


def test_a_job_that_is_resumed_while_its_vm_falls_asleep_goes_on(site: Sleeper) -> None:
    whole = site.claim
    site.suspend()
    site.shows(JobState.RUNNING)
    assert (site.vm.state, site.vm.runs, site.claim) == (V.WAKING, True, whole)
    site.done(C.RUNNING)
    assert site.vm.state is V.SERVING


@pytest.mark.parametrize("error", [Refused("no slurmd"), Exhausted("no room")])
def test_a_vm_that_does_not_sleep_says_why_and_is_tried_again_later(site: Sleeper, error: MultiverseError) -> None:
    site.suspend()
    site.run(Done(site.vm.key, EffectKind.SLEEP, V.FALLING_ASLEEP, error))
    assert (site.vm.state, site.vm.runs) == (V.WAKING, False)
    site.done(C.RUNNING)
    assert site.vm.state is V.SERVING and str(error.message) in str(site.vm.reason)
    site.pass_time(AGAIN - 10)
    site.run()
    assert site.vm.state is V.SERVING
    site.pass_time(20)
    site.run()
    assert site.vm.state is V.FALLING_ASLEEP


def test_a_vm_whose_file_is_damaged_is_lost_and_any_other_failure_is_tried_again(site: Sleeper) -> None:
    site.fall_asleep()
    site.shows(JobState.RUNNING)
    for error in (Unknown("no answer"), Exhausted("no memory")):
        site.run(Done(site.vm.key, EffectKind.WAKE, V.WAKING, error))
        assert site.vm.state is V.WAKING
    site.run(Done(site.vm.key, EffectKind.WAKE, V.WAKING, Damaged("it is not as it was written")))
    assert site.vm.state is V.ENDING


@pytest.mark.parametrize("resumed", [False, True])
def test_a_job_that_ends_asleep_leaves_nothing(site: Sleeper, resumed: bool) -> None:
    site.fall_asleep()
    if resumed:
        site.fill()
        site.shows(JobState.RUNNING)
    site.end_job()
    site.run()
    assert site.vm.state is V.RELEASING
    site.settle()
    assert (site.vm.state, site.held, site.there) == (V.GONE, [], {})


def test_a_sleeping_vm_is_lost_and_found_again_asleep(site: Sleeper) -> None:
    site.fall_asleep()
    site.lose("h1")
    assert site.vm.state is V.LOST
    site.away.clear()
    site.run()
    assert (site.vm.state, site.claim.memory) == (V.ASLEEP, STAND_IN)


def test_one_that_was_lost_while_it_woke_is_told_again(site: Sleeper) -> None:
    site.fall_asleep()
    site.shows(JobState.RUNNING)
    site.lose("h1")
    site.away.clear()
    site.there["h1"] = C.RUNNING
    site.run()
    assert (site.vm.state, site.vm.runs) == (V.WAKING, True)


def test_a_host_that_is_off_loses_it_as_any_other_vm(site: Sleeper) -> None:
    site.fall_asleep()
    site.lose("h1")
    site.fence("h1")
    assert site.vm.state is V.ENDING


def test_a_vm_that_is_found_asleep_claims_as_such(site: Sleeper) -> None:
    """The database is an older one, or the answer to the call was lost."""
    site.shows(JobState.SUSPENDED)
    site.there["h1"] = C.ASLEEP
    site.run()
    assert (site.vm.state, site.claim.memory) == (V.ASLEEP, STAND_IN)
    assert site.moved_by(Event.FOUND)


def test_a_sleeping_vm_is_neither_saved_nor_moved(site: Sleeper) -> None:
    site.fall_asleep()
    for verb in ("save", "move", "checkpoint"):
        site.run(Command(verb, job="7"))
        assert [str(error) for _, error in site.state.refusals if "sleeps" in str(error)], verb


# --- one step of a row --------------------------------------------------------------------------------

SINCE, ENDED, BEGAN, NOW = 10.0, 20.0, 30.0, 40.0
"""When a row entered its state, its effect ended, the observation began, and the pass."""
AWAKE, ASLEEP = VmSeen("mvtest0-1", "h1", C.RUNNING, sleeps=3), VmSeen("mvtest0-1", "h1", C.ASLEEP, sleeps=3)
WHOLE = Size(1, 288, 700)


def sleeper(in_state: VmState, **more: Any) -> Vm:
    """A VM that serves attempt 1, in its third sleep."""
    return vm(in_state, attempt=1, since=SINCE, **{"sleeps": 3, **more})


def shown(job: JobState | None, began: float = BEGAN, restarts: int = 0, ended: float | None = ENDED) -> World:
    """The scheduler shows the job like that, by an observation that began then."""
    ref = JobRef("7", 500, restarts)
    jobs = {"7": Job(ref, "hello", 1000, job, Request(1, Size(1, 100)))} if job is not None else {}
    times = {vm(V.WAKING).key: ended} if ended is not None else {}
    return world_of(SchedulerView(jobs), None, began, effect_ended_at=times)


def reasons_of(here: State) -> list[Reason | None]:
    return [one.reason for move in here.moves for one in move.changes]


def stepped(row: Vm, seen: VmSeen, world: World, began: float = BEGAN) -> tuple[Vm, State]:
    """The row after one step, and the state with the move."""
    here = state(attempt(AttemptState.ALLOCATED), row, now=NOW, claims=[Claim(row.key, "h1", WHOLE)])
    step_sleep(here, row, seen, began, world)
    return here.vms[1], here


SUSPENDED, RUNNING = shown(JobState.SUSPENDED), shown(JobState.RUNNING)


@pytest.mark.parametrize(
    ("ended", "began", "asleep"),
    [(20.0, 21.0, True), (20.0, 20.0, False), (SINCE, 21.0, False), (5.0, 21.0, False), (None, 21.0, False)],
)
def test_a_vm_sleeps_once_that_is_seen_after_its_own_call_has_ended(
    ended: float | None, began: float, asleep: bool
) -> None:
    world = shown(JobState.SUSPENDED, ended=ended)
    after, here = stepped(sleeper(V.FALLING_ASLEEP), ASLEEP, world, began)
    assert (after.state is V.ASLEEP) is asleep
    if asleep:
        (move,) = here.moves
        assert move.changes[0].reason == Why.MEMORY_FREED(host="h1")
        assert [one.size for one in move.make] == [Size(0, STAND_IN, WHOLE.disk)]


@pytest.mark.parametrize(("told", "ended", "state_then"), [(True, ENDED, V.SERVING), (False, ENDED, V.WAKING),
    (None, ENDED, V.WAKING), (True, BEGAN, V.WAKING), (True, SINCE, V.WAKING), (True, None, V.WAKING)])  # fmt: skip
def test_one_that_wakes_serves_once_it_was_told_after_its_call_what_the_scheduler_shows_after_that(
    told: bool | None, ended: float | None, state_then: VmState
) -> None:
    row, seen = sleeper(V.WAKING, runs=True, left=50.0), replace(AWAKE, told=told)
    after, here = stepped(row, seen, shown(JobState.RUNNING, ended=ended))
    assert after.state is state_then
    assert reasons_of(here) == ([Why.IS_AWAKE(host="h1")] if state_then is V.SERVING else [])
    assert (after.runs, after.left) == ((None, None) if state_then is V.SERVING else (True, 50.0))


@pytest.mark.parametrize(
    "world", [shown(JobState.RUNNING, began=ENDED), shown(None), shown(JobState.RUNNING, restarts=1)]
)
def test_it_wakes_on_while_the_scheduler_has_not_shown_its_job_since(world: World) -> None:
    after, here = stepped(sleeper(V.WAKING, runs=True), replace(AWAKE, told=True), world)
    assert after.state is V.WAKING and not here.moves


@pytest.mark.parametrize(
    ("runs", "job", "why"),
    [(True, JobState.SUSPENDED, Why.JOB_SUSPENDED()), (False, JobState.RUNNING, Why.JOB_RESUMED())],
)
def test_it_is_told_again_what_has_changed_meanwhile(runs: bool, job: JobState, why: Reason) -> None:
    after, here = stepped(sleeper(V.WAKING, runs=runs, left=50.0), replace(AWAKE, told=runs), shown(job))
    assert (after.state, after.runs, after.left, after.since) == (V.WAKING, not runs, None, NOW)
    assert reasons_of(here) == [why]


@pytest.mark.parametrize("job", [JobState.COMPLETING, JobState.ENDED])
@pytest.mark.parametrize("runs", [True, False])
def test_it_is_not_told_again_when_its_job_is_over(job: JobState, runs: bool) -> None:
    assert stepped(sleeper(V.WAKING, runs=runs), replace(AWAKE, told=runs), shown(job))[0].state is V.SERVING


@pytest.mark.parametrize(
    ("row", "seen", "world", "expected"),
    [
        (sleeper(V.SERVING, runs=True, left=9.0, reason="x"), ASLEEP, SUSPENDED, V.ASLEEP),
        (sleeper(V.SERVING), AWAKE, SUSPENDED, V.SERVING),
        (sleeper(V.DELAYED, runs=True, left=9.0, reason="x"), ASLEEP, SUSPENDED, V.ASLEEP),
        (sleeper(V.DELAYED, runs=True), ASLEEP, RUNNING, V.DELAYED),
        (sleeper(V.DELAYED, runs=True), ASLEEP, shown(None), V.DELAYED),
        (sleeper(V.FALLING_ASLEEP), AWAKE, SUSPENDED, V.FALLING_ASLEEP),
        (sleeper(V.FALLING_ASLEEP), AWAKE, shown(JobState.RUNNING, restarts=1), V.FALLING_ASLEEP),
        (sleeper(V.FALLING_ASLEEP), AWAKE, world_of(None, None, BEGAN), V.FALLING_ASLEEP),
        (sleeper(V.FALLING_ASLEEP), AWAKE, RUNNING, V.WAKING),
    ],
)
def test_what_is_seen_of_a_vm_and_of_its_job_decides_whether_it_sleeps(
    row: Vm, seen: VmSeen, world: World, expected: VmState
) -> None:
    after, here = stepped(row, seen, world)
    assert after.state is expected and bool(here.moves) is (expected is not row.state)
    if expected is V.ASLEEP:
        assert (after.runs, after.left, after.reason) == (None, None, None)


def test_it_counts_on_from_the_number_that_its_host_knows() -> None:
    """The database is an older one: a call with a number that the host has had would be refused."""
    row = sleeper(V.WAKING, runs=True, left=50.0)
    after, here = stepped(row, replace(AWAKE, sleeps=5, told=True), RUNNING)
    assert (after.state, after.sleeps, after.runs, after.left, after.since) == (V.WAKING, 5, True, 50.0, NOW)
    assert reasons_of(here) == [Why.FOUND_ASLEEP()]
    untold, _ = stepped(replace(row, runs=None), replace(AWAKE, sleeps=5), RUNNING)
    assert untold.runs is False
    found, here = stepped(sleeper(V.SERVING), replace(ASLEEP, sleeps=5), SUSPENDED)
    assert (found.state, found.sleeps) == (V.ASLEEP, 5) and reasons_of(here) == [Why.FOUND_ASLEEP()]


def test_each_sleep_has_a_number_of_its_own_and_begins_without_what_was_told_before() -> None:
    row = sleeper(V.SERVING, runs=True, left=9.0, reason="x")
    falling = put_to_sleep(row, Why.SUSPENDED_LONG(limit=60.0)).row
    assert falling == replace(row, state=V.FALLING_ASLEEP, sleeps=4, runs=None, left=None, reason=None)
    waking = stay_awake(replace(row, state=V.FALLING_ASLEEP), Why.OPERATOR()).row
    assert isinstance(waking, Vm) and (waking.runs, waking.left) == (False, None)
    delayed = delay_vm(replace(row, state=V.ASLEEP, runs=None, left=None), 50.0, Why.OPERATOR()).row
    assert isinstance(delayed, Vm) and (delayed.runs, delayed.left) == (True, 50.0)


def test_a_vm_has_the_job_of_its_attempt_alone() -> None:
    row = sleeper(V.SERVING)
    here = state(attempt(AttemptState.ALLOCATED), row, now=NOW)
    assert job_of(here, row, RUNNING) is not None
    assert job_of(here, replace(row, attempt=None), RUNNING) is None
    for world in (shown(JobState.RUNNING, restarts=1), shown(None), world_of(None, None, BEGAN)):
        assert job_of(here, row, world) is None


# --- which VMs sleep and wake -------------------------------------------------------------------------


def test_it_sleeps_at_the_limit_and_is_tried_again_at_the_end_of_its_pause(site: Sleeper) -> None:
    site.shows(JobState.SUSPENDED)
    (since,) = site.state.compared.suspended.values()
    site.clock.time = since + AFTER - 1.01  # a run takes as long
    site.run()
    assert site.vm.state is V.FALLING_ASLEEP
    assert site.vm_reasons(Event.SLEEP) == [Why.SUSPENDED_LONG(limit=AFTER)]
    site.run(Done(site.vm.key, EffectKind.SLEEP, V.FALLING_ASLEEP, Refused("no slurmd")))
    site.done(C.RUNNING)
    assert site.vm.state is V.SERVING
    site.clock.time = site.vm.since + AGAIN - 1.01
    site.run()
    assert site.vm.state is V.FALLING_ASLEEP


def test_a_vm_whose_guest_cannot_be_told_keeps_its_memory(site: Sleeper) -> None:
    site.mute = True
    site.suspend()
    assert site.vm.state is V.SERVING


def test_room_is_looked_for_with_what_it_holds_and_its_disk_it_has_kept(site: Sleeper) -> None:
    """The host has exactly what the VM claims beside its template: memory to the MiB, and no disk."""
    whole = site.claim
    site.fall_asleep()
    used = site.state.claims.used["h1"]
    enough = used.memory - STAND_IN + whole.memory
    for memory, then in ((enough - 1, V.DELAYED), (enough, V.WAKING)):
        site.hosts["h1"] = replace(site.hosts["h1"], capacity=Size(whole.cpus, memory, 0))
        site.shows(JobState.RUNNING, left=300.0)
        assert site.vm.state is then
    assert site.claim == whole


def test_it_goes_on_if_it_runs_though_nobody_has_let_it(site: Sleeper) -> None:
    """A call that was late has woken it, and there is no room for it."""
    site.fall_asleep()
    site.fill()
    site.pass_time(5)
    site.there["h1"] = C.RUNNING
    site.run()
    assert (site.vm.state, site.vm.runs) == (V.WAKING, False), "its job is suspended"


def test_without_a_time_limit_none_is_left_and_past_it_nothing(site: Sleeper) -> None:
    for left, then in ((None, None), (-50.0, 0.0)):
        fresh = Sleeper()
        fresh.fall_asleep()
        fresh.shows(JobState.RUNNING, left=left)
        assert (fresh.vm.state, fresh.vm.left) == (V.WAKING, then)


def test_a_job_that_is_read_again_alone_counts_from_then_on() -> None:
    times = {vm(V.WAKING).key: ENDED}
    assert RUNNING.scheduler is not None
    view = replace(RUNNING.scheduler.value, jobs_began={"7": BEGAN})
    world = world_of(view, None, ENDED - 1, effect_ended_at=times)
    assert stepped(sleeper(V.WAKING, runs=True), replace(AWAKE, told=True), world)[0].state is V.SERVING


@pytest.mark.parametrize(
    ("in_state", "job", "sleeps"),
    [
        (V.SERVING, JobState.SUSPENDED, True),
        (V.SERVING, JobState.RUNNING, False),
        (V.JOINED, JobState.SUSPENDED, False),
        (V.SERVING, None, False),
    ],
)
def test_only_a_vm_that_serves_a_suspended_job_falls_asleep_and_others_do_not_keep_it(
    in_state: VmState, job: JobState | None, sleeps: bool
) -> None:
    """Job 6 was suspended a moment ago."""
    row, view = sleeper(in_state), shown(job).scheduler
    here = state(attempt(AttemptState.ALLOCATED), row, now=NOW, claims=[Claim(row.key, "h1", WHOLE)])
    here.compared.suspended = {"6": NOW, "7": NOW - AFTER}
    assert view is not None
    world = world_of(view.value, HypervisorView({"h1": storing("h1")}, {}), BEGAN)
    put_suspended_to_sleep(Context(here, world, replace(POLICY, sleep_after=AFTER)))
    assert (here.vms[1].state is V.FALLING_ASLEEP) is sleeps


def sleepers(*some: tuple[VmState, JobState | None, float, int, str], memory: int, more: tuple[Row, ...] = ()) -> State:
    """VMs of that state, whose jobs are shown like that, since when, of how many MiB and on which host; then those that
    are resumed have been let go on. h1 has so much memory, and no disk left; h3 is out of sight."""
    rows, claims, jobs = list[Row](more), list[Claim](), dict[str, Job]()
    for number, (in_state, job, since, size, on) in enumerate(some, 1):
        row = vm(in_state, id=number, attempt=number, since=since, host=on, template_size=None)
        row = replace(row, size=Size(1, size))
        rows += [attempt(AttemptState.ALLOCATED, id=number, job=str(number)), row]
        claims.append(Claim(row.key, on, Size(0, STAND_IN, 700)))
        if job is not None:
            ref = JobRef(str(number), 500)
            jobs[ref.job_id] = Job(ref, "hello", 1000, job, Request(1, Size(1, 100)), deadline=NOW + 300)
    here = state(*rows, now=NOW, claims=claims, known=("h1", "h2", "h3"))
    hosts = {"h1": replace(storing("h1", 9), capacity=Size(9, memory, 700 * len(some))), "h2": storing("h2", 9)}
    wake_resumed(Context(here, world_of(SchedulerView(jobs), HypervisorView(hosts, {}), BEGAN), POLICY))
    return here


J, R = JobState, JobState.RUNNING


def test_the_first_ones_that_were_resumed_wake_and_nobody_else_takes_the_room_on_their_host() -> None:
    here = sleepers(
        (V.ASLEEP, None, 1.0, 100, "h1"),
        (V.ASLEEP, J.SUSPENDED, 1.0, 100, "h1"),
        (V.ASLEEP, R, 1.0, 100, "h3"),
        (V.DELAYED, R, 9.0, 1000, "h1"),
        (V.DELAYED, R, 5.0, 1000, "h1"),
        (V.ASLEEP, R, 1.0, 100, "h1"),
        (V.ASLEEP, R, 1.0, 100, "h2"),
        memory=6 * STAND_IN + 1900,
    )
    assert [(id_, one.state) for id_, one in sorted(here.vms.items())] == [
        (1, V.ASLEEP), (2, V.ASLEEP), (3, V.ASLEEP), (4, V.DELAYED), (5, V.WAKING), (6, V.DELAYED), (7, V.WAKING),
    ]  # fmt: skip
    assert (here.vms[6].left, here.vms[6].reason) == (300.0, Why.NO_ROOM_TO_WAKE(host="h1"))
    assert here.claims[ClaimKey(here.vms[5].key, "h1")].size == Size(1, 1000 + STAND_IN, 700), "its disk it has kept"


def test_a_record_that_is_set_aside_does_not_wake() -> None:
    row = vm(V.ASLEEP, id=9, attempt=1, quarantined="x")
    here = sleepers((V.ASLEEP, R, 1.0, 100, "h1"), memory=9999, more=(row,))
    assert [here.vms[number].state for number in (1, 9)] == [V.WAKING, V.ASLEEP]


@pytest.mark.parametrize("with_spare", [True, False])
def test_spares_of_its_host_give_way_and_then_templates_that_nothing_uses(with_spare: bool) -> None:
    spares = [vm(V.PARKED, id=20 + n, host=f"h{n}", pool=Depth.PARKED) for n in (1, 2)] if with_spare else []
    ready = [template(TemplateState.READY, id=n, host=f"h{n}") for n in (1, 2)]
    here = sleepers((V.DELAYED, R, 1.0, 1000, "h1"), memory=500, more=(*spares, *ready))
    gone = [f"{key.kind} {key.id}" for move in here.moves for key in [move.changes[0].row.key]]
    assert gone == (["vm 21"] if with_spare else ["template 1"])
    assert reasons_of(here) == [Why.GIVES_WAY_TO(vm="mvtest0-1")]
