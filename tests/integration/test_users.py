"""Users ask about their own jobs: by the socket of all users, and with munge credentials over TCP."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multiverse.api import PURPOSE, ExplanationsView, ExplanationView
from multiverse.bundles.slurm.scheduler import Credentials, PrivateData
from multiverse.client import Client
from multiverse.drivers.slurm.site.conf import munge_socket
from multiverse.service.explanations import Viewer
from multiverse.service.startup import bind
from multiverse.service.users_socket import Pace, UserQuestions, serve_users
from tests.integration.conftest import LabUnderTest
from tests.integration.test_jobs import ended, latest, until

pytestmark = pytest.mark.integration

NOBODY = 65534


def command(lab: LabUnderTest, uid: int, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The command line as a user. The process may read all files, because this checkout may be in a directory that the
    user cannot enter."""
    caps = "-all,+dac_read_search"
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", f"--inh-caps={caps}",
              f"--ambient-caps={caps}", f"--bounding-set={caps}", "--"]  # fmt: skip
    argv = [*become, str(Path(sys.executable).with_name("multiverse")), *words]
    return subprocess.run(argv, env=lab.env | more, cwd="/", capture_output=True, text=True, timeout=60, check=False)


_ASK = """\
import json, os, socket, sys
directory, questions = sys.argv[1], json.loads(sys.argv[2])
answers = []
for question in questions:
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(os.path.join(directory, "users.sock"))
        one.sendall(json.dumps(question).encode() + b"\\n")
        answers.append(json.loads(b"".join(iter(lambda: one.recv(65536), b""))))
with socket.socket(socket.AF_UNIX) as other:
    try:
        other.connect(os.path.join(directory, "api.sock"))
        answers.append("connected")
    except OSError as error:
        answers.append(type(error).__name__)
print(json.dumps(answers))
"""


def asked(lab: LabUnderTest, uid: int, questions: list[dict[str, Any]]) -> list[Any]:
    """What a user is answered, and what comes of a connection to the operators' socket at last. By another program than
    ours, which could ask for anything."""
    argv = ["/usr/bin/python3", "-c", _ASK, str(lab.settings.socket.parent), json.dumps(questions)]
    done = subprocess.run(argv, user=uid, group=uid, extra_groups=[], capture_output=True, text=True, check=True)
    found: list[Any] = json.loads(done.stdout)
    return found


def test_users_are_told_of_their_own_jobs_and_of_no_others(
    lab: LabUnderTest, client: Client, controller: Callable[[], int]
) -> None:
    go = lab.user.home / "told"
    job = lab.sbatch(f"until [ -e {go} ]; do sleep 0.2; done", "--output=/dev/null", "--comment=secret")
    until("it runs", lambda: latest(client, job).get("state") == "allocated")
    told = command(lab, lab.user.uid, "explain", job)
    assert told.returncode == 0 and f"job {job}" in told.stdout and "It has run for" in told.stdout
    trial = {"ask": "trial", "request": {"cpus": 1, "memory": 100}}
    questions = [{"ask": ask, "job": one} for one in (job, "999999") for ask in ("explain", "timeline")]
    for uid in (lab.other.uid, NOBODY):
        *refused, capacity, tried, api = asked(lab, uid, [*questions, {"ask": "capacity"}, trial])
        assert [one["error"] for one in refused] == [f"you have no job {one}" for one in (job, job, "999999", "999999")]
        assert capacity["sizes"] and tried["why"]
        assert api == "PermissionError", "nothing but questions can be asked by users"
    mine, *_, api = asked(lab, lab.user.uid, questions[:1])
    assert mine["jobs"][0]["job_id"] == job and api == "PermissionError"
    refused_command = command(lab, NOBODY, "explain", job, "--json")
    assert refused_command.returncode == 1 and not refused_command.stdout
    assert f"you have no job {job}" in refused_command.stderr
    assert command(lab, NOBODY, "status").returncode == 3
    go.touch()
    ended(client, job, "done")
    (over, _) = asked(lab, lab.user.uid, questions[:1])
    assert over["jobs"][0]["text"].startswith("It ended")


class _Explanations:
    def __init__(self, owner: int) -> None:
        self._owner = owner

    def of_job(self, job: str, viewer: Viewer) -> ExplanationsView:
        found = ExplanationView(job, "x", self._owner, 1, "queued", 0.0, "", "It waits.", "", 0, "", None)
        return ExplanationsView((found,) if viewer.may_see(self._owner) else ())


@asynccontextmanager
async def _serving(lab: LabUnderTest, place: Path, address: str = "127.0.0.1") -> AsyncIterator[int]:
    """What answers users of other machines, with the lab's munged."""
    tcp = socket.create_server((address, 0))
    clock = SimpleNamespace(now=asyncio.get_running_loop().time)
    backend = SimpleNamespace(explanations=_Explanations(lab.user.uid))
    questions = UserQuestions(backend, lambda uid: PrivateData(lab.where.slurm_conf).privacy(), Pace(clock))  # type: ignore[arg-type]
    sock = bind(place / "users.sock", "socket", all_users=True)
    serving = asyncio.create_task(serve_users(questions, sock, tcp, Credentials(munge_socket(lab.where.slurm_conf))))
    try:
        yield tcp.getsockname()[1]
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_a_credential_is_good_for_its_own_question_once(lab: LabUnderTest, tmp_path: Path) -> None:
    munged = lab.where.munge_socket

    def credential(payload: Any, uid: int, *options: str) -> str:
        made = subprocess.run(
            ["munge", f"--socket={munged}", *options], input=json.dumps(payload), user=uid, group=uid,
            extra_groups=[], capture_output=True, text=True, check=True,
        )  # fmt: skip
        return made.stdout.strip()

    async def ask(port: int, text: str) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(json.dumps({"credential": text, "uid": lab.user.uid}).encode() + b"\n")
        answer = json.loads(await reader.read())
        writer.close()
        return answer

    question = {"ask": "explain", "job": "7", "purpose": PURPOSE}
    async with _serving(lab, tmp_path) as port:
        good = credential(question, lab.user.uid, "--restrict-uid=0")
        assert (await ask(port, good))["jobs"][0]["text"] == "It waits."
        assert "it was used before" in (await ask(port, good))["error"]
        for uid in (lab.other.uid, NOBODY, 0):
            theirs = await ask(port, credential({**question, "uid": lab.user.uid}, uid))
            assert theirs["status"] == 400, "nobody says by themselves who they are"
            assert (await ask(port, credential(question, uid)))["status"] == 404
        other = credential({**question, "purpose": "something else"}, lab.user.uid)
        assert "another purpose" in (await ask(port, other))["error"]
        fresh = credential(question, lab.user.uid)
        broken = fresh[:-9] + ("A" if fresh[-9] != "A" else "B") + fresh[-8:]
        assert "not accepted" in (await ask(port, broken))["error"]
        assert (
            "not accepted" in (await ask(port, credential(question, lab.user.uid, f"--restrict-uid={NOBODY}")))["error"]
        )
        for nothing in ("", "MUNGE::", "MUNGE:" + "A" * 9000 + ":", "-n", "x\n0"):
            assert "jobs" not in await ask(port, nothing)
        more = {"MULTIVERSE_MUNGE_SOCKET": str(munged)}
        mine = await asyncio.to_thread(
            lambda: command(lab, lab.user.uid, "explain", "7", f"--controller=127.0.0.1:{port}", **more)
        )
        assert mine.returncode == 0 and "It waits." in mine.stdout
        theirs = await asyncio.to_thread(
            lambda: command(lab, lab.other.uid, "explain", "7", f"--controller=127.0.0.1:{port}", **more)
        )
        assert theirs.returncode == 1 and "you have no job 7" in theirs.stderr


_IN_A_GUEST = """\
ask() {{ exec 3<>/dev/tcp/{gateway}/{port}; printf '{{"credential":"%s"}}\\n' "$1" >&3; cat <&3; exec 3>&-; echo; }}
ask "$(printf %s '{question}' | munge --restrict-uid=0)"
ask "$(printf %s '{question}' | munge --restrict-uid=0 --uid=0 2> /dev/null)"
ask "no credential"
find / -xdev '(' -name 'api.sock' -o -name 'users.sock' -o -name 'multiverse.db*' ')' 2> /dev/null
echo over
"""


@pytest.mark.slow
async def test_a_job_in_a_guest_asks_as_its_user_and_as_nobody_else(
    lab: LabUnderTest, controller: Callable[[], int], tmp_path: Path
) -> None:
    gateway, question = lab.settings.network.gateway, {"ask": "explain", "job": "7", "purpose": PURPOSE}
    async with _serving(lab, tmp_path, gateway) as port:
        script = _IN_A_GUEST.format(gateway=gateway, port=port, question=json.dumps(question))
        said = {}
        for user in (lab.user, lab.other):
            out = user.home / "asked"
            path = user.home / "ask.sh"
            path.write_text(script)
            path.chmod(0o755)
            argv = ("--wait", f"--output={out}", "--partition=vm", f"--wrap=bash {path}")
            await asyncio.to_thread(lambda argv=argv, user=user: lab.run("sbatch", *argv, user=user))  # type: ignore[misc]
            said[user.uid] = [line for line in out.read_text().splitlines() if line]
    mine, as_root, nothing, over = said[lab.user.uid]
    assert json.loads(mine)["jobs"][0]["text"] == "It waits."
    assert "jobs" not in json.loads(as_root or "{}"), "munged in the guest lets no user be another"
    assert "no munge credential" in json.loads(nothing)["error"] and over == "over", "no file of the daemon is there"
    theirs = json.loads(said[lab.other.uid][0])
    assert theirs["status"] == 404 and "you have no job 7" in theirs["error"]
