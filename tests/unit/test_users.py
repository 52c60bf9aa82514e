"""Users: what the name service says, what is concluded from it, and how long it is waited for."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.controller.users import FRESH, KEPT, UserDirectory
from multiverse.core.admission.admit import PATIENCE
from multiverse.core.errors import Gone, Refused, Unknown
from multiverse.core.machines.tables import permitted_effects
from multiverse.core.model.identity import User, UserSeen
from multiverse.core.model.job import AttemptState
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import VmCondition, VmState
from multiverse.core.transition import EffectKind
from multiverse.drivers.slurm.reading import name_service
from multiverse.drivers.slurm.reading.name_service import NameService, is_surely_absent, lookup
from tests.unit.planner_harness import POLICY, ManualClock, PlannerHarness

A, V = AttemptState, VmState
ADA = User("ada", 1000, 1000, "/home/ada", "/bin/sh")
NOBODY = 3_999_999_999


# --- what the name service says ---------------------------------------------------------------------


def test_a_user_is_found_with_all_groups() -> None:
    root = lookup(0)
    assert (root.name, root.uid, root.gid, root.home) == ("root", 0, 0, "/root")
    assert ("root", 0) in root.groups


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\nada:x:1000:1000::/home/ada:/bin/sh\n")
    (tmp_path / "nsswitch.conf").write_text("passwd:         files systemd\ngroup: files sss\n")
    monkeypatch.setattr(name_service, "PASSWD", tmp_path / "passwd")
    monkeypatch.setattr(name_service, "NSSWITCH", tmp_path / "nsswitch.conf")
    return tmp_path


def test_a_user_who_is_in_no_local_file_is_surely_absent_if_only_local_services_know_users(etc: Path) -> None:
    assert is_surely_absent(1001)
    assert not is_surely_absent(1000), "the look-up failed, for the file has the user"
    with pytest.raises(Gone):
        lookup(NOBODY)


@pytest.mark.parametrize("line", ["files sss", "sss files", "files [NOTFOUND=return] ldap", "compat", "winbind files"])
def test_a_user_is_not_absent_for_a_service_that_may_be_silent(etc: Path, line: str) -> None:
    """Such a service also answers "not found" while its server is away."""
    (etc / "nsswitch.conf").write_text(f"passwd: {line}\n")
    with pytest.raises(Unknown):
        lookup(NOBODY)


@pytest.mark.parametrize("missing", ["passwd", "nsswitch.conf"])
def test_a_user_is_not_absent_if_the_files_cannot_be_read(etc: Path, missing: str) -> None:
    (etc / missing).unlink()
    with pytest.raises(Unknown):
        lookup(NOBODY)


@pytest.mark.parametrize("text", ["", "passwd:\n", "# passwd: files\n", "passwd: systemd # files\n"])
def test_a_user_is_not_absent_if_it_is_not_known_who_knows_users(etc: Path, text: str) -> None:
    (etc / "nsswitch.conf").write_text(text)
    assert not is_surely_absent(1001)


def test_an_error_of_the_name_service_is_unknown(etc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def getpwuid_r(*_: object) -> int:
            return errno.EMFILE

    monkeypatch.setattr(name_service.ctypes, "CDLL", lambda _: Library)
    with pytest.raises(Unknown, match=os.strerror(errno.EMFILE)):
        lookup(NOBODY)


# --- its own threads --------------------------------------------------------------------------------


class Hanging:
    """Look-ups that hang until they are let go."""

    def __init__(self, hangs: Callable[[int], bool] = lambda uid: True) -> None:
        self.hangs, self.calls, self.go = hangs, [], threading.Event()

    def __call__(self, uid: int) -> User:
        self.calls.append(uid)
        if self.hangs(uid):
            assert self.go.wait(30)
        return replace(ADA, uid=uid)


async def test_look_ups_that_hang_end_for_their_callers_and_take_a_limited_number_of_threads() -> None:
    find = Hanging()
    service = NameService(find, threads=3, limit=0.2)
    before = threading.active_count()
    results = await asyncio.gather(*(service.user(uid) for uid in range(10)), return_exceptions=True)
    assert all(isinstance(result, Unknown) for result in results)
    assert len(find.calls) == 3 and threading.active_count() - before == 3
    with pytest.raises(Unknown):
        await service.user(find.calls[0])
    assert len(find.calls) == 3, "it is asked for already"
    assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 5) == 1, "the default pool is free"
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("user ")), "at exit too"
    find.go.set()
    await asyncio.sleep(0.1)
    assert (await service.user(77)).uid == 77, "the threads that came back are used again"


async def test_a_user_is_looked_up_while_others_hang() -> None:
    find = Hanging(lambda uid: uid == 1)
    service = NameService(find, threads=2, limit=2.0)
    slow, *quick = await asyncio.gather(*(service.user(uid) for uid in range(1, 9)), return_exceptions=True)
    assert isinstance(slow, Unknown) and [user.uid for user in quick if isinstance(user, User)] == list(range(2, 9))
    find.go.set()


async def test_a_defect_of_a_look_up_is_unknown() -> None:
    def find(uid: int) -> User:
        raise ZeroDivisionError

    with pytest.raises(Unknown, match="ZeroDivisionError"):
        await NameService(find).user(5)


# --- what is kept -----------------------------------------------------------------------------------


class Answers:
    """A name service with these answers, of which the last one is repeated."""

    def __init__(self, *answers: User | Exception) -> None:
        self.answers, self.calls = list(answers), 0
        self.clock = ManualClock()
        self.changes = self.known = 0
        self.directory = UserDirectory(self.find, self.clock, self.changed, self.became_known)

    def changed(self) -> None:
        self.changes += 1

    def became_known(self) -> None:
        self.known += 1

    async def find(self, uid: int) -> User:
        self.calls += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, User):
            return answer
        raise answer

    async def look_up(self) -> None:
        self.directory.look_up([1000])
        await asyncio.sleep(0.01)


async def test_a_user_is_asked_for_once_and_kept_for_the_start() -> None:
    one = Answers(ADA)
    await one.look_up()
    assert one.directory.seen()[1000].exists and one.changes == 1
    assert await one.directory.user(1000) == ADA and one.calls == 1
    one.clock.time += FRESH + 1
    assert await one.directory.user(1000) == ADA and one.calls == 2, "groups may have changed"
    assert one.known == 1, "the user was known before"


async def test_a_user_who_was_known_stays_known_while_the_name_service_is_silent() -> None:
    one = Answers(ADA, Unknown("no answer"))
    await one.look_up()
    one.clock.time += FRESH + 1
    assert await one.directory.user(1000) == ADA and one.calls == 2
    assert one.directory.seen()[1000].exists and one.directory.failures() == []
    one.clock.time += KEPT
    with pytest.raises(Unknown):
        await one.directory.user(1000)
    assert one.directory.seen() == {}


async def test_a_user_who_is_unknown_is_asked_for_again_after_growing_pauses_until_there_is_an_answer() -> None:
    one = Answers(Unknown("no answer"), Unknown("no answer"), RuntimeError("odd"), ADA)
    await one.look_up()
    began = one.clock.time
    assert one.directory.seen() == {} and one.directory.failures()[0].since == began
    await one.look_up()
    assert one.calls == 1, "a moment ago"
    pauses = []
    while one.directory.failures():
        pauses.append(one.directory.next_due() - one.clock.time)
        one.clock.time = one.directory.next_due()
        await one.look_up()
    assert pauses == sorted(set(pauses)) and len(pauses) == 3
    assert one.directory.seen()[1000].since == one.clock.time and one.directory.next_due() == float("inf")
    assert one.known == 1 and one.changes == 4


async def test_a_user_whom_nobody_needs_to_know_any_more_is_not_asked_for_again() -> None:
    one = Answers(Unknown("no answer"))
    await one.look_up()
    one.directory.look_up([])
    assert one.directory.failures() == [] and one.directory.next_due() == float("inf")


async def test_a_user_who_surely_does_not_exist_is_refused_and_may_be_added_later() -> None:
    one = Answers(Gone("no user has uid 1000"), Gone("no user has uid 1000"), ADA)
    await one.look_up()
    assert not one.directory.seen()[1000].exists
    with pytest.raises(Refused):
        await one.directory.user(1000)
    one.clock.time += 60
    assert await one.directory.user(1000) == ADA


# --- what is concluded ------------------------------------------------------------------------------


class WithUsers(PlannerHarness):
    """A harness that knows the users in `users`."""

    def __init__(self) -> None:
        super().__init__()
        self.users: dict[int, UserSeen] = {}

    def observe(self) -> None:
        super().observe()
        self.world = replace(self.world, users=dict(self.users))

    def settle(self) -> None:
        """The template's row is made and found built; then jobs are admitted."""
        for _ in range(3):
            self.run()

    def answer(self, exists: bool) -> None:
        self.users[1000] = UserSeen(exists, self.clock.time, self.clock.time, "no user has uid 1000")


def waiting() -> WithUsers:
    harness = WithUsers()
    harness.template()
    harness.job()
    harness.settle()
    return harness


def test_no_vm_is_made_before_its_user_is_known() -> None:
    harness = waiting()
    assert harness.attempt().state is A.QUEUED and not harness.rows.vms
    assert set(harness.state.users_asked) == {1000}
    harness.pass_time(100_000)
    harness.run()
    assert harness.attempt().state is A.QUEUED, "it is not given up"
    assert set(harness.state.users_asked) == {1000}, "its user is asked for again"
    harness.answer(True)
    harness.settle()
    assert harness.attempt().state is A.CLAIMED and not harness.state.users_asked


def ready(*known: int) -> WithUsers:
    """A template, and these users known."""
    harness = WithUsers()
    for uid in known:
        harness.users[uid] = UserSeen(True, 0.0, 0.0)
    harness.template()
    harness.settle()
    return harness


def test_a_job_whose_user_is_unknown_holds_up_other_jobs_for_two_seconds_at_most() -> None:
    harness = ready(1001, 1002)
    harness.job("7")
    harness.job("8", uid=1001, rank=5)
    harness.run()
    assert harness.attempt(2).state is A.QUEUED and not harness.state.reasons, "and nobody is told why"
    harness.pass_time(PATIENCE)
    harness.run()
    assert harness.attempt().state is A.QUEUED and harness.attempt(2).state is A.CLAIMED
    assert "name service" in str(harness.state.reasons[1])
    harness.job("9", uid=1002, rank=6)
    harness.job("91", uid=1003, rank=1)
    harness.run()
    assert harness.attempt(3).state is A.CLAIMED, "the name service is slow: nobody waits for it any more"
    assert set(harness.state.users_asked) == {1000, 1003}


def test_the_order_of_the_queue_does_not_depend_on_whose_user_is_told_first() -> None:
    harness = ready()
    harness.job("7")
    harness.job("8", uid=1001, rank=5)
    harness.run()
    assert set(harness.state.users_asked) == {1000, 1001}, "both are asked for at once"
    harness.users[1001] = UserSeen(True, harness.clock.time, harness.clock.time)
    harness.run()
    assert harness.attempt(2).state is A.QUEUED
    harness.answer(True)
    harness.run()
    assert harness.attempt().state is harness.attempt(2).state is A.CLAIMED


def test_what_jobs_are_told_stays_while_a_new_user_is_asked_for() -> None:
    harness = ready(1000)
    for number in range(1, 12):  # more than the host holds
        harness.job(str(number), rank=number)
    harness.run()
    told = dict(harness.state.reasons)
    assert told and all(harness.attempt(id_).state is A.QUEUED for id_ in told)
    harness.job("99", uid=1001, rank=0)
    harness.run()
    assert harness.state.reasons == told


def test_a_job_whose_user_surely_does_not_exist_is_revoked_before_a_vm_is_made() -> None:
    harness = waiting()
    harness.answer(False)
    harness.run()
    attempt = harness.attempt()
    assert attempt.state is A.REVOKING and "no user has uid 1000" in text_of(attempt.reason) and not harness.rows.vms
    (effect,) = (effect for _, effect in permitted_effects(harness.state) if effect.kind is EffectKind.REVOKE)
    assert "no user has uid 1000" in effect.text


def test_an_answer_that_is_older_than_the_job_does_not_revoke_it() -> None:
    harness = WithUsers()
    harness.template()
    harness.answer(False)
    harness.pass_time(10)
    harness.job()
    harness.settle()
    assert harness.attempt().state is A.QUEUED and set(harness.state.users_asked) == {1000}


def test_a_vm_is_not_given_up_for_a_name_service_that_is_silent_since_the_daemon_was_restarted() -> None:
    harness = waiting()
    harness.answer(True)
    harness.settle()
    (vm,) = harness.all_vms()
    harness.seen(vm.name, VmCondition.PARKED)
    harness.ended(vm.key)
    harness.run()
    assert harness.all_vms()[0].state is V.STARTING
    del harness.users[1000]
    harness.pass_time(100 * POLICY.spawn_timeout)
    harness.run()
    assert harness.all_vms()[0].state is V.STARTING
    harness.answer(True)
    harness.run()
    harness.pass_time(POLICY.spawn_timeout - 5)
    harness.run()
    assert harness.all_vms()[0].state is V.STARTING, "it could be started only from then on"
    harness.pass_time(10)
    harness.run()
    assert harness.all_vms()[0].state is V.ENDING
