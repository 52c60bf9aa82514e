"""VMs whose jobs are suspended sleep, and wake when their jobs are resumed and there is room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.errors import Broken, Damaged, Exhausted, MultiverseError, Refused, Unknown
from multiverse.core.machines.sleep import STAND_IN
from multiverse.core.model.basics import Size
from multiverse.core.model.job import JobState
from multiverse.core.model.reason import Why
from multiverse.core.model.saved import Storage
from multiverse.core.model.vm import VmCondition, VmState
from multiverse.core.model.world import Observation
from multiverse.core.sleeping import AGAIN
from multiverse.core.transition import Command, Done, EffectKind, Event
from tests.unit.test_places import Site

V, C = VmState, VmCondition
AFTER = 60.0  # seconds that a job is suspended before its VM sleeps


class Sleeper(Site):
    """A job in a VM of a host that lets it sleep."""

    told: bool | None = None  # what its guest was told last

    def __init__(self) -> None:
        super().__init__()
        self.policy = replace(self.policy, sleep_after=AFTER)
        self.hosts["h1"] = replace(self.hosts["h1"], storage=Storage("st", "7.2 tcg"))
        self.run()

    def observe(self) -> None:
        super().observe()
        latest = self.world.sources["h1"].latest
        if latest is not None:
            vms = {name: replace(seen, told=self.told) for name, seen in latest.value.vms.items()}
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
