"""What the users of a soak test do, with a lab that only answers; and what is found after the end of a lab."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from multiverse.api import JobView
from multiverse.client import Client
from multiverse.core.errors import Refused
from multiverse.system.processes import ProcessIdentity
from multiverse_lab.lab.layout import Layout
from multiverse_lab.lab.process import RunningDaemon
from multiverse_lab.lab.services import SERVICES
from multiverse_lab.lab.session import LabSession
from multiverse_lab.soak import hog, leftovers
from multiverse_lab.soak.incidents import Incidents
from multiverse_lab.soak.kinds import BY_NAME
from multiverse_lab.soak.plan import Submission
from multiverse_lab.soak.workload import MOST_WAITING, Workload


@dataclass
class AnsweringLab:
    """A lab whose commands do nothing. `answers` are the next results of sbatch, by default new ids."""

    answers: list[str | Exception] = field(default_factory=list)
    asked: list[tuple[str, ...]] = field(default_factory=list)
    code: int = 0
    where: Layout = field(default_factory=lambda: Layout(Path("/nowhere")))

    def submit(self, script: str, *options: str) -> str:
        self.asked.append(("sbatch", *options))
        answer = self.answers.pop(0) if self.answers else str(len(self.asked))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        self.asked.append(argv)
        return subprocess.CompletedProcess(argv, self.code)


def workload(lab: AnsweringLab) -> Workload:
    return Workload(cast("LabSession", lab), Path("/records"), asyncio.Event())


def submission(kind: str, number: int = 1) -> Submission:
    return Submission(0.0, f"soak-{number}", BY_NAME[kind], 4)


def client(*views: tuple[str, str, str]) -> Client:
    """A client that shows these jobs: (id, name, state)."""
    documents = [
        asdict(JobView(job, name, 1, 1, state, 1, 1, 1, "slim", "instant", 0.0, "", "", 0, (), ""))
        for job, name, state in views
    ]
    return cast("Client", SimpleNamespace(jobs=lambda: documents))


async def test_submissions_are_put_off_while_too_many_jobs_wait() -> None:
    users = workload(AnsweringLab())
    await users.submit_all(tuple(submission("batch", n) for n in range(40)), 0.5)
    assert len(users.jobs) == users.waiting == MOST_WAITING


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [(Refused("no such user"), "no such user"), (subprocess.TimeoutExpired("sbatch", 60), "no answer within 60 s")],
)
async def test_a_refusal_is_kept_with_its_message(answer: Exception, refusal: str) -> None:
    users = workload(AnsweringLab([answer]))
    job = await users.submit(submission("batch"))
    assert (job.job_id, job.refusal) == ("", refusal)


async def test_users_act_on_a_job_whose_submission_got_no_reply() -> None:
    lab = AnsweringLab([subprocess.TimeoutExpired("sbatch", 60)])
    users = workload(lab)
    job = await users.submit(submission("cancel queued"))
    await users.observe_and_act(client(("7", "soak-2", "queued")))
    assert job.acted is None
    await users.observe_and_act(client(("7", "soak-2", "queued"), ("8", "soak-1", "queued")))
    assert job.job_id == "8" and job.acted is not None and lab.asked[1:] == [("scancel", "8")]


@pytest.mark.parametrize(
    ("kind", "before", "state", "command"),
    [
        ("cancel created", "queued", "spawning", "scancel"),
        ("cancel running", "spawning", "allocated", "scancel"),
        ("requeued", "spawned", "allocated", "scontrol requeue"),
    ],
)
async def test_users_act_once_and_in_the_state_that_the_kind_says(
    kind: str, before: str, state: str, command: str
) -> None:
    lab = AnsweringLab(["5"])
    users = workload(lab)
    await users.submit(submission(kind))
    for seen in (before, state, state):
        await users.observe_and_act(client(("5", "soak-1", seen)))
    assert lab.asked[1:] == [(*command.split(), "5")]


async def test_what_slurm_did_not_do_is_tried_again() -> None:
    lab = AnsweringLab(["5"], code=1)
    users = workload(lab)
    job = await users.submit(submission("cancel queued"))
    await users.observe_and_act(client(("5", "soak-1", "queued")))
    assert job.acted is None
    lab.code = 0
    await users.observe_and_act(client(("5", "soak-1", "queued")))
    assert job.acted is not None and lab.asked[1:] == [("scancel", "5")] * 2


def test_services_that_ended_by_themselves_are_noted(tmp_path: Path) -> None:
    lab = AnsweringLab()
    lab.where = Layout(tmp_path)
    tmp_path.joinpath("run").mkdir()
    incidents = Incidents(cast("LabSession", lab), workload(lab), [], 0, lambda line: None)
    this = ProcessIdentity.of(os.getpid())
    for service in SERVICES[1:]:
        running = RunningDaemon(this.pid, this.started, this.boot_id, "", 0.0)
        service.record(lab.where).write_text(json.dumps(asdict(running)))
    incidents.note_deaths()
    assert [line.split()[0] for line in incidents.died] == [SERVICES[0].name]


def test_memory_is_given_back_when_others_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([1000, 700, 600])
    monkeypatch.setattr(hog, "available", lambda: next(readings))
    monkeypatch.setattr(hog.select, "select", lambda *_: ([], [], []))
    hog.main(900)
    assert list(readings) == [], "it went on with 700 MiB, and ended with 600"


def test_processes_mounts_and_directories_of_a_lab_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = Layout(tmp_path / "lab")
    where.root.mkdir()
    monkeypatch.setattr(leftovers, "LINKS", tmp_path)
    monkeypatch.setattr(leftovers, "MOUNTS", tmp_path / "mounts")
    (tmp_path / "mounts").write_text(
        f"1 2 0:3 / {where.controller} rw - ext4 /dev/loop0 rw\n4 5 0:6 / /tmp rw - tmpfs t rw\n"
    )
    (tmp_path / "mvlab1").mkdir()
    where.run.mkdir()
    with subprocess.Popen(["sh", "-c", f"read line; : {where.log}/x"], stdin=subprocess.PIPE) as process:
        found = leftovers.of_lab(where, "mvlab1")
    assert found[0].startswith(f"process {process.pid}: sh")
    assert found[1:] == [f"mount {where.controller}", "interface mvlab1", f"directory {where.run}"]
    (tmp_path / "mvlab1").rmdir()
    (tmp_path / "mounts").write_text("")
    where.run.rmdir()
    assert leftovers.of_lab(where, "mvlab1") == []
