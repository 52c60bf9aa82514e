"""States of saved jobs that are copied to a second storage, from which jobs go on when the first one is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.errors import Damaged, Exhausted, Gone, MultiverseError, Unknown
from multiverse.core.machines.saved import MOST_COPY_TRIES, SAVED_EFFECTS
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.job import AttemptState
from multiverse.core.model.saved import SavedSeen, SavedState, Storage
from multiverse.core.model.vm import VmState
from multiverse.core.model.world import Observation, Seen
from multiverse.core.saving import unexplained_states
from multiverse.core.transition import Command, Done, EffectKind
from multiverse.service.hosts import saved_view
from tests.unit.rows import SOURCE
from tests.unit.test_saved_jobs import STORAGE, Site

S, A, V = SavedState, AttemptState, VmState
SHARED = Storage("elsewhere", STORAGE.machine)


class TwoHosts(Site):
    """Host h1, which saves the job, and h2, which has a source of its own. Each has a storage of its own, and both
    reach the one for copies. `files` is what h1 shows of the storages that it reaches, and `others` what h2 shows."""

    second: Host | None = None

    def __init__(self, **job: object) -> None:
        super().__init__(**job)
        self.hosts["h1"] = replace(self.hosts["h1"], copies=SHARED)
        self.second = replace(self.hosts["h1"], name="h2", storage=Storage("of h2", STORAGE.machine))
        self.others: dict[str, SavedSeen] = {}
        self.known = {"h1", "h2"}  # hosts that answer

    def observe(self) -> None:
        super().observe()
        if self.second is None:
            return
        first = self.world.sources[SOURCE]
        assert first.latest is not None
        there = {name: seen for name, seen in self.vms.items() if seen.host == "h2"}
        second = Seen(HypervisorView({"h2": self.second}, there, {}, dict(self.others)), first.latest.began)
        sources = {SOURCE: first if "h1" in self.known else Observation(None, self.unknown_since)}
        sources["h2"] = Observation(second, 0.0) if "h2" in self.known else Observation(None, self.unknown_since)
        self.world = replace(self.world, sources=sources)

    def lose(self, host: str) -> None:
        self.known.remove(host)
        self.unknown_since = self.clock.time

    def copied(self) -> None:
        """The copy is complete, as both hosts show."""
        name, token = self.saved.name, self.saved.token
        self.files[name] = replace(self.files[name], copy=SHARED.name)
        self.others[name] = SavedSeen(name, token, self.saved.bytes, SHARED.name)
        self.done()
        self.run()

    def fail_to_copy(self, error: MultiverseError | None = None) -> None:
        self.run(Done(self.saved.key, EffectKind.COPY, str(S.COPYING), error or Exhausted("no room there")))

    def to_copying(self) -> None:
        self.to_stored()
        assert self.saved.state is S.COPYING

    def to_copied(self) -> None:
        """The first VM is gone, both storages have the files, and the job is held by its user."""
        self.to_copying()
        self.restart(1, held=True, eligible=False)
        self.copied()
        for _ in range(4):
            self.run()
            self.clear()

    def restored(self) -> None:
        """Its user has released the job, and some passes are planned."""
        self.restart(1, held=False, eligible=True)
        for _ in range(4):
            self.run()

    def damaged(self) -> None:
        """What the planned VM is to be restored from is not as it was written."""
        assert self.vm.state is V.PLANNED and self.vm.saved == self.saved.name
        self.run(Done(self.vm.key, EffectKind.CREATE, str(V.PLANNED), Damaged("its files are not as they were")))
        for _ in range(4):
            self.run()
            self.clear()


@pytest.fixture
def site() -> TwoHosts:
    return TwoHosts()


# --- the copy ---------------------------------------------------------------------------------------


def test_a_state_is_copied_as_soon_as_it_is_complete(site: TwoHosts) -> None:
    site.to_writing()
    assert SAVED_EFFECTS[site.saved.state] is EffectKind.SAVE
    site.to_copying()
    assert SAVED_EFFECTS[site.saved.state] is EffectKind.COPY and site.state.source_copying(site.saved) == SOURCE
    claimed = site.saved.claimed
    site.copied()
    assert (site.saved.state, site.saved.storages) == (S.STORED, (STORAGE.name, SHARED.name))
    assert site.saved.claimed == claimed, "it counts once for quotas"
    for _ in range(5):
        site.pass_time(600.0)
        site.run()
    assert site.saved.state is S.STORED, "once is enough"


def test_the_vm_ends_while_its_state_is_copied(site: TwoHosts) -> None:
    first = site.vm
    site.to_copying()
    site.run()
    assert site.saved.state is S.COPYING and site.rows.vms[first.id].state is V.RELEASING


def test_nothing_is_copied_where_there_is_no_storage_for_copies(site: TwoHosts) -> None:
    site.hosts["h1"] = replace(site.hosts["h1"], copies=None)
    site.to_stored()
    for _ in range(3):
        site.pass_time(600.0)
        site.run()
    assert site.saved.state is S.STORED and site.saved.copy_tries == 0
    site.hosts["h1"] = replace(site.hosts["h1"], copies=SHARED)
    site.run()
    assert site.saved.state is S.COPYING, "as soon as it is there"


def test_nothing_is_copied_to_the_storage_where_it_is(site: TwoHosts) -> None:
    site.hosts["h1"] = replace(site.hosts["h1"], copies=STORAGE)
    site.to_stored()
    assert site.saved.state is S.STORED


def test_what_is_kept_in_memory_is_not_copied(site: TwoHosts) -> None:
    site.to_writing()
    for _ in range(3):
        site.run(Done(site.saved.key, EffectKind.SAVE, str(S.WRITING), Exhausted("no room")))
    site.files[site.saved.name] = SavedSeen(site.saved.name, site.saved.token, 0, "", kept=True)
    site.vms.pop(site.name)
    site.done()
    site.run()
    assert site.saved.kept == "h1" and site.saved.state is S.STORED


def test_a_copy_that_fails_is_tried_again_after_growing_pauses_and_not_for_ever(site: TwoHosts) -> None:
    site.to_copying()
    pauses = []
    for tries in range(1, MOST_COPY_TRIES):
        site.fail_to_copy()
        assert (site.saved.state, site.saved.copy_tries) == (S.STORED, tries)
        assert "could not be copied (" in saved_view(site.saved).reason, "operators read why"
        failed = site.clock.time
        while site.saved.state is S.STORED:
            assert site.clock.time < failed + 2 * 3600.0
            site.pass_time(30.0)
            site.run()
        pauses.append(site.clock.time - failed)
    assert pauses[:3] == sorted(pauses[:3]) and pauses[0] < 100.0 and pauses[2] > 200.0 and max(pauses) < 3700.0
    site.fail_to_copy()
    for _ in range(10):
        site.pass_time(3600.0)
        site.run()
    assert site.saved.state is S.STORED and site.saved.copy_tries == MOST_COPY_TRIES
    site.restored()
    assert site.saved.state is S.STORED, "it has its one storage"


def test_a_copy_without_a_reply_is_observed(site: TwoHosts) -> None:
    site.to_copying()
    site.fail_to_copy(Unknown("the connection broke"))
    assert site.saved.state is S.COPYING and site.saved.copy_tries == 0, "it may go on"
    site.copied()
    assert site.saved.copy == SHARED.name
    site.fail_to_copy()
    assert site.saved.copy == SHARED.name and site.saved.copy_reason is None, "a late failure changes nothing"


def test_a_copy_that_succeeds_clears_what_failed_before(site: TwoHosts) -> None:
    site.to_copying()
    site.fail_to_copy()
    site.pass_time(100.0)
    site.run()
    assert site.saved.state is S.COPYING
    site.copied()
    assert site.saved.copy_reason is None and "could not be copied" not in saved_view(site.saved).reason


def test_files_of_another_vm_are_no_copy(site: TwoHosts) -> None:
    site.to_copying()
    site.others[site.saved.name] = SavedSeen(site.saved.name, "another", 1, SHARED.name)
    site.done()
    site.run()
    assert site.saved.state is S.COPYING


# --- a job that goes on -----------------------------------------------------------------------------


def test_a_job_goes_on_while_its_state_is_copied(site: TwoHosts) -> None:
    site.to_restored()
    assert site.saved.state is S.COPYING
    assert (site.vm.saved, site.vm.host, site.vm.storage) == (site.saved.name, "h1", STORAGE.name)
    site = TwoHosts()
    site.to_thawing()
    assert site.saved.state is S.THAWING
    site.run(Done(site.saved.key, EffectKind.COPY, str(S.COPYING), Exhausted("its files were removed")))
    assert site.saved.state is S.THAWING


def test_a_job_whose_host_is_lost_after_the_copy_goes_on_elsewhere(site: TwoHosts) -> None:
    site.to_copied()
    site.lose("h1")
    site.restored()
    assert (site.vm.host, site.vm.saved, site.vm.storage) == ("h2", site.saved.name, SHARED.name)
    assert site.vm.token not in ("", site.saved.token)


def test_a_job_whose_host_is_lost_before_the_copy_waits_for_it(site: TwoHosts) -> None:
    site.to_copying()
    site.restart(1, held=True, eligible=False)
    for _ in range(4):
        site.run()
        site.clear()
    site.lose("h1")
    site.pass_time(600.0)
    site.restored()
    assert site.saved.state is S.COPYING and not site.rows.vms
    assert f"no host that takes VMs reaches the storage {STORAGE.name}" in site.reasons["7"]
    site.known.add("h1")
    site.restored()
    assert site.vm.host == "h1" and site.vm.saved == site.saved.name


def test_the_reason_names_both_storages(site: TwoHosts) -> None:
    site.to_copied()
    site.lose("h1")
    site.second = replace(site.second, copies=None)
    site.restored()
    assert f"reaches the storage {STORAGE.name} or {SHARED.name}" in site.reasons["7"]


def test_only_a_host_that_makes_the_same_machine_goes_on_with_a_copy(site: TwoHosts) -> None:
    site.to_copied()
    site.lose("h1")
    site.second = replace(site.second, copies=Storage(SHARED.name, "another QEMU"))
    site.restored()
    assert not site.rows.vms and site.saved.state is S.STORED


def test_a_host_that_writes_where_others_copy_to_restores_a_copy(site: TwoHosts) -> None:
    site.to_copied()
    site.lose("h1")
    site.second = replace(site.second, storage=SHARED, copies=None)
    site.restored()
    assert (site.vm.host, site.vm.storage) == ("h2", SHARED.name)


def test_a_host_whose_own_disk_is_lost_restores_from_the_copy(site: TwoHosts) -> None:
    site.to_copied()
    site.lose("h2")
    site.hosts["h1"] = replace(site.hosts["h1"], storage=None)
    site.restored()
    assert (site.vm.host, site.vm.storage) == ("h1", SHARED.name)


def test_a_damaged_file_is_read_from_the_copy_before_the_job_is_held(site: TwoHosts) -> None:
    site.to_copied()
    site.lose("h2")
    site.restored()
    assert site.vm.storage == STORAGE.name
    site.damaged()
    assert site.saved.state is S.STORED and site.saved.storages == (SHARED.name,) and not site.saved.hold
    shown = saved_view(site.saved)
    assert f"in storage {STORAGE.name} is of no use: its files are not as they were" in shown.reason
    site.restored()
    assert site.vm.storage == SHARED.name
    site.damaged()
    assert site.saved.state is S.HOLDING and "it cannot go on" in str(site.saved.reason)


def test_a_damaged_copy_is_told_and_the_job_waits_for_the_other_storage(site: TwoHosts) -> None:
    site.to_copied()
    site.lose("h1")
    site.restored()
    site.damaged()
    assert site.saved.state is S.STORED and site.saved.storages == (STORAGE.name,)
    assert f"in storage {SHARED.name} is of no use" in saved_view(site.saved).reason
    site.known.add("h1")
    site.restored()
    assert (site.vm.host, site.vm.storage) == ("h1", STORAGE.name)


def test_a_damaged_file_without_a_complete_copy_holds_the_job(site: TwoHosts) -> None:
    site.to_restored()
    assert site.saved.state is S.COPYING
    site.damaged()
    assert site.saved.state is S.HOLDING


def test_a_storage_out_of_reach_is_not_damage(site: TwoHosts) -> None:
    site.to_copied()
    site.restored()
    site.run(Done(site.vm.key, EffectKind.CREATE, str(V.PLANNED), Gone("out of reach")))
    assert site.saved.storages == (STORAGE.name, SHARED.name)


@pytest.mark.parametrize("copying", [True, False])
def test_a_held_job_is_resumed_whether_or_not_its_state_is_copied(site: TwoHosts, copying: bool) -> None:
    site.to_preparing(hold=True)
    site.to_copying()
    site.restart(1, held=True, eligible=False)
    if not copying:
        site.fail_to_copy()
        site.run(Command("resume_saved", job="7", uid=1000))
        assert "held by an operator" in str(site.state.refusals[0][1]), "as if nothing had failed"
    site.run(Command("resume_saved", job="7"))
    assert site.saved.state is S.RESUMING
    site.restart(1, held=False, eligible=True)
    site.done()
    site.run()
    assert site.saved.state is (S.COPYING if copying else S.STORED) and not site.saved.hold


# --- its end ----------------------------------------------------------------------------------------


def cancel(site: TwoHosts) -> None:
    del site.jobs["7"]
    site.run()
    assert site.saved.state is S.DISCARDING


def test_both_storages_are_emptied(site: TwoHosts) -> None:
    site.to_copied()
    cancel(site)
    assert site.state.sources_discarding(site.saved) == [SOURCE], "which reaches both"
    site.done()
    site.run()
    assert site.saved.state is S.DISCARDING, "they are still shown"
    site.files.clear()
    site.run()
    assert site.state.sources_discarding(site.saved) == [SOURCE, "h2"], "of the copy"
    site.others.clear()
    site.run()
    assert not site.rows.saved


def test_what_a_lost_host_still_has_is_removed_when_it_is_back(site: TwoHosts) -> None:
    site.to_copied()
    name = site.saved.name
    site.lose("h1")
    site.run()
    cancel(site)
    assert site.state.sources_discarding(site.saved) == ["h2"]
    site.others.clear()
    site.done()
    site.run()
    assert not site.rows.saved, "nobody can go on with the rest"
    site.known.add("h1")
    site.files[name] = replace(site.files[name], copy="")
    site.run()
    assert unexplained_states(site.state, site.world, site.policy) == [(name, SOURCE)]


def test_a_copy_that_is_begun_goes_with_its_state(site: TwoHosts) -> None:
    site.to_copying()
    for _ in range(4):
        site.run()
        site.clear()
    cancel(site)
    name = site.saved.name
    site.others[name] = SavedSeen(name, "", 0, SHARED.name, complete=False)
    site.run()
    assert site.state.sources_discarding(site.saved) == [SOURCE, "h2"]
    site.files[name] = SavedSeen(name, "", 0, SHARED.name, complete=False)
    site.done()
    site.run()
    assert site.saved.state is S.DISCARDING
    site.files.clear()
    site.others.clear()
    site.run()
    assert not site.rows.saved


def test_a_state_that_waits_for_too_long_is_discarded_though_it_is_being_copied(site: TwoHosts) -> None:
    site.policy = replace(site.policy, save_keep=86400.0)
    site.to_copying()
    site.restart(1, held=True, eligible=False)
    site.pass_time(86500.0)
    site.run()
    assert site.saved.state is S.HOLDING
