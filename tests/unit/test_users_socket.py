"""What answers users: who asks is never what the peer says, and no question keeps it from others'."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multiverse.api import (
    LONGEST_QUESTION,
    PURPOSE,
    ExplanationsView,
    ExplanationView,
    ImageView,
    Question,
    TimelineView,
)
from multiverse.bundles.contract import Privacy
from multiverse.bundles.slurm.scheduler import _parsed
from multiverse.cli.asking import UsersClient, _address
from multiverse.cli.jobs import images
from multiverse.core.errors import Gone, MultiverseError, Refused
from multiverse.service import users_socket
from multiverse.service.backend import JobChange
from multiverse.service.explanations import Viewer
from multiverse.service.startup import bind, bind_tcp
from multiverse.service.users_socket import Pace, UserQuestions, serve_users
from tests.unit.planner_harness import ManualClock

ME = os.getuid()
VIEW = ExplanationView("7", "hello", ME, 1, "queued", 5.0, "short", "It waits.", "", 0, "", None)


IMAGE = ImageView("slim", True, 2, "Debian 12 (bookworm), without systemd; with hpcc")


class Explanations:
    """Job 7 is mine, and job 8 somebody else's."""

    def of_job(self, job: str, viewer: Viewer) -> ExplanationsView:
        owner = {"7": ME, "8": ME + 1}.get(job)
        found = owner is not None and viewer.may_see(owner)
        return ExplanationsView((replace(VIEW, job_id=job),) if found else ())

    def capacity(self, viewer: Viewer) -> Any:
        raise Refused("the scheduler is unknown", hint="see: multiverse status")

    def trial(self, request: Any, viewer: Viewer) -> Any:
        raise ValueError("a defect")


def _timelines(job: str, viewer: Viewer) -> list[TimelineView]:
    return [TimelineView("7", 1, "queued", 0.0, (), ())] if job == "7" and viewer.may_see(ME) else []


async def _change_job(change: JobChange, *, uid: int) -> None:
    if (change.job, uid) != ("7", ME):
        raise Refused(f"job {change.job} runs in no VM", hint="squeue --me shows your jobs")
    if change.hold or change.anew:
        raise Refused(f"{change.verb} and {'hold' if change.hold else 'anew'}")


class Clock(ManualClock):
    def now(self) -> float:
        return asyncio.get_running_loop().time()


def questions(tmp_path: Path) -> UserQuestions:
    backend = SimpleNamespace(
        explanations=Explanations(),
        timelines=_timelines,
        change_job=_change_job,
        saved=lambda viewer: [viewer.uid],
        images=lambda: [IMAGE],
    )
    return UserQuestions(backend, lambda uid: Privacy(others=False, hosts=False), Pace(Clock()))  # type: ignore[arg-type]


@asynccontextmanager
async def served(tmp_path: Path, credentials: Any = None) -> AsyncIterator[tuple[Path, int]]:
    path, tcp = tmp_path / "users.sock", socket.create_server(("127.0.0.1", 0))
    sock = bind(path, "socket", all_users=True)
    task = asyncio.create_task(serve_users(questions(tmp_path), sock, tcp, credentials))
    await asyncio.sleep(0)
    try:
        yield path, tcp.getsockname()[1]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def exchange(path: Path, line: bytes) -> Any:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(line)
    try:
        answer = await reader.read()
    except ConnectionError:
        answer = b""  # closed without a look at what was sent
    writer.close()
    return json.loads(answer) if answer else None


async def test_a_user_is_told_of_their_own_job_and_of_no_other(tmp_path: Path) -> None:
    async with served(tmp_path) as (path, _):
        client = UsersClient(path)
        mine = await asyncio.to_thread(client.explain, "7")
        assert mine["jobs"][0]["text"] == "It waits."
        assert (await asyncio.to_thread(client.timeline, "7"))[0]["job_id"] == "7"
        for job in ("8", "9", "8_1"):
            with pytest.raises(Gone, match=f"you have no job {job} "):
                await asyncio.to_thread(client.explain, job)
            with pytest.raises(Gone, match=f"you have no job {job} ") as gone:
                await asyncio.to_thread(client.timeline, job)
            assert "a task of an array" in gone.value.hint and "123_4" in gone.value.hint
        with pytest.raises(Refused, match="scheduler is unknown"):
            await asyncio.to_thread(client.capacity)


async def test_a_user_lists_the_images_that_a_job_may_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(tmp_path) as (path, _):
        monkeypatch.setattr("multiverse.cli.jobs.asker", lambda _: UsersClient(path))
        await asyncio.to_thread(images)
    said = " ".join(capsys.readouterr().out.split())
    assert f"slim 2 jobs get it without -C; {IMAGE.about}" in said and "sbatch -C IMAGE" in said


async def test_a_user_saves_and_resumes_their_own_job_and_no_other(tmp_path: Path) -> None:
    async with served(tmp_path) as (path, _):
        client = UsersClient(path)
        await asyncio.to_thread(client.save, "7")
        await asyncio.to_thread(client.resume, "7")
        assert await asyncio.to_thread(client.saved) == [ME]
        with pytest.raises(Refused, match="save and hold"):
            await asyncio.to_thread(lambda: client.save("7", hold=True))
        for change in (client.save, client.resume):
            with pytest.raises(Refused, match="job 8 runs in no VM"):
                await asyncio.to_thread(change, "8")
        assert (await exchange(path, b'{"ask": "save"}\n'))["status"] == 404


@pytest.mark.parametrize("job", ["", "abc", "7_", "7_[1-3]"])
def test_what_is_no_id_of_a_job_is_not_sent(tmp_path: Path, job: str) -> None:
    with pytest.raises(Refused, match="is no id of a job"):
        UsersClient(tmp_path / "nobody listens").explain(job)


async def test_all_users_may_connect_to_the_socket(tmp_path: Path) -> None:
    async with served(tmp_path) as (path, _):
        assert path.stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"no json\n",
        b"[]\n",
        b'{"ask": "jobs"}\n',
        b'{"ask": "explain", "job": "7; rm"}\n',
        b'{"ask": "explain", "job": "../8"}\n',
        b'{"ask": "explain", "job": "7", "uid": 0}\n',
        b'{"ask": "explain", "job": "8", "uid": 0}\n',
        b'{"ask": "trial", "request": {"nodes": -1}}\n',
        b"\xff\xfe\n",
    ],
)
async def test_what_is_no_question_is_refused(tmp_path: Path, line: bytes) -> None:
    async with served(tmp_path) as (path, _):
        answer = await exchange(path, line)
        assert answer["status"] == 400 and "no question" in answer["error"]


async def test_a_line_without_end_is_not_kept(tmp_path: Path) -> None:
    async with served(tmp_path) as (path, _):
        assert await exchange(path, b"x" * (4 * LONGEST_QUESTION)) is None
        assert (await exchange(path, b'{"ask": "explain", "job": "7"}\n'))["jobs"]


async def test_a_defect_is_the_answer_of_one_question_only(tmp_path: Path) -> None:
    async with served(tmp_path) as (path, _):
        answer = await exchange(path, b'{"ask": "trial", "request": {}}\n')
        assert answer["status"] == 500 and "a defect" not in json.dumps(answer)
        assert (await exchange(path, b'{"ask": "explain", "job": "7"}\n'))["jobs"]


async def test_a_silent_peer_is_closed_and_one_user_cannot_take_all_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users_socket, "PATIENCE", 0.5)
    async with served(tmp_path) as (path, _):
        silent = [await asyncio.open_unix_connection(str(path)) for _ in range(users_socket.CONNECTIONS_OF_ONE)]
        assert await exchange(path, b'{"ask": "explain", "job": "7"}\n') is None, "one more of the same user"
        assert [await reader.read() for reader, _ in silent] == [b""] * len(silent)
        assert (await exchange(path, b'{"ask": "explain", "job": "7"}\n'))["jobs"], "and then there is room again"
        for _, writer in silent:
            writer.close()


async def test_by_credential_only_what_the_credential_carries_counts(tmp_path: Path) -> None:
    class Munge:
        async def decode(self, credential: str) -> tuple[int, str]:
            if credential == "forged":
                raise Refused("the credential is not accepted: Invalid credential")
            purpose = "other" if credential == "other" else PURPOSE
            uid = ME + 1 if credential == "theirs" else ME
            return uid, json.dumps({"ask": "explain", "job": "7", "purpose": purpose})

    async def ask(port: int, document: Any) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(json.dumps(document).encode() + b"\n")
        answer = await reader.read()
        writer.close()
        return json.loads(answer)

    async with served(tmp_path, Munge()) as (_, port):
        assert (await ask(port, {"credential": "mine"}))["jobs"]
        assert (await ask(port, {"credential": "mine", "ask": "explain", "job": "8"}))["jobs"][0]["job_id"] == "7"
        assert (await ask(port, {"credential": "theirs"}))["status"] == 404
        assert "another purpose" in (await ask(port, {"credential": "other"}))["error"]
        assert "not accepted" in (await ask(port, {"credential": "forged"}))["error"]
        for nothing in ({"ask": "explain", "job": "7"}, [], "x"):
            assert "jobs" not in await ask(port, nothing)


def test_what_unmunge_prints_is_read_strictly() -> None:
    assert _parsed(0, b"UID:              1000\n\nhello\n\nUID: 0\n", b"") == (1000, "hello\n\nUID: 0\n")
    with pytest.raises(Refused, match="it was used before"):
        _parsed(17, b"UID: 0\n\nhello", b"")
    with pytest.raises(Refused, match=r"Invalid credential$"):
        _parsed(12, b"", b"unmunge: Error: Invalid credential\n")
    with pytest.raises(MultiverseError):
        _parsed(0, b"GID: 1\n\nUID: 0\n", b"")


async def test_nobody_takes_more_than_their_share_of_the_daemons_time() -> None:
    times: list[tuple[str, float]] = []

    class Steps(ManualClock):
        def now(self) -> float:
            return self.time

    clock = Steps(now=0.0)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.time += seconds

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(users_socket.asyncio, "sleep", sleep)
        pace = Pace(clock)
        for who in (1, 1, 2):
            async with pace.turn(who):
                times.append((str(who), clock.time))
                clock.time += 1.0
    assert times == [("1", 0.0), ("1", 11.0), ("2", 15.0)]


async def test_who_asks_several_questions_at_once_has_no_larger_share() -> None:
    times: list[tuple[int, float]] = []
    clock = ManualClock(now=0.0)
    rest = asyncio.sleep

    async def sleep(seconds: float) -> None:
        woken = clock.now() + seconds
        await rest(0)
        clock.time = max(clock.now(), woken)

    async def ask(pace: Pace, who: int) -> None:
        async with pace.turn(who):
            times.append((who, clock.now()))
            await rest(0)
            clock.time += 1.0

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(users_socket.asyncio, "sleep", sleep)
        pace = Pace(clock)
        await asyncio.gather(*(ask(pace, who) for who in (1, 1, 1)))
    assert [who for who, _ in times] == [1, 1, 1]
    assert all(later - sooner >= 11.0 for (_, sooner), (_, later) in itertools.pairwise(times)), times


async def test_a_change_that_waits_for_its_commit_delays_its_own_user_alone() -> None:
    committed, answered = asyncio.Event(), list[str]()
    pace = Pace(Clock())

    async def change_job(*_: JobChange, **_options: object) -> None:
        await committed.wait()
        answered.append("save")

    def saved(viewer: Viewer) -> None:
        answered.append(f"saved of {viewer.uid}")

    backend = SimpleNamespace(explanations=None, change_job=change_job, saved=saved)
    asked = UserQuestions(backend, lambda uid: Privacy(others=False, hosts=False), pace)  # type: ignore[arg-type]
    change = asyncio.create_task(asked.answer(1, Question(ask="save", job="7")))
    await asyncio.sleep(0)
    own = asyncio.create_task(asked.answer(1, Question(ask="saved")))
    await asyncio.wait_for(asked.answer(2, Question(ask="saved")), 5)
    assert answered == ["saved of 2"]
    committed.set()
    assert (await change)["job_id"] == "7"
    await own
    assert answered == ["saved of 2", "save", "saved of 1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("ctl", ("ctl", 6821)), ("ctl:99", ("ctl", 99)), ("10.0.0.1:99", ("10.0.0.1", 99)), ("[::1]:99", ("::1", 99)),
     ("[::1]", ("::1", 6821)), ("fe80::1", ("fe80::1", 6821))],
)  # fmt: skip
def test_addresses_of_controllers(text: str, expected: tuple[str, int]) -> None:
    assert _address(text) == expected


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the kernel has no IPv6")
def test_any_address_of_ipv6_takes_users_by_ipv4_too() -> None:
    with bind_tcp("::", 0, "users.listen") as listener:
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 5).close()
